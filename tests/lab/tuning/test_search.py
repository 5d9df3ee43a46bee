"""The cache of a grid search: finished groups are never trained again, and an interrupted search resumes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
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
