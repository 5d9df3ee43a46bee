"""Confidence intervals for a mean paired difference, over seeds and over the samples it was measured on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, its standard error, and what its t quantile depends on.

    Attributes:
        mean: The estimate.
        error: Its standard error.
        parts: Shares of the squared error with their degrees of freedom; the quantile is the mean of the parts' t
            quantiles, weighted by their shares (Cochran and Cox).
        skewness: Of the mean, from the samples' skewness.
        samples: How many samples the error covers; None where it covers seeds alone.
    """

    mean: float
    error: float
    parts: tuple[tuple[float, float], ...]
    skewness: float = 0.0
    samples: int | None = None

    def interval(self, alpha: float) -> tuple[float, float]:
        """The two-sided interval that misses the true mean with probability `alpha`.

        The end on the side of the longer tail moves halfway to that of Hall's transformation, the other stays: full
        correction of both ends costs coverage where tails are heavy but symmetric.
        """
        t = sum(share * _t_quantile(alpha, degrees) for share, degrees in self.parts)
        low, high = (max(t, (t + abs(_hall(self.skewness, end))) / 2) for end in (t, -t))
        return self.mean - low * self.error, self.mean + high * self.error

    @property
    def p(self) -> float:
        """The smallest `alpha` whose interval leaves out zero."""
        if self.mean == 0 or self.error == 0:
            return float(self.mean == 0)
        low, high = math.log(1e-300), 0.0
        for _ in range(60):
            middle = (low + high) / 2
            ends = self.interval(math.exp(middle))
            low, high = (middle, high) if ends[0] <= 0 <= ends[1] else (low, middle)
        return math.exp(high)


def mean_over_seeds(differences: ArrayLike) -> MeanEstimate | None:
    """The mean of one number a seed, `(S,)`, with the noise between seeds alone; None below two seeds.

    Example:
        >>> tuple(round(end, 4) for end in mean_over_seeds([0.1, 0.2]).interval(0.05))
        (-0.4853, 0.7853)
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return MeanEstimate(float(values.mean()), error, ((1.0, len(values) - 1),))


def mean_over_seeds_and_samples(differences: ArrayLike, weight: ArrayLike | None = None) -> MeanEstimate | None:
    r"""The mean of `differences`, `(S, N)`, for new seeds and new samples: both effects are random and crossed.

    With $d_{si} = \mu + a_s + b_i + e_{si}$ the mean has the variance
    $\sigma_a^2 / S + \sigma_b^2 / N + \sigma_e^2 / (S N)$. The variance of the sample means over N estimates its last
    two terms, that of the seed means over S its first and last; the residual mean square gives the last, so that the
    first is their difference (0 where that is negative).

    Args:
        differences: Row s has seed s, column i sample i; the same samples for all seeds.
        weight: Of the samples, `(N,)`; None where all count alike.

    Returns:
        The estimate; None below two seeds or two samples.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> found = mean_over_seeds_and_samples(0.1 + rng.normal(size=(5, 1)) + rng.normal(size=(1, 30)))
        >>> found.samples, found.error > mean_over_seeds(rng.normal(size=5) / 10).error
        (30, True)
    """
    d = np.asarray(differences, dtype=np.float64)
    count, size = d.shape
    effective = float(size)
    if weight is not None:
        w = np.asarray(weight, dtype=np.float64)
        kept = w > 0
        d, w = d[:, kept], w[kept] / w[kept].mean() if kept.any() else w[kept]
        size, effective = len(w), float(w.sum() ** 2 / np.square(w).sum()) if len(w) else 0.0
        mean = (d * w).mean() if size else 0.0
        d = mean + w * (d - mean)  # the error of a ratio of means, to first order
    if count < 2 or effective < 2:
        return None
    mean = float(d.mean())
    d = d - mean
    scale = float(np.abs(d).max())  # so that no power of theirs overflows or underflows
    if scale == 0:
        return MeanEstimate(mean, 0.0, ((1.0, count - 1),), samples=size)
    d = d / scale
    by_seed, by_sample = d.mean(1), d.mean(0)  # (S,), (N,)
    residual = d - by_seed[:, None] - by_sample
    interaction = float(np.square(residual).sum()) / ((count - 1) * (size - 1)) / (count * size)
    samples = float(by_sample.var(ddof=1)) / size
    seeds = max(0.0, float(by_seed.var(ddof=1)) / count - interaction)
    variance = samples + seeds
    if variance == 0:  # residuals alone, that cancel in every mean
        return MeanEstimate(mean, 0.0, ((1.0, count - 1),), samples=size)
    third = float((by_sample**3).sum()) / max(1, (size - 1) * (size - 2)) / size  # of the samples' mean
    parts = ((seeds / variance, float(count - 1)), (samples / variance, effective - 1))
    return MeanEstimate(mean, scale * math.sqrt(variance), parts, third / variance**1.5, size)


def _hall(skewness: float, t: float) -> float:
    """The standardized error whose transformation, nearly symmetric in spite of the skewness, is `t` (Hall, 1992)."""
    if abs(skewness) < 1e-8:
        return t
    return float(np.cbrt(1 + skewness * (t - skewness / 6)) - 1) * 3 / skewness


def _t_quantile(alpha: float, degrees: float) -> float:
    """The t value that a share `alpha` of the distribution lies beyond, on both sides together."""
    return -float(_special().stdtrit(degrees, alpha / 2))


def _special() -> Any:
    try:
        from scipy import special  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("Intervals need scipy: pip install 'torchace[tool]'.") from error
    return special
