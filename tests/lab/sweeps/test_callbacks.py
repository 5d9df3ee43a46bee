"""Callbacks and logs of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchace as ace
from tests.lab.sweeps.small_sweeps import small
from torchace.lab.cli.app import main
from torchace.lab.schema.results import RunKey, RunResult
from torchace.lab.sweeps.callbacks import Callback, CallbackList, EventLog
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import RunProgress

SMALL = ["--set", "train.epochs=2", "--set", "model.hidden=[4]", "--set", "sweep.diversities=[0, 0.5]", "--seeds", "2"]


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["torchace", "run", "digits", "--out", str(directory), *SMALL, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text("utf-8").splitlines()]


def test_every_sweep_has_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "runs", monkeypatch) == 0
    found = events(tmp_path / "runs")
    names = [event["event"] for event in found]
    assert names[:2] == ["planned", "started"]
    assert names[-1] == "finished"
    assert names.count("run") == 4
    assert all("time" in event for event in found)
    for event in found:
        if event["event"] == "run":
            result = json.loads((tmp_path / "runs" / "runs" / f"{event['run']}.json").read_text())
            assert event["test"] == result["metrics"]["test"]
            assert event["status"] == "finished"
    assert run(tmp_path / "runs", monkeypatch) == 0  # nothing to do: said, and appended
    assert events(tmp_path / "runs")[: len(found)] == found
    assert events(tmp_path / "runs")[-1] == {**events(tmp_path / "runs")[-1], "event": "planned", "done": 4, "total": 4}


@pytest.mark.parametrize("torn", ['{"time": "2026-0', '{"ti', "x" * 200_000, ""])
def test_half_a_line_of_a_killed_process_is_removed(tmp_path: Path, torn: str) -> None:
    log = tmp_path / "log.jsonl"
    EventLog(tmp_path).on_plan(0, 4)
    before = log.read_text("utf-8")
    log.write_text(before + torn, "utf-8")
    again = EventLog(tmp_path)
    again.on_plan(1, 4)
    again.on_plan(2, 4)
    assert log.read_text("utf-8").startswith(before)
    assert [event["done"] for event in events(tmp_path)] == [0, 1, 2]
    log.write_text(torn, "utf-8")  # no whole line at all
    EventLog(tmp_path).on_plan(3, 4)
    assert [event["done"] for event in events(tmp_path)] == [3]


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_run_start(self, run: RunKey) -> None:
        self.events.append(("start", run))

    def on_step(self, run: RunKey, progress: RunProgress) -> None:
        assert 0 < progress.step <= progress.steps == 12
        self.events.append(("step", run))

    def on_epoch_end(self, run: RunKey, progress: RunProgress) -> None:
        self.events.append(("epoch", run, progress))

    def on_run_end(self, run: RunKey, result: RunResult) -> None:
        self.events.append(("end", run, result))


def test_each_run_has_its_events(tmp_path: Path) -> None:
    recorder = Recorder()
    Sweep(small(), tmp_path).run(recorder)
    runs = [RunKey("main", diversity, seed) for diversity in (0.0, 0.5) for seed in (0, 1)]
    for run in runs:
        events = [event for event in recorder.events if event[1] == run]
        names = [event[0] for event in events]
        assert names[0] == "start"
        assert names[-1] == "end"
        assert names.count("step") >= 1
        result = events[-1][2]
        assert (result.diversity, result.seed, result.finished) == (run.diversity, run.seed, True)
        epochs = [event[2] for event in events if event[0] == "epoch"]
        assert [(e.epoch, e.step, e.metrics) for e in epochs] == [
            (entry["epoch"], entry["step"], {"train_cross_entropy": entry["train_cross_entropy"]})
            for entry in result.history
        ]
    assert len(epochs) == 3  # of four steps
    before = len(recorder.events)
    Sweep(small(), tmp_path).run(recorder)  # nothing left to train
    assert len(recorder.events) == before


def test_one_callback_or_several_or_a_tracker(tmp_path: Path) -> None:
    seeds = []

    class Ends(Callback):
        def on_run_end(self, run: RunKey, result: RunResult) -> None:
            seeds.append(run.seed)

    Sweep(small(sweep={"diversities": [0.0]}), tmp_path).run(CallbackList([Ends()]))
    assert seeds == [0, 1]
    x, y = torch.rand(20, 3), torch.arange(20) % 2
    options: dict[str, Any] = {"diversities": 0.0, "seeds": [5], "steps": 1}
    for callbacks in (Ends(), None, [Ends(), "csv"]):
        ace.sweep(lambda: nn.Linear(3, 2), (x, y), (x, y), callbacks=callbacks, **options)
    assert seeds == [0, 1, 5, 5]
    with pytest.raises(TypeError, match=r"Expected callbacks of a class derived from .*, but got 3"):
        CallbackList([3])  # type: ignore[list-item]
