"""A small problem to search on."""

from __future__ import annotations

import torch

from torchace.lab.data import Split


def make_split(count: int, start: int = 0, task: str = "classification", weighted: bool = False) -> Split:
    """Noisy samples on which λ makes a difference; other starts, other samples."""
    generator = torch.Generator().manual_seed(100 + start)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    signal = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    weight = torch.rand(count, generator=generator, dtype=torch.float64) if weighted else None
    return Split(x, (signal > 0).long() if task == "classification" else signal[:, None], weight)
