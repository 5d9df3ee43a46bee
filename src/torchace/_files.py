"""Files: those that anybody may have written are read within bounds; ours are written whole or not at all.

Regular files alone are read. Every bound stands here, and is checked before anything is built from a file, so that a
small one cannot take much memory or time. What is refused is an `OSError` whose `strerror` says why, in words that fit
into any sentence.
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
JSON_VALUES = 4_000_000  # a value takes some 100 bytes in memory, whatever it takes in the file
JSON_DEPTH = 100
TOML_BYTES = 1 << 20
ARRAYS_BYTES = 1 << 28  # of arrays beside a result
UNPACKED_BYTES = 1 << 26  # what any packed table may hold
UNPACKED_PREDICTIONS = 1 << 22  # the same of predictions, with which far more is done
UNPACKED_RATIO = 100  # beyond that, bytes for each byte of the file; real tables have 2 to 30
CHUNK_BYTES = 1 << 26  # of a table that are worked with at once
TABLE_COLUMNS = 50_000
PARTIAL = ".partial"  # how the name of a file or folder ends that is being written
CHECKSUM = "sha256"  # the key of a JSON file's own checksum

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_TEMPORARY = re.compile(rf"\..+\.[0-9]+{re.escape(PARTIAL)}")

StrPath = str | os.PathLike[str]


class Refused(OSError):
    """A file that is not read, since it is none or would cost too much; `strerror` says why."""


def refusal(path: StrPath, why: str) -> Refused:
    """An error that says why a file is not read."""
    return Refused(errno.EINVAL, why, os.fspath(path))


# -- names, links, checksums -------------------------------------------------------------------------------------------


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
        >>> is_unchanged(whole), is_unchanged({**whole, "seed": 4})
        (True, False)
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


# -- reading ----------------------------------------------------------------------------------------------------------


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading; anything else, such as a pipe that would wait for ever, is an `OSError`."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    try:
        _check_mode(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_regular(path: StrPath) -> None:
    """Refuse what is not a regular file, before a library opens it by name."""
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: StrPath, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise refusal(path, "not a regular file")


def read_bounded(path: StrPath, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(size + 1)  # one more: a file that grows is not read for ever
        if max(size, len(data)) > limit:
            raise refusal(path, f"{size:,} bytes, more than the {limit:,} that it may have")
        return data


def read_json(path: StrPath) -> Any:
    """The content of a JSON file within the bounds.

    Raises:
        OSError: The file cannot be read, or must not be.
        ValueError: It is not JSON, or nested too deeply.
    """
    return parse_json(read_bounded(path, JSON_BYTES))


def parse_json(data: bytes, **options: Any) -> Any:
    """JSON within the bounds, or a `ValueError`.

    Args:
        data: UTF-8.
        options: Those of `json.loads`.

    Example:
        >>> parse_json(b'{"a": [1, 2]}')
        {'a': [1, 2]}
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES:
        raise ValueError(f"more than {JSON_VALUES:,} values")
    try:
        value = json.loads(data.decode(), **options)
    except RecursionError:
        raise ValueError(f"nested more than {JSON_DEPTH} levels deep") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuse lists and dictionaries within each other that recursive functions could not follow."""
    level = [value]
    for _ in range(JSON_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested more than {JSON_DEPTH} levels deep")


# -- packed files -----------------------------------------------------------------------------------------------------


def check_unpacked(path: StrPath, packed: int, unpacked: int, *, allowed: int = UNPACKED_BYTES) -> None:
    """Refuse a file that would become far more than it is, and more than what any file may become."""
    if unpacked > allowed + UNPACKED_RATIO * packed:
        raise refusal(
            path, f"{packed:,} bytes that hold {unpacked:,} or more, so it would take far more memory than it seems"
        )


def check_gzip(path: StrPath) -> None:
    """Refuse a gzip file that would become far more than it is; what else is wrong with it shows when it is read."""
    data, unpacked, padding = b"", 0, 0
    with open_regular(path) as file, contextlib.suppress(zlib.error):
        stream = zlib.decompressobj(31)
        while data or (data := file.read(1 << 14)):
            if stream.eof:  # zeros may follow, which Python's gzip reads one by one, and then another member
                padding += len(data) - len(data := data.lstrip(b"\0"))
                if padding > 1 << 20:
                    raise refusal(path, "it ends in more than a million zeros")
                if not data:
                    continue
                stream = zlib.decompressobj(31)
            unpacked += len(stream.decompress(data, 1 << 20))
            data = stream.unconsumed_tail or stream.unused_data
            check_unpacked(path, file.tell() - len(data), unpacked)


# -- memory -----------------------------------------------------------------------------------------------------------


def available_memory() -> int | None:
    """Bytes that this process may still take: of the machine's memory, its control group's and its own limit.

    None where the system does not say.
    """
    found = [_machine_memory(), _group_memory(), _limit_memory()]
    return min((value for value in found if value is not None), default=None)


def _machine_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _group_memory() -> int | None:
    """A control group's limit; how much of it is used is not subtracted, since that counts cached files too."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            return int(Path("/sys/fs/cgroup", name).read_text())
    return None


def _limit_memory() -> int | None:
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            return max(0, limit - used)
    return None


# -- writing -----------------------------------------------------------------------------------------------------------


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)  # of a killed process that had our number
            with open(temporary, "xb"):  # never through a link
                pass
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


@contextlib.contextmanager
def held(temporary: Path) -> Iterator[None]:
    """Mark a temporary file or folder as in use for as long as this process lives."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(path: Path, remove: Callable[[Path], None] = os.unlink) -> None:
    """Remove what killed processes left beside `path` under temporary names; those in use stay."""
    try:
        names = [name for name in os.listdir(path.parent) if name.startswith(f".{path.name}.")]
    except OSError:
        return
    for name in names:
        temporary = path.with_name(name)
        middle = name[len(path.name) + 2 : -len(PARTIAL)]
        if not name.endswith(PARTIAL) or not middle.isalnum() or temporary.is_symlink():
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


def remove_partial(directory: Path) -> None:
    """Remove temporary files of a killed process from a directory that no other process writes to."""
    for leftover in directory.glob(f".*{PARTIAL}"):
        if _TEMPORARY.fullmatch(leftover.name) and not leftover.is_dir():
            leftover.unlink(missing_ok=True)
