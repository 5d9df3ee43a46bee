"""Confidence intervals: of a mean paired difference over seeds and samples; of means and shares without scipy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchace._extras import missing_extra

Values = NDArray[Any]

LEVEL = 0.99  # two-sided, for each finding of a diagnosis: of ten, at most 1 case in 20 has a false alarm


@dataclass(frozen=True)
class MeanEstimate:
    """A mean with its standard error and skewness; `samples` is None if the error covers seeds only.

    `parts` are shares of the squared error and their degrees of freedom; the t quantile is the mean of theirs, weighted
    by the shares (Cochran and Cox).
    """

    mean: float
    error: float
    parts: tuple[tuple[float, float], ...]
    skewness: float = 0.0
    samples: int | None = None

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the two-sided interval that misses the true mean with probability `alpha`.

        Only the end on the longer tail moves, halfway to that of Hall's transformation: a full correction of both ends
        loses coverage where tails are heavy but symmetric.
        """
        t = sum(share * _t_quantile(alpha, degrees) for share, degrees in self.parts)
        low, high = (max(t, (t + abs(_hall(self.skewness, end))) / 2) for end in (t, -t))
        return self.mean - low * self.error, self.mean + high * self.error


def mean_over_seeds(differences: ArrayLike) -> MeanEstimate | None:
    """Estimate the mean of one number per seed, `(S,)`, with the noise of seeds only; None below two seeds."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return MeanEstimate(float(values.mean()), error, ((1.0, len(values) - 1),))


def mean_over_samples(differences: ArrayLike) -> MeanEstimate | None:
    """Estimate the mean of one number per sample, `(N,)`, for new samples; None below two samples."""
    d = np.asarray(differences, dtype=np.float64)
    size = len(d)
    if size < 2:
        return None
    mean = float(d.mean())
    scale = float(np.abs(d - mean).max())  # against overflow and underflow of powers
    if scale == 0:
        return MeanEstimate(mean, 0.0, ((1.0, size - 1),), samples=size)
    d = (d - mean) / scale
    variance = float(d.var(ddof=1)) / size
    third = float((d**3).sum()) / max(1, (size - 1) * (size - 2)) / size
    return MeanEstimate(mean, scale * math.sqrt(variance), ((1.0, size - 1),), third / variance**1.5, size)


def mean_over_seeds_and_samples(differences: ArrayLike, weight: ArrayLike | None = None) -> MeanEstimate | None:
    r"""Estimate the mean of `differences` `(S, N)` for new seeds and samples; None below two of either.

    With $d_{si} = \mu + a_s + b_i + e_{si}$ the mean's variance is $\sigma_a^2 / S + \sigma_b^2 / N + \sigma_e^2 /
    (S N)$. Sample means estimate the last two terms, seed means the first and last, residuals the last.
    """
    d = np.asarray(differences, dtype=np.float64)
    count, size = d.shape
    effective = float(size)
    if weight is not None:
        w = np.asarray(weight, dtype=np.float64)
        used = w > 0
        d, w = d[:, used], w[used] / w[used].mean() if used.any() else w[used]
        size, effective = len(w), float(w.sum() ** 2 / np.square(w).sum()) if len(w) else 0.0
        mean = (d * w).mean() if size else 0.0
        d = mean + w * (d - mean)  # the error of a ratio of means, to first order
    if count < 2 or effective < 2:
        return None
    mean = float(d.mean())
    d = d - mean
    scale = float(np.abs(d).max())  # against overflow and underflow of powers
    if scale == 0:
        return MeanEstimate(mean, 0.0, ((1.0, count - 1),), samples=size)
    d = d / scale
    by_seed, by_sample = d.mean(1), d.mean(0)  # (S,), (N,)
    residual = d - by_seed[:, None] - by_sample
    interaction = float(np.square(residual).sum()) / ((count - 1) * (size - 1)) / (count * size)
    samples = float(by_sample.var(ddof=1)) / size
    seeds = max(0.0, float(by_seed.var(ddof=1)) / count - interaction)
    variance = samples + seeds
    if variance == 0:  # residuals cancel in every mean
        return MeanEstimate(mean, 0.0, ((1.0, count - 1),), samples=size)
    third = float((by_sample**3).sum()) / max(1, (size - 1) * (size - 2)) / size  # of the samples' mean
    parts = ((seeds / variance, float(count - 1)), (samples / variance, effective - 1))
    return MeanEstimate(mean, scale * math.sqrt(variance), parts, third / variance**1.5, size)


def _hall(skewness: float, t: float) -> float:
    """Return the standardized error whose nearly symmetric transformation is `t` (Hall, 1992)."""
    if abs(skewness) < 1e-8:
        return t
    return float(np.cbrt(1 + skewness * (t - skewness / 6)) - 1) * 3 / skewness


def _t_quantile(alpha: float, degrees: float) -> float:
    """Return the t value that is exceeded in magnitude with probability `alpha`."""
    try:
        from scipy.special import stdtrit  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("Intervals need scipy") from error
    return -float(stdtrit(degrees, alpha / 2))


# Intervals of a diagnosis, at the level 99 %


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
    center = (p + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples**2)) / (1 + z * z / samples)
    return Interval(p, max(0.0, center - half), min(1.0, center + half))


def _standard_error(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
