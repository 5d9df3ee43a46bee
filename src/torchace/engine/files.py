"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes to a temporary name beside `path`, flushes it to the disk, renames it.

    Whatever stops the process, `path` holds either what it held before or all of `data`. An `OSError` (a full disk)
    leaves `path` as it was and no temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Makes a rename in a directory outlast a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(directory: Path) -> None:
    """Removes temporary files that a killed process left behind."""
    for leftover in directory.glob(".*.partial"):
        leftover.unlink(missing_ok=True)
