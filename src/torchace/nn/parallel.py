"""Ensembles whose members are spread over processes, which exchange predictions only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import ensemble_log_probs, ensemble_probs
from torchace.nn.base import EnsembleModule, as_list, call_members, check_modules, check_shared_parameters, split_range
from torchace.nn.ensemble import Ensemble
from torchace.nn.stacked import StackedEnsemble

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Members = EnsembleModule | Iterable[nn.Module] | Callable[[int], nn.Module]


class MemberParallelEnsemble(EnsembleModule):
    r"""Members without a shared trunk, spread over the ranks of a process group.

    Every rank computes its own members on the same batch. The loss needs the mixture $\bar q = \sum_j \alpha^j q^j$,
    `(N, C)`, without gradient: one all-reduce per step. A call returns the logits of this rank's members; a step is

        logits = ensemble(x)  # (K of this rank, N, C)
        mixture, weights = ensemble.mixture(logits), ensemble.local_weights
        amended_cross_entropy(logits, y, 0.5, mixture=mixture, member_weights=weights).backward()

    The loss is the sum over this rank's members, and each rank has an optimizer over `ensemble.parameters()`.
    Predictions are those of all members, on every rank. `save_model` writes one model of all members.

    On a mesh of members x data every column of ranks has its own part of the batch: call
    `DistributedDataParallel(ensemble, process_group=mesh["data"].get_group())`, and `mixture` of the ensemble itself.
    Without `torch.distributed` this process is the only rank and has all members.

    Args:
        members: A function that returns the member of an index, called for this rank's members only; or all members, as
            a list or an ensemble, of which every rank keeps its own.
        num_members: K; required with a function.
        group: The ranks that share the members; all ranks if None.
        mesh: Instead of `group`: a device mesh with a dimension `"members"`.
        link: `"softmax"`, `"sigmoid"` or `"identity"`; if None, that of the ensemble given, else `"softmax"`.

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
        given = _given_members(members, num_members)
        count = len(given) if given else num_members or 0
        super().__init__(count, link)
        self._groups = _process_groups(group, mesh)
        self._rank, self._size = 0, 1
        if self._groups:
            self._rank, self._size = dist.get_rank(self._groups[0]), dist.get_world_size(self._groups[0])
        if self._rank < 0:
            raise ValueError("Expected a `group` that contains this process, but it does not.")
        if self._size > count:
            raise ValueError(
                f"Expected at most one rank for each of {count} members, but got {self._size} ranks. "
                "Use fewer, or a mesh of members x data."
            )
        self.local_members = split_range(count, self._size, self._rank)
        make: Callable[[int], nn.Module] = given.__getitem__ if given else members  # type: ignore[assignment]
        local = {k: make(k) for k in self.local_members}
        check_modules(local)
        check_shared_parameters(given or list(local.values()))
        # named by their index in the whole ensemble: together the ranks' state dicts are that of an `Ensemble`
        self.members = nn.ModuleDict({str(k): member for k, member in local.items()})
        if isinstance(members, EnsembleModule):
            self.set_member_weights(members.member_weights)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of this rank's members, `(K of this rank, N, C, ...)`."""
        return call_members({int(k): member for k, member in self.members.items()}, args, kwargs)

    @property
    def local_weights(self) -> Tensor:
        """α of this rank's members, for the loss."""
        return self._local_weights(None)

    @torch.no_grad()
    def mixture(self, logits: Tensor, *, member_weights: Tensor | None = None) -> Tensor:
        r"""Return the mixture of all members, $\sum_j \alpha^j q^j$, `(N, C, ...)`: one all-reduce, no gradient.

        Args:
            logits: Logits of this rank's members.
            member_weights: α of all members, `(K,)`; the ensemble's own if None.
        """
        total, weights = self._normalized_weights(member_weights)
        mixture = total * ensemble_probs(logits, member_weights=weights, link=self.link)
        return self._all_reduce(mixture.contiguous(), "SUM")

    def predict_log_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the ensemble's log-probabilities: a logsumexp over ranks, with two all-reduces."""
        self._check_has_probabilities("predict_log_proba")
        total, weights = self._normalized_weights(member_weights)
        with self._evaluation_mode():
            local = ensemble_log_probs(self(*args, **kwargs), member_weights=weights, link=self.link) + total.log()
            peak = self._all_reduce(local.clone(), "MAX")
            peak = torch.where(peak.isinf(), 0.0, peak)  # a class to which all members give probability 0
            return peak + self._all_reduce((local - peak).exp(), "SUM").log()

    def predict_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the ensemble's probabilities, `(N, C, ...)`: one all-reduce."""
        self._check_has_probabilities("predict_proba")
        with self._evaluation_mode():
            return self._mixture(self(*args, **kwargs), member_weights)

    def _mixture(self, logits: Tensor, member_weights: Tensor | None) -> Tensor:
        return self.mixture(logits, member_weights=member_weights)

    def gather(self, *, everywhere: bool = False) -> Ensemble | None:
        """Return all members as an `Ensemble` on the CPU of the first rank (or `everywhere`), else None.

        All ranks must call it; members are pickled to be sent.
        """
        keep = everywhere or self._rank == 0
        members = []
        for k in range(self.num_members):
            member = [copy.deepcopy(self.members[str(k)]).cpu() if k in self.local_members else None]
            if self._size > 1:
                owner = next(r for r in range(self._size) if k in split_range(self.num_members, self._size, r))
                source = dist.get_global_rank(self._groups[0], owner)
                dist.broadcast_object_list(member, source, self._groups[0], self._like().device)
            if keep:
                members.append(member[0])
        if not keep:
            return None
        ensemble = Ensemble(members, link=self.link)  # type: ignore[arg-type]
        ensemble.training = self.training
        ensemble.member_weights = None if self.member_weights is None else self.member_weights.cpu()
        return ensemble

    def on_first_rank(self, call: Callable[[Ensemble], None]) -> None:
        """Call a function with all members on the first rank; the other ranks wait, and raise if it fails."""
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
            raise RuntimeError("The first rank failed; see its error message.")

    def extra_repr(self) -> str:
        """Return the options and the indices of this rank's members."""
        return f"{super().extra_repr()}, local_members={self.local_members.start}..{self.local_members.stop - 1}"

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.members.values())

    def _local_weights(self, member_weights: Tensor | None) -> Tensor:
        weights = self.member_weights if member_weights is None else member_weights
        alpha = _checks.as_member_weights(weights, self.num_members, like=self._like())
        return alpha[self.local_members.start : self.local_members.stop]

    def _normalized_weights(self, member_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of this rank's member weights, and the weights divided by it."""
        alpha = self._local_weights(member_weights)
        total = alpha.sum()
        return total, torch.where(total > 0, alpha / total, 1 / len(alpha))

    def _all_reduce(self, values: Tensor, operation: str) -> Tensor:
        if self._size > 1:
            dist.all_reduce(values, getattr(dist.ReduceOp, operation), self._groups[0])
        return values


def _given_members(members: Members, num_members: int | None) -> list[nn.Module] | None:
    """Return all members as a list; None for a function."""
    if isinstance(members, StackedEnsemble) and not members.shares_weights:
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
            raise ValueError("Expected `num_members` with a function of members, but got none.")
        _checks.check_count(num_members, "num_members")
        return None
    given = as_list(members)  # type: ignore[arg-type]  # refuses a single module
    if num_members is not None and num_members != len(given):
        raise ValueError(f"Expected `num_members` of {len(given)}, the members given, but got {num_members}.")
    return given


def _process_groups(group: ProcessGroup | None, mesh: DeviceMesh | None) -> list[ProcessGroup]:
    """Return this rank's process groups: the one that shares the members, then those of a mesh's other dimensions."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if mesh is None:
        return [group or dist.distributed_c10d._get_default_group()]
    names = mesh.mesh_dim_names or ()
    if "members" not in names:
        raise ValueError(f"Expected a mesh with a dimension 'members', but it has {list(names)}.")
    return [mesh.get_group(name) for name in ("members", *(name for name in names if name != "members"))]
