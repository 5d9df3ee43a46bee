"""Several processes that train together: how they are laid out, and what they tell each other.

The ranks are a mesh of members x data: those of one row have the same members and a part of the batch each, those of
one column the same part of the batch and some of the members each. What a step needs goes over the mesh (gloo, or NCCL
on GPUs); what depends on a clock, a signal or a file is decided by all together or by the first rank, over gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace.lab.training.timer import Timer
from torchace.nn.parallel import broadcast_bytes, split_range

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT = 600.0  # seconds until a rank that is alive but does not answer is given up; `TORCHACE_TIMEOUT` in its place
SYNC_EVERY = 0.25  # seconds between two agreements about signals and clocks, roughly
MOST_STEPS = 1000  # between two agreements


class RankLost(ConnectionError):
    """Another rank died, or does not answer: one sentence that says what to do."""

    happened = False  # to this process


def is_launched() -> bool:
    """Whether torchrun, or something that sets what it sets, started this process as one of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def connect() -> Store:
    """Meets the other processes that torchrun started; returns what all of them can write to."""
    from torch.distributed.rendezvous import rendezvous  # not in builds without torch.distributed

    with detect_lost_rank():
        store, rank, size = next(rendezvous("env://", timeout=_timeout()))
        # after a restart, torchrun's store still has the addresses of ranks that are gone
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"torchace, attempt {attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_timeout())
    return store


def parse_layout(text: str, num_ranks: int) -> tuple[int, int]:
    """Over how many ranks the members and the batch are spread.

    Args:
        text: `"data"`, `"members"`, or `"MxD"`: the members over M ranks, the batch over D.
        num_ranks: How many there are.

    Example:
        >>> parse_layout("data", 4), parse_layout("members", 4), parse_layout("2x2", 4)
        ((1, 4), (4, 1), (2, 2))
    """
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


class Ranks:
    """This process among those that train together.

    Args:
        layout: See `parse_layout`.
        device: Where this rank computes, such as `"cpu"` or `"cuda:3"`.
        backend: Of the mesh; NCCL on a GPU of its own, else gloo, unless given.
    """

    def __init__(self, layout: str = "data", *, device: str = "cpu", backend: str | None = None) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.members, self.data = parse_layout(layout, self.size)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        places = torch.arange(self.size).view(self.members, self.data)
        if backend is None:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
        groups = [
            dist.new_subgroups_by_enumeration(lists, timeout=_timeout(), backend=backend)[0]
            for lists in (places.T.tolist(), places.tolist())
        ]
        self.members_group, self.data_group = groups
        self.mesh = DeviceMesh.from_group(groups, self.device.type, mesh=places, mesh_dim_names=("members", "data"))
        self.member_index, self.data_index = divmod(self.rank, self.data)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def local_members(self, num_members: int) -> range:
        """Which of the members are here."""
        return split_range(num_members, self.members, self.member_index)

    def local_samples(self, size: int) -> slice:
        """Which samples of a batch are here."""
        share = split_range(size, self.data, self.data_index)
        return slice(share.start, share.stop)

    # -- in a step ----------------------------------------------------------------------------------------------------

    def sum_over_members(self, values: Tensor) -> Tensor:
        """The sum over the ranks that have the other members: the one thing that they exchange."""
        values = values.contiguous()
        if self.members > 1:
            with detect_lost_rank():
                dist.all_reduce(values, group=self.members_group)
        return values

    def gather_logits(self, logits: Tensor, num_members: int, size: int) -> Tensor:
        """Logits of all members on all samples, `(R, K, N, C)`, on every rank, from those that each has."""
        logits = _joined(logits, 1, num_members, self.members, self.members_group)
        if logits.shape[2] == size:  # on every rank: too few samples to share
            return logits
        return _joined(logits, 2, size, self.data, self.data_group)

    # -- beside the steps ---------------------------------------------------------------------------------------------

    def all_gather(self, values: list[float]) -> Tensor:
        """What every rank said, `(ranks, values)`."""
        return _all_gather(values)

    def broadcast(self, content: Any = None) -> Any:
        """What the first rank gave, as JSON holds it, on all ranks."""
        data = json.dumps(content).encode() if self.is_first else None
        with detect_lost_rank():
            return json.loads(broadcast_bytes(data, 0, dist.group.WORLD))  # type: ignore[arg-type]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Tensors that the first rank gave, on the CPU of all ranks."""
        with detect_lost_rank():
            return load_safetensors(broadcast_bytes(_packed(tensors), 0, dist.group.WORLD))  # type: ignore[arg-type]

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]] | None:
        """On the first rank, what each rank of its column gave; None on the others. All ranks must ask."""
        if self.data_index != 0:
            return None
        with detect_lost_rank():
            if not self.is_first:
                data = _packed(tensors)
                assert data is not None
                dist.send(torch.tensor(len(data)), 0)
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
                return None
            found = [{name: value.detach().cpu() for name, value in tensors.items()}]
            for m in range(1, self.members):
                size = torch.tensor(0)
                dist.recv(size, m * self.data)
                received = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(received, m * self.data)
                found.append(load_safetensors(received.numpy().tobytes()))
        return found


def check_same(what: Mapping[str, str]) -> None:
    """Refuse ranks that were not given the same; all of them refuse alike."""
    digests = [int(hashlib.sha256(value.encode()).hexdigest()[:12], 16) for value in what.values()]
    told = _all_gather([float(value) for value in digests])  # 48 bits are exact in float64
    for column, key in enumerate(what):
        other = (told[:, column] != told[0, column]).nonzero().flatten().tolist()
        if other:
            raise ValueError(
                f"Expected the same {key} on every rank, but rank {other[0]} has another than rank 0. "
                "Start all of them with one command."
            )


def should_report(store: Store, error: Exception) -> bool:
    """Whether this rank is to say what is wrong: a sentence that several have to say is said once.

    A rank that lost contact with one that said why it ended has nothing to add.
    """
    sentence = "" if isinstance(error, RankLost) else f"{type(error).__name__}: {error}"
    key = hashlib.sha256(sentence.encode()).hexdigest()
    try:
        first_of_all = store.add("torchace said", 1) == 1
        first_of_these = store.add(f"torchace said {key}", 1) == 1
    except RuntimeError:  # the rank, or the machine, that kept the store is gone
        return True
    return first_of_all if isinstance(error, RankLost) else first_of_these


class SyncedTimer(Timer):
    """A clock that all ranks read alike: every few steps they tell each other what they were told.

    They must stop, save and report at one and the same step. The first rank's clock decides; a signal to any rank
    counts for all.
    """

    def __init__(self, stop: Callable[[], bool], save_every: float | None) -> None:
        super().__init__(stop, save_every)
        self._steps, self._until = 0, 1  # since the last meeting, until the next
        self._met = time.monotonic()

    def update(self) -> None:
        self._until -= 1
        if self._until > 0:
            self.should_stop = self.should_save = self.should_report = False
            return
        super().update()
        now = time.monotonic()
        wanted = 1.0
        if self._steps:
            steps = round(SYNC_EVERY * self._steps / max(now - self._met, 1e-6))
            wanted = float(min(max(steps, 1), 2 * self._steps, MOST_STEPS))  # first steps may take longer than others
        told = _all_gather([float(self.should_stop), float(self.should_save), float(self.should_report), wanted])
        self.should_stop = bool(told[:, 0].any())
        self.should_save, self.should_report = bool(told[0, 1]), bool(told[0, 2])
        self._steps = self._until = int(told[0, 3])
        self._met = now


@contextmanager
def detect_lost_rank() -> Iterator[None]:
    """Turns a broken connection into one sentence."""
    try:
        yield
    except RuntimeError as error:  # gloo has no type of its own
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
            raise
        RankLost.happened = True
        rank = os.environ.get("RANK") or (dist.get_rank() if dist.is_initialized() else 0)
        raise RankLost(
            f"Rank {rank} lost contact with the others: one of them ended or does not answer. "
            "What was saved is kept; repeat the command to go on from there."
        ) from error


def _all_gather(values: list[float]) -> Tensor:
    mine = torch.tensor(values, dtype=torch.float64)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with detect_lost_rank():
        dist.all_gather(told, mine)
    return torch.stack(told)


def _joined(part: Tensor, axis: int, count: int, parts: int, group: Any) -> Tensor:
    """Parts of one axis, of sizes that differ by one at most, as one tensor on every rank of a group."""
    if parts == 1:
        return part
    sizes = [len(split_range(count, parts, index)) for index in range(parts)]
    shape = list(part.shape)
    shape[axis] = sizes[0]
    # gloo gathers on the CPU alone
    padded = torch.zeros(shape, dtype=part.dtype, device="cpu" if dist.get_backend(group) == "gloo" else part.device)
    padded.narrow(axis, 0, part.shape[axis]).copy_(part)
    found = [torch.empty_like(padded) for _ in sizes]
    with detect_lost_rank():
        dist.all_gather(found, padded, group=group)
    return torch.cat([one.narrow(axis, 0, size) for one, size in zip(found, sizes, strict=True)], axis).to(part.device)


def _packed(tensors: Mapping[str, Tensor] | None) -> bytes | None:
    if tensors is None:
        return None
    # copies: safetensors refuses tensors that share memory
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    return save_safetensors(plain)


def _timeout() -> timedelta:
    return timedelta(seconds=float(os.environ.get("TORCHACE_TIMEOUT", TIMEOUT)))
