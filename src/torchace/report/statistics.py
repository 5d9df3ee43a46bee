"""Means over seeds, and paired differences with intervals that hold for all λ of an arm together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchace.report._fields import extra
from torchace.report.results import Arm, Results

LEVEL = 0.95


@dataclass(frozen=True)
class Summary:
    """A number over seeds; `sd` and the t interval of the mean are None below two seeds."""

    n: int
    mean: float
    sd: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Difference:
    """A paired difference over common seeds.

    `interval` is the two-sided 95 % t interval of this difference alone, `together` that of its whole family
    (Bonferroni width: all hold at once with 95 %), `p` the paired t test's, `holm` the same corrected for the family by
    Holm's step-down. All four are None where there is nothing to test; `note` says why.
    """

    diversity: float
    n: int
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    together: tuple[float, float] | None
    p: float | None
    holm: float | None
    note: str

    @property
    def significant(self) -> bool:
        """Whether Holm's correction leaves p below 0.05."""
        return self.holm is not None and self.holm < 1 - LEVEL


@dataclass(frozen=True)
class Comparison:
    """The differences of one arm's λ to one reference, in one metric: a family, corrected together."""

    arm: Arm
    reference: Arm
    reference_diversity: float
    metric: str
    differences: tuple[Difference, ...]

    @property
    def tests(self) -> int:
        """How many tests the correction counts."""
        return sum(difference.p is not None for difference in self.differences)

    def at(self, diversity: float) -> Difference | None:
        """The difference at one λ."""
        return next((d for d in self.differences if d.diversity == diversity), None)


def summary(values: Sequence[float]) -> Summary:
    """Mean, standard deviation (n - 1) and the 95 % t interval of the mean.

    Args:
        values: One number a seed, at least one.

    Returns:
        The summary.

    Example:
        >>> summary([0.10, 0.12, 0.14]).mean
        0.12
    """
    n, mean, sd = _moments(values)
    if sd is None:
        return Summary(n, mean, None, None)
    half = _quantile(1 - LEVEL, n - 1) * sd / math.sqrt(n)
    return Summary(n, mean, sd, (mean - half, mean + half))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction.

    The i-th smallest of m becomes the largest of (m - j + 1) p_j over j ≤ i, at most 1.

    Args:
        p_values: The p values of one family.

    Returns:
        The corrected ones, in the order given.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def paired_difference(
    values: Mapping[int, float], reference: Mapping[int, float], diversity: float = 0.0
) -> Difference | None:
    """The mean of `values - reference` over the seeds both have.

    Args:
        values: A number by seed.
        reference: What to subtract, by seed.
        diversity: The λ to note in the result.

    Returns:
        The difference on its own (`together` and `holm` are None), or None without a common seed.
    """
    deltas = [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
    if not deltas:
        return None
    n, mean, sd = _moments(deltas)
    if sd is None:
        return Difference(diversity, n, mean, None, None, None, None, None, "one seed: no interval")
    # differences that are equal but for rounding leave no noise to measure the mean against
    if sd <= 1e-12 * max(abs(v) for v in [*values.values(), *reference.values()]):
        return Difference(diversity, n, mean, 0.0, None, None, None, None, "the same in every seed: no interval")
    error = sd / math.sqrt(n)
    half = _quantile(1 - LEVEL, n - 1) * error
    return Difference(
        diversity, n, mean, sd, (mean - half, mean + half), None, _two_sided(mean / error, n - 1), None, ""
    )


def family(series: Mapping[float, Mapping[int, float]], reference: Mapping[int, float]) -> tuple[Difference, ...]:
    """Every λ's paired difference to one reference, corrected for their number.

    Args:
        series: For each λ a number by seed.
        reference: What they are compared with, by seed.

    Returns:
        The differences in ascending λ; a λ without a common seed is left out.
    """
    found = [paired_difference(series[diversity], reference, diversity) for diversity in sorted(series)]
    differences = [difference for difference in found if difference is not None]
    tested = [difference for difference in differences if difference.p is not None]
    corrected = dict(zip(map(id, tested), holm([d.p for d in tested if d.p is not None]), strict=True))
    return tuple(
        replace(difference, holm=corrected[id(difference)], together=_together(difference, len(tested)))
        if id(difference) in corrected
        else difference
        for difference in differences
    )


def compare(
    results: Results, arm: Arm, metric: str, reference: Arm | None = None, split: str = "test"
) -> Comparison | None:
    """An arm's λ against its own λ=0, or against another arm's λ=0.

    Args:
        results: A run directory.
        arm: The arm whose λ are compared.
        metric: A key of the runs' metrics.
        reference: Another arm; compared at its λ=0, or at its only λ. None: the arm itself.
        split: "test", "validation" or "train".

    Returns:
        One family of differences, or None where there is nothing to compare: what was tested on other samples, for one.
    """
    anchor = arm if reference is None else reference
    if not results.data_of(arm).is_tested_as(results.data_of(anchor)):
        return None
    at = results.diversities(anchor)
    if not at or (at[0] != 0 and (reference is None or len(at) > 1)):
        return None
    diversities = [diversity for diversity in results.diversities(arm) if reference is not None or diversity != at[0]]
    series = {diversity: results.values(arm, diversity, metric, split) for diversity in diversities}
    differences = family(series, results.values(anchor, at[0], metric, split))
    return Comparison(arm, anchor, at[0], metric, differences) if differences else None


def lowest(results: Results, arm: Arm, metric: str | None = None, split: str = "test") -> float | None:
    """The λ at which the mean over seeds of a metric (the task's loss) is lowest, None where nothing was measured."""
    means = comparable_means(results, arm, metric or results.task.loss, split)
    return min(means, key=means.__getitem__) if means else None


def comparable_means(results: Results, arm: Arm, metric: str, split: str = "test") -> dict[float, float]:
    """A metric's mean over seeds, for every λ at which it was measured.

    Where some seeds are missing at some λ, only seeds that every λ has are counted, if there are any.
    """
    series = _measured(results, arm, metric, split)
    common = set.intersection(*(set(values) for values in series.values())) if series else set()
    return {
        diversity: math.fsum(values[seed] for seed in (common or values)) / len(common or values)
        for diversity, values in series.items()
    }


def unequal_seeds(results: Results, arm: Arm) -> bool:
    """Whether some λ of an arm have seeds that others lack."""
    return len({frozenset(values) for values in _measured(results, arm, results.task.loss).values()}) > 1


def _measured(results: Results, arm: Arm, metric: str, split: str = "test") -> dict[float, dict[int, float]]:
    """A metric by λ and seed, for every λ at which it was measured."""
    series = {diversity: results.values(arm, diversity, metric, split) for diversity in results.diversities(arm)}
    return {diversity: values for diversity, values in series.items() if values}


def _moments(values: Sequence[float]) -> tuple[int, float, float | None]:
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return n, mean, None
    return n, mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))


def _together(difference: Difference, tests: int) -> tuple[float, float]:
    half = _quantile((1 - LEVEL) / tests, difference.n - 1) * (difference.sd or 0.0) / math.sqrt(difference.n)
    return difference.mean - half, difference.mean + half


def _quantile(alpha: float, degrees: int) -> float:
    """The t value that a share `alpha` of the distribution lies beyond, on both sides together."""
    with extra("scipy"):
        from scipy.special import stdtrit  # type: ignore[import-untyped]
    return -float(stdtrit(degrees, alpha / 2))


def _two_sided(t: float, degrees: int) -> float:
    with extra("scipy"):
        from scipy.special import stdtr
    return min(1.0, 2 * float(stdtr(degrees, -abs(t))))
