"""Stacked members that are a chain of layers, computed without `vmap`.

Vectors are kept with the batch last, `(K, features, N)`: the first linear layer is then one product of all members'
weights `(K·out, in)` with the shared input, the others one batched product each, and every weight keeps the layout of
`nn.Linear`. Images are kept with the members among the channels, `(N, K·C, H, W)`: a convolution is a grouped one, and
whatever treats channels alone (batch norm, pooling) treats all members' channels at once. Measured against `vmap` of
the same layers and against other layouts: docs/LOG.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


# Layers that treat every channel of an image by itself.
CHANNELWISE = (
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.LPPool2d,
    nn.Dropout2d,
    nn.ZeroPad2d,
    nn.ReflectionPad2d,
    nn.Upsample,
)
RANDOM = (nn.Dropout, nn.Dropout2d)
CACHED = 1 << 21  # elements of the largest images that are computed together on a CPU


class Chain:
    """How to compute stacked members `(K, ...)` of such an architecture."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        parts = next(p for layer in layers for p in layer.parameters(recurse=False))
        self.num_members = parts.shape[0]
        self.takes_images = next(_is_spatial(layer) for layer in layers if type(layer) not in ELEMENTWISE)

    @classmethod
    def of(cls, stacked: nn.Module) -> Chain | None:
        """The chain of a stacked module, or None where it has another structure."""
        layers = _flattened(stacked)
        if layers is None or not any(type(layer) in (nn.Linear, nn.Conv2d) for layer in layers):
            return None
        flat = False
        for position, layer in enumerate(layers):
            if type(layer) is nn.Flatten:
                # of the input or of images: later, activations are flat already
                if (layer.start_dim, layer.end_dim) != (1, -1) or flat:
                    return None
                flat = True
            elif type(layer) is nn.Linear:
                if not flat and any(_is_spatial(before) for before in layers[:position]):
                    return None  # it would act on the last axis of an image
                flat = True
            elif type(layer) not in ELEMENTWISE and (flat or not _is_spatial(layer)):
                return None
        return cls(layers)

    def takes(self, x: object, *, own: bool) -> bool:
        """Whether the input is a batch of what the first layer is for; with `own`, one for each member or group."""
        if not isinstance(x, Tensor):
            return False
        if self.takes_images:
            return x.ndim == 4 + own
        if type(self.layers[0]) is nn.Flatten:
            return x.ndim >= 2 + own
        return x.ndim == 2 + own

    def __call__(self, x: Tensor, *, own: bool) -> Tensor:
        """The members' outputs, `(K, N, C, ...)`."""
        size = self._members_at_once(x, own=own)
        if size >= self.num_members:
            return self._outputs(x, slice(0, self.num_members), own=own)
        parts = [slice(k, min(k + size, self.num_members)) for k in range(0, self.num_members, size)]
        if any(getattr(layer, "inplace", False) for layer in self.layers):  # every part starts from the same input
            return torch.cat([self._outputs((x[part] if own else x).clone(), part, own=own) for part in parts])
        return torch.cat([self._outputs(x[part] if own else x, part, own=own) for part in parts])

    def _members_at_once(self, x: Tensor, *, own: bool) -> int:
        """How many members to compute together: on a CPU, no more images than stay in the cache."""
        if not self.takes_images or x.device.type != "cpu" or (own and len(x) != self.num_members):
            return self.num_members
        first = next((layer for layer in self.layers if isinstance(layer, nn.Conv2d)), None)
        if first is None:
            return self.num_members
        pixels = x.shape[-2] * x.shape[-1] // (first.stride[0] * first.stride[1])
        return max(1, CACHED // max(1, x.shape[-4] * first.out_channels * pixels))

    def _outputs(self, x: Tensor, members: slice, *, own: bool) -> Tensor:
        """The outputs of some members."""
        count = members.stop - members.start
        # `groups`: how many inputs h holds, one for all members, one for each group of them, or one for each
        groups = x.shape[0] if own else 1
        images = self.takes_images
        if images:
            h = x.movedim(0, 1).flatten(1, 2) if own else x  # (N, G·C, H, W)
        else:
            h = x.flatten(1 + own) if type(self.layers[0]) is nn.Flatten else x
            h = h.mT  # (D, N), or (G, D, N)
        for layer in self.layers:
            if isinstance(layer, (*RANDOM, nn.BatchNorm2d)) and groups < count:
                # before the first layer with weights: each member has its own mask and statistics
                h = _for_each(h, count, groups, images)
                groups = count
            if isinstance(layer, nn.Conv2d):
                h = _convolution(layer, h, groups, members)
                groups = count
            elif isinstance(layer, nn.BatchNorm2d):
                h = _batch_norm(layer, h, members)
            elif isinstance(layer, nn.Linear):
                h = _linear(layer, h, members)
                groups = count
            elif not isinstance(layer, nn.Flatten):
                h = layer(h)
            elif images:  # (N, G·C, H, W) to (D, N) or (G, D, N)
                images = False
                h = (
                    h.flatten(1).mT
                    if groups == 1 and not own
                    else h.unflatten(1, (groups, -1)).flatten(2).permute(1, 2, 0)
                )
        if images:
            return h.unflatten(1, (count, -1)).movedim(1, 0)
        return h.mT


def _is_spatial(layer: nn.Module) -> bool:
    """Whether a layer is one for images that can be computed for all members at once."""
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros"
    if type(layer) is nn.BatchNorm2d:
        return layer.momentum is not None  # None: a cumulative average, which depends on a count
    return type(layer) in CHANNELWISE and not getattr(layer, "return_indices", False)


def _convolution(layer: nn.Conv2d, h: Tensor, groups: int, members: slice) -> Tensor:
    """One convolution of all members: weights `(K, out, in, ...)`, `(N, G·in, H, W)` to `(N, K·out, ...)`."""
    weight, bias = _of(layer.weight, members), None if layer.bias is None else _of(layer.bias, members).flatten()
    if layer.groups > 1 and groups < len(weight):
        h, groups = _for_each(h, len(weight), groups, True), len(weight)
    weight = weight.flatten(0, 1)
    return F.conv2d(h, weight, bias, layer.stride, layer.padding, layer.dilation, groups * layer.groups)


def _of(stacked: Tensor, members: slice) -> Tensor:
    """Some members' part; the whole where it is all of them, which costs nothing in the backward."""
    return stacked if members.stop - members.start == len(stacked) else stacked[members]


def _batch_norm(layer: nn.BatchNorm2d, h: Tensor, members: slice) -> Tensor:
    """Batch norm of all members: each channel of each member has its own statistics anyway."""
    mean, var, weight, bias = (
        None if part is None else _of(part, members).view(-1)
        for part in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    )
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked[members] += 1
    by_batch = layer.training or mean is None
    running = layer.training or not by_batch  # in evaluation without statistics, nothing is updated
    return F.batch_norm(
        h, mean if running else None, var if running else None, weight, bias, by_batch, layer.momentum or 0.0, layer.eps
    )


def _linear(layer: nn.Linear, h: Tensor, members: slice) -> Tensor:
    """One linear layer of all members: weights `(K, out, in)`, input `(in, N)` or `(G, in, N)`; gives `(K, out, N)`."""
    weight, bias = _of(layer.weight, members), None if layer.bias is None else _of(layer.bias, members)
    if h.ndim == 2:
        rows = weight.flatten(0, 1)
        out = rows @ h if bias is None else torch.addmm(bias.reshape(-1, 1), rows, h)
        return out.unflatten(0, weight.shape[:2])
    num_members, out_features, in_features = weight.shape
    groups = h.shape[0]  # the members of a group are rows of one matrix
    rows = weight.view(groups, -1, in_features)
    out = rows @ h if bias is None else torch.baddbmm(bias.view(groups, -1, 1), rows, h)
    return out.view(num_members, out_features, -1)


def _for_each(h: Tensor, num_members: int, groups: int, images: bool) -> Tensor:
    """One input for each member out of `groups`; a copy, since a layer may change it in place."""
    if images:
        return h.unflatten(1, (groups, -1)).repeat_interleave(num_members // groups, 1).flatten(1, 2)
    if h.ndim == 2:
        return h.repeat(num_members, 1, 1)
    return h.repeat_interleave(num_members // groups, 0)


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
