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
from torchace.lab.sweeps.run_store import Job, Run
from torchace.lab.sweeps.sweep import Watcher
from torchace.lab.training.loop import Progress

LOG = "log.jsonl"
EVERY = 5.0  # seconds between two lines about the progress of a job
BLOCK = 65_536  # bytes that are searched for a newline at a time


class Watchers(Watcher):
    """Several who are told."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers

    def planned(self, done: int, total: int) -> None:
        for watcher in self.watchers:
            watcher.planned(done, total)

    def started(self, job: Job) -> None:
        for watcher in self.watchers:
            watcher.started(job)

    def stepped(self, job: Job, progress: Progress) -> None:
        for watcher in self.watchers:
            watcher.stepped(job, progress)

    def finished(self, job: Job, done: int) -> None:
        for watcher in self.watchers:
            watcher.finished(job, done)

    def died(self, job: Job, how: str) -> None:
        for watcher in self.watchers:
            watcher.died(job, how)

    def restarted(self, job: Job) -> None:
        for watcher in self.watchers:
            watcher.restarted(job)


class EventLog(Watcher):
    """`log.jsonl` in the run directory: a line an event, with its time; a sweep that goes on appends.

    Half a line, which a process left that was killed as it wrote, is removed first: every line is one event.

    Events: `planned`, `started`, `stepped` (every few seconds), `run` (a run's scores), `finished`, `died`,
    `restarted`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: dict[str, float] = {}
        self._has_begun = False

    def planned(self, done: int, total: int) -> None:
        self._write("planned", done=done, total=total)

    def started(self, job: Job) -> None:
        self._write("started", job=job.id, runs=[run.id for run in job.runs])

    def stepped(self, job: Job, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last.get(job.id, -EVERY) >= EVERY:
            self._last[job.id] = now
            scores = dict(zip((run.id for run in job.runs), progress.score, strict=True))
            self._write("stepped", job=job.id, step=progress.step, steps=progress.steps, train_cross_entropy=scores)

    def finished(self, job: Job, done: int) -> None:
        for run in job.runs:
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
        self._write("finished", job=job.id, done=done)

    def died(self, job: Job, how: str) -> None:
        self._write("died", job=job.id, how=how)

    def restarted(self, job: Job) -> None:
        self._write("restarted", job=job.id)

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


class TensorBoard(Watcher):
    """Scalars under `tensorboard/RUN` in the run directory: training as it goes, scores when a run is done."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--tensorboard needs tensorboard: pip install 'torchace[tensorboard]'.") from error
        self.directory = directory
        self._make: Any = SummaryWriter
        self._writers: dict[str, Any] = {}

    def stepped(self, job: Job, progress: Progress) -> None:
        for run, value in zip(job.runs, progress.score, strict=True):
            if value is not None:
                self._writer(run, progress.step).add_scalar("train/running_cross_entropy", value, progress.step)

    def finished(self, job: Job, done: int) -> None:
        for run in job.runs:
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
