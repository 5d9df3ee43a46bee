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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from torchace._extras import import_extra
from torchace.lab.data.errors import DataError, check_labels, damaged_file

ENVIRONMENT = "TORCHACE_DATA"


def cache_dir() -> Path:
    """Download folder: `$XDG_CACHE_HOME/torchace`, else `~/.cache/torchace`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torchace"


def search_path(name: str, folders: Sequence[str], directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders to search for a data set: below `directory` or `$TORCHACE_DATA`, then the user's cache.

    A missing root folder is an error: a misspelled name must not start a download.
    """
    given = os.fspath(directory) if directory is not None else os.environ.get(ENVIRONMENT, "")
    if not given:
        return [cache_dir() / name]
    root = Path(os.path.expanduser(given))
    if not root.is_dir():
        origin = "`directory`" if directory is not None else f"the environment variable {ENVIRONMENT}"
        raise DataError(f"{root}, named by {origin}, is not a folder; correct the name, or leave it out.")
    return [*(root / folder for folder in folders), cache_dir() / name]


def is_present(path: Path) -> bool:
    """Whether anything exists at this path."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be accessed ({error.strerror}); check the folder's permissions.") from None
    return True


def find(path: Sequence[Path], names: Sequence[str]) -> Path | None:
    """First existing file among `names` in the first folder that has one."""
    return next((folder / name for folder in path for name in names if is_present(folder / name)), None)


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise system errors as `DataError`."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise damaged_file(path, f"cannot be read ({error.strerror or error})") from None


def download(title: str, name: str, *, urls: Sequence[str], sha256: str, folder: Path, progress: bool = True) -> Path:
    """Download a file from the first working address; it appears only complete and with the right hash."""
    pooch = import_extra("pooch", f"Downloading {title} needs")
    failures = []
    log = pooch.get_logger()
    level = log.level
    for url in urls:
        bar = _ProgressBar(name) if progress else None
        log.setLevel("WARNING")  # the progress bar replaces pooch's messages
        try:
            downloader = pooch.HTTPDownloader(progressbar=bar or False, chunk_size=1 << 16, timeout=30)
            return Path(pooch.retrieve(url + name, f"sha256:{sha256}", fname=name, path=folder, downloader=downloader))
        except (OSError, ValueError) as error:  # network errors are OSErrors, a wrong hash is a ValueError
            failures.append(f"{urlsplit(url).hostname}: {_download_error(error, folder)}")
        finally:
            log.setLevel(level)
            if bar is not None:
                bar.close()
    raise DataError(
        f"{name} of {title} could not be downloaded ({'; '.join(failures)}); check the connection, or put the file in "
        f"{folder} or in the folder that {ENVIRONMENT} names."
    )


def _download_error(error: Exception, folder: Path) -> str:
    requests = import_extra("requests", "Downloading needs")
    if isinstance(error, requests.HTTPError):
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer"
    if isinstance(error, requests.RequestException):
        return "no connection"
    if isinstance(error, OSError):
        return f"{folder} cannot be written, {error.strerror or type(error).__name__}"
    return "the downloaded file has the wrong SHA-256"


class _ProgressBar:
    """Adapt rich's progress bar to the interface that pooch expects."""

    def __init__(self, name: str) -> None:
        console = import_extra("rich.console", "A progress bar needs").Console(stderr=True)
        rich = import_extra("rich.progress", "A progress bar needs")
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
        self._progress: Any = rich.Progress(*columns, rich.TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task(name, total=None)
        self._progress.start()
        self.close = self._progress.stop

    @property
    def total(self) -> float | None:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total or None)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)


@dataclass(frozen=True)
class IdxFile:
    """One idx file; `sha256` is of the downloaded .gz, `content` of the array (None: not compared)."""

    name: str
    shape: tuple[int, ...]
    sha256: str
    content: str | None = None


@dataclass(frozen=True)
class Source:
    """Data set with `folders` to search under `$TORCHACE_DATA`."""

    name: str
    title: str
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    urls: tuple[str, ...]


@dataclass(frozen=True)
class IdxSource(Source):
    """Data set of four idx files: images and labels for training and testing."""

    train: tuple[IdxFile, IdxFile]
    test: tuple[IdxFile, IdxFile]


@dataclass(frozen=True)
class CifarSource(Source):
    """CIFAR-10 in six batches of `count` images, the last for testing."""

    archive: str
    sha256: str  # of the archive
    count: int
    batches: dict[str, str] = field(repr=False)  # file name: SHA-256


_CONTENT = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())
SOURCES = TypeAdapter(dict[str, IdxSource | CifarSource]).validate_python(
    {name: {"name": name, **content} for name, content in _CONTENT.items()}
)


def read_idx(path: Path, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes with the expected shape; gzip is detected by its first bytes."""
    with open_data(path) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            header = stream.read(4 + 4 * len(shape))
            _check_header(header, path, shape)
            # one extra byte: finds trailing bytes and triggers gzip's checksum
            data = stream.read(math.prod(shape) + 1)
        except EOFError:
            raise damaged_file(path, "is truncated: its gzip stream has no end") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise damaged_file(path, f"is not a complete gzip file ({error})") from None
    if len(data) != math.prod(shape):
        amount = f"only {len(data)}" if len(data) < math.prod(shape) else "more"
        raise damaged_file(path, f"holds {amount} bytes of data but its header says {math.prod(shape)}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _check_header(header: bytes, path: Path, shape: tuple[int, ...]) -> None:
    if not header:
        raise damaged_file(path, "is empty")
    if header[:4].lstrip()[:1] == b"<":
        raise damaged_file(path, "is a web page, not data")
    if len(header) < 4 or header[:2] != b"\0\0":
        raise damaged_file(path, f"is not an idx file: it starts with {header[:4].hex(' ')}, not with 00 00")
    if header[2] != 0x08:
        raise damaged_file(path, f"holds idx type 0x{header[2]:02x}, not unsigned bytes (0x08)")
    if header[3] != len(shape):
        hint = " (images and labels swapped?)" if {header[3], len(shape)} == {1, 3} else ""
        raise damaged_file(path, f"holds an array of {header[3]} dimensions, not {len(shape)}{hint}")
    if len(header) < 4 + 4 * len(shape):
        raise damaged_file(path, "is truncated within its header")
    found = struct.unpack(f">{len(shape)}I", header[4:])
    if found != shape:
        raise damaged_file(path, f"holds an array of {' x '.join(map(str, found))}, not {' x '.join(map(str, shape))}")


Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (N, 3, 32, 32), labels (N,)
_PIXELS = 3 * 32 * 32
_UNPACKED_BYTES = 1 << 28  # limit for an archive; the official one has 184 million


def read_folder(folder: Path, source: CifarSource) -> list[Arrays]:
    """Read the batches in a folder, the test batch last."""

    def read(name: str) -> bytes:
        path = folder / name
        if not is_present(path):
            raise DataError(
                f"{path} is missing, but other batches of {source.title} are there; add it, or remove the others to "
                "download all of them."
            )
        try:
            return path.read_bytes()
        except OSError as error:
            raise damaged_file(path, f"cannot be read ({error.strerror or error})") from None

    return _read_batches(source, read, folder)


def read_archive(path: Path, source: CifarSource) -> list[Arrays]:
    """Read the batches of the official .tar.gz in memory."""
    found: dict[str, bytes] = {}
    with open_data(path) as file:
        try:
            stream = gzip.GzipFile(fileobj=file)
            while len(found) < len(source.batches) and stream.tell() < _UNPACKED_BYTES:
                # One header at a time: tarfile would read headers of any length into memory.
                header = stream.read(tarfile.BLOCKSIZE)
                if header == bytes(tarfile.BLOCKSIZE):
                    break
                member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                end = stream.tell() + -(-max(member.size, 0) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                name = member.name.rpartition("/")[2]
                if name in source.batches and member.isreg() and 0 <= member.size <= _max_bytes(source):
                    found[name] = stream.read(member.size)
                while stream.tell() < min(end, _UNPACKED_BYTES) and stream.read(min(end - stream.tell(), 1 << 20)):
                    pass
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = str(error) or "its gzip stream has no end"
            raise damaged_file(path, f"is not a complete .tar.gz archive ({reason})") from None

    def read(name: str) -> bytes:
        if name not in found:
            raise damaged_file(path, f"has no file {name}")
        return found[name]

    return _read_batches(source, read, path)


def _read_batches(source: CifarSource, read: Callable[[str], bytes], where: Path) -> list[Arrays]:
    batches = []
    for name, digest in source.batches.items():
        data, path = read(name), where / name
        if len(data) != source.count * (_PIXELS + 1):
            raise damaged_file(
                path, f"has {len(data)} bytes, but {source.count} images take {source.count * (_PIXELS + 1)}"
            )
        # each record: label byte, then red, green and blue planes
        records = np.frombuffer(data, np.uint8).reshape(source.count, _PIXELS + 1)
        labels = np.ascontiguousarray(records[:, 0])
        check_labels(labels, path, len(source.class_names))
        if digest and hashlib.sha256(data).hexdigest() != digest:
            raise damaged_file(path, f"is a {source.title} batch with altered content (its SHA-256 is wrong)")
        batches.append((records[:, 1:].reshape(source.count, 3, 32, 32), labels))
    return batches


def _max_bytes(source: CifarSource) -> int:
    return 2 * source.count * (_PIXELS + 1)
