"""Gain of the chosen λ: a paired comparison with λ=0 on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchace._statistics import mean_over_seeds, mean_over_seeds_and_samples
from torchace.lab.schema.results import Gain

ALPHA = 0.05  # of the intervals


def measure_gain(
    split: str,
    baseline: Mapping[int, ArrayLike | None],
    chosen: Mapping[int, ArrayLike | None],
    *,
    weight: NDArray[np.float64] | None = None,
    num_choices: int = 1,
) -> Gain | None:
    """Compare the chosen λ with λ=0 by seed; None if no seed finished with both.

    Losses are `(N,)` by seed, or their means for an interval over seeds alone. With `num_choices` λ chosen from on the
    same samples, the interval is corrected (Bonferroni).

    Example:
        >>> gain = measure_gain("test", {5: 0.5, 6: 0.6, 7: 0.7}, {5: 0.4, 6: 0.4, 7: None})
        >>> round(gain.mean, 6), round(gain.low, 4), round(gain.high, 4), gain.seeds, gain.beyond_noise
        (0.15, -0.4853, 0.7853, (5, 6), False)
    """
    pairs = {seed: (baseline[seed], chosen[seed]) for seed in baseline}
    by_seed = {seed: np.subtract(a, b) for seed, (a, b) in pairs.items() if a is not None and b is not None}
    if not by_seed:
        return None
    differences = np.stack([np.atleast_1d(difference) for difference in by_seed.values()])  # (S, N)
    means = np.average(differences, axis=1, weights=weight)
    estimate = mean_over_seeds_and_samples(differences, weight) or mean_over_seeds(means)
    low, high = (None, None) if estimate is None else estimate.interval(ALPHA / num_choices)
    return Gain.model_construct(
        split=split,
        mean=float(means.mean()),
        low=low,
        high=high,
        seeds=tuple(by_seed),
        beyond_noise=low is not None and high is not None and (low > 0 or high < 0),
        samples=None if estimate is None else estimate.samples,
        choices=num_choices,
    )


def describe_gain(gain: Gain, metric: str, num_fresh: int) -> str:
    """Return a sentence without its subject: `lowers the cross entropy … by …: beyond the noise.`."""
    verb, sign = ("lowers", 1) if gain.mean >= 0 else ("raises", -1)
    seeds = count(len(gain.seeds), "fresh seed")
    if len(gain.seeds) < num_fresh:
        seeds += f"; {num_fresh - len(gain.seeds)} more failed"
    where = "validation samples that chose it" if gain.split == "validation" else f"{gain.split} samples"
    if gain.low is None or gain.high is None:
        (amount,) = _format(abs(gain.mean))
        return f"{verb} the {metric} on the {where} by {amount} ({seeds}): too few to tell from noise, so λ=0 is kept."
    amount, low, high = _format(abs(gain.mean), *sorted((sign * gain.low, sign * gain.high)))
    together = "" if gain.choices == 1 else f" for all {gain.choices} λ above 0 together"
    over = "seeds alone," if gain.samples is None else f"{count(gain.samples, 'sample')} and"
    if not gain.beyond_noise:
        finding = "within the noise, so λ=0 is kept"
    else:
        finding = "beyond the noise" if gain.mean > 0 else "beyond the noise, so λ=0 is kept"
    return (
        f"{verb} the {metric} on the {where} by {amount} "
        f"(95 % interval {low} to {high}{together}, over {over} {seeds}): {finding}."
    )


def _format(*values: float) -> list[str]:
    """Format numbers with common decimals: three digits for the largest."""
    largest = max(map(abs, values))
    size = math.floor(math.log10(largest)) if largest > 0 else 0
    if not -6 <= size <= 6:
        return [f"{value:.3g}" for value in values]
    return [f"{value:.{max(0, 2 - size)}f}" for value in values]


def count(number: int, noun: str) -> str:
    """Format a count: `1 seed`, `60,000 samples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
