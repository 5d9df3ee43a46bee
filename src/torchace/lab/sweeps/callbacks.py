"""Callbacks of a sweep: the JSONL event log and TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchace._files import check_regular
from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.store import RunStore
from torchace.lab.training.loop import Progress

LOG = "log.jsonl"
LOG_EVERY = 5.0  # seconds between two progress lines of a group
BLOCK = 65_536  # bytes read at a time


class Callback:
    """No-op callback of a sweep; override what you need."""

    def on_plan(self, done: int, total: int) -> None:
        """Called once, with the number of finished runs and of all runs."""

    def on_group_start(self, group: GroupPlan) -> None:
        """Called when a run group starts or resumes."""

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        """Called a few times a second while a run group trains."""

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Called after a run group's results are written; `done` runs of the sweep are finished."""

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        """Called when the worker of a run group died; another one resumes the group."""

    def on_group_restart(self, group: GroupPlan) -> None:
        """Called when a checkpoint of other runs was removed and the run group starts again."""


def _call_all(event: str) -> Callable[..., None]:
    def call(self: CallbackList, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)

    return call


class CallbackList(Callback):
    """Call several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    on_plan = _call_all("on_plan")
    on_group_start = _call_all("on_group_start")
    on_step = _call_all("on_step")
    on_group_end = _call_all("on_group_end")
    on_worker_lost = _call_all("on_worker_lost")
    on_group_restart = _call_all("on_group_restart")


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

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        """Log `stepped` every few seconds."""
        now = time.monotonic()
        if now - self._last.get(group.id, -LOG_EVERY) >= LOG_EVERY:
            self._last[group.id] = now
            scores = dict(zip((run.id for run in group.runs), progress.score, strict=True))
            self._write("stepped", job=group.id, step=progress.step, steps=progress.steps, train_cross_entropy=scores)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Log `run` with the scores of each run, then `finished`."""
        for run in group.runs:
            result = RunStore(self.directory).result(run)
            if result is not None:
                content = result.model_dump(mode="json", include={"diversity", "seed", "status", "seconds"})
                scores = None if result.metrics is None else result.metrics.model_dump(mode="json")["test"]
                self._write("run", run=run.id, **content, test=scores)
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
                _remove_partial_line(log)
                self._is_open = True
            file.write(f"{line}\n".encode())


def _remove_partial_line(path: Path) -> None:
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


class TensorBoard(Callback):
    """Write scalars of each run to `tensorboard/RUN` in the run directory."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--tensorboard needs tensorboard: pip install 'torchace[tensorboard]'.") from error
        self.directory = directory
        self._make: Any = SummaryWriter
        self._writers: dict[str, Any] = {}

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        """Write the running training scores."""
        for run, value in zip(group.runs, progress.score, strict=True):
            if value is not None:
                self._writer(run, progress.step).add_scalar("train/running_cross_entropy", value, progress.step)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Write the training history and the final scores."""
        for run in group.runs:
            result = RunStore(self.directory).result(run)
            if result is None:
                continue
            writer = self._writer(run, 0)
            for entry in result.history:
                if entry["train_cross_entropy"] is not None:
                    writer.add_scalar("train/cross_entropy", entry["train_cross_entropy"], int(entry["step"] or 0))
            for split, scores in result.metrics or ():
                for name, value in ({} if scores is None else scores.values).items():
                    writer.add_scalar(f"{split}/{name}", value, result.steps)
            writer.close()
            self._writers.pop(run.id)

    def _writer(self, run: RunKey, step: int) -> Any:
        if run.id not in self._writers:
            # replaces the events that an interrupted process wrote after this step
            self._writers[run.id] = self._make(str(self.directory / "tensorboard" / run.id), purge_step=step)
        return self._writers[run.id]
