"""Tables from CSV, Parquet and NPZ files, whole or in chunks; `parsing` interprets the cells."""

from __future__ import annotations

import csv
import gzip
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from torchace._checks import check_count
from torchace._files import error_reason
from torchace.lab.data.errors import DataError, arrow, first_duplicate, pandas, quote, suggestion

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

SAMPLE_ROWS = 20  # that decide about the delimiter of a CSV file
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}
ENCODINGS = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252"}
FILE_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    zipfile.BadZipFile,
)  # ValueError: Unicode, Arrow


def read_table(path: str | os.PathLike[str]) -> DataFrame:
    """Read a table from a file; its suffix gives the format.

    - `.csv`, `.tsv` (also `.gz`): UTF-8, UTF-16 or Windows-1252 with a header, separated by commas, semicolons or
      tabs; every cell is a text. A column without a name, as R and pandas write row names, gets one.
    - `.parquet`: typed columns, without pandas's unnamed index.
    - `.npz`: arrays `(N,)` are columns; an array `a` of shape `(N, D)` is the columns `a0`, `a1`, …. No unpickling.
    """
    return pandas().concat(list(iterate_table(path)), ignore_index=True)


def iterate_table(path: str | os.PathLike[str], *, rows: int = 65_536) -> Iterator[DataFrame]:
    """Read the table of `read_table` in chunks of at most `rows` rows, with a continuing index."""
    check_count(rows, "rows")
    file = Path(path).expanduser()
    *others, last = READERS
    suffix = next((suffix for suffix in READERS if file.name.lower().endswith(suffix)), None)
    if not file.exists():
        similar = suggestion(file.name, os.listdir(file.parent)) if file.parent.is_dir() else ""
        raise DataError(f"There is no file {file}{similar}; check the path.")
    if suffix is None or not file.is_file():
        what = "is not a file" if suffix else "has an unknown suffix"
        raise DataError(f"{file} {what}; give a file whose name ends in {', '.join(others)} or {last}.")
    return _number_rows(READERS[suffix](file, rows), file)


def _number_rows(chunks: Iterator[DataFrame], file: Path) -> Iterator[DataFrame]:
    start = 0
    try:
        for frame in chunks:
            frame.index = pandas().RangeIndex(start, start + len(frame))
            start += len(frame)
            yield frame
    except DataError:
        raise
    except FILE_ERRORS as error:
        raise DataError(f"{file} cannot be read ({error_reason(error)}); copy or save it again.") from None
    if start == 0:
        raise DataError(f"{file} has no rows; give a file that has some.")


def _check_names(names: list[str], path: Path) -> None:
    if not any(names):
        raise DataError(f"{path} has no columns; give a file with column names and rows.")
    if (duplicate := first_duplicate(names)) is not None:
        raise DataError(f"{path} has two columns named {quote(duplicate)}; rename one of them.")


# -- CSV ---------------------------------------------------------------------------------------------------------------


def csv_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the rows of a CSV file, at most `rows` at a time."""
    encoding = _text_encoding(path)
    delimiter = _find_delimiter(path, encoding)
    with _open_text(path, encoding) as file:
        reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
        try:
            names, first = _read_header(reader, path)
            lines, count = chain(first, reader), 0
            while chunk := list(islice(lines, rows)):
                chunk = [row for row in chunk if any(row) or len(row) == len(names)]  # blank lines
                for place, row in enumerate(chunk, count + 1):
                    if len(row) != len(names):
                        raise DataError(
                            f"{path} has {len(row)} values in row {place}, but {len(names)} column names; correct that "
                            f"row (a value with a {DELIMITERS[delimiter]} in it needs quotation marks)."
                        )
                count += len(chunk)
                frame = pandas().DataFrame(chunk, columns=names, dtype="str")
                if encoding != "utf-8-sig":
                    frame.attrs["notes"] = [f"{path.name} is read as {ENCODINGS[encoding]} text."]
                if chunk:
                    yield frame
        except csv.Error as error:
            raise DataError(
                f"{path} has a wrong quotation mark near line {reader.line_num} ({error}); close it, remove it, or "
                "write it twice inside a quoted value."
            ) from None


def _open_text(path: Path, encoding: str) -> IO[str]:
    open_file: Callable[..., IO[str]] = gzip.open if path.name.lower().endswith(".gz") else open
    return open_file(path, "rt", encoding=encoding, newline="")


def _text_encoding(path: Path) -> str:
    """Encoding of a text file: UTF-16 by its byte order mark, UTF-8 if valid, else Windows-1252."""
    with _open_text(path, "latin-1") as file:
        start = file.read(4096)
    if start.startswith(("\xff\xfe", "\xfe\xff")):
        return "utf-16"
    if "\0" in start:
        raise DataError(f"{path} is not a text file; save the table as CSV, Parquet or NPZ.")
    try:
        with _open_text(path, "utf-8-sig") as file:
            while file.read(1 << 16):
                pass
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _find_delimiter(path: Path, encoding: str) -> str:
    """Delimiter that gives the first rows the most columns, equally many each."""

    def fit(delimiter: str) -> tuple[bool, int]:
        with _open_text(path, encoding) as file:
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
            width, *others = [len(row) for row in islice(filter(any, reader), SAMPLE_ROWS)] or [0]
        return width > 1 and (set(others) <= {width} or set(others) == {width + 1}), width

    return "\t" if ".tsv" in path.name.lower() else max(DELIMITERS, key=fit)


def _read_header(reader: Iterator[list[str]], path: Path) -> tuple[list[str], list[list[str]]]:
    """Column names, also for columns without one, and the first row of data (none if there is none)."""
    lines = filter(any, reader)
    names = [name.strip() for name in next(lines, [])]
    if names and _is_data(names):
        raise DataError(
            f"{path} seems to have no column names, since its first row is {quote(', '.join(names))}; put a row of "
            "names above it."
        )
    _check_names([name for name in names if name], path)
    first = list(islice(lines, 1))
    if first and len(first[0]) == len(names) + 1:  # as R writes row names
        names = ["", *names]
    return [name or ("row names" if i == 0 else f"column {i + 1}") for i, name in enumerate(names)], first


def _is_data(names: list[str]) -> bool:
    """Whether a first row is data: only numbers, unless they are distinct whole numbers, which may be names."""
    try:
        [float(name) for name in names]
    except ValueError:
        return False
    return not all(name.isdecimal() for name in names) or len(set(names)) < len(names)


# -- Parquet and NPZ ---------------------------------------------------------------------------------------------------


def parquet_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the rows of a Parquet file, at most `rows` at a time; Arrow's types make all chunks alike."""
    with arrow("pyarrow.parquet").ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if not name.startswith("__index_level_")]  # of pandas
        _check_names(names, path)
        for batch in file.iter_batches(batch_size=rows, columns=names):
            yield batch.to_pandas(types_mapper=pandas().ArrowDtype)


def npz_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the columns of an NPZ file, at most `rows` rows at a time."""
    columns: list[tuple[str, NDArray[Any]]] = []
    for name, array in read_arrays(path).items():
        if array.ndim not in (1, 2):
            raise DataError(
                f"{path} has an array {quote(name)} of shape {array.shape}, but a table is made of arrays of one or "
                "two axes; save it as (N,) or (N, D), or leave it out."
            )
        stem = "x" if name == "X" else name
        columns += [(name, array)] if array.ndim == 1 else [(f"{stem}{i}", column) for i, column in enumerate(array.T)]
    _check_names([name for name, _ in columns], path)
    frame = pandas().DataFrame(dict(columns))
    yield from (frame[start : start + rows] for start in range(0, len(frame), rows))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read all arrays of an NPZ file; Python objects are never unpickled."""
    try:
        with open(path, "rb") as file, NpzFile(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; check the path.") from None
    except FILE_ERRORS as error:
        raise DataError(
            f"{path} is not a readable NPZ file ({error_reason(error)}); write numbers or texts with numpy.savez(file, "
            "x=x, y=y)."
        ) from None


READERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".tsv.gz"), csv_chunks),
    ".parquet": parquet_chunks,
    ".npz": npz_chunks,
}
