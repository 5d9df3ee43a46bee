"""Lightning: a module that trains any ensemble with any loss of the library, and a schedule for λ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchace import _checks
from torchace._extras import missing_extra
from torchace.metrics.ensemble import TaskMetrics
from torchace.nn.base import EnsembleModule
from torchace.nn.losses import MemberLoss, attach_loss

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # `lightning` and `pytorch_lightning` refuse each other's modules: use the imported one.
    try:
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback, LightningModule, Trainer
        else:
            from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("lightning", "pytorch_lightning")):
            raise
        raise missing_extra("torchace.lightning needs Lightning", "lightning") from error

__all__ = ["ACEModule", "DiversitySchedule"]

TARGETS = ("labels", "label", "target", "targets", "y")
INTERVALS = ("epoch", "step")
PROGRESS_BAR = ("accuracy", "cross_entropy", "mean_squared_error")


class ACEModule(LightningModule):
    """Train an ensemble with one of the library's losses and log its scores.

    Each epoch logs the scores of each split (`train`, `val`, `test`; `val_1`, ... for further loaders): `val_accuracy`,
    `val_cross_entropy`, `val_member_accuracy`, `val_member_accuracy_0`, `val_disagreement`, ...; for regression
    `val_mean_squared_error`, ... Each step logs `train_loss` and λ as `diversity`. Monitor `val_cross_entropy` (or
    `val_mean_squared_error`), not the loss, which is unbounded below.

    A batch is `(input, ..., target)`, or a dictionary with the target under `labels`, `label`, `target`, `targets` or
    `y`; for others, override `split_batch`. Predictions are the ensemble's probabilities `(N, C)`.

    Checkpoints hold the weights, λ and member weights, but no modules:
    `ACEModule.load_from_checkpoint(path, ensemble=..., loss=..., optimizer_factory=...)`.

    Args:
        ensemble: Any ensemble module of the library.
        loss: `AmendedCrossEntropyLoss`, `BinaryAmendedCrossEntropyLoss` or `NegativeCorrelationLoss`; it holds λ. Its
            member weights become the ensemble's, unless that has its own.
        optimizer_factory: Returns the optimizer of the ensemble's parameters.
        scheduler_factory: Returns a learning rate scheduler of the optimizer, or Lightning's dictionary.
        scheduler_interval: Whether the scheduler steps each `"epoch"` or each `"step"`.
        monitor: The score for a scheduler such as `ReduceLROnPlateau`.
        train_scores: Whether to log scores of the training batches, with dropout and augmentation.
        hyperparameters: Further hyperparameters for loggers and checkpoints.

    Example:
        >>> from functools import partial
        >>> from torchace.lightning import ACEModule
        >>> ensemble = ace.StackedEnsemble([ace.mlp(4, 8, 3) for _ in range(5)])
        >>> module = ACEModule(ensemble, AmendedCrossEntropyLoss(0.5), partial(torch.optim.Adam, lr=1e-3))
        >>> module(torch.zeros(2, 4)).shape
        torch.Size([5, 2, 3])
        >>> module.hparams["diversity"], module.hparams["num_members"]
        (0.5, 5)
    """

    def __init__(
        self,
        ensemble: EnsembleModule,
        loss: MemberLoss,
        optimizer_factory: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        scheduler_factory: Callable[[Optimizer], Any] | None = None,
        scheduler_interval: str = "epoch",
        monitor: str | None = None,
        train_scores: bool = True,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        attach_loss(ensemble, loss)
        _checks.check_choice(scheduler_interval, "scheduler_interval", INTERVALS)
        self.ensemble = ensemble
        self.loss = loss
        self.optimizer_factory = optimizer_factory
        self.scheduler_factory = scheduler_factory
        self.scheduler_interval = scheduler_interval
        self.monitor = monitor or f"val_{loss.score}"
        self.train_scores = train_scores
        self._metrics: dict[str, TaskMetrics] = {}  # by split
        known = {
            "diversity": float(loss.diversity),
            "num_members": ensemble.num_members,
            "link": ensemble.link,
            "ensemble_type": type(ensemble).__name__,
            "loss_type": type(loss).__name__,
        }
        self.save_hyperparameters({**known, **(hyperparameters or {})})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the members' logits, `(K, N, C, ...)`."""
        return self.ensemble(*args, **kwargs)

    def split_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
        """Split a batch into positional inputs, named inputs and the target; None if it has no target."""
        if isinstance(batch, Tensor):
            return (batch,), {}, None
        if isinstance(batch, Mapping):
            inputs = dict(batch)
            target_names = [name for name in TARGETS if name in inputs]
            return (), inputs, inputs.pop(target_names[0]) if target_names else None
        if isinstance(batch, Sequence) and batch:
            return (tuple(batch[:-1]), {}, batch[-1]) if len(batch) > 1 else (tuple(batch), {}, None)
        raise TypeError(
            f"Expected a batch (input, ..., target) or a dictionary, but got {type(batch).__name__}. "
            "Override ACEModule.split_batch for batches of another kind."
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        logits, target = self._logits_and_target(batch)
        loss = self.loss(logits, target)
        if self.train_scores:
            self._update("train", logits, target)
        held = self.loss.diversity
        diversity = held.detach().clone() if isinstance(held, Tensor) else float(held)
        size = logits.shape[1]
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=size)
        self.log("diversity", diversity, on_step=True, on_epoch=False, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the scores of `val`."""
        self._update(f"val_{dataloader_idx}" if dataloader_idx else "val", *self._logits_and_target(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the scores of `test`."""
        self._update(f"test_{dataloader_idx}" if dataloader_idx else "test", *self._logits_and_target(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the ensemble's probabilities, `(N, C, ...)`, or its predictions for regression."""
        args, kwargs, _ = self.split_batch(batch)
        predict = self.ensemble.predict if self.ensemble.link == "identity" else self.ensemble.predict_proba
        return predict(*args, **kwargs)

    def on_train_epoch_end(self) -> None:
        """Log the training scores."""
        self._log_scores("train")

    def on_validation_epoch_end(self) -> None:
        """Log the validation scores."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log the test scores."""
        self._log_scores("test")

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the scheduler if there is one."""
        optimizer = self.optimizer_factory(self.ensemble.parameters())
        if self.scheduler_factory is None:
            return optimizer
        scheduler = self.scheduler_factory(optimizer)
        options = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
        defaults = {"interval": self.scheduler_interval, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": {**defaults, **options}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save λ."""
        checkpoint["torchace"] = {"diversity": float(self.loss.diversity)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore λ."""
        if "torchace" in checkpoint:  # not in one whose weights were made elsewhere
            self.loss.set_diversity(checkpoint["torchace"]["diversity"])

    def _logits_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        args, kwargs, target = self.split_batch(batch)
        if target is None:
            raise ValueError(
                f"Expected a batch (input, ..., target), or a dictionary with one of {', '.join(TARGETS)}, but found "
                "no target. Override ACEModule.split_batch for batches of another kind."
            )
        return self.ensemble(*args, **kwargs), target

    def _update(self, split: str, logits: Tensor, target: Tensor) -> None:
        if split not in self._metrics:
            self._metrics[split] = TaskMetrics.of_loss(self.ensemble, self.loss)
        self._metrics[split].update(logits, target, member_weights=self.ensemble.member_weights)

    def _log_scores(self, name: str) -> None:
        for split, metrics in self._metrics.items():
            if split.split("_")[0] == name:
                for score, value in metrics.compute().items():
                    # sync_dist avoids a warning: the processes' values are equal already
                    bar = name == "val" and score in PROGRESS_BAR
                    self.log(f"{split}_{score}", value, sync_dist=True, prog_bar=bar)
                metrics.reset()


class DiversitySchedule(Callback):
    """Set λ of the module's loss during training: constant, with a linear warm-up, or any function of time.

    λ depends only on the current epoch or step, counted from 0, so that a resumed training continues the schedule. It
    is logged as `diversity`. Works with any Lightning module that holds one of the library's losses.

    Args:
        diversity: λ, or a function that returns it for an epoch (or step).
        start: λ at the start of a warm-up.
        warmup: The number of epochs (or steps) in which λ goes linearly from `start` to `diversity`.
        interval: Whether time is counted in `"epoch"` or `"step"` (of the optimizer).

    Example:
        >>> from torchace.lightning import DiversitySchedule
        >>> schedule = DiversitySchedule(0.8, warmup=4)
        >>> [schedule.at(epoch) for epoch in range(6)]
        [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 0.8]
        >>> DiversitySchedule(lambda step: 0.9 if step >= 100 else 0.0, interval="step").at(100)
        0.9
    """

    def __init__(
        self, diversity: float | Callable[[int], float], *, start: float = 0.0, warmup: int = 0, interval: str = "epoch"
    ) -> None:
        _checks.check_count(warmup, "warmup", least=0)
        _checks.check_choice(interval, "interval", INTERVALS)
        _checks.check_diversity(start)
        if callable(diversity) and (warmup or start):
            raise ValueError("Expected no `warmup` or `start` with a function; let the function return them.")
        if start and not warmup:
            raise ValueError(f"Expected a `warmup` with start={start}, but got none. Give warmup=...")
        if not callable(diversity):
            _checks.check_diversity(diversity)
        self.diversity, self.start, self.warmup, self.interval = diversity, start, warmup, interval

    def at(self, time: int) -> float:
        """Return λ in an epoch, or at a step."""
        if callable(self.diversity):
            return float(self.diversity(time))
        share = min(1.0, time / self.warmup) if self.warmup else 1.0
        return (1 - share) * self.start + share * self.diversity

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set λ before each step."""
        losses = [part for part in pl_module.modules() if isinstance(part, MemberLoss)]
        if not losses:
            raise ValueError(
                f"Expected {type(pl_module).__name__} to hold one of the library's losses, but found none. "
                "Make it an attribute: self.loss = AmendedCrossEntropyLoss(diversity)."
            )
        value = self.at(trainer.current_epoch if self.interval == "epoch" else trainer.global_step)
        for loss in losses:
            loss.set_diversity(value)
        if not isinstance(pl_module, ACEModule):  # which logs λ itself
            pl_module.log("diversity", value, on_step=True, on_epoch=False, batch_size=1)
