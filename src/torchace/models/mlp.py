"""Fully connected networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from torchace import _checks


def mlp(
    in_features: int, hidden: int | Sequence[int], num_classes: int | None, *, dropout: float = 0.0
) -> nn.Sequential:
    """Return a fully connected ReLU network; the paper's MNIST network has one hidden layer.

    An `nn.Sequential` of `flatten`, `linear1`, `relu1`, `linear2`, ..., `fc`, with `architecture` for `build`.

    Args:
        in_features: The number of inputs, the product of all axes but the first.
        hidden: The width of the hidden layer, or of several; `()` for a linear classifier.
        num_classes: C; None for a trunk without the classifier `fc`, which returns `num_features` features.
        dropout: The dropout probability of hidden units.

    Returns:
        A module that maps `(N, ...)` to logits `(N, C)`.

    Example:
        >>> network = mlp(64, (32, 16), 10)
        >>> list(dict(network.named_children()))
        ['flatten', 'linear1', 'relu1', 'linear2', 'relu2', 'fc']
        >>> network(torch.zeros(5, 8, 8)).shape
        torch.Size([5, 10])
        >>> trunk = mlp(64, 32, num_classes=None)
        >>> trunk.num_features
        32
    """
    _checks.check_count(in_features, "in_features")
    widths = list(hidden) if isinstance(hidden, Sequence) else [hidden]
    for width in widths:
        _checks.check_count(width, "hidden")
    if num_classes is not None:
        _checks.check_count(num_classes, "num_classes")
    _checks.check_fraction(dropout, "dropout")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    features = in_features
    for i, width in enumerate(widths, start=1):
        layers[f"linear{i}"] = nn.Linear(features, width)
        layers[f"relu{i}"] = nn.ReLU()
        if dropout > 0:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
        features = width
    if num_classes is not None:
        layers["fc"] = nn.Linear(features, num_classes)
    network = nn.Sequential(layers)
    network.num_features = features  # type: ignore[assignment]
    network.architecture = {  # type: ignore[assignment]
        "name": "mlp",
        "in_features": in_features,
        "hidden": widths,
        "num_classes": num_classes,
        "dropout": float(dropout),
    }
    return network
