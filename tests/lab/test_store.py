import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchace.lab.schema.results import Failure, GroupPlan, RunKey, RunResult
from torchace.lab.store import RunStore, RunStoreError

RUN = RunKey("main", 0.5, 3)


def test_names_tell_all_runs_apart() -> None:
    close = [0.0, 0.1, 0.1 + 1e-12, 0.1234567, 0.12345671, 1e-7, 1.0, math.nextafter(1.0, 0)]
    names = {RunKey("main", value, 0).id for value in close}
    assert len(names) == len(close)
    assert RunKey("main", 0.0, 0).id == RunKey("main", -0.0, 0).id == "main-l0-s0"
    assert RunKey("main", 0.05, 12).id == "main-l0.05-s12"


def result(**changes: Any) -> RunResult:
    content = {"run": RUN.id, "arm": RUN.arm, "diversity": RUN.diversity, "seed": RUN.seed, "status": "finished"}
    return RunResult.model_validate({**content, **changes})


def test_a_finished_run_is_one_file_and_its_arrays(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    assert not store.is_finished(RUN)
    scores = {"accuracy": 0.9, "disagreement": math.nan, "members": [0.8, 1.0]}
    store.write_result(result(metrics={"test": scores}), {"a": torch.zeros(2)})
    assert store.is_finished(RUN)
    assert store.result(RUN).finished  # type: ignore[union-attr]
    files = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert files == ["main-l0.5-s3.json", "main-l0.5-s3.safetensors"]
    content = json.loads((tmp_path / "runs" / files[0]).read_text())
    assert content["metrics"]["test"] == {"accuracy": 0.9, "disagreement": None, "members": [0.8, 1.0]}
    assert content["arrays_sha256"] == hashlib.sha256((tmp_path / "runs" / files[1]).read_bytes()).hexdigest()


def test_a_failure_is_read_back(tmp_path: Path) -> None:
    failure = Failure(message="NaN", member=2, step=17)
    RunStore(tmp_path).write_result(result(status="failed", failure=failure), {})
    assert RunStore(tmp_path).result(RUN).failure == failure  # type: ignore[union-attr]


def test_groups_are_read_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    assert store.groups() == []
    groups = [
        GroupPlan("main-0", (RUN, RunKey("main", 0.1 + 1e-12, 2**31 - 1))),
        GroupPlan("other-0", (RunKey("other", 0.0, 0),), True),
    ]
    store.write_groups(groups)
    assert store.groups() == groups


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2, "jobs": []}',
        '{"format": 1}',
        '{"format": 1, "jobs": [{"id": "a", "runs": []}]}',
        '{"format": 1, "jobs": [{"id": "a", "runs": [{"arm": "a", "diversity": "x", "seed": 0}]}]}',
        "\x00\xff\xfe",
    ],
)
def test_damaged_groups_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunStoreError, match=r"jobs.json (is damaged|was not written by this version)") as caught:
        RunStore(tmp_path).groups()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format": 1, "status": "failed"}', "3"])
def test_a_damaged_result_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{RUN.id}.json").write_text(text)
    with pytest.raises(RunStoreError, match=RUN.id):
        RunStore(tmp_path).result(RUN)


def test_a_second_process_is_refused_with_the_owners_process_id(tmp_path: Path) -> None:
    with (
        RunStore(tmp_path).lock(),
        pytest.raises(RunStoreError, match=f"Process {os.getpid()} is using {tmp_path}"),
        RunStore(tmp_path).lock(),
    ):
        pass
    with RunStore(tmp_path).lock():  # free again
        pass


def test_the_lock_is_lifted_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunStore(tmp_path).lock():
        raise KeyError
    with RunStore(tmp_path).lock():
        pass


def test_a_directory_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for directory in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(RunStoreError, match=r"Cannot write to .*Choose another --out"), RunStore(directory).lock():
            pass


def test_cleaning_up_keeps_finished_work(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    done, undone = GroupPlan("main-0", (RUN,)), GroupPlan("main-1", (RunKey("main", 0.0, 0),))
    store.write_groups([done, undone])
    store.write_result(result(), {})
    for job in (done, undone):
        (tmp_path / "checkpoints" / job.id).mkdir(parents=True)
        (tmp_path / "checkpoints" / job.id / "manifest.json").write_text("{}")
    for place in (".jobs.json.1.partial", "runs/.main-l0-s0.json.1.partial"):
        (tmp_path / place).write_text("half")
    store.clean([done, undone])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "checkpoints/main-1/manifest.json",
        "jobs.json",
        "runs/main-l0.5-s3.json",
    ]


# -- changed files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user's, with names such as ours."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("manifest.json", "state-3.safetensors", "thesis.tex", "main-l0.5-s3.json", "lock"):
        (folder / name).write_text("mine")
    return folder


@pytest.mark.parametrize("name", ["{outside}", "../../outside", "..", "", "a/b", "a\0b", None])
@pytest.mark.parametrize("key", ["id", "arm"])
def test_names_from_a_file_are_no_paths(key: str, name: object, tmp_path: Path, outside: Path) -> None:
    name = name.format(outside=outside) if isinstance(name, str) else name
    run: dict[str, object] = {"arm": "main", "diversity": 0.5, "seed": 3}
    job = {"id": "main-0", "runs": [run]}
    (job if key == "id" else run)[key] = name
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "jobs.json").write_text(json.dumps({"format": 1, "jobs": [job]}))
    with pytest.raises(RunStoreError, match=r"jobs.json is damaged"):
        RunStore(tmp_path / "out").groups()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1e999}, {"seed": -1}, {"seed": 2**63}, {"seed": 0.5}, {"seed": True}, {"seed": "../0"}]
    + [{"diversity": value} for value in (math.inf, math.nan, -0.1, 1.1, "0.5", None)],
)
def test_runs_that_cannot_be(change: dict[str, object], tmp_path: Path) -> None:
    job = {"id": "main-0", "runs": [{"arm": "main", "diversity": 0.5, "seed": 3, **change}]}
    (tmp_path / "jobs.json").write_text(json.dumps({"format": 1, "jobs": [job]}))
    with pytest.raises(RunStoreError, match=r"jobs.json is damaged"):
        RunStore(tmp_path).groups()


def test_the_run_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with RunStore(tmp_path / "out").lock():
        assert (tmp_path / "disk" / "lock").read_text() == str(os.getpid())


def test_only_our_files_are_removed(tmp_path: Path) -> None:
    store, job = RunStore(tmp_path), GroupPlan("main-0", (RUN,))
    store.write_result(result(), {})
    folder = tmp_path / "checkpoints" / "main-0"
    folder.mkdir(parents=True)
    for name in ("manifest.json", "state-12.safetensors", "notes.txt", "state-of-the-art.pdf", ".state-1.x.7.partial"):
        (folder / name).write_text("")
    store.clean([job])
    assert sorted(os.listdir(folder)) == ["notes.txt", "state-of-the-art.pdf"]


# -- checksums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"status": "failed", "failure": {"message": "", "member": 0, "step": 1}}, {"accuracy": 0.99}]
)
def test_a_result_that_was_changed_is_one_sentence(change: dict[str, object], tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_result(result(), {})
    assert store.result(RUN) is not None
    file = tmp_path / "runs" / f"{RUN.id}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RunStoreError, match=f"{RUN.id}.json was changed after it was written") as caught:
        store.result(RUN)
    assert "\n" not in str(caught.value)


def test_results_without_a_checksum_stay_readable(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{RUN.id}.json").write_text(result().model_dump_json())
    assert RunStore(tmp_path).result(RUN) == result()


@pytest.mark.extended
def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunStoreError, match="is using"), RunStore(tmp_path).lock():
            pass
        holder.kill()
    with RunStore(tmp_path).lock():
        pass
