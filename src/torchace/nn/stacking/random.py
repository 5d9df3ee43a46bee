"""Random numbers that each member draws for itself."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """Where a followed forward takes its random numbers from."""

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers in [0, 1) of shape `(K, ...)`."""


class Half:
    """Always 0.5: makes two computations of a network with random layers comparable."""

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, 0.5, dtype=dtype, device=device)


class KeyedDraws:
    """Numbers that are a function of (seed, step, call, member, position) alone.

    Example:
        >>> members = torch.tensor([0, 1])
        >>> draws = KeyedDraws.of(torch.tensor([7, 7]), members, torch.tensor(0))
        >>> both = draws.uniform((2, 3), torch.float32, torch.device("cpu"))
        >>> alone = KeyedDraws.of(torch.tensor([7]), members[1:], torch.tensor(0))
        >>> torch.equal(both[1:], alone.uniform((1, 3), torch.float32, torch.device("cpu")))
        True
    """

    def __init__(self, key: Tensor, members: Tensor) -> None:
        self.key, self.members, self.calls = key, members, 0

    @classmethod
    def of(cls, seeds: Tensor, members: Tensor, step: Tensor) -> KeyedDraws:
        """Draws for one step.

        Args:
            seeds: One seed for each member, `(K,)`; members of one run have the run's.
            members: Each member's number in its run, `(K,)`.
            step: The step, a tensor of one number: a CUDA graph reads it anew at every replay.
        """
        return cls(_mix(_mix(_mix(seeds) + (seeds >> 32)) + step), members)

    @property
    def key_and_members(self) -> tuple[Tensor, Tensor]:
        """The tensors that these draws are made from."""
        return self.key, self.members

    def __getitem__(self, part: slice) -> KeyedDraws:
        """The draws of some of the members."""
        return KeyedDraws(self.key[part], self.members[part])

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls += 1
        key = _mix(self.key + self.calls * 0x9E3779B9)
        key = _mix(key + self.members * 0x85EBCA6B).view(-1, 1)  # (K, 1)
        position = torch.arange(math.prod(shape[1:]), device=device)
        bits = _mix(_mix(position + key) ^ _mix(key + 0x27D4EB2F))
        return ((bits >> 8).to(dtype) * 2.0**-24).view(shape)


_BITS = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Scramble 32 bits, held in 64: every input bit changes about half of the output's."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    return x ^ (x >> 16)
