"""Pydantic models of a comparison with baselines, part of a fit's experiment.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from torchace.lab.schema.values import RESULT_CONFIG, Count, Items, Measured, Number

ENSEMBLE = "ensemble"


class _ResultModel(BaseModel):
    model_config = RESULT_CONFIG


class ModelScores(_ResultModel):
    """Scores of the ensemble or a baseline; `difference` is its loss minus the ensemble's, with a 95 % interval."""

    name: str
    label: str
    scores: dict[str, Measured] = {}
    difference: Measured = None
    low: Measured = None
    high: Measured = None
    seconds: Measured = None
    failure: str = ""


class ClassScores(_ResultModel):
    """Counts, recall and precision of a class; None without rows."""

    name: str
    train: Count
    rows: Count
    recall: Measured = None
    precision: Measured = None


class TargetScores(_ResultModel):
    """The ensemble's scores for a target of a regression, and quantiles of its residuals."""

    name: str
    scores: dict[str, Measured] = {}
    residuals: dict[str, Measured] = {}


class Importance(_ResultModel):
    """Mean increase of the loss if a column's values are permuted, and its standard deviation over permutations."""

    name: str
    mean: Number
    std: Number


class ModelComparison(_ResultModel):
    """The ensemble and its baselines on the same rows.

    `confusion` counts rows by true and predicted class.
    """

    split: Literal["validation", "test"]
    rows: Count
    loss: Literal["cross_entropy", "mse"]
    models: Items[ModelScores]
    classes: Items[ClassScores] = ()
    confusion: Items[Items[Count]] = ()
    targets: Items[TargetScores] = ()
    importances: Items[Importance] = ()

    @property
    def ensemble(self) -> ModelScores:
        """Scores of the ensemble."""
        return next(model for model in self.models if model.name == ENSEMBLE)

    @property
    def best(self) -> ModelScores | None:
        """The baseline with the lowest loss, if any was trained."""
        scored = [m for m in self.models if m.name != ENSEMBLE and m.scores.get(self.loss) is not None]
        return min(scored, key=lambda model: model.scores[self.loss] or 0.0, default=None)
