"""Batch norm of several runs at once on a GPU, in Triton: the parts around the convolutions of `conv_gpu`.

Images are `(R, B, H, W, C)`, as matrices `(R, pixels, C)`. What a norm is after its batch is known is one tensor
`(R, 4, C)`: mean, 1/deviation, scale, shift, so that it maps y to scale·y + shift. Sums over pixels come in parts, one
for each tile, `(R, tiles, 2, C)`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.conv_gpu import Parts
from torchace.kernels.layers import Norm

TILES_AT_ONCE = 1024  # read at once by a kernel that adds up parts
CHANNELS_AT_ONCE = 16


@triton.jit
def _statistics(
    partial,
    weight,
    bias,
    running_mean,
    running_var,
    norm,
    pixels,
    TILES: tl.constexpr,
    MOMENTUM: tl.constexpr,
    EPS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From means and sums of squares of tiles to the batch's, for some channels of a run."""
    run = tl.program_id(0)
    channel = tl.program_id(1) * SOME + tl.arange(0, SOME)
    partial += run * TILES * 2 * CHANNELS + channel[None, :]
    total = tl.zeros((SOME,), partial.dtype.element_ty)
    for start in range(0, TILES, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        count = tl.minimum(TILE, tl.maximum(pixels - tile * TILE, 0))
        means = tl.load(partial + tile[:, None] * 2 * CHANNELS, mask=(tile < TILES)[:, None], other=0.0)
        total += tl.sum(means * count[:, None], 0)
    mean = total / pixels
    squares = tl.zeros((SOME,), partial.dtype.element_ty)
    for start in range(0, TILES, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        count = tl.minimum(TILE, tl.maximum(pixels - tile * TILE, 0))
        there = (tile < TILES)[:, None]
        off = tl.load(partial + tile[:, None] * 2 * CHANNELS, mask=there, other=0.0) - mean[None, :]
        within = tl.load(partial + tile[:, None] * 2 * CHANNELS + CHANNELS, mask=there, other=0.0)
        squares += tl.sum(within + off * off * count[:, None], 0)
    place = run * CHANNELS + channel
    old_mean = tl.load(running_mean + place)
    old_var = tl.load(running_var + place)
    tl.store(running_mean + place, old_mean + MOMENTUM * (mean - old_mean))
    tl.store(running_var + place, old_var + MOMENTUM * (squares / (pixels - 1) - old_var))  # unbiased, as torch's
    inverse = 1 / tl.sqrt(squares / pixels + EPS)
    scale = tl.load(weight + place) * inverse
    norm += run * 4 * CHANNELS + channel
    tl.store(norm, mean)
    tl.store(norm + CHANNELS, inverse)
    tl.store(norm + 2 * CHANNELS, scale)
    tl.store(norm + 3 * CHANNELS, tl.load(bias + place) - mean * scale)


@triton.jit
def _normalised(
    y, norm, other, other_norm, out, pixels, RESIDUAL: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    """relu(norm(y)), relu(norm(y) + other) or relu(norm(y) + norm(other)): RESIDUAL 0, 1, 2."""
    run = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    inside = (pixel < pixels)[:, None]
    place = run * pixels * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    scale = tl.load(norm + (run * 4 + 2) * CHANNELS + channel)
    shift = tl.load(norm + (run * 4 + 3) * CHANNELS + channel)
    value = tl.load(y + place, mask=inside).to(scale.dtype) * scale[None, :] + shift[None, :]
    if RESIDUAL == 1:
        value += tl.load(other + place, mask=inside).to(scale.dtype)
    if RESIDUAL == 2:
        scale = tl.load(other_norm + (run * 4 + 2) * CHANNELS + channel)
        shift = tl.load(other_norm + (run * 4 + 3) * CHANNELS + channel)
        value += tl.load(other + place, mask=inside).to(scale.dtype) * scale[None, :] + shift[None, :]
    value = tl.where(value <= 0, 0.0, value)  # keeps NaN
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sums(g, out, y, norm, masked, partial, pixels, MASK: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of a gradient, and of it times y - mean, over a tile. MASK: a relu's output says where it is 0."""
    tile = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    pixel = tile * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    inside = (pixel < pixels)[:, None]
    place = run * pixels * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    gradient = tl.load(g + place, mask=inside, other=0.0)
    if MASK:
        gradient = tl.where(tl.load(out + place, mask=inside, other=0.0) <= 0, 0.0, gradient).to(g.dtype.element_ty)
        tl.store(masked + place, gradient, mask=inside)
    mean = tl.load(norm + run * 4 * CHANNELS + channel)
    off = tl.load(y + place, mask=inside, other=0.0).to(mean.dtype) - mean[None, :]
    value = gradient.to(mean.dtype)
    partial += (run * tl.num_programs(0) + tile) * 2 * CHANNELS + channel
    tl.store(partial, tl.sum(value, 0))
    tl.store(partial + CHANNELS, tl.sum(value * off, 0))


@triton.jit
def _coefficients(
    partial,
    norm,
    dweight,
    dbias,
    slope,
    pixels,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of a norm's weight and bias, and slope and constant for `_spread`."""
    run = tl.program_id(0)
    channel = tl.program_id(1) * SOME + tl.arange(0, SOME)
    partial += run * TILES * 2 * CHANNELS + channel[None, :]
    total = tl.zeros((SOME,), partial.dtype.element_ty)
    product = tl.zeros((SOME,), partial.dtype.element_ty)
    for start in range(0, TILES, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        there = (tile < TILES)[:, None]
        total += tl.sum(tl.load(partial + tile[:, None] * 2 * CHANNELS, mask=there, other=0.0), 0)
        product += tl.sum(tl.load(partial + tile[:, None] * 2 * CHANNELS + CHANNELS, mask=there, other=0.0), 0)
    inverse = tl.load(norm + (run * 4 + 1) * CHANNELS + channel)
    scale = tl.load(norm + (run * 4 + 2) * CHANNELS + channel)
    tl.store(dbias + run * CHANNELS + channel, total)
    tl.store(dweight + run * CHANNELS + channel, product * inverse)
    tl.store(slope + run * 2 * CHANNELS + channel, -scale * inverse * inverse * product / pixels)
    tl.store(slope + (run * 2 + 1) * CHANNELS + channel, -scale * total / pixels)


@triton.jit
def _spread(g, y, norm, slope, dy, pixels, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """scale·g + slope·(y - mean) + constant."""
    run = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    inside = (pixel < pixels)[:, None]
    place = run * pixels * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    mean = tl.load(norm + run * 4 * CHANNELS + channel)
    scale = tl.load(norm + (run * 4 + 2) * CHANNELS + channel)
    steep = tl.load(slope + run * 2 * CHANNELS + channel)
    constant = tl.load(slope + (run * 2 + 1) * CHANNELS + channel)
    off = tl.load(y + place, mask=inside).to(mean.dtype) - mean[None, :]
    value = tl.load(g + place, mask=inside).to(mean.dtype) * scale[None, :] + off * steep[None, :] + constant[None, :]
    tl.store(dy + place, value.to(dy.dtype.element_ty), mask=inside)


PIXELS = {16: 256, 32: 128, 64: 128}  # of a tile; measured on an H200 (docs/LOG.md)


def statistics(parts: Parts, norm: Norm, pixels: int) -> Tensor:
    """What the norm of a batch is, `(R, 4, C)`; the running statistics go on."""
    runs, tiles, _, channels = parts.values.shape
    normed = parts.values.new_empty(runs, 4, channels)
    some = min(channels, CHANNELS_AT_ONCE)
    _statistics[(runs, channels // some)](
        parts.values,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        normed,
        pixels,
        tiles,
        norm.momentum,
        norm.eps,
        parts.pixels,
        channels,
        some,
        _tiles_at_once(tiles),
        num_warps=_warps(tiles),
    )
    return normed


def normalised(y: Tensor, norm: Tensor, other: Tensor | None = None, other_norm: Tensor | None = None) -> Tensor:
    """relu(norm(y)), plus `other` or `other_norm` of it inside the relu."""
    out = torch.empty_like(y)
    residual = 0 if other is None else 1 if other_norm is None else 2
    grid, pixels, channels, block = _tiled(y)
    _normalised[grid](y, norm, other, other_norm, out, pixels, residual, channels, block)
    return out


def sums(g: Tensor, y: Tensor, norm: Tensor, after: Tensor | None = None) -> tuple[Tensor, Parts]:
    """A gradient's sums for the backward of the norm of y; with `after`, a relu's output, masked by it first."""
    masked = g if after is None else torch.empty_like(g)
    grid, pixels, channels, block = _tiled(y)
    parts = norm.new_empty(len(y), grid[0], 2, channels)
    _sums[grid](g, after, y, norm, masked, parts, pixels, after is not None, channels, block)
    return masked, Parts(parts, block)


def norm_backward(g: Tensor, y: Tensor, norm: Tensor, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y and of the norm's weight and bias, from that of norm(y) and its sums."""
    runs, tiles, _, channels = parts.values.shape
    grid, pixels, _, block = _tiled(y)
    dweight, dbias = norm.new_empty(2, runs, channels)
    slope = norm.new_empty(runs, 2, channels)
    some = min(channels, CHANNELS_AT_ONCE)
    _coefficients[(runs, channels // some)](
        parts.values,
        norm,
        dweight,
        dbias,
        slope,
        pixels,
        tiles,
        channels,
        some,
        _tiles_at_once(tiles),
        num_warps=_warps(tiles),
    )
    dy = torch.empty_like(y)
    _spread[grid](g, y, norm, slope, dy, pixels, channels, block)
    return dy, dweight, dbias


def _tiled(y: Tensor) -> tuple[tuple[int, int], int, int, int]:
    channels, pixels = y.shape[4], y.shape[1:4].numel()
    block = PIXELS[channels]
    return (-(-pixels // block), len(y)), pixels, channels, block


def _tiles_at_once(tiles: int) -> int:
    return min(TILES_AT_ONCE, triton.next_power_of_2(tiles))


def _warps(tiles: int) -> int:
    return 16 if tiles > 256 else 4
