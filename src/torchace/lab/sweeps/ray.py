"""An executor on Ray: each run group is a task, and only the driver writes the run directory.

Data travel through Ray's object store, progress and checkpoints through an actor, results as return values: the cluster
needs no shared file system and no data sets.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchace.lab.schema.experiment import Arm
from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.store import RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import Components, versions
from torchace.lab.sweeps.executor import Executor, Plan, Stop, UnfinishedRunsError, config_digest
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.ray_cluster import (
    DriverLink,
    RayAddressError,
    Results,
    join_cluster,
    last_line,
    probe,
    ray,
    read_checkpoint,
    train,
    write_checkpoint,
)
from torchace.lab.training.checkpoint import CheckpointError
from torchace.lab.training.loop import Interrupted, Progress

RayError, RayTaskError = ray.exceptions.RayError, ray.exceptions.RayTaskError

MAX_DEATHS = 5  # of a group's workers in a row, without a new checkpoint
MAX_TASKS = 256  # submitted at a time
POLL_SECONDS = 0.1
STOP_SECONDS = 60.0  # for the last checkpoints of workers


@contextmanager
def connect_ray(address: str, device: str, directory: Path, stop: Stop = lambda: False) -> Iterator[RayExecutor]:
    """Connect to a Ray cluster and yield its executor; `stop` ends the wait for a free worker."""
    join_cluster(address)
    try:
        yield RayExecutor(choose_device(device), stop)
    except ConnectionError as error:
        raise RayAddressError(
            f"Lost the Ray cluster at {address}. Everything so far is in {directory}; repeat the command to resume."
        ) from error
    finally:
        ray.shutdown()


def choose_device(name: str) -> str:
    """Resolve `auto`: cuda if the cluster has GPUs."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"Expected --device auto, cpu or cuda with --ray, but got {name!r}. Ray chooses the GPU.")
    has_gpus = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    if name == "cuda" and not has_gpus:
        raise ValueError("Expected a Ray cluster with GPUs for --device cuda, but it has none. Use --device cpu.")
    return "cuda" if has_gpus and name != "cpu" else "cpu"


class RayExecutor(Executor):
    """Train run groups as tasks of a Ray cluster.

    A group whose worker dies resumes from its newest checkpoint. A group with an error or repeated deaths is skipped,
    and `UnfinishedRunsError` lists its runs at the end.
    """

    is_concurrent = True

    def __init__(self, device: str = "cpu", stop: Stop = lambda: False, threads: int | None = None) -> None:
        super().__init__(device)
        self.stop = stop
        self.threads = threads or torch.get_num_threads()
        # one CPU for a group on a GPU: a node has several GPUs
        on_gpu = device == "cuda"
        self.options = {"num_cpus": 1 if on_gpu else self.threads, "num_gpus": int(on_gpu), "max_retries": 0}
        self._hardware: dict[str, Any] = {}

    def load_data(self, arms: Mapping[str, Arm], components: Mapping[str, Components]) -> dict[str, LoadedData]:
        """Check the workers, then load the data."""
        self._hardware = self._probe()
        return super().load_data(arms, components)

    def hardware(self) -> dict[str, Any]:
        """Return the hardware of a worker."""
        return self._hardware

    def train(
        self, plan: Plan, groups: Sequence[GroupPlan], callback: Callback, stop: Stop
    ) -> Iterator[tuple[GroupPlan | None, float]]:
        """Train run groups concurrently, in any order."""
        _pickle_by_value(plan.components.values())
        stored = {id(data): ray.put(data) for data in {id(data): data for data in plan.data.values()}.values()}
        task, mailbox, without_data = ray.remote(train), start_mailbox(), replace(plan, data={})

        def submit(group: GroupPlan, attempt: int) -> Any:
            checkpoints = plan.store.checkpoints(group, config_digest(plan.arms[group.arm]))
            if checkpoints.remove_foreign():
                callback.on_group_restart(group)
            files, link = read_checkpoint(checkpoints.directory), DriverLink(mailbox, group.id, attempt)
            data = stored[id(plan.data[group.arm])]
            named = task.options(name=f"torchace {group.id}", **self.options)
            return named.remote(without_data, group, data, files, link, self.threads)

        return _Dispatch(plan.store, deque(groups), submit, mailbox, callback, stop).run()

    def _probe(self) -> dict[str, Any]:
        """Return the hardware of a worker; raise if no worker can train a group."""
        cpus = self.options["num_cpus"]
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        largest = max((node["Resources"].get("CPU", 0) for node in nodes), default=0)
        if 0 < largest < cpus:  # 0: workers may join later
            raise ValueError(
                f"Expected a node with {cpus} CPUs, one for each thread of this process, but the largest node has "
                f"{largest:g}. Set OMP_NUM_THREADS={largest:.0f} or less; results depend on the number of threads."
            )
        task = ray.remote(probe).options(**{**self.options, "name": "torchace probe", "max_retries": 3})
        reference = task.remote(self.device, self.threads)
        while not ray.wait([reference], timeout=POLL_SECONDS)[0]:
            if self.stop():
                ray.cancel(reference, force=True)
                raise Interrupted
        try:
            version, hardware = ray.get(reference)
        except RayError as error:
            raise ValueError(
                f"A worker of the Ray cluster cannot train on {self.device} ({last_line(error)}). Install the same "
                "torchace on every node, with the extras tool and ray and a torch that sees its GPUs."
            ) from error
        if version != versions()["torchace"]:
            raise ValueError(
                f"Expected torchace {versions()['torchace']} on the Ray workers, but got {version}. "
                "Install the same version."
            )
        return dict(hardware)


def _pickle_by_value(components: Iterable[Components]) -> None:
    """Send the user's modules in the current directory with the functions: workers need not be able to import them."""
    roots = {name.partition(".")[0] for each in components for name in each.modules()} - {
        "torchace",
        *sys.stdlib_module_names,
    }
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in roots and name != "__main__" and file and "site-packages" not in file:
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


@dataclass
class _Dispatch:
    """Submits run groups, stores their results and restarts those whose worker died."""

    store: RunStore
    waiting: deque[GroupPlan]
    submit: Callable[[GroupPlan, int], Any]
    mailbox: Any
    callback: Callback
    stop: Stop
    running: dict[Any, tuple[GroupPlan, int]] = field(default_factory=dict)  # group and attempt by task
    attempts: Counter[str] = field(default_factory=Counter)  # by group
    deaths: Counter[str] = field(default_factory=Counter)
    started: set[str] = field(default_factory=set)
    given_up: dict[RunKey, str] = field(default_factory=dict)
    stopped_at: float | None = None

    def run(self) -> Iterator[tuple[GroupPlan | None, float]]:
        """Yield each finished group with the seconds since the previous one; last, None with the remaining seconds."""
        left, last = len(self.waiting), time.monotonic()
        while self.waiting or self.running:
            if self.stopped_at is None and self.stop():
                self._stop()
            if self.stopped_at is not None and time.monotonic() - self.stopped_at > STOP_SECONDS:
                break
            while self.waiting and len(self.running) < MAX_TASKS:
                group = self.waiting.popleft()
                self.attempts[group.id] += 1
                attempt = self.attempts[group.id]
                self.running[self.submit(group, attempt)] = group, attempt
            ready, _ = ray.wait(list(self.running), timeout=POLL_SECONDS)
            self._fetch_mail()  # first: a dead worker may have sent a checkpoint
            for reference in ready:
                group, _ = self.running.pop(reference)
                if self._finish(group, reference):
                    left -= 1
                    before, last = last, time.monotonic()
                    yield group, last - before
        yield None, time.monotonic() - last
        if self.stopped_at is not None and left:
            raise Interrupted
        if self.given_up:
            raise UnfinishedRunsError(self.given_up)

    def _stop(self) -> None:
        """Let running groups end with a checkpoint and cancel the others."""
        self.stopped_at = time.monotonic()
        self.waiting.clear()
        for reference, (group, _) in self.running.items():
            if group.id not in self.started:
                ray.cancel(reference, force=True)  # without force, an import may be interrupted in a reused worker

    def _fetch_mail(self) -> None:
        current = {(group.id, attempt): group for group, attempt in self.running.values()}  # no earlier attempts
        checkpoint: Any = ()
        while checkpoint is not None:
            try:
                epochs, progress, checkpoint = ray.get(
                    self.mailbox.fetch.remote(self.stopped_at is not None), timeout=10
                )
            except RayError:  # the actor died and is being restarted
                return
            for event, messages in (("on_group_epoch_end", epochs), ("on_group_step", progress)):
                for name, attempt, content in messages:
                    if (group := current.get((name, attempt))) is not None:
                        self._mark_started(group)
                        if content is not None:
                            getattr(self.callback, event)(group, Progress(*content))
            if checkpoint is not None and (group := current.get(checkpoint[:2])) is not None:
                write_checkpoint(self.store.checkpoints(group).directory, checkpoint[2])
                self.deaths[group.id] = 0

    def _mark_started(self, group: GroupPlan) -> None:
        if group.id not in self.started:
            self.started.add(group.id)
            self.callback.on_group_start(group)

    def _finish(self, group: GroupPlan, reference: Any) -> bool:
        """Store the results of a task; return whether its group is finished."""
        try:
            results: Results | None = ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # lost the mailbox or the data
                self._restart(group, type(error.cause).__name__)
            else:
                self._give_up(group, _describe(error.cause))
            return False
        except RayError as error:
            self._restart(group, type(error).__name__)
            return False
        if results is None:  # stopped with a checkpoint
            return False
        self._mark_started(group)
        for run, written in zip(group.runs, results, strict=True):
            if not self.store.is_finished(run):
                self.store.write_result(*written)
        self.store.checkpoints(group).remove()
        return True

    def _restart(self, group: GroupPlan, reason: str) -> None:
        if self.stopped_at is not None:
            return
        self.deaths[group.id] += 1
        if self.deaths[group.id] == MAX_DEATHS:
            self._give_up(group, f"its worker died {MAX_DEATHS} times in a row without a new checkpoint ({reason})")
        else:
            self.callback.on_worker_lost(group, reason)
            self.waiting.append(group)

    def _give_up(self, group: GroupPlan, reason: str) -> None:
        self.given_up |= {run: reason for run in group.runs if not self.store.is_finished(run)}


def _describe(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def start_mailbox() -> Any:
    """Start an actor on the driver's node that holds each group's newest progress and checkpoint."""

    # local, so that it is pickled by value: its process does not import torch
    class Mailbox:
        def __init__(self) -> None:
            self.epochs: list[tuple[str, int, Any]] = []
            self.progress: dict[str, tuple[str, int, Any]] = {}
            self.checkpoints: dict[str, tuple[str, int, Any]] = {}
            self.stopping = False

        def put_progress(self, group: str, attempt: int, progress: Any) -> bool:
            self.progress[group] = group, attempt, progress
            return self.stopping

        def put_epoch(self, group: str, attempt: int, progress: Any) -> bool:
            self.epochs.append((group, attempt, progress))
            return self.stopping

        def put_checkpoint(self, group: str, attempt: int, files: Any) -> bool:
            self.checkpoints[group] = group, attempt, files
            return self.stopping

        def fetch(self, stopping: bool) -> tuple[list[Any], list[Any], Any]:
            # one checkpoint at a time: several may exceed the size of a message
            self.stopping = stopping
            epochs, self.epochs = self.epochs, []
            progress, self.progress = list(self.progress.values()), {}
            return epochs, progress, self.checkpoints.pop(next(iter(self.checkpoints))) if self.checkpoints else None

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(Mailbox).options(**options).remote()
