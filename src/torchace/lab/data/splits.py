"""Samples: inputs (a tensor, or a tuple or dict of them) with checked targets; splits of samples and of table rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchace._checks import shape_of
from torchace.lab.data.errors import DataError, pandas, quote, quote_all, row_number
from torchace.lab.data.parsing import texts
from torchace.lab.data.rng import hashed_key, permutation

if TYPE_CHECKING:
    from pandas import Series  # type: ignore[import-untyped]


Inputs = Any  # Tensor, tuple[Tensor, ...] or dict[str, Tensor]


def map_inputs(function: Callable[..., Any], *inputs: Inputs) -> Inputs:
    """Apply a function to every tensor of inputs of one structure."""
    if isinstance(inputs[0], Tensor):
        return function(*inputs)
    return tree_map(function, *inputs)


def convert_inputs(function: Callable[[Any], Tensor], x: Any) -> Inputs:
    """Apply a function to data that are not yet tensors: to each value of a dict or tuple, or of a list of arrays."""
    if isinstance(x, list) and x and all(isinstance(value, Tensor | np.ndarray) for value in x):
        x = tuple(x)
    if isinstance(x, Mapping):
        return {str(name): function(value) for name, value in x.items()}
    return tuple(function(value) for value in x) if isinstance(x, tuple) else function(x)


def input_tensors(x: Inputs) -> list[Tensor]:
    """Return the tensors of inputs, in order."""
    return [x] if isinstance(x, Tensor) else tree_leaves(x)


def as_arguments(network: nn.Module, x: Inputs) -> list[Any]:
    """Return inputs as positional arguments of a network: a tuple's tensors in order, a dict's by name.

    A network whose `forward` has no parameters of these names gets the dict itself.
    """
    if isinstance(x, tuple):
        return list(x)
    if not isinstance(x, dict):
        return [x]
    parameters = inspect.signature(network.forward).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    if not set(x) <= {parameter.name for parameter in named}:
        return [x]
    last = max(i for i, parameter in enumerate(named) if parameter.name in x)
    missing = [p.name for p in named[: last + 1] if p.name not in x and p.default is p.empty]
    if missing:
        raise TypeError(
            f"Expected an input {missing[0]!r} for the network's forward, but the data has {', '.join(map(repr, x))}. "
            "Add it to the data, or give the parameter a default."
        )
    return [x.get(parameter.name, parameter.default) for parameter in named[: last + 1]]


_PART_CODES = {"train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "test": 2}


@dataclass(frozen=True, eq=False)
class Split:
    """Samples `x`, `(N, ...)`, with class indices `y`, `(N,)` of int64, or floating-point targets.

    `x` may be a tuple or dict of tensors. Images are `(N, C, H, W)` of uint8. `weight` holds sample weights, `(N,)`, or
    `(K, N)` with each member's own.
    """

    x: Inputs
    y: Tensor
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        for x in input_tensors(self.x):
            if x.shape[:1] != self.y.shape[:1] or x.device != self.y.device:
                raise ValueError(
                    "Expected `x` and `y` with one entry for each sample on one device, but got shapes "
                    f"{shape_of(x)} on {x.device} and {shape_of(self.y)} on {self.y.device}."
                )
            if x.is_complex():
                raise TypeError(f"Expected real `x`, but got {x.dtype}. Convert it: torch.view_as_real(x).")
        if self.y.dtype != torch.int64 and not self.y.is_floating_point():
            raise TypeError(f"Expected `y` of type int64, but got {self.y.dtype}. Convert it: y.long().")
        if self.weight is not None and self.weight.shape[-1] != len(self):
            raise ValueError(
                f"Expected `weight` of shape ({len(self)},) or (K, {len(self)}), but got {shape_of(self.weight)}."
            )

    def __len__(self) -> int:
        return self.y.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the samples."""
        return self.y.device

    def take(self, indices: Tensor | slice) -> Split:
        """Return the samples at these indices, in this order."""
        weight = None if self.weight is None else self.weight[..., indices]
        return Split(map_inputs(lambda values: values[indices], self.x), self.y[indices], weight)

    def join(self, other: Split) -> Split:
        """Return these samples, and then those of another split, which has weights if this one has."""
        weight = None if self.weight is None or other.weight is None else torch.cat([self.weight, other.weight], -1)
        x = map_inputs(lambda *parts: torch.cat(parts), self.x, other.x)
        return Split(x, torch.cat([self.y, other.y]), weight)

    def to(self, device: torch.device | str) -> Split:
        """Move to a device; return itself if already there."""
        if self.device == torch.empty(0, device=device).device:  # "cuda" may be "cuda:0"
            return self
        weight = None if self.weight is None else self.weight.to(device)
        return Split(map_inputs(lambda values: values.to(device), self.x), self.y.to(device), weight)

    def chunks(self, size: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Iterate over samples and targets in order, at most `size` at a time."""
        for start in range(0, len(self), size):
            part = self.take(slice(start, start + size))
            yield part.x, part.y


class SplitIndices(NamedTuple):
    """Row indices of each part, sorted and disjoint."""

    train: Tensor
    validation: Tensor
    test: Tensor


def stratified_split(split: Any, size: int | float, *, seed: int) -> tuple[Any, Any]:
    """Split into the rest and a random, stratified part of `size`: a function of labels, size and seed alone.

    `size` is a count (int) or a fraction (float). Rounding favors largest remainders, then lower classes. Both parts
    keep the order of the samples.
    """
    count, labels = _count(size, len(split)), split.y.cpu()
    counts = torch.bincount(labels).tolist()
    quotas = [size * count // len(split) for size in counts]
    by_remainder = sorted(range(len(counts)), key=lambda label: (-(counts[label] * count % len(split)), label))
    for label in by_remainder[: count - sum(quotas)]:
        quotas[label] += 1
    is_taken = torch.zeros(len(split), dtype=torch.bool)
    for label, quota in enumerate(quotas):
        places = (labels == label).nonzero().flatten()
        is_taken[places[permutation(seed, "stratify", label, count=len(places))[:quota]]] = True
    is_taken = is_taken.to(split.device)
    return split.take(~is_taken), split.take(is_taken)


def random_split(split: Any, size: int | float, *, seed: int) -> tuple[Any, Any]:
    """Split into the rest and a random part of `size`, stratified if the samples have known classes."""
    if split.y is not None and not split.y.is_floating_point():
        return stratified_split(split, size, seed=seed)
    count = _count(size, len(split))
    order = permutation(seed, "split", count=len(split))
    return split.take(order[count:].sort().values), split.take(order[:count].sort().values)


def random_subset(split: Any, size: int, *, seed: int) -> Any:
    """Return `size` random samples, in their order; a smaller subset of the same seed is part of a larger one.

    Example:
        >>> split = Split(torch.arange(6.0), torch.arange(6))
        >>> random_subset(split, 2, seed=0).y.tolist(), random_subset(split, 4, seed=0).y.tolist()
        ([3, 4], [0, 1, 3, 4])
    """
    return split.take(permutation(seed, "limit", count=len(split))[:size].sort().values)


def _count(size: int | float, available: int) -> int:
    count = size if isinstance(size, int) else round(size * available)
    if not 0 < count < available:
        raise ValueError(
            f"Expected `size` to take between 1 and {available - 1} of {available} samples, but got {size}."
        )
    return count


def train_val_test_split(
    targets: Tensor,
    *,
    seed: int = 0,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),  # training, validation, test; the last may be 0
    column: Series | None = None,
    classes: Sequence[object] = (),  # names for error messages
) -> SplitIndices:
    """Split table rows into training, validation and test parts: a function of targets, fractions and seed alone.

    Classes `(N,)` of int64 are stratified, each with a training row; floating-point targets are split at random. A
    `column` with the part of every row decides instead; without a validation row in it, some training rows are drawn.
    """
    targets = targets.cpu()
    shares = [float(fraction) for fraction in fractions]
    if not (len(shares) == 3 and abs(sum(shares) - 1) < 1e-9 and shares[0] > 0 and shares[1] > 0 and shares[2] >= 0):
        raise DataError(
            f"The fractions {', '.join(f'{share:g}' for share in shares)} are invalid; give three for training, "
            "validation and test that add up to 1, the first two above 0."
        )
    if column is None:
        train, test = _take(torch.arange(len(targets)), targets, shares[2], "test", seed)
        validation = train[:0]
    else:
        train, validation, test = _parts_from_column(column, needs_test=shares[2] > 0)
    if not len(validation):
        train, validation = _take(train, targets, shares[1] / (shares[0] + shares[1]), "validation", seed)
    parts = SplitIndices(train, validation, test)
    if targets.is_floating_point():
        return parts
    if column is not None:
        _check_classes_trained(targets, parts, column, classes)
        return parts
    # move one row of every class missing from the training part into it
    for label in sorted(set(targets.unique().tolist()) - set(targets[train].tolist())):
        moved = next(row for part in (validation, test) for row in part.tolist() if targets[row] == label)
        train = torch.cat([train, torch.tensor([moved])]).sort().values
        validation, test = validation[validation != moved], test[test != moved]
    return SplitIndices(train, validation, test)


def _take(rows: Tensor, targets: Tensor, share: float, part: str, seed: int) -> tuple[Tensor, Tensor]:
    """Draw a share of some rows; return the rest and the rows drawn."""
    if share == 0:
        return rows, rows[:0]
    count = round(share * len(rows))
    if not 0 < count < len(rows):
        raise DataError(
            f"{len(rows)} rows are too few for a {part} part of {100 * share:.4g} %; give more rows or other fractions."
        )
    key = hashed_key(seed, part)
    if not targets.is_floating_point():
        rest, taken = stratified_split(Split(rows, targets[rows]), count, seed=key)
        return rest.x, taken.x
    order = permutation(key, count=len(rows))
    return rows[order[count:].sort().values], rows[order[:count].sort().values]


def _parts_from_column(column: Series, *, needs_test: bool) -> SplitIndices:
    """Rows of each part according to a column of the file."""
    name, cells = quote(column.name), texts(column).to_pylist()
    codes = np.asarray([-1 if cell is None else _PART_CODES.get(cell.lower(), -1) for cell in cells])
    if (codes < 0).any():
        wrong = int(np.flatnonzero(codes < 0)[0])
        found = "nothing" if cells[wrong] is None else quote(cells[wrong])
        raise DataError(
            f"Column {name} has {found} in row {row_number(column, wrong)}, which is not a part; write train, "
            "validation or test in every row."
        )
    parts = SplitIndices(*(torch.from_numpy(np.flatnonzero(codes == code)) for code in range(3)))
    for part, rows, is_needed in (("train", parts.train, True), ("test", parts.test, needs_test)):
        if is_needed and not len(rows):
            raise DataError(
                f"Column {name} has no row for {part}; write {part} in some, or leave the column out for random parts."
            )
    return parts


def _check_classes_trained(targets: Tensor, parts: SplitIndices, column: Series, classes: Sequence[object]) -> None:
    for part, rows in (("validation", parts.validation), ("test", parts.test)):
        unknown = rows[~torch.isin(targets[rows], targets[parts.train])]
        if len(unknown):
            row, label = int(unknown[0]), int(targets[unknown[0]])
            raise DataError(
                f"The class {quote(classes[label] if classes else label)} is in the {part} part (row "
                f"{row_number(column, row)}) but not in the training part; put a row of it there."
            )


REMEDY = "task='regression' for numbers or task='multilabel' for several labels per sample"


def as_targets(y: Tensor, task: str, part: str) -> Tensor:
    """Return targets in the form of a task: class indices `(N,)` of int64, labels `(N, L)` or numbers `(N, M)`.

    `part` names the data in errors, such as "training".
    """
    if task == "classification":
        y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
        if y.ndim != 1:
            raise DataError(f"The {part} targets have shape {shape_of(y)}; give one class per sample, or use {REMEDY}.")
        if y.is_floating_point() or y.is_complex():
            raise DataError(
                f"The {part} targets are of type {y.dtype}, but classes are whole numbers from 0; convert them, or use "
                f"{REMEDY}."
            )
        return y.long()
    y = y if y.is_floating_point() else y.float()
    y = y.unsqueeze(1) if y.ndim == 1 else y
    if y.ndim != 2 or not y.shape[1]:
        raise DataError(f"The {part} targets have shape {shape_of(y)}; give (N,) or (N, M), one row per sample.")
    bad = (~torch.isfinite(y)).any(1).nonzero().flatten()
    if len(bad):
        raise DataError(f"The {part} targets have NaN or Inf in sample {int(bad[0])}; leave such samples out.")
    bad = ((y < 0) | (y > 1)).any(1).nonzero().flatten()
    if task == "multilabel" and len(bad):
        raise DataError(
            f"The {part} labels of sample {int(bad[0])} are not between 0 and 1; give 1 where a label holds."
        )
    return y


def check_classes(y: Tensor, num_classes: int, part: str, indices: Sequence[int] | None = None) -> None:
    """Refuse class indices outside 0 to `num_classes` - 1; `indices` number the samples in errors."""
    wrong = ((y < 0) | (y >= num_classes)).nonzero().flatten().tolist()
    if wrong:
        sample = indices[wrong[0]] if indices else wrong[0]
        raise DataError(
            f"The {part} data has label {int(y[wrong[0]])} in sample {sample}, outside 0 to {num_classes - 1}; number "
            "the classes from 0, or set `num_classes`."
        )


def encode_labels(parts: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return class indices of labels that are texts, and the sorted class names; other labels are unchanged.

    `parts` are the labels of each part of the data, the training data first.
    """
    try:
        labels = {part: np.asarray(y) for part, y in parts.items()}
    except ValueError:
        raise DataError("Expected one label for each sample, but they have several shapes; give (X, y).") from None
    train, *_ = labels.values()
    if train.dtype.kind not in "OSU":
        return labels, ()
    names = np.unique(train.astype(str))
    for part, y in labels.items():
        missing = np.flatnonzero(pandas().isna(np.asarray(parts[part], dtype=object)))  # NumPy makes NaN a text
        if len(missing):
            raise DataError(f"The {part} data has no label in sample {missing[0]}; leave such samples out.")
        if len(unknown := np.setdiff1d(y.astype(str), names)):
            raise DataError(
                f"The {part} data has the class {quote(unknown[0])}, but the training data has {quote_all(names)}; put "
                "a sample of it there."
            )
    return {part: np.searchsorted(names, y.astype(str)) for part, y in labels.items()}, tuple(names.tolist())


def find_missing_classes(train: Tensor | None, test: Tensor | None, names: Sequence[str]) -> list[str]:
    """Return a note for each part of the data that has no sample of some class."""
    notes = []
    for part, y in (("training", train), ("test", test)):
        if y is None:  # not known before reading
            continue
        present = set(y.unique().tolist())
        if missing := [name for label, name in enumerate(names) if label not in present]:
            what = "class" if len(missing) == 1 else "classes"
            remedy = "results say nothing about it" if part == "test" else "no member can learn it"
            notes.append(f"The {part} data has no sample of the {what} {quote_all(missing)}; {remedy}.")
    return notes
