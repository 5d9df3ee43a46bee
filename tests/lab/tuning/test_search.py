"""The cache of a grid search: finished groups are never trained again, and a killed search resumes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.lab.tuning.search_data import make_split
from tests.lab.tuning.test_grid_search import PLAN, TRAIN, run_search, trainings
from torchace._files import PARTIAL
from torchace.lab.data import Split
from torchace.lab.store import RunStoreError
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.members import MemberPlan
from torchace.lab.tuning.search import SearchCache, SearchCallback, SearchStage

__all__ = ["trainings"]  # a fixture
SHORT: dict[str, Any] = {"rounds": 1, "num_fresh": 0}


def group_files(directory: Path) -> dict[str, tuple[int, int]]:
    """The finished groups: once written, they stay the same file."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in (directory / "groups").glob("*.json")}


def leftovers(directory: Path) -> list[Path]:
    return [*directory.glob("checkpoints*"), *directory.rglob(f"*{PARTIAL}")]


def stop_after(steps: int) -> Callable[[], bool]:
    return iter([False] * steps + [True]).__next__


def test_finished_groups_are_not_trained_again(tmp_path: Path, trainings: list[list[tuple[float, int]]]) -> None:
    first = run_search(cache=SearchCache(tmp_path))
    assert first == run_search()
    count = len(trainings)
    assert run_search(cache=SearchCache(tmp_path)) == first
    assert len(trainings) == count
    assert leftovers(tmp_path) == []
    before = group_files(tmp_path)
    run_search(cache=SearchCache(tmp_path), rounds=3, num_fresh=0)  # one round more
    assert len(trainings) == count + 1
    assert before.items() <= group_files(tmp_path).items()


@pytest.mark.parametrize("patience", [None, 2])
def test_interrupted_search_resumes_with_the_same_result(tmp_path: Path, patience: int | None) -> None:
    plan = replace(PLAN, patience=patience)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls % 7 == 0

    for _ in range(100):
        before = group_files(tmp_path)
        try:
            result = run_search(plan, cache=SearchCache(tmp_path), stop=stop)
            break
        except Interrupted:
            assert before.items() <= group_files(tmp_path).items()
    assert calls > 14, "it was never stopped"
    assert result == run_search(plan)
    assert leftovers(tmp_path) == []


def test_checkpoints_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run_search(cache=SearchCache(tmp_path, every_seconds=0), candidates=(0.2,), stop=stop_after(5))
    assert leftovers(tmp_path) == [tmp_path / "checkpoints"]
    run_search(cache=SearchCache(tmp_path), **SHORT)
    assert leftovers(tmp_path) == []


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": replace(PLAN, epochs=7)}, "holds a search with epochs = 6, but now it is 7"),
        ({"plan": replace(PLAN, hidden=(5, 5))}, r"holds a search with hidden = \[5\], but now it is \[5, 5\]"),
        ({"train": make_split(48, 9)}, "holds a search on other data: its train samples differ"),
        ({"train": Split(TRAIN.x, 1 - TRAIN.y)}, "its train samples differ"),
        ({"train": Split(TRAIN.x, TRAIN.y, torch.ones(48))}, "its train samples differ"),
        ({"test": None}, "its test samples differ"),
    ],
)
def test_another_search_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    run_search(cache=SearchCache(tmp_path), **SHORT)
    with pytest.raises(RunStoreError, match=message) as caught:
        run_search(**options, cache=SearchCache(tmp_path))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_two_processes_at_once_are_refused(tmp_path: Path) -> None:
    class Second(SearchCallback):
        def on_search(self, stage: SearchStage, fraction: float) -> None:
            with pytest.raises(RunStoreError, match=rf"Process {os.getpid()} is using {tmp_path}"):
                run_search(cache=SearchCache(tmp_path))

    run_search(cache=SearchCache(tmp_path), **SHORT, callback=Second())


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', "\x00\xff"])
@pytest.mark.parametrize("which", ["group", "fingerprint"])
def test_damaged_files(tmp_path: Path, text: str, which: str) -> None:
    run_search(cache=SearchCache(tmp_path), **SHORT)
    (group,) = (tmp_path / "groups").glob("*.json")
    file = group if which == "group" else tmp_path / "fingerprint.json"
    file.write_bytes(text.encode("latin-1"))
    message = r"(is damaged|was not written by this version)"
    with pytest.raises(RunStoreError, match=message) as caught:
        run_search(cache=SearchCache(tmp_path))
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", save({"losses": torch.zeros(6, 40)})])
def test_damaged_or_changed_losses(tmp_path: Path, content: bytes) -> None:
    run_search(cache=SearchCache(tmp_path), **SHORT)
    (file,) = (tmp_path / "groups").glob("*.safetensors")
    file.write_bytes(content)
    with pytest.raises(RunStoreError, match=r"safetensors is damaged\. .* remove the directory"):
        run_search(cache=SearchCache(tmp_path), **SHORT)


def test_unwritable_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoreError, match=r"Cannot write to .*"):
        run_search(cache=SearchCache(tmp_path / "file" / "search"))


# -- killed processes -------------------------------------------------------------------------------------------------

KILLS = int(os.environ.get("TORCHACE_KILLS", "6"))
TIMEOUT = 120.0  # seconds
# early stopping in the middle; a state that takes about as long to write as a step
KILLED = MemberPlan("classification", num_members=4, hidden=(64, 64), epochs=8, batch_size=16, patience=3)


def work(directory: str) -> None:
    """The process that is killed."""
    torch.set_num_threads(1)
    result = run_search(KILLED, cache=SearchCache(Path(directory) / "search", every_seconds=0))
    (Path(directory) / "result.json").write_text(json.dumps(result.to_dict()))


def start(directory: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=work, args=(str(directory),), daemon=True)
    process.start()
    return process


def wait_until(process: BaseProcess, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the process ended."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the process does not get there"
        process.join(0.0005)
        if process.exitcode is not None:
            return False
    return True


def checkpoint_files(search: Path) -> list[str]:
    """The files of checkpoints, half-written ones too."""
    found: list[str] = []
    for folder in (search / "checkpoints").glob("*"):
        try:
            found += [f"{folder.name}/{name}" for name in os.listdir(folder)]
        except FileNotFoundError:  # removed meanwhile
            continue
    return found


def is_writing(search: Path) -> bool:
    return any(name.endswith(PARTIAL) for name in checkpoint_files(search))


def kill_moments(search: Path, kind: str, rng: random.Random) -> Iterator[bool]:
    """False until the moment to kill."""
    wanted, seen, groups = rng.randint(1, 8), set(checkpoint_files(search)), len(group_files(search))
    began: float | None = None
    while True:
        new = set(checkpoint_files(search)) - seen
        if kind == "writing":  # a later checkpoint
            seen |= new
            wanted -= len(new)
            yield wanted <= 0 and is_writing(search)
        elif kind == "finishing":  # a group
            yield len(group_files(search)) > groups
        else:  # any time after the first checkpoint
            began = began or (time.monotonic() if new else None)
            yield began is not None and time.monotonic() > began + wanted / 24


@pytest.mark.extended
def test_killed_search_resumes_with_the_same_result(tmp_path: Path) -> None:
    uninterrupted = run_search(KILLED).to_dict()
    rng, kills, torn, searches = random.Random(KILLS), 0, 0, 0
    for attempt in range(6 * KILLS + 6):
        enough = kills >= KILLS and torn >= KILLS // 4
        directory = tmp_path / f"search{searches}"
        if enough and not directory.exists():
            break
        directory.mkdir(exist_ok=True)
        search = directory / "search"
        before = group_files(search)
        moment = kill_moments(search, ("writing", "anywhere", "writing", "finishing")[attempt % 4], rng)
        process = start(directory)
        if wait_until(process, lambda m=moment, e=enough: not e and next(m)):
            process.kill()
        process.join()
        assert before.items() <= group_files(search).items(), "a group was trained again"
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            torn += is_writing(search)
            continue
        assert process.exitcode == 0
        assert json.loads((directory / "result.json").read_text()) == uninterrupted
        assert leftovers(search) == []
        searches += 1
    assert enough, f"{kills} killed, {torn} of them while a checkpoint was being written"
    assert searches > 0
