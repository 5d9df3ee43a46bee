"""Image data sets by name: digits, mnist, fashion_mnist, cifar10."""

from __future__ import annotations

import hashlib
import os
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
from torchace.lab.data.errors import DataError, check_labels, damaged_file
from torchace.lab.data.image_files import (
    ENVIRONMENT,
    SOURCES,
    CifarSource,
    IdxSource,
    find,
    read_archive,
    read_folder,
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
    path = search_path(source.name, source.folders, directory)
    if isinstance(source, CifarSource):
        train, test = _cifar_parts(source, path, download, progress)
    else:
        train, test = _idx_parts(source, path, download, progress)
    return _dataset(source.name, train, test, class_names=source.class_names, max_value=255)


def _idx_parts(source: IdxSource, path: list[Path], may_download: bool, progress: bool) -> list[Split]:
    # locate all four first: report a missing file before reading any
    located = {}
    for file in (*source.train, *source.test):
        names = (f"{file.name}.gz", file.name, file.name.replace("-idx", ".idx"))
        found = find(path, names)
        located[file.name] = found or _download(source, names[0], file.sha256, path, may_download, progress)
    splits = []
    for part in (source.train, source.test):
        arrays = []
        for file in part:
            array, where = read_idx(located[file.name], shape=file.shape), located[file.name]
            if array.ndim == 1:
                check_labels(array, where, len(source.class_names))
            digest = hashlib.sha256(array.data).hexdigest()
            # MNIST and Fashion-MNIST use the same file names
            for other in (o for o in SOURCES.values() if isinstance(o, IdxSource) and o.name != source.name):
                if digest in {known.content for known in (*other.train, *other.test)}:
                    raise damaged_file(where, f"belongs to {other.title}, not to {source.title}")
            if file.content is not None and digest != file.content:
                reason = f"is not the official file of {source.title}: its content has the wrong SHA-256"
                raise damaged_file(where, reason)
            arrays.append(array)
        splits.append(_split(arrays[0][:, None], arrays[1]))
    return splits


def _cifar_parts(source: CifarSource, path: list[Path], may_download: bool, progress: bool) -> list[Split]:
    folders = [folder / inner for folder in path for inner in ("cifar-10-batches-bin", ".")]
    batch = find(folders, list(source.batches))
    archive = find(path, [source.archive])
    if batch is not None:
        batches = read_folder(batch.parent, source)
    elif archive is not None:
        batches = read_archive(archive, source)
    else:
        python_names = ["cifar-10-batches-py", "cifar-10-python.tar.gz", *(Path(name).stem for name in source.batches)]
        if (found := find(path, python_names)) is not None:
            raise DataError(
                f"{found} is the Python version of {source.title}, a pickle, which is never loaded; use the binary "
                f"version ({source.archive}), or remove this one to download it."
            )
        archive = _download(source, source.archive, source.sha256, path, may_download, progress)
        batches = read_archive(archive, source)
    x, y = (np.concatenate([batch[part] for batch in batches[:-1]]) for part in (0, 1))
    return [_split(x, y), _split(*batches[-1])]


def _download(
    source: IdxSource | CifarSource, name: str, sha256: str, path: list[Path], may_download: bool, progress: bool
) -> Path:
    if not may_download:
        raise DataError(
            f"{name} of {source.title} was not found in {', '.join(map(str, path))}; put the official file in one of "
            f"these folders, set {ENVIRONMENT} to the folder that has it, or allow the download."
        )
    return download_file(source.title, name, urls=source.urls, sha256=sha256, folder=path[-1], progress=progress)


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
