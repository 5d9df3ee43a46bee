"""State of a trained estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from torch import nn

from torchace.lab.data import Split
from torchace.lab.data.encoding import Encoding
from torchace.lab.training.members import MemberPlan, TrainedGroup
from torchace.lab.training.scaling import Scaler
from torchace.lab.tuning.grid_search import TunedDiversity
from torchace.nn import Ensemble


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
