"""Atomic writes, checksums of JSON files and small helpers for reading files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 1 << 26  # of a table in memory at once
PARTIAL = ".partial"  # suffix of files and folders that are being written
CHECKSUM = "sha256"  # key of a JSON file's own checksum

StrPath = str | os.PathLike[str]


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add a JSON object's own SHA-256 to it."""
    return {**content, CHECKSUM: json_digest(content)}


def is_unchanged(content: Mapping[str, Any]) -> bool:
    """Whether the checksum of `with_checksum` still matches."""
    try:
        return content.get(CHECKSUM) == json_digest({key: value for key, value in content.items() if key != CHECKSUM})
    except ValueError:  # infinite numbers, which are never written
        return False


def json_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read_json(path: StrPath) -> Any:
    """Read a JSON file; raises `OSError` or `ValueError` (not JSON)."""
    return json.loads(Path(path).read_bytes())


def read_npz(path: StrPath, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Read the named arrays of an NPZ file, as far as present, or all; raises `OSError` or `ValueError` (damaged)."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if names is None or name in names}
    except (OSError, ValueError):
        raise
    except Exception as error:  # of zipfile, zlib and numpy's header reader
        raise ValueError(str(error) or "it is not an NPZ file") from error
    if other := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"{other[0]!r} is not an array")
    return arrays


def error_reason(error: BaseException) -> str:
    """Return the first sentence of an error's message, for use inside another message."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return re.split(r"[\r\n]|\.(?:\s|$)", text.strip(), maxsplit=1)[0][:200]


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate on Linux (machine, control group); None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits, default=None)


def write_atomic(path: Path, data: bytes) -> None:
    """Write to a temporary name beside `path`, flush it to the disk, rename it.

    `path` always holds its old content or all of `data`; an `OSError` (a full disk) leaves no temporary file.
    """
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name that is renamed to `path` when the block ends without an error; see `write_atomic`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def fsync_directory(directory: Path) -> None:
    """Flush a directory, so that a rename in it survives a power failure."""
    if os.name == "nt":  # which cannot open directories
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot flush directories
            raise
    finally:
        os.close(descriptor)


def remove_partial(directory: Path) -> None:
    """Remove temporary files of killed processes in a directory to which no other process writes."""
    for temporary in directory.glob(f".*.[0-9]*{PARTIAL}"):
        if temporary.is_file():
            temporary.unlink(missing_ok=True)
