"""Stacking of members into one module, extraction of members, and replacement of tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def stack_members(members: list[nn.Module]) -> nn.Module:
    """Return a copy of the first member with the parameters and buffers of all members, `(K, ...)`."""
    parts: dict[int, Any] = {}
    for first, *others in zip(*(member.parameters() for member in members), strict=True):
        stacked = torch.stack([first.detach(), *(other.detach() for other in others)])
        parts[id(first)] = nn.Parameter(stacked, requires_grad=first.requires_grad)
    for first, *others in zip(*(member.buffers() for member in members), strict=True):
        parts[id(first)] = torch.stack([first, *others])
    stacked_module = copy_module(members[0], parts)
    for layer in stacked_module.modules():
        if isinstance(layer, nn.RNNBase):  # its own would flatten the weights as one member's
            vars(layer)["flatten_parameters"] = _do_nothing
    return stacked_module


def _do_nothing() -> None:
    """Replace `flatten_parameters`; a module-level function, so that it can be pickled."""


# The attribute of a layer with the names of its parameters and buffers that all members share: they have no member axis
SHARED = "_shared_tensors"


def shared_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a layer's own parameters and buffers that all members share."""
    return vars(layer).get(SHARED, ())


def all_shared_names(stacked: nn.Module) -> list[str]:
    """Return the names of a module's parameters and buffers that all members share."""
    return [f"{prefix}.{name}".lstrip(".") for prefix, layer in stacked.named_modules() for name in shared_names(layer)]


def take_members(stacked: nn.Module, index: int | slice | Sequence[int]) -> nn.Module:
    """Return a copy of a stacked module with some of its members; for an integer, a plain module."""
    parts: dict[int, Any] = {}
    for layer in stacked.modules():
        shared = shared_names(layer)
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                part = (tensor.detach() if name in shared else tensor.detach()[index]).clone()
                trained = tensor.requires_grad
                parts[id(tensor)] = nn.Parameter(part, trained) if isinstance(tensor, nn.Parameter) else part
    copied = copy_module(stacked, parts)
    if not isinstance(index, int):
        return copied
    for layer in copied.modules():
        vars(layer).pop("flatten_parameters", None)
        vars(layer).pop(SHARED, None)
    return recompute_weights(copied)


def named_tensors(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """Return parameters or buffers by name: tied ones under each name, those of a shared layer once."""
    # with all names of a shared layer, `functional_call` would leave its tensors in the module (torch 2.13)
    return {
        f"{prefix}.{name}".lstrip("."): tensor
        for prefix, layer in module.named_modules()
        for name, tensor in getattr(layer, f"named_{kind}")(recurse=False, remove_duplicate=False)
    }


@contextmanager
def replace_tensors(stacked: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily replace a module's parameters and buffers by name."""
    replaced = []
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


# Weights that a hook recomputes before every forward (old-style weight and spectral norm, pruning) are results of
# autograd and cannot be copied; a copy recomputes them.


def recomputed_names(layer: nn.Module, hooks: Iterable[Any] | None = None) -> list[str]:
    """Return the attributes of a layer that its hooks, or the given ones, compute before every forward."""
    names = []
    for hook in layer._forward_pre_hooks.values() if hooks is None else hooks:
        if isinstance(hook, (SpectralNorm, WeightNorm)):
            names.append(hook.name)
        elif isinstance(hook, BasePruningMethod):
            names.append(str(hook._tensor_name))
    return names


def copy_module(module: nn.Module, parts: dict[int, Any]) -> nn.Module:
    """Return a deep copy with objects replaced by id, and None for recomputed weights."""
    for layer in module.modules():
        for name in recomputed_names(layer):
            parts[id(vars(layer).get(name))] = None
    return copy.deepcopy(module, parts)  # deepcopy takes replacements from its memo


def recompute_weights(module: nn.Module) -> nn.Module:
    """Run the hooks that recompute weights and return the module."""
    for layer in module.modules():
        training, layer.training = layer.training, False  # spectral norm changes its buffers in training mode
        for hook in layer._forward_pre_hooks.values():
            if recomputed_names(layer, [hook]):
                hook(layer, ())
        layer.training = training
    return module
