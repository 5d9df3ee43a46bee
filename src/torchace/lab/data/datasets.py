"""Image data sets by name; their files: the idx format of MNIST, the binary version of CIFAR-10."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import tarfile
import tomllib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from torchace._checks import check_choice
from torchace._extras import import_extra
from torchace._files import error_reason
from torchace.lab.data.batches import Statistics
from torchace.lab.data.errors import DataError
from torchace.lab.data.splits import Split, stratified_split
from torchace.lab.schema.reading import did_you_mean

ENVIRONMENT = "TORCHACE_DATA"


@dataclass(frozen=True)
class IdxFile:
    """One idx file; `sha256` is of the downloaded .gz, `content` of the array (None: not compared)."""

    name: str
    shape: tuple[int, ...]
    sha256: str
    content: str | None = None


@dataclass(frozen=True)
class Source:
    """Data set with `folders` to search under `$TORCHACE_DATA`: four idx files, or an archive of six batches."""

    name: str
    title: str
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    urls: tuple[str, ...]
    train: tuple[IdxFile, ...] = ()  # images and labels
    test: tuple[IdxFile, ...] = ()
    archive: str = ""
    sha256: str = ""  # of the archive
    count: int = 0  # images in a batch
    batches: dict[str, str] = field(default_factory=dict, repr=False)  # file name: SHA-256; the last for testing


_CONTENT = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())
SOURCES = TypeAdapter(dict[str, Source]).validate_python(
    {name: {"name": name, **content} for name, content in _CONTENT.items()}
)
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


# -- files -------------------------------------------------------------------------------------------------------------


def damaged_file(path: Path | str, reason: str) -> DataError:
    """Error for a data set file that is not the official one."""
    return DataError(f"{path} {reason}; replace it with the original file, or delete it to download it again.")


def cache_dir() -> Path:
    """Download folder: `$XDG_CACHE_HOME/torchace`, else `~/.cache/torchace`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torchace"


def search_path(source: Source, directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders to search for a data set: below `directory` or `$TORCHACE_DATA`, then the user's cache.

    A missing root folder is an error: a misspelled name must not start a download.
    """
    given = os.fspath(directory) if directory is not None else os.environ.get(ENVIRONMENT, "")
    if not given:
        return [cache_dir() / source.name]
    root = Path(given).expanduser()
    if not root.is_dir():
        origin = "`directory`" if directory is not None else f"the environment variable {ENVIRONMENT}"
        raise DataError(f"{root}, named by {origin}, is not a folder; correct the name, or leave it out.")
    return [*(root / folder for folder in source.folders), cache_dir() / source.name]


def find(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """First existing file among `names` in the first folder that has one."""
    return next((folder / name for folder in folders for name in names if (folder / name).exists()), None)


def download_file(source: Source, name: str, sha256: str, folder: Path, *, progress: bool = True) -> Path:
    """Download a file from the first working address; it appears only complete and with the right hash."""
    pooch = import_extra("pooch", f"Downloading {source.title} needs")
    pooch.get_logger().setLevel("INFO" if progress else "WARNING")
    failures = []
    for url in source.urls:
        try:
            downloader = pooch.HTTPDownloader(progressbar=progress, timeout=30)
            return Path(pooch.retrieve(url + name, f"sha256:{sha256}", fname=name, path=folder, downloader=downloader))
        except (OSError, ValueError) as error:  # network errors are OSErrors, a wrong hash is a ValueError
            failures.append(f"{urlsplit(url).hostname}: {error_reason(error)}")
    raise DataError(
        f"{name} of {source.title} could not be downloaded ({'; '.join(failures)}); check the connection, or put the "
        f"file in {folder} or in the folder that {ENVIRONMENT} names."
    )


def read_idx(path: Path, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes with the expected shape; gzip is detected by its first bytes."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, EOFError, zlib.error) as error:
        raise damaged_file(path, f"cannot be read ({error_reason(error)})") from None
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)  # 8: unsigned bytes
    if not data.startswith(header) or len(data) != len(header) + math.prod(shape):
        raise damaged_file(path, f"is not an idx file of {' x '.join(map(str, shape))} bytes")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)


Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (N, 3, 32, 32), labels (N,)
_PIXELS = 3 * 32 * 32


def read_cifar(folder_or_archive: Path, source: Source) -> list[Arrays]:
    """Read the batches in a folder or in the official .tar.gz, the test batch last."""
    files: dict[str, bytes] = {}
    try:
        if folder_or_archive.is_dir():
            found = (folder_or_archive / name for name in source.batches)
            files = {path.name: path.read_bytes() for path in found if path.exists()}
        else:
            with tarfile.open(folder_or_archive) as archive:
                for member in archive:
                    content = archive.extractfile(member)  # None for a folder
                    if content is not None:
                        files[Path(member.name).name] = content.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise damaged_file(folder_or_archive, f"cannot be read ({error_reason(error)})") from None
    batches = []
    for name, digest in source.batches.items():
        path, size = folder_or_archive / name, source.count * (_PIXELS + 1)
        data = files.get(name)
        if data is None:
            raise DataError(f"{path} is missing; add it, or remove the other batches to download all of them.")
        if len(data) != size or (digest and hashlib.sha256(data).hexdigest() != digest):
            raise damaged_file(path, f"is not the official {source.title} batch: its size or SHA-256 is wrong")
        # each record: label byte, then red, green and blue planes
        records = np.frombuffer(data, np.uint8).reshape(source.count, _PIXELS + 1)
        batches.append((records[:, 1:].reshape(source.count, 3, 32, 32), records[:, 0]))
    return batches
