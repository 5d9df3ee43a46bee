"""Means over seeds, and paired differences with joint intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev

import numpy as np

from torchace._statistics import MeanEstimate, mean_over_seeds, mean_over_seeds_and_samples
from torchace.lab.report.results import Array, Results
from torchace.lab.schema.results import ArmSummary

ALPHA = 0.05

ROUNDING = 5e-7  # relative: of scores in float32
EQUAL = "equal up to rounding: no interval"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """Mean over seeds, standard deviation and t interval; None below two seeds."""

    mean: float
    sd: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """Mean paired difference over common seeds."""

    diversity: float
    n: int
    mean: float
    estimate: MeanEstimate | None = None  # None: not testable
    note: str = ""  # the reason
    tests: int = 1  # number of tests for the Bonferroni correction

    @cached_property
    def joint_interval(self) -> Interval | None:
        """Joint 95 % interval of all tests."""
        return None if self.estimate is None else self.estimate.interval(ALPHA / self.tests)

    @property
    def samples(self) -> int | None:
        """Number of test samples that the interval covers; None for seeds alone."""
        return None if self.estimate is None else self.estimate.samples

    @property
    def significant(self) -> bool:
        """Whether the joint interval excludes zero."""
        return self.joint_interval is not None and not self.joint_interval[0] <= 0 <= self.joint_interval[1]


@dataclass(frozen=True)
class Comparison:
    """Differences of an arm's λ to one reference: a family of tests."""

    arm: ArmSummary
    reference_diversity: float
    differences: tuple[Difference, ...]

    def at(self, diversity: float | None) -> Difference | None:
        """Return the difference at one λ."""
        return next((d for d in self.differences if d.diversity == diversity), None)


def summarize(values: Sequence[float]) -> Summary:
    """Return mean, standard deviation (n - 1) and the 95 % t interval."""
    estimate = mean_over_seeds(values)
    if estimate is None:
        return Summary(values[0], None, None)
    return Summary(fmean(values), stdev(values), estimate.interval(ALPHA))


def paired_difference(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    diversity: float = 0.0,
    samples: Mapping[int, Array] | None = None,
) -> Difference | None:
    """Return the mean of `values - reference` over common seeds, if any.

    With differences by sample, `samples` `(N,)` for every common seed, the interval covers new samples too.
    """
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    differences = [values[seed] - reference[seed] for seed in seeds]
    mean = fmean(differences)
    level = max(abs(v) for v in [*values.values(), *reference.values()])
    if max(map(abs, differences)) <= ROUNDING * level:
        return Difference(diversity, len(seeds), mean, note=EQUAL)
    estimate = mean_over_seeds(differences)
    if estimate is None:
        return Difference(diversity, len(seeds), mean, note="one seed: no interval")
    if samples is not None and samples.keys() >= set(seeds):
        estimate = mean_over_seeds_and_samples(np.stack([samples[seed] for seed in seeds])) or estimate
    if estimate.error <= 1e-12 * level:  # no variance to test with
        return Difference(diversity, len(seeds), mean, note="the same in every seed: no interval")
    return Difference(diversity, len(seeds), mean, replace(estimate, mean=mean))


def paired_differences(
    series: Mapping[float, Mapping[int, float]],
    reference: Mapping[int, float],
    samples: Mapping[float, Mapping[int, Array]] | None = None,
) -> tuple[Difference, ...]:
    """Return the paired differences to one reference, by ascending λ, corrected for their number."""
    found = [paired_difference(series[d], reference, d, (samples or {}).get(d)) for d in sorted(series)]
    known = [difference for difference in found if difference is not None]
    tests = max(1, sum(difference.estimate is not None for difference in known))
    return tuple(replace(difference, tests=tests) for difference in known)


def compare(results: Results, arm: ArmSummary, metric: str, reference: ArmSummary | None = None) -> Comparison | None:
    """Compare an arm's λ with its λ=0, or with the λ=0 or only λ of another arm; None if not comparable.

    λ has no effect on one member: differences to its λ=0 are rounding errors.
    """
    anchor = reference or arm
    if anchor is arm and arm.num_members == 1:
        return None
    data, other = results.arm_data(arm), results.arm_data(anchor)
    if (data.name, data.test, data.classes) != (other.name, other.test, other.classes):
        return None
    at = results.diversities(anchor)
    if not at or (at[0] != 0 and (reference is None or len(at) > 1)):
        return None
    diversities = [diversity for diversity in results.diversities(arm) if reference is not None or diversity != at[0]]
    series = {diversity: results.values(arm, diversity, metric) for diversity in diversities}
    level = results.sample_scores(anchor, at[0], metric)
    samples = {diversity: sample_differences(results, arm, diversity, metric, level) for diversity in diversities}
    differences = paired_differences(series, results.values(anchor, at[0], metric), samples)
    return Comparison(arm, at[0], differences) if differences else None


def sample_differences(
    results: Results, arm: ArmSummary, diversity: float, metric: str, reference: Mapping[int, Array]
) -> dict[int, Array]:
    """Return the differences to a reference on each test sample, `(N,)`, by common seed."""
    found = results.sample_scores(arm, diversity, metric) if reference else {}
    return {seed: found[seed] - reference[seed] for seed in found.keys() & reference.keys()}


def best_diversity(results: Results, arm: ArmSummary, metric: str | None = None) -> float | None:
    """Return the λ with the best mean of a metric on the test data, by default the task's loss."""
    metric = metric or results.task.loss
    means = comparable_means(results, arm, metric)
    best = max if results.metrics[metric].higher_is_better else min
    return best(means, key=means.__getitem__) if means else None


def comparable_means(results: Results, arm: ArmSummary, metric: str, split: str = "test") -> dict[float, float]:
    """Return means by λ over the seeds common to all λ, or over all seeds if there are none."""
    found = {diversity: results.values(arm, diversity, metric, split) for diversity in results.diversities(arm)}
    series = {diversity: values for diversity, values in found.items() if values}
    common = set.intersection(*(set(values) for values in series.values())) if series else set()
    return {diversity: fmean(values[seed] for seed in common or values) for diversity, values in series.items()}
