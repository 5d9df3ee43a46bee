"""The parts of residual networks, of several runs at once on a GPU: forward and backward in few passes.

In a training step a basic block reads or writes an image of its size 29 times, by count, against 44 with one operation
for each convolution, batch norm, relu and sum: what a kernel reads anyway is used for whatever is due (`conv_gpu`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchace.kernels.conv_gpu import (
    convolution,
    convolution_back,
    convolution_back_through_norm,
    places,
    weight_gradient,
)
from torchace.kernels.layers import Layer
from torchace.kernels.norm_gpu import norm_backward, normalised, statistics, sums


def stem(x: Tensor, layer: Layer) -> Tensor:
    """relu(norm(convolution(x))). No gradient goes to x.

    Args:
        x: Images `(R, B, H, W, C)`.
        layer: A 3x3 convolution, of the first channels of x if it has fewer.
    """
    return _Stem.apply(x, layer, *layer.trained)  # type: ignore[no-untyped-call]


def block(x: Tensor, first: Layer, second: Layer, projection: Layer | None, stride: int) -> Tensor:
    """A basic block: relu(norm(convolution(relu(norm(convolution(x))))) + shortcut(x)).

    Args:
        x: Images `(R, B, H, W, C)`.
        first: A 3x3 convolution with this stride.
        second: A 3x3 convolution.
        projection: A 1x1 convolution with this stride for the shortcut; None for the identity.
        stride: 1 or 2.
    """
    layers = (first, second) if projection is None else (first, second, projection)
    trained = (part for layer in layers for part in layer.trained)
    return _Block.apply(x, layers, stride, *trained)  # type: ignore[no-untyped-call]


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *trained: Tensor) -> Tensor:
        weight = layer.weight
        padded = weight.new_zeros(*weight.shape[:2], x.shape[4], *weight.shape[3:])
        padded[:, :, : weight.shape[2]] = weight
        y, parts = convolution(x, places(padded, x.dtype))
        norm = statistics(parts, layer.norm, _pixels(y))
        out = normalised(y, norm)
        ctx.save_for_backward(x, y, out, norm, padded)
        ctx.channels = weight.shape[2]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, out, norm, padded = ctx.saved_tensors
        g, parts = sums(grads[0].contiguous(), y, norm, after=out)
        dy, *dnorm = norm_backward(g, y, norm, parts)
        return None, None, weight_gradient(x, dy, padded)[:, :, : ctx.channels], *dnorm


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[Layer, ...], stride: int, *trained: Tensor) -> Tensor:
        first, second, *projection = layers
        k1, k2 = places(first.weight, x.dtype), places(second.weight, x.dtype)
        y1, parts = convolution(x, k1, stride)
        norm1 = statistics(parts, first.norm, _pixels(y1))
        h = normalised(y1, norm1)
        y2, parts = convolution(h, k2)
        norm2 = statistics(parts, second.norm, _pixels(y2))
        shortcut: tuple[Tensor, ...] = ()
        if not projection:
            out = normalised(y2, norm2, x)
        else:
            k3 = places(projection[0].weight, x.dtype)
            y3, parts = convolution(x, k3, stride)
            norm3 = statistics(parts, projection[0].norm, _pixels(y3))
            out = normalised(y2, norm2, y3, norm3)
            shortcut = (projection[0].weight, k3, y3, norm3)
        ctx.stride = stride
        ctx.save_for_backward(x, first.weight, k1, y1, norm1, h, second.weight, k2, y2, norm2, out, *shortcut)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, k1, y1, norm1, h, w2, k2, y2, norm2, out, *shortcut = ctx.saved_tensors
        stride: int = ctx.stride
        g, parts = sums(grads[0].contiguous(), y2, norm2, after=out)
        dy2, *dnorm2 = norm_backward(g, y2, norm2, parts)
        dw2 = weight_gradient(h, dy2, w2)
        dz, parts = convolution_back_through_norm(dy2, k2, y1, norm1)
        dy1, *dnorm1 = norm_backward(dz, y1, norm1, parts)
        dw1 = weight_gradient(x, dy1, w1, stride)
        both = (dw1, *dnorm1, dw2, *dnorm2)
        if not shortcut:
            return convolution_back(dy1, k1, x, add=g), None, None, *both
        w3, k3, y3, norm3 = shortcut
        _, parts = sums(g, y3, norm3)
        dy3, *dnorm3 = norm_backward(g, y3, norm3, parts)
        dw3 = weight_gradient(x, dy3, w3, stride)
        dx = convolution_back(dy1, k1, x, stride, add=convolution_back(dy3, k3, x, stride))
        return dx, None, None, *both, dw3, *dnorm3


def _pixels(y: Tensor) -> int:
    return y.shape[1:4].numel()
