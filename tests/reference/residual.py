"""The parts of a residual network for several runs, one run after another, as `torch.nn.functional` has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.kernels.layers import Layer


def stem(x: Tensor, layer: Layer) -> Tensor:
    channels = layer.weight.shape[2]
    return torch.stack([_last(_convolved(_first(x[r])[:, :channels], layer, r, 1).relu()) for r in range(len(x))])


def block(x: Tensor, first: Layer, second: Layer, projection: Layer | None, stride: int) -> Tensor:
    outputs = []
    for r in range(len(x)):
        images = _first(x[r])
        h = _convolved(_convolved(images, first, r, stride).relu(), second, r, 1)
        shortcut = images if projection is None else _convolved(images, projection, r, stride)
        outputs.append(_last((h + shortcut).relu()))
    return torch.stack(outputs)


def _convolved(images: Tensor, layer: Layer, run: int, stride: int) -> Tensor:
    """A convolution and its batch norm in training mode; running statistics change in place."""
    weight, norm = layer.weight[run], layer.norm
    y = F.conv2d(images, weight, None, stride, weight.shape[2] // 2)
    statistics = norm.running_mean[run], norm.running_var[run]
    return F.batch_norm(y, *statistics, norm.weight[run], norm.bias[run], True, norm.momentum, norm.eps)


def _first(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2)


def _last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)
