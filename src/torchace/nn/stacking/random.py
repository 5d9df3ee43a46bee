"""Random numbers that each member draws for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ConstantDraws:
    """Always 0.5: makes two computations of a network with random layers comparable."""

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of 0.5."""
        return torch.full(shape, 0.5, dtype=dtype, device=device)


class KeyedDraws:
    """Random numbers that are a function of (seed, step, call, member, position).

    Args:
        seeds: The seeds of R runs, `(R,)`.
        members: The indices of each run's members, `(M,)`; together there are K = R·M members.
        step: The step, a tensor of one number: a CUDA graph reads it anew at every replay.
        part: The members to draw for, of all K; all unless given.

    Example:
        >>> step, members = torch.tensor(3), torch.tensor([0, 1])
        >>> both = KeyedDraws(torch.tensor([5, 7]), members, step).uniform((4, 3), torch.float32, torch.device("cpu"))
        >>> alone = KeyedDraws(torch.tensor([7]), members, step).uniform((2, 3), torch.float32, torch.device("cpu"))
        >>> torch.equal(both[2:], alone)
        True
    """

    def __init__(self, seeds: Tensor, members: Tensor, step: Tensor, part: slice = slice(None)) -> None:
        self.tensors, self.part, self.calls = (seeds, members, step), part, 0
        self._keys: tuple[Tensor, Tensor] | None = None

    def __getitem__(self, part: slice) -> KeyedDraws:
        """Return the draws of some of the members."""
        return KeyedDraws(*self.tensors, part)

    @contextmanager
    def seed_generator(self, reason: str) -> Iterator[None]:
        """Seed PyTorch's generator by run and step, for a network whose calls are not followed.

        Args:
            reason: Why they are not, for the error where several runs would need draws of their own.
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

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers in [0, 1) of shape `(K, ...)`."""
        self.calls += 1
        if self._keys is None:
            seeds, members, step = self.tensors
            key = _mix(_mix(_mix(seeds) + (seeds >> 32)) + step).repeat_interleave(len(members))
            self._keys = key[self.part], members.repeat(len(seeds))[self.part]
        key, index = self._keys
        key = _mix(_mix(key + self.calls * 0x9E3779B9) + index * 0x85EBCA6B).view(-1, 1)  # (K, 1)
        position = torch.arange(math.prod(shape[1:]), device=device)
        bits = _mix(_mix(position + key) ^ _mix(key + 0x27D4EB2F))
        return ((bits >> 8).to(dtype) * 2.0**-24).view(shape)


_BITS = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Hash 32 bits, held in 64: every input bit changes about half of the output's."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    return x ^ (x >> 16)
