"""A sweep on Ray: every group is a task of the cluster, and the driver alone writes the run directory.

What travels: loaded data once to every node through Ray's object store; progress and checkpoints from a worker to the
driver through an actor beside it; results as what a task returns; and the newest checkpoint with a task that resumes a
group. So the cluster needs no shared file system and no data sets, and the directory is that of a local sweep.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.store import GroupPlan, Run, RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.environment import versions
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.ray_worker import Line, Results, files_of, introduced, train, write_files
from torchace.lab.sweeps.sweep import Sweep, Unfinished, config_digest
from torchace.lab.training.checkpoint import MANIFEST, CheckpointError
from torchace.lab.training.loop import Failure, Interrupted, Progress

# Read when Ray is imported. Its own words about dead workers would stand in the middle of ours; nothing is reported to
# its makers by a cluster that we start.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise ImportError("Sweeps on Ray need an extra package: pip install 'torchace[ray]'.") from error

DEATHS = 5  # of a group's workers, one after another without a checkpoint in between, until it is given up
IN_FLIGHT = 256  # tasks at most that Ray is given at a time
PAUSE = 0.1  # seconds between two looks at the mailbox
REACH = 5.0  # seconds for a connection to an address
JOIN = 60.0  # seconds to join a cluster once its address answers: it may still be starting
HALT = 60.0  # seconds for workers to hand over their last checkpoint when the sweep is stopped


class RayAddressError(ValueError):
    """A cluster that cannot be used: one sentence that says why and what to do."""


@contextmanager
def ray_sweep(experiment: Experiment, directory: Path, device: str, address: str) -> Iterator[Sweep]:
    """A sweep whose groups are done by a Ray cluster, connected to it for as long as the context lasts.

    Args:
        experiment: What is run.
        directory: Where the results are written, by this process.
        device: `cpu`, `cuda`, or `auto`: cuda where the cluster has GPUs.
        address: `local` starts Ray on this machine, `auto` finds the one that runs here, `HOST:PORT` is a cluster this
            machine is part of, `ray://HOST:PORT` any other.
    """
    _join(address)
    try:
        yield RaySweep(experiment, directory, _device(device))
    except ConnectionError as error:
        raise RayAddressError(
            f"Lost the Ray cluster at {address}. Everything so far is in {directory}; repeat the command to go on."
        ) from error
    finally:
        ray.shutdown()


@dataclass
class _Workers:
    """What is known of the processes that do the groups."""

    threads: int = field(default_factory=torch.get_num_threads)
    hardware: dict[str, Any] = field(default_factory=dict)

    def options(self, device: str) -> dict[str, Any]:
        """What a task asks the cluster for. A group on a GPU leaves the node's cores to those on the others."""
        on_gpu = device == "cuda"
        return {"num_cpus": 1 if on_gpu else self.threads, "num_gpus": int(on_gpu), "max_retries": 0}


@dataclass(frozen=True)
class RaySweep(Sweep):
    """A sweep whose groups are tasks of the Ray cluster that this process is connected to."""

    workers: _Workers = field(default_factory=_Workers)

    def run(self, callback: Callback | None = None, stop: Callable[[], bool] = lambda: False) -> dict[Run, Failure]:
        """Trains what is not finished yet and returns the runs that failed; see `Sweep.run`.

        A group whose worker dies goes on elsewhere from its newest checkpoint. One whose workers die again and again,
        or that ends with an error, is given up; the others go on, and `Unfinished` names its runs in the end.
        """
        self.workers.hardware = _probed(self.device, self.workers, stop)  # before there are files
        return super().run(callback, stop)

    def _hardware(self) -> dict[str, Any]:
        return self.workers.hardware

    def _resume_count(self, experiment: dict[str, Any], store: RunStore, groups: Sequence[GroupPlan]) -> None:
        spent = _spent(store, groups)
        experiment["seconds"] += sum(max(0.0, s - experiment["counted"].get(group, 0.0)) for group, s in spent.items())
        experiment["counted"] = spent

    def _count(
        self,
        experiment: dict[str, Any],
        store: RunStore,
        groups: Sequence[GroupPlan],
        group: GroupPlan | None,
        seconds: float,
    ) -> None:
        experiment["seconds"] += seconds  # in which all groups at hand went on
        experiment["counted"] = _spent(store, groups)

    def _work(
        self,
        store: RunStore,
        groups: Sequence[GroupPlan],
        arms: Mapping[str, Arm],
        data: Mapping[str, LoadedData],
        callback: Callback,
        stop: Callable[[], bool],
    ) -> Iterator[tuple[GroupPlan | None, float]]:
        stored = {id(prepared): ray.put(prepared) for prepared in {id(p): p for p in data.values()}.values()}
        task, options = ray.remote(train), self.workers.options(self.device)
        alone = Sweep(self.experiment, self.directory, self.device)
        mailbox = _mailbox()

        def send(group: GroupPlan, attempt: int) -> Any:
            arm = arms[group.runs[0].arm]
            checkpoints = store.checkpoints(group, config_digest(arm))
            if checkpoints.remove_foreign():
                callback.on_group_restart(group)
            files = files_of(checkpoints.directory)
            line = Line(mailbox, group.id, attempt)
            named = task.options(name=f"torchace {group.id}", **options)
            return named.remote(alone, group, arm, stored[id(data[arm.name])], files, line, self.workers.threads)

        return _Dispatch(store, deque(groups), send, mailbox, callback, stop).done()


def _spent(store: RunStore, groups: Sequence[GroupPlan]) -> dict[str, float]:
    """The seconds that unfinished groups have taken so far, as their checkpoints say, by group."""
    found = {}
    for group in groups:
        with suppress(OSError, ValueError, LookupError, TypeError):  # no checkpoint, or one that its group will refuse
            manifest = json.loads((store.checkpoints(group).directory / MANIFEST).read_bytes())
            found[group.id] = float(manifest["progress"]["seconds"])
    return found


# -- the driver -------------------------------------------------------------------------------------------------------


@dataclass
class _Dispatch:
    """The groups of a sweep on their way through the cluster."""

    store: RunStore
    waiting: deque[GroupPlan]
    send: Callable[[GroupPlan, int], Any]
    mailbox: Any
    callback: Callback
    stop: Callable[[], bool]
    flights: dict[Any, tuple[GroupPlan, int]] = field(default_factory=dict)  # by what the task will return
    attempts: dict[str, int] = field(default_factory=dict)  # by group, as are the next two
    deaths: dict[str, int] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    given_up: dict[Run, str] = field(default_factory=dict)
    halted: float | None = None  # when the sweep was told to stop

    def done(self) -> Iterator[tuple[GroupPlan | None, float]]:
        """Yield every finished group with the seconds since the previous one."""
        left, counted = len(self.waiting), time.monotonic()

        def since_then() -> float:
            nonlocal counted
            before, counted = counted, time.monotonic()
            return counted - before

        while self.waiting or self.flights:
            if self.halted is None and self.stop():
                self._halt()
            if self.halted is not None and time.monotonic() - self.halted > HALT:
                break
            while self.waiting and len(self.flights) < IN_FLIGHT:
                group = self.waiting.popleft()
                self.attempts[group.id] = self.attempts.get(group.id, 0) + 1
                self.flights[self.send(group, self.attempts[group.id])] = group, self.attempts[group.id]
            ready, _ = ray.wait(list(self.flights), timeout=PAUSE)
            self._hear()  # first: a dead worker may have left a checkpoint
            for reference in ready:
                group, _ = self.flights.pop(reference)
                if self._landed(group, reference):
                    left -= 1
                    yield group, since_then()
        yield None, since_then()
        if self.halted is not None and left:
            raise Interrupted
        if self.given_up:
            raise Unfinished(self.given_up)

    def _halt(self) -> None:
        """Lets running groups end with a checkpoint and the others not begin."""
        self.halted = time.monotonic()
        self.waiting.clear()
        for reference, (group, _) in self.flights.items():
            if group.id not in self.started:
                ray.cancel(reference, force=True)  # else an import may break off in a worker that lives on

    def _hear(self) -> None:
        """Passes on how far groups are, and writes the checkpoints that came."""
        flying = {group.id: (group, attempt) for group, attempt in self.flights.values()}
        more = True
        while more:
            try:
                told, kept = ray.get(self.mailbox.news.remote(self.halted is not None), timeout=10)
            except RayError:  # its process died too, and is being started again
                return
            more = kept is not None
            for name, attempt, progress in told:
                group, current = flying.get(name, (None, None))
                if group is None or attempt != current:  # of a worker that was given up, though it lives
                    continue
                self._begun(group)
                if progress is not None:
                    self.callback.on_step(group, Progress(*progress))
            if kept is not None and kept[0] in flying and flying[kept[0]][1] == kept[1]:
                group, _ = flying[kept[0]]
                write_files(self.store.checkpoints(group).directory, kept[2])
                self.deaths[group.id] = 0

    def _begun(self, group: GroupPlan) -> None:
        if group.id not in self.started:
            self.started.add(group.id)
            self.callback.on_group_start(group)

    def _landed(self, group: GroupPlan, reference: Any) -> bool:
        """Writes down what a task returned; whether its group is done."""
        try:
            results: Results | None = ray.get(reference)
        except RayTaskError as error:
            if not isinstance(error.cause, RayError):
                self._give_up(group, _said(error.cause))
            else:  # it lost the mailbox, or the data
                self._died(group, type(error.cause).__name__)
            return False
        except RayError as error:
            self._died(group, type(error).__name__)
            return False
        if results is None:  # it was told to stop, and left a checkpoint
            return False
        self._begun(group)
        for run, content, arrays in results:
            if not self.store.is_finished(run):
                self.store.write_result(run, content, arrays)
        self.store.checkpoints(group).remove()
        return True

    def _died(self, group: GroupPlan, how: str) -> None:
        if self.halted is not None:
            return
        self.deaths[group.id] = self.deaths.get(group.id, 0) + 1
        if self.deaths[group.id] == DEATHS:
            self._give_up(group, f"its worker died {DEATHS} times in a row without a new checkpoint ({how})")
        else:
            self.callback.on_worker_lost(group, how)
            self.waiting.append(group)

    def _give_up(self, group: GroupPlan, why: str) -> None:
        self.given_up |= {run: why for run in group.runs if not self.store.is_finished(run)}


def _said(error: BaseException) -> str:
    """An error of a group in a sentence, without its full stop."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def _mailbox() -> Any:
    """Start an actor beside the driver that holds each group's newest progress and checkpoint until fetched."""

    # Defined in here, a class travels by value: its process needs neither torchace nor the memory of torch.
    class Mailbox:
        def __init__(self) -> None:
            self.told: dict[str, tuple[str, int, Any]] = {}
            self.kept: dict[str, tuple[str, int, Any]] = {}
            self.stopping = False

        def tell(self, group: str, attempt: int, progress: Any) -> bool:
            self.told[group] = group, attempt, progress
            return self.stopping

        def keep(self, group: str, attempt: int, files: Any) -> bool:
            self.kept[group] = group, attempt, files
            return self.stopping

        def news(self, stopping: bool) -> tuple[list[Any], Any]:
            """All progress and one checkpoint: several together may be too much for one message."""
            self.stopping = stopping
            told, self.told = list(self.told.values()), {}
            return told, self.kept.pop(next(iter(self.kept))) if self.kept else None

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(Mailbox).options(**options).remote()


# -- the cluster ------------------------------------------------------------------------------------------------------


def _join(address: str) -> None:
    """Connects this process to a cluster, or says within seconds why that cannot be."""
    address = address.strip()
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    options: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address == "local":
        options["include_dashboard"] = False
    elif address.startswith("ray://"):
        _reach(address)
    else:
        if address != "auto":
            _reach(address)
        _try(address)
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets one that ends the process at once
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out")  # said below
            try:
                with _on_loopback() if address == "local" else nullcontext():
                    ray.init(address, **options)
            except ConnectionAbortedError:
                # The cluster forks a process for each client that comes by ray://, with gRPC's threads running: on a
                # busy machine one in twenty dies there. The next one is another process.
                ray.init(address, **options)
    except (RayError, RuntimeError, OSError, ValueError, ImportError) as error:
        raise _not_joined(address, _last_line(error)) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray listen at 127.0.0.1 alone, as it does on macOS; on Linux it would listen to the whole network."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _reach(address: str) -> None:
    """Refuses what is not an address, and one that nobody answers at: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RayAddressError(f"Expected --ray auto, local, HOST:PORT or ray://HOST:PORT, but got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()
    except OSError as error:
        raise RayAddressError(
            f"Cannot reach a Ray cluster at {address}: {error.strerror or error}. Start one with `ray start --head` "
            "(it listens at 6379, for ray:// at 10001), or use --ray local."
        ) from error


def _try(address: str) -> None:
    """Joins in a process of its own, which can be given up: Ray has no time limit, and ends the process it fails in."""
    code = f"import ray; ray.init({address!r}, log_to_driver=False)"
    why = f"it did not answer within {JOIN:.0f} seconds"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=JOIN,
            check=False,
            start_new_session=True,  # away from the terminal's Ctrl-C, which is the sweep's to handle
        )
        if tried.returncode == 0:
            return
        why = _last_line(tried.stderr)
    except subprocess.TimeoutExpired:
        pass
    raise _not_joined(address, why)


def _not_joined(address: str, why: str) -> RayAddressError:
    return RayAddressError(
        f"Cannot join a Ray cluster with --ray {address} ({why}). From a machine outside the cluster use "
        "ray://HOST:10001; where it asks for a token, set RAY_AUTH_MODE=token; without a cluster use --ray local."
    )


def _device(name: str) -> str:
    """The device of every group: Ray says which GPU it is."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"Expected --device auto, cpu or cuda with --ray, but got {name!r}. Ray chooses the GPU.")
    has_gpus = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    if name == "cuda" and not has_gpus:
        raise ValueError("Expected a Ray cluster with GPUs for --device cuda, but it has none. Use --device cpu.")
    return "cuda" if has_gpus and name != "cpu" else "cpu"


def _probed(device: str, workers: _Workers, stop: Callable[[], bool]) -> dict[str, Any]:
    """What a worker is made of; says so where no worker can do a group."""
    options = workers.options(device)
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    largest = max((node["Resources"].get("CPU", 0) for node in nodes), default=0)
    if 0 < largest < options["num_cpus"]:  # with no CPU at all, workers are still to come
        raise ValueError(
            f"A group takes {options['num_cpus']} CPUs, one for each of this process's threads, but the largest node "
            f"has {largest:g}. Set OMP_NUM_THREADS={largest:.0f} or less; the number of threads is part of a result."
        )
    probe = ray.remote(introduced).options(**{**options, "name": "torchace probe", "max_retries": 3})
    reference = probe.remote(device, workers.threads)
    while not ray.wait([reference], timeout=PAUSE)[0]:
        if stop():
            ray.cancel(reference, force=True)
            raise Interrupted
    try:
        version, found = ray.get(reference)
    except RayError as error:
        raise ValueError(
            f"A worker of the Ray cluster cannot train on {device} ({_last_line(error)}). Install the same torchace on "
            "every node (pip install 'torchace[tool,ray]'), with a torch that sees its GPUs."
        ) from error
    if version != versions()["torchace"]:
        raise ValueError(
            f"The Ray workers have torchace {version}, but here it is {versions()['torchace']}. Install the same."
        )
    return found


def _last_line(text: object) -> str:
    """Of what Ray says: a traceback's last line is the reason."""
    return (str(text).strip().splitlines() or ["it said nothing"])[-1].rstrip(".")
