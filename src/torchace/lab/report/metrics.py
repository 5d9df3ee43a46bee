"""Names and formats of the metrics of each task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, quantity

if TYPE_CHECKING:
    from torchace.lab.report.statistics import Summary

LOWER_IS_BETTER = "Lower is better."
IN_UNITS = "in the target's units; lower is better."
MUTUAL_INFORMATION = "entropy of the ensemble minus its members' mean entropy: epistemic uncertainty, in nats."
AMBIGUITY = "the members' mean cross entropy minus the ensemble's."
DISAGREEMENT = "share of test cases on which two members differ."


@dataclass(frozen=True)
class Metric:
    """Name and format of a metric."""

    key: str
    label: str  # column heading
    noun: str  # in a sentence
    digits: int | None = 4  # decimals; differences have one more; None: four significant digits
    scale: float = 1.0
    unit: str = ""
    difference_unit: str = ""
    reading: str = LOWER_IS_BETTER  # in a caption
    higher_is_better: bool = False
    short_label: str = ""  # column heading in a terminal, if not `label`

    def number(self, value: float) -> str:
        """Format a value without unit."""
        return quantity(value) if self.digits is None else formats.number(value * self.scale, self.digits)

    def value(self, value: float) -> str:
        """Format a value with unit."""
        return self.number(value) + self.unit

    def change(self, value: float) -> str:
        """Format a difference without unit."""
        if self.digits is None:
            return quantity(value, signed=True)
        return formats.number(value * self.scale, self.digits + 1, signed=True)

    def difference(self, value: float) -> str:
        """Format a difference with unit."""
        return self.change(value) + self.difference_unit

    def interval(self, ends: tuple[float, float]) -> str:
        """Format an interval of differences, without unit."""
        return f"{self.change(ends[0])} to {self.change(ends[1])}"

    def mean_sd(self, summary: Summary | None) -> str:
        """Format mean ± standard deviation, without unit."""
        if summary is None:
            return NONE
        mean, sd = self.number(summary.mean), summary.sd
        if sd is None:
            return mean
        return f"{mean} ± {self.number(float(f'{sd:.2g}') if self.digits is None else sd)}"

    @property
    def difference_label(self) -> str:
        """Heading of a column of differences."""
        return self.label.replace(", %", ", points")


def _percent(key: str, label: str, noun: str, reading: str = LOWER_IS_BETTER, short_label: str = "") -> Metric:
    return Metric(key, f"{label}, %", noun, 2, 100.0, " %", " points", reading=reading, short_label=short_label)


def _quantity(key: str, label: str, noun: str, reading: str = LOWER_IS_BETTER) -> Metric:
    return Metric(key, label, noun, digits=None, reading=reading)


def _with_members(*metrics: Metric) -> list[Metric]:
    members = [replace(m, key=f"member_{m.key}", noun=f"{m.noun} of one member") for m in metrics]
    return [*metrics, *members]


def _by_key(*metrics: Metric) -> dict[str, Metric]:
    return {metric.key: metric for metric in metrics}


@dataclass(frozen=True)
class TaskLayout:
    """Metrics of a task and their places in the report."""

    name: str
    metrics: Mapping[str, Metric]
    loss: str  # compares values of λ
    score: str  # the second score
    spread: str  # the difference between members
    ensemble: tuple[str, ...]
    member: tuple[str, ...]
    details: Mapping[str, tuple[str, ...]]
    details_title: str

    @property
    def diversity(self) -> tuple[str, ...]:
        """Metrics of diversity."""
        return self.details["Diversity"]

    @property
    def differences(self) -> tuple[str, ...]:
        """Metrics with paired differences."""
        return self.loss, self.score, self.spread

    def explain(self, keys: Sequence[str]) -> str:
        """Explain the metrics other than «lower is better»."""
        metrics = [self.metrics[key] for key in keys if self.metrics[key].reading != LOWER_IS_BETTER]
        return " ".join(f"{formats.capitalize(metric.noun)}: {metric.reading}" for metric in metrics)


CLASSIFICATION = TaskLayout(
    metrics=_by_key(
        *_with_members(
            Metric("accuracy", "Accuracy", "accuracy", higher_is_better=True, short_label="Acc."),
            _percent("error", "Error", "error"),
            Metric("cross_entropy", "Cross entropy", "cross entropy", short_label="CE"),
            Metric("brier", "Brier score", "Brier score"),
            Metric("calibration_error", "Calibration error", "calibration error"),
        ),
        _percent("disagreement", "Disagreement", "disagreement", DISAGREEMENT, "Disagr.\n%"),
        Metric("mutual_information", "Mutual information", "mutual information", 5, reading=MUTUAL_INFORMATION),
        Metric("ambiguity", "Ambiguity", "ambiguity", 5, reading=AMBIGUITY),
    ),
    name="classification",
    loss="cross_entropy",
    score="error",
    spread="disagreement",
    ensemble=("accuracy", "cross_entropy"),
    member=("member_accuracy", "member_cross_entropy"),
    details={
        "Ensemble": ("brier", "calibration_error"),
        "One member": ("member_brier", "member_calibration_error"),
        "Diversity": ("disagreement", "mutual_information", "ambiguity"),
    },
    details_title="Diversity and calibration",
)

_LABELS = (
    Metric("exact_match", "Exact match", "exact match", reading="share of test cases with all labels right."),
    Metric("macro_f1", "Macro F1", "macro F1", reading="mean over labels of the F1 score."),
)
MULTILABEL = replace(
    CLASSIFICATION,
    name="multilabel",
    metrics={**CLASSIFICATION.metrics, **_by_key(*_LABELS)},
    details={**CLASSIFICATION.details, "Ensemble": ("exact_match", "macro_f1", "brier", "calibration_error")},
)

REGRESSION = TaskLayout(
    metrics=_by_key(
        Metric("r2", "R²", "R²", reading="share of the target's variance that is explained.", higher_is_better=True),
        *_with_members(
            _quantity("mse", "MSE", "mean squared error"),
            _quantity("rmse", "RMSE", "root mean squared error", IN_UNITS),
        ),
        _quantity("mae", "MAE", "mean absolute error", IN_UNITS),
        _quantity("spread", "Spread", "spread", "standard deviation of the members' predictions."),
        _quantity("ambiguity", "Ambiguity", "ambiguity", "the members' mean MSE minus the ensemble's."),
    ),
    name="regression",
    loss="mse",
    score="mae",
    spread="spread",
    ensemble=("r2", "rmse", "mae"),
    member=("member_rmse",),
    details={"Ensemble": ("mse",), "One member": ("member_mse",), "Diversity": ("spread", "ambiguity")},
    details_title="Diversity and squared error",
)

TASKS = {task.name: task for task in (CLASSIFICATION, MULTILABEL, REGRESSION)}


def with_own_metrics(layout: TaskLayout, keys: Iterable[str]) -> TaskLayout:
    """Add a user's own metrics, which have a place in the table of details."""
    own = [key for key in keys if key not in layout.metrics]
    if not own:
        return layout
    names = {key: key.replace("_", " ").replace("#", " ") for key in own}
    metrics = {key: Metric(key, formats.capitalize(name), name, reading="own metric.") for key, name in names.items()}
    return replace(layout, metrics={**layout.metrics, **metrics}, details={**layout.details, "Own": tuple(own)})


def add_derived(values: Mapping[str, float]) -> dict[str, float]:
    """Add errors and root mean squared errors."""
    found = dict(values)
    for key in ("accuracy", "member_accuracy"):
        if key in values:
            found[key.replace("accuracy", "error")] = 1 - values[key]
    for key in ("mse", "member_mse"):
        if values.get(key, -1.0) >= 0:
            found[key.replace("mse", "rmse")] = math.sqrt(values[key])
    return found
