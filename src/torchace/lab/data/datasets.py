"""The data sets by name: digits, mnist, fashion_mnist, cifar10."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchace._checks import check_choice, check_count
from torchace.lab.data.cifar import read_archive, read_folder
from torchace.lab.data.errors import DataError, check_labels, damaged, require_extra
from torchace.lab.data.files import fetch, find, missing, search_path
from torchace.lab.data.idx import read_idx
from torchace.lab.data.sources import FASHION_MNIST, MNIST, SOURCES, CifarSource, IdxFile, IdxSource
from torchace.lab.data.splits import Split, stratified_split

NAMES = ("digits", *SOURCES)
_DIGITS_TEST = 500


class Normalization(NamedTuple):
    """Mean and standard deviation, one of each for a channel, in the units of the stored samples."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory: what to train on, what to test on, and what a network must know of it.

    `mean` and `std` are those of the official training part, for each channel, in the units of `x` (0 to `max_value`).
    They stay the same when a validation part is split off or the training part is limited, so that such runs compare.
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]  # (C, H, W)
    max_value: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def normalization(self, kind: str = "standard") -> Normalization:
        """What `Batches` and `chunks` take as `normalize`.

        Args:
            kind: "standard" gives every channel of the training part mean 0 and variance 1; "unit" scales to [0, 1].

        Example:
            >>> load("digits").normalization("unit")
            Normalization(mean=(0.0,), std=(16.0,))
        """
        check_choice(kind, "kind", ("standard", "unit"))
        if kind == "unit":
            return Normalization((0.0,), (float(self.max_value),))
        return Normalization(self.mean, self.std)

    def validation_split(self, size: int | float, *, seed: int = 0) -> tuple[Split, Split]:
        """Part of the training samples held out, every class in proportion: `(train, validation)`.

        Args:
            size: How many to hold out: an int counts samples, a float is a fraction.
            seed: Chooses which.

        Example:
            >>> train, validation = load("digits").validation_split(297, seed=0)
            >>> len(train), len(validation)
            (1000, 297)
        """
        return stratified_split(self.train, size, seed=seed)

    def limited(self, count: int, *, seed: int | None = None) -> Dataset:
        """The same data set with fewer training samples: the first `count`, or with a seed, `count` in proportion."""
        check_count(count, "count")
        if count > len(self.train):
            raise ValueError(f"Expected `count` of at most {len(self.train)} training samples, but got {count}.")
        if seed is None or count == len(self.train):
            return replace(self, train=Split(self.train.x[:count], self.train.y[:count]))
        return replace(self, train=stratified_split(self.train, count, seed=seed)[1])


def load(
    name: str = "digits",
    *,
    directory: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool = True,
) -> Dataset:
    """A data set by name.

    `digits` comes with scikit-learn and is always there: 1,797 images of 8 x 8, of which 500 are held out as the test
    part, every class in proportion, always the same. The others are read from their original files, which are looked
    for in `$TORCHACE_DATA` (`mnist/`, torchvision's `MNIST/raw/` and their like, or the folder itself), then in the
    user's cache, and are then downloaded with a known hash. A file that is found is used if it is whole; a damaged one
    is an error, never passed over.

    Args:
        name: "digits", "mnist", "fashion_mnist" or "cifar10".
        directory: Looked into in the place of `$TORCHACE_DATA`.
        download: Whether files that are not found may be downloaded.
        progress: Whether a download shows a progress bar.

    Raises:
        DataError: One sentence: which file, where it was looked for, what to do.

    Example:
        >>> digits = load("digits")
        >>> digits.train.x.shape, len(digits.test), digits.num_classes, digits.image_shape
        (torch.Size([1297, 1, 8, 8]), 500, 10, (1, 8, 8))
    """
    if name not in NAMES:
        close = difflib.get_close_matches(str(name).lower().replace("-", "_"), NAMES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise DataError(f"Expected a data set out of {', '.join(NAMES)}, but got {name!r}.{hint}")
    if name == "digits":
        return _digits()
    source = SOURCES[name]
    path = search_path(source.name, source.folders, directory)
    if isinstance(source, CifarSource):
        parts = _cifar_parts(source, path, download, progress)
    else:
        parts = _idx_parts(source, path, download, progress)
    return _dataset(source.name, *parts, class_names=source.class_names, max_value=255)


def _digits() -> Dataset:
    sklearn = require_extra("sklearn.datasets", "scikit-learn", "The data set digits")
    digits = sklearn.load_digits()
    x = torch.from_numpy(digits.images.astype(np.uint8))[:, None]
    train, test = stratified_split(Split(x, torch.from_numpy(digits.target).long()), _DIGITS_TEST, seed=0)
    return _dataset("digits", train, test, class_names=tuple("0123456789"), max_value=16)


def _idx_parts(source: IdxSource, path: Sequence[Path], download: bool, progress: bool) -> tuple[Split, Split]:
    # All four are located first: what is missing is known before anything is read.
    files = {file.name: _idx_located(source, file, path, download, progress) for file in (*source.train, *source.test)}
    train, test = (
        [_idx_array(source, file, files[file.name]) for file in part] for part in (source.train, source.test)
    )
    return _split(train[0][:, None], train[1]), _split(test[0][:, None], test[1])


def _idx_located(source: IdxSource, file: IdxFile, path: Sequence[Path], download: bool, progress: bool) -> Path:
    names = (f"{file.name}.gz", file.name, file.name.replace("-idx", ".idx"))
    found = find(path, names)
    if found is None and not download:
        raise missing(source.title, names[0], path)
    return found or fetch(
        source.title, names[0], urls=source.urls, sha256=file.sha256, folder=path[-1], progress=progress
    )


def _idx_array(source: IdxSource, file: IdxFile, path: Path) -> NDArray[np.uint8]:
    array = read_idx(path, shape=file.shape)
    if array.ndim == 1:
        check_labels(array, path, len(source.class_names))
    digest = hashlib.sha256(array.data).hexdigest()
    # MNIST's and Fashion-MNIST's files have the same names.
    for other in (MNIST, FASHION_MNIST):
        if other.name != source.name and digest in {known.content for known in (*other.train, *other.test)}:
            raise damaged(path, f"belongs to {other.title}, not to {source.title}")
    if file.content is not None and digest != file.content:
        raise damaged(path, f"is not the official file of {source.title}: its content has the wrong SHA-256")
    return array


def _cifar_parts(source: CifarSource, path: Sequence[Path], download: bool, progress: bool) -> tuple[Split, Split]:
    archives = (source.archive, "cifar-10-python.tar.gz")
    batches = None
    for folder in path:
        for inner in ("cifar-10-batches-bin", "cifar-10-batches-py", "."):
            if find([folder / inner], [*source.binary, *source.python]):
                batches = read_folder(folder / inner, source)
                break
        else:
            if archive := find([folder], archives):
                batches = read_archive(archive, source)
        if batches is not None:
            break
    else:
        if not download:
            raise missing(source.title, source.archive, path)
        archive = fetch(
            source.title, source.archive, urls=source.urls, sha256=source.sha256, folder=path[-1], progress=progress
        )
        batches = read_archive(archive, source)
    assert batches is not None
    x, y = (np.concatenate([batch[part] for batch in batches[:-1]]) for part in (0, 1))
    return _split(x, y), _split(*batches[-1])


def _split(x: NDArray[np.uint8], y: NDArray[np.uint8]) -> Split:
    return Split(torch.from_numpy(np.require(x, requirements=["C", "W"])), torch.from_numpy(y.astype(np.int64)))


def _dataset(name: str, train: Split, test: Split, *, class_names: tuple[str, ...], max_value: int) -> Dataset:
    mean, std = _channel_statistics(train.x)
    channels, height, width = train.x.shape[1:]
    return Dataset(name, train, test, class_names, (channels, height, width), max_value, mean, std)


def _channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, from exact sums; 1 for a constant channel."""
    total, squares = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for part in x.split(1000):
        wide = part.int()
        total += wide.sum((0, 2, 3))
        squares += (wide * wide).sum((0, 2, 3))
    count = x.numel() // x.shape[1]
    mean = [int(value) / count for value in total]
    # count · Σx² - (Σx)² is a whole number: no digits cancel
    spread = [count * int(second) - int(first) ** 2 for first, second in zip(total, squares, strict=True)]
    return tuple(mean), tuple(value**0.5 / count if value else 1.0 for value in spread)
