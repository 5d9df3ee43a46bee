"""Layout and communication of the ranks that train together.

Ranks form a mesh of members x data: a row has the same members and different samples, a column the same samples and
different members. Steps use gloo or NCCL; decisions that depend on clocks, signals or files use gloo.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchace.lab.data.splits import Inputs, input_tensors, map_inputs
from torchace.nn.base import split_range

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT = 600.0  # seconds without an answer until a rank is lost; overridden by `TORCHACE_TIMEOUT`
REPORT_EVERY = 0.1  # seconds
SYNC_EVERY = 0.25  # seconds, roughly
MAX_SYNC_STEPS = 1000

State = dict[str, Tensor]


class RankLostError(ConnectionError):
    """Another rank died or does not respond."""

    happened = False  # in this process


@contextmanager
def detect_lost_rank() -> Iterator[None]:
    """Raise a broken connection as `RankLostError`; also a decorator."""
    try:
        yield
    except RuntimeError as error:  # gloo has no exception type
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
            raise
        RankLostError.happened = True
        rank = os.environ.get("RANK") or (dist.get_rank() if dist.is_initialized() else 0)
        raise RankLostError(
            f"Rank {rank} lost contact with the others: one of them ended or does not respond. "
            "Checkpoints and finished runs are kept; repeat the command to resume."
        ) from error


class Ranks:
    """This process among `members` x `data` ranks; without a layout (see `parse_layout`), the only one.

    The first rank (`is_first`) writes files and prints. The mesh uses NCCL on a GPU, else gloo, or `backend`.
    """

    def __init__(self, layout: str | None = None, *, device: str = "cpu", backend: str | None = None) -> None:
        self.rank, self.size = (0, 1) if layout is None else (dist.get_rank(), dist.get_world_size())
        self.is_first = self.rank == 0
        self.members, self.data = parse_layout(layout or "data", self.size)
        self.member_index, self.data_index = divmod(self.rank, self.data)
        self.members_group: Any = None
        self.data_group: Any = None
        if layout is None:
            return
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        backend = backend or ("nccl" if on_gpu else "gloo")
        places = torch.arange(self.size).view(self.members, self.data)
        self.members_group, self.data_group = (
            dist.new_subgroups_by_enumeration(lists, timeout=_timeout(), backend=backend)[0]
            for lists in (places.T.tolist(), places.tolist())
        )

    def local_members(self, num_members: int) -> slice:
        """Members of this rank."""
        share = split_range(num_members, self.members, self.member_index)
        return slice(share.start, share.stop)

    def shard_samples(self, axis: int, *inputs: Inputs | None) -> tuple[Any, ...]:
        """Samples of this rank, from inputs of whole batches with samples at `axis`."""
        if self.data == 1:
            return inputs
        share = split_range(input_tensors(inputs[0])[0].shape[axis], self.data, self.data_index)
        return tuple(
            None if x is None else map_inputs(lambda t: t.narrow(axis, share.start, len(share)), x) for x in inputs
        )

    def data_parallel(self, network: nn.Module) -> nn.Module:
        """Network with gradients averaged over the ranks with the same members."""
        if self.data == 1:
            return network
        return nn.parallel.DistributedDataParallel(network, process_group=self.data_group)

    def sum_over_members(self, values: Tensor) -> Tensor:
        """Sum over the ranks with the other members."""
        if self.members > 1:
            values = values.contiguous()
            dist.all_reduce(values, group=self.members_group)
        return values

    @detect_lost_rank()
    def gather_logits(self, logits: Tensor, num_members: int, num_samples: int) -> Tensor:
        """Logits of all members on all samples, `(R, K, N, C)`, on every rank."""
        logits = self.gather_members(logits, num_members)
        if logits.shape[2] == num_samples:  # too few samples to split
            return logits
        return _gather_axis(logits, 2, num_samples, self.data, self.data_group)

    def gather_members(self, values: Tensor, num_members: int) -> Tensor:
        """Values `(R, K, ...)` of all members, on every rank."""
        return _gather_axis(values, 1, num_members, self.members, self.members_group)

    @detect_lost_rank()
    def broadcast(self, content: Any = None) -> Any:
        """Object of the first rank, on all ranks."""
        contents = [content]
        if self.size > 1:
            dist.broadcast_object_list(contents, 0)
        return contents[0]


class Timer:
    """Actions due at a step; updated before every step.

    Several ranks synchronize every few steps: the first rank's clock decides; a stop signal to any rank stops all.
    """

    def __init__(self, stop: Callable[[], bool], save_every: float | None, num_ranks: int) -> None:
        self._stop, self._save_every, self._num_ranks = stop, save_every, num_ranks
        self._saved, self._reported, self._synced = time.monotonic(), 0.0, 0.0
        self._interval = self._remaining = 0  # steps between two synchronizations, and until the next
        self.should_stop = self.should_save = self.should_report = False  # stop before, others after the step

    def update(self) -> None:
        """Read the clock and the stop signal."""
        self._remaining -= 1
        if self._remaining > 0:
            self.should_stop = self.should_save = self.should_report = False
            return
        now = time.monotonic()
        self.should_stop = self._stop()
        self.should_save = self._save_every is not None and now - self._saved >= self._save_every
        self.should_report = now - self._reported >= REPORT_EVERY
        if self._num_ranks > 1:
            self._synchronize(now)
        if self.should_report:
            self._reported = now

    def _synchronize(self, now: float) -> None:
        interval = 1
        if self._interval:
            steps = round(SYNC_EVERY * self._interval / max(now - self._synced, 1e-6))
            interval = min(max(steps, 1), 2 * self._interval, MAX_SYNC_STEPS)  # first steps may be slow
        local = (self.should_stop, self.should_save, self.should_report, interval)
        flags = all_gather([float(value) for value in local])
        self.should_stop = bool(flags[:, 0].any())
        self.should_save, self.should_report = bool(flags[0, 1]), bool(flags[0, 2])
        self._interval = self._remaining = int(flags[0, 3])
        self._synced = now

    def mark_saved(self) -> None:
        """Restart the interval of saving."""
        self._saved = time.monotonic()


def parse_layout(text: str, num_ranks: int) -> tuple[int, int]:
    """Ranks for members and for data from `"data"`, `"members"` or `"MxD"` (members over M, the batch over D)."""
    if text in ("data", "members"):
        return (1, num_ranks) if text == "data" else (num_ranks, 1)
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise ValueError(
            f"Expected data, members or MxD (members over M ranks, the batch over D) for --parallel, but got {text!r}."
        )
    members, data = int(match[1]), int(match[2])
    if members * data != num_ranks:
        raise ValueError(f"Expected {members * data} processes for --parallel {text}, but got {num_ranks}.")
    return members, data


_connections = itertools.count()


def is_launched() -> bool:
    """Whether torchrun, or a launcher with the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@detect_lost_rank()
def connect() -> Store:
    """Join the processes that torchrun started; return their store."""
    from torch.distributed.rendezvous import rendezvous  # missing in some builds

    store, rank, size = next(rendezvous("env://", timeout=_timeout()))
    # after a restart, torchrun's store has old addresses
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"torchace, attempt {attempt}, connection {next(_connections)}"  # a script may run several sweeps
    store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_timeout())
    return store


@detect_lost_rank()
def all_gather(values: list[float]) -> Tensor:
    """Values of every rank, `(ranks, values)`."""
    local = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered)


def check_same(arguments: Mapping[str, str]) -> None:
    """Raise an error on all ranks if their arguments differ."""
    digests = [int(hashlib.sha256(value.encode()).hexdigest()[:12], 16) for value in arguments.values()]
    gathered = all_gather([float(value) for value in digests])  # 48 bits are exact in float64
    for column, name in enumerate(arguments):
        other = (gathered[:, column] != gathered[0, column]).nonzero().flatten().tolist()
        if other:
            raise ValueError(
                f"Expected the same {name} on every rank, but rank {other[0]} differs from rank 0. "
                "Start all ranks with one command."
            )


def should_report(store: Store) -> bool:
    """Whether this rank prints its error: the first one does, others have the same or lost contact because of it."""
    try:
        return store.add("torchace reported", 1) == 1
    except RuntimeError:  # the store is gone
        return True


def _gather_axis(part: Tensor, axis: int, count: int, num_parts: int, group: Any) -> Tensor:
    """Concatenate shards along an axis, whose sizes differ by at most one, on every rank of a group."""
    if num_parts == 1:
        return part
    sizes = [len(split_range(count, num_parts, index)) for index in range(num_parts)]
    shape = list(part.shape)
    shape[axis] = sizes[0]
    # gloo gathers on the CPU only
    padded = torch.zeros(shape, dtype=part.dtype, device="cpu" if dist.get_backend(group) == "gloo" else part.device)
    padded.narrow(axis, 0, part.shape[axis]).copy_(part)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([one.narrow(axis, 0, size) for one, size in zip(parts, sizes, strict=True)], axis).to(part.device)


def _timeout() -> timedelta:
    return timedelta(seconds=float(os.environ.get("TORCHACE_TIMEOUT", TIMEOUT)))
