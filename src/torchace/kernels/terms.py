"""What an amended cross entropy is computed from, once every argument was checked and every option resolved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Everything but the logits. Nothing here receives a gradient, except probabilities in `target`."""

    target: Tensor  # class indices (N, ...), all in range; or probabilities (N, C, ...)
    diversity: float | Tensor  # λ
    alpha: Tensor  # (K,)
    weight: Tensor | None  # class weights (C,)
    label_smoothing: float
    mixture: Tensor | None  # (N, C, ...)
    detach_others: bool
    uniform: bool  # α is 1/K for all
    scale: float | Tensor  # what a sample's loss is multiplied by: one number, (N, ...) or (K, N, ...)

    @property
    def has_probabilities(self) -> bool:
        return self.target.is_floating_point()

    @property
    def diversity_is_zero(self) -> bool:
        """Known to be zero without looking into a tensor."""
        return not isinstance(self.diversity, Tensor) and self.diversity == 0

    def weighted_target(self, num_classes: int, piece: slice | None = None) -> Tensor:
        """w∘p after label smoothing, `(N, C, ...)`, of all samples or a piece of them."""
        p = self.target if piece is None else self.target[piece]
        if not self.has_probabilities:
            classes = torch.arange(num_classes, device=p.device).reshape(-1, *[1] * (p.ndim - 1))
            p = (p.unsqueeze(1) == classes).to(self.alpha.dtype)
        if self.label_smoothing:
            p = p * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        return p if self.weight is None else p * self.weight.reshape(-1, *[1] * (p.ndim - 2))
