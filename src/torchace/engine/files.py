"""Files that are there whole or not at all, where they belong, and as they were written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # how the name of a file ends that is being written
CHECKSUM = "sha256"  # the key of a JSON file's own checksum

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_TEMPORARY = re.compile(rf"\..+\.[0-9]+{re.escape(PARTIAL)}")


class PathError(ValueError):
    """A path that leads somewhere else: one sentence that says where and what to do."""


def is_name(value: object) -> bool:
    """Whether a value read from a file may be part of a path: letters, digits and `_.-`, no dot or dash first.

    Example:
        >>> is_name("main-l0.5-s3"), is_name("../main"), is_name("/etc"), is_name(3)
        (True, False, False, False)
    """
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def refuse_links(directory: Path, names: Iterable[str]) -> None:
    """Refuse links, pipes and devices among entries of a directory and everything below them.

    What is written to or removed from them would be elsewhere. The directory itself may be a link.
    """
    pending = [directory / name for name in names]
    while pending:
        path = pending.pop()
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISDIR(mode):
            pending += path.iterdir()
        elif not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a directory"
            raise PathError(f"{path} is {kind}, which torchace never makes. Remove it, or choose another directory.")


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own SHA-256 in it.

    Example:
        >>> whole = with_checksum({"seed": 3})
        >>> whole["sha256"][:8], is_unchanged(whole), is_unchanged({**whole, "seed": 4})
        ('fad9366d', True, False)
    """
    return {**content, CHECKSUM: json_digest(content)}


def is_unchanged(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object is what `with_checksum` gave."""
    try:
        return content.get(CHECKSUM) == json_digest({key: value for key, value in content.items() if key != CHECKSUM})
    except ValueError:  # infinite numbers, which are never written
        return False


def json_digest(content: Mapping[str, Any]) -> str:
    """A SHA-256 of what JSON holds, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


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
            temporary.unlink(missing_ok=True)  # of a killed process that had our number
            with open(temporary, "xb") as file:
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
        if _TEMPORARY.fullmatch(leftover.name) and not leftover.is_dir():
            leftover.unlink(missing_ok=True)
