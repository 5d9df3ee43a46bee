"""99 % confidence intervals over samples, without scipy."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, NamedTuple

from numpy.typing import NDArray

Values = NDArray[Any]

LEVEL = 0.99  # two-sided, for each finding: of ten findings, at most 1 case in 20 has a false alarm


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def critical_value(samples: int, tests: int = 1) -> float:
    """Return a quantile of the t distribution to first order in 1/(n - 1), Bonferroni-corrected for several tests."""
    z = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * tests))
    return z + (z**3 + z) / (4 * max(samples - 1, 1))


def mean_interval(values: Values, tests: int = 1) -> Interval:
    """Return the interval for the mean of values `(N,)`."""
    value = float(values.mean())
    half = critical_value(len(values), tests) * _standard_error(values)
    return Interval(value, value - half, value + half)


def ratio_interval(numerator: Values, denominator: Values) -> Interval:
    """Return the interval for the ratio of two means of `(N,)` values, by the delta method; 0 for 0/0."""
    scale = float(denominator.mean())
    if scale == 0:
        return Interval(0.0, 0.0, 0.0)
    value = float(numerator.mean()) / scale
    half = critical_value(len(numerator)) * _standard_error((numerator - value * denominator) / scale)
    return Interval(value, value - half, value + half)


def proportion_interval(hits: float, samples: int, tests: int = 1) -> Interval:
    """Return Wilson's interval for a binomial proportion."""
    if samples == 0:
        return Interval(0.0, 0.0, 1.0)
    z, p = critical_value(samples, tests), hits / samples
    centre = (p + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples**2)) / (1 + z * z / samples)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def _standard_error(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
