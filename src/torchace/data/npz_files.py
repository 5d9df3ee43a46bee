"""NPZ files, some rows at a time: arrays of numbers and text, never Python objects."""

from __future__ import annotations

import contextlib
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from torchace.data.errors import DataError
from torchace.data.sentences import reason, repeated, shown

_MAX_COLUMNS = 1_000_000  # names are made for that many before any number is read

_ERRORS = (
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


def npz_chunks(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """The columns of an NPZ file, some rows at a time.

    Arrays are read from front to back and never held whole, unless they are stored column by column (Fortran order).
    """
    try:
        with contextlib.ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(path))
            arrays = [_Array(stack.enter_context(archive.open(i)), i, path) for i in archive.infolist()]
            names = [name for array in arrays for name in array.columns]
            _check_arrays(arrays, names, path)
            for start in range(0, arrays[0].length, rows):
                count = min(rows, arrays[0].length - start)
                columns = [column for array in arrays for column in array.read(count)]
                yield dict(zip(names, columns, strict=True))
    except DataError:
        raise
    except _ERRORS as error:
        raise DataError(f"{path} is a damaged NPZ file ({reason(error)}); copy it again or write it anew.") from None


class _Array:
    """One array of an NPZ file, read in order."""

    def __init__(self, stream: IO[bytes], info: zipfile.ZipInfo, path: Path) -> None:
        name = info.filename.removesuffix(".npy")
        if not name or name == info.filename:
            raise DataError(
                f"{path} holds {shown(info.filename)}, which is no array; write it with numpy.savez(file, x=x, y=y)."
            )
        self._stream = stream
        shape, fortran, self._dtype = _header(stream)
        if self._dtype.hasobject:
            raise DataError(
                f"{path} holds Python objects in the array {shown(name)}, which are not loaded; save it as numbers or "
                "text, as array.astype(float) or array.astype(str)."
            )
        if self._dtype.kind not in "biufMmSU" or self._dtype.itemsize == 0:
            raise DataError(
                f"{path} holds {self._dtype} values in the array {shown(name)}; save it as numbers or text."
            )
        if len(shape) not in (1, 2) or min(shape) < 0 or max(shape[1:], default=0) > _MAX_COLUMNS:
            raise DataError(
                f"{path} has an array {shown(name)} of shape {shape}, but a table is made of arrays of one or two "
                f"axes and at most {_MAX_COLUMNS:,} columns; save it as (N,) or (N, D), or leave it out."
            )
        self.name, self.length, self._width = name, shape[0], math.prod(shape[1:])
        if info.file_size != stream.tell() + self.length * self._width * self._dtype.itemsize:
            raise ValueError(f"array {shown(name)} has not the size that it says")
        stem = "x" if name == "X" else name
        self.columns = [name] if len(shape) == 1 else [f"{stem}{i}" for i in range(self._width)]
        self._start = 0
        self._whole: NDArray[Any] | None = None
        if fortran and len(shape) == 2:
            self._whole = self._values(self.length, (self._width, self.length)).T

    def read(self, count: int) -> list[Any]:
        """The next rows, a column each."""
        start, self._start = self._start, self._start + count
        if self._whole is not None:
            block = self._whole[start : start + count]
        else:
            block = self._values(count, (count, self._width))  # with the last of them comes the checksum's comparison
        return [_column(block[:, i]) for i in range(self._width)]

    def _values(self, count: int, shape: tuple[int, int]) -> NDArray[Any]:
        size = count * self._width * self._dtype.itemsize
        data = self._stream.read(size)
        if len(data) != size:
            raise EOFError(f"array {shown(self.name)} is cut short")
        return np.frombuffer(data, self._dtype).reshape(shape)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array, from the safe literals that its header is."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # later ones are of records
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers of Python 2
        try:
            return readers[npy.read_magic(stream)](stream)
        except (KeyError, ValueError, TypeError, SyntaxError):
            raise ValueError("the header of an array cannot be read") from None


def _column(values: NDArray[Any]) -> Any:
    """A column as pandas takes it: numbers in this machine's order of bytes, texts as Python's."""
    if values.dtype.kind == "S":
        return [value.decode() for value in values.tolist()]
    if values.dtype.kind == "U":
        return values.tolist()
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        with np.errstate(over="ignore"):
            return values.astype(np.float64)
    return values.astype(values.dtype.newbyteorder("="))


def _check_arrays(arrays: list[_Array], names: list[str], path: Path) -> None:
    if not names:
        raise DataError(f"{path} holds no columns; write it with numpy.savez(file, x=x, y=y).")
    for array in arrays:
        if array.length != arrays[0].length:
            raise DataError(
                f"{path} has {arrays[0].length} rows in the array {shown(arrays[0].name)}, but {array.length} in "
                f"{shown(array.name)}; save arrays of one table, with as many rows each."
            )
    if (twice := repeated(names)) is not None:
        raise DataError(f"{path} has two columns named {shown(twice)}; rename one of its arrays.")
