import json
import math
import os
from pathlib import Path

import pytest
import torch

from torchace.engine.fit import Failure
from torchace.runs.ledger import Job, Ledger, LedgerError, Run

RUN = Run("main", 0.5, 3)
CONTENT = {"format": 1, "status": "finished", "failure": None}


def test_names_tell_all_runs_apart() -> None:
    close = [0.0, 0.1, 0.1 + 1e-12, 0.1234567, 0.12345671, 1e-7, 1.0, math.nextafter(1.0, 0)]
    names = {Run("main", value, 0).id for value in close}
    assert len(names) == len(close)
    assert Run("main", 0.0, 0).id == Run("main", -0.0, 0).id == "main-l0-s0"
    assert Run("main", 0.05, 12).id == "main-l0.05-s12"


def test_a_finished_run_is_one_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert not ledger.is_finished(RUN)
    ledger.write_result(RUN, CONTENT, {"a": torch.zeros(2)})
    assert ledger.is_finished(RUN)
    assert ledger.failure(RUN) is None
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "main-l0.5-s3.json",
        "main-l0.5-s3.safetensors",
    ]


def test_a_failure_is_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    failure = Failure("NaN", 2, 17)
    ledger.write_result(RUN, {**CONTENT, "status": "failed", "failure": vars(failure)}, {})
    assert ledger.failure(RUN) == failure


def test_nan_is_null(tmp_path: Path) -> None:
    Ledger(tmp_path).write_result(RUN, {**CONTENT, "a": [math.nan, {"b": -math.inf}], "c": (1.5, math.inf)}, {})
    content = json.loads((tmp_path / "runs" / "main-l0.5-s3.json").read_text())
    assert content["a"] == [None, {"b": None}]
    assert content["c"] == [1.5, None]


def test_jobs_are_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.jobs() == []
    jobs = [Job("main-0", (RUN, Run("main", 0.1 + 1e-12, 2**31 - 1))), Job("other-0", (Run("other", 0.0, 0),))]
    ledger.write_jobs(jobs)
    assert ledger.jobs() == jobs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": 2, "jobs": []}',
        '{"format": 1}',
        '{"format": 1, "jobs": 3}',
        '{"format": 1, "jobs": [{}]}',
        '{"format": 1, "jobs": [{"id": "a", "runs": []}]}',
        '{"format": 1, "jobs": [{"id": "a", "runs": [{"arm": "a", "diversity": "x", "seed": 0}]}]}',
        "\x00\xff\xfe",
    ],
)
def test_damaged_jobs_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(LedgerError, match=r"jobs.json (is damaged|was not written by this version)") as caught:
        Ledger(tmp_path).jobs()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format": 1, "status": "failed"}', "3"])
def test_a_damaged_result_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{RUN.id}.json").write_text(text)
    with pytest.raises(LedgerError, match=RUN.id):
        Ledger(tmp_path).failure(RUN)


def test_a_second_process_is_refused_and_told_who(tmp_path: Path) -> None:
    with (
        Ledger(tmp_path).locked(),
        pytest.raises(LedgerError, match=f"Process {os.getpid()} is at work in {tmp_path}"),
        Ledger(tmp_path).locked(),
    ):
        pass
    with Ledger(tmp_path).locked():  # free again
        pass


def test_the_lock_is_lifted_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Ledger(tmp_path).locked():
        raise KeyError
    with Ledger(tmp_path).locked():
        pass


def test_a_directory_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for directory in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(LedgerError, match=r"Cannot write to .*Choose another --out"), Ledger(directory).locked():
            pass


def test_cleaning_up_keeps_what_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    done, undone = Job("main-0", (RUN,)), Job("main-1", (Run("main", 0.0, 0),))
    ledger.write_jobs([done, undone])
    ledger.write_result(RUN, CONTENT, {})
    for job in (done, undone):
        (tmp_path / "checkpoints" / job.id).mkdir(parents=True)
        (tmp_path / "checkpoints" / job.id / "manifest.json").write_text("{}")
    for place in (".jobs.json.1.partial", "runs/.main-l0-s0.json.1.partial"):
        (tmp_path / place).write_text("half")
    ledger.clean([done, undone])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "checkpoints/main-1/manifest.json",
        "jobs.json",
        "runs/main-l0.5-s3.json",
    ]
