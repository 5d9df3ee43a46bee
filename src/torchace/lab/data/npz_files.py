"""NPZ files as tables, in chunks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchace._files import CHUNK_BYTES, TABLE_COLUMNS, FileRefusedError, error_reason
from torchace._npz import NPZ_ERRORS, NpzArray, open_npz
from torchace.lab.data.columns import check_names
from torchace.lab.data.errors import DataError, quote


def npz_chunks(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """Iterate over the columns of an NPZ file, at most `rows` rows at a time."""
    try:
        with open_npz(path) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(".npy") or info.filename == ".npy":
                    raise DataError(
                        f"{path} holds {quote(info.filename)}, which is not an array; write it with "
                        "numpy.savez(file, x=x, y=y)."
                    )
            arrays = [NpzArray(archive, info) for info in archive.infolist()]
            for array in arrays:
                _check_array(array, arrays[0], path)
            names = [name for array in arrays for name in _column_names(array)]
            check_names(names, path)
            row_bytes = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays)
            count = max(1, min(rows, CHUNK_BYTES // max(1, row_bytes)))
            for blocks in zip(*(array.rows(count) for array in arrays), strict=True):
                matrices = [block[:, None] if block.ndim == 1 else block for block in blocks]
                columns = [_column(matrix[:, i]) for matrix in matrices for i in range(matrix.shape[1])]
                yield dict(zip(names, columns, strict=True))
    except DataError:
        raise
    except FileRefusedError as error:
        raise DataError(
            f"{path} is refused ({error_reason(error)}); save it with numpy.savez, which does not compress."
        ) from None
    except NPZ_ERRORS as error:
        reason = error_reason(error)
        raise DataError(f"{path} is a damaged NPZ file ({reason}); copy or save it again.") from None


def _check_array(array: NpzArray, first: NpzArray, path: Path) -> None:
    name, shape = quote(array.name), array.shape
    if array.dtype.hasobject:
        raise DataError(
            f"{path} holds Python objects in the array {name}, which are not loaded; save it as numbers or text, as "
            "array.astype(float) or array.astype(str)."
        )
    if array.dtype.kind not in "biufMmSU" or array.dtype.itemsize == 0:
        raise DataError(f"{path} holds {array.dtype} values in the array {name}; save it as numbers or text.")
    if len(shape) not in (1, 2) or min(shape) < 0 or max(shape[1:], default=0) > TABLE_COLUMNS:
        raise DataError(
            f"{path} has an array {name} of shape {shape}, but a table is made of arrays of one or two axes and at "
            f"most {TABLE_COLUMNS:,} columns; save it as (N,) or (N, D), or leave it out."
        )
    if shape[0] != first.shape[0]:
        raise DataError(
            f"{path} has {first.shape[0]} rows in the array {quote(first.name)}, but {shape[0]} in {name}; save arrays "
            "of one table, with as many rows each."
        )


def _column_names(array: NpzArray) -> list[str]:
    stem = "x" if array.name == "X" else array.name
    return [array.name] if len(array.shape) == 1 else [f"{stem}{i}" for i in range(array.shape[1])]


def _column(values: NDArray[Any]) -> Any:
    """Convert a column for pandas: numbers in native byte order, texts as Python strings."""
    if values.dtype.kind == "S":
        return [value.decode() for value in values.tolist()]
    if values.dtype.kind == "U":
        return values.tolist()
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        with np.errstate(over="ignore"):
            return values.astype(np.float64)
    return values.astype(values.dtype.newbyteorder("="))
