"""What a chosen λ is worth: its paired comparison with λ=0 on fresh seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchace._statistics import mean_over_seeds, mean_over_seeds_and_samples

ALPHA = 0.05  # how often an interval may miss


@dataclass(frozen=True)
class Gain:
    """By how much the chosen λ lowers the score of λ=0, seed by seed on fresh seeds: above zero is better.

    `low` and `high` are a 95 % interval of the mean for new seeds and new samples, None for a single seed. Where
    `samples` is None it covers the noise between seeds alone. Where the samples chose λ among several it holds for all
    of these together (`choices` of them, Bonferroni).
    """

    split: str
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]  # those for which both trainings finished
    beyond_noise: bool
    samples: int | None = None
    choices: int = 1

    @classmethod
    def of(
        cls,
        split: str,
        baseline: Mapping[int, ArrayLike | None],
        chosen: Mapping[int, ArrayLike | None],
        *,
        weight: NDArray[np.float64] | None = None,
        choices: int = 1,
    ) -> Gain | None:
        """The paired comparison of two λ; None where no seed finished with both.

        Args:
            split: What the samples are called.
            baseline: The losses at λ=0 by seed, one a sample; or their mean, for an interval over seeds alone.
            chosen: Likewise at the chosen λ.
            weight: Of the samples.
            choices: Among how many λ these very samples chose.

        Example:
            >>> gain = Gain.of("test", {5: 0.5, 6: 0.6, 7: 0.7}, {5: 0.4, 6: 0.4, 7: None})
            >>> round(gain.mean, 6), round(gain.low, 4), round(gain.high, 4), gain.seeds, gain.beyond_noise
            (0.15, -0.4853, 0.7853, (5, 6), False)
            >>> gain = Gain.of("test", {5: [0.9, 0.3, 0.3], 6: [0.9, 0.4, 0.2]}, {5: [0.4] * 3, 6: [0.4] * 3})
            >>> round(gain.mean, 6), round(gain.low, 4), round(gain.high, 4), gain.samples
            (0.1, -0.7694, 1.3517, 3)
        """
        pairs = {seed: (baseline[seed], chosen[seed]) for seed in baseline}
        found = {seed: np.subtract(a, b) for seed, (a, b) in pairs.items() if a is not None and b is not None}
        if not found:
            return None
        differences = np.stack([np.atleast_1d(difference) for difference in found.values()])  # (S, N)
        means = np.average(differences, axis=1, weights=weight)
        estimate = mean_over_seeds_and_samples(differences, weight) or mean_over_seeds(means)
        if estimate is None:
            return cls(split, float(means.mean()), None, None, tuple(found), False, choices=choices)
        low, high = estimate.interval(ALPHA / choices)
        beyond = low > 0 or high < 0
        return cls(split, float(means.mean()), low, high, tuple(found), beyond, estimate.samples, choices)
