"""What a sweep does, for other programs: a log of events as JSONL, always, and TensorBoard on request."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchace._files import check_regular, read_json
from torchace.lab.store import GroupPlan, Run
from torchace.lab.training.loop import Progress

LOG = "log.jsonl"
EVERY = 5.0  # seconds between two lines about the progress of a group
BLOCK = 65_536  # bytes that are searched for a newline at a time


class Callback:
    """No-op callback of a sweep; override what you need."""

    def on_plan(self, done: int, total: int) -> None:
        """The sweep has `total` runs, of which `done` are finished already."""

    def on_group_start(self, group: GroupPlan) -> None:
        """The training of a run group starts or resumes."""

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        """A run group made progress, reported a few times a second."""

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """The results of a run group are written; `done` runs of the sweep are finished now."""

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        """The process that trained a run group died; another one resumes it."""

    def on_group_restart(self, group: GroupPlan) -> None:
        """A checkpoint of other runs was removed; the run group starts from its first step."""


class CallbackList(Callback):
    """Call several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    def on_plan(self, done: int, total: int) -> None:
        for callback in self.callbacks:
            callback.on_plan(done, total)

    def on_group_start(self, group: GroupPlan) -> None:
        for callback in self.callbacks:
            callback.on_group_start(group)

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        for callback in self.callbacks:
            callback.on_step(group, progress)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        for callback in self.callbacks:
            callback.on_group_end(group, done)

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        for callback in self.callbacks:
            callback.on_worker_lost(group, reason)

    def on_group_restart(self, group: GroupPlan) -> None:
        for callback in self.callbacks:
            callback.on_group_restart(group)


class EventLog(Callback):
    """`log.jsonl` in the run directory: a line an event, with its time; a sweep that goes on appends.

    Half a line, which a process left that was killed as it wrote, is removed first: every line is one event.

    Events: `planned`, `started`, `stepped` (every few seconds), `run` (a run's scores), `finished`, `died`,
    `restarted`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: dict[str, float] = {}
        self._has_begun = False

    def on_plan(self, done: int, total: int) -> None:
        self._write("planned", done=done, total=total)

    def on_group_start(self, group: GroupPlan) -> None:
        self._write("started", job=group.id, runs=[run.id for run in group.runs])

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last.get(group.id, -EVERY) >= EVERY:
            self._last[group.id] = now
            scores = dict(zip((run.id for run in group.runs), progress.score, strict=True))
            self._write("stepped", job=group.id, step=progress.step, steps=progress.steps, train_cross_entropy=scores)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        for run in group.runs:
            result = read_result(self.directory, run)
            if result is not None:
                test = (result["metrics"] or {}).get("test")
                self._write(
                    "run",
                    run=run.id,
                    diversity=run.diversity,
                    seed=run.seed,
                    status=result["status"],
                    seconds=result["seconds"],
                    test=test,
                )
        self._write("finished", job=group.id, done=done)

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        self._write("died", job=group.id, how=reason)

    def on_group_restart(self, group: GroupPlan) -> None:
        self._write("restarted", job=group.id)

    def _write(self, event: str, **content: Any) -> None:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": when, "event": event, **content}, ensure_ascii=False)
        log = self.directory / LOG
        if log.exists():
            check_regular(log)  # a pipe would wait for ever
        with open(log, "ab") as file:
            if not self._has_begun:
                _remove_torn_line(log)
                self._has_begun = True
            file.write(f"{line}\n".encode())


def _remove_torn_line(path: Path) -> None:
    """Cuts a file off behind its last newline."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


class TensorBoard(Callback):
    """Scalars under `tensorboard/RUN` in the run directory: training as it goes, scores when a run is done."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--tensorboard needs tensorboard: pip install 'torchace[tensorboard]'.") from error
        self.directory = directory
        self._make: Any = SummaryWriter
        self._writers: dict[str, Any] = {}

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        for run, value in zip(group.runs, progress.score, strict=True):
            if value is not None:
                self._writer(run, progress.step).add_scalar("train/running_cross_entropy", value, progress.step)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        for run in group.runs:
            result = read_result(self.directory, run)
            if result is None:
                continue
            writer = self._writer(run, 0)
            for entry in result["history"]:
                if entry["train_cross_entropy"] is not None:
                    writer.add_scalar("train/cross_entropy", entry["train_cross_entropy"], entry["step"])
            for split, scores in (result["metrics"] or {}).items():
                for name, value in (scores or {}).items():
                    if isinstance(value, float):
                        writer.add_scalar(f"{split}/{name}", value, result["steps"])
            writer.close()
            self._writers.pop(run.id)

    def _writer(self, run: Run, step: int) -> Any:
        if run.id not in self._writers:
            # what an interrupted process wrote from this step on is written again
            self._writers[run.id] = self._make(str(self.directory / "tensorboard" / run.id), purge_step=step)
        return self._writers[run.id]


def read_result(directory: Path, run: Run) -> dict[str, Any] | None:
    """What was written down about a run; None where it is not finished."""
    try:
        return read_json(directory / "runs" / f"{run.id}.json")
    except FileNotFoundError:
        return None
