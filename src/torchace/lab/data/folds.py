"""Folds of samples for members that each leave one out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torchace.lab.data.errors import pandas
from torchace.lab.data.rng import hashed_key, permutation
from torchace.lab.data.splits import Split

NUM_FOLDS = 5
NUM_PLACES = 10_000  # of samples in the order that a hold-out is taken from
MIN_FOLD_ROWS = 200  # with fewer samples, early stopping does not use folds unless asked to


def number_blocks(raw: Tensor, *, weight: Tensor | None = None, groups: ArrayLike | None = None) -> Tensor:
    """Number the samples that belong in the same part of any split: `(N,)` of int64.

    Identical samples `(N, F)` are one block unless they exceed a fold (NaN equals NaN); with labels of groups `(N,)`,
    samples of a group and those identical to one of them are.

    Example:
        >>> number_blocks(torch.tensor([[1.0], [2.0], [1.0], [3.0]]), groups=["a", "b", "c", "b"]).tolist()
        [0, 1, 0, 1]
    """
    blocks = _blocks(raw.cpu().numpy(), groups)
    if groups is None:
        # a table with few distinct rows would lose most to each fold
        size = np.bincount(blocks, None if weight is None else weight.cpu().double().numpy())
        is_large = size[blocks] > size.sum() / NUM_FOLDS
        own = blocks.max() + 1 + np.arange(len(blocks))
        blocks = np.unique(np.where(is_large, own, blocks), return_inverse=True)[1].ravel()
    elif blocks.max() == 0:
        raise ValueError("Expected at least two `groups` for folds, but got one (identical samples join theirs).")
    return torch.from_numpy(blocks)


class FewBlocksError(ValueError):
    """There are too few blocks, or one has nearly all the weight, for a hold-out."""

    def __init__(self) -> None:
        super().__init__(
            "Expected several samples or groups to hold some out, but got one sample or group, or one with nearly all "
            "the weight. Give more, or use early_stopping=False and a number for `diversity`."
        )


def assign_folds(blocks: Tensor, y: Tensor, *, seed: int, weight: Tensor | None = None) -> Tensor:
    """Assign every sample to a fold: `(N,)` of int64; fewer blocks than folds leave the last folds empty.

    A block of `number_blocks` is in one fold. Folds have about equal weight, class by class. They do not depend on the
    order of samples that differ, and a weight `(N,)` counts as repeats of a sample. `y` are class indices `(N,)`, or
    numbers `(N, M)`.

    Example:
        >>> blocks = number_blocks(torch.arange(10.0)[:, None].repeat(2, 1))
        >>> folds = assign_folds(blocks, torch.arange(20) % 2, seed=0)
        >>> torch.equal(folds[:10], folds[10:]), folds.bincount().tolist()
        (True, [4, 4, 4, 4, 4])
    """
    folds = _assign_places(blocks, y, NUM_FOLDS, seed=seed, weight=weight)
    return folds.unique(return_inverse=True)[1]  # so that the first members leave out some


def _assign_places(blocks: Tensor, y: Tensor, num_places: int, *, seed: int, weight: Tensor | None) -> Tensor:
    share = np.ones(len(blocks)) if weight is None else weight.cpu().double().numpy()
    block = np.unique(blocks.cpu().numpy(), return_inverse=True)[1].ravel()  # 0, 1, … also in a part of the samples
    count = int(block.max()) + 1
    size = np.bincount(block, share)
    labels = np.zeros(len(block), dtype=np.int64) if y.is_floating_point() else y.cpu().numpy()
    label = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(label, block, labels)  # of mixed blocks, the smallest
    order = permutation(hashed_key(seed, "folds"), count=count).numpy()
    fold = np.empty(count, dtype=np.int64)
    for shift, value in enumerate(np.unique(label)):
        places = order[label[order] == value]
        middle = size[places].cumsum() - size[places] / 2
        fold[places] = (num_places * middle / size[places].sum() + 1e-9).astype(np.int64)  # sums of weights are rounded
        fold[places] = (fold[places] + shift) % num_places  # small classes start in different folds
    return torch.from_numpy(fold[block])


def hold_out(blocks: Tensor, y: Tensor, fraction: float, *, seed: int, weight: Tensor | None = None) -> Tensor:
    """Mask `(N,)` of a random part of the samples, stratified by class, that splits no block.

    The part has about a `fraction` of the weight, and at least one block; so has the rest.

    Example:
        >>> held_out = hold_out(torch.arange(20) // 4, torch.zeros(20), 0.2, seed=0)
        >>> int(held_out.sum()), held_out.view(5, 4).all(1).sum().item()
        (4, 1)
    """
    places = _assign_places(blocks, y, NUM_PLACES, seed=seed, weight=weight)
    limit = max(round(fraction * NUM_PLACES), int(places.min()) + 1)
    held_out = places < min(limit, int(places.max()))  # one block is left, too
    if not held_out.any():
        raise FewBlocksError
    return held_out


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
    if pandas().isna(labels).any():
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
        return cls(train, samples.take(covered), left_out[:, covered], covered.nonzero().flatten())
