"""The paper's networks, the encoder of tables, and their descriptions as JSON data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from torchace import _checks
from torchace.models.encoder import TableEncoder
from torchace.models.mlp import mlp
from torchace.models.resnet import CifarResNet, cifar_resnet

__all__ = ["CifarResNet", "TableEncoder", "build", "cifar_resnet", "mlp"]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cifar_resnet": cifar_resnet,
    "table_encoder": TableEncoder,
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
    arguments = dict(architecture)
    name = arguments.pop("name", None)
    _checks.check_choice(name, "name", tuple(NETWORKS))
    return NETWORKS[name](**arguments)
