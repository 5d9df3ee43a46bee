"""Stacked members that are a chain of linear layers and activations, as batched matrix products.

Activations are kept with the batch last, `(K, features, N)`: the first layer is then one product of all members'
weights `(K·out, in)` with the shared input, the others one batched product each, and every weight keeps the layout of
`nn.Linear`.
Measured against `vmap` of the same layers and against `(K, N, features)`: docs/LOG.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Layers that treat every number alike; exact types, since a subclass may do something else.
ELEMENTWISE = (
    nn.Identity,
    nn.Dropout,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Hardsigmoid,
)


class Chain:
    """How to compute stacked members `(K, ...)` of such an architecture."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, stacked: nn.Module) -> Chain | None:
        """The chain of a stacked module, or None where it has another structure."""
        layers = _flattened(stacked)
        if layers is None or not any(type(layer) is nn.Linear for layer in layers):
            return None
        # flattening is for the input alone: later, activations are already flat
        for position, layer in enumerate(layers):
            if type(layer) is nn.Flatten:
                if layer.start_dim != 1 or layer.end_dim != -1 or position != 0:
                    return None
            elif type(layer) is not nn.Linear and type(layer) not in ELEMENTWISE:
                return None
        return cls(layers)

    def takes(self, x: object, *, own: bool) -> bool:
        """Whether the input is one of rows: `(N, D)`, or `(G, N, D)` with batches of members' or groups' own."""
        if not isinstance(x, Tensor):
            return False
        if type(self.layers[0]) is nn.Flatten:
            return x.ndim >= 2 + own
        return x.ndim == 2 + own

    def __call__(self, x: Tensor, *, own: bool) -> Tensor:
        """The members' outputs, `(K, N, C)`."""
        h = x.flatten(1 + own) if type(self.layers[0]) is nn.Flatten else x
        h = h.mT  # (D, N), or (G, D, N) where G divides K
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                h = _linear(layer, h)
            elif not isinstance(layer, nn.Flatten):
                if isinstance(layer, nn.Dropout):  # even before the first layer, a mask for each member
                    h = _for_each(h, self.num_members)
                h = layer(h)
        return h.mT

    @property
    def num_members(self) -> int:
        return next(layer.weight.shape[0] for layer in self.layers if isinstance(layer, nn.Linear))


def _linear(layer: nn.Linear, h: Tensor) -> Tensor:
    """One linear layer of all members: weights `(K, out, in)`, input `(in, N)` or `(G, in, N)`; gives `(K, out, N)`."""
    weight, bias = layer.weight, layer.bias
    if h.ndim == 2:
        rows = weight.flatten(0, 1)
        out = rows @ h if bias is None else torch.addmm(bias.reshape(-1, 1), rows, h)
        return out.unflatten(0, weight.shape[:2])
    num_members, out_features, in_features = weight.shape
    groups = h.shape[0]  # the members of a group are rows of one matrix
    rows = weight.view(groups, -1, in_features)
    out = rows @ h if bias is None else torch.baddbmm(bias.view(groups, -1, 1), rows, h)
    return out.view(num_members, out_features, -1)


def _for_each(h: Tensor, num_members: int) -> Tensor:
    """`(K, D, N)` from `(D, N)` or `(G, D, N)`; a copy, unless there is nothing to repeat: dropout may be in place."""
    if h.ndim == 2:
        return h.repeat(num_members, 1, 1)
    return h if h.shape[0] == num_members else h.repeat_interleave(num_members // h.shape[0], 0)


def _flattened(module: nn.Module) -> list[nn.Module] | None:
    """The layers of nested `nn.Sequential`s in order; None where something is attached that a plan would miss."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    if type(module) is not nn.Sequential:
        return [module]
    layers: list[nn.Module] = []
    for child in module:
        inner = _flattened(child)
        if inner is None:
            return None
        layers += inner
    return layers
