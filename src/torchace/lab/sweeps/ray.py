"""A sweep on Ray: every job is a task of the cluster, and the driver alone writes the run directory.

What travels: prepared data once to every node through Ray's object store; progress and checkpoints from a worker to the
driver through an actor beside it; results as what a task returns; and the newest checkpoint with a task whose job goes
on. So the cluster needs no shared file system and no data sets, and the directory is that of a local sweep.
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

from torchace.lab.sweeps.config import Arm, Experiment
from torchace.lab.sweeps.environment import versions
from torchace.lab.sweeps.loaded_data import Prepared
from torchace.lab.sweeps.ray_worker import Line, Results, files_of, introduced, train, write_files
from torchace.lab.sweeps.run_store import Job, Ledger, Run
from torchace.lab.sweeps.sweep import Sweep, Unfinished, Watcher, config_digest
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

DEATHS = 5  # of a job's workers, one after another without a checkpoint in between, until it is given up
IN_FLIGHT = 256  # tasks at most that Ray is given at a time
PAUSE = 0.1  # seconds between two looks at the mailbox
REACH = 5.0  # seconds for a connection to an address
JOIN = 60.0  # seconds to join a cluster once its address answers: it may still be starting
HALT = 60.0  # seconds for workers to hand over their last checkpoint when the sweep is stopped


class RayAddressError(ValueError):
    """A cluster that cannot be used: one sentence that says why and what to do."""


@contextmanager
def ray_sweep(experiment: Experiment, directory: Path, device: str, address: str) -> Iterator[Sweep]:
    """A sweep whose jobs are done by a Ray cluster, connected to it for as long as the context lasts.

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
    """What is known of the processes that do the jobs."""

    threads: int = field(default_factory=torch.get_num_threads)
    hardware: dict[str, Any] = field(default_factory=dict)

    def options(self, device: str) -> dict[str, Any]:
        """What a task asks the cluster for. A job on a GPU leaves the node's cores to those on the others."""
        on_gpu = device == "cuda"
        return {"num_cpus": 1 if on_gpu else self.threads, "num_gpus": int(on_gpu), "max_retries": 0}


@dataclass(frozen=True)
class RaySweep(Sweep):
    """A sweep whose jobs are tasks of the Ray cluster that this process is connected to."""

    workers: _Workers = field(default_factory=_Workers)

    def run(self, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False) -> dict[Run, Failure]:
        """Trains what is not finished yet and returns the runs that failed; see `Sweep.run`.

        A job whose worker dies goes on elsewhere from its newest checkpoint. One whose workers die again and again, or
        that ends with an error, is given up; the others go on, and `Unfinished` names its runs in the end.
        """
        self.workers.hardware = _probed(self.device, self.workers, stop)  # before there are files
        return super().run(watcher, stop)

    def _hardware(self) -> dict[str, Any]:
        return self.workers.hardware

    def _resume_count(self, experiment: dict[str, Any], ledger: Ledger, jobs: Sequence[Job]) -> None:
        spent = _spent(ledger, jobs)
        experiment["seconds"] += sum(max(0.0, s - experiment["counted"].get(job, 0.0)) for job, s in spent.items())
        experiment["counted"] = spent

    def _count(
        self, experiment: dict[str, Any], ledger: Ledger, jobs: Sequence[Job], job: Job | None, seconds: float
    ) -> None:
        experiment["seconds"] += seconds  # in which all jobs at hand went on
        experiment["counted"] = _spent(ledger, jobs)

    def _work(
        self,
        ledger: Ledger,
        jobs: Sequence[Job],
        arms: Mapping[str, Arm],
        data: Mapping[str, Prepared],
        watcher: Watcher,
        stop: Callable[[], bool],
    ) -> Iterator[tuple[Job | None, float]]:
        stored = {id(prepared): ray.put(prepared) for prepared in {id(p): p for p in data.values()}.values()}
        task, options = ray.remote(train), self.workers.options(self.device)
        alone = Sweep(self.experiment, self.directory, self.device)
        mailbox = _mailbox()

        def send(job: Job, attempt: int) -> Any:
            arm = arms[job.runs[0].arm]
            checkpoints = ledger.checkpoints(job, config_digest(arm))
            if checkpoints.remove_foreign():
                watcher.restarted(job)
            files = files_of(checkpoints.directory)
            line = Line(mailbox, job.id, attempt)
            named = task.options(name=f"torchace {job.id}", **options)
            return named.remote(alone, job, arm, stored[id(data[arm.name])], files, line, self.workers.threads)

        return _Dispatch(ledger, deque(jobs), send, mailbox, watcher, stop).done()


def _spent(ledger: Ledger, jobs: Sequence[Job]) -> dict[str, float]:
    """The seconds that unfinished jobs have taken so far, as their checkpoints say, by job."""
    found = {}
    for job in jobs:
        with suppress(OSError, ValueError, LookupError, TypeError):  # no checkpoint, or one that its job will refuse
            manifest = json.loads((ledger.checkpoints(job).directory / MANIFEST).read_bytes())
            found[job.id] = float(manifest["progress"]["seconds"])
    return found


# -- the driver -------------------------------------------------------------------------------------------------------


@dataclass
class _Dispatch:
    """The jobs of a sweep on their way through the cluster."""

    ledger: Ledger
    waiting: deque[Job]
    send: Callable[[Job, int], Any]
    mailbox: Any
    watcher: Watcher
    stop: Callable[[], bool]
    flights: dict[Any, tuple[Job, int]] = field(default_factory=dict)  # by what the task will return
    attempts: dict[str, int] = field(default_factory=dict)  # by job, as are the next two
    deaths: dict[str, int] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    given_up: dict[Run, str] = field(default_factory=dict)
    halted: float | None = None  # when the sweep was told to stop

    def done(self) -> Iterator[tuple[Job | None, float]]:
        """Every job that is written down, with the seconds since the one before it; what is left of them at the end."""
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
                job = self.waiting.popleft()
                self.attempts[job.id] = self.attempts.get(job.id, 0) + 1
                self.flights[self.send(job, self.attempts[job.id])] = job, self.attempts[job.id]
            ready, _ = ray.wait(list(self.flights), timeout=PAUSE)
            self._hear()  # first: a dead worker may have left a checkpoint
            for reference in ready:
                job, _ = self.flights.pop(reference)
                if self._landed(job, reference):
                    left -= 1
                    yield job, since_then()
        yield None, since_then()
        if self.halted is not None and left:
            raise Interrupted
        if self.given_up:
            raise Unfinished(self.given_up)

    def _halt(self) -> None:
        """Lets running jobs end with a checkpoint and the others not begin."""
        self.halted = time.monotonic()
        self.waiting.clear()
        for reference, (job, _) in self.flights.items():
            if job.id not in self.started:
                ray.cancel(reference, force=True)  # else an import may break off in a worker that lives on

    def _hear(self) -> None:
        """Passes on how far jobs are, and writes the checkpoints that came."""
        flying = {job.id: (job, attempt) for job, attempt in self.flights.values()}
        more = True
        while more:
            try:
                told, kept = ray.get(self.mailbox.news.remote(self.halted is not None), timeout=10)
            except RayError:  # its process died too, and is being started again
                return
            more = kept is not None
            for name, attempt, progress in told:
                job, current = flying.get(name, (None, None))
                if job is None or attempt != current:  # of a worker that was given up, though it lives
                    continue
                self._begun(job)
                if progress is not None:
                    self.watcher.stepped(job, Progress(*progress))
            if kept is not None and kept[0] in flying and flying[kept[0]][1] == kept[1]:
                job, _ = flying[kept[0]]
                write_files(self.ledger.checkpoints(job).directory, kept[2])
                self.deaths[job.id] = 0

    def _begun(self, job: Job) -> None:
        if job.id not in self.started:
            self.started.add(job.id)
            self.watcher.started(job)

    def _landed(self, job: Job, reference: Any) -> bool:
        """Writes down what a task returned; whether its job is done."""
        try:
            results: Results | None = ray.get(reference)
        except RayTaskError as error:
            if not isinstance(error.cause, RayError):
                self._give_up(job, _said(error.cause))
            else:  # it lost the mailbox, or the data
                self._died(job, type(error.cause).__name__)
            return False
        except RayError as error:
            self._died(job, type(error).__name__)
            return False
        if results is None:  # it was told to stop, and left a checkpoint
            return False
        self._begun(job)
        for run, content, arrays in results:
            if not self.ledger.is_finished(run):
                self.ledger.write_result(run, content, arrays)
        self.ledger.checkpoints(job).remove()
        return True

    def _died(self, job: Job, how: str) -> None:
        if self.halted is not None:
            return
        self.deaths[job.id] = self.deaths.get(job.id, 0) + 1
        if self.deaths[job.id] == DEATHS:
            self._give_up(job, f"its worker died {DEATHS} times in a row without a new checkpoint ({how})")
        else:
            self.watcher.died(job, how)
            self.waiting.append(job)

    def _give_up(self, job: Job, why: str) -> None:
        self.given_up |= {run: why for run in job.runs if not self.ledger.is_finished(run)}


def _said(error: BaseException) -> str:
    """An error of a job in a sentence, without its full stop."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def _mailbox() -> Any:
    """An actor beside the driver: the newest progress and the newest checkpoint of each job, until they are fetched."""

    # Defined in here, a class travels by value: its process needs neither torchace nor the memory of torch.
    class Mailbox:
        def __init__(self) -> None:
            self.told: dict[str, tuple[str, int, Any]] = {}
            self.kept: dict[str, tuple[str, int, Any]] = {}
            self.stopping = False

        def tell(self, job: str, attempt: int, progress: Any) -> bool:
            self.told[job] = job, attempt, progress
            return self.stopping

        def keep(self, job: str, attempt: int, files: Any) -> bool:
            self.kept[job] = job, attempt, files
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
    """The device of every job: Ray says which GPU it is."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"Expected --device auto, cpu or cuda with --ray, but got {name!r}. Ray chooses the GPU.")
    has_gpus = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    if name == "cuda" and not has_gpus:
        raise ValueError("Expected a Ray cluster with GPUs for --device cuda, but it has none. Use --device cpu.")
    return "cuda" if has_gpus and name != "cpu" else "cpu"


def _probed(device: str, workers: _Workers, stop: Callable[[], bool]) -> dict[str, Any]:
    """What a worker is made of; says so where no worker can do a job."""
    options = workers.options(device)
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    largest = max((node["Resources"].get("CPU", 0) for node in nodes), default=0)
    if 0 < largest < options["num_cpus"]:  # with no CPU at all, workers are still to come
        raise ValueError(
            f"A job takes {options['num_cpus']} CPUs, one for each of this process's threads, but the largest node has "
            f"{largest:g}. Set OMP_NUM_THREADS={largest:.0f} or less; the number of threads is part of a result."
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
