"""Folds of samples for members that each leave one out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torchace.lab.data.rng import hashed_key, permutation
from torchace.lab.data.splits import Split

NUM_FOLDS = 5
MIN_FOLD_ROWS = 200  # with fewer samples, early stopping does not use folds unless asked to


def assign_folds(
    raw: Tensor,
    y: Tensor,
    *,
    seed: int,
    weight: Tensor | None = None,
    groups: ArrayLike | None = None,
) -> Tensor:
    """Assign every sample to one of `NUM_FOLDS` folds: `(N,)` of int64.

    Identical samples of `raw` `(N, F)` share a fold (NaN equals NaN) unless they exceed one, and so do those of one of
    the `groups` `(N,)`. Folds have about equal weight, class by class of `y`: class indices `(N,)`, or numbers
    `(N, M)`. They do not depend on the order of samples that differ, and a weight `(N,)` counts as repeats of a sample.

    Example:
        >>> x = torch.arange(10.0)[:, None].repeat(2, 1)
        >>> folds = assign_folds(x, torch.arange(20) % 2, seed=0)
        >>> torch.equal(folds[:10], folds[10:]), folds.bincount().tolist()
        (True, [4, 4, 4, 4, 4])
    """
    share = np.ones(len(raw)) if weight is None else weight.cpu().double().numpy()
    blocks = _blocks(raw.cpu().numpy(), groups)  # (N,)
    if groups is None:
        blocks = _split_large(blocks, share)
    count = int(blocks.max()) + 1
    if groups is not None and count == 1:
        raise ValueError("Expected at least two `groups` for folds, but got one (identical samples join theirs).")
    size = np.bincount(blocks, share)
    labels = np.zeros(len(blocks), dtype=np.int64) if y.is_floating_point() else y.cpu().numpy()
    label = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(label, blocks, labels)  # of mixed blocks, the smallest
    order = permutation(hashed_key(seed, "folds"), count=count).numpy()
    fold = np.empty(count, dtype=np.int64)
    for shift, value in enumerate(np.unique(label)):
        places = order[label[order] == value]
        middle = size[places].cumsum() - size[places] / 2
        fold[places] = (NUM_FOLDS * middle / size[places].sum()).astype(np.int64)
        fold[places] = (fold[places] + shift) % NUM_FOLDS  # small classes start in different folds
    return torch.from_numpy(fold[blocks])


def _split_large(blocks: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Separate identical samples that exceed a fold: a table with few distinct rows would lose most to each."""
    size = np.bincount(blocks, share)
    is_large = size[blocks] > size.sum() / NUM_FOLDS
    own = blocks.max() + 1 + np.arange(len(blocks))
    return np.unique(np.where(is_large, own, blocks), return_inverse=True)[1].ravel()


def _blocks(raw: NDArray[np.float64], groups: ArrayLike | None) -> NDArray[np.int64]:
    """Number the sets of samples that share a fold, in an order that depends on their values alone."""
    rows = np.ascontiguousarray(np.where(np.isnan(raw), np.nan, raw + 0.0))  # one NaN, no -0.0
    keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    same = np.unique(keys, return_inverse=True)[1].ravel()
    if groups is None:
        return same
    labels = np.asarray(groups)
    if labels.shape != same.shape:
        raise ValueError(f"Expected `groups` with one label for each of {len(same)} samples, but got {labels.shape}.")
    if (labels != labels).any() or any(label is None for label in labels.tolist()):
        raise ValueError("Expected a label in `groups` for each sample, but some are missing. Fill them in.")
    from scipy.sparse import coo_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    names, group = np.unique(labels, return_inverse=True)
    edges = coo_array((np.ones(len(same)), (group, len(names) + same)), shape=2 * (len(names) + int(same.max()) + 1,))
    return connected_components(edges, directed=False)[1][group].astype(np.int64)


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
