"""NPZ files, whole or some rows at a time: arrays of numbers and text, never Python objects."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from torchace._files import CHUNK_BYTES, TABLE_COLUMNS, UNPACKED_BYTES, Refused, check_unpacked, open_regular
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import reason, repeated, shown

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
def _opened(path: Path, allowed: int = UNPACKED_BYTES) -> Iterator[zipfile.ZipFile]:
    """An archive as numpy writes it, which does not hold far more than the file seems to."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        check_unpacked(path, os.fstat(file.fileno()).st_size, unpacked, allowed=allowed)
        for info in archive.infolist():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("its arrays are packed in a way that numpy never uses")
        yield archive


def read_npz(path: Path, names: Sequence[str], *, allowed: int = UNPACKED_BYTES) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that an NPZ file has.

    Args:
        path: The file.
        names: Of the arrays.
        allowed: How many bytes it may hold however small it is.

    Raises:
        NPZ_ERRORS: The file is damaged, or one of these arrays holds Python objects.
    """
    found = {}
    with _opened(path, allowed) as archive:
        for info in archive.infolist():
            if (name := info.filename.removesuffix(".npy")) in names and name != info.filename:
                with archive.open(info) as stream:
                    shape, fortran, dtype = _header(stream)
                    if dtype.hasobject:
                        raise ValueError(f"array {shown(name)} holds Python objects")
                    _check_size(info, stream, math.prod(shape) * dtype.itemsize, name)
                    values = np.frombuffer(stream.read(), dtype)
                    found[name] = values.reshape(shape, order="F" if fortran else "C")
    return found


def npz_chunks(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """The columns of an NPZ file, some rows at a time.

    Arrays are read from front to back and never held whole, unless they are stored column by column (Fortran order).
    """
    try:
        with contextlib.ExitStack() as stack:
            archive = stack.enter_context(_opened(path))
            arrays = [_Array(stack.enter_context(archive.open(i)), i, path) for i in archive.infolist()]
            names = [name for array in arrays for name in array.columns]
            _check_arrays(arrays, names, path)
            rows = max(1, min(rows, CHUNK_BYTES // sum(array.row_bytes for array in arrays)))
            for start in range(0, arrays[0].length, rows):
                count = min(rows, arrays[0].length - start)
                columns = [column for array in arrays for column in array.read(count)]
                yield dict(zip(names, columns, strict=True))
    except DataError:
        raise
    except Refused as error:
        raise DataError(
            f"{path} is refused ({reason(error)}); save it with numpy.savez, which packs nothing."
        ) from None
    except NPZ_ERRORS as error:
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
        if len(shape) not in (1, 2) or min(shape) < 0 or max(shape[1:], default=0) > TABLE_COLUMNS:
            raise DataError(
                f"{path} has an array {shown(name)} of shape {shape}, but a table is made of arrays of one or two "
                f"axes and at most {TABLE_COLUMNS:,} columns; save it as (N,) or (N, D), or leave it out."
            )
        self.name, self.length, self._width = name, shape[0], math.prod(shape[1:])
        self.row_bytes = max(1, self._width * self._dtype.itemsize)
        _check_size(info, stream, self.length * self._width * self._dtype.itemsize, name)
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


def _check_size(info: zipfile.ZipInfo, stream: IO[bytes], size: int, name: str) -> None:
    if size < 0 or info.file_size != stream.tell() + size:
        raise ValueError(f"array {shown(name)} has not the size that it says")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array, from the safe literals that its header is."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # later ones are of records
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers of Python 2
        try:
            return readers[npy.read_magic(stream)](stream)
        except Exception:  # numpy's reading of headers raises whatever Python's parser and tokenizer do
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
    if len(names) > TABLE_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns, but a table may have {TABLE_COLUMNS:,}; leave some out.")
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
