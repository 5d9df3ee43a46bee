"""Tables from CSV, Parquet and NPZ files, whole or in chunks.

The cells of a CSV file stay texts; `parsing` decides what they mean, the same for every chunk of every file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._checks import check_count
from torchace._files import error_reason
from torchace.lab.data.csv_files import csv_chunks
from torchace.lab.data.errors import DataError, pandas
from torchace.lab.data.messages import quote, suggestion
from torchace.lab.data.npz_files import npz_chunks
from torchace.lab.data.parquet_files import parquet_chunks

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

Reader = Callable[[Path, int], Iterator[Any]]

# First bytes of files that often have a wrong name, what they are, and what to do.
_CONTENTS: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "Parquet", "rename it to end in .parquet"),
    (b"\x1f\x8b", "gzip", "rename it to end in .csv.gz if that is what it holds"),
    (b"PK\x03\x04", "ZIP", "rename it to end in .npz if numpy wrote it, or save a workbook as CSV"),
    (b"PK\x05\x06", "ZIP", "save the table anew"),
    (b"\xd0\xcf\x11\xe0", "Excel", "save it as CSV"),
    (b"\x93NUMPY", "NPY", "save the arrays with numpy.savez(file, x=x, y=y)"),
    (b"\x89HDF", "HDF5", "save it as CSV, Parquet or NPZ"),
    (b"SQLite format 3", "SQLite", "save it as CSV, Parquet or NPZ"),
    (b"%PDF", "PDF", "save the table as CSV"),
    (b"\xff\xfe", "UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save it as UTF-8"),
)


def read_table(path: str | os.PathLike[str]) -> DataFrame:
    """Read a table from a file: `.csv` and `.tsv` (also `.gz`), `.parquet` or `.npz`.

    - CSV: UTF-8 with a row of column names, separated by commas, semicolons or tabs; every cell is a text. Blank lines
      are skipped, and spaces around column names.
    - Parquet: columns with their types; whole numbers and truth values may be missing. Pandas's unnamed index is left
      out.
    - NPZ: an array of one axis is a column by its name; an array `a` of shape (N, D) is the columns `a0`, `a1`, ...,
      and so is `X` the columns `x0`, `x1`, .... Python objects are never unpickled.

    Args:
        path: The file; its suffix gives the format.

    Returns:
        The table, its rows counted from 0 by the index.

    Raises:
        DataError: The file is missing, damaged or not a table. Rows are counted from 1 in the message.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "pets.csv").write_text("kind;weight\\ncat;4.5\\ndog;\\n")
        ...     read_table(f"{folder}/pets.csv").to_dict("list")
        {'kind': ['cat', 'dog'], 'weight': ['4.5', '']}
    """
    return pandas().concat(list(iterate_table(path)), ignore_index=True)


def iterate_table(path: str | os.PathLike[str], *, rows: int = 65_536) -> Iterator[DataFrame]:
    """Read the table of `read_table` in chunks, for files larger than memory.

    Args:
        path: The file.
        rows: Largest number of rows in a chunk.

    Returns:
        Tables whose indices continue from one to the next. Errors of the file are raised at once, errors of its rows
        when they are reached.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "numbers.csv").write_text("n\\n1\\n2\\n3\\n")
        ...     [(list(chunk["n"]), list(chunk.index)) for chunk in iterate_table(f"{folder}/numbers.csv", rows=2)]
        [(['1', '2'], [0, 1]), (['3'], [2])]
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
        except (ValueError, TypeError, OverflowError) as error:  # e.g. dates of a unit that pandas does not have
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
    """Check that a file can be opened and begins as its name says; return the function that reads it."""
    readers: dict[str, Reader] = {
        **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".tsv.gz"), csv_chunks),
        ".parquet": parquet_chunks,
        ".npz": npz_chunks,
    }
    *others, last = readers
    suffixes = f"{', '.join(others)} or {last}"
    suffix = next((known for known in readers if file.name.lower().endswith(known)), None)
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISDIR(mode):
            raise DataError(f"{file} is a folder; give one file that ends in {suffixes}.")
        if suffix is None:
            raise DataError(f"{file} is of no known kind; give a file whose name ends in {suffixes}.")
        if not stat.S_ISREG(mode):  # a pipe could block for ever
            raise DataError(f"{file} is not a regular file; save its content in a file and name that.")
        with open(file, "rb") as stream:
            _check_content(file, suffix, stream.read(4096))
    except DataError:
        raise
    except FileNotFoundError:
        similar = suggestion(file.name, os.listdir(file.parent)) if file.parent.is_dir() else ""
        raise DataError(f"There is no file {file}{similar}; check the path.") from None
    except (OSError, ValueError) as error:  # a null character in the name is a ValueError
        reason = error_reason(error)
        raise DataError(f"{quote(file, 300)} cannot be read ({reason}); check its name and its permissions.") from None
    return readers[suffix]


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
        elif b"\0" in head:
            found, remedy = "binary", "save the table as CSV"
        elif expected != "text":
            remedy = "rename it to end in .csv if it is a CSV file, or copy it again if it is damaged"
    if found != expected:
        raise DataError(f"{file} is not the {expected} file that its name says (it is {found}); {remedy}.")
