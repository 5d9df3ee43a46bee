"""Connection to a Ray cluster, with a time limit; training of a run group on its workers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._extras import missing_extra
from torchace._files import write_atomic
from torchace.lab.schema.results import GroupPlan, RunResult
from torchace.lab.store import RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import hardware, versions
from torchace.lab.sweeps.executor import Plan, train_group
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.training.checkpoint import MANIFEST, CheckpointError, Checkpoints
from torchace.lab.training.loop import Interrupted, Progress

# Read when Ray is imported: no worker logs in the terminal, no usage statistics.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.exceptions import RayError
except ModuleNotFoundError as error:
    raise missing_extra("Sweeps on Ray need ray", "ray") from error

__all__ = ["RayAddressError", "join_cluster", "last_line", "ray"]  # import ray from here

CONNECT_SECONDS = 5.0
JOIN_SECONDS = 60.0  # a cluster that answers may still be starting


class RayAddressError(ValueError):
    """The Ray cluster cannot be used."""


def join_cluster(address: str) -> None:
    """Connect this process to a cluster, or raise `RayAddressError`.

    `local` starts Ray on this machine, `auto` finds a running one, `HOST:PORT` is a cluster that this machine belongs
    to, `ray://HOST:PORT` any other.
    """
    address = address.strip()
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    options: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address == "local":
        options["include_dashboard"] = False
    else:
        if address != "auto":
            _check_reachable(address)
        if not address.startswith("ray://"):
            _try_join(address)
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out")  # raised below
            try:
                with _on_loopback() if address == "local" else nullcontext():
                    ray.init(address, **options)
            except ConnectionAbortedError:
                # Ray forks a process for each ray:// client while gRPC's threads run; on a busy machine about one in
                # twenty dies, so try once more.
                ray.init(address, **options)
    except (RayError, RuntimeError, OSError, ValueError, ImportError) as error:
        raise _join_error(address, last_line(error)) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only; the default on Linux is every interface."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_reachable(address: str) -> None:
    """Refuse an address that is invalid or does not answer; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RayAddressError(f"Expected --ray auto, local, HOST:PORT or ray://HOST:PORT, but got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise RayAddressError(
            f"Cannot reach a Ray cluster at {address}: {error.strerror or error}. Start one with `ray start --head` "
            "(it listens at 6379, for ray:// at 10001), or use --ray local."
        ) from error


def _try_join(address: str) -> None:
    """Join in a subprocess first: Ray has no time limit and ends the process on failure."""
    code = f"import ray; ray.init({address!r}, log_to_driver=False)"
    # new session: Ctrl-C is handled by the sweep
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "start_new_session": True}
    try:
        attempt = subprocess.run([sys.executable, "-c", code], timeout=JOIN_SECONDS, **options)
    except subprocess.TimeoutExpired:
        raise _join_error(address, f"it did not answer within {JOIN_SECONDS:.0f} seconds") from None
    if attempt.returncode != 0:
        raise _join_error(address, last_line(attempt.stderr))


def _join_error(address: str, reason: str) -> RayAddressError:
    return RayAddressError(
        f"Cannot join a Ray cluster with --ray {address} ({reason}). From a machine outside the cluster use "
        "ray://HOST:10001; if it asks for a token, set RAY_AUTH_MODE=token; without a cluster use --ray local."
    )


def last_line(text: object) -> str:
    """Return the last line of a Ray error, after its traceback."""
    return (str(text).strip().splitlines() or ["no reason given"])[-1].rstrip(".")


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
        """Send progress, unless the previous message is still pending."""
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
        if self._reply is not None:
            self.stopping, self._reply = ray.get(self._reply), None

    def send_checkpoint(self, files: Files) -> None:
        """Send a checkpoint and wait until it arrives."""
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
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):  # a process of another user, or another name
            continue
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


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
