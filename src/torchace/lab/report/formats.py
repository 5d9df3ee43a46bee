"""Formats of numbers, names and lists; names and formats of the metrics of each task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchace.lab.report.statistics import Summary

NONE = "–"  # not measured
LOWER_IS_BETTER = "Lower is better."
IN_UNITS = "in the target's units; lower is better."
MUTUAL_INFORMATION = "entropy of the ensemble minus its members' mean entropy: epistemic uncertainty, in nats."
AMBIGUITY = "the members' mean cross entropy minus the ensemble's."
DISAGREEMENT = "share of test cases on which two members differ."


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """Format with fixed decimals and a true minus sign; zero has no sign."""
    text = f"{abs(value):,.{digits}f}"
    if not text.strip("0."):
        return text
    return f"−{text}" if value < 0 else f"+{text}" if signed else text


def percentages(values: Sequence[float], whole: float) -> list[str]:
    """Format values as signed percentages of a whole, with decimals enough that none is rounded to zero."""
    shares = [100 * value / whole if whole else 0.0 for value in values]
    digits = next((n for n in range(1, 17) if all(round(share, n) for share in shares if share)), 16)
    return [number(share, digits, signed=True) for share in shares]


def quantity(value: float, *, signed: bool = False) -> str:
    """Format to four significant digits."""
    exponent = math.floor(math.log10(abs(value))) if abs(value) > 1e-300 else 0  # smaller: the inverse may overflow
    superscript = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    power = "" if -4 <= exponent <= 6 else f"×10{superscript}"
    scaled, digits = (value / 10.0**exponent, 3) if power else (value, max(0, 3 - exponent))
    text = number(scaled, digits, signed=signed)
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return (text if exponent > 3 else text.replace(",", "")) + power  # a year has no comma


def shorten(text: str, width: int) -> str:
    """Shorten to `width` characters, cut in the middle."""
    text = " ".join(text.split()) or "(blank)"
    tail = width // 4
    return text if len(text) <= width else f"{text[: width - tail - 1]}…{text[-tail:]}"


def diversity(value: float) -> str:
    """Format λ to six digits."""
    return f"{value:.6g}"


def at(value: float) -> str:
    """Format λ as `λ=0.3`."""
    return f"λ={diversity(value)}"


def duration(seconds: float | None) -> str:
    """Format in hours, minutes or seconds."""
    if seconds is None:
        return NONE
    size, unit = next((part for part in ((3600, "h"), (60, "min")) if seconds >= 2 * part[0]), (1, "s"))
    return f"{seconds / size:.3g} {unit}"


def count(value: int, noun: str, plural: str = "") -> str:
    """Format a count: `1 seed`, `60,000 images`."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def join(items: Sequence[str]) -> str:
    """Join items: `0.1, 0.3 and 0.5`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capitalize(text: str) -> str:
    """Capitalize the first letter only."""
    return text[:1].upper() + text[1:]


# -- metrics -----------------------------------------------------------------------------------------------------------


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
        return quantity(value) if self.digits is None else number(value * self.scale, self.digits)

    def value(self, value: float) -> str:
        """Format a value with unit."""
        return self.number(value) + self.unit

    def change(self, value: float, *, with_sign: bool = False) -> str:
        """Format a difference without unit; `with_sign`: a small one with significant digits, not as zero."""
        scaled = value * self.scale
        if self.digits is None or (with_sign and not round(scaled, self.digits + 1)):
            return quantity(scaled, signed=True)
        return number(scaled, self.digits + 1, signed=True)

    def difference(self, value: float) -> str:
        """Format a difference with unit."""
        return self.change(value) + self.difference_unit

    def interval(self, ends: tuple[float, float]) -> str:
        """Format an interval of differences, without unit."""
        return " to ".join(self.change(end, with_sign=end != 0) for end in ends)

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
        return " ".join(f"{capitalize(metric.noun)}: {metric.reading}" for metric in metrics)


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
    metrics = {key: Metric(key, capitalize(name), name, reading="own metric.") for key, name in names.items()}
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
