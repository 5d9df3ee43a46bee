"""Random draws of torch that depend on a seed and a purpose alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchace.lab.data import hashed_key


@contextmanager
def torch_seed(seed: int, purpose: str, index: int) -> Iterator[None]:
    """Draws inside depend on these alone, and leave torch's own random state as it was.

    Example:
        >>> with torch_seed(7, "member", 0):
        ...     first = torch.rand(2)
        >>> with torch_seed(7, "member", 0):
        ...     torch.equal(torch.rand(2), first)
        True
    """
    with torch.random.fork_rng(devices=[]):
        # that of the CPU alone: torch.manual_seed looks for every other device too, which takes longer than the draws
        torch.default_generator.manual_seed(hashed_key(seed, purpose, index))
        yield
