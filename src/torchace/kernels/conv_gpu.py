"""Convolutions of several runs at once on a GPU, in Triton.

Images are `(R, B, H, W, C)`: R runs that share nothing, channels last, so that a tile of pixels of one run is a matrix
`(pixels, C)` that lies together. A convolution is one product of such a matrix with `(C, C')` for every place of its
window. What follows or precedes it in the network and needs the same tile is done on the way: the statistics of a
batch norm, the gradient through one, a sum. Sums over tiles are written down tile by tile and added up by whoever reads
them, in a fixed order: the same bits every time.

Weights are `(R, size·size, C, C')` for `(R, C', C, size, size)`; see `places`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# What is done with a tile of the result; those from STATISTICS on leave sums behind.
PLAIN = tl.constexpr(0)
ADDED = tl.constexpr(1)  # `other` is added
STATISTICS = tl.constexpr(2)  # its mean and sum of squares, for the batch norm that follows
THROUGH_NORM = tl.constexpr(3)  # it is the gradient of relu(norm(other)): masked, and summed for the norm's backward


@triton.jit
def _seen(
    x,
    pixel,
    inside,
    inner,
    place,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT_IN: tl.constexpr,
    WIDTH_IN: tl.constexpr,
    CHANNELS_IN: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BACK: tl.constexpr,
):
    """What pixels see at a place of the window, `(pixels, C)`; BACK: the pixels that see them there."""
    column = pixel % WIDTH
    row = pixel // WIDTH % HEIGHT
    down = place // SIZE - SIZE // 2
    across = place % SIZE - SIZE // 2
    if BACK:
        down = -down
        across = -across
    if STRIDE == 1:
        there = inside & (row + down >= 0) & (row + down < HEIGHT) & (column + across >= 0) & (column + across < WIDTH)
        source = pixel + (down * WIDTH + across)
    else:
        image = pixel // (WIDTH * HEIGHT)
        if BACK:
            there = inside & ((row + down) % STRIDE == 0) & ((column + across) % STRIDE == 0)
            there &= (row + down >= 0) & (column + across >= 0)
            source_row = (row + down) // STRIDE
            source_column = (column + across) // STRIDE
        else:
            source_row = row * STRIDE + down
            source_column = column * STRIDE + across
            there = inside & (source_row >= 0) & (source_column >= 0)
        there &= (source_row < HEIGHT_IN) & (source_column < WIDTH_IN)
        source = (image * HEIGHT_IN + source_row) * WIDTH_IN + source_column
    return tl.load(x + source[:, None] * CHANNELS_IN + inner[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _convolution(
    x,
    weight,
    y,
    partial,
    other,
    norm,
    pixels,
    pixels_in,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT_IN: tl.constexpr,
    WIDTH_IN: tl.constexpr,
    CHANNELS_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BACK: tl.constexpr,
    EPILOGUE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of pixels of one run. BACK: from the gradient of the result, `CHANNELS_IN`, to that of the input."""
    tile = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    pixel = tile * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < pixels
    inner = tl.arange(0, CHANNELS_IN)
    outer = tl.arange(0, CHANNELS)
    x += run * pixels_in * CHANNELS_IN
    weight += run * SIZE * SIZE * CHANNELS_IN * CHANNELS
    if BACK:  # the matrix of a place, transposed
        weight += inner[:, None] + outer[None, :] * CHANNELS_IN
    else:
        weight += inner[:, None] * CHANNELS + outer[None, :]

    total = tl.zeros((BLOCK, CHANNELS), tl.float64 if EXACT else tl.float32)
    for place in range(SIZE * SIZE):
        a = _seen(x, pixel, inside, inner, place, HEIGHT, WIDTH, HEIGHT_IN, WIDTH_IN, CHANNELS_IN, SIZE, STRIDE, BACK)
        b = tl.load(weight + place * CHANNELS_IN * CHANNELS)
        total = tl.dot(a, b, total, out_dtype=total.dtype)

    place_of = pixel[:, None] * CHANNELS + outer[None, :]
    of_run = run * pixels * CHANNELS
    if EPILOGUE == ADDED:
        total += tl.load(other + of_run + place_of, mask=inside[:, None], other=0.0).to(total.dtype)
    if EPILOGUE == THROUGH_NORM:
        before = tl.load(other + of_run + place_of, mask=inside[:, None], other=0.0).to(total.dtype)
        norm += run * 4 * CHANNELS + outer
        mean = tl.load(norm)
        scale = tl.load(norm + 2 * CHANNELS)
        shift = tl.load(norm + 3 * CHANNELS)
        # ~(v <= 0): NaN goes on
        total = tl.where(before * scale[None, :] + shift[None, :] <= 0, 0.0, total)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + of_run + place_of, rounded, mask=inside[:, None])
    if EPILOGUE >= STATISTICS:
        partial += (run * tl.num_programs(0) + tile) * 2 * CHANNELS + outer
        value = rounded.to(total.dtype)
        first = tl.sum(value, 0)
        if EPILOGUE == STATISTICS:
            first /= tl.minimum(BLOCK, pixels - tile * BLOCK)
            off = tl.where(inside[:, None], value - first[None, :], 0.0)
            second = tl.sum(off * off, 0)
        else:
            second = tl.sum(value * (before - mean[None, :]), 0)
        tl.store(partial, first)
        tl.store(partial + CHANNELS, second)


@triton.jit
def _weight_gradient(
    x,
    dy,
    partial,
    pixels,
    pixels_in,
    STEPS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT_IN: tl.constexpr,
    WIDTH_IN: tl.constexpr,
    CHANNELS_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over some of a run's pixels, of all rows of the window; of one of its columns, or of all.

    All columns at once: instead of x, dy is taken from the neighbours. So each is read three times, not x nine times.
    """
    part = tl.program_id(0)
    own_column = tl.program_id(1)
    run = tl.program_id(2).to(tl.int64)
    x += run * pixels_in * CHANNELS_IN
    dy += run * pixels * CHANNELS
    inner = tl.arange(0, ROWS * CHANNELS_IN)
    place_row = inner // CHANNELS_IN
    channel_in = inner % CHANNELS_IN
    outer = tl.arange(0, COLUMNS * CHANNELS)
    place_column = outer // CHANNELS + own_column
    channel = outer % CHANNELS
    total = tl.zeros((ROWS * CHANNELS_IN, COLUMNS * CHANNELS), tl.float64 if EXACT else tl.float32)
    for step in range(STEPS):
        pixel = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = pixel < pixels
        column = pixel % WIDTH
        row = pixel // WIDTH % HEIGHT
        image = pixel // (WIDTH * HEIGHT)

        source_row = row[:, None] * STRIDE + place_row[None, :] - SIZE // 2  # (pixels, rows · channels)
        there = inside[:, None] & (source_row >= 0) & (source_row < HEIGHT_IN) & (place_row < SIZE)[None, :]
        if COLUMNS == 1:
            source_column = column * STRIDE + own_column - SIZE // 2
            there &= ((source_column >= 0) & (source_column < WIDTH_IN))[:, None]
            shifted = column[:, None]
            known = inside[:, None]
        else:
            source_column = column
            shifted = column[:, None] + SIZE // 2 - place_column[None, :]
            known = inside[:, None] & (shifted >= 0) & (shifted < WIDTH) & (place_column < SIZE)[None, :]
        source = (image[:, None] * HEIGHT_IN + source_row) * WIDTH_IN + source_column[:, None]
        a = tl.load(x + source * CHANNELS_IN + channel_in[None, :], mask=there, other=0.0)
        place = (pixel - column)[:, None] + shifted
        b = tl.load(dy + place * CHANNELS + channel[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(a), b, total, out_dtype=total.dtype)
    # (R, parts, size, size, C, C')
    partial += (run * tl.num_programs(0) + part) * SIZE * SIZE * CHANNELS_IN * CHANNELS
    place = place_row[:, None] * SIZE + place_column[None, :]
    partial += (place * CHANNELS_IN + channel_in[:, None]) * CHANNELS + channel[None, :]
    tl.store(partial, total, mask=(place_row < SIZE)[:, None] & (place_column < SIZE)[None, :])


@triton.jit
def _added(
    partial,
    gradient,
    along_outer,
    along_inner,
    along_row,
    along_column,
    PARTS: tl.constexpr,
    CHANNELS_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Parts `(R, parts, size, size, C, C')` summed into a gradient `(R, C', C, size, size)` with these strides."""
    run = tl.program_id(1)
    numbers: tl.constexpr = SIZE * SIZE * CHANNELS_IN * CHANNELS
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial += run.to(tl.int64) * PARTS * numbers
    total = tl.zeros((BLOCK,), partial.dtype.element_ty)
    for start in range(0, PARTS, TOGETHER):
        part = start + tl.arange(0, TOGETHER)
        there = (part < PARTS)[:, None] & (number < numbers)[None, :]
        total += tl.sum(tl.load(partial + part[:, None] * numbers + number[None, :], mask=there, other=0.0), 0)
    outer = number % CHANNELS
    inner = number // CHANNELS % CHANNELS_IN
    place = number // (CHANNELS * CHANNELS_IN)
    at = run * numbers + outer * along_outer + inner * along_inner
    at += place // SIZE * along_row + place % SIZE * along_column
    tl.store(gradient + at, total, mask=number < numbers)


class Tile(NamedTuple):
    """How a kernel is launched: pixels at once, warps, and loads under way."""

    pixels: int
    warps: int
    stages: int


class Parts(NamedTuple):
    """Two sums a channel for every tile of pixels, `(R, tiles, 2, C)`, and how many pixels a tile has."""

    values: Tensor
    pixels: int


# Measured on an H200 (docs/LOG.md), by the number of channels that a pixel has.
CONVOLUTION = {16: Tile(256, 4, 2), 32: Tile(128, 4, 3), 64: Tile(128, 4, 3)}
WEIGHT_GRADIENT = {16: Tile(64, 4, 3), 32: Tile(64, 8, 3), 64: Tile(32, 4, 3)}
PARTS = {16: 64, 32: 32, 64: 16}  # into how many a run's sum over pixels is cut
PARTS_AT_ONCE, NUMBERS = 16, 128  # of a tile that is added up
CHANNELS_TOGETHER = 32  # up to so many, a weight's gradient is summed for all places at once


def places(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights `(R, C', C, size, size)` as matrices `(R, size·size, C, C')`, one for each place of the window."""
    runs, outer, inner, size, _ = weight.shape
    matrices = torch.empty(runs, size, size, inner, outer, dtype=dtype, device=weight.device)
    return matrices.copy_(weight.permute(0, 3, 4, 2, 1)).flatten(1, 2)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def convolution(x: Tensor, weight: Tensor, stride: int = 1) -> tuple[Tensor, Parts]:
    """A convolution with padding (size - 1) / 2, and for each tile the mean and the sum of squares around it.

    Args:
        x: `(R, B, H, W, C)`.
        weight: `(R, size·size, C, C')`.
        stride: 1 or 2.
    """
    runs, batch, height, width, _ = x.shape
    y = x.new_empty(runs, batch, -(-height // stride), -(-width // stride), weight.shape[3])
    return y, _launched(x, weight, y, stride, back=False, epilogue=STATISTICS)


def convolution_back(dy: Tensor, weight: Tensor, like: Tensor, stride: int = 1, *, add: Tensor | None = None) -> Tensor:
    """The gradient of a convolution's input, shaped `like` it; `add` is added."""
    dx = torch.empty_like(like)
    _launched(dy, weight, dx, stride, back=True, epilogue=PLAIN if add is None else ADDED, other=add)
    return dx


def convolution_back_through_norm(dy: Tensor, weight: Tensor, before: Tensor, norm: Tensor) -> tuple[Tensor, Parts]:
    """The gradient of norm(before), whose relu was the convolution's input, and its sums for the norm's backward."""
    dz = torch.empty_like(before)
    return dz, _launched(dy, weight, dz, 1, back=True, epilogue=THROUGH_NORM, other=before, norm=norm)


def weight_gradient(x: Tensor, dy: Tensor, like: Tensor, stride: int = 1) -> Tensor:
    """The gradient of weights `(R, C', C, size, size)`, laid out as they are."""
    runs, batch, height, width, inner = x.shape
    outer, size = dy.shape[4], like.shape[3]
    most = max(inner, outer)
    tile = WEIGHT_GRADIENT[most]
    rows = triton.next_power_of_2(size)
    columns = rows if stride == 1 and most <= CHANNELS_TOGETHER else 1  # more would not fit the registers
    groups = size if columns == 1 else 1
    pixels = dy.shape[1:4].numel()
    steps = -(-pixels // (tile.pixels * PARTS[most]))
    parts = -(-pixels // (tile.pixels * steps))
    partial = dy.new_empty(runs, parts, size, size, inner, outer, dtype=accumulated(x.dtype))
    _weight_gradient[(parts, groups, runs)](
        x,
        dy,
        partial,
        pixels,
        batch * height * width,
        steps,
        *dy.shape[2:4],
        height,
        width,
        inner,
        outer,
        size,
        stride,
        rows,
        columns,
        x.dtype == torch.float64,
        tile.pixels,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    gradient = torch.empty_like(like)
    _added[(-(-partial[0, 0].numel() // NUMBERS), runs)](
        partial, gradient, *gradient.stride()[1:], parts, inner, outer, size, PARTS_AT_ONCE, NUMBERS
    )
    return gradient


def _launched(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    stride: int,
    *,
    back: bool,
    epilogue: tl.constexpr,
    other: Tensor | None = None,
    norm: Tensor | None = None,
) -> Parts:
    runs, batch, height, width, channels = y.shape
    size = {1: 1, 9: 3}[weight.shape[1]]
    tile = CONVOLUTION[max(channels, x.shape[4])]
    pixels = batch * height * width
    tiles = -(-pixels // tile.pixels)
    partial = x.new_empty(runs, tiles, 2, channels, dtype=accumulated(x.dtype))
    _convolution[(tiles, runs)](
        x,
        weight,
        y,
        partial,
        other,
        norm,
        pixels,
        x.shape[1:4].numel(),
        height,
        width,
        *x.shape[2:5],
        channels,
        size,
        stride,
        back,
        epilogue,
        x.dtype == torch.float64,
        tile.pixels,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return Parts(partial, tile.pixels)
