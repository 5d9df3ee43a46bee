"""Runs trained together as one network: inputs `(R, B, ...)`, logits `(R, K, B, C)`; their memory, where NaN occurs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from torchace._files import available_memory
from torchace.lab.data import hashed_key
from torchace.lab.data.splits import Inputs, as_arguments, input_tensors, map_inputs
from torchace.lab.training.distributed import Ranks
from torchace.nn import SMOC, AdaptedEnsemble, Ensemble, StackedEnsemble
from torchace.nn.base import EnsembleModule, average_shared_gradients, take_logits
from torchace.nn.stacked_state import all_shared_names, take_group
from torchace.nn.stacking import MemberRNG

CHUNK_BYTES = 1 << 25  # of the widest layer of all members on a chunk
CHUNK_ROWS = 8192


def check_memory(num_parameters: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Raise an error if weights and gradients of a network exceed the available memory."""
    needed, device = 2 * num_parameters * dtype.itemsize, torch.device(device)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"Expected networks that fit into {available / 2**30:.3g} GiB of available memory, but "
            f"{num_parameters:,} parameters take {needed / 2**30:.3g} GiB with their gradients. Use fewer members, "
            "smaller layers or fewer runs at once."
        )


def count_parameters(network: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def chunk_rows(network: nn.Module, num_members: int, *, itemsize: int = 8, max_rows: int = CHUNK_ROWS) -> int:
    """Number of samples in a chunk of bounded memory, for `num_members` networks computed at once.

    The widest layer counts: the last two axes of a weight are the sizes of a linear layer.
    """
    width = max((max(p.shape[-2:]) for p in network.parameters() if p.ndim > 1), default=1)
    return max(1, min(max_rows, CHUNK_BYTES // (itemsize * num_members * width)))


def collect_chunks(chunks: Iterable[Tensor], count: int, *functions: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply functions to chunks of logits `(K, n, C)`; results `(count, ...)` are written in place to save memory."""
    results: list[Tensor] = []
    done = 0
    for logits in chunks:
        rows = slice(done, done + logits.shape[1])
        for place, function in enumerate(functions):
            values = function(logits)  # (n, ...)
            if done == 0:
                results.append(values.new_empty(count, *values.shape[1:]))
            results[place][rows] = values
        done = rows.stop
    return results


class RunGroup(nn.Module):
    """R independent runs of K members each, from one ensemble per run.

    Members of an `Ensemble` (of one architecture) are one stack of R·K, trunks a stack of R, and SMOC's heads a stack
    of R with K members each. Weights that adapted members share are stacks of R. Other ensembles are a stack of R whole
    ensembles, in `members`. Random numbers in training are a function of (seed, step, layer, member): a run draws the
    same in any group.
    """

    def __init__(
        self,
        ensembles: Sequence[EnsembleModule],  # one per run, with the members of this rank
        *,
        ranks: Ranks | None = None,
        total_members: int | None = None,  # on all ranks
    ) -> None:
        super().__init__()
        first = ensembles[0]
        self.num_runs, self.num_members, self.link = len(ensembles), first.num_members, first.link
        self.ranks = Ranks() if ranks is None else ranks
        self.total_members = total_members or self.num_members
        self.local_members = self.ranks.local_members(self.total_members)
        self.heads = isinstance(first, SMOC)
        self.whole = not isinstance(first, (SMOC, Ensemble, StackedEnsemble))
        trunks: list[Any] = [None if self.whole else getattr(ensemble, "trunk", None) for ensemble in ensembles]
        self.trunk = None if trunks[0] is None else StackedEnsemble.from_trusted(trunks)
        self._branched = getattr(first, "branched", None)  # for `save_model`
        self._adapted = first.settings if isinstance(first, AdaptedEnsemble) else None
        if self._adapted is not None:
            networks = [cast(AdaptedEnsemble, ensemble).stacked for ensemble in ensembles]
            self.members = StackedEnsemble.from_groups(networks, self.num_members, self.link)
        else:
            members: list[Any] = list(ensembles)
            if not self.whole:
                members = [m for e in members for m in ([e.head] if self.heads else e)]
            self.members = StackedEnsemble.from_trusted(members, self.link)
        self._shared_names = {f"members.stacked.{name}" for name in all_shared_names(self.members.stacked)}
        self.seeds = torch.zeros(self.num_runs, dtype=torch.int64)
        self.step = torch.zeros((), dtype=torch.int64)

    def forward(self, x: Inputs, *, own: bool = False) -> Tensor:
        """Logits `(R, K, B, C)` of batches `(R, B, ...)`, or with `own`, `(R, K, B, ...)`."""
        lead = input_tensors(x)[0].shape[:3]
        if self.trunk is None:
            x = map_inputs(lambda t: t.flatten(0, 1), x) if own else x
            return self._split_runs(self._compute(self.members, *self._arguments(self.members, x)))
        x = map_inputs(lambda t: t.flatten(1, 2), x) if own else x
        features = self._compute(self.trunk, *self._arguments(self.trunk, x))
        features = average_shared_gradients(features, self.num_members)
        if not own:
            return self._from_features(features)
        features = features.unflatten(1, lead[1:])  # (R, K, B, ...)
        if self.heads:
            return self.members.compute([features], {"batches": "separate"}, own=True)
        return self._from_features(features.flatten(0, 1))

    def predict(self, x: Inputs) -> Tensor:
        """Logits `(R, K, B, C)` of all members for one input `(B, ...)`, the same on every rank."""
        num_samples = len(input_tensors(x)[0])
        if num_samples >= self.ranks.data:
            (x,) = self.ranks.shard_samples(0, x)
        if self.trunk is None:
            logits = self._split_runs(self.members(*self._arguments(self.members, x)))
        else:
            logits = self._from_features(self.trunk.compute(self._arguments(self.trunk, x), {}, own=False))
        return self.ranks.gather_logits(logits, self.total_members, num_samples)

    def _from_features(self, features: Any) -> Tensor:
        """Logits of all members from their trunks' features."""
        if self.heads:
            return self.members.compute([features], {}, own=True)
        return self._split_runs(self._compute(self.members, features))

    def _split_runs(self, output: Any) -> Tensor:
        """Logits `(R, K, B, C)` of the members' outputs; a regressor may return `(B,)`."""
        logits = take_logits(output, "A member")
        if not self.whole:
            logits = logits.unflatten(0, (self.num_runs, self.num_members))
        return logits.unsqueeze(-1) if logits.ndim == 3 else logits

    def _arguments(self, stack: StackedEnsemble, x: Inputs) -> list[Any]:
        """Inputs as positional arguments of a member, a trunk, or the network inside an ensemble."""
        return as_arguments(getattr(stack.stacked, "host", stack.stacked), x)

    def _compute(self, stack: StackedEnsemble, *args: Any) -> Any:
        rng = None
        if self.training:
            # the trunk draws as member -1
            shared = stack is self.trunk or self.whole
            first, count = (-1, 1) if shared else (self.local_members.start, self.num_members)
            rng = MemberRNG(self.seeds, torch.arange(first, first + count, device=self.seeds.device), self.step)
        return stack.compute(args, {}, own=True, rng=rng)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Like `nn.Module.to`; a memory format applies to each member's weights."""
        for stack in self.children():
            stack.to(*args, **kwargs)
        self._move_seeds()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move_seeds()
        return self

    def _move_seeds(self) -> None:
        device = next(self.parameters()).device
        self.seeds, self.step = self.seeds.to(device), self.step.to(device)

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """Set the seeds of random numbers in training; ranks with other samples draw other numbers."""
        if index := self.ranks.data_index:
            seeds = [hashed_key(seed, "rank", index) for seed in seeds]
        self.seeds.copy_(torch.tensor([hashed_key(seed, "network", 0) for seed in seeds]))

    def entries_per_run(self, name: str) -> int:
        """Number of entries of a tensor in `state_dict()` that belong to one run."""
        return 1 if self.is_shared(name) else self.num_members

    def is_shared(self, name: str) -> bool:
        """Whether a tensor of `state_dict()` has one entry for all members of a run."""
        return self.whole or self.heads or name.startswith("trunk.") or name in self._shared_names

    def ensemble(self, run: int) -> EnsembleModule:
        """Copy of one run's ensemble."""
        first = run * self.num_members
        if self._adapted is not None:
            return AdaptedEnsemble(take_group(self.members.stacked, run), **self._adapted)
        if self.whole:
            whole: Any = self.members[run]
            whole.training = self.training
            return whole
        if self.trunk is None:
            return self.members.take(slice(first, first + self.num_members))
        trunk = self.trunk[run]
        ensemble: EnsembleModule
        if self.heads:
            head: Any = self.members[run]
            ensemble = SMOC.from_parts(trunk, head, self.link)
        else:
            ensemble = Ensemble([self.members[first + k] for k in range(self.num_members)], trunk, self.link)
            if self._branched is not None:
                ensemble.branched = self._branched
        ensemble.training = self.training  # layers keep their modes
        return ensemble


def all_finite(values: Sequence[Tensor | None]) -> bool:
    """Whether CPU tensors are finite; False also for overflowing sums and for other devices."""
    tensors = [value for value in values if value is not None]
    return tensors[0].device.type == "cpu" and all(math.isfinite(norm) for norm in torch._foreach_norm(tensors))


@torch.no_grad()
def first_nonfinite(
    network: RunGroup,
    logits: Tensor,  # (R, K, B, C)
    losses: Tensor,  # (R, K)
) -> Tensor:
    """Code of the first nonfinite member of each run, `(R,)`, for `nonfinite_member`; -1 if all are finite.

    Coupled members spread a NaN within one step. Codes are smallest for logits, larger for losses, largest for
    gradients: the smallest code is the origin.
    """
    others = [torch.nn.functional.pad(sums, (0, 1)) for sums in (logits.sum((2, 3)).to(losses), losses)]
    own: list[Tensor] = []  # sums of gradients, (R, K) each
    shared: list[Tensor] = []  # (R, 1) each
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            entries = parameter.grad.reshape(parameter.shape[0], -1).sum(1).view(network.num_runs, -1)
            (shared if network.is_shared(name) else own).append(entries)
    gradients = [
        torch.stack(entries).sum(0).to(losses) if entries else losses.new_zeros(network.num_runs, width)
        for entries, width in ((own, network.num_members), (shared, 1))
    ]
    sums = torch.stack([*others, torch.cat(gradients, 1)])  # sums keep NaN and Inf
    bad = (sums - sums) != 0  # (3, R, K + 1); fewer kernels than isfinite
    seen, member = bad.any(2), bad.int().argmax(2)  # (3, R)
    total = network.total_members
    member = torch.where(member == network.num_members, total, member + network.local_members.start)
    codes = torch.full_like(member[0], -1)
    for source in (2, 1, 0):
        codes = torch.where(seen[source], member[source] + source * (total + 1), codes)
    return codes


def nonfinite_member(code: int, num_members: int) -> int | None:
    """Member of a code of `first_nonfinite`; None for shared parts."""
    member = code % (num_members + 1)
    return member if member < num_members else None
