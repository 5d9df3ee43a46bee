"""Callbacks of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchace as ace
from tests.lab.sweeps.small_sweeps import small
from torchace.lab.schema.results import RunKey, RunResult
from torchace.lab.sweeps.callbacks import Callback, CallbackList
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import RunProgress


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
