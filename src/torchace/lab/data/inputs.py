"""Inputs of a network: one tensor, or a tuple or dict of tensors, each with one entry a sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Inputs = Any  # Tensor, tuple[Tensor, ...] or dict[str, Tensor]


def map_inputs(function: Callable[..., Any], *inputs: Inputs) -> Inputs:
    """Apply a function to every tensor of inputs of one structure."""
    if isinstance(inputs[0], Tensor):
        return function(*inputs)
    return tree_map(function, *inputs)


def convert_inputs(function: Callable[[Any], Tensor], x: Any) -> Inputs:
    """Apply a function to data that are no tensors yet: to each value of a dict or tuple, or of a list of arrays."""
    if isinstance(x, list) and x and all(isinstance(value, Tensor | np.ndarray) for value in x):
        x = tuple(x)
    if isinstance(x, Mapping):
        return {str(name): function(value) for name, value in x.items()}
    return tuple(function(value) for value in x) if isinstance(x, tuple) else function(x)


def input_tensors(x: Inputs) -> list[Tensor]:
    """Return the tensors of inputs, in order."""
    return [x] if isinstance(x, Tensor) else tree_leaves(x)


def as_arguments(network: nn.Module, x: Inputs) -> list[Any]:
    """Return inputs as positional arguments of a network: a tuple's tensors in order, a dict's by name.

    A network whose `forward` has no parameters of these names gets the dict itself.
    """
    if isinstance(x, tuple):
        return list(x)
    if not isinstance(x, dict):
        return [x]
    parameters = inspect.signature(network.forward).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    if not set(x) <= {parameter.name for parameter in named}:
        return [x]
    last = max(i for i, parameter in enumerate(named) if parameter.name in x)
    missing = [p.name for p in named[: last + 1] if p.name not in x and p.default is p.empty]
    if missing:
        raise TypeError(
            f"Expected an input {missing[0]!r} for the network's forward, but the data has {', '.join(map(repr, x))}. "
            "Add it to the data, or give the parameter a default."
        )
    return [x.get(parameter.name, parameter.default) for parameter in named[: last + 1]]
