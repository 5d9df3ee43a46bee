"""Early stopping: every run keeps the weights of its best epoch on a validation set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchace.lab.training.config import TrainConfig
from torchace.lab.training.run_group import RunGroup, chunk_rows
from torchace.lab.training.tasks import TASKS, mean_over_samples, partial_mixture

CHUNK = 4096  # samples predicted at once, at most


@dataclass(frozen=True)
class ValidationSet:
    """Validation samples, and epochs without improvement until a run stops."""

    split: Any  # Split, or an object with `len()`, `weight` and `chunks(size)`
    patience: int  # epochs
    members: Tensor | None = None  # (K, N): those that predict each sample; None: all


class EarlyStopping:
    """Best epoch of each run by the ensemble's validation score; `restore` loads its weights."""

    def __init__(self, network: RunGroup, validation: ValidationSet, config: TrainConfig) -> None:
        self.validation, self.config = validation, config
        self.best: list[float] = [math.inf] * network.num_runs
        self.best_epoch = [0] * network.num_runs  # 0: none
        self.weights = {name: value.detach().clone() for name, value in network.state_dict().items()}

    def update(self, network: RunGroup, epoch: int, stopped: Sequence[bool]) -> tuple[list[float | None], list[bool]]:
        """Score the runs after an epoch (from 1): scores, None for nonfinite or stopped ones, and stopped runs."""
        scores = validation_scores(network, self.validation.split, self.config, self.validation.members).tolist()
        # a stopped run must not improve later
        scores = [math.nan if done else score for score, done in zip(scores, stopped, strict=True)]
        improved = [score < best for score, best in zip(scores, self.best, strict=True)]
        for run, better in enumerate(improved):
            if better:
                self.best[run], self.best_epoch[run] = scores[run], epoch
        if any(improved):
            runs = torch.tensor(improved, device=network.step.device)
            for name, value in network.state_dict().items():
                mask = runs.repeat_interleave(network.entries_per_run(name)).view(-1, *[1] * (value.ndim - 1))
                self.weights[name] = torch.where(mask, value.detach(), self.weights[name])
        patience = self.validation.patience
        now = [done or epoch - best >= patience for done, best in zip(stopped, self.best_epoch, strict=True)]
        return [score if math.isfinite(score) else None for score in scores], now

    def restore(self, network: RunGroup) -> None:
        """Load the weights of every run's best epoch."""
        network.load_state_dict(self.weights)

    def state(self) -> dict[str, Any]:
        """Scores and epochs as JSON values."""
        return {"best": [repr(value) for value in self.best], "best_epoch": self.best_epoch}  # text: JSON has no Inf

    def load(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore `state` and the best weights."""
        self.best, self.best_epoch = [float(value) for value in state["best"]], list(state["best_epoch"])
        for name, value in self.weights.items():
            value.copy_(weights[name])


def validation_scores(network: RunGroup, split: Any, config: TrainConfig, members: Tensor | None = None) -> Tensor:
    """Each run's weighted mean cross entropy or squared error on a split, `(R,)`; see `validation_losses`."""
    return mean_over_samples(validation_losses(network, split, config, members), split.weight)


@torch.no_grad()
def validation_losses(
    network: RunGroup,
    split: Any,
    config: TrainConfig,
    members: Tensor | None = None,
    temperature: Sequence[float] | None = None,
) -> Tensor:
    """Each run's cross entropy or squared error on every sample of a split, `(R, N)`.

    `members` is as in `ValidationSet`; `temperature` divides the logits of each run.
    """
    training = network.training
    network.eval()
    count = network.num_runs * network.num_members
    rows = chunk_rows(network, count, itemsize=config.dtype.itemsize, max_rows=CHUNK)
    task, losses, done = TASKS[config.task], [], 0
    for x, y in split.chunks(rows):
        logits = network.predict(x).to(config.dtype)
        if temperature is not None:
            logits = logits / logits.new_tensor(temperature).view(-1, 1, 1, 1)
        if members is None:
            losses.append(task.scores(logits, y))
        else:
            mixture = partial_mixture(logits, members[:, done : done + len(y)], config)
            losses.append(task.mixture_scores(mixture, y.expand(len(logits), *y.shape)))
        done += len(y)
    network.train(training)
    return torch.cat(losses, 1)
