"""transformers: its Trainer for ensembles, such as those of `stack_classifiers` and `adapt`.

transformers is imported when `ACETrainer` is first used.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchace._extras import missing_extra
from torchace.functional import ensemble_log_probs, ensemble_probs
from torchace.nn.base import EnsembleModule
from torchace.nn.conversion import StackedClassifiers
from torchace.nn.losses import DEFAULT_LOSSES, MemberLoss, attach_loss
from torchace.nn.stacked import StackedEnsemble

__all__ = ["ACETrainer", "ACETrainerMixin"]


class ACETrainerMixin:
    """Make a Trainer of transformers train an ensemble with one of the library's losses.

    `ACETrainer` is this mixin before `transformers.Trainer`; put it before your own Trainer likewise. The model is
    an ensemble that takes the batch's inputs by name, such as that of `stack_classifiers` or `adapt`. Labels go to the
    loss, not to the model; a causal language model predicts the next token's. In evaluation:

    - Predictions are the ensemble's log-probabilities, `(N, C)`, `(N, T, C)` for tokens; for `link="identity"` its
      predictions.
    - `eval_loss` is the ensemble's cross entropy (mean squared error), which may select the best model: the training
      loss is unbounded below.
    - The metrics include scores of the ensemble and its members: `eval_accuracy`, `eval_member_accuracy`,
      `eval_disagreement`, ... With several processes, samples that pad the last batch count twice in these.

    λ is logged as `diversity`. Checkpoints hold the weights and member weights as safetensors, and training resumes
    from them; `save_model` also saves λ.

    Args:
        *args: Arguments of the Trainer.
        diversity: λ, for the loss that suits the ensemble's link; or give `loss`.
        loss: `AmendedCrossEntropyLoss`, `BinaryAmendedCrossEntropyLoss` or `NegativeCorrelationLoss`. Its member
            weights become the ensemble's, unless that has its own.
        **kwargs: Arguments of the Trainer.

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

    # Newer Trainers read this: the loss is a mean over one batch, to be divided by the accumulation steps.
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
            loss = DEFAULT_LOSSES[getattr(ensemble, "link", "softmax")](diversity)
        attach_loss(ensemble, loss)
        self.ace_loss: MemberLoss = loss.to(self.args.device)
        self._metrics: Any = None
        # the Trainer would read these from the signature of the ensemble's forward
        self.model_accepts_loss_kwargs = False
        if self.args.label_names is None:
            self.label_names = ["labels"]
        if len(self.label_names) != 1:
            raise ValueError(f"Expected one name in `label_names`, but got {self.label_names}.")
        network = None  # the model of transformers inside the ensemble
        if isinstance(ensemble, StackedClassifiers | StackedEnsemble):
            network = ensemble.host if isinstance(ensemble, StackedClassifiers) else ensemble.stacked
        self._is_causal = network is not None and _is_causal_model(network)
        if network is not None:
            columns = inspect.signature(network.forward).parameters
            self._signature_columns = list(dict.fromkeys([*columns, "label", "label_ids", *self.label_names]))
        else:
            self.args.remove_unused_columns = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch; with `return_outputs` also the log-probabilities as `{"logits": ...}`."""
        inputs, target = self._split_inputs(inputs)
        if target is None:
            raise ValueError(
                f"Expected labels under {self.label_names[0]!r} in a batch, but it has {', '.join(inputs)}. "
                "Name them with TrainingArguments(label_names=[...])."
            )
        logits = model(**inputs)
        loss = self.ace_loss(*self._align(logits, target))
        return (loss, {"logits": self._predictions(logits)}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, Tensor | None, Tensor | None]:
        """Return the ensemble's log-probabilities and the labels; `evaluation_loop` adds the scores."""
        inputs, target = self._split_inputs(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            logits = model(**inputs)
            if target is not None and self._metrics is not None:
                self._metrics.update(*self._align(logits, target), member_weights=self._ensemble().member_weights)
            return (None, None, None) if prediction_loss_only else (None, self._predictions(logits), target)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's loop and add the scores of the ensemble and its members to the metrics."""
        from torchace.metrics.ensemble import TaskMetrics  # lazy: slow to import

        self._metrics = TaskMetrics.of_loss(self._ensemble(), self.ace_loss)
        try:
            output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
            scores = {name: value.item() for name, value in self._metrics.compute().items()}
        finally:
            self._metrics = None
        if scores:
            scores["loss"] = scores[self.ace_loss.score]
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        for name, value in scores.items():
            output.metrics.setdefault(f"{prefix}_{name}", value)  # the user's metrics take precedence
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with λ beside the training loss."""
        if "loss" in logs:
            logs["diversity"] = float(self.ace_loss.diversity)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as the Trainer does, with copies of tied weights: safetensors refuses tensors that share memory."""
        seen: set[int] = set()
        separate = {}
        for name, tensor in (self.model.state_dict() if state_dict is None else state_dict).items():
            separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
        super()._save(output_dir, separate)  # type: ignore[misc]

    def _ensemble(self) -> EnsembleModule:
        return self.accelerator.unwrap_model(self.model)

    def _split_inputs(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """Return the model's inputs and the labels."""
        inputs = dict(inputs)
        target = inputs.pop(self.label_names[0], None)
        return inputs, target

    def _align(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and target for the loss; of a causal model, without the last logits and the first label."""
        if self._is_causal:
            return logits[..., :-1], target[:, 1:]
        return logits, self._as_loss_target(target, logits)

    def _as_loss_target(self, target: Tensor, logits: Tensor) -> Tensor:
        """Convert labels to floating-point numbers, with an axis for a single output."""
        if self.ace_loss.link == "softmax" or target.numel() != logits[0].numel():
            return target
        return target.to(torch.promote_types(logits.dtype, torch.float32)).reshape(logits.shape[1:])

    def _predictions(self, logits: Tensor) -> Tensor:
        ensemble = self._ensemble()
        predict = ensemble_probs if ensemble.link == "identity" else ensemble_log_probs
        predictions = predict(logits.detach(), member_weights=ensemble.member_weights, link=ensemble.link)
        return predictions if predictions.ndim < 3 else predictions.movedim(1, -1)


def _is_causal_model(network: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(network).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _check_arguments(arguments: Any, kwargs: dict[str, Any]) -> None:
    """Refuse options of the Trainer that do not work on ensembles."""
    if kwargs.get("compute_loss_func") is not None:
        raise ValueError("Expected no `compute_loss_func`. Set the loss with `diversity` or `loss`.")
    if arguments is None:
        return
    refused = {
        "label_smoothing_factor": "Give it to the loss: AmendedCrossEntropyLoss(diversity, label_smoothing=...).",
        "gradient_checkpointing": "Switch it on in the model before it is stacked: "
        "model.gradient_checkpointing_enable().",
        "neftune_noise_alpha": "An ensemble has no embeddings to add noise to.",
    }
    for name, advice in refused.items():
        if value := getattr(arguments, name):
            raise ValueError(f"Expected no {name}, but got {value}. {advice}")
    if arguments.n_gpu > 1:
        raise ValueError(
            f"Expected one device per process, but this one has {arguments.n_gpu}, whose outputs the Trainer would "
            "concatenate along the member axis. Start one process for each (torchrun), or set CUDA_VISIBLE_DEVICES."
        )


if TYPE_CHECKING:
    from transformers import Trainer

    class ACETrainer(ACETrainerMixin, Trainer):  # type: ignore[misc]
        """`transformers.Trainer` for ensembles; see `ACETrainerMixin`."""


def __getattr__(name: str) -> Any:
    if name != "ACETrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401  # the Trainer needs it
        from transformers import Trainer
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "accelerate"):
            raise
        raise missing_extra(f"torchace.transformers needs {error.name}", "transformers") from error
    doc = "`transformers.Trainer` for ensembles; see `ACETrainerMixin`."
    trainer = type(name, (ACETrainerMixin, Trainer), {"__doc__": doc, "__module__": __name__})
    globals()[name] = trainer
    return trainer
