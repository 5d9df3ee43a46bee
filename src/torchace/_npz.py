"""Bounded reads of NPZ files, whole or some rows at a time, without Python objects."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from torchace._files import UNPACKED_BYTES, StrPath, check_unpacked, open_regular

NPZ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted member; NotImplementedError: an unknown compression
    MemoryError,
    OverflowError,
)


@contextlib.contextmanager
def open_npz(path: StrPath, *, allowed: int = UNPACKED_BYTES) -> Iterator[zipfile.ZipFile]:
    """Open an archive that numpy wrote, if its content is not far larger than the file; raises `NPZ_ERRORS`."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        check_unpacked(path, os.fstat(file.fileno()).st_size, unpacked, allowed=allowed)
        if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in archive.infolist()):
            raise ValueError("its compression method is not one of numpy's")
        yield archive


class NpzArray:
    """One array of an NPZ file, read front to back; Python objects are never unpickled."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        self.name = info.filename.removesuffix(".npy")
        self._stream = archive.open(info)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # later ones: records
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2
            try:
                self.shape, self._fortran, self.dtype = readers[npy.read_magic(self._stream)](self._stream)
            except Exception:  # numpy's header reader raises any error of Python's parser and tokenizer
                raise ValueError("the header of an array cannot be read") from None
        size = math.prod(self.shape) * self.dtype.itemsize
        if not self.dtype.hasobject and (size < 0 or info.file_size != self._stream.tell() + size):
            raise ValueError(f"array {self.name!r} does not have the size of its shape {self.shape}")

    def read(self) -> NDArray[Any]:
        """Return the whole array."""
        return self._take(math.prod(self.shape)).reshape(self.shape, order="F" if self._fortran else "C")

    def rows(self, count: int) -> Iterator[NDArray[Any]]:
        """Iterate over `count` rows at a time; an array in Fortran order is read whole."""
        width = math.prod(self.shape[1:])
        whole = self.read() if self._fortran and len(self.shape) > 1 else None
        for start in range(0, self.shape[0], count):
            stop = min(start + count, self.shape[0])
            yield (
                whole[start:stop]
                if whole is not None
                else self._take((stop - start) * width).reshape(stop - start, *self.shape[1:])
            )

    def _take(self, count: int) -> NDArray[Any]:
        if self.dtype.hasobject:
            raise ValueError(f"array {self.name!r} holds Python objects")
        data = self._stream.read(count * self.dtype.itemsize)
        if len(data) != count * self.dtype.itemsize:
            raise EOFError(f"array {self.name!r} is truncated")
        return np.frombuffer(data, self.dtype)


def read_npz(path: StrPath, names: Collection[str], *, allowed: int = UNPACKED_BYTES) -> dict[str, NDArray[Any]]:
    """Read the named arrays, as far as present; `allowed` bytes are accepted for any file size. Raises `NPZ_ERRORS`."""
    with open_npz(path, allowed=allowed) as archive:
        wanted = [info for info in archive.infolist() if info.filename.removesuffix(".npy") in names]
        return {array.name: array.read() for array in (NpzArray(archive, info) for info in wanted)}
