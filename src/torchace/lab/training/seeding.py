"""Random numbers of torch that depend on a seed and a purpose alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchace.lab.data import hashed_key


@contextmanager
def torch_seed(seed: int, purpose: str, index: int) -> Iterator[None]:
    """Seed torch inside the block; its global random state is restored afterwards.

    Example:
        >>> with torch_seed(7, "member", 0):
        ...     first = torch.rand(2)
        >>> with torch_seed(7, "member", 0):
        ...     torch.equal(torch.rand(2), first)
        True
    """
    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed also looks for other devices, which takes longer than drawing
        torch.default_generator.manual_seed(hashed_key(seed, purpose, index))
        yield
