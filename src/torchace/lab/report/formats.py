"""How numbers are written: the same in the page, the Markdown and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchace.lab.report.statistics import Summary

NONE = "–"
"""What stands where nothing was measured."""


@dataclass(frozen=True)
class Metric:
    """A measured number: its name, and how it is written.

    `label` heads a column, `noun` stands in a sentence; values are multiplied by `scale` and given `digits` decimals
    (differences one more), followed in a sentence by `unit`, differences by `difference_unit`. `power` is 1 for a
    number in the target's own units and 2 for one in their square: `fitted` writes those as their size asks for.
    """

    key: str
    label: str
    noun: str
    digits: int = 4
    scale: float = 1.0
    unit: str = ""
    difference_unit: str = ""
    power: int = 0

    def number(self, value: float) -> str:
        """A value without its unit."""
        return number(value * self.scale, self.digits)

    def value(self, value: float) -> str:
        """A value with its unit."""
        return self.number(value) + self.unit

    def change(self, value: float) -> str:
        """A signed difference without its unit."""
        return number(value * self.scale, self.digits + 1, signed=True)

    def difference(self, value: float) -> str:
        """A signed difference with its unit."""
        return self.change(value) + self.difference_unit

    def interval(self, ends: tuple[float, float]) -> str:
        """The two ends of an interval of differences, without unit."""
        return f"{self.change(ends[0])} to {self.change(ends[1])}"

    def mean_sd(self, summary: Summary | None) -> str:
        """Mean ± standard deviation, without unit."""
        if summary is None:
            return NONE
        mean = self.number(summary.mean)
        return mean if summary.sd is None else f"{mean} ± {self.number(summary.sd)}"


def _share(key: str, label: str, noun: str) -> Metric:
    return Metric(key, f"{label}, %", noun, 2, 100.0, " %", " points")


METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("accuracy", "Accuracy", "accuracy"),
        _share("error", "Error", "error"),
        Metric("cross_entropy", "Cross entropy", "cross entropy"),
        Metric("brier", "Brier score", "Brier score"),
        Metric("calibration_error", "Calibration error", "calibration error"),
        Metric("member_accuracy", "Accuracy", "accuracy of one member"),
        _share("member_error", "Error", "error of one member"),
        Metric("member_cross_entropy", "Cross entropy", "cross entropy of one member"),
        Metric("member_brier", "Brier score", "Brier score of one member"),
        Metric("member_calibration_error", "Calibration error", "calibration error of one member"),
        _share("disagreement", "Disagreement", "disagreement"),
        Metric("mutual_information", "Mutual information", "mutual information", 5),
        Metric("ambiguity", "Ambiguity", "ambiguity", 5),
    )
}
"""The numbers of a classifier."""

REGRESSION: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("r2", "R²", "R²"),
        Metric("mse", "MSE", "mean squared error", power=2),
        Metric("rmse", "RMSE", "root mean squared error", power=1),
        Metric("mae", "MAE", "mean absolute error", power=1),
        Metric("member_mse", "MSE", "mean squared error of one member", power=2),
        Metric("member_rmse", "RMSE", "root mean squared error of one member", power=1),
        Metric("spread", "Spread", "spread", power=1),
        Metric("ambiguity", "Ambiguity", "ambiguity", power=2),
        _share("averaged", "Averaged away", "share averaged away"),
    )
}
"""The numbers of a regressor."""


def fitted(metrics: Mapping[str, Metric], values: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
    """Metrics with decimals, and where needed a power of ten, that fit values in a target's units.

    A power of ten is common to all metrics of one unit, so that a table's columns can be compared.

    Args:
        metrics: The metrics by key.
        values: What was measured, by key.

    Returns:
        The metrics; those without a unit of the target as they were.

    Example:
        >>> fitted(REGRESSION, {"rmse": [54.2171]})["rmse"].value(54.2171)
        '54.22'
        >>> mse = fitted(REGRESSION, {"mse": [2.951e9]})["mse"]
        >>> mse.label, mse.number(2.951e9)
        ('MSE, ×10⁹', '2.951')
    """
    found = dict(metrics)
    for power, lead in ((1, "rmse"), (2, "mse")):
        size = _size(values.get(lead, ()))
        shift = 0 if -3 <= size <= 5 else 3 * (size // 3)
        for metric in metrics.values():
            if metric.power == power:
                own = _size(values.get(metric.key) or values.get(lead, ()))
                found[metric.key] = _written(metric, shift, min(6, max(0, 3 - (own - shift))))
    return found


def _written(metric: Metric, shift: int, digits: int) -> Metric:
    if not shift:
        return replace(metric, digits=digits)
    unit = f"×{_power_of_ten(shift)}"
    return replace(
        metric,
        label=f"{metric.label}, {unit}",
        digits=digits,
        scale=10.0**-shift,
        unit=f" {unit}",
        difference_unit=f" {unit}",
    )


def _size(values: Sequence[float]) -> int:
    """The power of ten of a typical value, 0 where there is none."""
    # the inverse of anything smaller may not be a float
    sizes = [abs(value) for value in values if abs(value) > 1e-300]
    return math.floor(math.log10(median(sizes))) if sizes else 0


def _power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """A number with fixed decimals, so that columns line up.

    Args:
        value: The number.
        digits: Decimals.
        signed: Write a plus sign too.

    Returns:
        The text, with a true minus sign, and no sign before a zero.

    Example:
        >>> number(0.97981, 4), number(-0.5, 1), number(0.5, 1, signed=True), number(-0.001, 2), number(54321, 0)
        ('0.9798', '−0.5', '+0.5', '0.00', '54,321')
    """
    text = f"{abs(value):,.{digits}f}"
    if not text.strip("0."):
        return text
    return f"−{text}" if value < 0 else f"+{text}" if signed else text


def quantity(value: float) -> str:
    """A number of any size, to four significant digits.

    Example:
        >>> quantity(38.5912), quantity(0), quantity(1984), quantity(-54321.7), quantity(0.00001234), quantity(6.02e23)
        ('38.59', '0', '1984', '−54,322', '1.234×10⁻⁵', '6.02×10²³')
    """
    size = _size([value])
    power = "" if -4 <= size <= 6 else f"×{_power_of_ten(size)}"
    text = number(value / 10.0**size, 3) if power else number(value, max(0, 3 - size))
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return (text if size > 3 else text.replace(",", "")) + power  # a year has no comma


def cut(text: str, most: int) -> str:
    """A name from a file, short enough to stand in a table: its beginning and its end.

    Example:
        >>> cut("petal length", 20), cut("a" * 30 + "z" * 30, 9), cut(" ", 9)
        ('petal length', 'aaaaaa…zz', '(blank)')
    """
    text = " ".join(text.split()) or "(blank)"
    tail = most // 4
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def diversity(value: float) -> str:
    """A value of λ.

    Example:
        >>> diversity(0.30000000000000004)
        '0.3'
    """
    return f"{value:.6g}"


def p_value(p: float | None) -> str:
    """A p value to three decimals.

    Example:
        >>> p_value(0.00002), p_value(0.0412), p_value(None)
        ('<0.001', '0.041', '–')
    """
    if p is None:
        return NONE
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def moment(text: str) -> str:
    """A time stamp to the minute; as it is where it is none.

    Example:
        >>> moment("2026-01-31T12:00:07+00:00"), moment("yesterday")
        ('2026-01-31 12:00 UTC', 'yesterday')
    """
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{parsed:%Y-%m-%d %H:%M} {parsed.tzname() or ''}".rstrip()


def p_phrase(p: float) -> str:
    """A p value in a sentence: `p < 0.001` or `p = 0.041`."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def duration(seconds: float | None) -> str:
    """A time in words.

    Example:
        >>> duration(42.4), duration(90), duration(7260), duration(0.345), duration(None)
        ('42 s', '1 min 30 s', '2 h 1 min', '0.34 s', '–')
    """
    if seconds is None:
        return NONE
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def count(value: int, noun: str, plural: str = "") -> str:
    """A number of things.

    Example:
        >>> count(1, "seed"), count(60000, "image"), count(2, "entry", "entries")
        ('1 seed', '60,000 images', '2 entries')
    """
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def listed(items: list[str]) -> str:
    """Items in a sentence.

    Example:
        >>> listed(["0.1"]), listed(["0.1", "0.3"]), listed(["0.1", "0.3", "0.5"])
        ('0.1', '0.1 and 0.3', '0.1, 0.3 and 0.5')
    """
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
