"""Targets of own data: class indices, labels or numbers, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchace._checks import shape_of
from torchace.lab.data.errors import DataError, quote, quote_all

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
    if task == "multilabel" and not bool(((y >= 0) & (y <= 1)).all()):
        bad = ((y < 0) | (y > 1)).any(1).nonzero().flatten()
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
    labels = {part: np.asarray(y) for part, y in parts.items()}
    train, *_ = labels.values()
    if train.dtype.kind not in "OSU":
        return labels, ()
    for part, y in labels.items():
        missing = [i for i, label in enumerate(y.flat) if label is None or label != label]
        if missing:
            raise DataError(f"The {part} data has no label in sample {missing[0]}; leave such samples out.")
    names = np.unique(train.astype(str))
    for part, y in labels.items():
        if unknown := sorted(set(y.astype(str).tolist()) - set(names.tolist())):
            raise DataError(
                f"The {part} data has the class {quote(unknown[0])}, but the training data has {quote_all(names)}; put "
                "a sample of it there."
            )
    return {part: np.searchsorted(names, y.astype(str)) for part, y in labels.items()}, tuple(names.tolist())


def find_missing_classes(train: Tensor | None, test: Tensor | None, names: Sequence[str]) -> list[str]:
    """Return a note for each part of the data that has no sample of some class."""
    notes = []
    for part, y in (("training", train), ("test", test)):
        if y is None:
            continue
        counts = torch.bincount(y.cpu(), minlength=len(names))
        missing = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
        if missing:
            what = "class" if len(missing) == 1 else "classes"
            remedy = "results say nothing about it" if part == "test" else "no member can learn it"
            notes.append(f"The {part} data has no sample of the {what} {quote_all(missing)}; {remedy}.")
    return notes
