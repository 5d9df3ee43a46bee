"""Which rows train, which choose and which test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchace._checks import check_tensor, shape_of
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import quote, row_number
from torchace.lab.data.parsing import texts
from torchace.lab.data.rng import hashed_key, permutation
from torchace.lab.data.splits import Split, stratified_split

if TYPE_CHECKING:
    from pandas import Series  # type: ignore[import-untyped]

PARTS = ("train", "validation", "test")
_WORDS = {"train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "test": 2}


class Partition(NamedTuple):
    """The rows of each part, counted from 0 and in order, int64; no row is in two."""

    train: Tensor
    validation: Tensor
    test: Tensor


def partition(
    targets: Tensor,
    *,
    seed: int = 0,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
    column: Series | None = None,
    classes: Sequence[object] = (),
) -> Partition:
    """Shares out the rows of a table: a function of the targets, the fractions and the seed alone.

    Classes are shared out in proportion, and every class has a row in the training part. Numbers are shared out at
    random.

    With a `column` that names the part of every row (`train`, `validation` or `test`, in capitals or not; `training`,
    `valid` and `val` also do), that decides. If no row is for validation, some of the training part are, drawn as
    above, so many that the two are in proportion to the fractions.

    Args:
        targets: Class indices of int64, or numbers of a floating-point type, `(N,)`.
        seed: Chooses the rows.
        fractions: How much of the rows train, validate and test; they add up to 1. The last may be 0.
        column: The part of every row, from the file, if it has such a column; leave it out of the schema then, with
            `infer_schema(..., drop=[column.name])`.
        classes: What the class indices stand for, for errors.

    Raises:
        DataError: One sentence on why the rows cannot be shared out so.

    Example:
        >>> targets = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
        >>> train, validation, test = partition(targets, seed=0)
        >>> targets[train], targets[validation], targets[test]
        (tensor([0, 0, 0, 1, 1, 1]), tensor([0, 1]), tensor([0, 1]))
    """
    check_tensor(targets, "targets")
    if targets.ndim != 1 or not (targets.dtype == torch.int64 or targets.is_floating_point()):
        raise ValueError(
            "Expected `targets` of shape (N,), class indices of int64 or numbers of a floating-point type, but got "
            f"{targets.dtype} of shape {shape_of(targets)}."
        )
    targets = targets.cpu()
    train, validation, test = _checked_fractions(fractions)
    everything = torch.arange(len(targets))
    if column is None:
        rest, tested = _cut(everything, targets, test, "test", hashed_key(seed, "test"))
        trained, validated = _cut(
            rest, targets, validation / (train + validation), "validation", hashed_key(seed, "validation")
        )
    else:
        trained, validated, tested = _named_parts(column, targets, test > 0)
        if not len(validated):
            share = validation / (train + validation)
            trained, validated = _cut(trained, targets, share, "validation", hashed_key(seed, "validation"))
    if not targets.is_floating_point():
        if column is None:
            trained, validated, tested = _all_trained(targets, trained, validated, tested)
        _check_trained(targets, trained, validated, tested, column, classes)
    return Partition(trained, validated, tested)


def _checked_fractions(fractions: Sequence[float]) -> tuple[float, float, float]:
    shares = [float(share) for share in fractions]
    valid = len(shares) == 3 and abs(sum(shares) - 1) < 1e-9 and min(shares) >= 0 and shares[0] > 0 and shares[1] > 0
    if not valid:
        listed = ", ".join(f"{share:g}" for share in shares)
        raise DataError(
            f"The fractions {listed} are not three that add up to 1; give those of training, validation and test, the "
            "first two above 0."
        )
    return shares[0], shares[1], shares[2]


def _cut(rows: Tensor, targets: Tensor, share: float, part: str, seed: int) -> tuple[Tensor, Tensor]:
    """Some rows taken from others: what is left and what was taken."""
    if share == 0:
        return rows, rows[:0]
    count = round(share * len(rows))
    if not 0 < count < len(rows):
        raise DataError(
            f"{len(rows)} rows are too few to take a {part} part of {100 * share:.4g}% from them; give more rows, or "
            "other fractions."
        )
    own = targets[rows]
    if not targets.is_floating_point():
        rest, taken = stratified_split(Split(rows, own), count, seed=seed)
        return rest.x, taken.x
    is_taken = torch.zeros(len(rows), dtype=torch.bool)
    is_taken[permutation(seed, count=len(rows))[:count]] = True
    return rows[~is_taken], rows[is_taken]


def _all_trained(targets: Tensor, *parts: Tensor) -> list[Tensor]:
    """Parts in which every class has a row in the first: one of very few rows gives its first row up for it."""
    trained, *others = parts
    lacking = set(targets.unique().tolist()) - set(targets[trained].tolist())
    for label in sorted(lacking):
        moved = next(row for part in others for row in part.tolist() if targets[row] == label)
        trained = torch.cat([trained, torch.tensor([moved])]).sort().values
        others = [part[part != moved] for part in others]
    return [trained, *others]


def _named_parts(column: Series, targets: Tensor, tests: bool) -> list[Tensor]:
    """The rows of each part, as a column of the file says."""
    name, cells = quote(column.name), texts(column)
    if len(cells) != len(targets):
        raise ValueError(f"Expected `column` with {len(targets)} rows as `targets` has, but got {len(cells)}.")
    words = [None if cell is None else cell.lower() for cell in cells.to_pylist()]
    wrong = next((place for place, word in enumerate(words) if word not in _WORDS), None)
    if wrong is not None:
        found = "nothing" if words[wrong] is None else quote(column.iloc[wrong])
        raise DataError(
            f"Column {name} has {found} in row {row_number(column, wrong)}, which names no part; write train, "
            "validation or test in every row."
        )
    codes = np.asarray([_WORDS[word] for word in words if word is not None])
    parts = [torch.from_numpy(np.flatnonzero(codes == code)) for code in range(len(PARTS))]
    for part, rows in zip(PARTS, parts, strict=True):
        if not len(rows) and (part == "train" or (part == "test" and tests)):
            raise DataError(
                f"Column {name} has no row for {part}; write {part} in some, or leave the column out to have the rows "
                "drawn."
            )
    return parts


def _check_trained(
    targets: Tensor,
    train: Tensor,
    validation: Tensor,
    test: Tensor,
    column: Series | None,
    classes: Sequence[object],
) -> None:
    """Every class has a row in the training part."""
    seen = set(targets[train].tolist())
    for part, rows in (("validation", validation), ("test", test)):
        unseen = [row for row in rows.tolist() if int(targets[row]) not in seen]
        if unseen:
            label = int(targets[unseen[0]])
            number = unseen[0] + 1 if column is None else row_number(column, unseen[0])
            raise DataError(
                f"The class {quote(classes[label] if classes else label)} is in the {part} part (row {number}) but not "
                "in the training part; put a row of it there."
            )
