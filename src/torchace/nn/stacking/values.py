"""Tensors of all members, and where their member axis is.

Inside a followed forward every tensor is one of three:

- plain: the same for all members, with the shape that a member sees;
- `FIRST`: `(K, ...)`, the member axis before the axes that a member sees. It may also be `(G, ...)` where G divides K:
  the first K/G members share the first entry, and so on;
- `CHANNELS`: `(N, K·C, ...)`, the members among the channels, which is what grouped convolutions take;
- `LAST`: `(K, D, N)` of vectors `(N, D)`, the batch last, which is what linear layers give.
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
        """The number of axes that a member sees."""
        return self.data.ndim - (self.layout != CHANNELS)

    def shape(self, num_members: int) -> torch.Size:
        """The shape that a member sees."""
        shape = self.data.shape
        if self.layout == FIRST:
            return shape[1:]
        if self.layout == LAST:
            return torch.Size((shape[2], shape[1]))
        return torch.Size((shape[0], shape[1] // num_members, *shape[2:]))


def to_first(value: Any, num_members: int) -> Tensor:
    """Return `(G, ...)` of a stacked tensor; a view."""
    if value.layout == FIRST:
        return value.data
    if value.layout == LAST:
        return value.data.mT
    return value.data.unflatten(1, (num_members, -1)).movedim(1, 0)


def for_each(data: Tensor, num_members: int) -> Tensor:
    """Return `(K, ...)` of `(G, ...)`: the entry of its group for each member."""
    if data.shape[0] == num_members:
        return data
    return data.repeat_interleave(num_members // data.shape[0], 0)


def to_members(value: Any, num_members: int) -> Tensor:
    """Return `(K, ...)` of any value, plain tensors repeated without a copy."""
    if isinstance(value, Stacked):
        return for_each(to_first(value, num_members), num_members)
    return value.expand(num_members, *value.shape)


def to_channels(value: Any, num_members: int) -> Tensor:
    """Return `(N, K·C, ...)` of any value that a member sees as `(N, C, ...)`."""
    if isinstance(value, Stacked) and value.layout == CHANNELS:
        return value.data
    data = to_members(value, num_members)
    together = data.movedim(0, 1).flatten(1, 2)
    if data.ndim == 5 and data[0].is_contiguous(memory_format=torch.channels_last) and not data[0].is_contiguous():
        together = together.contiguous(memory_format=torch.channels_last)
    return together
