from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import stats

from tests.lab.report import synthetic_sweeps
from torchace.lab.report import Results, read_results
from torchace.lab.report.statistics import (
    EQUAL,
    Comparison,
    best_diversity,
    compare,
    paired_difference,
    paired_differences,
    summarize,
)
from torchace.lab.report.tables import difference_tables

# Two implementations of the t distribution, each good to about 1e-12.
CLOSE = 1e-9


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_summary_is_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(0.07, 0.001, n)
    found = summarize(values.tolist())
    interval = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.mean, found.sd) == (pytest.approx(values.mean()), pytest.approx(values.std(ddof=1)))
    assert found.interval == pytest.approx(interval, rel=CLOSE)


def test_one_value_has_no_spread() -> None:
    found = summarize([0.3])
    assert (found.mean, found.sd, found.interval) == (0.3, None, None)


@pytest.mark.parametrize("n", [2, 5, 30])
def test_paired_difference_is_scipys_paired_t_test(n: int) -> None:
    rng = np.random.default_rng(n)
    reference = rng.normal(0.07, 0.01, n)
    values = reference + rng.normal(0.0005, 0.001, n)
    found = paired_difference(dict(enumerate(values)), dict(enumerate(reference)))
    expected = stats.ttest_rel(values, reference)
    assert found is not None
    interval = expected.confidence_interval(0.95)
    assert found.joint_interval == pytest.approx((interval.low, interval.high), rel=1e-7)


def test_only_common_seeds_are_paired() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.0, 2: 5.0, 3: 0.0})
    assert found is not None
    assert (found.n, found.mean) == (2, 2.5)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_no_interval_and_a_note() -> None:
    found = paired_difference({0: 1.0}, {0: 3.0})
    assert found is not None
    assert (found.mean, found.joint_interval, found.note) == (-2.0, None, "one seed: no interval")
    assert not found.significant


@pytest.mark.parametrize(
    ("offset", "note"), [(0.0, EQUAL), (1e-8, EQUAL), (0.1, "the same in every seed: no interval")]
)
def test_equal_differences_have_no_interval_and_a_note(offset: float, note: str) -> None:
    reference = {seed: 0.1 * seed + 0.3 for seed in range(4)}
    found = paired_difference({seed: value + offset for seed, value in reference.items()}, reference)
    assert found is not None
    assert found.joint_interval is None
    assert found.note == note


def test_family_is_corrected_for_its_tests() -> None:
    rng = np.random.default_rng(0)
    reference = dict(enumerate(rng.normal(0.1, 0.01, 6)))
    series = {d: {s: v + rng.normal(-0.01 * d, 0.002) for s, v in reference.items()} for d in (0.1, 0.3, 0.7)}
    series[0.5] = {0: 0.4}  # one pair: reported, not tested, not counted
    found = paired_differences(series, reference)
    assert [difference.diversity for difference in found] == [0.1, 0.3, 0.5, 0.7]
    tested = [difference for difference in found if difference.estimate is not None]
    for difference in tested:
        values = series[difference.diversity]
        expected = stats.ttest_rel([values[s] for s in range(6)], [reference[s] for s in range(6)])
        wide = expected.confidence_interval(1 - 0.05 / 3)
        assert difference.joint_interval == pytest.approx((wide.low, wide.high), rel=1e-7)
    assert found[2].joint_interval is None


def test_intervals_hold_together() -> None:
    """Of 400 families without any effect, at most about 5 % have an interval that misses zero."""
    rng = np.random.default_rng(1)
    rejected = 0
    for _ in range(400):
        reference = dict(enumerate(rng.normal(size=5)))
        series = {d: {s: v + rng.normal() for s, v in reference.items()} for d in (1, 2, 3, 4, 5)}
        found = paired_differences(series, reference)
        rejected += any(d.significant for d in found)
    # independent tests: 400 x 4.9 % = 20 expected, four standard deviations of 4.3 above
    assert rejected <= 37


def _with_samples(directory: Path, spread: float, count: int = 50) -> Path:
    """Writes every run's losses on the test samples, whose mean is the run's score."""
    experiment = json.loads((directory / "experiment.json").read_text())
    experiment["data"]["test"] = count
    (directory / "experiment.json").write_text(json.dumps(experiment))
    for path in sorted((directory / "runs").glob("*.json")):
        run = json.loads(path.read_text())
        rng = np.random.default_rng([round(1e6 * run["diversity"]), 5])  # the same samples are hard for every seed
        losses = rng.normal(size=count)
        losses = run["metrics"]["test"]["cross_entropy"] + spread * (losses - losses.mean())
        save_file({"sample_cross_entropy": losses.astype(np.float32)}, path.with_suffix(".safetensors"))
    return directory


def test_differences_are_for_new_samples_where_these_were_recorded(tmp_path: Path) -> None:
    arm = synthetic_sweeps.ArmSpec("a", "a", 2, [0, 0.5], lambda d: 0.2 - 0.02 * d, lambda d: 0.05)
    directory = synthetic_sweeps.write(tmp_path / "run", synthetic_sweeps.Spec("x", "x", [arm]))

    def read() -> tuple[Results, Comparison]:
        results = read_results(directory)
        found = compare(results, results.arms[0], "cross_entropy")
        assert found is not None
        return results, found

    results, seeds = read()
    assert seeds.differences[0].samples is None
    assert seeds.differences[0].significant
    assert "and cover new seeds alone." in difference_tables(results)[0].note
    _with_samples(directory, spread=1e-5)
    _, sure = read()
    assert sure.differences[0].samples == 50
    assert sure.differences[0].significant
    _with_samples(directory, spread=0.1)
    results, unsure = read()
    # each seed gains as much as before, on samples that say little
    assert unsure.differences[0].mean == pytest.approx(seeds.differences[0].mean, rel=1e-12)
    assert not unsure.differences[0].significant
    assert "and cover new seeds and new test samples where these were recorded" in difference_tables(results)[0].note
    # what is no part of the score, or not of all samples, is left alone
    experiment = json.loads((directory / "experiment.json").read_text())
    experiment["data"]["test"] = 60
    (directory / "experiment.json").write_text(json.dumps(experiment))
    assert read()[1].differences[0].samples is None


def test_compare_with_own_zero_and_with_a_baseline(table1_results: Results) -> None:
    shared, exchanged, separate = table1_results.arms
    own = compare(table1_results, exchanged, "cross_entropy")
    assert own is not None
    assert (own.arm, own.reference_diversity, own.differences[0].tests) == (exchanged, 0, 5)
    assert own.at(0) is None
    assert own.at(0.3) is not None
    other = compare(table1_results, shared, "cross_entropy", separate)
    assert other is not None
    assert [difference.diversity for difference in other.differences] == [0, 0.05, 0.1, 0.3, 0.5, 0.7]
    assert other.differences[0].tests == 6
    assert compare(table1_results, separate, "cross_entropy") is None


def test_compare_needs_runs_at_zero(tmp_path: Path) -> None:
    arm = synthetic_sweeps.ArmSpec("a", "a", 2, [0.3, 0.5], lambda d: 0.1, lambda d: 0.1)
    results = read_results(synthetic_sweeps.write(tmp_path / "run", synthetic_sweeps.Spec("x", "x", [arm])))
    assert compare(results, results.arms[0], "cross_entropy") is None


def test_best_diversity_compares_common_seeds(tmp_path: Path) -> None:
    """λ=0.7 lost its worst seed: on the seeds both have, λ=0.3 is lower."""
    directory = synthetic_sweeps.small(tmp_path / "run", seeds=[0, 1, 2])
    values = {0: (0.5, 0.5, 0.5), 0.3: (0.1, 0.1, 0.9), 0.7: (0.2, 0.2, None)}
    for diversity, numbers in values.items():
        for seed, number in enumerate(numbers):
            path = directory / "runs" / f"shared-l{diversity:g}-s{seed}.json"
            run = json.loads(path.read_text())
            if number is None:
                path.unlink()
                continue
            run["metrics"]["test"]["cross_entropy"] = number
            path.write_text(json.dumps(run))
    results = read_results(directory)
    assert best_diversity(results, results.arms[0]) == 0.3
