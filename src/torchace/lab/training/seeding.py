"""Random numbers of torch as a function of seed and purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchace.lab.data import hashed_key


@contextmanager
def torch_seed(seed: int, purpose: str, index: int) -> Iterator[None]:
    """Seed torch inside the block; restore its global random state afterwards.

    Example:
        >>> with torch_seed(7, "member", 0):
        ...     first = torch.rand(2)
        >>> with torch_seed(7, "member", 0):
        ...     torch.equal(torch.rand(2), first)
        True
    """
    with torch.random.fork_rng(devices=[]):
        # CPU generator only: torch.manual_seed also seeds other devices, which is slow
        torch.default_generator.manual_seed(hashed_key(seed, purpose, index))
        yield
