"""Tensors of all members, and where their member axis is.

In a followed forward a tensor is plain (the same for all members, with a member's shape) or `Stacked` in one of three
layouts:

- `FIRST`: `(K, ...)`, or `(G, ...)` where G divides K and the first K/G members share the first entry, and so on;
- `CHANNELS`: `(N, K·C, ...)`, the input of grouped convolutions;
- `LAST`: `(K, D, N)` for vectors `(N, D)`, the output of linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST, CHANNELS, LAST = "first", "channels", "last"


class Stacked:
    """A tensor of all members as rules see it."""

    __slots__ = ("data", "layout")

    def __init__(self, data: Tensor, layout: str = FIRST) -> None:
        self.data, self.layout = data, layout

    @property
    def ndim(self) -> int:
        """A member's number of axes."""
        return self.data.ndim - (self.layout != CHANNELS)

    def shape(self, num_members: int) -> torch.Size:
        """Return a member's shape."""
        shape = self.data.shape
        if self.layout == FIRST:
            return shape[1:]
        if self.layout == LAST:
            return torch.Size((shape[2], shape[1]))
        return torch.Size((shape[0], shape[1] // num_members, *shape[2:]))


def to_first(value: Stacked, num_members: int) -> Tensor:
    """Return a view `(G, ...)`."""
    if value.layout == FIRST:
        return value.data
    if value.layout == LAST:
        return value.data.mT
    return value.data.unflatten(1, (num_members, -1)).movedim(1, 0)


def expand_groups(data: Tensor, num_members: int) -> Tensor:
    """Return `(K, ...)` of `(G, ...)`."""
    return data if data.shape[0] == num_members else data.repeat_interleave(num_members // data.shape[0], 0)


def to_members(value: Any, num_members: int) -> Tensor:
    """Return `(K, ...)` of a stacked or plain tensor; plain ones are repeated without a copy."""
    if isinstance(value, Stacked):
        return expand_groups(to_first(value, num_members), num_members)
    return value.expand(num_members, *value.shape)


def to_channels(value: Any, num_members: int) -> Tensor:
    """Return `(N, K·C, ...)` of a stacked or plain tensor whose member shape is `(N, C, ...)`."""
    if isinstance(value, Stacked) and value.layout == CHANNELS:
        return value.data
    data = to_members(value, num_members)
    merged = data.movedim(0, 1).flatten(1, 2)
    if data.ndim == 5 and data[0].is_contiguous(memory_format=torch.channels_last) and not data[0].is_contiguous():
        merged = merged.contiguous(memory_format=torch.channels_last)
    return merged


def pad_axes(data: Tensor, ndim: int) -> Tensor:
    """Return `(K, 1, ..., *shape)` such that a member has at least `ndim` axes."""
    missing = ndim + 1 - data.ndim
    return data if missing <= 0 else data.reshape(data.shape[0], *[1] * missing, *data.shape[1:])
