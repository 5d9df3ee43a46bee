"""Members of one architecture, computed at once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torchace import _checks
from torchace.nn.architecture import check_layers, check_one_architecture, not_stackable
from torchace.nn.base import (
    BATCHES,
    EnsembleModule,
    as_list,
    check_own_batches,
    check_shared_parameters,
    take_logits,
    tensor_leaves,
    tensor_versions,
)
from torchace.nn.optimizers import watch_optimizers
from torchace.nn.stacked_state import (
    all_shared_names,
    group_size,
    module_lock,
    named_tensors,
    replace_tensors,
    stack_groups,
    stack_members,
    take_members,
)
from torchace.nn.stacking import (
    Decision,
    MemberRNG,
    StackingMode,
    decide,
    register_ensemble,
    run_one_by_one,
    run_stacked,
    run_stacked_in_graph,
)

CACHED = 1 << 21  # elements of the largest feature maps that are computed together on a CPU


class StackedEnsemble(EnsembleModule):
    """Members of one architecture, computed at once instead of one after another.

    Every parameter and buffer is one tensor with the member axis first, `(K, ...)`, in `stacked` under its name in a
    member. Elementwise optimizers train it as they would train the members. BatchNorm statistics and dropout masks are
    separate for each member.

    A member's `forward` runs once for all members: linear layers as batched products, convolutions as grouped ones, and
    so on. A function without such a form runs under `torch.func.vmap`, or member by member; see `explain`. The first
    call in each mode compares two members with the same members alone; where they differ, or where the forward depends
    on a member's data, members run one by one.

    Args:
        members: Modules of one architecture, in one mode (training or evaluation). They are copied.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Example:
        >>> ensemble = StackedEnsemble(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(10))
        >>> ensemble(torch.zeros(5, 4)).shape
        torch.Size([10, 5, 3])
        >>> ensemble(torch.zeros(10, 5, 4), batches="separate").shape
        torch.Size([10, 5, 3])
        >>> ensemble.stacked[0].weight.shape, ensemble.unstack()[0][0].weight.shape
        (torch.Size([10, 8, 4]), torch.Size([8, 4]))
    """

    def __init__(self, members: Iterable[nn.Module], link: str = "softmax") -> None:
        members = as_list(members)
        check_layers(members)
        check_one_architecture(members)
        check_shared_parameters(members)
        super().__init__(len(members), link)
        self._set_stacked(stack_members(members), members[0].training)

    @classmethod
    def from_trusted(cls, members: Iterable[nn.Module], link: str = "softmax") -> StackedEnsemble:
        """Return an ensemble without checking that the members have one architecture."""
        members = list(members)
        return _from_stacked(stack_members(members), len(members), link, members[0].training)

    @classmethod
    def from_groups(cls, groups: Sequence[nn.Module], num_members: int, link: str = "softmax") -> StackedEnsemble:
        """Return an ensemble of the members of R stacked networks (`AdaptedEnsemble.stacked`) of K members each.

        Own tensors are `(R·K, ...)`; those that the K members of a network share are `(R, ...)`.
        """
        stacked = stack_groups(list(groups), num_members)
        return _from_stacked(stacked, len(groups) * num_members, link, groups[0].training)

    def _set_stacked(self, stacked: nn.Module, training: bool) -> None:
        self.stacked = stacked
        self.training = training  # layers keep the mode they have in the members
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()

    def _register(self) -> None:
        """Set the attributes that a copy does not share."""
        self._token = register_ensemble(self)
        self._decisions: dict[Any, Decision] = {}
        self._call_by_call = True
        self._in_parts = False  # whether a call has put some members' tensors into `stacked`
        shared = self._shared_parameters()
        self.shares_weights = bool(shared)
        names = tuple(name for name, p in self.named_parameters() if id(p) not in shared) if shared else None
        watch_optimizers(self, names)

    def _shared_parameters(self) -> set[int]:
        """Return the ids of the parameters that all members share."""
        shared = set(all_shared_names(self.stacked))
        return {id(parameter) for name, parameter in self.stacked.named_parameters() if name in shared}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast as `nn.Module.to`; a memory format applies to a member's weights."""
        parsed: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, non_blocking, memory_format = parsed
        if device is not None or dtype is not None:
            super().to(device=device, dtype=dtype, non_blocking=non_blocking)
        if memory_format is not None:
            ndim = 5 if memory_format == torch.channels_last else 6
            plain = set() if group_size(self.stacked) else self._shared_parameters()
            for parameter in self.parameters():
                if id(parameter) in plain and parameter.ndim == ndim - 1:
                    parameter.data = parameter.data.contiguous(memory_format=memory_format)
                elif id(parameter) not in plain and parameter.ndim == ndim:
                    kernels = parameter.data.flatten(0, 1).contiguous(memory_format=memory_format)
                    parameter.data = kernels.unflatten(0, parameter.shape[:2])
        return self

    def forward(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Tensor:
        """Return the members' logits, `(K, N, C, ...)`.

        Args:
            *args: Inputs of a member.
            batches: `"shared"`: one input for all members. `"separate"`: one batch per member, `(K, N, ...)`.
                `"grouped"`: `(G, N, ...)` where G divides K; the first K/G members share the first batch, and so on.
            **kwargs: Inputs of a member by name; shared by all members.
        """
        _checks.check_choice(batches, "batches", (*BATCHES, "grouped"))
        if batches == "separate":
            check_own_batches(args, self.num_members)
        for x in tensor_leaves(args) if batches == "grouped" else ():
            if x.ndim < 2 or not len(x) or self.num_members % len(x):
                raise ValueError(
                    f"Expected an input (G, N, ...) where G divides {self.num_members} for batches='grouped', "
                    f"but got {tuple(x.shape)}."
                )
        return self._logits(self.compute(args, kwargs, own=batches != "shared"))

    def select_output(self, output: Any) -> Any:
        """Return the part of the members' outputs that a compiled graph returns: tensors, alone or in tuples."""
        return output

    def _logits(self, output: Any) -> Tensor:
        """Return the logits in the members' outputs."""
        return take_logits(output, "A member")

    def compute(self, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool, rng: MemberRNG | None = None) -> Any:
        """Return the members' outputs, every tensor in them `(K, ...)`.

        With `own`, `args` are `(G, N, ...)` where G divides K, one batch per member or group of members; `kwargs` are
        shared. `rng` replaces PyTorch's generator.
        """
        layers = list(self.stacked.modules())
        modes = self._modes(layers)
        if torch.compiler.is_dynamo_compiling():
            if not self._call_by_call:
                return run_one_by_one(self.stacked, self.num_members, args, kwargs, own=own)
            key = None if rng is None else rng.tensors
            return run_stacked_in_graph(self._token, modes, own, list(args), kwargs, named_tensors(self.stacked), key)
        with module_lock(self.stacked):
            decision = self._decision(modes, args, kwargs, own=own)
        shared = [] if own else [*args, *kwargs.values()]
        before = tensor_versions(shared)
        is_followed = decision is None or decision.call_by_call
        size = self._members_at_once(decision, args, own=own) if is_followed else 0
        if size < self.num_members and not self._in_parts:
            self._in_parts = True  # from then on, calls of all members at once wait too
        replaces = self._in_parts or (self.shares_weights and torch.is_grad_enabled())
        with module_lock(self.stacked) if replaces else nullcontext():
            if is_followed:
                output = self._run_stacked(layers, args, kwargs, size, own=own, rng=rng)
            else:
                output = run_one_by_one(self.stacked, self.num_members, args, kwargs, own=own, rng=rng)
        if tensor_versions(shared) != before:
            raise ValueError(
                "Expected members that leave their shared input unchanged, but they changed their input in place. Use "
                "layers with inplace=False, or pass a copy."
            )
        return output

    def _run_stacked(
        self, layers: list[nn.Module], args: Sequence[Any], kwargs: dict[str, Any], size: int, *, own: bool, rng: Any
    ) -> Any:
        """Compute the members, `size` at a time."""
        if size >= self.num_members:
            mode = StackingMode(self.num_members, self._token, rng)
            return run_stacked(self.stacked, mode, args, kwargs, own=own, layers=layers)
        tensors = named_tensors(self.stacked)
        outputs = []
        for start in range(0, self.num_members, size):
            part = slice(start, min(start + size, self.num_members))
            inputs = tree_map(lambda x, part=part: x[part] if own and isinstance(x, Tensor) else x, list(args))
            with replace_tensors(self.stacked, {name: tensor[part] for name, tensor in tensors.items()}):
                mode = StackingMode(part.stop - start, self._token, None if rng is None else rng[part])
                outputs.append(run_stacked(self.stacked, mode, inputs, kwargs, own=own, layers=layers))
        return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)

    def _members_at_once(self, decision: Decision | None, args: Sequence[Any], *, own: bool) -> int:
        """Return the number of members to compute together: on a CPU, as many as fit in its cache."""
        if decision is None or not decision.largest or self.shares_weights:
            return self.num_members
        if any(x.device.type != "cpu" or (own and len(x) != self.num_members) for x in tensor_leaves(args)):
            return self.num_members
        return max(1, CACHED // decision.largest)

    def _modes(self, layers: list[nn.Module]) -> tuple[bool, ...]:
        """Return each layer's mode; refuse backward hooks and sharded layers."""
        grad = torch.is_grad_enabled()
        for layer in layers:
            if grad and (layer._backward_hooks or layer._backward_pre_hooks):
                name = next(name for name, module in self.stacked.named_modules() if module is layer)
                raise not_stackable(self.stacked, name, "its backward hooks would never be called")
            if (
                type(layer).__mro__[1].__name__ == "FSDPModule"
            ):  # gathers its weights after the stacked forward has read them
                raise ValueError(
                    f"Expected an ensemble that is sharded as one module, but got one with {type(layer).__name__} "
                    "inside. Use fully_shard(ensemble)."
                )
        return tuple([layer.training for layer in layers])

    def _decision(
        self, modes: tuple[bool, ...], args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
    ) -> Decision | None:
        """Return the decision for these modes, made at the first call; None where it cannot be made."""
        sizes = tuple(len(x) for x in tensor_leaves(args)) if own else None  # fewer than K: members share inputs
        key = (sizes, torch.is_grad_enabled(), modes)
        if key not in self._decisions:
            decision = decide(self.stacked, self.num_members, self._token, args, kwargs, own=own)
            if decision is None:
                return None if self._call_by_call else Decision(False)
            self._decisions[key] = decision
            if not _checks.is_compiling():  # a graph depends on it
                self._call_by_call = decision.call_by_call
        return self._decisions[key]

    def explain(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Decision:
        """Return how each call of a member's forward is computed for all members.

        Args:
            *args: Inputs of `forward`; not needed after a first call.
            batches: As for `forward`.
            **kwargs: As for `forward`.

        Example:
            >>> ensemble = StackedEnsemble(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
            >>> print(ensemble.explain(torch.zeros(5, 4)))
            layer  function  computed
            0      linear    batched
            1      relu      batched
            2      linear    batched
        """
        if args or kwargs:
            modes = self._modes(list(self.stacked.modules()))
            decision = self._decision(modes, args, kwargs, own=batches != "shared")
        else:
            decision = next(reversed(self._decisions.values()), None)
        if decision is None:
            raise ValueError("Expected a call of the ensemble before explain(), but got none. Use explain(x).")
        return decision

    def unstack(self) -> list[nn.Module]:
        """Return copies of the members as plain modules."""
        return [self[k] for k in range(self.num_members)]

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups: weight decay for matrices and kernels, none for biases and normalization.

        The number of axes is a member's: a stacked bias `(K, C)` counts as a vector.

        Example:
            >>> ensemble = StackedEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)])
            >>> optimizer = torch.optim.AdamW(ensemble.parameter_groups(weight_decay=0.01), lr=1e-3)
            >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
            [(0.01, 1), (0.0, 1)]
        """
        shared = self._shared_parameters()
        groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
        for p in self.parameters():
            if p.requires_grad:
                groups[weight_decay if p.ndim - (id(p) not in shared) >= 2 else 0.0].append(p)
        return [{"params": held, "weight_decay": decay} for decay, held in groups.items() if held]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip each member's gradient to a norm of at most `max_norm`; return the norms before, `(K,)`.

        The gradient of parameters that members share is clipped separately.
        """
        shared = self._shared_parameters()
        nn.utils.clip_grad_norm_([p for p in self.parameters() if id(p) in shared], max_norm)
        gradients = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in shared]
        if not gradients:
            return torch.zeros(self.num_members)
        norms = torch.stack([torch.linalg.vector_norm(grad.reshape(len(self), -1), dim=1) for grad in gradients])
        total = torch.linalg.vector_norm(norms, dim=0)  # (K,)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # 1e-6: as torch.nn.utils.clip_grad_norm_
        for grad in gradients:
            grad.mul_(factor.reshape(-1, *[1] * (grad.ndim - 1)).to(grad))
        return total

    def take(self, members: slice) -> StackedEnsemble:
        """Return a copy with some of the members."""
        count = len(range(self.num_members)[members])
        return _from_stacked(take_members(self.stacked, members), count, self.link, self.training)

    def __len__(self) -> int:
        return self.num_members

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.unstack())

    def __getitem__(self, index: int) -> nn.Module:
        """Return a copy of member `index` as a plain module."""
        return take_members(self.stacked, range(self.num_members)[operator.index(index)])


def _from_stacked(stacked: nn.Module, num_members: int, link: str, training: bool) -> StackedEnsemble:
    ensemble = StackedEnsemble.__new__(StackedEnsemble)
    EnsembleModule.__init__(ensemble, num_members, link)
    ensemble._set_stacked(stacked, training)
    return ensemble
