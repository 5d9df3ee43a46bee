"""Training of a run group on a Ray worker, in a temporary directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._files import write_atomic
from torchace.lab.schema.results import GroupPlan, RunResult
from torchace.lab.store import RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import hardware, versions
from torchace.lab.sweeps.executor import Plan, train_group
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.training.checkpoint import MANIFEST, CheckpointError, Checkpoints
from torchace.lab.training.loop import Interrupted, Progress

PREFIX = "torchace-worker-"

Files = dict[str, bytes]  # a checkpoint's files by name
Results = list[tuple[RunResult, Mapping[str, Tensor], Mapping[str, Tensor] | None]]


class DriverLink(Callback):
    """Send progress and checkpoints to the driver's mailbox; replies set `stopping`."""

    def __init__(self, mailbox: Any, group: str, attempt: int) -> None:
        self.mailbox, self.group, self.attempt = mailbox, group, attempt
        self.stopping = False
        self._reply: Any = None

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        """Send progress, unless the previous one is still on its way."""
        import ray  # lazy: `sweeps.ray_cluster` raises the error with install instructions

        if self._reply is None or ray.wait([self._reply], timeout=0)[0]:
            self.flush()
            self.send_progress(astuple(progress))

    def on_group_epoch_end(self, group: GroupPlan, progress: Progress) -> None:
        """Send the results of an epoch without waiting for the driver."""
        self._reply = self.mailbox.put_epoch.remote(self.group, self.attempt, astuple(progress))

    def send_progress(self, progress: Any) -> None:
        """Send progress; None marks the start."""
        self._reply = self.mailbox.put_progress.remote(self.group, self.attempt, progress)

    def flush(self) -> None:
        """Wait until everything has arrived."""
        import ray

        if self._reply is not None:
            self.stopping, self._reply = ray.get(self._reply), None

    def send_checkpoint(self, files: Files) -> None:
        """Send a checkpoint and wait until it arrives."""
        import ray

        self.stopping = ray.get(self.mailbox.put_checkpoint.remote(self.group, self.attempt, files))

    def stop(self) -> bool:
        """Whether the driver stops the sweep."""
        return self.stopping


def train(plan: Plan, group: GroupPlan, data: LoadedData, files: Files, link: DriverLink, threads: int) -> Any:
    """Train a run group from a checkpoint and return its `Results`; None if the driver stopped it."""
    torch.set_num_threads(threads)  # results depend on it
    link.send_progress(None)
    with _temporary_directory() as folder:
        store = _MemoryStore(folder, link)
        here = store.checkpoints(group).directory
        write_checkpoint(here, files)
        try:
            train_group(replace(plan, data={group.arm: data}, store=store), group, link, link.stop)
        except Interrupted:
            return None
        except CheckpointError as error:
            there = plan.store.checkpoints(group).directory
            raise CheckpointError(str(error).replace(str(here), str(there))) from None
        link.flush()
        return store.results


class _MemoryStore(RunStore):
    def __init__(self, directory: Path, link: DriverLink) -> None:
        super().__init__(directory)
        self.link = link
        self.results: Results = []

    def checkpoints(self, group: GroupPlan, config_sha256: str | None = None) -> Checkpoints:
        local = super().checkpoints(group, config_sha256)
        return _SentCheckpoints(local.directory, self.link.send_checkpoint, owner=local.owner)

    def write_result(
        self, result: RunResult, arrays: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.results.append((result, {name: value.cpu() for name, value in arrays.items()}, weights))


@dataclass(frozen=True)
class _SentCheckpoints(Checkpoints):
    send: Callable[[Files], None]

    def save(self, *arguments: Any, **options: Any) -> None:
        super().save(*arguments, **options)
        self.send(read_checkpoint(self.directory))


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """Create a temporary directory; remove those of killed workers."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        process = left.name.removeprefix(PREFIX).partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def read_checkpoint(directory: Path) -> Files:
    """Return the files of a checkpoint; empty if there is none."""
    if not (directory / MANIFEST).exists():
        return {}
    return {file.name: file.read_bytes() for file in (*directory.glob("state-*.safetensors"), directory / MANIFEST)}


def write_checkpoint(directory: Path, files: Files) -> None:
    """Replace the checkpoint in a directory, the manifest last."""
    for name in sorted(files, key=lambda name: name == MANIFEST):
        write_atomic(directory / name, files[name])
    for old in directory.glob("state-*.safetensors"):
        if old.name not in files:
            old.unlink(missing_ok=True)


def probe(device: str, threads: int) -> tuple[str, dict[str, Any]]:
    """Return a worker's torchace version and hardware."""
    torch.set_num_threads(threads)
    return versions()["torchace"], hardware(device)
