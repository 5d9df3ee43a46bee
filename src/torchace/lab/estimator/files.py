"""Estimators as model directories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np

from torchace.lab.data import DataError
from torchace.lab.data.encoding import Encoding
from torchace.lab.schema.hyperparameters import to_python
from torchace.lab.store import finite
from torchace.lab.tuning.grid_search import TunedDiversity
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

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
