"""Stacking of members into one module, extraction of members, and replacement of tensors."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# The attribute of a layer with the names of its parameters and buffers that members share: they have no member axis
SHARED = "_shared_tensors"
# The attribute of a stacked module whose shared tensors are (R, ...), one entry for each group of so many members
GROUP_SIZE = "_group_size"

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def module_lock(stacked: nn.Module) -> threading.RLock:
    """Return the lock to hold while other tensors are in this module: threads may use it at the same time."""
    return _locks.setdefault(stacked, threading.RLock())


def shared_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a layer's own parameters and buffers that members share."""
    return vars(layer).get(SHARED, ())


def all_shared_names(stacked: nn.Module) -> list[str]:
    """Return the names of a module's parameters and buffers that members share."""
    return [f"{prefix}.{name}".lstrip(".") for prefix, layer in stacked.named_modules() for name in shared_names(layer)]


def group_size(stacked: nn.Module) -> int | None:
    """Return the number of members in a group; None if all members share the same tensors, or none."""
    return vars(stacked).get(GROUP_SIZE)


def stack_members(members: list[nn.Module]) -> nn.Module:
    """Return a copy of the first member with the parameters and buffers of all members, `(K, ...)`."""
    stacked_module = _combine(members, lambda layer, name, tensors: _stack(tensors))
    for layer in stacked_module.modules():
        if isinstance(layer, nn.RNNBase):  # its own would flatten the weights as one member's
            vars(layer)["flatten_parameters"] = _do_nothing
    return stacked_module


def _stack(tensors: list[Tensor]) -> Tensor:
    """Return `torch.stack(tensors)`; kernels in channels last keep this format."""
    first, last = tensors[0], torch.channels_last
    if first.ndim != 4 or first.is_contiguous() or not first.is_contiguous(memory_format=last):
        return torch.stack(tensors)
    return torch.cat(tensors).contiguous(memory_format=last).unflatten(0, (len(tensors), -1))


def _do_nothing() -> None:
    """Replace `flatten_parameters`; a module-level function, so that it can be pickled."""


def stack_groups(groups: list[nn.Module], num_members: int) -> nn.Module:
    """Return one stacked module from R with K members each: own tensors `(R·K, ...)`, shared ones `(R, ...)`."""

    def combine(layer: nn.Module, name: str, tensors: list[Tensor]) -> Tensor:
        return _stack(tensors) if name in shared_names(layer) else torch.cat(tensors)

    combined = _combine(groups, combine)
    vars(combined)[GROUP_SIZE] = num_members
    return combined


def take_group(stacked: nn.Module, group: int) -> nn.Module:
    """Return a copy of one of the modules of `stack_groups`."""
    size = group_size(stacked) or 1

    def take(layer: nn.Module, name: str, tensors: list[Tensor]) -> Tensor:
        part = tensors[0][group] if name in shared_names(layer) else tensors[0][group * size : (group + 1) * size]
        return part.clone()

    taken = _combine([stacked], take)
    vars(taken).pop(GROUP_SIZE)
    return taken


def take_members(stacked: nn.Module, index: int | slice | Sequence[int]) -> nn.Module:
    """Return a copy of a stacked module with some of its members; for an integer, a plain module."""
    size = group_size(stacked)

    def take(layer: nn.Module, name: str, tensors: list[Tensor]) -> Tensor:
        if name not in shared_names(layer):
            return tensors[0][index].clone()
        if size is None:
            return tensors[0].clone()
        groups = index // size if isinstance(index, int) else [k // size for k in index]  # type: ignore[union-attr]
        return tensors[0][groups].clone()

    copied = _combine([stacked], take)
    if size is not None:
        vars(copied)[GROUP_SIZE] = 1
    if not isinstance(index, int):
        return copied
    vars(copied).pop(GROUP_SIZE, None)
    for layer in copied.modules():
        vars(layer).pop("flatten_parameters", None)
        vars(layer).pop(SHARED, None)
    return copied


def _combine(modules: list[nn.Module], combine: Callable[[nn.Module, str, list[Tensor]], Tensor]) -> nn.Module:
    """Return a copy of the first module whose parameters and buffers are computed from those of all modules."""
    parts: dict[int, Any] = {}
    for layer, *others in zip(*(module.modules() for module in modules), strict=True):
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(layer)[kind].items():
                if tensor is None or id(tensor) in parts:
                    continue
                part = combine(layer, name, [tensor.detach(), *(vars(o)[kind][name].detach() for o in others)])
                parts[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if kind == "_parameters" else part
    return copy.deepcopy(modules[0], parts)  # deepcopy takes replacements from its memo


def named_tensors(module: nn.Module, *kinds: str) -> dict[str, Tensor]:
    """Return parameters and buffers, or one kind, by name: tied ones under each name, those of a shared layer once."""
    # with all names of a shared layer, `functional_call` would leave its tensors in the module (torch 2.13)
    return {
        f"{prefix}.{name}".lstrip("."): tensor
        for kind in kinds or ("parameters", "buffers")
        for prefix, layer in module.named_modules()
        for name, tensor in getattr(layer, f"named_{kind}")(recurse=False, remove_duplicate=False)
    }


@contextmanager
def replace_tensors(stacked: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily replace a module's parameters and buffers by name; other threads wait."""
    replaced = []
    with module_lock(stacked):
        for prefix, module in stacked.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        replaced.append((held, name, tensor))
                        held[name] = tensors[f"{prefix}.{name}".lstrip(".")]
        try:
            yield
        finally:
            for held, name, tensor in replaced:
                held[name] = tensor
