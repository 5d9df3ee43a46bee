"""Common base of `ACEClassifier` and `NCLRegressor`: parameters, training, prediction."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from joblib import effective_n_jobs
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted
from torch import Tensor, nn

from torchace._checks import check_choice, check_count
from torchace.lab.data import Split, hashed_key
from torchace.lab.data.errors import quote
from torchace.lab.data.folds import MIN_FOLD_ROWS, NUM_FOLDS, assign_folds, hold_out, number_blocks
from torchace.lab.data.table_schema import Target
from torchace.lab.estimator.fitted import FittedEstimator, TrainingState, load_estimator, save_estimator
from torchace.lab.estimator.importances import permutation_importances
from torchace.lab.estimator.inputs import learn_inputs, precision_of, raw_matrix, read_inputs, target_names
from torchace.lab.estimator.intervals import residuals_by_fold
from torchace.lab.estimator.search import search_diversity
from torchace.lab.schema.hyperparameters import Hyperparameters, check_hyperparameters, to_python
from torchace.lab.tables.model import TableModel
from torchace.lab.tables.training import FittedEnsemble, fit_ensemble
from torchace.lab.training.config import make_optimizer, resolve_device
from torchace.lab.training.loop import Progress
from torchace.lab.training.members import MemberPlan, new_run_group
from torchace.lab.training.run_group import chunk_rows, collect_chunks
from torchace.lab.training.scaling import Scaler

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


STOPPING = (True, False, "auto", "folds")
ENCODE_ROWS = 65_536  # encoded at once


@dataclass(eq=False, repr=False)
class Estimator(FittedEstimator):
    """Common base of the estimators; the fields are their parameters."""

    num_members: int = 10
    _: KW_ONLY
    members: str = "separate"
    hidden: int | tuple[int, ...] = (64,)
    diversity: float | str = "auto"
    encoding: str = "auto"
    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    schedule: str | None = None
    batches: str = "shared"
    early_stopping: bool | str = "auto"
    validation_fraction: float = 0.2
    patience: int = 10
    network: Callable[[int, int], nn.Module] | None = None
    callbacks: Sequence[Callable[[dict[str, Any]], None]] | None = None
    verbose: int = 0
    random_state: Any = None
    device: str = "auto"
    n_jobs: int | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # -- training -----------------------------------------------------------------------------------------------------

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> Self:
        """Train the members.

        Args:
            X: Samples `(N, D)`: numbers, or a DataFrame with numbers, categories and dates. NaN is a missing value.
                float64 is trained in float64.
            y: Targets `(N,)`.
            sample_weight: Weight of each sample, `(N,)`; 0 leaves it out.
            groups: Labels `(N,)`; folds and hold-outs split no group of samples, such as the visits of one patient.
        """
        with self._replace_when_done() as new:
            new._fit(X, y, sample_weight, groups)
        return self

    @contextmanager
    def _replace_when_done(self) -> Iterator[Self]:
        """Yield a copy to train; adopt its attributes unless an error is raised."""
        new = copy.copy(self)
        yield new
        self.__dict__ = new.__dict__

    def _fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, groups: ArrayLike | None) -> None:
        plan = self._plan()
        table, y = self._validate(X, y, reset=True)
        check_consistent_length(y, groups)
        self._learn_targets(y)
        weight = self._sample_weight(table, y, sample_weight)
        self._learn_scales(table, y, weight)
        plan, seed = replace(plan, precision=precision_of(table), task=self._task), _draw_seed(self.random_state)
        samples, used = self._samples(table, y, weight, plan)
        if self.early_stopping == "auto" and len(samples) < MIN_FOLD_ROWS:
            plan = replace(plan, patience=None)
        with self._threads():
            blocks, is_auto = None, self.diversity == "auto"
            if plan.patience is not None or (is_auto and len(samples) >= MIN_FOLD_ROWS):
                groups = None if groups is None else np.asarray(groups)[used]
                blocks = number_blocks(raw_matrix(self._encoding, table[used]), weight=samples.weight, groups=groups)
            self.tuning_, self.diversity_ = None, 0.0 if is_auto else float(self.diversity)
            fitted = self._train(plan, seed, **self._stopping(plan, samples, blocks, seed), scored=is_auto)
            if is_auto:
                self.tuning_ = search_diversity(self, plan, samples, blocks, seed, fitted.scores)
                if self.verbose:
                    print(self.tuning_.sentence)
                if self.tuning_.diversity > 0:
                    self.diversity_ = self.tuning_.diversity
                    fitted = self._train(plan, seed, **self._stopping(plan, samples, blocks, seed))
        self.history_ = [_history_entry(**epoch) for epoch in fitted.trained.fitted.history]
        self.oof_predictions_, self._residuals, held_out = None, None, fitted.held_out
        if held_out is not None and held_out.folds is not None:
            self.oof_predictions_ = self._squeeze(held_out.expand(used))
        if held_out is not None and self._task == "regression":
            folds = None if held_out.folds is None else held_out.folds[held_out.rows]
            self._residuals = residuals_by_fold(held_out.errors, folds, held_out.weight)
        self._state = TrainingState(seed, plan).add(samples)

    def _stopping(self, plan: MemberPlan, samples: Split, blocks: Tensor | None, seed: int) -> dict[str, Any]:
        """Samples to train on, and those that stop the training: arguments of `fit_ensemble`."""
        if plan.patience is None or blocks is None:
            return {"samples": samples}
        if self.early_stopping == "folds" and len(samples) < NUM_FOLDS:
            raise ValueError(
                f"Expected at least {NUM_FOLDS} samples for early_stopping='folds', but got n_samples={len(samples)}. "
                "Give more, or use early_stopping=False."
            )
        # λ > 0 fits the ensemble as a whole, and a fifth of the members says little about it
        on_folds = self.early_stopping == "folds" or (self.early_stopping == "auto" and self.diversity_ == 0)
        options: dict[str, Any] = {}
        if not on_folds or plan.has_shared_weights:  # every sample of a fold trains the shared weights
            key = hashed_key(seed, "hold-out")
            mask = hold_out(blocks, samples.y, self.validation_fraction, seed=key, weight=samples.weight)
            options |= {"validation": samples.take(mask), "refit": samples if self.early_stopping == "auto" else None}
            samples, blocks = samples.take(~mask), blocks[~mask]
        if on_folds:
            options |= {"folds": assign_folds(blocks, samples.y, seed=seed, weight=samples.weight), "refit": None}
        return {**options, "samples": samples}

    def _partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, classes: ArrayLike | None = None
    ) -> None:
        """Train one epoch; the samples of the first call determine the encoding."""
        first = not hasattr(self, "_state")
        if first and hasattr(self, "ensemble_"):
            raise ValueError("A loaded model cannot be trained further; call fit to train it from the start.")
        table, y = self._validate(X, y, reset=first)
        if first:
            self._learn_targets(y if classes is None else np.asarray(classes))
        elif classes is not None and not np.array_equal(self.classes_, np.unique(np.asarray(classes))):
            raise ValueError(f"Expected the `classes` of the first call, {self.classes_}, but got {classes!r}.")
        weight = self._sample_weight(table, y, sample_weight)
        if first:
            plan = replace(self._plan(), precision=precision_of(table))
            self._state = TrainingState(_draw_seed(self.random_state), plan)
            self.tuning_, self.history_ = None, []
            self.diversity_ = 0.0 if self.diversity == "auto" else float(self.diversity)
            self.oof_predictions_, self._residuals = None, None
            self._learn_scales(table, y, weight)
            shape = (self._encoding.num_features, self._num_outputs)
            self._network = new_run_group(plan, *shape, [self._state.seed], [self.diversity_])
        plan = replace(self._state.plan, epochs=1, schedule="constant", patience=None)
        samples, _ = self._samples(table, y, weight, plan)
        state = self._state.add(samples)
        mean_weight = state.weight / state.samples
        if samples.weight is None and mean_weight != 1:  # earlier samples had weights
            samples = replace(samples, weight=torch.ones_like(samples.x[:, 0]))
        network = copy.deepcopy(self._network).to(samples.x.device)
        optimizer = make_optimizer(plan.train_config(len(samples)), list(network.parameters()))
        if state.optimizer is not None:
            optimizer.load_state_dict(copy.deepcopy(state.optimizer))  # loading does not copy tensors
        seed = hashed_key(state.seed, "partial fit", state.calls)
        with self._threads():
            fitted = self._train(plan, seed, samples, network=network, optimizer=optimizer, mean_weight=mean_weight)
        entry = _history_entry(**fitted.trained.fitted.history[0])
        self.history_ = [*self.history_, {**entry, "epoch": len(self.history_) + 1}]
        self._state = replace(state, calls=state.calls + 1, optimizer=optimizer.state_dict())

    def _train(self, plan: MemberPlan, seed: int, samples: Split, **options: Any) -> FittedEnsemble:
        """Train, and keep the ensemble."""

        def report_epoch(progress: Progress) -> None:
            entry = _history_entry(epoch=progress.epoch, score=progress.score, held_out=progress.held_out)
            for callback in self.callbacks or ():
                callback(entry)
            if self.verbose and (progress.epoch % self.verbose == 0 or progress.step == progress.steps):
                validation = entry["validation"]
                left_out = "" if validation is None else f", left-out samples {validation:.5g}"
                print(f"Epoch {progress.epoch}: {progress.metric.replace('_', ' ')} {entry['train']:.5g}{left_out}")

        if self.verbose or self.callbacks:
            options["on_epoch_end"] = report_epoch
        fixed = (self._num_outputs, self._encoding, self._target_scaler)
        fitted = fit_ensemble(plan, samples, *fixed, diversity=self.diversity_, seed=seed, **options)
        held_out, self._network = fitted.held_out, fitted.trained.network.cpu()
        self.ensemble_, self.temperature_ = fitted.ensemble, fitted.temperature
        self.oof_score_ = None if held_out is None else held_out.score
        self._residual_variance = None if held_out is None else held_out.variance
        return fitted

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _plan(self) -> MemberPlan:
        """Return the checked parameters as a plan."""
        names = Hyperparameters.model_fields.keys() & self.get_params()
        values = {name: to_python(getattr(self, name)) for name in names}
        if isinstance(values["hidden"], int):
            values["hidden"] = [values["hidden"]]
        plan = MemberPlan.from_hyperparameters(self._task, check_hyperparameters("`{}`".format, **values))
        resolve_device(self.device)
        check_choice(self.early_stopping, "early_stopping", STOPPING)
        if not isinstance(self.callbacks or (), Sequence) or not all(map(callable, self.callbacks or ())):
            raise TypeError(f"Expected `callbacks` to be a list of functions, but got {self.callbacks!r}.")
        return replace(plan, network=self.network, patience=plan.patience if self.early_stopping else None)

    @abstractmethod
    def _validate(self, X: ArrayLike, y: ArrayLike, *, reset: bool) -> tuple[NDArray[Any] | DataFrame, NDArray[Any]]:
        """Check samples and targets."""

    @abstractmethod
    def _learn_targets(self, y: NDArray[Any]) -> None:
        """Learn the classes, or the number of targets."""

    @abstractmethod
    def _encode_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Class indices `(N,)` or numbers `(N, M)`."""

    def _learn_scales(
        self, table: NDArray[Any] | DataFrame, y: NDArray[Any], weight: NDArray[np.float64] | None
    ) -> None:
        """Learn the encoding of the inputs and the scale of a regression's targets."""
        names = list(map(str, getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])))
        weights, self._target_scaler = np.ones(len(y)) if weight is None else weight, None
        if self._task == "regression":
            target = Target(target_names(names, self._num_outputs), self._task, formats=("",) * self._num_outputs)
            self._target_scaler = Scaler.fit(self._encode_targets(y), weights)
        else:
            target = Target(target_names(names, 1), self._task, tuple(self.classes_.tolist()))
        self._encoding = learn_inputs(table, names, target, self.encoding, weights)
        if self.verbose:
            schema = self._encoding.schema
            left_out = (f"Column {quote(name)} is left out: {why}." for name, why in schema.dropped)
            for line in (*left_out, *schema.notes):
                print(line)

    def _sample_weight(
        self, table: NDArray[Any] | DataFrame, y: NDArray[Any], sample_weight: ArrayLike | None
    ) -> NDArray[np.float64] | None:
        """Weights `(N,)` of samples and classes, some above 0; None: all equal."""
        weight, class_weight = None, getattr(self, "class_weight", None)
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, table, dtype=np.float64, ensure_non_negative=True, copy=True)
        if class_weight is not None:
            if self._task == "multilabel":
                raise ValueError("Expected `class_weight=None` with several labels per sample. Use `sample_weight`.")
            used = np.ones(len(y), dtype=bool) if weight is None else weight > 0
            seen, codes = np.unique(y[used], return_inverse=True)  # partial_fit may see some classes only
            options = {} if weight is None or class_weight != "balanced" else {"sample_weight": weight[used]}
            scale = np.zeros(len(y))
            scale[used] = compute_class_weight(class_weight, classes=seen, y=y[used], **options)[codes]
            if not ((scale >= 0) & (scale < np.inf)).all():
                raise ValueError(f"Expected `class_weight` with finite weights of at least 0, but got {class_weight}.")
            weight = scale if weight is None else scale * weight
        if weight is not None and not (weight > 0).any():
            raise ValueError(
                "Expected a `sample_weight` above 0 for some sample, but all are 0. Give a positive weight to some."
            )
        return cast(NDArray[np.float64] | None, weight)

    def _samples(
        self, table: NDArray[Any] | DataFrame, y: NDArray[Any], weight: NDArray[Any] | None, plan: MemberPlan
    ) -> tuple[Split, NDArray[np.bool_]]:
        """Encoded samples on the device, without those of weight 0, and the mask `(N,)` of these samples."""
        used = np.ones(len(y), dtype=bool) if weight is None else weight > 0
        raw, dtype = raw_matrix(self._encoding, table[used]), plan.train_config(1).dtype
        encoder = self._encoding.encoder().to(dtype)
        x = torch.empty(len(raw), encoder.num_features, dtype=dtype)
        for start in range(0, len(raw), ENCODE_ROWS):
            x[start : start + ENCODE_ROWS] = encoder(raw[start : start + ENCODE_ROWS])
        targets = torch.from_numpy(self._encode_targets(y[used]))
        if self._target_scaler is not None:
            targets = self._target_scaler.transform(targets)
        targets = targets.to(dtype) if targets.is_floating_point() else targets
        share = None if weight is None else torch.tensor(weight[used], dtype=dtype)
        return Split(x, targets, share).to(resolve_device(self.device)), used

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use `n_jobs` CPU threads."""
        before = torch.get_num_threads()
        try:
            if self.n_jobs is not None:
                torch.set_num_threads(effective_n_jobs(self.n_jobs))
            yield
        finally:
            torch.set_num_threads(before)

    # -- predictions --------------------------------------------------------------------------------------------------

    @property
    def members_(self) -> list[nn.Module]:
        """Members: modules that map encoded inputs to logits, or to predictions."""
        check_is_fitted(self)
        return list(self.ensemble_)

    def _predict(self, X: ArrayLike, *functions: Callable[[Tensor], Tensor]) -> list[NDArray[Any]]:
        """Apply functions to the members' logits or predictions, in chunks `(K, n, C)`."""
        check_is_fitted(self)
        table = read_inputs(self, X, reset=False)
        rows = chunk_rows(self.ensemble_, self.ensemble_.num_members)
        parts = (raw_matrix(self._encoding, table[i : i + rows]) for i in range(0, len(table), rows))
        return [values.numpy() for values in self._collect(parts, len(table), *functions)]

    def _collect(self, parts: Iterable[Tensor], count: int, *functions: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Apply functions to the members' logits or predictions of parts of a raw matrix."""
        with self._threads(), torch.no_grad():
            return collect_chunks(map(self.ensemble_, parts), count, *functions)

    def _squeeze(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predictions `(N, C)` in the shape of the targets."""
        return values if self._task != "regression" or self._is_multi_output else values[:, 0]

    def feature_importances(
        self, X: ArrayLike, y: ArrayLike, *, n_repeats: int = 5, random_state: Any = None
    ) -> dict[str, float]:
        """Return the mean increase of the loss if a column of `X` is permuted, largest first.

        The loss is the cross entropy or the mean squared error. Use samples that took no part in training.

        Args:
            X: Samples `(N, D)`.
            y: Targets of these samples.
            n_repeats: Permutations of each column.
            random_state: An int for reproducible results.
        """
        check_is_fitted(self)
        check_count(n_repeats, "n_repeats")
        table, y = self._validate(X, y, reset=False)
        raw, target = raw_matrix(self._encoding, table), torch.from_numpy(self._encode_targets(y))
        means = permutation_importances(self, raw, target, n_repeats, check_random_state(random_state))
        names = getattr(self, "feature_names_in_", means)  # some may be left out
        return dict(sorted((dict.fromkeys(map(str, names), 0.0) | means).items(), key=lambda entry: -entry[1]))

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the trained estimator as a model directory (safetensors and JSON), for `load`."""
        check_is_fitted(self)
        save_estimator(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load an estimator saved by `save`; `partial_fit` is refused.

        Raises:
            ModelFileError: The directory is damaged, or is not such an estimator.
        """
        return load_estimator(cls, path)

    def export_onnx(self, path: str | os.PathLike[str]) -> float:
        """Export the ensemble as an ONNX graph, and return the largest difference between its outputs and torch's.

        The input `raw` is `(N, F)` of float64: numbers, seconds and parts of dates, and category codes. The metadata
        name the columns and codes.
        """
        from torchace.lab.tables.export import export_onnx

        check_is_fitted(self)
        return export_onnx(TableModel(self.ensemble_, self._encoding, self.diversity_, {}), Path(path))


def _draw_seed(random_state: Any) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _history_entry(*, epoch: int, score: Sequence[Any], held_out: Sequence[Any] | None, **_: Any) -> dict[str, Any]:
    return {"epoch": epoch, "train": score[0], "validation": None if held_out is None else held_out[0]}
