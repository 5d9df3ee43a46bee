from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.report import synthetic
from tests.lab.report.fits import FitSpec, write_fit
from tests.lab.report.synthetic import ArmSpec, Spec
from torchace.lab.report import Results, read_results
from torchace.lab.report.findings import findings, headline, remarks
from torchace.lab.report.setup import facts
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
    return read_results(synthetic.write(tmp_path / "run", spec))


def _texts(results: Results) -> dict[str, str]:
    [(_, about)] = findings(results)
    return {finding.topic: finding.text for finding in about}


def test_a_gain_beyond_the_noise(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 - 0.05 * d)
    texts = _texts(results)
    assert texts["Disagreement"].startswith("It rose with λ, from 1.0")
    assert texts["Disagreement"].endswith("the knob acted.")
    assert texts["Cross entropy"].startswith("Lowest at λ=0.7: 0.165")
    assert "That is beyond the noise between seeds. Also lower beyond the noise at λ=0.3." in texts["Cross entropy"]
    assert "holding for all 2 λ together; corrected p < 0.001; over 5 seeds alone" in texts["Cross entropy"]
    assert headline(results, results.arms[0]) == (
        "The members' disagreement rose, and cross entropy is lower than at λ=0 beyond the noise, lowest at λ=0.7."
    )


def test_no_gain(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 + 0.05 * d)
    text = _texts(results)["Cross entropy"]
    assert text.startswith("No λ above 0 lowered it: it is lowest at λ=0 (0.200")
    assert text.endswith("Higher beyond the noise at λ=0.3 and 0.7.")
    expected = "The members' disagreement rose, but no λ lowers the cross entropy beyond the noise."
    assert headline(results, results.arms[0]) == expected


def test_a_difference_within_the_noise(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2 - 0.00001 * d, lambda d: 0.01)
    texts = _texts(results)
    assert texts["Cross entropy"].endswith("That is within the noise.") or "No λ above 0" in texts["Cross entropy"]
    assert "did not change beyond the noise" in texts["Disagreement"]
    assert headline(results, results.arms[0]) == (
        "The members' disagreement did not rise beyond the noise, and no λ lowers the cross entropy beyond the noise."
    )


def test_disagreement_that_fell(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2, lambda d: 0.03 - 0.02 * d)
    assert "It fell, from" in _texts(results)["Disagreement"]


def test_collapsed_members_are_called_so(table2_results: Results) -> None:
    [(arm, about)] = findings(table2_results)
    assert arm.name == "smoc"
    assert about[0].warning
    assert about[0].topic == "Collapsed members"
    assert "collapsed onto each other: they differ on at most 0.04 % of the test cases" in about[0].text
    assert "not be an ensemble's" in about[0].text
    assert headline(table2_results, arm).startswith("The members collapsed onto each other, and no λ")


def test_members_collapsed_at_some_lambda_only(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2, lambda d: 0.0005 + 0.02 * d)
    assert "At λ=0 members have collapsed onto each other (below 0.20 %)" in _texts(results)["Disagreement"]


@pytest.mark.parametrize(("level", "verdict"), [(0.0644, "The baseline is better"), (0.0800, "The baseline is worse")])
def test_the_baseline_is_weighed(tmp_path: Path, level: float, verdict: str) -> None:
    arms = [
        ArmSpec("a", "shared batches", 4, [0, 0.5], lambda d: 0.0670 - 0.001 * d, lambda d: 0.02),
        ArmSpec("b", "separate batches", 4, [0], lambda d: level, lambda d: 0.02, baseline=True),
    ]
    results = read_results(synthetic.write(tmp_path / "run", Spec("x", "x", arms, image_shape=None)))
    text = _texts(results)["Against “separate batches”"]
    assert verdict in text
    assert ("; “separate batches” is better." in headline(results, results.arms[0])) == (level < 0.067)


def test_a_baseline_as_good(table2_results: Results) -> None:
    [(arm, about)] = findings(table2_results)
    texts = {finding.topic: finding.text for finding in about}
    assert texts["Against “K=1, head started at 1/√10”"].endswith(
        "the baseline does as well, as far as 5 seeds can tell."
    )
    assert headline(table2_results, arm).endswith("; “K=1, head started at 1/√10” does as well.")


def test_one_seed_gives_no_verdict(single_seed: Path) -> None:
    results = read_results(single_seed)
    texts = _texts(results)
    assert "one seed: no interval" in texts["Cross entropy"]
    assert texts["Cross entropy"].endswith("That cannot be told from the noise between seeds.")
    assert "cannot be told from noise" in headline(results, results.arms[0])
    assert "One seed" in [remark.topic for remark in remarks(results)]


def test_identical_seeds_give_no_verdict(tmp_path: Path) -> None:
    directory = synthetic.small(tmp_path / "run", seeds=[0, 1, 2])
    for diversity in ("0", "0.3", "0.7"):
        first = (directory / "runs" / f"shared-l{diversity}-s0.json").read_text()
        for seed in (1, 2):
            copy = first.replace('"seed": 0', f'"seed": {seed}').replace("-s0", f"-s{seed}")
            (directory / "runs" / f"shared-l{diversity}-s{seed}.json").write_text(copy)
    text = _texts(read_results(directory))["Cross entropy"]
    assert "3 seeds; the same in every seed: no interval" in text


def test_the_test_set_is_no_place_to_choose(table1_results: Results, tmp_path: Path) -> None:
    assert "Chosen on the test set" in [remark.topic for remark in remarks(table1_results)]
    validated = _swept(tmp_path, lambda d: 0.2 - 0.05 * d, validation=5000)
    assert "Chosen on the test set" not in [remark.topic for remark in remarks(validated)]
    assert _texts(validated)["Chosen on validation data"].startswith("The validation data picks λ=0.7. On the test set")


def test_seeds_that_some_lambda_lack(tmp_path: Path) -> None:
    """The numbers in a sentence are those that are compared in it, and whoever asked for no more is done."""
    arm = ArmSpec("a", "arm", 4, [0, 0.9], lambda d: 0.3 - 0.01 * d, lambda d: 0.05)
    directory = synthetic.write(tmp_path / "run", Spec("x", "x", [arm], image_shape=None))
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
    assert " at λ=0 over the 2 seeds that both have, a paired difference of " in text
    assert here < there
    assert remarks(results)[0].text == "All 6 runs finished."
    assert "Bold: the best mean of its arm over the seeds that all its λ have" in result_table(results).note


def test_arms_with_data_of_their_own(tmp_path: Path) -> None:
    arms = [ArmSpec(n, n, 4, [0, 0.5], lambda d: 0.3, lambda d: 0.05, baseline=n == "b") for n in "ab"]
    directory = synthetic.write(tmp_path / "run", Spec("x", "x", arms, image_shape=None, validation=5000))
    same = read_results(directory)
    assert "Against “b”" in {finding.topic for _, about in findings(same) for finding in about}
    assert [name for name, _ in facts(same)][:2] == ["Data", "Seeds"]

    experiment = json.loads((directory / "experiment.json").read_text())
    experiment["arms"][1]["data"] = {**experiment["data"], "name": "digits", "test": 500, "validation": 0}
    (directory / "experiment.json").write_text(json.dumps(experiment))
    results = read_results(directory)
    assert "Against “b”" not in {finding.topic for _, about in findings(results) for finding in about}
    assert "“b”" not in headline(results, results.arms[0])
    assert len(difference_tables(results)) == len(difference_tables(same)) - 1
    told = dict(facts(results))
    assert told["Data of “a”"].startswith("mnist: 55,000 to train, 5,000 to validate, 10,000 to test")
    assert told["Data of “b”"].startswith("digits: 55,000 to train, 500 to test")
    [blind] = [remark for remark in remarks(results) if remark.topic == "Chosen on the test set"]
    assert blind.text.startswith("“b” had no validation data, so the λ called lowest")


def test_runs_that_were_made_on_several_machines(tmp_path: Path) -> None:
    arm = ArmSpec("a", "a", 2, [0], lambda d: 0.3, lambda d: 0.1)
    directory = synthetic.write(tmp_path / "run", Spec("x", "x", [arm]))
    for seed in range(5):
        file = directory / "runs" / f"a-l0-s{seed}.json"
        own = {"threads": 1 if seed < 2 else 4, "device": "NVIDIA H200", "versions": {"torch": f"2.{seed // 4}"}}
        file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    told = dict(facts(read_results(directory)))
    assert told["Hardware"] == "device NVIDIA H200; cpu two cores; threads 1 (2 runs), 4 (3 runs)"
    assert "torch 2.0 (4 runs), 2.1 (1 run)" in told["Versions"]


def test_failures_are_counted(failing: Path, table1_results: Results) -> None:
    remark = remarks(read_results(failing))[0]
    assert remark.warning
    # 65 planned, 6 failed, one unreadable
    assert remark.text.startswith("58 of 65 runs finished; 6 failed; 3 files could not be read (listed at the end).")
    assert remarks(table1_results)[0].text == "All 65 runs finished."


def test_nothing_finished(tmp_path: Path) -> None:
    results = _swept(tmp_path, lambda d: 0.2, failed=[("a", d, s) for d in (0, 0.3, 0.7) for s in range(5)])
    assert findings(results) == []
    assert remarks(results)[0].text.startswith("0 of 15 runs finished; 15 failed")


def _about(results: Results, role: str) -> dict[str, str]:
    [about] = [about for arm, about in findings(results) if arm.role == role]
    return {finding.topic: finding.text for finding in about}


def test_a_fit_speaks_of_its_model_first(regression_results: Results) -> None:
    assert [arm.role for arm, _ in findings(regression_results)] == ["model", "check"]
    texts = _about(regression_results, "check")
    assert list(texts) == ["Spread", "Mean squared error", "Mean absolute error", "One member"]
    assert texts["Spread"].startswith("It rose with λ, from 1")
    assert texts["Mean squared error"].startswith("Lowest at λ=0.3: 1,")
    assert "test cases" not in texts["Spread"]
    assert texts["One member"].startswith(
        "On its own a member gets worse at λ=0.3: its mean squared error changes by +"
    )
    assert headline(regression_results, regression_results.arms[1]) == (
        "The members' spread rose, and λ=0.3 lowers the mean squared error beyond the noise."
    )
    assert [remark.text for remark in remarks(regression_results)] == ["All 35 runs finished."]


def test_a_classifiers_fit_was_chosen_before_its_check(classification_results: Results) -> None:
    texts = _about(classification_results, "check")
    assert "Disagreement" in texts
    assert "Cross entropy" in texts
    assert "Chosen on validation data" not in texts  # the search chose, on other seeds


@pytest.mark.parametrize(("gain", "does"), [(-0.2, "raises"), (0.0, "does not change"), (0.1, "lowers")])
def test_what_the_chosen_lambda_did(tmp_path: Path, gain: float, does: str) -> None:
    spec = FitSpec(arms=["check"], arrays=False, gain=gain, num_members=40)
    results = read_results(write_fit(tmp_path / "fit", spec))
    link = "and" if does == "lowers" else "but"
    assert headline(results, results.arms[0]) == (
        f"The members' spread rose, {link} λ=0.3 {does} the mean squared error beyond the noise."
    )


def test_a_regressions_sweep_in_words(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "run", FitSpec(arms=["sweep"], arrays=False)))
    [(_, about)] = findings(results)
    texts = {finding.topic: finding.text for finding in about}
    assert "holding for all 2 λ together" in texts["Mean squared error"]
    assert texts["Mean squared error"].endswith("Higher beyond the noise at λ=0.9.")
    assert texts["Chosen on validation data"].startswith("The validation data picks λ=0.3. On the test set its mean sq")
    assert headline(results, results.arms[0]).endswith(
        "mean squared error is lower than at λ=0 beyond the noise, lowest at λ=0.3."
    )


def _collapse(directory: Path, diversities: tuple[str, ...]) -> Results:
    for diversity in diversities:
        for path in (directory / "runs").glob(f"sweep-l{diversity}-s*.json"):
            run = json.loads(path.read_text())
            run["metrics"]["test"]["spread"] *= 1e-4
            path.write_text(json.dumps(run))
    return read_results(directory)


def test_regressors_collapse_when_their_spread_is_nothing_beside_the_error(tmp_path: Path) -> None:
    spec = FitSpec(arms=["sweep"], arrays=False)
    results = _collapse(write_fit(tmp_path / "all", spec), ("0", "0.3", "0.9"))
    [(arm, about)] = findings(results)
    assert about[0].warning
    assert about[0].topic == "Collapsed members"
    assert "less than a hundredth of the ensemble's error, whatever λ is" in about[0].text
    assert headline(results, arm).startswith("The members collapsed onto each other")
    [(_, about)] = findings(_collapse(write_fit(tmp_path / "one", spec), ("0",)))
    assert about[0].topic == "Spread"
    assert "At λ=0 members have collapsed onto each other (below a hundredth of the ensemble's error)" in about[0].text


def test_a_model_alone_was_trained_once(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False)))
    assert [remark.topic for remark in remarks(results)] == ["Complete", "One seed"]
    assert [arm.role for arm, _ in findings(results)] == ["model"]
    assert "trained once" in remarks(results)[1].text


def test_a_search_that_is_still_running(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["search"], arrays=False)))
    assert findings(results) == []
    assert [remark.topic for remark in remarks(results)] == ["Complete"]
