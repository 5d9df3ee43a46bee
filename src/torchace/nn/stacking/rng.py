"""Random numbers for each member."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ConstantRNG:
    """Constant 0.5, to compare two computations of a network with random layers."""

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of 0.5."""
        return torch.full(shape, 0.5, dtype=dtype, device=device)


class MemberRNG:
    """Random numbers as a function of (seed, step, call, member, position), for K = R·M members.

    Shapes: seeds `(R,)`, members of each run `(M,)`, step `()`, a tensor that CUDA graphs read at every replay.
    """

    def __init__(self, seeds: Tensor, members: Tensor, step: Tensor, part: slice = slice(None)) -> None:
        self.tensors, self.part, self.calls = (seeds, members, step), part, 0
        self._keys: tuple[Tensor, Tensor] | None = None

    def __getitem__(self, part: slice) -> MemberRNG:
        """Return the generator of some of the members."""
        return MemberRNG(*self.tensors, part)

    @contextmanager
    def member_seeds(self) -> Iterator[list[int]]:
        """Yield a seed for each member, a function of (seed, step, member); restore PyTorch's generator afterwards."""
        device = self.tensors[0].device
        key, index = self._member_keys()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield _mix(_mix(key) + index * 0x85EBCA6B).tolist()

    def _member_keys(self) -> tuple[Tensor, Tensor]:
        """Return keys of seed and step, and the members' numbers, `(K,)` each."""
        if self._keys is None:
            seeds, members, step = self.tensors
            key = _mix(_mix(_mix(seeds) + (seeds >> 32)) + step).repeat_interleave(len(members))
            self._keys = key[self.part], members.repeat(len(seeds))[self.part]
        return self._keys

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers in [0, 1) of shape `(K, ...)`."""
        self.calls += 1
        key, index = self._member_keys()
        key = _mix(_mix(key + self.calls * 0x9E3779B9) + index * 0x85EBCA6B).view(-1, 1)  # (K, 1)
        position = torch.arange(math.prod(shape[1:]), device=device)
        bits = _mix(_mix(position + key) ^ _mix(key + 0x27D4EB2F))
        return ((bits >> 8).to(dtype) * 2.0**-24).view(shape)


_BITS = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Hash 32 bits, stored in int64: every input bit changes about half of the output bits."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    return x ^ (x >> 16)
