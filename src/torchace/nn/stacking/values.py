"""Tensors of all members and their layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST = "first"  # (K, ...), or (G, ...) where G divides K and the first K/G members share the first entry, and so on
CHANNELS = "channels"  # (N, K·C, ...), for grouped convolutions
LAST = "last"  # (K, D, N) for vectors (N, D), the output of linear layers


class Stacked:
    """A tensor of all members; plain tensors are the same for all members and have a member's shape."""

    __slots__ = ("data", "layout")

    def __init__(self, data: Tensor, layout: str = FIRST) -> None:
        self.data, self.layout = data, layout

    @property
    def ndim(self) -> int:
        """Number of a member's axes."""
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
    """Repeat `(G, ...)` to `(K, ...)`."""
    return data if data.shape[0] == num_members else data.repeat_interleave(num_members // data.shape[0], 0)


def to_members(value: Any, num_members: int) -> Tensor:
    """Return a stacked or plain tensor as `(K, ...)`; plain ones are expanded without a copy."""
    if isinstance(value, Stacked):
        return expand_groups(to_first(value, num_members), num_members)
    return value.expand(num_members, *value.shape)


def to_channels(value: Any, num_members: int) -> Tensor:
    """Return a stacked or plain tensor with member shape `(N, C, ...)` as `(N, K·C, ...)`."""
    if isinstance(value, Stacked) and value.layout == CHANNELS:
        return value.data
    data = to_members(value, num_members)
    merged = data.movedim(0, 1).flatten(1, 2)
    if data.ndim == 5 and data[0].is_contiguous(memory_format=torch.channels_last) and not data[0].is_contiguous():
        merged = merged.contiguous(memory_format=torch.channels_last)
    return merged


def pad_axes(data: Tensor, ndim: int) -> Tensor:
    """Insert axes, `(K, 1, ..., *shape)`, up to `ndim` axes of a member."""
    missing = ndim + 1 - data.ndim
    return data if missing <= 0 else data.reshape(data.shape[0], *[1] * missing, *data.shape[1:])
