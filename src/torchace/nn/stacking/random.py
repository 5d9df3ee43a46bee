"""Random numbers that each member draws for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
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

    Args:
        seeds: The seeds of R runs, `(R,)`.
        members: The numbers of each run's members, `(M,)`; together there are K = R·M members.
        step: The step, a tensor of one number: a CUDA graph reads it anew at every replay.
        part: Which of the K members to draw for; all unless given.

    Example:
        >>> step, members = torch.tensor(3), torch.tensor([0, 1])
        >>> both = KeyedDraws(torch.tensor([5, 7]), members, step).uniform((4, 3), torch.float32, torch.device("cpu"))
        >>> alone = KeyedDraws(torch.tensor([7]), members, step).uniform((2, 3), torch.float32, torch.device("cpu"))
        >>> torch.equal(both[2:], alone)
        True
    """

    def __init__(self, seeds: Tensor, members: Tensor, step: Tensor, part: slice | None = None) -> None:
        self.tensors, self.part, self.calls = (seeds, members, step), part, 0
        self._keys: tuple[Tensor, Tensor] | None = None

    def __getitem__(self, part: slice) -> KeyedDraws:
        """The draws of some of the members."""
        return KeyedDraws(*self.tensors, part)

    @contextmanager
    def seeded(self, reason: str) -> Iterator[None]:
        """PyTorch's own generator, seeded by run and step, for a network whose calls have no draws of their own.

        Args:
            reason: Why that is so, for the error where there are several runs, of which each should draw for itself.
        """
        seeds, _, step = self.tensors
        if len(seeds) > 1:
            raise ValueError(
                f"Expected a network whose random numbers can be drawn for each run by itself, but {reason}. Train one "
                "run at a time: sweep.cohort_size = 1."
            )
        with torch.random.fork_rng(devices=[seeds.device] if seeds.device.type == "cuda" else []):
            torch.manual_seed(int(_mix(_mix(seeds[0]) + step)))
            yield

    def _of_members(self) -> tuple[Tensor, Tensor]:
        """A key and a number for each member, `(K,)`; made when first needed."""
        if self._keys is None:
            seeds, members, step = self.tensors
            key = _mix(_mix(_mix(seeds) + (seeds >> 32)) + step)
            keys = key.repeat_interleave(len(members)), members.repeat(len(seeds))
            self._keys = keys if self.part is None else (keys[0][self.part], keys[1][self.part])
        return self._keys

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls += 1
        key, members = self._of_members()
        key = _mix(key + self.calls * 0x9E3779B9)
        key = _mix(key + members * 0x85EBCA6B).view(-1, 1)  # (K, 1)
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
