"""Callbacks of a sweep, and the JSONL event log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torchace._files import check_regular
from torchace.lab.schema.results import GroupPlan, RunKey, RunResult
from torchace.lab.training.loop import Progress, RunProgress

LOG = "log.jsonl"
LOG_EVERY = 5.0  # seconds between two progress lines of a group
BLOCK = 65_536  # bytes read at a time


class Callback:
    """No-op callback of a sweep; override what you need.

    `on_run_start`, `on_step`, `on_epoch_end` and `on_run_end` are called for each run. The `on_group_...` events are
    called once for all runs that train together; by default they call those of each run. After an interruption, steps
    and epochs since the last checkpoint are reported again.

    Example:
        >>> class PrintEpochs(Callback):
        ...     def on_epoch_end(self, run, progress):
        ...         print(run.diversity, run.seed, progress.epoch, progress.metrics["train_cross_entropy"])
    """

    def on_run_start(self, run: RunKey) -> None:
        """Called when a run starts or resumes."""

    def on_step(self, run: RunKey, progress: RunProgress) -> None:
        """Called a few times a second for each run that trains, with the mean over the epoch so far."""

    def on_epoch_end(self, run: RunKey, progress: RunProgress) -> None:
        """Called after each epoch of a run."""

    def on_run_end(self, run: RunKey, result: RunResult) -> None:
        """Called after the result of a run is written; `result.status` is `finished` or `failed`."""

    def on_plan(self, done: int, total: int) -> None:
        """Called once, with the number of finished runs and of all runs."""

    def on_group_start(self, group: GroupPlan) -> None:
        """Called when a run group starts or resumes."""
        for run in group.runs:
            self.on_run_start(run)

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        """Called a few times a second while a run group trains."""
        for run, own in zip(group.runs, progress.by_run(), strict=True):
            self.on_step(run, own)

    def on_group_epoch_end(self, group: GroupPlan, progress: Progress) -> None:
        """Called after each epoch of a run group."""
        for run, own in zip(group.runs, progress.by_run(), strict=True):
            self.on_epoch_end(run, own)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Called after a run group's results are written; `done` runs of the sweep are finished."""

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        """Called when the worker of a run group died; another one resumes the group."""

    def on_group_restart(self, group: GroupPlan) -> None:
        """Called when a checkpoint of other runs was removed and the run group starts again."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackList(Callback):
    """Call several callbacks in order; an object that has some of the events' methods is a callback too."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.callbacks = [c if isinstance(c, Callback) else _as_callback(c) for c in callbacks]
        for event in EVENTS:
            setattr(self, event, partial(self._call, event))

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)


def _as_callback(methods: Any) -> Callback:
    callback, events = Callback(), [event for event in EVENTS if hasattr(methods, event)]
    if not events or isinstance(methods, type):
        raise TypeError(
            f"Expected callbacks with a method such as on_epoch_end(run, progress), but got {methods!r}. "
            "Give an object of a class derived from torchace.lab.Callback."
        )
    for event in events:
        setattr(callback, event, getattr(methods, event))
    return callback


class EventLog(Callback):
    """Append events with their time to `log.jsonl`; a partial last line of a killed process is removed first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: dict[str, float] = {}
        self._is_open = False

    def on_plan(self, done: int, total: int) -> None:
        """Log `planned`."""
        self._write("planned", done=done, total=total)

    def on_group_start(self, group: GroupPlan) -> None:
        """Log `started`."""
        self._write("started", job=group.id, runs=[run.id for run in group.runs])

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        """Log `stepped` every few seconds."""
        now = time.monotonic()
        if now - self._last.get(group.id, -LOG_EVERY) >= LOG_EVERY:
            self._last[group.id] = now
            scores = dict(zip((run.id for run in group.runs), progress.score, strict=True))
            content = {"step": progress.step, "steps": progress.steps, f"train_{progress.metric}": scores}
            self._write("stepped", job=group.id, **content)

    def on_run_end(self, run: RunKey, result: RunResult) -> None:
        """Log `run` with its scores."""
        content = result.model_dump(mode="json", include={"diversity", "seed", "status", "seconds"})
        scores = None if result.metrics is None else result.metrics.model_dump(mode="json")["test"]
        self._write("run", run=run.id, **content, test=scores)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Log `finished`."""
        self._write("finished", job=group.id, done=done)

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        """Log `died`."""
        self._write("died", job=group.id, how=reason)

    def on_group_restart(self, group: GroupPlan) -> None:
        """Log `restarted`."""
        self._write("restarted", job=group.id)

    def _write(self, event: str, **content: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **content}, ensure_ascii=False)
        log = self.directory / LOG
        if log.exists():
            check_regular(log)  # a pipe would block
        with open(log, "ab") as file:
            if not self._is_open:
                remove_partial_line(log)
                self._is_open = True
            file.write(f"{line}\n".encode())


def remove_partial_line(path: Path) -> None:
    """Truncate a file after its last newline."""
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
