"""Intervals that a finding has to hold in, so that it does not come from the luck of a few samples."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, NamedTuple

from numpy.typing import NDArray

Values = NDArray[Any]

LEVEL = 0.99  # two-sided, for each finding: ten of them together raise a false alarm in one case of twenty at most


class Interval(NamedTuple):
    """A number, and where it lies with confidence."""

    value: float
    low: float
    high: float


def critical(samples: int, tests: int = 1) -> float:
    """How many standard errors an interval reaches to either side.

    The t distribution's value to first order in 1/(n - 1), for intervals that hold for several tests at once
    (Bonferroni).

    Args:
        samples: n.
        tests: How many intervals are looked at together.

    Example:
        >>> round(critical(10_000), 3), round(critical(50), 3), round(critical(50, tests=5), 3)
        (2.576, 2.676, 3.257)
    """
    z = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * tests))
    return z + (z**3 + z) / (4 * max(samples - 1, 1))


def mean(values: Values, tests: int = 1) -> Interval:
    """The mean of values `(N,)`."""
    value = float(values.mean())
    half = critical(len(values), tests) * _error(values)
    return Interval(value, value - half, value + half)


def ratio(above: Values, below: Values, tests: int = 1) -> Interval:
    """The ratio of two means over the same samples, `(N,)` each, by the delta method; 0 where both are.

    Example:
        >>> import numpy as np
        >>> ratio(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
        Interval(value=0.5, low=0.5, high=0.5)
    """
    scale = float(below.mean())
    if scale == 0:
        return Interval(0.0, 0.0, 0.0)
    value = float(above.mean()) / scale
    half = critical(len(above), tests) * _error((above - value * below) / scale)
    return Interval(value, value - half, value + half)


def share(hits: float, samples: int, tests: int = 1) -> Interval:
    """A binomial share, with Wilson's interval, which is never empty.

    Example:
        >>> Interval(*(round(end, 4) for end in share(0, 50)))
        Interval(value=0.0, low=0.0, high=0.1253)
    """
    if samples == 0:
        return Interval(0.0, 0.0, 1.0)
    z, p = critical(samples, tests), hits / samples
    centre = (p + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples**2)) / (1 + z * z / samples)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def _error(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
