"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torchace._files import PARTIAL, held, temporary_beside
from torchace._files import remove_abandoned as _remove_abandoned


def write_whole(path: Path, data: bytes) -> None:
    """Writes to a temporary name beside `path`, flushes it to the disk, renames it.

    Whatever stops the process, `path` holds either what it held before or all of `data`. An `OSError` (a full disk)
    names `path`, leaves it as it was and leaves no temporary file.
    """
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` when everything is written; see `write_whole`."""
    # a name of this process: files opened by name, unlike those of `tempfile`, get the user's permissions
    temporary = temporary_beside(path)
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(b"")
            with held(temporary):
                yield temporary
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
                for folder in new:
                    folder.rmdir()
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


def remove_abandoned(path: Path) -> None:
    """Removes temporary files that killed processes left when they wrote `path`; those of live ones stay."""
    _remove_abandoned(path, os.unlink)


def remove_partial(directory: Path) -> None:
    """Removes temporary files that a killed process left behind, in a directory that nobody else writes to."""
    for leftover in directory.glob(f".*{PARTIAL}"):
        leftover.unlink(missing_ok=True)
