"""Common base of `ACEClassifier` and `NCLRegressor`: parameters, training, prediction, files."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from joblib import effective_n_jobs
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from torchace.lab.data import Split, hashed_key, permutation, stratified_split
from torchace.lab.data.columns import Column
from torchace.lab.data.encoding import Encoding, NumberColumn, TargetScale
from torchace.lab.data.table_schema import Schema, Target
from torchace.lab.schema.hyperparameters import Hyperparameters, check_hyperparameters
from torchace.lab.store import finite
from torchace.lab.training.config import make_optimizer
from torchace.lab.training.members import MemberPlan, TrainedGroup, new_run_group, resolve_device, train_members
from torchace.lab.training.memory import chunk_rows, collect_chunks
from torchace.lab.training.scaling import SplitScaler, assemble_ensemble
from torchace.lab.tuning.grid_search import GridSearch, TunedDiversity
from torchace.lab.tuning.search import SearchProblem
from torchace.models.encoder import TableEncoder
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model


@dataclass(frozen=True)
class _TrainingState:
    """State from which `partial_fit` continues."""

    seed: int
    plan: MemberPlan
    scaler: SplitScaler
    calls: int = 0
    optimizer: dict[str, Any] | None = None
    weight: float = 0.0  # sum so far
    samples: int = 0

    def add(self, samples: Split) -> _TrainingState:
        """Count samples and their weights."""
        weight = float(len(samples) if samples.weight is None else samples.weight.sum())
        return replace(self, weight=self.weight + weight, samples=self.samples + len(samples))


class _FittedEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Attributes of a trained estimator, and the encoding of its targets."""

    _task: ClassVar[str]
    _num_outputs: int
    _network: nn.Module
    _state: _TrainingState
    ensemble_: Ensemble
    tuning_: TunedDiversity | None

    @abstractmethod
    def _learn_targets(self, y: NDArray[Any]) -> None:
        """Learn the classes, or the number of targets."""

    @abstractmethod
    def _encode_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Class indices `(N,)` or numbers `(N, M)`."""

    @abstractmethod
    def _targets_to_json(self) -> dict[str, Any]:
        """Learnt targets as JSON values."""

    @abstractmethod
    def _targets_from_json(self, content: Mapping[str, Any]) -> None:
        """Restore the result of `_targets_to_json`."""


@dataclass(eq=False, repr=False)
class Estimator(_FittedEstimator):
    """Common base of the estimators; the fields are their parameters."""

    num_members: int = 10
    _: KW_ONLY
    hidden: int | tuple[int, ...] = (64,)
    diversity: float | str = 0.5
    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    schedule: str | None = None
    batches: str = "shared"
    early_stopping: bool = False
    validation_fraction: float = 0.2
    patience: int = 10
    random_state: Any = None
    device: str = "auto"
    n_jobs: int | None = None

    # -- training -----------------------------------------------------------------------------------------------------

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the members.

        Args:
            X: Samples `(N, D)` without missing values; scaled internally. float64 is trained in float64.
            y: Targets `(N,)`.
            sample_weight: Weight of each sample, `(N,)`; 0 leaves it out.
        """
        with self._replace_when_done() as new:
            new._fit(X, y, sample_weight)
        return self

    @contextmanager
    def _replace_when_done(self) -> Iterator[Self]:
        """Yield a copy to train; adopt its attributes unless an error is raised."""
        new = copy.copy(self)
        yield new
        self.__dict__ = new.__dict__

    def _fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> None:
        plan = self._plan()
        X, y = self._validate(X, y, reset=True)
        plan = replace(plan, precision=str(X.dtype))
        self._learn_targets(y)
        samples, seed = self._samples(X, y, sample_weight), self._draw_seed()
        with self._threads():
            self.tuning_ = self._tune(plan, samples, seed) if self.diversity == "auto" else None
            self.diversity_ = float(self.diversity if self.tuning_ is None else self.tuning_.diversity)
            validation = None
            if self.early_stopping:
                samples, validation = self._hold_out(samples, hashed_key(seed, "early stopping"))
            scaler = SplitScaler.fit(samples)
            train = self._scale(scaler, samples, plan)
            if validation is not None:
                validation = self._scale(scaler, validation, plan)
            trained = self._train(plan, train, seed, validation=validation)
        self.history_ = _history(trained)
        self._finish(trained, scaler)
        self._state = _TrainingState(seed, plan, scaler).add(samples)

    def _tune(self, plan: MemberPlan, samples: Split, seed: int) -> TunedDiversity:
        """Choose λ on one held-out part and measure its gain on another."""
        rest, test = self._hold_out(samples, hashed_key(seed, "check"))
        train, validation = self._hold_out(rest, hashed_key(seed, "validation"))
        scaler = SplitScaler.fit(train)
        train, validation, test = (self._scale(scaler, part, plan) for part in (train, validation, test))
        variance = 1.0 if scaler.targets is None else float(scaler.targets.std.square().mean())
        variance = variance if 1e-50 < variance < 1e50 else 1.0  # else scores of scaled targets: no overflow
        problem = SearchProblem(plan, train, validation, self._num_outputs, seed)
        return GridSearch(problem, test=test, test_name="held-out", score_scale=variance).run()

    def _is_first_call(self) -> bool:
        """Whether `partial_fit` starts a new model; raise an error for a loaded estimator."""
        if hasattr(self, "_state"):
            return False
        if hasattr(self, "ensemble_"):
            raise ValueError("A loaded model cannot be trained further; call fit to train it from the start.")
        return True

    def _partial_fit(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None, first: bool) -> None:
        """Train one epoch; the samples of the first call determine the scaling."""
        if first and self.diversity == "auto":
            raise ValueError(
                "Expected `diversity` to be a number for partial_fit, but got 'auto', which needs all samples at once. "
                "Use fit, or give a number."
            )
        samples = self._samples(X, y, sample_weight)
        if first:
            plan = replace(self._plan(), precision=str(X.dtype))
            self._state = _TrainingState(self._draw_seed(), plan, SplitScaler.fit(samples))
            self.tuning_, self.history_, self.diversity_ = None, [], float(self.diversity)
            self._network = new_run_group(plan, X.shape[1], self._num_outputs, [self._state.seed])
        state = self._state.add(samples)
        mean_weight = state.weight / state.samples
        if samples.weight is None and mean_weight != 1:  # earlier samples had weights
            samples = replace(samples, weight=torch.ones(len(samples), dtype=torch.float64))
        plan = replace(state.plan, epochs=1, schedule="constant", patience=None)
        train = self._scale(state.scaler, samples, plan)
        network = copy.deepcopy(self._network).to(train.x.device)
        optimizer = make_optimizer(plan.train_config(len(samples)), list(network.parameters()))
        if state.optimizer is not None:
            optimizer.load_state_dict(copy.deepcopy(state.optimizer))  # loading does not copy tensors
        seed = hashed_key(state.seed, "partial fit", state.calls)
        with self._threads():
            options = {"network": network, "optimizer": optimizer, "mean_weight": mean_weight}
            trained = self._train(plan, train, seed, **options)
        self.history_ = [*self.history_, {**_history(trained)[0], "epoch": len(self.history_) + 1}]
        self._state = replace(state, calls=state.calls + 1, optimizer=optimizer.state_dict())
        self._finish(trained, state.scaler)

    def _train(self, plan: MemberPlan, train: Split, seed: int, **options: Any) -> TrainedGroup:
        trained = train_members(plan, train, self._num_outputs, diversities=[self.diversity_], seeds=[seed], **options)
        if (failure := trained.failure(0)) is not None:
            raise ValueError(
                f"Training ended at step {failure.step} with {failure.message}. "
                "Try a smaller learning_rate, and look for extreme values among the samples."
            )
        return trained

    def _finish(self, trained: TrainedGroup, scaler: SplitScaler) -> None:
        self._network = trained.network.cpu()
        self.ensemble_ = assemble_ensemble(scaler.inputs.encoder(), trained.ensemble(0), scaler.targets)

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _plan(self) -> MemberPlan:
        """Plan of the checked parameters."""
        names = Hyperparameters.model_fields.keys() & self.get_params()
        values = {name: _to_python(getattr(self, name)) for name in names}
        if isinstance(values["hidden"], int):
            values["hidden"] = [values["hidden"]]
        plan = MemberPlan.from_hyperparameters(self._task, check_hyperparameters("`{}`".format, **values))
        resolve_device(self.device)
        return plan if self.early_stopping else replace(plan, patience=None)

    def _validate(
        self, X: ArrayLike, y: ArrayLike, *, reset: bool, **options: Any
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        dtypes = [np.float64, np.float32]
        checked = validate_data(self, X, y, reset=reset, dtype=dtypes, order="C", **options)
        return cast(tuple[NDArray[Any], NDArray[Any]], checked)

    def _samples(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None) -> Split:
        """Unscaled samples without those of weight 0."""
        weight = self._sample_weight(X, y, sample_weight)
        targets = torch.from_numpy(self._encode_targets(y))
        samples = Split(torch.tensor(X, dtype=torch.float64), targets, None if weight is None else torch.tensor(weight))
        if weight is None:
            return samples
        if not (weight > 0).any():
            raise ValueError(
                "Expected a `sample_weight` above 0 for some sample, but all are 0. Give a positive weight to some."
            )
        return samples.take(torch.from_numpy(weight > 0))

    def _sample_weight(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None) -> NDArray[Any] | None:
        if sample_weight is None:
            return None
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True, copy=True)
        return cast(NDArray[Any], weight)

    def _hold_out(self, samples: Split, seed: int) -> tuple[Split, Split]:
        """Rest and validation fraction, stratified by class."""
        count = max(1, round(self.validation_fraction * len(samples)))
        if count >= len(samples):
            raise ValueError(
                f"Expected enough samples to hold some out, but got {len(samples)}. Give more, or use "
                "early_stopping=False and a number for `diversity`."
            )
        if self._task == "classification":
            return stratified_split(samples, count, seed=seed)
        order = permutation(seed, "held out", count=len(samples))
        return samples.take(order[count:].sort().values), samples.take(order[:count].sort().values)

    def _scale(self, scaler: SplitScaler, samples: Split, plan: MemberPlan) -> Split:
        return scaler.transform(samples, plan.train_config(1).dtype, resolve_device(self.device))

    def _draw_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

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
        """Members: modules that map scaled inputs to logits, or to predictions."""
        check_is_fitted(self)
        return list(self.ensemble_)

    def _predict(self, X: ArrayLike, *functions: Callable[[Tensor], Tensor]) -> list[NDArray[Any]]:
        """Apply functions to the members' logits or predictions, in chunks `(K, n, C)`."""
        check_is_fitted(self)
        samples: NDArray[Any] = validate_data(self, X, reset=False, dtype=[np.float64, np.float32], order="C")
        rows = chunk_rows(self.ensemble_, self.ensemble_.num_members)
        parts = (torch.tensor(samples[i : i + rows], dtype=torch.float64) for i in range(0, len(samples), rows))
        with self._threads(), torch.no_grad():
            values = collect_chunks(map(self.ensemble_, parts), len(samples), *functions)
        return [value.numpy() for value in values]

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the trained estimator as a model directory (safetensors and JSON), for `load`."""
        check_is_fitted(self)
        params = {name: _to_json(value) for name, value in self.get_params(deep=False).items()}
        names = getattr(self, "feature_names_in_", None)
        extra = {
            "estimator": type(self).__name__,
            "params": {name: value for name, value in params.items() if value is not ...},
            "n_features": self.n_features_in_,
            "feature_names": None if names is None else [str(name) for name in names],
            "targets": self._targets_to_json(),
            "history": self.history_,
            "search": None if self.tuning_ is None else finite(self.tuning_.to_json()),
        }
        if self._num_outputs == 1 or self._task == "classification":  # the command line predicts one target
            extra["encoding"] = self._encoding().to_json()
        class_names = [str(label) for label in self.classes_] if self._task == "classification" else None
        save_model(path, self.ensemble_, diversity=self.diversity_, class_names=class_names, extra=extra)

    def _encoding(self) -> Encoding:
        """Samples as a table, so that `torchace predict` accepts the saved model."""
        encoder = cast(TableEncoder, self.ensemble_.trunk)
        names = list(map(str, getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])))
        classes = tuple(self.classes_.tolist()) if self._task == "classification" else ()
        target = next(name for name in ("y", *(f"y{i}" for i in range(len(names) + 1))) if name not in names)
        schema = Schema(tuple(Column(name, "number") for name in names), Target(target, self._task, classes))
        statistics = zip(names, encoder.mean.tolist(), encoder.std.tolist(), strict=True)
        columns = tuple(NumberColumn(name, mean, std, False) for name, mean, std in statistics)
        # members of a regressor predict in the targets' units
        return Encoding(schema, columns, TargetScale(0.0, 1.0) if self._task == "regression" else None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load an estimator saved by `save`; `partial_fit` is refused.

        Raises:
            ModelFileError: The directory is damaged, or is not such an estimator.
        """
        ensemble = load_model(path)
        manifest = cast(Mapping[str, Any], ensemble.manifest)
        extra = manifest["extra"] or {}
        if not isinstance(ensemble, Ensemble) or extra.get("estimator") != cls.__name__:
            raise ModelFileError(f"{path} holds no {cls.__name__}; read it with torchace.load_model.")
        estimator = cls()
        try:
            known = estimator.get_params(deep=False)
            estimator.set_params(**{k: _from_json(v) for k, v in extra["params"].items() if k in known})
            estimator.n_features_in_ = int(extra["n_features"])
            if extra["feature_names"] is not None:
                estimator.feature_names_in_ = np.array(extra["feature_names"], dtype=object)
            estimator._targets_from_json(extra["targets"])
            estimator.history_ = extra["history"]
            estimator.diversity_ = float(manifest["diversity"])
            tuning = extra.get("search")  # older files have none
            estimator.tuning_ = None if tuning is None else TunedDiversity.from_json(tuning)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"{path} describes no {cls.__name__} that this version can read; save it again."
            ) from error
        estimator.ensemble_ = ensemble
        return estimator


def _history(trained: TrainedGroup) -> list[dict[str, Any]]:
    return [
        {
            "epoch": entry["epoch"],
            "train": entry["score"][0],
            "validation": None if entry["held_out"] is None else entry["held_out"][0],
        }
        for entry in trained.fitted.history
    ]


def _to_python(value: Any) -> Any:
    """Convert numpy numbers of a parameter to Python numbers."""
    if isinstance(value, tuple | list):
        return [_to_python(item) for item in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _to_json(value: Any) -> Any:
    """Convert a parameter to JSON values; an ellipsis if impossible, as for a random state."""
    value = _to_python(value)
    if isinstance(value, list):
        items = [_to_json(item) for item in value]
        return ... if ... in items else items
    if isinstance(value, dict):
        pairs = [[_to_json(key), _to_json(item)] for key, item in value.items()]
        return ... if any(... in pair for pair in pairs) else {"pairs": pairs}
    return value if value is None or isinstance(value, str | int | float | bool) else ...


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return dict(value["pairs"]) if isinstance(value, dict) else value
