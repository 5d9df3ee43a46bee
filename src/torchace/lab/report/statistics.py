"""Means over seeds, and paired differences with intervals that hold for all λ of an arm together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from torchace._statistics import MeanEstimate, mean_over_seeds, mean_over_seeds_and_samples
from torchace.lab.report.arrays import Array
from torchace.lab.report.results import Arm, Results

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

    `interval` is the two-sided 95 % interval of this difference alone, `together` that of its whole family (Bonferroni:
    all hold at once with 95 %), `p` the same test's, `corrected` the same times the number of tests. `samples` is how
    many test samples they cover beside the seeds; None: seeds alone. All four are None where there is nothing to test;
    `note` says why.
    """

    diversity: float
    n: int
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    together: tuple[float, float] | None
    p: float | None
    corrected: float | None
    note: str
    samples: int | None = None
    estimate: MeanEstimate | None = field(default=None, repr=False, compare=False)

    @property
    def significant(self) -> bool:
        """Whether the family's interval leaves out zero: the corrected p is then below 0.05."""
        return self.together is not None and not self.together[0] <= 0 <= self.together[1]


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
    estimate = mean_over_seeds(values)
    return Summary(n, mean, sd, None if estimate is None else estimate.interval(1 - LEVEL))


def paired_difference(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    diversity: float = 0.0,
    samples: Mapping[int, Array] | None = None,
) -> Difference | None:
    """The mean of `values - reference` over the seeds both have.

    Args:
        values: A number by seed.
        reference: What to subtract, by seed.
        diversity: The λ to note in the result.
        samples: The same differences sample by sample, `(N,)` by seed. Where every common seed has them, the interval
            is for new samples too.

    Returns:
        The difference on its own (`together` and `corrected` are None), or None without a common seed.
    """
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    n, mean, sd = _moments([values[seed] - reference[seed] for seed in seeds])
    estimate = mean_over_seeds([values[seed] - reference[seed] for seed in seeds])
    if estimate is None:
        return Difference(diversity, n, mean, None, None, None, None, None, "one seed: no interval")
    if samples is not None and samples.keys() >= set(seeds):
        estimate = mean_over_seeds_and_samples(np.stack([samples[seed] for seed in seeds])) or estimate
    # differences that are equal but for rounding leave no noise to measure the mean against
    if estimate.error <= 1e-12 * max(abs(v) for v in [*values.values(), *reference.values()]):
        return Difference(diversity, n, mean, 0.0, None, None, None, None, "the same in every seed: no interval")
    estimate = replace(estimate, mean=mean)  # of the scores as they were written
    interval = estimate.interval(1 - LEVEL)
    return Difference(
        diversity, n, mean, sd, interval, None, estimate.p, None, "", samples=estimate.samples, estimate=estimate
    )


def family(
    series: Mapping[float, Mapping[int, float]],
    reference: Mapping[int, float],
    samples: Mapping[float, Mapping[int, Array]] | None = None,
) -> tuple[Difference, ...]:
    """Every λ's paired difference to one reference, corrected for their number.

    Args:
        series: For each λ a number by seed.
        reference: What they are compared with, by seed.
        samples: For each λ the differences sample by sample, see `paired_difference`.

    Returns:
        The differences in ascending λ; a λ without a common seed is left out.
    """
    samples = samples or {}
    found = [paired_difference(series[d], reference, d, samples.get(d)) for d in sorted(series)]
    differences = [difference for difference in found if difference is not None]
    tests = sum(difference.p is not None for difference in differences)
    return tuple(_corrected(difference, tests) for difference in differences)


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
    key = (arm.name, metric, None if reference is None else reference.name, split)
    if key not in results.comparisons:
        results.comparisons[key] = _compare(results, arm, metric, reference, split)
    return cast("Comparison | None", results.comparisons[key])


def _compare(results: Results, arm: Arm, metric: str, reference: Arm | None, split: str) -> Comparison | None:
    anchor = arm if reference is None else reference
    if not results.data_of(arm).is_tested_as(results.data_of(anchor)):
        return None
    at = results.diversities(anchor)
    if not at or (at[0] != 0 and (reference is None or len(at) > 1)):
        return None
    diversities = [diversity for diversity in results.diversities(arm) if reference is not None or diversity != at[0]]
    series = {diversity: results.values(arm, diversity, metric, split) for diversity in diversities}
    samples: dict[float, dict[int, Array]] = {}
    if split == "test" and (level := results.sample_scores(anchor, at[0], metric)):
        for diversity in diversities:
            here = results.sample_scores(arm, diversity, metric)
            samples[diversity] = {seed: here[seed] - level[seed] for seed in here.keys() & level.keys()}
    differences = family(series, results.values(anchor, at[0], metric, split), samples)
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


def _corrected(difference: Difference, tests: int) -> Difference:
    """A difference with the interval and the p value that hold for a family of so many."""
    if difference.estimate is None or difference.p is None:
        return difference
    together = difference.estimate.interval((1 - LEVEL) / tests)
    return replace(difference, together=together, corrected=min(1.0, tests * difference.p))
