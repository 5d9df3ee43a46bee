"""State of a trained estimator, and its model directory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from torchace.lab.data import Split
from torchace.lab.data.encoding import Encoding
from torchace.lab.schema.hyperparameters import to_python
from torchace.lab.store import finite
from torchace.lab.tables.model import TableModel
from torchace.lab.training.members import MemberPlan
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.scaling import Scaler
from torchace.lab.tuning.grid_search import TunedDiversity
from torchace.nn import Ensemble
from torchace.saving import ModelFileError
from torchace.saving.kinds import describe


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


class FittedEstimator(BaseEstimator):  # type: ignore[misc]
    """Attributes of a trained estimator."""

    classes_: NDArray[Any]
    ensemble_: Ensemble
    diversity_: float
    tuning_: TunedDiversity | None
    temperature_: float
    oof_score_: float | None
    oof_predictions_: NDArray[np.float64] | None
    history_: list[dict[str, Any]]
    _task: str
    _num_outputs: int
    _is_multi_output: bool  # targets (N, M) of a regression
    _network: RunGroup
    _state: TrainingState
    _encoding: Encoding
    _target_scaler: Scaler | None
    _residual_variance: NDArray[np.float64] | None  # (M,), of each target of a regression
    _residuals: list[NDArray[np.float64]] | None  # of a regression, by fold


T = TypeVar("T", bound=FittedEstimator)


def save_estimator(estimator: FittedEstimator, path: str | os.PathLike[str]) -> None:
    """Write a model directory."""
    is_regression = estimator._task == "regression"
    if not is_regression and not all(isinstance(v, str | int | float | bool) for v in estimator.classes_.tolist()):
        raise ModelFileError("Labels that are not strings, numbers or booleans cannot be saved; convert them first.")
    if describe(estimator.ensemble_)[1] is None:
        raise ModelFileError("An estimator with an own `network` cannot be saved as files. Use joblib or export_onnx.")
    names, variance, residuals = (
        getattr(estimator, name, None) for name in ("feature_names_in_", "_residual_variance", "_residuals")
    )
    record = {
        "estimator": type(estimator).__name__,
        "params": _params_to_json(estimator.get_params(deep=False)),
        "n_features": estimator.n_features_in_,
        "feature_names": None if names is None else [str(name) for name in names],
        "dtype": None if is_regression else estimator.classes_.dtype.str,
        "multi_output": is_regression and estimator._is_multi_output,
        "history": estimator.history_,
        "temperature": estimator.temperature_,
        "oof_score": estimator.oof_score_,
        "residual_variance": None if variance is None else variance.tolist(),
        "residuals": None if residuals is None else [fold.tolist() for fold in residuals],
        "search": None if estimator.tuning_ is None else finite(estimator.tuning_.to_dict()),
    }
    TableModel(estimator.ensemble_, estimator._encoding, estimator.diversity_, record).save(path)


def load_estimator(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read a model directory of `save_estimator`."""
    model = TableModel.load(path)
    record, target = model.record, model.encoding.schema.target
    if record.get("estimator") != kind.__name__:
        raise ModelFileError(
            f"Expected a saved {kind.__name__} in {path}, but it holds another model. Use torchace.load_model."
        )
    estimator = kind()
    estimator.set_params(**{name: _from_json(value) for name, value in record["params"].items()})
    estimator.n_features_in_ = record["n_features"]
    if record["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(record["feature_names"], dtype=object)
    estimator._task, estimator._num_outputs = target.task, target.num_outputs
    estimator._is_multi_output = record["multi_output"]
    if record["dtype"] is not None:
        estimator.classes_ = np.array(target.classes, dtype=np.dtype(record["dtype"]))
    estimator.ensemble_, estimator._encoding, estimator.diversity_ = model.ensemble, model.encoding, model.diversity
    estimator.history_, estimator.temperature_ = record["history"], record["temperature"]
    estimator.oof_score_, estimator.oof_predictions_ = record["oof_score"], None
    variance, residuals, search = record["residual_variance"], record["residuals"], record["search"]
    estimator._residual_variance = None if variance is None else np.array(variance)
    estimator._residuals = None if residuals is None else [np.array(fold) for fold in residuals]
    estimator.tuning_ = None if search is None else TunedDiversity.from_dict(search)
    return estimator


def _params_to_json(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as JSON values, without those that JSON cannot hold, such as functions."""
    found = {}
    for name, value in params.items():
        value = to_python(value)
        value = {"pairs": [to_python(pair) for pair in value.items()]} if isinstance(value, dict) else value
        try:
            json.dumps(value)
        except TypeError:
            continue
        found[name] = value
    return found


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return dict(value["pairs"]) if isinstance(value, dict) else value
