"""The gain of a chosen λ: its paired comparison with λ=0 on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchace._statistics import mean_over_seeds, mean_over_seeds_and_samples

ALPHA = 0.05  # of the intervals


@dataclass(frozen=True)
class Gain:
    """By how much the chosen λ lowers the score of λ=0, paired by fresh seeds: above zero is better.

    Attributes:
        split: The name of the samples.
        mean: The mean difference.
        low: Lower end of its 95 % interval for new seeds and new samples; None for a single seed.
        high: Upper end.
        seeds: Seeds with which both trainings finished.
        beyond_noise: Whether the interval leaves out zero.
        samples: Number of samples that the interval covers; None if it covers the noise between seeds alone.
        choices: Number of λ that these very samples chose from; the interval holds for all of them (Bonferroni).
    """

    split: str
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    beyond_noise: bool
    samples: int | None = None
    choices: int = 1

    @classmethod
    def measure(
        cls,
        split: str,
        baseline: Mapping[int, ArrayLike | None],
        chosen: Mapping[int, ArrayLike | None],
        *,
        weight: NDArray[np.float64] | None = None,
        num_choices: int = 1,
    ) -> Gain | None:
        """Compare two λ seed by seed; None if no seed finished with both.

        Args:
            split: The name of the samples.
            baseline: Losses at λ=0 by seed, one a sample; or their means, for an interval over seeds alone.
            chosen: Losses at the chosen λ.
            weight: Sample weights.
            num_choices: Number of λ that these samples chose from.

        Example:
            >>> gain = Gain.measure("test", {5: 0.5, 6: 0.6, 7: 0.7}, {5: 0.4, 6: 0.4, 7: None})
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
        if estimate is None:
            return cls(split, float(means.mean()), None, None, tuple(by_seed), False, choices=num_choices)
        low, high = estimate.interval(ALPHA / num_choices)
        beyond_noise = low > 0 or high < 0
        return cls(
            split, float(means.mean()), low, high, tuple(by_seed), beyond_noise, estimate.samples, num_choices
        )


def describe_gain(gain: Gain, metric: str, num_fresh: int) -> str:
    """A sentence without its subject: "lowers the cross entropy … by …: beyond the noise."."""
    verb, sign = ("lowers", 1) if gain.mean >= 0 else ("raises", -1)
    seeds = _count(len(gain.seeds), "fresh seed")
    if len(gain.seeds) < num_fresh:
        seeds += f"; {num_fresh - len(gain.seeds)} more failed"
    where = "validation samples that chose it" if gain.split == "validation" else f"{gain.split} samples"
    if gain.low is None or gain.high is None:
        (amount,) = _format(abs(gain.mean))
        return f"{verb} the {metric} on the {where} by {amount} ({seeds}): too few to tell from noise."
    amount, low, high = _format(abs(gain.mean), *sorted((sign * gain.low, sign * gain.high)))
    together = "" if gain.choices == 1 else f" for all {gain.choices} λ above 0 together"
    over = "seeds alone," if gain.samples is None else f"{_count(gain.samples, 'sample')} and"
    if not gain.beyond_noise:
        finding = "within the noise, λ=0 would do as well"
    else:
        finding = "beyond the noise" if gain.mean > 0 else "beyond the noise, λ=0 does better"
    return (
        f"{verb} the {metric} on the {where} by {amount} "
        f"(95 % interval {low} to {high}{together}, over {over} {seeds}): {finding}."
    )


def _format(*values: float) -> list[str]:
    """Numbers with as many decimals as give the largest of them three digits."""
    largest = max(map(abs, values))
    size = math.floor(math.log10(largest)) if largest > 0 else 0
    if not -6 <= size <= 6:
        return [f"{value:.3g}" for value in values]
    return [f"{value:.{max(0, 2 - size)}f}" for value in values]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
