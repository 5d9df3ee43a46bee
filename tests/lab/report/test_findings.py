from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.report import synthetic_sweeps
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from tests.lab.report.synthetic_sweeps import ArmSpec, Spec
from torchace.lab.report import Results, read_results
from torchace.lab.report.findings import findings, headline, remarks
from torchace.lab.report.setup import facts
from torchace.lab.report.statistics import best_diversity, compare
from torchace.lab.report.tables import difference_tables, result_table


def _swept(
    tmp_path: Path,
    cross_entropy: Callable[[float], float],
    disagreement: Callable[[float], float] = lambda d: 0.01 + 0.02 * d,
    **changes: object,
) -> Results:
    arm = ArmSpec("a", "arm", 4, [0, 0.3, 0.7], cross_entropy, lambda d: 0.05, disagreement)
    spec = Spec("x", "x", [arm], image_shape=None)
    for key, value in changes.items():
        setattr(spec, key, value)
    return read_results(synthetic_sweeps.write(tmp_path / "run", spec))


def _texts(results: Results, arm: int = 0) -> dict[str, str]:
    return {finding.topic: finding.text for finding in findings(results, results.arms[arm])}


def test_a_significant_gain(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 - 0.05 * d)
    texts = _texts(results)
    assert texts["Disagreement"].startswith("It rises with λ, from 1.0")
    assert texts["Cross entropy"].startswith("Lowest at λ=0.7: 0.165")
    evidence = "It is significant (p < 0.001, corrected for 2 λ). The interval covers 5 seeds alone."
    assert evidence in texts["Cross entropy"]
    assert texts["Cross entropy"].endswith("Also significantly lower at λ=0.3.")
    comparison = compare(results, results.arms[0], "cross_entropy")
    difference = comparison.at(0.7) if comparison else None
    assert difference is not None
    assert difference.margin is not None
    assert headline(results, results.arms[0]) == (
        f"λ=0.7 lowers cross entropy by 17.5 ± {100 * difference.margin / 0.2:.1f} %. The members' disagreement rises."
    )


def test_a_significant_loss(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 + 0.05 * d)
    text = _texts(results)["Cross entropy"]
    assert text.startswith("No λ above 0 lowers it: it is lowest at λ=0 (0.200")
    assert text.endswith("Significantly higher at λ=0.3 and 0.7.")
    assert headline(results, results.arms[0]) == (
        "No λ lowers cross entropy significantly. The members' disagreement rises."
    )


def test_a_difference_within_the_noise(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 - 0.0001 * d, lambda d: 0.01)
    texts = _texts(results)
    assert "It is not significant (p = " in texts["Cross entropy"]
    assert texts["Disagreement"].endswith("With 5 seeds, that is not significant.")
    assert headline(results, results.arms[0]) == (
        "No λ lowers cross entropy significantly. The members' disagreement does not rise significantly."
    )


@pytest.mark.parametrize("slope", [-0.003, -0.001, -0.0006, -0.0004, -0.0002, 0.0, 0.0004, 0.001])
def test_a_verdict_and_its_interval_never_disagree(tmp_path: Path, slope: float) -> None:
    """The sentence, the table's bold type and the interval beside them come from one test."""
    results = _swept(tmp_path, lambda d: 0.2 + slope * d, lambda d: 0.01, validation=6000)
    arm = results.arms[0]
    comparison = compare(results, arm, "cross_entropy")
    assert comparison is not None
    gains = [d for d in comparison.differences if d.joint_interval and d.joint_interval[1] < 0]
    assert headline(results, arm).startswith("No λ lowers") == (not gains)
    best = comparison.at(best_diversity(results, arm))
    if best is not None:
        assert ("It is significant" in _texts(results)["Cross entropy"]) == (best in gains)
    (table,) = difference_tables(results)
    for row, difference in zip(table.sections[0].rows, comparison.differences, strict=True):
        low, high = difference.joint_interval or (0.0, 0.0)
        assert row[2].strong == (low > 0 or high < 0)


def test_disagreement_that_falls(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2, lambda d: 0.03 - 0.02 * d)
    assert _texts(results)["Disagreement"].startswith("It falls with λ, from")


def test_collapsed_members(table2_results: Results, tmp_path: Path) -> None:
    smoc = table2_results.arms[2]
    first = findings(table2_results, smoc)[0]
    assert (first.topic, first.warning) == ("Collapsed members", True)
    assert "collapsed onto each other: they differ on at most 0.04 % of the test cases, for every λ." in first.text
    assert "The members have collapsed onto each other." in headline(table2_results, smoc)
    assert findings(table2_results, table2_results.arms[0]) == []  # a baseline with one λ
    partly = _swept(tmp_path, lambda d: 0.2, lambda d: 0.0005 + 0.02 * d)
    assert "At λ=0 members have collapsed onto each other (below 0.20 %)" in _texts(partly)["Disagreement"]


@pytest.mark.parametrize(("level", "verdict"), [(0.0644, "is better"), (0.0800, "is worse")])
def test_a_baseline_is_compared(tmp_path: Path, level: float, verdict: str) -> None:
    arms = [
        ArmSpec("a", "shared batches", 4, [0, 0.5], lambda d: 0.0670 - 0.001 * d, lambda d: 0.02),
        ArmSpec("b", "separate batches", 4, [0], lambda d: level, lambda d: 0.02, baseline=True),
    ]
    results = read_results(synthetic_sweeps.write(tmp_path / "run", Spec("x", "x", arms, image_shape=None)))
    assert _texts(results)["Against “separate batches”"].endswith(f"The baseline {verdict}.")
    assert ("“separate batches” is better." in headline(results, results.arms[0])) == (verdict == "is better")


def test_a_baseline_as_good(table2_results: Results) -> None:
    texts = _texts(table2_results, 2)
    assert texts["Against “K=1, head started at 1/√10”"].endswith(
        "The baseline does as well, as far as 5 seeds can tell."
    )
    assert headline(table2_results, table2_results.arms[2]).endswith("“K=1, head started at 1/√10” does as well.")


def test_one_seed_gives_no_verdict(single_seed: Path) -> None:
    results = read_results(single_seed)
    assert _texts(results)["Cross entropy"].endswith("one seed: no interval, so it may be noise.")
    assert headline(results, results.arms[0]) == (
        "Cross entropy is lowest at λ=0.7. One seed: no interval, so this may be noise."
    )
    assert "One seed" in [remark.topic for remark in remarks(results)]


def test_identical_seeds_give_no_verdict(tmp_path: Path) -> None:
    directory = synthetic_sweeps.small(tmp_path / "run", seeds=[0, 1, 2])
    for diversity in ("0", "0.3", "0.7"):
        first = (directory / "runs" / f"shared-l{diversity}-s0.json").read_text()
        for seed in (1, 2):
            copy = first.replace('"seed": 0', f'"seed": {seed}').replace("-s0", f"-s{seed}")
            (directory / "runs" / f"shared-l{diversity}-s{seed}.json").write_text(copy)
    assert "the same in every seed: no interval" in _texts(read_results(directory))["Cross entropy"]


def test_validation_data_chooses(table1_results: Results, tmp_path: Path) -> None:
    assert "Chosen on the test set" in [remark.topic for remark in remarks(table1_results)]
    results = _swept(tmp_path, lambda d: 0.2 - 0.05 * d, validation=5000)
    assert "Chosen on the test set" not in [remark.topic for remark in remarks(results)]
    text = _texts(results)["Chosen on validation data"]
    assert text.startswith("The validation data picks λ=0.7. On the test set, its paired difference in cross")
    zero = _swept(tmp_path / "zero", lambda d: 0.2 + 0.05 * d, validation=5000)
    assert _texts(zero)["Chosen on validation data"].startswith("The validation data picks λ=0: a deep ensemble")


def test_seeds_that_some_lambda_lack(tmp_path: Path) -> None:
    """The numbers in a sentence are those that are compared in it."""
    arm = ArmSpec("a", "arm", 4, [0, 0.9], lambda d: 0.3 - 0.01 * d, lambda d: 0.05)
    directory = synthetic_sweeps.write(tmp_path / "run", Spec("x", "x", [arm], image_shape=None))
    runs = [{"arm": "a", "diversity": d, "seed": s} for d, s in [(0, 0), (0, 1), (0, 2), (0, 3), (0.9, 0), (0.9, 1)]]
    (directory / "jobs.json").write_text(json.dumps({"format": 1, "jobs": [{"id": "a-0", "runs": runs}]}))
    for d, s in [(0, 4), (0.9, 2), (0.9, 3), (0.9, 4)]:
        (directory / "runs" / f"a-l{d:g}-s{s}.json").unlink()
    for s in (2, 3):  # better by far, where λ=0.9 was not tried
        file = directory / "runs" / f"a-l0-s{s}.json"
        run = json.loads(file.read_text())
        run["metrics"]["test"]["cross_entropy"] = 0.1
        file.write_text(json.dumps(run))
    results = read_results(directory)
    text = _texts(results)["Cross entropy"]
    here, there = (float(number) for number in re.findall(r"0\.\d+", text.partition(":")[2])[:2])
    assert text.startswith("Lowest at λ=0.9: ")
    assert " at λ=0, over the 2 seeds that both have. The paired difference is " in text
    assert here < there
    assert remarks(results)[0].text == "All 6 runs finished."
    assert "Bold: the best mean of its arm over the seeds that all its λ have" in result_table(results).note


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
    assert "“b”" not in headline(results, results.arms[0])
    assert len(difference_tables(results)) == len(difference_tables(same)) - 1
    stated = dict(facts(results))
    assert stated["Data of “a”"].startswith("mnist: 55,000 for training, 5,000 for validation, 10,000 for testing")
    assert stated["Data of “b”"].startswith("digits: 55,000 for training, 500 for testing")
    [blind] = [remark for remark in remarks(results) if remark.topic == "Chosen on the test set"]
    assert blind.text.startswith("“b” had no validation data, so the best λ was chosen on the test set.")


def test_failures_are_counted(failing: Path, tmp_path: Path) -> None:
    remark = remarks(read_results(failing))[0]
    assert remark.warning
    # 65 planned, 6 failed, one unreadable
    assert remark.text.startswith("58 of 65 runs finished. 6 failed and 3 files could not be read (listed at the end).")
    nothing = _swept(tmp_path, lambda d: 0.2, failed=[("a", d, s) for d in (0, 0.3, 0.7) for s in range(5)])
    assert findings(nothing, nothing.arms[0]) == []
    assert remarks(nothing)[0].text.startswith("0 of 15 runs finished. 15 failed")


def test_a_regression(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "run", FitSpec(arm="sweep", arrays=False)))
    texts = _texts(results)
    assert list(texts) == [
        "Spread", "Mean squared error", "Mean absolute error", "One member", "Chosen on validation data",
    ]  # fmt: skip
    assert texts["Spread"].startswith("It rises with λ, from 1")
    assert "test cases" not in texts["Spread"]
    assert "corrected for 2 λ" in texts["Mean squared error"]
    assert texts["Mean squared error"].endswith("Significantly higher at λ=0.9.")
    assert texts["One member"].startswith("A single member gets worse at λ=0.3: its mean squared error changes by +")
    assert texts["One member"].endswith("Averaging gains more than the members lose.")
    assert headline(results, results.arms[0]).startswith("λ=0.3 lowers mean squared error by ")


def test_regressors_collapse_when_their_spread_is_small_beside_the_error(tmp_path: Path) -> None:
    def collapse(name: str, *diversities: str) -> Results:
        directory = write_fit(tmp_path / name, FitSpec(arm="sweep", arrays=False))
        for path in (path for d in diversities for path in (directory / "runs").glob(f"sweep-l{d}-s*.json")):
            run = json.loads(path.read_text())
            run["metrics"]["test"]["spread"] *= 1e-4
            path.write_text(json.dumps(run))
        return read_results(directory)

    results = collapse("all", "0", "0.3", "0.9")
    first = findings(results, results.arms[0])[0]
    assert (first.topic, first.warning) == ("Collapsed members", True)
    assert "less than 1 % of the ensemble's error, for every λ" in first.text
    assert "The members have collapsed onto each other." in headline(results, results.arms[0])
    assert (
        "At λ=0 members have collapsed onto each other (below 1 % of the ensemble's error)"
        in (_texts(collapse("one", "0"))["Spread"])
    )


@pytest.mark.parametrize("name", ["table1_results", "table2_results"])
def test_a_sentence_has_few_numbers(name: str, request: pytest.FixtureRequest) -> None:
    """At most two numbers beside values of λ, K and the level of an interval."""
    results = request.getfixturevalue(name)
    texts = [headline(results, arm) for arm in results.arms]
    texts += [finding.text for arm in results.arms for finding in findings(results, arm)]
    for sentence in (sentence for text in texts for sentence in re.split(r"(?<=\.) ", text)):
        plain = re.sub(r"[λK]=[\d., ]+(and [\d.]+)?|“[^”]*”|95 %|corrected for \d+ λ", "", sentence)
        assert len(re.findall(r"\d+(?:[.,]\d+)*", plain)) <= 2, sentence
