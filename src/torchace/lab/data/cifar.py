"""Binary version of CIFAR-10: six batch files, or the official archive."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchace._files import read_bounded
from torchace.lab.data.errors import DataError, check_labels, damaged_file
from torchace.lab.data.files import is_present, open_data
from torchace.lab.data.sources import CifarSource

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
            return read_bounded(path, _max_bytes(source))
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
