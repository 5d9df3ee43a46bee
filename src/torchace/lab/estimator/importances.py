"""Permutation importances of a trained estimator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from torchace.lab.tables.importances import permutation_increases
from torchace.lab.tables.model import log_probs
from torchace.lab.training.run_group import chunk_rows

# of the ensemble's log probabilities or predictions, and targets
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": F.nll_loss,
    "multilabel": lambda log_p, y: F.binary_cross_entropy(log_p.exp(), y),
    "regression": F.mse_loss,
}


def permutation_importances(
    estimator: Any, raw: Tensor, target: Tensor, repeats: int, random: np.random.RandomState
) -> dict[str, float]:
    """Mean increase of the loss of a raw matrix `(N, F)` if a column is permuted, by column."""
    task, ensemble, loss = estimator._task, estimator.ensemble_, LOSSES[estimator._task]
    output = (lambda p: p.mean(0)) if task == "regression" else partial(log_probs, task)

    def mean_loss(rows: Tensor) -> float:
        parts = rows.split(chunk_rows(ensemble, ensemble.num_members))
        return float(loss(estimator._collect(parts, len(rows), output)[0].double(), target))

    names = [column.name for column in estimator._encoding.columns]
    found = permutation_increases(mean_loss, raw, names, lambda *_: random.permutation(len(raw)), repeats)
    return {name: float(np.mean(increases)) for name, increases in found.items()}
