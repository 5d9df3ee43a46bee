"""How numbers are written: the same in the page, the Markdown and the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from torchace.report.statistics import Summary

NONE = "–"
"""What stands where nothing was measured."""


@dataclass(frozen=True)
class Metric:
    """A measured number: its name, and how it is written.

    `label` heads a column, `noun` stands in a sentence; values are multiplied by `scale` and given `digits` decimals
    (differences one more), followed in a sentence by `unit`, differences by `difference_unit`.
    """

    key: str
    label: str
    noun: str
    digits: int = 4
    scale: float = 1.0
    unit: str = ""
    difference_unit: str = ""

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


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """A number with fixed decimals, so that columns line up.

    Args:
        value: The number.
        digits: Decimals.
        signed: Write a plus sign too.

    Returns:
        The text, with a true minus sign, and no sign before a zero.

    Example:
        >>> number(0.97981, 4), number(-0.5, 1), number(0.5, 1, signed=True), number(-0.001, 2)
        ('0.9798', '−0.5', '+0.5', '0.00')
    """
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return f"−{text}" if value < 0 else f"+{text}" if signed else text


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
