"""Whole networks under `torch.func.vmap`: for a forward that cannot be followed call by call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from torchace.nn.architecture import not_vectorisable
from torchace.nn.recomputed import recomputed_names
from torchace.nn.stacking.checkpointing import is_control_flow, refuse_checkpointing
from torchace.nn.stacking.compute import take_members
from torchace.nn.stacking.values import for_each


def vectorise(stacked: nn.Module, num_members: int, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool) -> Any:
    """Compute the members of a stacked module, whose tensors are `(K, ...)`.

    Args:
        stacked: The module.
        num_members: K.
        args: Its inputs.
        kwargs: Its inputs by name, shared by all members.
        own: Whether `args` are `(G, ...)`, one for each member or group of members.

    Raises:
        ValueError: A layer cannot be computed like this; its name and the reason.
    """
    if own:
        args = tree_map(lambda x: for_each(x, num_members) if isinstance(x, Tensor) else x, list(args))
    try:
        return _vectorised(stacked, args, kwargs, own=own)
    except Exception as error:
        if torch.compiler.is_compiling() or is_control_flow(error):
            raise
        raise _explained(stacked, error, args, kwargs, own=own) from error


def _vectorised(stacked: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool) -> Any:
    parameters, buffers = slots(stacked, "parameters"), slots(stacked, "buffers")

    def member(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any) -> Any:
        state = {**parameters, **buffers}
        output = functional_call(stacked, state, args, kwargs, tie_weights=False)
        for name, before in buffers.items():
            if state[name] is not before:  # functional_call leaves there what the module holds after the call
                raise _Reassigned(name)
        return output

    in_dims = (0, 0, *[0 if own else None] * len(args))
    # randomness: dropout masks are each member's own
    with _prepared(stacked):
        return vmap(member, in_dims=in_dims, randomness="different")(parameters, buffers, *args)


def _explained(
    stacked: nn.Module, error: Exception, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Exception:
    """Return why computing the members at once failed: the first member's own error, or the layer that cannot be."""
    if isinstance(error, _Reassigned):
        layer, _, buffer = error.name.rpartition(".")
        return not_vectorisable(stacked, layer, f"it replaces its buffer {buffer!r} instead of changing it in place")
    try:
        take_members(stacked, 0)(*(tree_map(lambda x: x[0], list(args)) if own else args), **kwargs)
    except Exception as alone:
        return alone  # nothing to do with computing members at once
    running: list[str] = []
    hooks = []
    for name, module in stacked.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        _vectorised(stacked, args, kwargs, own=own)
    except Exception:
        return not_vectorisable(stacked, running[-1] if running else "", str(error).split("\n")[0].rstrip("."))
    finally:
        for hook in hooks:
            hook.remove()
    return error


def slots(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """Parameters or buffers by name, each place where one is held once.

    Tied ones have several places. A layer that is there under several names has one: `functional_call`, told of the
    others, leaves its own tensors in the module for good (torch 2.13).
    """
    return {
        f"{prefix}.{name}".lstrip("."): tensor
        for prefix, layer in module.named_modules()
        for name, tensor in getattr(layer, f"named_{kind}")(recurse=False, remove_duplicate=False)
    }


class _Reassigned(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def _prepared(stacked: nn.Module) -> Iterator[None]:
    """Prepares the layers of a stacked module for one call under `vmap`."""
    if torch.compiler.is_compiling():
        yield
        return
    layers = list(stacked.modules())
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, _BatchNorm) and layer.training and layer.momentum is None:
                stack.enter_context(_cumulative_average(layer))
        stack.enter_context(refuse_checkpointing())
        try:
            yield
        finally:
            for layer in layers:  # a tensor of a call under vmap means nothing after it
                for name in recomputed_names(layer):
                    vars(layer)[name] = None


@contextmanager
def _cumulative_average(layer: Any) -> Iterator[None]:
    """`momentum=None` as the numbers it stands for, 1/count: `vmap` cannot read a count."""
    if layer.num_batches_tracked is None:
        yield
        return
    counts = layer.num_batches_tracked.unique().tolist()
    if len(counts) > 1:
        raise ValueError(
            f"Expected members that have seen equally many batches for a BatchNorm layer with momentum=None, but got "
            f"{counts[0]} to {counts[-1]}. Call reset_running_stats() of the layer, or use Ensemble(members)."
        )

    def count(layer: Any, _: Any) -> None:  # a layer may be called several times
        counts[0] += 1
        layer.momentum = 1 / counts[0]

    hook = layer.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()
        layer.momentum = None
