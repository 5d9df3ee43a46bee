"""Training with members that each leave out one fold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchace.lab.data import Split
from torchace.lab.data.folds import NUM_FOLDS

MIN_FOLD_ROWS = 200  # with fewer samples, early stopping does not use folds unless asked to


@dataclass(frozen=True, eq=False)
class FoldSplit:
    """Samples of which member k leaves out fold k mod 5."""

    train: Split  # with each member's weights, (K, N), of mean 1
    validation: Split  # samples that some member leaves out
    left_out: Tensor  # (K, n): the members that leave out each of these
    rows: Tensor  # (n,): their indices among all samples

    @classmethod
    def make(cls, samples: Split, folds: Tensor, num_members: int) -> FoldSplit:
        """Leave out folds `(N,)` of samples with vectors `(N, D)`."""
        x = samples.x
        left_out = (torch.arange(num_members)[:, None] % NUM_FOLDS == folds).to(x.device)  # (K, N)
        weight = torch.ones_like(x[:, 0]) if samples.weight is None else samples.weight
        weight = weight * ~left_out
        train = replace(samples, weight=weight / weight.mean(1, keepdim=True))
        covered = left_out.any(0)
        rows = covered.nonzero().flatten()
        if len(rows) == len(samples):  # no copy
            return cls(train, samples, left_out, rows)
        return cls(train, samples.take(covered), left_out[:, covered], rows)
