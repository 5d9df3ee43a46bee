"""Bounded reads of untrusted files, atomic writes, checksums and path checks.

Only regular files are read, and bounds are checked before memory is allocated. A refused file raises an `OSError`
whose `strerror` gives the reason.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None  # None: Windows, which removes no open file

JSON_BYTES = 1 << 25
JSON_VALUES = 4_000_000  # each takes about 100 bytes in memory
JSON_DEPTH = 100
TOML_BYTES = 1 << 20
ARRAYS_BYTES = 1 << 28  # arrays beside a result
UNPACKED_BYTES = 1 << 26  # of any compressed table
UNPACKED_PREDICTIONS = 1 << 22  # of predictions, which cost more to process
UNPACKED_RATIO = 100  # further bytes per byte of the file; real tables have 2 to 30
CHUNK_BYTES = 1 << 26  # of a table in memory at once
TABLE_COLUMNS = 50_000
PARTIAL = ".partial"  # suffix of files and folders that are being written
CHECKSUM = "sha256"  # key of a JSON file's own checksum

StrPath = str | os.PathLike[str]


class FileRefusedError(OSError):
    """A file that is not a regular file or would cost too much memory; see `strerror`."""

    def __init__(self, path: StrPath, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, os.fspath(path))


class PathError(ValueError):
    """A path outside the directory it belongs to."""


def is_name(value: object) -> bool:
    """Whether a value may be part of a path: letters, digits and `_.-`, no dot or dash first."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", value) is not None


def refuse_links(directory: Path, names: Iterable[str]) -> None:
    """Raise `PathError` for links, pipes and devices among entries of a directory and everything below them."""
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
            raise PathError(f"{path} is {kind}, which torchace never creates. Remove it, or choose another directory.")


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


def error_reason(error: BaseException) -> str:
    """Return the first sentence of an error's message, for use inside another message."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return re.split(r"[\r\n]|\.(?:\s|$)", text.strip(), maxsplit=1)[0][:200]


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading; anything else, such as a pipe that could block, is an `OSError`."""
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    try:
        _check_mode(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def check_regular(path: StrPath) -> None:
    """Refuse anything but a regular file."""
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: StrPath, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise FileRefusedError(path, "not a regular file")


def read_bounded(path: StrPath, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(size + 1)  # one more byte: the file may be growing
        if max(size, len(data)) > limit:
            raise FileRefusedError(path, f"{size:,} bytes, more than the limit of {limit:,}")
        return data


def read_json(path: StrPath) -> Any:
    """Read a JSON file within the bounds; raises `OSError` (refused) or `ValueError` (not JSON, nested too deeply)."""
    return parse_json(read_bounded(path, JSON_BYTES))


def parse_json(data: bytes, **options: Any) -> Any:
    """Parse UTF-8 JSON within the bounds, with options of `json.loads`; anything else is a `ValueError`."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES:
        raise ValueError(f"more than {JSON_VALUES:,} values")
    try:
        value = json.loads(data.decode(), **options)
    except RecursionError:
        raise ValueError(f"nested more than {JSON_DEPTH} levels deep") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuse lists and dictionaries nested too deeply for recursive functions."""
    level = [value]
    for _ in range(JSON_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested more than {JSON_DEPTH} levels deep")


def check_unpacked(path: StrPath, packed: int, unpacked: int, *, allowed: int = UNPACKED_BYTES) -> None:
    """Refuse a compressed file whose content is larger than `allowed` and far larger than the file."""
    if unpacked > allowed + UNPACKED_RATIO * packed:
        raise FileRefusedError(
            path, f"{packed:,} bytes that unpack to {unpacked:,} or more, far too much for a file of this size"
        )


def check_gzip(path: StrPath) -> None:
    """Refuse a gzip file whose content is far larger than the file; other damage is left to the reader."""
    data, unpacked, padding = b"", 0, 0
    with open_regular(path) as file, contextlib.suppress(zlib.error):
        stream = zlib.decompressobj(31)
        while data or (data := file.read(1 << 14)):
            if stream.eof:  # zeros may follow, which Python's gzip reads one by one, and then another member
                padding += len(data) - len(data := data.lstrip(b"\0"))
                if padding > 1 << 20:
                    raise FileRefusedError(path, "it ends in more than a million zeros")
                if not data:
                    continue
                stream = zlib.decompressobj(31)
            unpacked += len(stream.decompress(data, 1 << 20))
            data = stream.unconsumed_tail or stream.unused_data
            check_unpacked(path, file.tell() - len(data), unpacked)


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate (machine, control group, process); None if unknown."""
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not limits:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limits.append(max(0, limit - used))
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
    # not `tempfile`, whose files lack the user's default permissions
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)  # of a killed process with the same id
            with open(temporary, "xb"):  # never through a link
                pass
            with file_lock(temporary):
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
        fsync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def fsync_directory(directory: Path) -> None:
    """Flush a directory, so that a rename in it survives a power failure."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, which cannot open one
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot flush directories
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock a temporary file or folder against `remove_abandoned` of other processes."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(path: Path, remove: Callable[[Path], None] = os.unlink) -> None:
    """Remove unlocked temporary files (with `remove`, folders) of killed processes for `path`."""
    _remove_unlocked(path.parent, rf"\.{re.escape(path.name)}\.[0-9A-Za-z]+", remove)


def remove_partial(directory: Path) -> None:
    """Remove all unlocked temporary files of killed processes in a directory."""
    _remove_unlocked(directory, r"\..+\.[0-9]+", os.unlink)


def _remove_unlocked(directory: Path, pattern: str, remove: Callable[[Path], None]) -> None:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        temporary = directory / name
        if not re.fullmatch(pattern + re.escape(PARTIAL), name, re.DOTALL) or temporary.is_symlink():
            continue
        with contextlib.suppress(OSError):
            if fcntl is None:
                remove(temporary)
                continue
            descriptor = os.open(temporary, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(temporary)
            finally:
                os.close(descriptor)
