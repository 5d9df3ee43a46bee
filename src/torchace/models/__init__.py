"""The paper's networks, the encoder of tables, and their descriptions as JSON data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from torchace.models.encoder import TableEncoder, table_encoder
from torchace.models.mlp import hidden_widths, mlp
from torchace.models.resnet import CifarResNet, cifar_resnet

__all__ = ["CifarResNet", "TableEncoder", "build", "cifar_resnet", "count_layers", "mlp", "table_encoder"]

# name: (factory, number of layers with weights)
NETWORKS: dict[str, tuple[Callable[..., nn.Module], Callable[[Mapping[str, Any]], int]]] = {
    "mlp": (mlp, lambda spec: len(hidden_widths(spec["hidden"])) + 1),
    "cifar_resnet": (cifar_resnet, lambda spec: int(spec["depth"])),
    "table_encoder": (table_encoder, lambda spec: 1),
}


def build(architecture: Mapping[str, Any]) -> nn.Module:
    """Build a network, with new weights, from its `architecture`: its name and arguments as JSON types.

    Example:
        >>> network = mlp(64, 32, 10)
        >>> network.architecture
        {'name': 'mlp', 'in_features': 64, 'hidden': [32], 'num_classes': 10, 'dropout': 0.0}
        >>> build(network.architecture).fc
        Linear(in_features=32, out_features=10, bias=True)
    """
    arguments = check_architecture(architecture)
    return NETWORKS[architecture["name"]][0](**arguments)


def count_layers(architecture: Mapping[str, Any]) -> int:
    """Return the number of layers with weights in a description, a bound of the cost of building it."""
    check_architecture(architecture)
    return NETWORKS[architecture["name"]][1](architecture)


def check_architecture(architecture: object) -> dict[str, Any]:
    """Return the arguments in a description; refuse unknown names and arguments."""
    if not isinstance(architecture, Mapping):
        raise TypeError(f"Expected `architecture` to be a mapping, but got {type(architecture).__name__}.")
    arguments = dict(architecture)
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in NETWORKS:
        names = ", ".join(repr(known) for known in NETWORKS)
        raise ValueError(f"Expected the name of `architecture` to be one of {names}, but got {name!r}.")
    parameters = inspect.signature(NETWORKS[name][0]).parameters
    unknown = sorted(str(key) for key in arguments if key not in parameters)
    if unknown:
        raise ValueError(f"Expected arguments of {name} in `architecture`, but got {', '.join(unknown)}.")
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in arguments]
    if missing:
        raise ValueError(f"Expected `architecture` of {name} to have {', '.join(missing)}, but it does not.")
    return arguments
