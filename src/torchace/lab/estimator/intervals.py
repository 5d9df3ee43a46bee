"""Prediction intervals of a regression: CV+ (Barber et al., 2021), or split conformal with a hold-out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.encoding import weighted_quantiles
from torchace.lab.data.folds import NUM_FOLDS

MAX_RESIDUALS = 1000  # kept of a fold: evenly spaced order statistics
CHUNK_VALUES = 1 << 22


def residuals_by_fold(
    residuals: NDArray[np.float64], folds: NDArray[np.int64] | None, weight: NDArray[np.float64] | None = None
) -> list[NDArray[np.float64]]:
    """Absolute residuals `(N, M)` by fold, `(n, M)` each, sorted; without folds `(N,)`, all are of one hold-out.

    A weight `(N,)` counts as repeats of a sample: a fold has residuals in proportion to its weight.
    """
    found, weight = [], np.ones(len(residuals)) if weight is None else weight
    for fold in range(1 if folds is None else NUM_FOLDS):
        rows = np.ones(len(residuals), dtype=bool) if folds is None else folds == fold
        if rows.any():
            count = max(1, round(weight[rows].sum() / weight.mean()))
            shares = np.linspace(1 / count, 1, min(count, MAX_RESIDUALS))
            columns = [weighted_quantiles(values, weight[rows], shares) for values in residuals[rows].T]
        found.append(np.stack(columns, 1) if rows.any() else residuals[rows])
    return found


def cv_plus_interval(
    predictions: Sequence[NDArray[np.float64]], residuals: Sequence[NDArray[np.float64]], coverage: float
) -> NDArray[np.float64]:
    """Lower and upper limits, `(N, M, 2)`; those of a small coverage are exchanged where they cross.

    Args:
        predictions: Of each fold, by the members that left it out, `(N, M)`.
        residuals: Of each fold, `(n, M)`.
        coverage: Share of new targets inside, between 0 and 1. Infinite limits mean that the residuals are too few.
    """
    used = [(p, r) for p, r in zip(predictions, residuals, strict=True) if len(r)]
    total = sum(len(r) for _, r in used)
    rank = math.floor((1 - coverage) * (total + 1))  # of the lower limit, from 1
    size, num_targets = used[0][0].shape
    limits = np.empty((size, num_targets, 2))
    rows = max(1, CHUNK_VALUES // (total * num_targets))
    for start in range(0, size, rows):
        part = slice(start, start + rows)
        if rank == 0:
            limits[part] = -np.inf, np.inf
            continue
        low = np.concatenate([p[part, None] - r for p, r in used], axis=1)  # (n, total, M)
        high = np.concatenate([p[part, None] + r for p, r in used], axis=1)
        limits[part, :, 0] = np.partition(low, rank - 1, axis=1)[:, rank - 1]
        limits[part, :, 1] = np.partition(high, total - rank, axis=1)[:, total - rank]
    return np.sort(limits, axis=2)
