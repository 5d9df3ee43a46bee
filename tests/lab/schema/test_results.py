from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.report import synthetic_sweeps
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace._files import with_checksum
from torchace.lab.schema.reading import ResultFileError, read_result
from torchace.lab.schema.results import ExperimentResult, GroupPlan, PlanFile, RunKey, RunResult

DOCS = Path(__file__).parents[3] / "docs" / "results"
ARM = {"name": "a", "label": "a", "num_members": 2, "diversities": [0]}


def _experiment(tmp_path: Path, **changes: Any) -> Path:
    directory = write_fit(tmp_path / "fit", FitSpec(arrays=False, search_seeds=[0]))
    content = json.loads((directory / "experiment.json").read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        inner = content
        for part in outer:
            inner = inner[part]
        inner[last] = value
    (directory / "experiment.json").write_text(json.dumps(content))
    return directory / "experiment.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "Expected format 1 in experiment.json, but got 2. Use the torchace that wrote it."),
        ({"format": None}, "Expected format 1 in experiment.json, but got None"),
        ({"name": 3}, "experiment.json is damaged: expected name to be text in quotes, but got 3."),
        ({"task": "ranking"}, "expected task to be 'classification', 'multilabel' or 'regression', but got 'ranking'."),
        ({"arms": [{**ARM, "role": "spare"}]}, "expected arms.0.role to be 'sweep' or 'model', but got 'spare'."),
        ({"arms": {}}, "arms"),
        ({"arms": [{"name": "a"}]}, "expected a value for arms.0.label, but there is none."),
        ({"seeds": [0, True]}, "expected seeds.1 to be a whole number, but got True."),
        ({"seeds": [-1]}, "expected seeds.0 to be at least 0, but got -1."),
        ({"data": None}, "expected data to be a section, but got None."),
        ({"seconds": "long"}, "expected seconds to be a number, but got 'long'."),
        ({"seconds": 1e300}, "expected seconds to be less than 1e+100, but got 1e+300."),
        ({"paper": {"table": "T", "rows": [{"num_members": 5, "accuracy": "high"}]}}, "paper.rows.0.accuracy"),
        (
            {"paper": {"table": "T", "rows": [{"num_members": 5, "acuracy": 0.9}]}},
            "Did you mean 'paper.rows.0.accuracy'?",
        ),
        ({"search": []}, "expected search to be a section, but got []."),
        ({"search__metric": "luck"}, "expected search.metric to be 'cross_entropy' or 'mse', but got 'luck'."),
        ({"search__candidates": [{"diversity": 0, "scores": {"x": 1}}]}, "search.candidates.0.scores.x"),
        ({"search__gain": {"mean": None, "beyond_noise": True}}, "expected search.gain.mean to be a number"),
        ({"data__schema": {"target": {"name": "y"}, "columns": [{"name": "a", "kind": "x"}]}}, "schema.columns.0.kind"),
        ({"data__schema": {"columns": []}}, "expected a value for data.schema.target, but there is none."),
    ],
)
def test_a_damaged_experiment_is_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = _experiment(tmp_path, **changes)
    with pytest.raises(ResultFileError) as caught:
        read_result(path, ExperimentResult)
    assert message in str(caught.value)
    assert "experiment.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{", b"null", b"3", b"[]"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "experiment.json").write_bytes(content)
    with pytest.raises(ResultFileError, match=r"^Expected (JSON|an object) in experiment\.json"):
        read_result(tmp_path / "experiment.json", ExperimentResult)


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    read = read_result(_experiment(tmp_path), ExperimentResult)
    (tmp_path / "copy.json").write_bytes(read.to_json())
    again = read_result(tmp_path / "copy.json", ExperimentResult)
    assert again == read
    assert again.search is not None
    assert list(again.search.scores) == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9]
    content = json.loads(read.to_json())
    assert content["data"]["schema"]["target"]["name"] == "price"
    content["seeds"] = [8]
    (tmp_path / "copy.json").write_text(json.dumps(content))
    with pytest.raises(ResultFileError, match=r"copy\.json was changed after it was written"):
        read_result(tmp_path / "copy.json", ExperimentResult)


def test_runs_of_format_1_stay_readable() -> None:
    files = sorted((DOCS / "table2_full").glob("*.json"))
    assert files
    for file in files:
        run = read_result(file, RunResult)
        assert run.finished
        assert 0.9 < run.scores["test"]["accuracy"] < 1
        assert run.metrics is not None
        assert run.metrics.test is not None
        assert len(run.metrics.test.members) == run.num_members


def test_numbers_that_are_not_finite_count_as_not_measured(tmp_path: Path) -> None:
    directory = synthetic_sweeps.small(tmp_path / "run", seeds=[0])
    path = directory / "runs" / "shared-l0-s0.json"
    content = json.loads(path.read_text())
    content["metrics"] = {"test": {"accuracy": 0.9, "cross_entropy": float("nan"), "brier": 10**400, "error": None}}
    path.write_text(json.dumps(content))
    run = read_result(path, RunResult)
    assert run.scores == {"test": {"accuracy": 0.9}}
    assert json.loads(run.to_json())["metrics"]["test"]["cross_entropy"] is None


def test_text_becomes_printable(tmp_path: Path) -> None:
    path = _experiment(tmp_path, title="a\n\x1b[31m\u202e\ud800b", config={"k\t": ["\x00"]})
    read = read_result(path, ExperimentResult)
    assert read.title == "a  [31m  b"
    assert read.config == {"k ": [" "]}


def test_jobs(tmp_path: Path) -> None:
    jobs = PlanFile(jobs=(GroupPlan(id="a-0", runs=(RunKey("a", 0, 1), RunKey("a", 0.3, 1)), compile=True),))
    (tmp_path / "jobs.json").write_bytes(jobs.to_json())
    assert read_result(tmp_path / "jobs.json", PlanFile) == jobs
    assert [run.id for run in jobs.jobs[0].runs] == ["a-l0-s1", "a-l0.3-s1"]


@pytest.mark.parametrize(
    "changes", [{"arm": "../a"}, {"seed": True}, {"seed": -1}, {"seed": 2**63}, {"diversity": 1.5}, {"diversity": "0"}]
)
def test_plan_files_with_damaged_runs_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = {"arm": "a", "diversity": 0.0, "seed": 1, **changes}
    content = with_checksum({"format": 1, "jobs": [{"id": "a-0", "runs": [run]}]})
    (tmp_path / "jobs.json").write_text(json.dumps(content))
    with pytest.raises(ResultFileError, match=r"jobs\.json is damaged: expected jobs\.0\.runs\.0\."):
        read_result(tmp_path / "jobs.json", PlanFile)
