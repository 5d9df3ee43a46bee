"""Files of image data sets: found or downloaded; the idx format of MNIST, the binary version of CIFAR-10."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import tarfile
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from torchace._extras import import_extra
from torchace._files import error_reason
from torchace.lab.data.errors import DataError

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


def download(source: Source, name: str, sha256: str, folder: Path, *, progress: bool = True) -> Path:
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


# -- formats -----------------------------------------------------------------------------------------------------------


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
