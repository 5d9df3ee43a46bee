"""What a worker of a Ray cluster does: a group as a local sweep would, in a folder of its own.

Results are what the task returns. Progress and checkpoints go to the driver's mailbox.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._files import write_atomic
from torchace.lab.schema.experiment import Arm
from torchace.lab.store import GroupPlan, Run, RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.environment import hardware, versions
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.checkpoint import MANIFEST, CheckpointError, Checkpoints
from torchace.lab.training.loop import Interrupted, Progress

Files = dict[str, bytes]  # a checkpoint: its files by name
Results = list[tuple[Run, Mapping[str, Any], Mapping[str, Tensor]]]  # of a group, as `RunStore.write_result` takes them


def train(
    sweep: Sweep, group: GroupPlan, arm: Arm, data: LoadedData, files: Files, line: Line, threads: int
) -> Results | None:
    """Does a group, from its checkpoint if there is one; None when it was told to stop.

    Args:
        sweep: What it is a part of.
        group: What to train.
        arm: How.
        data: What on.
        files: The newest checkpoint, which an earlier worker left.
        line: To the driver.
        threads: The driver's number of threads.
    """
    torch.set_num_threads(threads)  # bits depend on it
    line.tell(None)
    with _folder() as folder:
        store = _Collected(folder, line)
        write_files(store.checkpoints(group).directory, files)
        try:
            sweep._do(store, group, arm, data, line, line.stop)
        except Interrupted:
            return None
        except CheckpointError as error:
            there, here = sweep.directory / "checkpoints" / group.id, store.checkpoints(group).directory
            raise CheckpointError(str(error).replace(str(here), str(there))) from None
        return store.results


class Line(Callback):
    """From a worker to the driver: how far it is, and its checkpoints. Back comes whether to stop."""

    def __init__(self, mailbox: Any, group: str, attempt: int) -> None:
        self.mailbox, self.group, self.attempt = mailbox, group, attempt
        self.answer: Any = None
        self.stopping = False

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        import ray  # here: who has none learns it from `runs.ray`

        if self.answer is not None:
            if not ray.wait([self.answer], timeout=0)[0]:
                return  # training does not wait for who watches it
            self.stopping = ray.get(self.answer)
        self.tell((progress.step, progress.steps, progress.score))

    def tell(self, progress: Any) -> None:
        self.answer = self.mailbox.tell.remote(self.group, self.attempt, progress)

    def keep(self, files: Files) -> None:
        import ray

        self.stopping = ray.get(self.mailbox.keep.remote(self.group, self.attempt, files))

    def stop(self) -> bool:
        return self.stopping


class _Collected(RunStore):
    """A group's results in memory, its checkpoints in a folder and on their way to the driver."""

    def __init__(self, directory: Path, line: Line) -> None:
        super().__init__(directory)
        self.line = line
        self.results: Results = []

    def checkpoints(self, group: GroupPlan, config_sha256: str | None = None) -> Checkpoints:
        plain = super().checkpoints(group, config_sha256)
        return _Sent(plain.directory, self.line.keep, owner=plain.owner)

    def write_result(self, run: Run, content: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        self.results.append((run, content, {name: value.cpu() for name, value in arrays.items()}))


@dataclass(frozen=True)
class _Sent(Checkpoints):
    """Checkpoints that somebody else receives too."""

    send: Callable[[Files], None]

    def save(self, *arguments: Any, **options: Any) -> None:
        super().save(*arguments, **options)
        self.send(files_of(self.directory))


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder; those that killed workers left on this machine are removed."""
    start = "torchace-worker-"
    for left in Path(tempfile.gettempdir()).glob(f"{start}*"):
        process = left.name.removeprefix(start).partition("-")[0]
        if process.isdigit() and not _lives(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{start}{os.getpid()}-") as folder:
        yield Path(folder)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True


def files_of(directory: Path) -> Files:
    """The checkpoint in a folder; nothing where there is none."""
    if not (directory / MANIFEST).exists():
        return {}
    return {file.name: file.read_bytes() for file in (*directory.glob("state-*.safetensors"), directory / MANIFEST)}


def write_files(directory: Path, files: Files) -> None:
    """Puts a checkpoint in the place of an older one, the manifest last."""
    for name in sorted(files, key=lambda name: name == MANIFEST):
        write_atomic(directory / name, files[name])
    for old in directory.glob("state-*.safetensors"):
        if old.name not in files:
            old.unlink(missing_ok=True)


def introduced(device: str, threads: int) -> tuple[str, dict[str, Any]]:
    """The version of torchace, the processor and the device of a worker."""
    torch.set_num_threads(threads)
    return versions()["torchace"], hardware(device)
