"""Computes a stacked module by following one member's forward, once it is known that this gives the right numbers.

Whether it does is tried on two members: outputs and gradients are compared with those of the members by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from torchace.nn.recomputed import copy_module, recompute, recomputed_names
from torchace.nn.stacking.checkpointing import refuse_checkpointing
from torchace.nn.stacking.follow import DRAWING, RANDOM, RULES, CannotFollow, Follower, Node, name_of
from torchace.nn.stacking.random import Half
from torchace.nn.stacking.values import Stacked, to_members


class Decision(NamedTuple):
    """How the members of a stack are computed."""

    followed: bool
    reason: str  # why they are not, where they are not
    nodes: tuple[Node, ...]
    largest: int  # elements of the largest convolution's output, of one member
    random: bool = False  # whether they draw random numbers


def take_members(stacked: nn.Module, index: int | slice | Sequence[int]) -> nn.Module:
    """A copy of a stacked module that has some of its members; with a number, that member as a plain module."""
    parts: dict[int, Any] = {}
    for parameter in stacked.parameters():
        parts[id(parameter)] = nn.Parameter(parameter.detach()[index].clone(), requires_grad=parameter.requires_grad)
    for buffer in stacked.buffers():
        parts[id(buffer)] = buffer.detach()[index].clone()
    copied = copy_module(stacked, parts)
    if not isinstance(index, int):
        return copied
    for layer in copied.modules():
        vars(layer).pop("flatten_parameters", None)  # see `keep_apart`
    return recompute(copied)


def keep_apart(stacked: nn.Module) -> None:
    """Let recurrent layers leave their weights where they are: as one block of memory they would be one member's."""
    for layer in stacked.modules():
        if isinstance(layer, nn.RNNBase):
            vars(layer)["flatten_parameters"] = _nothing


def _nothing() -> None:
    return None


@contextmanager
def swapped(stacked: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors in the place of a module's parameters and buffers, by name; what is written to them stays there."""
    held = []
    for prefix, module in stacked.named_modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    held.append((slots, name, tensor))
                    slots[name] = state[f"{prefix}.{name}".lstrip(".")]
    try:
        yield
    finally:
        for slots, name, tensor in held:
            slots[name] = tensor


def follow(
    stacked: nn.Module,
    follower: Follower,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    own: bool,
    layers: Sequence[nn.Module] | None = None,
) -> Any:
    """Compute the members of a stacked module, whose tensors are `(K, ...)`.

    Args:
        stacked: The module.
        follower: How to compute its calls.
        args: Its inputs.
        kwargs: Its inputs by name, shared by all members.
        own: Whether `args` are `(G, ...)`, one for each member or group of members.
        layers: All modules of `stacked`, where they are known.

    Returns:
        What the forward returned, every tensor in it `(K, ...)`.
    """
    buffers = []
    recomputed = []
    for module in stacked.modules() if layers is None else layers:
        if module._forward_pre_hooks:
            recomputed += [(module, name) for name in recomputed_names(module)]
        for parameter in module._parameters.values():
            if parameter is not None:
                follower.mark(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((module, name, follower.mark(buffer)))
                follower.buffers.add(id(buffer))
    if own:
        args = [_marked(follower, x) for x in args]
    with follower:
        output = stacked(*args, **kwargs)
    for module, name in recomputed:  # a tensor of this call means nothing after it
        vars(module)[name] = None
    for module, name, buffer in buffers:
        now = module._buffers[name]
        if now is not buffer and now is not None:  # replaced instead of changed in place
            new = to_members(follower.value_of(now), follower.num_members).detach()
            if new.shape != buffer.shape:
                raise CannotFollow(f"the shape of buffer {name!r} changes")
            module._buffers[name] = buffer.copy_(new)
    return _unmarked(follower, output) if isinstance(output, Tensor) else tree_map(partial(_unmarked, follower), output)


def _marked(follower: Follower, x: Any) -> Any:
    """An input of each member's own; a view, so that what the caller holds is not marked."""
    return follower.mark(x[:]) if isinstance(x, Tensor) else tree_map(partial(_marked, follower), x)


def _unmarked(follower: Follower, output: Any) -> Any:
    """An output `(K, ...)` that means nothing to another follower."""
    if not isinstance(output, Tensor):
        return output
    data = to_members(follower.value_of(output), follower.num_members)
    follower.unmark(data)
    return data


def decide(
    stacked: nn.Module, num_members: int, token: int, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Decision:
    """Follow two members and compare outputs and gradients with those of the members by themselves.

    This is done in float64, where rounding cannot be mistaken for a difference, or in the precision at hand for members
    that fail in float64. Random numbers are replaced by a constant on both sides. An error that a member raises by
    itself is raised.
    """
    with torch.random.fork_rng(devices=_cuda_devices(stacked)):
        try:
            with _without_autocast(stacked):
                return _Comparison(stacked, num_members, args, kwargs, own=own, precise=True).decide(token)
        except _FailsAlone:
            pass
        try:
            return _Comparison(stacked, num_members, args, kwargs, own=own, precise=False).decide(token)
        except _FailsAlone as failure:
            raise failure.error from None


class _FailsAlone(Exception):
    """A member raised an error by itself."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Comparison:
    """Two members by themselves, and what is to be followed in comparison with them."""

    def __init__(
        self,
        stacked: nn.Module,
        num_members: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        own: bool,
        precise: bool,
    ) -> None:
        self.stacked, self.num_members, self.own, self.precise = stacked, num_members, own, precise
        self.args, self.kwargs = self._cast(list(args)), self._cast(kwargs)
        self.chosen = _sound_members(stacked, num_members)
        self.alone = []  # outputs and gradients of each
        self.random = False
        for k in self.chosen:
            member = self._cast(take_members(stacked, k))
            try:
                with _Deterministic() as mode:
                    output = member(*self._inputs_of(torch.tensor(k)), **self.kwargs)
                self.random |= mode.random
                self.alone.append((tree_leaves(output), _gradients(output, member)))
            except Exception as error:
                raise _FailsAlone(error) from error

    def _cast(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return value.double() if self.precise else value
        return tree_map(
            lambda x: x.double() if self.precise and isinstance(x, Tensor) and x.is_floating_point() else x, value
        )

    def _inputs_of(self, members: Tensor) -> list[Any]:
        return tree_map(
            lambda x: x[members * len(x) // self.num_members] if self.own and isinstance(x, Tensor) else x, self.args
        )

    def decide(self, token: int) -> Decision:
        record: list[Node] = []
        follower = Follower(len(self.chosen), token, Half(), record)
        together = self._cast(take_members(self.stacked, self.chosen))
        try:
            with _named_layers(together, follower), refuse_checkpointing():
                inputs = self._inputs_of(torch.tensor(self.chosen))
                outputs = follow(together, follower, inputs, self.kwargs, own=self.own)
            gradients = _gradients(outputs, together)
            outputs = tree_leaves(outputs)
        except Exception as error:
            return self._not_followed(str(error).split("\n")[0].rstrip(".") or type(error).__name__)
        for place, (leaves, own_gradients) in enumerate(self.alone):
            for ours, theirs in zip(outputs, leaves, strict=True):
                if not isinstance(theirs, Tensor) or theirs.isnan().any():
                    continue
                if ours.shape[1:] != theirs.shape or not _close(ours[place], theirs, 1):
                    return self._not_followed("a member gives other outputs by itself")
            # in proportion to all gradients too: that of a bias before BatchNorm is rounding alone
            size = math.hypot(*(float(gradient.double().norm()) for gradient in own_gradients.values()))
            for name, gradient in own_gradients.items():
                if math.isfinite(size) and not _close(gradients[name][place], gradient, 10, size / 100):
                    return self._not_followed(f"a member gives another gradient of {name!r} by itself")
        return Decision(True, "", tuple(record), follower.largest, self.random)

    def _not_followed(self, reason: str) -> Decision:
        return Decision(False, reason, (), 0, self.random)


@contextmanager
def _without_autocast(module: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for device in {parameter.device.type for parameter in module.parameters()}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _sound_members(stacked: nn.Module, num_members: int) -> list[int]:
    """The first and the last member without NaN and Inf, which cannot be compared; of all, where there is none."""
    sound = torch.ones(num_members, dtype=torch.bool)
    for tensor in (*stacked.parameters(), *stacked.buffers()):
        sound &= tensor.detach().isfinite().reshape(num_members, -1).all(1).cpu()
    found = sound.nonzero().flatten().tolist() or [0, num_members - 1]
    return sorted({found[0], found[-1]})


def _gradients(output: Any, module: nn.Module) -> dict[str, Tensor]:
    """Gradients in all trained parameters of the output, weighted by a bounded and smooth function of its values."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs or not trained:
        return {}
    weights = [x.detach().tanh() + 0.5 for x in outputs]
    found = torch.autograd.grad(outputs, list(trained.values()), weights, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(trained.items(), found, strict=True)
    }


def _close(ours: Tensor, theirs: Tensor, factor: float, size: float = 0.0) -> bool:
    """Equal up to rounding, which networks of many layers amplify; a wrong rule is off by its whole size."""
    if theirs.dtype != ours.dtype:
        return False
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    eps = torch.finfo(theirs.dtype).eps
    if torch.is_autocast_enabled(theirs.device.type):
        eps = torch.finfo(torch.get_autocast_dtype(theirs.device.type)).eps
    a, b = ours.double(), theirs.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return False
    a, b = a[finite], b[finite]
    return bool((a - b).norm() <= factor * eps**0.5 * (b.norm() + size) + eps)


EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)  # where random numbers may be written later


class _Deterministic(TorchFunctionMode):
    """A member by itself, with the same constant for every random number."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = Follower(1, -1, Half())
        self.random = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = func in RANDOM or (func is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0) > 0)
        self.random |= (random and func not in EMPTY) or name_of(func) in DRAWING
        if not random and func not in (Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_):
            return func(*args, **kwargs)
        if random:
            result = RULES[func](self.alone, func, args, kwargs)
            return result.data[0] if isinstance(result, Stacked) and result.layout == "first" else result
        RULES[func](self.alone, func, (Stacked(args[0][None]), *args[1:]), kwargs)
        return args[0]


@contextmanager
def _named_layers(module: nn.Module, follower: Follower) -> Iterator[None]:
    """Keep the follower's `layer` up to date."""
    names = {inner: name for name, inner in module.named_modules()}
    running = [""]

    def enter(inner: nn.Module, _: Any) -> None:
        running.append(names.get(inner, running[-1]))
        follower.layer = running[-1]

    def leave(*_: Any) -> None:
        running.pop()
        follower.layer = running[-1]

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})
