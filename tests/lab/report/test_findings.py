from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.report import synthetic_sweeps
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from tests.lab.report.synthetic_sweeps import ArmSpec, Spec
from torchace.lab.report import Results, read_results, summary_sentences
from torchace.lab.report.findings import expectation, findings, headline, missing_runs, other_gains
from torchace.lab.report.page import contents, facts
from torchace.lab.report.statistics import compare
from torchace.lab.report.tables import difference_tables
from torchace.lab.sweeps.result import SweepResult


def _swept(
    tmp_path: Path,
    cross_entropy: Callable[[float], float],
    disagreement: Callable[[float], float] = lambda d: 0.01 + 0.02 * d,
    **changes: Any,
) -> Results:
    arm = ArmSpec("a", "arm", 4, [0, 0.3, 0.7], cross_entropy, lambda d: 0.05, disagreement)
    spec = replace(Spec("x", "x", [arm], image_shape=None), **changes)
    return read_results(synthetic_sweeps.write(tmp_path / "run", spec))


def _texts(results: Results, arm: int = 0) -> dict[str, str]:
    return {finding.topic: finding.text for finding in findings(results, results.arms[arm])}


def _headline(results: Results) -> str:
    found = headline(results, results.arms[0])
    assert found is not None
    return found.sentence


def test_a_significant_gain(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 - 0.05 * d)
    assert _texts(results) == {}
    comparison = compare(results, results.arms[0], "cross_entropy")
    difference = comparison.at(0.7) if comparison else None
    assert difference is not None
    assert difference.joint_interval is not None
    level = sum(results.values(results.arms[0], 0.0, "cross_entropy").values()) / 5
    mean, low, high = (f"−{-100 * value / level:.1f}" for value in (difference.mean, *difference.joint_interval))
    assert _headline(results) == (
        f"λ=0.7 lowers cross entropy: {mean} % (95 % interval {low} to {high} %, corrected for 2 λ)."
    )


def test_a_significant_loss(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 + 0.05 * d)
    assert _headline(results).startswith(
        "The test data choose λ=0; λ=0.3 raises cross entropy: +7.5 % (95 % interval +"
    )


def test_gains_beside_a_best_mean_that_is_noise(tmp_path: Path) -> None:
    """The figure beside the headline shows them as significant."""
    results = _swept(tmp_path, lambda d: 0.2 - 0.05 * d)
    assert other_gains(results, results.arms[0]) == ""
    for seed in range(5):  # λ=0.7 has the lowest mean still, with a wide interval
        file = tmp_path / "run" / "runs" / f"a-l0.7-s{seed}.json"
        run = json.loads(file.read_text())
        run["metrics"]["test"]["cross_entropy"] += 0.1 * (seed - 2)
        file.write_text(json.dumps(run))
    results = read_results(tmp_path / "run")
    assert _headline(results).startswith("λ=0.7 does not change cross entropy")
    text = other_gains(results, results.arms[0])
    assert re.fullmatch(r" λ=0\.3 lowers cross entropy: −7\.\d % \(95 % interval −\d\.\d to −\d\.\d %\)\.", text)
    assert text.strip() in contents(results).notes
    assert summary_sentences(results) == [_headline(results) + text]


def test_a_regression(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "run", FitSpec(arm="sweep", arrays=False)))
    assert _headline(results).startswith("λ=0.3 lowers mean squared error: −")


@pytest.mark.parametrize("slope", [-0.003, -0.0006, -0.0004, -0.0002, 0.0, 0.001])
def test_a_verdict_and_its_interval_never_disagree(tmp_path: Path, slope: float) -> None:
    """The sentence, the table's bold type and the interval beside them come from one test."""
    results = _swept(tmp_path, lambda d: 0.2 + slope * d, lambda d: 0.01, validation=6000)
    arm = results.arms[0]
    comparison = compare(results, arm, "cross_entropy")
    assert comparison is not None
    found = headline(results, arm)
    assert found is not None
    low, high = re.findall(r"([+−]?)[\d.]+ (?:to|%,)", found.interval.removeprefix("95 % interval "))
    assert ("lowers" in found.verdict) == (high == "−")
    assert ("raises" in found.verdict) == (low == "+")
    assert ("significantly" in found.verdict) == (low != high)
    (table,) = difference_tables(results)
    for row, difference in zip(table.sections[0].rows, comparison.differences, strict=True):
        assert difference.joint_interval is not None
        assert row[2].strong == (min(difference.joint_interval) > 0 or max(difference.joint_interval) < 0)


def test_collapsed_members(table2_results: Results, tmp_path: Path) -> None:
    smoc = table2_results.arms[2]
    first = findings(table2_results, smoc)[0]
    assert first.topic == "Collapsed members of “SMOC”"
    assert first.text.startswith("At every λ, the members differ on fewer than 0.20 % of the test cases: they have")
    assert findings(table2_results, table2_results.arms[0]) == []  # one member
    partly = _swept(tmp_path, lambda d: 0.2, lambda d: 0.0005 + 0.02 * d)
    assert _texts(partly)["Collapsed members of “arm”"].startswith("At λ=0, the members differ")


@pytest.mark.parametrize(("level", "is_better"), [(0.0644, True), (0.0800, False)])
def test_a_baseline_that_is_better(tmp_path: Path, level: float, is_better: bool) -> None:
    arms = [
        ArmSpec("a", "shared batches", 4, [0, 0.5], lambda d: 0.0670 - 0.001 * d, lambda d: 0.02),
        ArmSpec("b", "separate batches", 4, [0], lambda d: level, lambda d: 0.02, baseline=True),
    ]
    results = read_results(synthetic_sweeps.write(tmp_path / "run", Spec("x", "x", arms, image_shape=None)))
    texts = [f.text for f in findings(results, results.arms[0]) if f.topic == "Against “separate batches”"]
    assert [text.startswith("The baseline is better. Cross entropy of “shared") for text in texts] == [True] * is_better


def test_a_baseline_as_good(table2_results: Results) -> None:
    text = _texts(table2_results, 2)["Against “K=1, head started at 1/√10”"]
    assert text.startswith("The baseline does as well, as far as 5 seeds can tell.")


def test_one_seed_gives_no_verdict(single_seed: Path) -> None:
    results = read_results(single_seed)
    assert _headline(results).startswith("λ=0.7 may change cross entropy (one seed: no interval): −17.")
    assert SweepResult(single_seed).table().select_dtypes("object").empty  # NaN, not None, where there is no interval


def test_identical_seeds_give_no_verdict(tmp_path: Path) -> None:
    directory = synthetic_sweeps.small(tmp_path / "run", seeds=[0, 1, 2])
    for diversity in ("0", "0.3", "0.7"):
        first = (directory / "runs" / f"shared-l{diversity}-s0.json").read_text()
        for seed in (1, 2):
            copy = first.replace('"seed": 0', f'"seed": {seed}').replace("-s0", f"-s{seed}")
            (directory / "runs" / f"shared-l{diversity}-s{seed}.json").write_text(copy)
    assert "λ=0.7 may change cross entropy (the same in every seed: no interval)" in _headline(read_results(directory))
    metrics = json.loads((directory / "runs" / "shared-l0-s0.json").read_text())["metrics"]
    level = metrics["test"]["cross_entropy"]
    for file in directory.glob("runs/*.json"):
        run = json.loads(file.read_text())
        metrics["test"]["cross_entropy"] = level * (1 - 1e-8 * (8 + run["seed"]) * run["diversity"])  # of float32
        file.write_text(json.dumps({**run, "metrics": metrics}))
    assert "λ=0.7 does not change cross entropy (equal up to rounding: no interval)" in _headline(
        read_results(directory)
    )


def test_validation_data_chooses(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 - 0.05 * d, validation=5000)
    found = headline(results, results.arms[0])
    assert found is not None
    assert found.detail.endswith("paired over 5 seeds. The validation data chose λ.")
    zero = _swept(tmp_path / "zero", lambda d: 0.2 + 0.05 * d, validation=5000)
    assert _headline(zero).startswith("The validation data choose λ=0; λ=0.3 raises cross entropy: +")


@pytest.mark.parametrize(
    ("experiment", "run", "is_given"),
    [
        ({}, {}, True),
        ({}, {"best_epoch": 1}, True),
        ({}, {"best_epoch": 9}, True),  # more than the history has
        ({}, {"history": []}, False),
        ({"config": {"model": {"kind": "smoc"}}}, {}, False),
        ({"config": {"arms": [{"model": {"kind": "branch"}}]}}, {}, False),
        ({"config": {"arms": 3.0, "model": {"kind": ["a"]}}}, {}, False),
        ({"task": "multilabel"}, {}, False),
        ({"task": "regression"}, {}, False),
    ],
)
def test_the_rule_of_one_training_is_for_classifiers_of_own_layers(
    tmp_path: Path, experiment: dict[str, Any], run: dict[str, Any], is_given: bool
) -> None:
    """A task with one label has one «class», of which the rule knows nothing."""
    classes = ["a"] if "task" in experiment else list("abcdefghij")
    results = _swept(tmp_path, lambda d: 0.2, validation=5000, overrides=experiment, classes=classes)
    for file in (tmp_path / "run" / "runs").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **run}))
    results = read_results(tmp_path / "run")
    assert expectation(results, results.arms[0]).startswith(" Rule of thumb: search λ") == is_given


@pytest.mark.parametrize(("best", "measured"), [(0.7, " Measured at λ=0.3: {} %."), (0.3, "")])
def test_a_predicted_gain_stands_beside_the_measured_one(tmp_path: Path, best: float, measured: str) -> None:
    changes = {"validation": 5000, "classes": list("abcdefghij")}
    results = _swept(tmp_path, lambda d: 0.2 + (d - best) ** 2 * (1 + d), lambda d: 0.04, **changes)
    arm, text = results.arms[0], expectation(results, results.arms[0])
    zero, there = (sum(results.values(arm, d, "cross_entropy").values()) for d in (0.0, 0.3))
    assert " search λ on validation data, from λ=0.3. " in text
    assert text.partition("training samples.")[2] == measured.format(
        f"{100 * (there / zero - 1):.1f}".replace("-", "−")
    )


def test_arms_with_data_of_their_own(tmp_path: Path) -> None:
    arms = [ArmSpec(n, n, 4, [0, 0.5], lambda d: 0.3, lambda d: 0.05, baseline=n == "b") for n in "ab"]
    directory = synthetic_sweeps.write(tmp_path / "run", Spec("x", "x", arms, image_shape=None, validation=5000))
    same = read_results(directory)
    assert "Against “b”" in _texts(same)
    assert [name for name, _ in facts(same)][:2] == ["Data", "Seeds"]

    experiment = json.loads((directory / "experiment.json").read_text())
    experiment["arms"][1]["data"] = {**experiment["data"], "name": "digits", "test": 500, "validation": 0}
    (directory / "experiment.json").write_text(json.dumps(experiment))
    results = read_results(directory)
    assert "Against “b”" not in _texts(results)
    assert len(difference_tables(results)) == len(difference_tables(same)) - 1
    stated = dict(facts(results))
    assert stated["Data"].startswith("mnist: 55,000 for training, 5,000 for validation, 10,000 for testing")
    assert stated["Data of “b”"].startswith("digits: 55,000 for training, 500 for testing")


def test_failures_are_counted(failing: Path, table1_results: Results, tmp_path: Path) -> None:
    # 65 planned, 6 failed, one unreadable
    text = missing_runs(read_results(failing))[0].text
    assert text.startswith("58 of 65 runs finished, 6 failed, and 3 files could not be read.")
    nothing = _swept(tmp_path, lambda d: 0.2, failed=[("a", d, s) for d in (0, 0.3, 0.7) for s in range(5)])
    assert findings(nothing, nothing.arms[0]) == []
    assert missing_runs(nothing)[0].text.startswith("0 of 15 runs finished, 15 failed")
    assert missing_runs(table1_results) == []


def test_regressors_collapse_when_their_spread_is_small_beside_the_error(tmp_path: Path) -> None:
    def collapse(name: str, *diversities: str) -> str:
        directory = write_fit(tmp_path / name, FitSpec(arm="sweep", arrays=False))
        for path in (path for d in diversities for path in (directory / "runs").glob(f"sweep-l{d}-s*.json")):
            run = json.loads(path.read_text())
            run["metrics"]["test"]["spread"] *= 1e-4
            path.write_text(json.dumps(run))
        return _texts(read_results(directory))["Collapsed members of “shared”"]

    below = "the members have a spread below 1 % of the ensemble's error"
    assert collapse("all", "0", "0.3", "0.9").startswith(f"At every λ, {below}")
    assert collapse("one", "0").startswith(f"At λ=0, {below}")
