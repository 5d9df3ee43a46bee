"""The gain of a chosen λ: numbers and sentence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from torchace.lab.tuning.search import describe_gain, measure_gain


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.sampled_from(["both", "both", "both", "first", "second"])),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60)
def test_paired_t_interval_over_seeds(rows: list[tuple[float, float, str]]) -> None:
    baseline = {seed: None if failed == "first" else a for seed, (a, _, failed) in enumerate(rows)}
    chosen = {seed: None if failed == "second" else b for seed, (_, b, failed) in enumerate(rows)}
    gain = measure_gain("test", baseline, chosen)
    pairs = [(seed, a, b) for seed, (a, b, failed) in enumerate(rows) if failed == "both"]
    if not pairs:
        assert gain is None
        return
    assert gain is not None
    assert gain.seeds == tuple(seed for seed, _, _ in pairs)
    a, b = np.array([p[1] for p in pairs]), np.array([p[2] for p in pairs])
    assert gain.mean == pytest.approx(float(np.mean(a - b)), abs=1e-12)  # rounding of numbers up to 10
    if len(pairs) == 1:
        assert (gain.low, gain.high, gain.beyond_noise) == (None, None, False)
    elif np.ptp(a - b) > 1e-6:  # scipy warns of equal differences
        interval = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
        assert (gain.low, gain.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
        if min(abs(interval.low), abs(interval.high)) > 1e-9:
            assert gain.beyond_noise == (not interval.low <= 0 <= interval.high)


def test_interval_covers_new_samples_and_all_choices() -> None:
    # equal gains of all seeds on samples that differ widely: uncertain
    rng = np.random.default_rng(0)
    losses = 0.2 + rng.normal(size=40) + 1e-3 * rng.normal(size=(5, 40))
    zeros = dict.fromkeys(range(5), np.zeros(40))
    gain = measure_gain("test", dict(enumerate(losses)), zeros)
    assert gain is not None
    assert (gain.samples, gain.beyond_noise) == (40, False)
    # the seeds' part is next to nothing: the t interval of the samples' means
    interval = scipy.stats.ttest_1samp(losses.mean(0), 0).confidence_interval(0.95)
    wider = (gain.high - gain.low) / (interval.high - interval.low)
    assert 1 <= wider < 1.1  # one end moves with the skewness of the samples
    of_two = measure_gain("validation", dict(enumerate(losses)), zeros, num_choices=2)
    assert of_two.high - of_two.low > 1.1 * (gain.high - gain.low)


def test_samples_of_weight_zero_do_not_count() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 4, 20))
    weighted = measure_gain("test", dict(enumerate(a)), dict(enumerate(b)), weight=np.repeat([1.0, 0.0], 10))
    few = measure_gain("test", dict(enumerate(a[:, :10])), dict(enumerate(b[:, :10])))
    assert weighted.samples == few.samples == 10
    # rounding of sums of ten numbers of size 1
    assert (weighted.mean, weighted.low, weighted.high) == pytest.approx((few.mean, few.low, few.high), abs=1e-12)


@pytest.mark.parametrize(
    ("split", "differences", "sentence"),
    [
        ("test", [0.01, 0.02], r"lowers the cross entropy on the test samples by 0.0150 \(95 % interval -0.0485 to "
         r"0.0785, over seeds alone, 2 fresh seeds\): not significant, so λ=0 is kept\."),
        ("test", [0.01, 0.012, 0.014], r"lowers .* by 0.0120 \(95 % interval 0.0070 to 0.0170, .*: significant\."),
        ("test", [-0.01, -0.012, -0.014], r"raises .* by 0.0120 \(95 % interval 0.0070 to 0.0170, .*\): significant, "
         r"so λ=0 is kept\."),
        ("test", [0.01], r"lowers .* by 0.0100 \(1 fresh seed\): too few seeds for an interval, so λ=0 is kept\."),
        ("test", [0.01, None, 0.03], r"lowers .*, 2 fresh seeds; 1 more failed\): not significant, .*"),
        ("test", [2e7, 3e7], r"lowers .* by 2.5e\+07 \(95 % interval -3.85e\+07 to 8.85e\+07, .*"),
        ("validation", [[0.1] * 4, [0.2] * 4], r"lowers .* on the validation samples that chose it by .* over 4 "
         r"samples and 2 fresh seeds.*"),
    ],
)  # fmt: skip
def test_sentence(split: str, differences: list[Any], sentence: str) -> None:
    baseline = dict(enumerate(differences))
    gain = measure_gain(split, baseline, {seed: np.zeros_like(d) if d else None for seed, d in baseline.items()})
    found = describe_gain(gain, "cross entropy", len(differences))
    assert re.fullmatch(sentence, found), found
