"""An executor on Ray: each run group is a task, and only the driver writes the run directory.

Data travel through Ray's object store, progress and checkpoints through a queue, results as return values: the cluster
needs no shared file system and no data sets.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._extras import missing_extra
from torchace._files import write_atomic
from torchace.lab.schema.results import GroupPlan, RunKey, RunResult
from torchace.lab.store import RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import Components, ConfigError, hardware
from torchace.lab.sweeps.executor import Executor, Plan, Stop, UnfinishedRunsError, config_digest, train_group
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.training.checkpoint import MANIFEST, CheckpointError, Checkpoints
from torchace.lab.training.loop import Interrupted, Progress

# Read when Ray is imported: no worker logs in the terminal, no usage statistics.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray._private import ray_constants
    from ray.exceptions import RayError, RayTaskError
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise missing_extra("Sweeps on Ray need ray", "ray") from error

MAX_DEATHS = 5  # of the workers of a group
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.1
PROGRESS_SECONDS = 0.5  # between two messages of a group

Files = dict[str, bytes]  # a checkpoint's files by name
Results = list[tuple[RunResult, Mapping[str, Tensor], Mapping[str, Tensor] | None]]


@contextmanager
def connect_ray(address: str, device: str) -> Iterator[RayExecutor]:
    """Connect to a Ray cluster and yield its executor.

    `local` starts Ray on this machine, `auto` finds a running one, `HOST:PORT` is a cluster that this machine belongs
    to, `ray://HOST:PORT` any other.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address not in ("auto", "local"):
        _check_reachable(address)
    ray_constants.ENABLE_RAY_CLUSTER = address != "local"  # a local one listens on 127.0.0.1 alone
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    try:
        ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False, **options)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot join a Ray cluster with --ray {address} ({_last_line(error)}). From a machine outside the cluster "
            "use ray://HOST:10001; if it asks for a token, set RAY_AUTH_MODE=token; without a cluster use --ray local."
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield RayExecutor(device)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address that is invalid or does not respond; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"Expected --ray auto, local, HOST:PORT or ray://HOST:PORT, but got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"Cannot reach a Ray cluster at {address}: {error.strerror or error}. Start one with `ray start --head` "
            "(it listens at 6379, for ray:// at 10001), or use --ray local."
        ) from error


class RayExecutor(Executor):
    """Train run groups as tasks of a Ray cluster.

    A group whose worker dies resumes from its newest checkpoint. A group with an error or repeated deaths is skipped,
    and `UnfinishedRunsError` lists its runs at the end.
    """

    def __init__(self, device: str = "cpu", threads: int | None = None) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"Expected --device auto, cpu or cuda with --ray, but got {device!r}. Ray chooses the GPU."
            )
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
        if device == "cuda" and not has_gpus:
            raise ValueError("Expected a Ray cluster with GPUs for --device cuda, but it has none. Use --device cpu.")
        on_gpu = has_gpus and device != "cpu"
        super().__init__("cuda" if on_gpu else "cpu")
        self.threads = threads or torch.get_num_threads()
        # one CPU for a group on a GPU: a node has several GPUs
        self.options = {"num_cpus": 1 if on_gpu else self.threads, "num_gpus": int(on_gpu), "max_retries": 0}
        largest = max(node["Resources"].get("CPU", 0) for node in ray.nodes())  # type: ignore[no-untyped-call]
        if 0 < largest < self.options["num_cpus"]:  # 0: workers may join later
            raise ValueError(
                f"Expected a node with {self.threads} CPUs, one for each thread of this process, but the largest node "
                f"has {largest:g}. Set OMP_NUM_THREADS={largest:.0f} or less; results depend on the number of threads."
            )

    def hardware(self) -> dict[str, Any]:
        """Return the hardware of a worker."""
        try:
            found = ray.get(ray.remote(hardware).options(**self.options).remote(self.device))
        except RayError as error:
            raise ValueError(
                f"A worker of the Ray cluster cannot train on {self.device} ({_last_line(error)}). Install the same "
                "torchace on every node, with the extras tool and ray and a torch that sees its GPUs."
            ) from error
        return {**found, "threads": self.threads}

    def train(self, plan: Plan, groups: Sequence[GroupPlan], callback: Callback, stop: Stop) -> Iterator[GroupPlan]:
        """Train run groups concurrently, in any order."""
        _pickle_by_value(plan.components.values())
        data = {id(each): ray.put(each) for each in plan.data.values()}
        shared_plan, task = ray.put(replace(plan, data={})), ray.remote(train)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        by_name, started = {group.id: group for group in groups}, set[str]()

        def submit(group: GroupPlan) -> Any:
            checkpoints = plan.store.checkpoints(group, config_digest(plan.arms[group.arm]))
            if checkpoints.remove_foreign():
                callback.on_group_restart(group)
            arguments = data[id(plan.data[group.arm])], read_checkpoint(checkpoints.directory), Sender(queue)
            named = task.options(name=f"torchace {group.id}", **self.options)
            return named.remote(shared_plan, group, *arguments, self.threads)

        def receive(event: str, name: str, content: Any) -> None:
            group = by_name[name]
            if name not in started:
                started.add(name)
                callback.on_group_start(group)
            if event == "checkpoint":
                write_checkpoint(plan.store.checkpoints(group).directory, content)
            elif event != "start":
                getattr(callback, event)(group, Progress(*content))

        tasks, deaths, unfinished = {submit(group): group for group in groups}, Counter[str](), dict[RunKey, str]()
        while tasks:
            if stop():
                raise Interrupted
            ready, _ = ray.wait(list(tasks), timeout=POLL_SECONDS)
            for _ in range(queue.qsize()):  # first: a dead worker may have sent a checkpoint
                receive(*queue.get())
            for reference in ready:
                group = tasks.pop(reference)
                try:
                    results: Results = ray.get(reference)
                except RayTaskError as error:
                    unfinished |= dict.fromkeys(group.runs, _describe(error.cause))
                except RayError as error:
                    reason = type(error).__name__
                    deaths[group.id] += 1
                    if deaths[group.id] < MAX_DEATHS:
                        callback.on_worker_lost(group, reason)
                        tasks[submit(group)] = group
                    else:
                        unfinished |= dict.fromkeys(group.runs, f"its worker died {MAX_DEATHS} times ({reason})")
                else:
                    for run, written in zip(group.runs, results, strict=True):
                        if not plan.store.is_finished(run):
                            plan.store.write_result(*written)
                    plan.store.checkpoints(group).remove()
                    yield group
        if unfinished:
            raise UnfinishedRunsError({run: why for run, why in unfinished.items() if not plan.store.is_finished(run)})


def _pickle_by_value(components: Iterable[Components]) -> None:
    """Send the user's modules in the current directory with the functions: workers need not be able to import them."""
    roots = {name.partition(".")[0] for each in components for name in each.modules()}
    roots -= {"torchace", "__main__", *sys.stdlib_module_names}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in roots and file and "site-packages" not in file:
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _last_line(error: Exception) -> str:
    """Return the last line of a Ray error, after its traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")


def _describe(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


# -- on a worker -------------------------------------------------------------------------------------------------------


class Sender(Callback):
    """Send the start, progress and checkpoints of a run group to the driver."""

    def __init__(self, queue: Queue) -> None:
        self.queue: Any = queue.actor
        self._sent = 0.0
        self._last: Any = None  # message

    def send(self, event: str, group: GroupPlan, content: Any = None) -> None:
        """Send a message and go on: Ray lends the CPU of a task that waits to another one.

        The content is plain, so that the queue's process does not import torch.
        """
        self._last = self.queue.put_nowait.remote((event, group.id, content))

    def flush(self) -> None:
        """Wait until all messages have arrived."""
        ray.get(self._last)

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        """Send progress now and then."""
        if time.monotonic() - self._sent >= PROGRESS_SECONDS:
            self._sent = time.monotonic()
            self.send("on_group_step", group, astuple(progress))

    def on_group_epoch_end(self, group: GroupPlan, progress: Progress) -> None:
        """Send the results of an epoch."""
        self.send("on_group_epoch_end", group, astuple(progress))


def train(plan: Plan, group: GroupPlan, data: LoadedData, files: Files, sender: Sender, threads: int) -> Results:
    """Train a run group from the files of a checkpoint and return its results."""
    torch.set_num_threads(threads)  # results depend on it
    sender.send("start", group)
    with tempfile.TemporaryDirectory(prefix="torchace-") as folder:
        store = _WorkerStore(Path(folder), sender)
        write_checkpoint(store.checkpoints(group).directory, files)
        try:
            train_group(replace(plan, data={group.arm: data}, store=store), group, sender, lambda: False)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(folder, str(plan.store.directory))) from None
        sender.flush()
        return store.results


class _WorkerStore(RunStore):
    """Keeps results in memory and sends checkpoints to the driver."""

    def __init__(self, directory: Path, sender: Sender) -> None:
        super().__init__(directory)
        self.sender = sender
        self.results: Results = []

    def checkpoints(self, group: GroupPlan, config_sha256: str | None = None) -> Checkpoints:
        local = super().checkpoints(group, config_sha256)
        return _SentCheckpoints(local.directory, group, self.sender, owner=local.owner)

    def write_result(
        self, result: RunResult, arrays: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.results.append((result, {name: value.cpu() for name, value in arrays.items()}, weights))


@dataclass(frozen=True)
class _SentCheckpoints(Checkpoints):
    group: GroupPlan
    sender: Sender

    def save(self, *arguments: Any, **options: Any) -> None:
        super().save(*arguments, **options)
        self.sender.send("checkpoint", self.group, read_checkpoint(self.directory))


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
