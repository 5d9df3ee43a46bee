"""Phrases that all findings share: evidence, verdicts, values of λ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchace.lab.report import formats
from torchace.lab.report.formats import Metric
from torchace.lab.report.statistics import Comparison, Difference


@dataclass(frozen=True)
class Finding:
    """A sentence or two under a short heading; `warning` where a reader should be careful."""

    topic: str
    text: str
    warning: bool = False


def capital(text: str) -> str:
    """The text with a capital first letter, the others as they are.

    Example:
        >>> capital("mean squared error"), capital("R²")
        ('Mean squared error', 'R²')
    """
    return text[:1].upper() + text[1:]


def at(diversity: float) -> str:
    """A value of λ in a sentence."""
    return f"λ={formats.diversity(diversity)}"


def lambdas(values: list[float]) -> str:
    """Several values of λ in a sentence."""
    return "λ=" + formats.listed([formats.diversity(value) for value in values])


def evidence(metric: Metric, difference: Difference, comparison: Comparison) -> str:
    """A difference with its interval, p value and number of seeds."""
    seeds = formats.count(difference.n, "seed")
    text = metric.difference(difference.mean)
    if difference.together is None or difference.corrected is None:
        return f"{text} ({difference.note})" if difference.n == 1 else f"{text} ({seeds}; {difference.note})"
    holds = "" if comparison.tests == 1 else f", holding for all {comparison.tests} λ together"
    interval = f"95 % interval {metric.interval(difference.together)}{holds}"
    p = f"{'' if comparison.tests == 1 else 'corrected '}{formats.p_phrase(difference.corrected)}"
    over = f"{seeds} alone" if difference.samples is None else f"{seeds} and {difference.samples:,} test samples"
    return f"{text} ({interval}; {p}; over {over})"


def verdict(difference: Difference) -> str:
    """Whether a difference is beyond the noise."""
    if difference.together is None:
        return "That cannot be told from the noise between seeds."
    if not difference.significant:
        return "That is within the noise."
    return f"That is beyond the noise between seeds{'' if difference.samples is None else ' and test samples'}."


def covered(comparisons: Sequence[Comparison]) -> str:
    """What the intervals of these comparisons cover, to follow "over"."""
    counts = {d.samples for comparison in comparisons for d in comparison.differences if d.together}
    if None not in counts:
        return "seeds and test samples"
    return "seeds alone" if counts == {None} else "seeds, and test samples where they were recorded"


def why_not(comparison: Comparison) -> str:
    """Why none of the differences could be tested."""
    notes = {difference.note for difference in comparison.differences if difference.note}
    return untold(min(notes)) if notes else "there is nothing to test"


def untold(note: str) -> str:
    """Why a difference could not be tested, from its note."""
    return f"{note}, so this cannot be told from noise" if note else "nothing to test"
