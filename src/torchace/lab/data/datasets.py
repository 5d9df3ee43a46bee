"""Image data sets by name: digits, mnist, fashion_mnist, cifar10."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchace._checks import check_choice
from torchace._extras import import_extra
from torchace.lab.data.batches import Statistics
from torchace.lab.data.errors import DataError
from torchace.lab.data.image_files import (
    ENVIRONMENT,
    SOURCES,
    Source,
    damaged_file,
    find,
    read_cifar,
    read_idx,
    search_path,
)
from torchace.lab.data.image_files import download as download_file
from torchace.lab.data.splits import Split, stratified_split
from torchace.lab.schema.reading import did_you_mean

NAMES = ("digits", *SOURCES)
_DIGITS_TEST = 500


@dataclass(frozen=True, eq=False)
class Dataset:
    """Data set of a task.

    `mean` and `std` are those of the full official training part, in the units of `x` (0 to `max_value`).
    """

    name: str
    train: Any  # Split, or StreamedSplit of a Dataset that is read while training
    test: Any
    class_names: tuple[str, ...]  # of classes or labels; none for regression
    image_shape: tuple[int, int, int] | None = None  # (C, H, W)
    max_value: int | None = None  # of pixels; None: samples are not scaled
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    task: str = "classification"
    num_targets: int = 1  # of a regression
    notes: tuple[str, ...] = ()  # what a user should know about the data
    validation: Any = None  # like `train`, if given

    @property
    def num_classes(self) -> int:
        """Number of outputs of a network: classes, labels or numbers."""
        return len(self.class_names) or self.num_targets

    def normalization(self, kind: str = "standard") -> Statistics | None:
        """Argument `normalize` of `Batches`: "standard" for mean 0 and variance 1, "unit" for [0, 1]."""
        check_choice(kind, "kind", ("standard", "unit"))
        if self.max_value is None:
            return None
        if kind == "unit":
            return (0.0,), (float(self.max_value),)
        if not self.mean:
            raise DataError("normalize = 'standard' needs images in memory; normalize them in the Dataset.")
        return self.mean, self.std


def load(
    name: str = "digits",
    *,
    directory: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool = True,
) -> Dataset:
    """Load a data set by name; `directory` replaces `$TORCHACE_DATA`.

    Files are searched in `$TORCHACE_DATA` (also in torchvision's folders), then in the user's cache, else downloaded
    with a known hash. `digits` comes with scikit-learn; a fixed, stratified set of 500 images is its test part.
    """
    if name not in NAMES:
        hint = did_you_mean(str(name).lower().replace("-", "_"), NAMES)
        raise DataError(f"Expected one of the data sets {', '.join(NAMES)}, but got {name!r}.{hint}")
    if name == "digits":
        digits = import_extra("sklearn.datasets", "The data set digits needs").load_digits()
        x = torch.from_numpy(digits.images.astype(np.uint8))[:, None]
        train, test = stratified_split(Split(x, torch.from_numpy(digits.target).long()), _DIGITS_TEST, seed=0)
        return _dataset("digits", train, test, class_names=tuple("0123456789"), max_value=16)
    source = SOURCES[name]
    folders = search_path(source, directory)

    def locate(names: Sequence[str], sha256: str) -> Path:
        """File under one of these names, else downloaded under the first."""
        if (found := find(folders, names)) is not None:
            return found
        if not download:
            raise DataError(
                f"{names[0]} of {source.title} was not found in {', '.join(map(str, folders))}; put the official file "
                f"in one of these folders, set {ENVIRONMENT} to the folder that has it, or allow the download."
            )
        return download_file(source, names[0], sha256, folders[-1], progress=progress)

    train, test = (_cifar_parts if source.archive else _idx_parts)(source, folders, locate)
    return _dataset(source.name, train, test, class_names=source.class_names, max_value=255)


def _idx_parts(source: Source, folders: list[Path], locate: Callable[[Sequence[str], str], Path]) -> list[Split]:
    parts = []
    # locate all four first: report a missing file before reading any
    files = [*source.train, *source.test]
    paths = [locate((f"{f.name}.gz", f.name, f.name.replace("-idx", ".idx")), f.sha256) for f in files]
    for file, path in zip(files, paths, strict=True):
        array = read_idx(path, shape=file.shape)
        # MNIST and Fashion-MNIST use the same file names
        if file.content is not None and hashlib.sha256(array.tobytes()).hexdigest() != file.content:
            raise damaged_file(path, f"is not the official file of {source.title}: its content has the wrong SHA-256")
        parts.append(array)
    return [_split(x[:, None], y) for x, y in (parts[:2], parts[2:])]


def _cifar_parts(source: Source, folders: list[Path], locate: Callable[[Sequence[str], str], Path]) -> list[Split]:
    batch = find([folder / inner for folder in folders for inner in ("cifar-10-batches-bin", ".")], [*source.batches])
    batches = read_cifar(locate([source.archive], source.sha256) if batch is None else batch.parent, source)
    x, y = (np.concatenate([batch[part] for batch in batches[:-1]]) for part in (0, 1))
    return [_split(x, y), _split(*batches[-1])]


def _split(x: NDArray[np.uint8], y: NDArray[np.uint8]) -> Split:
    return Split(torch.from_numpy(np.require(x, requirements=["C", "W"])), torch.from_numpy(y.astype(np.int64)))


def _dataset(name: str, train: Split, test: Split, *, class_names: tuple[str, ...], max_value: int) -> Dataset:
    mean, std = channel_statistics(train.x)
    channels, height, width = train.x.shape[1:]
    return Dataset(name, train, test, class_names, (channels, height, width), max_value, mean, std)


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, from exact sums; 1 for a constant channel."""
    total, squares = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for part in x.split(1000):
        wide = part.int()
        total += wide.sum((0, 2, 3))
        squares += (wide * wide).sum((0, 2, 3))
    count = x.numel() // x.shape[1]
    mean = [int(value) / count for value in total]
    # count · Σx² - (Σx)² is an exact integer: no cancellation
    spread = [count * int(second) - int(first) ** 2 for first, second in zip(total, squares, strict=True)]
    return tuple(mean), tuple(value**0.5 / count if value else 1.0 for value in spread)
