"""Weights that a hook computes before every forward: those of old-style weight norm and of pruning.

Such a weight is a plain attribute, made from parameters and buffers. It cannot be copied (autograd made it) and need
not be: a copy computes its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm


def recomputed_names(layer: nn.Module, hooks: Iterable[Any] | None = None) -> list[str]:
    """The attributes of a layer that its hooks, or some of them, compute before every forward."""
    names = []
    for hook in layer._forward_pre_hooks.values() if hooks is None else hooks:
        if isinstance(hook, WeightNorm):
            names.append(hook.name)
        elif isinstance(hook, BasePruningMethod):
            names.append(str(hook._tensor_name))
    return names


def copy_module(module: nn.Module, parts: dict[int, Any]) -> nn.Module:
    """A deep copy with other objects in the place of those with these ids, and None for recomputed weights."""
    for layer in module.modules():
        for name in recomputed_names(layer):
            parts[id(vars(layer).get(name))] = None
    return copy.deepcopy(module, parts)  # deepcopy takes what is in its memo as the copy


def recompute(module: nn.Module) -> nn.Module:
    """The module, its recomputed weights made from what it holds now."""
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            if recomputed_names(layer, [hook]):
                hook(layer, ())
    return module
