"""Tables from CSV, Parquet and NPZ files, whole or in chunks; `parsing` interprets the cells."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchace._checks import check_count
from torchace._files import CHUNK_BYTES, error_reason, read_npz
from torchace.lab.data.csv_files import csv_chunks, text_encoding
from torchace.lab.data.errors import DataError, arrow, pandas, quote, suggestion
from torchace.lab.data.table_schema import check_names

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


def npz_chunks(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """Iterate over the columns of an NPZ file, at most `rows` rows at a time."""
    try:
        arrays = read_npz(path)
    except (OSError, ValueError) as error:
        reason = error_reason(error)
        raise DataError(f"{path} is a damaged NPZ file ({reason}); copy or save it again.") from None
    count = max((len(array) for array in arrays.values() if array.ndim), default=0)
    names: list[str] = []
    for name, array in arrays.items():
        if array.dtype.kind not in "biufMmSU" or array.ndim not in (1, 2) or len(array) != count:
            raise DataError(
                f"{path} has an array {quote(name)} of {array.dtype} and shape {array.shape}, but a table is made of "
                f"numbers or text of shape ({count},) or ({count}, D); save it so, or leave it out."
            )
        stem = "x" if name == "X" else name
        names += [name] if array.ndim == 1 else [f"{stem}{i}" for i in range(array.shape[1])]
    check_names(names, path)
    for start in range(0, count, rows):
        blocks = [array[start : start + rows] for array in arrays.values()]
        matrices = [block[:, None] if block.ndim == 1 else block for block in blocks]
        try:
            columns = [_column(matrix[:, i]) for matrix in matrices for i in range(matrix.shape[1])]
        except UnicodeDecodeError:
            raise DataError(f"{path} is a damaged NPZ file (text is not UTF-8); save it again.") from None
        yield dict(zip(names, columns, strict=True))


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


_CELL_BYTES = 8  # a number, or the offset of a text


def parquet_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the rows of a Parquet file, at most `rows` at a time."""
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    types = _pandas_types()
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if not _is_index(name)]
            check_names(names, path)
            for batch in file.iter_batches(batch_size=max(1, min(rows, CHUNK_BYTES // (_CELL_BYTES * len(names))))):
                batch.validate(full=True)  # finds text that is not UTF-8
                columns = {
                    name: _to_plain(array)
                    for name, array in zip(batch.schema.names, batch.columns, strict=True)
                    if not _is_index(name)
                }
                yield pa.table(columns).to_pandas(types_mapper=types.get)
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = error_reason(error)
        raise DataError(f"{path} is a damaged Parquet file ({reason}); copy or save it again.") from None


def _pandas_types() -> dict[Any, Any]:
    """Nullable types, so that every chunk has the type of the whole column."""
    pd, pa = pandas(), arrow()
    text = pd.StringDtype("pyarrow")
    types = {pa.bool_(): pd.BooleanDtype(), pa.string(): text, pa.large_string(): text, pa.string_view(): text}
    for name in (f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)):
        types[getattr(pa, name.lower())()] = getattr(pd, f"{name}Dtype")()
    return types


def _is_index(name: str) -> bool:
    """Whether this column is pandas's stored index."""
    return name.startswith("__index_level_")


def _to_plain(array: Any) -> Any:
    """Unpack dictionaries; convert decimals to numbers, dates to one type, and times of day to texts."""
    pa = arrow()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        return array.cast(pa.float64())
    if pa.types.is_date(array.type) or pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us"), safe=False)  # UTC; nanoseconds are cut
    if pa.types.is_time(array.type):
        return array.cast(pa.large_string())
    return array


Reader = Callable[[Path, int], Iterator[Any]]

_TEXT_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_READERS: dict[str, Reader] = {
    **dict.fromkeys(_TEXT_SUFFIXES, csv_chunks),
    ".parquet": parquet_chunks,
    ".npz": npz_chunks,
}

# first bytes, file type, remedy
_CONTENTS: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "Parquet", "rename it to end in .parquet"),
    (b"\x1f\x8b", "gzip", "rename it to end in .csv.gz if that is what it holds"),
    (b"PK\x03\x04", "ZIP", "rename it to end in .npz if numpy wrote it, or save a workbook as CSV"),
    (b"PK\x05\x06", "ZIP", "save the table again"),
    (b"\xd0\xcf\x11\xe0", "Excel", "save it as CSV"),
    (b"\x93NUMPY", "NPY", "save the arrays with numpy.savez(file, x=x, y=y)"),
    (b"\x89HDF", "HDF5", "save it as CSV, Parquet or NPZ"),
    (b"SQLite format 3", "SQLite", "save it as CSV, Parquet or NPZ"),
    (b"%PDF", "PDF", "save the table as CSV"),
)


def read_table(path: str | os.PathLike[str]) -> DataFrame:
    """Read a table from a file; its suffix gives the format.

    - `.csv`, `.tsv` (also `.gz`): UTF-8, UTF-16 or Windows-1252 with a header, separated by commas, semicolons or
      tabs; every cell is a text. A column without a name, as R and pandas write row names, gets one.
    - `.parquet`: typed columns, without pandas's unnamed index.
    - `.npz`: arrays `(N,)` are columns; an array `a` of shape `(N, D)` is the columns `a0`, `a1`, …. No unpickling.
    """
    frame = pandas().concat(list(iterate_table(path)), ignore_index=True)
    file = Path(path).expanduser()
    if _suffix(file) in _TEXT_SUFFIXES and (encoding := text_encoding(file)) != "UTF-8":
        frame.attrs["notes"] = [f"{file.name} is read as {encoding} text."]
    return frame


def iterate_table(path: str | os.PathLike[str], *, rows: int = 65_536) -> Iterator[DataFrame]:
    """Read the table of `read_table` in chunks of at most `rows` rows, with a continuing index.

    Errors of the file are raised at once, errors of its rows on reaching them.
    """
    check_count(rows, "rows")
    file = Path(path).expanduser()
    return _number_rows(_find_reader(file)(file, rows), file)


def _number_rows(chunks: Iterator[Any], file: Path) -> Iterator[DataFrame]:
    pd = pandas()
    start = 0
    for columns in chunks:
        try:
            frame = pd.DataFrame(columns)
        except (ValueError, TypeError, OverflowError) as error:  # such as dates in a unit that pandas lacks
            reason = error_reason(error)
            raise DataError(
                f"{file} has values that do not fit a table ({reason}); save them as numbers or text."
            ) from None
        frame.index = pd.RangeIndex(start, start + len(frame))
        start += len(frame)
        yield frame
    if start == 0:
        raise DataError(f"{file} has column names but no rows; give a file that has some.")


def _find_reader(file: Path) -> Reader:
    """Check that a file can be opened and matches its suffix; return its reader."""
    *others, last = _READERS
    suffixes = f"{', '.join(others)} or {last}"
    suffix = _suffix(file)
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISDIR(mode):
            raise DataError(f"{file} is a folder; give one file that ends in {suffixes}.")
        if suffix is None:
            raise DataError(f"{file} has an unknown suffix; give a file whose name ends in {suffixes}.")
        if not stat.S_ISREG(mode):  # a pipe could block forever
            raise DataError(f"{file} is not a regular file; save its content in a regular file.")
        with open(file, "rb") as stream:
            _check_content(file, suffix, stream.read(4096))
    except DataError:
        raise
    except FileNotFoundError:
        similar = suggestion(file.name, os.listdir(file.parent)) if file.parent.is_dir() else ""
        raise DataError(f"There is no file {file}{similar}; check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: null character in the name
        reason = error_reason(error)
        raise DataError(f"{quote(file, 300)} cannot be read ({reason}); check its name and its permissions.") from None
    return _READERS[suffix]


def _suffix(file: Path) -> str | None:
    return next((known for known in _READERS if file.name.lower().endswith(known)), None)


def _check_content(file: Path, suffix: str, head: bytes) -> None:
    if not head:
        raise DataError(f"{file} is empty; give a file that holds a table.")
    expected = {".parquet": "Parquet", ".npz": "ZIP"}.get(suffix, "gzip" if suffix.endswith(".gz") else "text")
    found, remedy = next(((kind, do) for magic, kind, do in _CONTENTS if head.startswith(magic)), ("text", ""))
    if found == "ZIP" and b"[Content_Types].xml" in head:
        found, remedy = "Excel", "save it as CSV"
    if found == "text":
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if start.startswith((b"<!doctype", b"<html", b"<?xml")):
            found, remedy = "web page", "download the table itself"
        elif start.startswith(b"version https://git-lfs"):
            found, remedy = "Git LFS pointer", "fetch the table itself with git lfs pull"
        elif b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16
            found, remedy = "binary", "save the table as CSV"
        elif expected != "text":
            remedy = "rename it to end in .csv if it is a CSV file, or copy it again if it is damaged"
    if found != expected:
        raise DataError(f"{file} is not a {expected} file despite its suffix (it is {found}); {remedy}.")
