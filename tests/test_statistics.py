"""Intervals over seeds and samples: known cases and coverage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from torchace._statistics import mean_over_seeds, mean_over_seeds_and_samples

RUNS = 2000
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {  # mean 0, variance 1
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
    "lognormal": lambda rng, shape: (rng.lognormal(size=shape) - math.exp(0.5)) / math.sqrt(math.e * (math.e - 1)),
    "losses": lambda rng, shape: np.subtract(*rng.lognormal(size=(2, *shape))) / math.sqrt(2 * math.e * (math.e - 1)),
}
OTHERS = ("normal", "t3", "lognormal")


def coverage(kind: str, samples: int, shares: tuple[float, float, float], runs: int) -> dict[str, float]:
    """How often intervals of five seeds cover the truth; `benchmarks/coverage.py` has more of it.

    `shares` are those of seeds, samples and their interaction in the variance of the mean.
    """
    rng, draw = np.random.default_rng(0), DISTRIBUTIONS[kind]
    scale = np.sqrt(np.array(shares) * [5, samples, 5 * samples])
    hits = {"seeds alone": 0, "seeds and samples": 0}
    for _ in range(runs):
        effects = scale[0] * rng.standard_normal((5, 1)) + scale[1] * draw(rng, (1, samples))
        d = effects + scale[2] * draw(rng, (5, samples))
        for name, estimate in zip(hits, (mean_over_seeds(d.mean(1)), mean_over_seeds_and_samples(d)), strict=True):
            assert estimate is not None
            low, high = estimate.interval(0.05)
            hits[name] += low <= 0 <= high
    return {name: count / runs for name, count in hits.items()}


def slack(runs: int) -> float:
    """Three standard deviations of a share that is counted in so many runs."""
    return 3 * math.sqrt(0.95 * 0.05 / runs)


def test_without_a_seed_effect_it_is_the_t_interval_of_the_samples() -> None:
    samples = np.concatenate([x := np.random.default_rng(0).normal(size=15), -x]) + 0.1  # no skewness
    found = mean_over_seeds_and_samples(np.tile(samples, (4, 1)))
    assert found is not None
    expected = scipy.stats.ttest_1samp(samples, 0)
    # rounding of sums of 120 numbers
    assert found.interval(0.05) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)


def test_without_a_sample_effect_it_is_the_t_interval_of_the_seeds() -> None:
    seeds = np.random.default_rng(0).normal(size=5)
    found, alone = mean_over_seeds_and_samples(np.tile(seeds[:, None], (1, 8))), mean_over_seeds(seeds)
    expected = scipy.stats.ttest_1samp(seeds, 0)
    for estimate in (found, alone):
        assert estimate is not None
        assert estimate.interval(0.05) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)


@given(st.integers(2, 6), st.integers(2, 40), st.integers(0, 10**6), st.sampled_from(sorted(DISTRIBUTIONS)))
def test_a_higher_level_gives_a_wider_interval(seeds: int, samples: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    found = mean_over_seeds_and_samples(DISTRIBUTIONS[kind](rng, (seeds, samples)) + rng.normal())
    assert found is not None
    low, high = found.interval(0.05)
    assert low < found.mean < high
    wider = found.interval(0.01)
    assert wider[0] < low < high < wider[1]


@pytest.mark.parametrize("shape", [(1, 30), (5, 1), (5, 0)])
def test_one_seed_or_one_sample_has_no_interval(shape: tuple[int, int]) -> None:
    assert mean_over_seeds_and_samples(np.zeros(shape)) is None


def test_equal_differences_have_no_noise() -> None:
    found = mean_over_seeds_and_samples(np.full((3, 4), 0.5))
    assert found is not None
    assert found.interval(0.05) == (0.5, 0.5)


@pytest.mark.parametrize("kind", ["losses", *(pytest.param(k, marks=pytest.mark.extended) for k in OTHERS)])
@pytest.mark.parametrize("shares", [(0.1, 0.7, 0.2), (0.5, 0.3, 0.2)])
def test_intervals_cover_the_truth(kind: str, shares: tuple[float, float, float]) -> None:
    found = coverage(kind, 30, shares, RUNS)
    assert found["seeds and samples"] >= 0.92 - slack(RUNS)
    assert found["seeds alone"] < found["seeds and samples"]
    many = coverage(kind, 400, shares, RUNS // 2)["seeds and samples"]
    assert 0.94 - slack(RUNS // 2) <= many <= 0.96 + slack(RUNS // 2)


def test_the_mean_over_samples_is_students_with_a_longer_tail():
    from scipy import stats

    from torchace._statistics import mean_over_samples

    symmetric = np.concatenate([np.linspace(-1, 1, 51) + 0.3])
    estimate = mean_over_samples(symmetric)
    expected = stats.t.interval(0.95, 50, symmetric.mean(), stats.sem(symmetric))
    assert np.allclose(estimate.interval(0.05), expected)
    low, high = mean_over_samples(np.exp(np.random.default_rng(0).normal(size=200))).interval(0.05)
    mean = (low + high) / 2
    assert high - np.exp(0.5) > 0 > low - np.exp(0.5)
    assert mean > np.exp(np.random.default_rng(0).normal(size=200)).mean()  # the upper end moved
    assert mean_over_samples([1.0]) is None
    assert mean_over_samples([2.0, 2.0]).interval(0.05) == (2.0, 2.0)
