from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.lab.report import synthetic_sweeps
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace._files import with_checksum
from torchace.lab.report import ResultFileError, Results, read_results
from torchace.lab.report.tables import result_table


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return synthetic_sweeps.small(tmp_path / "run")


def _edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def test_arms_runs_and_paper_are_read(table1_results: Results, table2_results: Results) -> None:
    results = table1_results
    shared, exchanged, separate = results.arms
    assert [arm.name for arm in results.arms] == ["shared", "exchanged", "separate"]
    assert (len(results.runs), results.damaged) == (65, {})
    assert results.diversities(shared) == (0, 0.05, 0.1, 0.3, 0.5, 0.7)
    assert [run.seed for run in results.finished(shared, 0.3)] == [0, 1, 2, 3, 4]
    run = results.finished(shared, 0.3)[0]
    assert results.values(shared, 0.3, "error")[0] == pytest.approx(1 - results.scores(run)["accuracy"])
    assert results.arrays(run)["disputed_votes"].shape == (16, 5)
    assert (results.model, results.model_run) == (None, None)
    assert results.experiment.paper is not None
    zero, first = results.experiment.paper.rows[:2]
    assert [zero.matches(arm, 0) for arm in (shared, exchanged, separate)] == [False, False, True]
    assert [first.matches(arm, 0.05) for arm in (shared, exchanged, separate)] == [True, True, False]
    assert not first.matches(shared, 0.1)
    single = table2_results.arms[0]
    assert table2_results.values(single, 0, "disagreement") == {}  # of one member it is null
    assert len(table2_results.values(single, 0, "accuracy")) == 5


def test_a_fit_has_one_arm_its_model(regression_results: Results) -> None:
    [arm] = regression_results.arms
    assert regression_results.model == arm
    assert regression_results.model_run == regression_results.runs[0]
    assert len(regression_results.runs) == 1


def test_a_damaged_experiment_is_one_sentence(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"^Found no experiment\.json in .*\. Give a directory"):
        read_results(tmp_path / "nowhere")
    _edit(directory / "experiment.json", seeds=[0, "x"])
    message = r"^experiment\.json is damaged: expected seeds\.1 to be a whole number, but got 'x'\.$"
    with pytest.raises(ResultFileError, match=message):
        read_results(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": "unknown"}, "belongs to the arm 'unknown', which experiment.json does not have"),
        ({"metrics": {"test": {"accuracy": 0.9, "brier": "low"}}}, "expected metrics.test.brier to be a number"),
        ({"seed": 3}, "repeats the arm, λ and seed of the run shared-l0.3-s1"),
        ({"format": 9}, "Expected format 1 in"),
    ],
)
def test_a_damaged_run_is_listed_and_the_rest_read(directory: Path, changes: dict[str, Any], message: str) -> None:
    _edit(directory / "runs" / "shared-l0.3-s1.json", **changes)
    results = read_results(directory)
    [(file, reason)] = results.damaged.items()
    assert file.startswith("runs/shared-l0.3-s")
    assert file in reason
    assert message in reason
    assert "\n" not in reason
    assert len(results.runs) == 14


def test_metrics_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    fit = write_fit(tmp_path / "fit", FitSpec(arrays=False))
    _edit(fit / "runs" / "model-l0.3-s7.json", metrics={"test": {"mse": 4.0, "r2": None, "mae": float("inf")}})
    results = read_results(fit)
    [run] = results.runs
    assert results.scores(run) == {"mse": 4.0, "rmse": 2.0}
    assert (results.scores(run, "validation"), results.damaged) == ({}, {})


def test_failed_runs_and_damaged_files(failing: Path) -> None:
    results = read_results(failing)
    assert len(results.failed) == 6
    assert results.failed[0].failure is not None
    assert (results.failed[0].failure.member, results.failed[0].failure.step) == (3, 1204)
    assert list(results.damaged) == ["runs/foreign.json", "runs/shared-l0.1-s1.json", "runs/shared-l0.3-s0.safetensors"]
    exchanged = results.arms[1]
    assert 0.7 not in results.diversities(exchanged)


def test_a_directory_without_runs(directory: Path) -> None:
    shutil.rmtree(directory / "runs")
    results = read_results(directory)
    assert (results.runs, results.damaged) == ((), {})


def test_runs_are_indexed(tmp_path: Path) -> None:
    """A report asks thousands of times for an arm's runs: none of that may go through all runs."""
    results = read_results(synthetic_sweeps.small(tmp_path / "run", seeds=[0, 1, 2]))
    walks = 0

    class Counted(tuple):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            nonlocal walks
            walks += 1
            return super().__iter__()

    results = replace(results, runs=Counted(results.runs))
    [arm] = results.arms
    for _ in range(10):
        for diversity in results.diversities(arm):
            assert [run.seed for run in results.finished(arm, diversity)] == [0, 1, 2]
            assert len(results.values(arm, diversity, "cross_entropy")) == 3
    assert results.finished(arm, 0.123) == []
    assert walks == 1


def test_scores_can_be_read_without_arrays(tmp_path: Path) -> None:
    results = read_results(synthetic_sweeps.small(tmp_path / "run", seeds=[0, 1]), arrays=False)
    assert all(results.arrays(run) == {} for run in results.runs)
    assert result_table(results) == result_table(read_results(tmp_path / "run"))


def test_missing_arrays_are_no_damage(directory: Path) -> None:
    for path in (directory / "runs").glob("*.safetensors"):
        path.unlink()
    results = read_results(directory)
    assert results.damaged == {}
    assert results.arrays(results.runs[0]) == {}


@pytest.mark.parametrize(
    ("damage", "message"), [("change", "was changed after it was written"), ("remove", "No such file")]
)
def test_arrays_that_were_changed_are_listed(directory: Path, damage: str, message: str) -> None:
    file = directory / "runs" / "shared-l0.3-s1.json"
    arrays = file.with_suffix(".safetensors")
    digest = hashlib.sha256(arrays.read_bytes()).hexdigest()
    file.write_text(json.dumps(with_checksum({**json.loads(file.read_text()), "arrays_sha256": digest})))
    assert read_results(directory).damaged == {}
    arrays.unlink()
    if damage == "change":
        save_file({"sample_error": np.zeros(3)}, arrays)
    results = read_results(directory)
    [(file, reason)] = results.damaged.items()
    assert file == "runs/shared-l0.3-s1.safetensors"
    assert message in reason
    assert results.arrays(next(run for run in results.runs if run.run == "shared-l0.3-s1")) == {}
