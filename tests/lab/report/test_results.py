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

from tests.lab.report import synthetic
from tests.lab.report.fits import FitSpec, write_fit
from torchace._files import with_checksum
from torchace.lab.report import ReportError, Results, read_results
from torchace.lab.report.arrays import disputed_images, read_arrays, reliability
from torchace.lab.report.tables import result_table


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return synthetic.small(tmp_path / "run")


def _edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def test_reads_arms_runs_and_paper(table1_results: Results) -> None:
    results = table1_results
    assert [arm.name for arm in results.arms] == ["shared", "exchanged", "separate"]
    assert (len(results.runs), results.planned, results.damaged) == (65, 65, ())
    shared = results.arms[0]
    assert results.diversities(shared) == (0, 0.05, 0.1, 0.3, 0.5, 0.7)
    assert [run.seed for run in results.finished(shared, 0.3)] == [0, 1, 2, 3, 4]
    run = results.finished(shared, 0.3)[0]
    assert results.values(shared, 0.3, "error")[0] == pytest.approx(1 - run.metrics["test"]["accuracy"])
    assert results.arrays(run)["disagreement_matrix"].shape == (5, 5)
    assert results.paper is not None
    assert not results.paper.states_error


def test_paper_rows_stand_beside_the_arms_they_name(table1_results: Results, table2_results: Results) -> None:
    assert table1_results.paper is not None
    zero, first = table1_results.paper.rows[:2]
    shared, exchanged, separate = table1_results.arms
    assert [zero.matches(arm, 0) for arm in (shared, exchanged, separate)] == [False, False, True]
    assert [first.matches(arm, 0.05) for arm in (shared, exchanged, separate)] == [True, True, False]
    assert not first.matches(shared, 0.1)
    assert table2_results.paper is not None
    assert table2_results.paper.states_error
    single = table2_results.paper.rows[0]
    assert single.matches(table2_results.arms[0], 0)  # no λ in the paper: any
    assert single.numbers["accuracy"] == pytest.approx(0.9357)
    assert single.numbers["error"] == pytest.approx(0.0643)


def test_the_number_of_one_member_is_not_measured(table2_results: Results) -> None:
    single = table2_results.arms[0]
    assert table2_results.values(single, 0, "disagreement") == {}
    assert len(table2_results.values(single, 0, "accuracy")) == 5


def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"^Found no experiment\.json in .*; give the directory") as caught:
        read_results(tmp_path / "nowhere")
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "Expected format 1 in experiment.json, but got 2"),
        ({"format": None}, "`format` in experiment.json, but found nothing"),
        ({"name": 3}, "Expected a string under `name` in experiment.json, but got a number"),
        ({"task": "ranking"}, "Expected the task classification or regression in experiment.json, but got 'ranking'"),
        ({"task": 3}, "Expected a string under `task`"),
        ({"arms": [{"name": "a", "num_members": 2, "diversities": [0], "role": "spare"}]}, "Expected the role sweep,"),
        ({"arms": [{"name": "a", "num_members": 2, "diversities": [0], "seeds": [-1]}]}, "list of integers under"),
        ({"arms": [{"name": "a", "num_members": 2, "diversities": [0], "seeds": 5}]}, "list of integers under `seeds`"),
        ({"arms": {}}, "Expected a list of arms under `arms`"),
        ({"arms": [3]}, "Expected an object in experiment.json, but got a number"),
        ({"arms": [{"name": "a"}]}, "`num_members` in experiment.json"),
        ({"seeds": [0, True]}, "Expected a list of integers under `seeds`"),
        ({"seeds": [-1]}, "Expected a list of integers under `seeds`"),
        ({"data": None}, "Expected an object under `data`"),
        ({"seconds": "long"}, "Expected a finite number under `seconds`"),
        ({"paper": {"table": "Table 1", "rows": [{"num_members": 5, "accuracy": "high"}]}}, "under `accuracy`"),
        ({"paper": []}, "Expected an object under `paper`"),
    ],
)
def test_a_damaged_experiment_names_its_file(directory: Path, changes: dict[str, Any], message: str) -> None:
    _edit(directory / "experiment.json", **changes)
    with pytest.raises(ReportError) as caught:
        read_results(directory)
    assert message in str(caught.value)
    assert "experiment.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{", b"[" * 100_000, b"null", b"3", b"[]"])
def test_an_experiment_that_is_no_json_object(directory: Path, content: bytes) -> None:
    (directory / "experiment.json").write_bytes(content)
    with pytest.raises(ReportError, match=r"experiment\.json"):
        read_results(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"arm": "unknown"},
        {"status": "running"},
        {"metrics": None},
        {"metrics": {"test": {"accuracy": 0.9}}},
        {"metrics": {"test": {"accuracy": 0.9, "cross_entropy": float("nan")}}},
        {"diversity": "0.3"},
        {"seed": None},
        {"metrics": {"test": None, "validation": {"accuracy": 0.9, "cross_entropy": 0.3}}},  # a sweep is tested
        {"metrics": {"test": {"accuracy": 0.9, "cross_entropy": 10**400}}},
        {"metrics": {"test": {"accuracy": 0.9, "cross_entropy": -0.1}}},
        {"seed": 10**30},
        {"seed": 3},  # then there are two runs of one λ and seed
        {"format": 9},
    ],
)
def test_a_damaged_run_is_listed_and_the_rest_read(directory: Path, changes: dict[str, Any]) -> None:
    _edit(directory / "runs" / "shared-l0.3-s1.json", **changes)
    results = read_results(directory)
    [damaged] = results.damaged
    assert damaged.file.startswith("runs/shared-l0.3-s")
    assert damaged.file in damaged.reason
    assert len(results.runs) == 14


def test_failed_runs_are_kept_apart(failing: Path) -> None:
    results = read_results(failing)
    assert len(results.failed) == 6
    assert results.failed[0].failure is not None
    assert (results.failed[0].failure.member, results.failed[0].failure.step) == (3, 1204)
    files = [damaged.file for damaged in results.damaged]
    assert files == ["runs/foreign.json", "runs/shared-l0.1-s1.json", "runs/shared-l0.3-s0.safetensors"]
    exchanged = results.arms[1]
    assert 0.7 not in results.diversities(exchanged)
    assert 0.7 in results.grid(exchanged)


def test_missing_arrays_are_no_damage(directory: Path) -> None:
    for path in (directory / "runs").glob("*.safetensors"):
        path.unlink()
    results = read_results(directory)
    assert results.damaged == ()
    assert results.arrays(results.runs[0]) == {}


@pytest.mark.parametrize(
    "arrays",
    [
        {"reliability_count": np.zeros(15)},
        {"disagreement_matrix": np.zeros((3, 2))},
        {"disagreement_matrix": np.full((2, 2), np.nan)},
        {"disputed_votes": np.zeros((4, 3)), "disputed_target": np.zeros(5)},
        {"disputed_images": np.zeros((4, 8, 8))},
        {"disputed_images": np.zeros((4, 8, 8, 2), dtype=np.uint8)},
        {"disputed_index": np.zeros((4, 2))},
        {"predicted": np.zeros(5)},
        {"predicted": np.zeros(5), "observed": np.zeros(5), "spread": np.zeros(4)},
        {"predicted": np.zeros((5, 1)), "observed": np.zeros((5, 1)), "spread": np.zeros((5, 1))},
        {"predicted": np.zeros(5), "observed": np.full(5, np.nan), "spread": np.zeros(5)},
        {"predicted": np.full(5, 1e200), "observed": np.zeros(5), "spread": np.zeros(5)},
        {"predicted": np.zeros(5), "observed": np.zeros(5), "spread": np.full(5, -1.0)},
        {"residual_correlation": np.zeros((3, 2))},
        {"residual_correlation": np.full((2, 2), np.inf)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays, tmp_path / "run.safetensors")
    with pytest.raises(ReportError, match=r"runs/run\.safetensors do not fit"):
        read_arrays(tmp_path / "run.safetensors")


def test_every_truncation_of_an_array_file_is_refused(table1: Path, tmp_path: Path) -> None:
    whole = (table1 / "runs" / "shared-l0-s0.safetensors").read_bytes()
    path = tmp_path / "run.safetensors"
    for length in [0, 1, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ReportError, match=r"runs/run\.safetensors"):
            read_arrays(path)


def test_reliability_adds_the_samples_of_all_runs(table1_results: Results) -> None:
    runs = table1_results.finished(table1_results.arms[0], 0)
    arrays = [table1_results.arrays(run) for run in runs]
    found = reliability(arrays)
    assert found is not None
    count = sum(a["reliability_count"] for a in arrays)
    filled = count > 0
    assert len(found.share) == filled.sum() == 13
    assert found.share.sum() == pytest.approx(1)
    expected = (sum(a["reliability_correct"] for a in arrays) / np.where(filled, count, 1))[filled]
    np.testing.assert_allclose(found.accuracy, expected)
    assert reliability([]) is None
    assert reliability([{}]) is None


def test_disputed_images_rank_their_votes() -> None:
    arrays = {
        "disputed_index": np.array([41]),
        "disputed_target": np.array([2]),
        "disputed_votes": np.array([[3, 1, 3, 2, 1, 3]]),
        "disputed_images": np.zeros((1, 4, 4), dtype=np.uint8),
    }
    [case] = disputed_images(arrays)
    assert (case.position, case.target, case.votes) == (41, 2, ((3, 3), (1, 2), (2, 1)))
    del arrays["disputed_images"]
    assert disputed_images(arrays) == []


def test_a_run_directory_without_runs(directory: Path) -> None:
    shutil.rmtree(directory / "runs")
    results = read_results(directory)
    assert (results.runs, results.damaged, results.planned) == ((), (), 15)


def test_a_fit_has_arms_with_roles_and_seeds_of_their_own(regression_results: Results) -> None:
    search, check, model = regression_results.arms
    assert [arm.role for arm in (search, check, model)] == ["search", "check", "model"]
    assert regression_results.seeds_of(search) == (0, 1, 2)
    assert regression_results.seeds_of(check) == (100, 101, 102, 103, 104)
    # 8 λ x 3 seeds, 2 λ x 5 seeds, one model
    assert (regression_results.planned, len(regression_results.runs)) == (35, 35)
    assert regression_results.tested == (model, check)
    assert regression_results.swept == (check,)
    assert regression_results.model == model
    assert regression_results.is_fit
    assert regression_results.values(search, 0.5, "mse") == {}
    assert len(regression_results.values(search, 0.5, "mse", "validation")) == 3


def test_an_experiment_is_no_fit(table1_results: Results) -> None:
    assert not table1_results.is_fit
    assert table1_results.model is None
    assert table1_results.tested == table1_results.swept == table1_results.arms
    assert [table1_results.seeds_of(arm) for arm in table1_results.arms] == [(0, 1, 2, 3, 4)] * 3


def test_what_a_fit_has_not_trained_yet_is_counted(tmp_path: Path) -> None:
    spec = FitSpec(arrays=False, failed=[("check", 0.3, 101)])
    directory = write_fit(tmp_path / "fit", spec)
    for name in ("search-l0.1-s2", "model-l0.3-s7"):
        (directory / "runs" / f"{name}.json").unlink()
    results = read_results(directory)
    assert (results.planned, len(results.runs), len(results.failed)) == (35, 33, 1)


def test_a_lambda_named_twice_is_one_run(tmp_path: Path) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False))
    content = json.loads((directory / "experiment.json").read_text())
    content["arms"][0]["diversities"] = [0.3, 0.3]
    _edit(directory / "experiment.json", arms=content["arms"])
    assert read_results(directory).planned == 1


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    return write_fit(tmp_path / "fit", FitSpec(arms=["check", "model"], arrays=False))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, "Expected an object under `metrics`"),
        ({}, "Expected an object under `test`"),
        ({"test": None, "validation": None}, "Expected an object under `test`"),
        ({"test": {"rmse": 3.0}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": None}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": float("nan")}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": "3"}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": -1.0}}, "Expected a number of 0 or more under `mse`"),
        ({"test": {"mse": 1e200}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": True}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": 1.0}, "validation": {}}, "Expected a finite number under `mse`"),
        ({"test": {"mse": 1.0, "members": [1.0, -1.0]}}, "Expected a list of numbers under `members`"),
        ({"test": {"mse": 1.0, "members": 5}}, "Expected a list of numbers under `members`"),
        ({"test": {"mse": 1.0, "members": [None]}}, "Expected a list of numbers under `members`"),
        ({"test": [1.0]}, "Expected an object under `test`"),
    ],
)
def test_a_damaged_run_of_a_fit_is_one_sentence(fit: Path, metrics: Any, message: str) -> None:
    _edit(fit / "runs" / "check-l0.3-s101.json", metrics=metrics)
    results = read_results(fit)
    [damaged] = results.damaged
    assert message in damaged.reason
    assert "runs/check-l0.3-s101.json" in damaged.reason
    assert "\n" not in damaged.reason
    assert len(results.runs) == 10


def test_numbers_that_were_not_measured_are_left_out(fit: Path) -> None:
    test = {"mse": 4.0, "r2": None, "mae": float("inf"), "spread": "wide", "members": None}
    _edit(fit / "runs" / "model-l0.3-s7.json", metrics={"test": test})
    results = read_results(fit)
    run = next(run for run in results.runs if run.arm == "model")
    assert run.metrics["test"] == {"mse": 4.0, "rmse": 2.0}
    assert (run.metrics["validation"], run.members, results.damaged) == ({}, (), ())


def test_one_tasks_runs_are_damage_to_the_other(regression_fit: Path, tmp_path: Path) -> None:
    shutil.copytree(regression_fit, tmp_path / "fit")
    _edit(tmp_path / "fit" / "experiment.json", task="classification", search=None)
    results = read_results(tmp_path / "fit")
    assert results.runs == ()
    assert len(results.damaged) == 35


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_arrays_of_every_precision_are_read(tmp_path: Path, dtype: type) -> None:
    arrays = {key: np.arange(1, 4).astype(dtype) for key in ("predicted", "observed", "spread")}
    save_file({**arrays, "residual_correlation": np.ones((2, 2), dtype=dtype)}, tmp_path / "run.safetensors")
    assert read_arrays(tmp_path / "run.safetensors")["observed"].tolist() == [1, 2, 3]


def test_runs_are_looked_up_not_searched_for(tmp_path: Path) -> None:
    """A report asks thousands of times for an arm's runs: none of that may go through all runs."""
    results = read_results(synthetic.small(tmp_path / "run", seeds=[0, 1, 2]))
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
    assert results.finished(arm, 0.123) == ()
    assert walks == 1


def test_scores_can_be_read_without_arrays(tmp_path: Path) -> None:
    results = read_results(synthetic.small(tmp_path / "run", seeds=[0, 1]), arrays=False)
    assert all(results.arrays(run) == {} for run in results.runs)
    assert result_table(results) == result_table(read_results(tmp_path / "run"))


# -- checksums --------------------------------------------------------------------------------------------------------


def _seal(directory: Path, name: str) -> Path:
    """Gives a run the checksums that a sweep writes."""
    file = directory / "runs" / f"{name}.json"
    arrays = file.with_suffix(".safetensors")
    digest = hashlib.sha256(arrays.read_bytes()).hexdigest() if arrays.exists() else None
    file.write_text(json.dumps(with_checksum({**json.loads(file.read_text()), "arrays_sha256": digest})))
    return file


def test_a_run_that_was_changed_is_listed(directory: Path) -> None:
    file = _seal(directory, "shared-l0.3-s1")
    assert read_results(directory).damaged == ()
    metrics = json.loads(file.read_text())["metrics"]
    metrics["test"]["accuracy"] = 0.999
    _edit(file, metrics=metrics)
    [damaged] = read_results(directory).damaged
    assert damaged.file == "runs/shared-l0.3-s1.json"
    assert damaged.reason == f"{damaged.file} was changed after it was written: its SHA-256 is another one."


@pytest.mark.parametrize("missing", [False, True])
def test_arrays_that_were_changed_are_listed(directory: Path, missing: bool) -> None:
    name = next(file.stem for file in sorted((directory / "runs").glob("*.safetensors")))
    arrays = _seal(directory, name).with_suffix(".safetensors")
    assert read_results(directory).damaged == ()
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    if missing:
        arrays.unlink()
    results = read_results(directory)
    [damaged] = results.damaged
    assert damaged.file == f"runs/{name}.safetensors"
    assert ("No such file" if missing else "was changed after it was written") in damaged.reason
    assert results.arrays(next(run for run in results.runs if run.name == name)) == {}
