"""State of a trained estimator, and its model directory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from torch import nn

from torchace.lab.data import DataError, Split
from torchace.lab.data.encoding import Encoding
from torchace.lab.schema.hyperparameters import to_python
from torchace.lab.store import finite
from torchace.lab.training.members import MemberPlan, TrainedGroup
from torchace.lab.training.scaling import Scaler
from torchace.lab.tuning.grid_search import TunedDiversity
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model


@dataclass(frozen=True)
class TrainingState:
    """State from which `partial_fit` continues."""

    seed: int
    plan: MemberPlan
    calls: int = 0
    optimizer: dict[str, Any] | None = None
    weight: float = 0.0  # sum so far
    samples: int = 0

    def add(self, samples: Split) -> TrainingState:
        """Count samples and their weights."""
        weight = float(len(samples) if samples.weight is None else samples.weight.sum())
        return replace(self, weight=self.weight + weight, samples=self.samples + len(samples))


class FittedEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Attributes of a trained estimator, and the encoding of its targets."""

    _task: str
    _num_outputs: int
    _network: nn.Module
    _state: TrainingState
    _encoding: Encoding
    _target_scaler: Scaler | None
    ensemble_: Ensemble
    tuning_: TunedDiversity | None
    temperature_: float
    oof_score_: float | None
    _residual_variance: NDArray[np.float64] | None  # (M,), of each target of a regression
    oof_predictions_: NDArray[np.float64] | None
    _residuals: list[NDArray[np.float64]] | None  # of a regression, by fold

    def _squeeze(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predictions `(N, C)` in the shape of the estimator's."""
        return values

    def _keep_residuals(self, y: NDArray[Any], predictions: NDArray[np.float64], folds: NDArray[np.int64]) -> None:
        """Keep out-of-fold residuals for intervals."""

    @abstractmethod
    def _learn_targets(self, y: NDArray[Any]) -> None:
        """Learn the classes, or the number of targets."""

    @abstractmethod
    def _encode_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Class indices `(N,)` or numbers `(N, M)`."""

    @abstractmethod
    def _targets_to_json(self) -> dict[str, Any]:
        """Learned targets as JSON values."""

    @abstractmethod
    def _targets_from_json(self, content: Mapping[str, Any]) -> None:
        """Restore the result of `_targets_to_json`."""


def history(trained: TrainedGroup) -> list[dict[str, Any]]:
    """Scores of the epochs, of the first run."""
    return [history_entry(entry["epoch"], entry["score"], entry["held_out"]) for entry in trained.fitted.history]


def history_entry(epoch: int, score: Sequence[float | None], held_out: Sequence[float | None] | None) -> dict[str, Any]:
    """Scores of an epoch."""
    return {"epoch": epoch, "train": score[0], "validation": None if held_out is None else held_out[0]}


T = TypeVar("T")


def save_estimator(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write a model directory."""
    params = {name: to_json(value) for name, value in estimator.get_params(deep=False).items()}
    names = getattr(estimator, "feature_names_in_", None)
    extra = {
        "estimator": type(estimator).__name__,
        "params": {name: value for name, value in params.items() if value is not ...},
        "n_features": estimator.n_features_in_,
        "feature_names": None if names is None else [str(name) for name in names],
        "targets": estimator._targets_to_json(),
        "history": estimator.history_,
        "temperature": estimator.temperature_,
        "oof_score": estimator.oof_score_,
        "residual_variance": None if estimator._residual_variance is None else estimator._residual_variance.tolist(),
        "residuals": None if estimator._residuals is None else [fold.tolist() for fold in estimator._residuals],
        "search": None if estimator.tuning_ is None else finite(estimator.tuning_.to_dict()),
        "encoding": estimator._encoding.to_dict(),
    }
    class_names = [str(label) for label in estimator.classes_] if estimator._task == "classification" else None
    save_model(path, estimator.ensemble_, diversity=estimator.diversity_, class_names=class_names, extra=extra)


def load_estimator(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read a model directory of `save_estimator`."""
    ensemble = load_model(path)
    manifest = cast(Mapping[str, Any], ensemble.manifest)
    extra = manifest["extra"] or {}
    if not isinstance(ensemble, Ensemble) or extra.get("estimator") != kind.__name__:
        raise ModelFileError(
            f"Expected a saved {kind.__name__} in {path}, but it holds another model. Use torchace.load_model."
        )
    estimator: Any = kind()
    try:
        known = estimator.get_params(deep=False)
        estimator.set_params(**{k: _from_json(v) for k, v in extra["params"].items() if k in known})
        estimator.n_features_in_ = int(extra["n_features"])
        if extra["feature_names"] is not None:
            estimator.feature_names_in_ = np.array(extra["feature_names"], dtype=object)
        estimator._targets_from_json(extra["targets"])
        estimator._encoding = Encoding.from_dict(extra["encoding"])
        estimator.history_ = extra["history"]
        estimator.temperature_, estimator.oof_score_ = float(extra["temperature"]), extra["oof_score"]
        estimator.oof_predictions_, residuals, variance = None, extra["residuals"], extra["residual_variance"]
        estimator._residual_variance = None if variance is None else np.array(variance, dtype=np.float64)
        estimator._residuals = None if residuals is None else [np.array(fold, dtype=np.float64) for fold in residuals]
        estimator.diversity_ = float(manifest["diversity"])
        tuning = extra["search"]
        estimator.tuning_ = None if tuning is None else TunedDiversity.from_dict(tuning)
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise ModelFileError(
            f"The {kind.__name__} in {path} cannot be read by this version of torchace. Save it again."
        ) from error
    estimator.ensemble_ = ensemble
    return cast(T, estimator)


def to_json(value: Any) -> Any:
    """Convert a parameter to JSON values; an ellipsis if impossible, as for a random state."""
    value = to_python(value)
    if isinstance(value, list):
        items = [to_json(item) for item in value]
        return ... if ... in items else items
    if isinstance(value, dict):
        pairs = [[to_json(key), to_json(item)] for key, item in value.items()]
        return ... if any(... in pair for pair in pairs) else {"pairs": pairs}
    return value if value is None or isinstance(value, str | int | float | bool) else ...


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return dict(value["pairs"]) if isinstance(value, dict) else value
