"""For users of transformers: its Trainer on an ensemble, which `stack_classifiers` makes of any classifier there.

`ACETrainer` is `ACETrainerMixin` before `transformers.Trainer`; the mixin goes before a Trainer of your own as well.
transformers itself is imported when `ACETrainer` is first asked for.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchace.functional import ensemble_log_probs, ensemble_probs
from torchace.functional._members import compute_dtype
from torchace.nn.base import EnsembleModule
from torchace.nn.conversion import StackedClassifiers
from torchace.nn.loss_registry import LOSSES, MemberLoss, check_pair, share_member_weights
from torchace.nn.losses import AmendedCrossEntropyLoss

__all__ = ["ACETrainer", "ACETrainerMixin"]


class ACETrainerMixin:
    """Makes a Trainer of transformers train an ensemble with one of the library's losses.

    The model is an ensemble module that takes the batch's inputs by name: what `stack_classifiers` gives for any
    sequence or image classifier. Labels go to the loss, not to the model. In evaluation

    - predictions are the logarithms of the ensemble's probabilities, `(N, C)` (the Trainer joins batches along the
      first axis, which the members' cannot be); for `link="identity"` the ensemble's predictions;
    - `eval_loss` is the ensemble's own cross entropy (mean squared error), by which the best model may be chosen: the
      loss that is trained is unbounded below and not a score;
    - the scores of the ensemble and its members are among the metrics: `eval_accuracy`, `eval_member_accuracy`,
      `eval_disagreement`, ... With several processes, samples that fill up the last batch count twice in these.

    λ is logged as `diversity` beside the loss. The Trainer's checkpoints hold the ensemble's weights as safetensors and
    training resumes from them; `save_model` and `load_weights` keep λ and the member weights too.

    Args:
        *args: The Trainer's.
        diversity: λ, for the loss that suits the ensemble's link; or give `loss`.
        loss: `AmendedCrossEntropyLoss`, `BinaryAmendedCrossEntropyLoss` or `NegativeCorrelationLoss`. Its member
            weights become the ensemble's, unless that has its own.
        **kwargs: The Trainer's.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> from torchace.transformers import ACETrainer
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> ensemble = stack_classifiers(BertForSequenceClassification(config), num_members=5)
        >>> data = [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4, 5, 6], "labels": 1}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, report_to="none", disable_tqdm=True, use_cpu=True)
        ...     trainer = ACETrainer(ensemble, args, train_dataset=data, diversity=0.5)
        >>> trainer.predict(data).predictions.shape  # log-probabilities of the ensemble
        (2, 2)
    """

    # Newer Trainers ask: no, the loss is the mean of the batch at hand; divide it by the number of batches accumulated.
    loss_is_scaled_for_ga = False

    args: Any
    accelerator: Any
    model: Any
    label_names: list[str]

    def __init__(
        self, *args: Any, diversity: float | Tensor | None = None, loss: MemberLoss | None = None, **kwargs: Any
    ) -> None:
        if (diversity is None) == (loss is None):
            raise TypeError("Expected one of `diversity` and `loss`. Write ACETrainer(model, args, diversity=0.5).")
        _check_arguments(kwargs.get("args", args[1] if len(args) > 1 else None), kwargs)
        super().__init__(*args, **kwargs)
        ensemble = self._ensemble()
        if loss is None:
            assert diversity is not None
            loss = LOSSES[getattr(ensemble, "link", "softmax")](diversity)
        check_pair(ensemble, loss)
        share_member_weights(ensemble, loss)
        self.ace_loss: MemberLoss = loss.to(self.args.device)
        self._scores: Any = None
        # The Trainer asks the signature of the model's forward, and an ensemble's says nothing of its host's inputs.
        self.model_accepts_loss_kwargs = False
        if self.args.label_names is None:
            self.label_names = ["labels"]
        if len(self.label_names) != 1:
            raise ValueError(f"Expected one name in `label_names`, but got {self.label_names}.")
        if isinstance(ensemble, StackedClassifiers):
            columns = inspect.signature(ensemble.host.forward).parameters
            self._signature_columns = list(dict.fromkeys([*columns, "label", "label_ids", *self.label_names]))
        else:
            self.args.remove_unused_columns = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch; with `return_outputs` also `{"logits": ...}`, the ensemble's log-probabilities."""
        inputs, target = self._parted(inputs)
        if target is None:
            raise ValueError(
                f"Expected labels under {self.label_names[0]!r} in a batch, but it has {', '.join(inputs)}. "
                "Name them with TrainingArguments(label_names=[...])."
            )
        logits = model(**inputs)  # (K, N, C)
        loss = self.ace_loss(logits, self._fitting(target, logits))
        return (loss, {"logits": self._predicted(logits)}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor | None, Tensor | None]:
        """The ensemble's log-probabilities `(N, C)` and the labels; the scores of all batches come at the end."""
        inputs, target = self._parted(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            logits = model(**inputs)
            if target is not None and self._scores is not None:
                weights = self._ensemble().member_weights
                self._scores.update(logits, self._fitting(target, logits), member_weights=weights)
            return (None, None, None) if prediction_loss_only else (None, self._predicted(logits), target)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, with the scores of the ensemble and its members added to the metrics."""
        from torchace.metrics.task_metrics import TaskMetrics  # here: torchmetrics takes seconds to import

        ensemble = self._ensemble()
        ignore_index = getattr(self.ace_loss, "ignore_index", -100)
        self._scores = TaskMetrics(ensemble.num_members, ensemble.link, ignore_index=ignore_index)
        try:
            output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
            prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
            scores = {name: value.item() for name, value in self._scores.compute().items()}
            if scores:
                scores["loss"] = scores["mean_squared_error" if ensemble.link == "identity" else "cross_entropy"]
                for name, value in scores.items():
                    output.metrics.setdefault(f"{prefix}_{name}", value)  # a user's own metric stays
        finally:
            self._scores = None
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with λ beside the training loss."""
        if "loss" in logs:
            logs["diversity"] = float(self.ace_loss.diversity)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _ensemble(self) -> EnsembleModule:
        return self.accelerator.unwrap_model(self.model)

    def _parted(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """A batch without its labels, and the labels."""
        inputs = dict(inputs)
        target = inputs.pop(self.label_names[0], None)
        return inputs, target

    def _fitting(self, target: Tensor, logits: Tensor) -> Tensor:
        """Labels as the loss takes them: those of outputs as numbers, with an axis for a single output."""
        if isinstance(self.ace_loss, AmendedCrossEntropyLoss) or target.numel() != logits[0].numel():
            return target
        return target.to(compute_dtype(logits)).reshape(logits.shape[1:])

    def _predicted(self, logits: Tensor) -> Tensor:
        ensemble = self._ensemble()
        predict = ensemble_probs if ensemble.link == "identity" else ensemble_log_probs
        return predict(logits.detach(), member_weights=ensemble.member_weights, link=ensemble.link)


def _check_arguments(arguments: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what the Trainer would do otherwise, or silently not at all."""
    if kwargs.get("compute_loss_func") is not None:
        raise ValueError("Expected no `compute_loss_func`: the loss is `diversity` or `loss`.")
    if arguments is None:
        return
    if arguments.label_smoothing_factor:
        raise ValueError(
            f"Expected no label_smoothing_factor, but got {arguments.label_smoothing_factor}. "
            "Give it to the loss: AmendedCrossEntropyLoss(diversity, label_smoothing=...)."
        )
    if arguments.gradient_checkpointing:
        raise ValueError(
            "Expected no gradient_checkpointing, which the Trainer would switch on in the ensemble. Switch it on in "
            "the model before it is stacked: model.gradient_checkpointing_enable()."
        )
    if arguments.neftune_noise_alpha is not None:
        raise ValueError(
            "Expected no neftune_noise_alpha, which an ensemble has no embeddings for, but got "
            f"{arguments.neftune_noise_alpha}."
        )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"Expected one device a process, but this one has {arguments.n_gpu}, whose outputs the Trainer would join "
            "along the member axis. Start one process a device (torchrun), or set CUDA_VISIBLE_DEVICES."
        )


if TYPE_CHECKING:
    from transformers import Trainer

    class ACETrainer(ACETrainerMixin, Trainer):  # type: ignore[misc]
        """`transformers.Trainer` for ensembles; see `ACETrainerMixin`."""


def __getattr__(name: str) -> Any:
    if name != "ACETrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401  # what the Trainer needs and transformers does not bring
        from transformers import Trainer
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "accelerate"):
            raise
        raise ImportError(f"torchace.transformers needs {error.name}: pip install 'torchace[transformers]'.") from error
    doc = "`transformers.Trainer` for ensembles; see `ACETrainerMixin`."
    made = type(name, (ACETrainerMixin, Trainer), {"__doc__": doc, "__module__": __name__})
    globals()[name] = made
    return made
