"""Types of the values in result files: numbers, axes of a sweep, a comparison with baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST = 1e100  # bound of measured numbers; its square is finite

TaskName = Literal["classification", "multilabel", "regression"]
SplitName = Literal["train", "validation", "test"]

T = TypeVar("T")
Items = Annotated[tuple[T, ...], Field(strict=False)]  # a list in JSON
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(gt=-LARGEST, lt=LARGEST, allow_inf_nan=False)]
Diversity = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]  # part of a path


def _drop_not_finite(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and not abs(value) < LARGEST else value


Measured = Annotated[Number | None, BeforeValidator(_drop_not_finite)]  # None: not measured or not finite

RESULT_CONFIG = ConfigDict(frozen=True, strict=True, populate_by_name=True)  # unknown keys are ignored

# axes of a sweep other than λ and seed, with their abbreviation in file names
AXES = {"learning_rate": "lr", "weight_decay": "wd", "label_smoothing": "ls"}


def variant_name(name: str, settings: Mapping[str, float]) -> str:
    """Name with the values on the axes other than λ and seed, such as `main-lr0.1`."""
    return name + "".join(f"-{AXES[axis]}{exact_text(value)}" for axis, value in settings.items())


def axis_values(run: Any) -> dict[str, float]:
    """Values of a run on the axes other than λ and seed."""
    return {name: value for name in AXES if (value := getattr(run, name)) is not None}


def exact_text(value: float) -> str:
    """Shortest text of a number; distinct numbers need distinct files."""
    return repr(value + 0.0).removesuffix(".0")  # + 0.0: no -0.0


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
