"""An ensemble whose members are spread over processes, which tell each other nothing but what they predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import ensemble_log_probs, ensemble_probs
from torchace.nn.base import (
    EnsembleModule,
    as_list,
    check_shared_parameters,
    check_unchanged,
    stack_outputs,
    tensor_versions,
)
from torchace.nn.ensemble import Ensemble
from torchace.nn.recomputed import copy_module, recompute
from torchace.nn.stacked import StackedEnsemble

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Members = EnsembleModule | Iterable[nn.Module] | Callable[[int], nn.Module]


def split_range(count: int, parts: int, index: int) -> range:
    """Which of `count` things the part `index` of `parts` has; the first parts have one more where it does not divide.

    Example:
        >>> [list(split_range(5, 3, index)) for index in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    least, more = divmod(count, parts)
    start = index * least + min(index, more)
    return range(start, start + least + (index < more))


class MemberParallelEnsemble(EnsembleModule):
    r"""Members without a shared trunk, spread over the ranks of a process group.

    Every rank sees the same batch and computes its own members. By line 1 of the mathematics a member needs of all
    others $\bar q = \sum_j \alpha^j q^j$ alone, a tensor `(N, C)` without gradient: one all-reduce a step, however
    large the members are. Calling it gives the logits of this rank's members, and a step is

        logits = ensemble(x)  # (K of this rank, N, C)
        mixture, weights = ensemble.mixture(logits), ensemble.local_weights
        amended_cross_entropy(logits, y, 0.5, mixture=mixture, member_weights=weights).backward()

    The optimizer is each rank's own, over `ensemble.parameters()`. The loss is the sum over this rank's members.
    Predictions are the whole ensemble's, on every rank. `save_model` writes one model of all members.

    On a mesh of members x data every column of ranks has its own part of the batch: wrap the ensemble in
    `DistributedDataParallel(ensemble, process_group=mesh["data"].get_group())`, call that, and ask the ensemble itself
    for the mixture.

    Without `torch.distributed` this process is the only rank and has all members.

    Args:
        members: A function of the member's number that makes it, called for this rank's members alone; or all members,
            as a list or an ensemble, of which every rank keeps its own.
        num_members: K; needed for a function.
        group: The ranks that share the members; all of them unless given.
        mesh: Instead of `group`: a device mesh with a dimension `"members"`.
        link: `"softmax"`, `"sigmoid"` or `"identity"`; that of the ensemble given, else `"softmax"`.

    Example:
        >>> ensemble = MemberParallelEnsemble(lambda k: nn.Linear(4, 3), num_members=5)
        >>> ensemble.local_members, ensemble.num_members
        (range(0, 5), 5)
        >>> ensemble(torch.zeros(2, 4)).shape, ensemble.predict_proba(torch.zeros(2, 4)).shape
        (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        members: Members,
        num_members: int | None = None,
        *,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        link: str | None = None,
    ) -> None:
        if group is not None and mesh is not None:
            raise ValueError("Expected `group` or `mesh`, but got both.")
        if link is None:
            link = members.link if isinstance(members, EnsembleModule) else "softmax"
        given = _given(members, num_members)
        count = num_members if given is None else len(given)
        assert count is not None
        super().__init__(count, link)
        self._groups = _groups(group, mesh)  # the members' first
        self._rank, self._size = _place(self._groups)
        if self._size > count:
            raise ValueError(
                f"Expected at most one rank for each of {count} members, but got {self._size} ranks. "
                "Use fewer, or a mesh of members x data."
            )
        self.local_members = split_range(count, self._size, self._rank)
        self._others: Callable[[int], nn.Module]  # what the members of other ranks look like
        if given is None:
            assert callable(members)
            local, self._others = {k: members(k) for k in self.local_members}, members
        else:
            local = {k: given[k] for k in self.local_members}
            outlines = {k: _outline(given[k]) for k in range(count) if k not in local}
            self._others = outlines.__getitem__
        for k, member in local.items():
            if not isinstance(member, nn.Module):
                raise TypeError(f"Expected members to be modules, but member {k} is {type(member).__name__}.")
        check_shared_parameters(list(local.values()) if given is None else given)
        # by their numbers in the whole ensemble: parts of a state dict put together are that of an `Ensemble`
        self.members = nn.ModuleDict({str(k): member for k, member in local.items()})
        if isinstance(members, EnsembleModule):
            self.set_member_weights(members.member_weights)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The logits of this rank's members, `(K of this rank, N, C, ...)`, for what each member takes."""
        seen = [*args, *kwargs.values()]
        before = tensor_versions(seen)
        outputs = []
        for k, member in self.members.items():
            outputs.append(member(*args, **kwargs))
            check_unchanged(seen, before, int(k))
        return stack_outputs(outputs)

    @property
    def local_weights(self) -> Tensor:
        """α of this rank's members, for the loss."""
        return self._local(self.member_weights)

    @torch.no_grad()
    def mixture(self, logits: Tensor, *, member_weights: Tensor | None = None) -> Tensor:
        r"""What all members predict together, $\sum_j \alpha^j q^j$, `(N, C, ...)`: one all-reduce, no gradient.

        Args:
            logits: Those of this rank's members, as calling the ensemble gives them.
            member_weights: α of all members, `(K,)`; the ensemble's own unless given.
        """
        share, weights = self._share_and_weights(member_weights)
        mixture = share * ensemble_probs(logits, member_weights=weights, link=self.link)
        return self._reduced(mixture.contiguous(), "SUM")

    def predict_log_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The logarithm of the ensemble's probabilities: two all-reduces, the first of the largest: none underflows."""
        self._refuse_identity("predict_log_proba")
        share, weights = self._share_and_weights(member_weights)
        with self._evaluating():
            local = ensemble_log_probs(self(*args, **kwargs), member_weights=weights, link=self.link) + share.log()
            peak = self._reduced(local.clone(), "MAX")
            peak = torch.where(peak.isinf(), 0.0, peak)  # a class that nobody believes in
            return peak + self._reduced((local - peak).exp(), "SUM").log()

    def predict_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The ensemble's probabilities, `(N, C, ...)`: one all-reduce."""
        self._refuse_identity("predict_proba")
        return self._predicted(*args, member_weights=member_weights, **kwargs)

    def predict(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The ensemble's answer: class indices `(N, ...)`; 0 or 1 an output for sigmoid; the mean for regression."""
        predicted = self._predicted(*args, member_weights=member_weights, **kwargs)
        if self.link == "softmax":
            return predicted.argmax(1)
        return (predicted > 0.5).long() if self.link == "sigmoid" else predicted

    def gather(self, *, everywhere: bool = False) -> Ensemble | None:
        """All members as an `Ensemble` on the CPU, on the first rank; None on the others. All ranks must call it.

        Args:
            everywhere: On every rank.
        """
        keeps = everywhere or self._rank == 0
        found = []
        for k in range(self.num_members):
            owner = next(r for r in range(self._size) if k in split_range(self.num_members, self._size, r))
            data = _packed(self.members[str(k)], k) if k in self.local_members else None
            if self._size > 1:
                data = broadcast_bytes(data, owner, self._groups[0], self._like().device)
            assert data is not None
            if keeps:
                with torch.random.fork_rng(devices=[]):  # a function that makes members may draw, or seed
                    outline = self.members[str(k)] if k in self.local_members else self._others(k)
                found.append(_filled(outline, load_safetensors(data)))
        if not keeps:
            return None
        ensemble = Ensemble(found, link=self.link)
        ensemble.training = self.training
        if self.member_weights is not None:
            ensemble.member_weights = self.member_weights.cpu()
        return ensemble

    def on_first_rank(self, call: Callable[[Ensemble], None]) -> None:
        """Calls a function with all members on the first rank alone; the others wait, and fail if it failed."""
        whole = self.gather()
        problem: Exception | None = None
        if whole is not None and all(dist.get_rank(group) == 0 for group in self._groups):
            try:
                call(whole)
            except Exception as error:
                problem = error
        failed = torch.tensor(float(problem is not None), device=self._like().device)
        for group in self._groups:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group)
        if problem is not None:
            raise problem
        if failed:
            raise RuntimeError("The first rank failed; its own message says why.")

    def extra_repr(self) -> str:
        here = self.local_members
        return f"{super().extra_repr()}, local_members={here.start}..{here.stop - 1}"

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.members.values())

    def _predicted(self, *args: Any, member_weights: Tensor | None, **kwargs: Any) -> Tensor:
        with self._evaluating():
            return self.mixture(self(*args, **kwargs), member_weights=member_weights)

    def _local(self, member_weights: Tensor | None) -> Tensor:
        alpha = _checks.as_member_weights(member_weights, self.num_members, like=self._like())
        return alpha[self.local_members.start : self.local_members.stop]

    def _share_and_weights(self, member_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """What this rank's members weigh together, and what each weighs among them."""
        alpha = self._local(self.member_weights if member_weights is None else member_weights)
        share = alpha.sum()
        return share, torch.where(share > 0, alpha / share, 1 / len(alpha))

    def _like(self) -> Tensor:
        first = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(()))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        return torch.empty((), dtype=dtype, device=first.device)

    def _reduced(self, values: Tensor, operation: str) -> Tensor:
        if self._size > 1:
            dist.all_reduce(values, getattr(dist.ReduceOp, operation), self._groups[0])
        return values


def broadcast_bytes(data: bytes | None, owner: int, group: ProcessGroup, device: torch.device | str = "cpu") -> bytes:
    """What rank `owner` of a group gave, on all of its ranks; the others give None."""
    source = dist.get_global_rank(group, owner)
    size = torch.tensor(0 if data is None else len(data), device=device)
    dist.broadcast(size, source, group)
    if data is None:
        held = torch.empty(int(size), dtype=torch.uint8, device=device)
    else:
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    dist.broadcast(held, source, group)
    return held.cpu().numpy().tobytes() if data is None else data


def _given(members: Members, num_members: int | None) -> list[nn.Module] | None:
    """All members; None where a function makes them."""
    if isinstance(members, StackedEnsemble):
        members = members.unstack()
    elif isinstance(members, EnsembleModule):
        if not isinstance(members, Ensemble) or members.trunk is not None:
            raise TypeError(
                f"Expected members without a shared trunk, but got {type(members).__name__} with one. "
                "Split the batch over ranks instead: DistributedDataParallel(ensemble)."
            )
        members = list(members)
    if callable(members) and not isinstance(members, nn.Module):
        if num_members is None:
            raise ValueError("Expected `num_members` for members that a function makes, but got none.")
        _checks.check_count(num_members, "num_members")
        return None
    given = as_list(members)  # type: ignore[arg-type]  # a module is refused there
    if num_members is not None and num_members != len(given):
        raise ValueError(f"Expected `num_members` of {len(given)}, the members given, but got {num_members}.")
    return given


def _groups(group: ProcessGroup | None, mesh: DeviceMesh | None) -> list[ProcessGroup]:
    """The process groups of this rank: the one that shares the members, then those of other dimensions of a mesh."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if mesh is None:
        return [group or dist.distributed_c10d._get_default_group()]
    names = mesh.mesh_dim_names or ()
    if "members" not in names:
        raise ValueError(f"Expected a mesh with a dimension 'members', but it has {list(names)}.")
    return [mesh.get_group(name) for name in ("members", *(name for name in names if name != "members"))]


def _place(groups: list[ProcessGroup]) -> tuple[int, int]:
    """This process's rank among those that share the members, and how many they are."""
    if not groups:
        return 0, 1
    rank = dist.get_rank(groups[0])
    if rank < 0:
        raise ValueError("Expected a `group` that this process is part of.")
    return rank, dist.get_world_size(groups[0])


def _packed(member: nn.Module, k: int) -> bytes:
    state = member.state_dict()
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise TypeError(f"Expected members whose state is tensors, but that of member {k} holds something else.")
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in state.items()}
    return save_safetensors(copies)


def _filled(outline: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """A copy of a module, on the CPU, with this state."""
    return _copied(outline, {id(held): state[name] for name, held in outline.state_dict(keep_vars=True).items()}).cpu()


def _outline(member: nn.Module) -> nn.Module:
    """A copy of a module whose state takes no memory."""
    state = member.state_dict(keep_vars=True).values()
    return _copied(member, {id(t): t.detach().to("meta") for t in state if isinstance(t, Tensor)})


def _copied(module: nn.Module, parts: dict[int, Tensor]) -> nn.Module:
    """A deep copy with other tensors in the place of those with these ids; what is tied stays so."""
    parameters = {id(p): p.requires_grad for p in module.parameters()}
    memo: dict[int, Any] = {
        i: nn.Parameter(t, requires_grad=parameters[i]) if i in parameters else t for i, t in parts.items()
    }
    return recompute(copy_module(module, memo))
