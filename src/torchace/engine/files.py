"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PARTIAL = ".partial"  # how the name of a file ends that is being written


def write_whole(path: Path, data: bytes) -> None:
    """Writes to a temporary name beside `path`, flushes it to the disk, renames it.

    Whatever stops the process, `path` holds either what it held before or all of `data`. An `OSError` (a full disk)
    names `path`, leaves it as it was and leaves no temporary file.
    """
    # a name of this process: files opened by name, unlike those of `tempfile`, get the user's permissions
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        flush_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush_directory(directory: Path) -> None:
    """Makes a rename in a directory outlast a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(directory: Path) -> None:
    """Removes temporary files that a killed process left behind."""
    for leftover in directory.glob(f".*{PARTIAL}"):
        leftover.unlink(missing_ok=True)
