"""CIFAR-10's batches: the binary version, the Python version, and the archives of both."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.errors import DataError, check_labels, damaged
from torchace.lab.data.files import is_present, opened
from torchace.lab.data.pickled import Call, Name, read_pickled
from torchace.lab.data.sources import CifarSource

Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (N, 3, 32, 32), labels (N,)
_PIXELS = 3 * 32 * 32
_LONGEST = 1 << 28  # bytes of an unpacked archive that are looked at; the official ones have 184 million
_RECONSTRUCT = "numpy.core.multiarray _reconstruct"


def read_binary_batch(data: bytes, path: Path | str, *, count: int, num_classes: int = 10) -> Arrays:
    """A batch of the binary version: for each image a label byte, then its red, green and blue planes."""
    if len(data) != count * (_PIXELS + 1):
        raise damaged(path, f"has {len(data)} bytes, but {count} images take {count * (_PIXELS + 1)}")
    records = np.frombuffer(data, np.uint8).reshape(count, _PIXELS + 1)
    labels = np.ascontiguousarray(records[:, 0])
    check_labels(labels, path, num_classes)
    return records[:, 1:].reshape(count, 3, 32, 32), labels


def read_python_batch(data: bytes, path: Path | str, *, count: int, num_classes: int = 10) -> Arrays:
    """A batch of the Python version: a pickle of which nothing is executed (see `torchace.lab.data.pickled`)."""
    try:
        # an image takes three to four instructions: its label, its file name and where that is remembered
        batch = read_pickled(data, max_instructions=10 * count + 1000)
        pixels, labels = _content(batch, count)
    except ValueError as error:
        raise damaged(path, f"is not an official CIFAR-10 Python batch ({error})") from None
    check_labels(labels, path, num_classes)
    return pixels.reshape(count, 3, 32, 32), labels.astype(np.uint8)


def read_folder(folder: Path, source: CifarSource) -> list[Arrays]:
    """The batches of a folder of batch files, binary or Python; the test batch last."""

    def read(name: str) -> bytes:
        path = folder / name
        if not is_present(path):
            raise DataError(
                f"{path} is missing beside the other batches of {source.title}; put it there, or take the others away "
                "to have all of them downloaded."
            )
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _most_bytes(source):
                raise damaged(path, f"has {size} bytes, too many for {source.count} images")
            return file.read()

    binary = any(is_present(folder / name) for name in source.binary)
    return _batches(source, binary, read, folder)


def read_archive(path: Path, source: CifarSource) -> list[Arrays]:
    """The batches of an official .tar.gz, read in place; nothing is unpacked to disk."""
    wanted = {*source.binary, *source.python}
    found: dict[str, bytes] = {}
    with opened(path) as file:
        try:
            stream = gzip.GzipFile(fileobj=file)
            while len(found) < len(source.binary) and stream.tell() < _LONGEST:
                # One header at a time: tarfile itself would read names and records of any length into memory.
                header = stream.read(tarfile.BLOCKSIZE)
                if header == bytes(tarfile.BLOCKSIZE):  # the end
                    break
                member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                end = stream.tell() + -(-max(member.size, 0) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                name = member.name.rpartition("/")[2]
                if name in wanted and member.isreg() and 0 <= member.size <= _most_bytes(source):
                    found[name] = stream.read(member.size)
                while stream.tell() < min(end, _LONGEST) and stream.read(min(end - stream.tell(), 1 << 20)):
                    pass
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = str(error) or "its gzip stream has no end"
            raise damaged(path, f"is not a whole .tar.gz archive ({reason})") from None

    def read(name: str) -> bytes:
        if name not in found:
            raise damaged(path, f"has no file {name}")
        return found[name]

    return _batches(source, any(name in found for name in source.binary), read, path)


def _batches(source: CifarSource, binary: bool, read: Callable[[str], bytes], where: Path) -> list[Arrays]:
    digests, parse, algorithm = (
        (source.binary, read_binary_batch, "sha256") if binary else (source.python, read_python_batch, "md5")
    )
    batches = []
    for name, digest in digests.items():
        data = read(name)
        batches.append(parse(data, where / name, count=source.count, num_classes=len(source.class_names)))
        if digest and hashlib.new(algorithm, data, usedforsecurity=False).hexdigest() != digest:
            raise damaged(where / name, f"is a {source.title} batch with altered content (its {algorithm} is wrong)")
    return batches


def _most_bytes(source: CifarSource) -> int:
    """More than any batch file takes: the Python version adds names and instructions to the pixels."""
    return source.count * (_PIXELS + 1000) + 10_000


def _content(batch: object, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels `(count, 3072)` and labels of what `read_pickled` found, every detail checked."""
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= set(batch):
        raise ValueError("it is no dictionary with 'data' and 'labels'")
    labels = batch[b"labels"]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError("its labels are no list of numbers")
    if len(labels) != count:
        raise ValueError(f"it has {len(labels)} labels, not {count}")
    data = batch[b"data"]
    if not (isinstance(data, Call) and data.function == _RECONSTRUCT and isinstance(data.state, tuple)):
        raise ValueError("its data is no numpy array")
    if data.arguments[:1] != (Name("numpy ndarray"),) or len(data.state) != 5:
        raise ValueError("its data is no numpy array")
    _, shape, dtype, fortran, content = data.state
    if not (isinstance(dtype, Call) and dtype.function == "numpy dtype" and dtype.arguments[:1] == (b"u1",)):
        raise ValueError("its data is no array of unsigned bytes")
    if shape != (count, _PIXELS) or fortran is not False:
        raise ValueError(f"its data has another shape than {count} rows of {_PIXELS} bytes")
    if not isinstance(content, bytes) or len(content) != count * _PIXELS:
        raise ValueError("its data has the wrong number of bytes")
    return np.frombuffer(content, np.uint8).reshape(count, _PIXELS), np.array(labels, np.int64)
