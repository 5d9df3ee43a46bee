"""Tables from files: CSV, Parquet and NPZ, whole or in chunks, as they are written.

Nothing is guessed here about what a column means. The cells of a CSV file stay texts; what they say is decided by the
rules in `cells`, the same for every chunk of every file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._checks import check_count
from torchace._files import CHUNK_BYTES, TABLE_COLUMNS, UNPACKED_BYTES, FileRefusedError, check_unpacked, error_reason
from torchace.lab.data.csv_files import csv_chunks
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import first_duplicate, quote, suggestion
from torchace.lab.data.npz_files import npz_chunks
from torchace.lab.data.packages import arrow, pandas

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

Chunks = Iterator[dict[str, Any]]
_CELL_BYTES = 8  # of a number in a table, and of where a text begins

# What files begin with that are often named .csv, .parquet or .npz and are not, and what to do about it.
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
    """A table from a file: `.csv` and `.tsv` (also `.gz`), `.parquet` or `.npz`.

    - CSV: UTF-8 with a row of column names, separated by commas, semicolons or tabs, whichever fits; every cell is a
      text. Blank lines are skipped, and spaces around column names.
    - Parquet: columns as they are; whole numbers and truth values may be missing. Pandas's unnamed index is left out.
    - NPZ: an array of one axis is a column by its name; an array `a` of shape (N, D) is the columns `a0`, `a1`, ...,
      and so is `X` the columns `x0`, `x1`, .... Python objects are never unpickled.

    Args:
        path: The file. Its name says what it is.

    Returns:
        The table, its rows counted from 0 by the index.

    Raises:
        DataError: One sentence with the file, what is wrong and what to do. Rows are counted from 1 there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "pets.csv").write_text("kind;weight\\ncat;4.5\\ndog;\\n")
        ...     read_table(f"{folder}/pets.csv").to_dict("list")
        {'kind': ['cat', 'dog'], 'weight': ['4.5', '']}
    """
    return pandas().concat(list(iterate_table(path)), ignore_index=True)


def iterate_table(path: str | os.PathLike[str], *, rows: int = 65_536) -> Iterator[DataFrame]:
    """The table of `read_table` in chunks, for files larger than memory.

    Args:
        path: The file.
        rows: How many rows a chunk has at most.

    Returns:
        Tables whose indices go on from one to the next. What is wrong with the file as such is raised at once, what is
        wrong with its rows when they come.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "numbers.csv").write_text("n\\n1\\n2\\n3\\n")
        ...     [(list(chunk["n"]), list(chunk.index)) for chunk in iterate_table(f"{folder}/numbers.csv", rows=2)]
        [(['1', '2'], [0, 1]), (['3'], [2])]
    """
    check_count(rows, "rows")
    file, reader = _checked(path)
    return _frames(reader(file, rows), file)


def _frames(chunks: Chunks, file: Path) -> Iterator[DataFrame]:
    pd = pandas()
    start = 0
    for columns in chunks:
        try:
            frame = pd.DataFrame(columns)
        except (ValueError, TypeError, OverflowError) as error:  # dates of a unit that pandas does not have, for one
            raise DataError(
                f"{file} has values that are no table ({error_reason(error)}); save them as numbers or text."
            ) from None
        frame.index = pd.RangeIndex(start, start + len(frame))
        start += len(frame)
        yield frame
    if start == 0:
        raise DataError(f"{file} has column names but no rows; give a file that has some.")


# -- which file it is -------------------------------------------------------------------------------------------------


def _checked(path: str | os.PathLike[str]) -> tuple[Path, Callable[[Path, int], Chunks]]:
    """A file that can be opened and that begins as its name says, and what reads it."""
    file = Path(path).expanduser()
    suffix = next((known for known in _READERS if file.name.lower().endswith(known)), None)
    try:
        status = os.stat(file)
        if stat.S_ISDIR(status.st_mode):
            raise DataError(f"{file} is a folder; give one file that ends in {_suffixes()}.")
        if suffix is None:
            raise DataError(f"{file} is of no known kind; give a file whose name ends in {_suffixes()}.")
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever
            raise DataError(f"{file} is not a regular file; save what it gives in a file and name that.")
        with open(file, "rb") as stream:
            head = stream.read(4096)
    except FileNotFoundError:
        raise DataError(f"There is no file {file}{_sibling(file)}; check the path.") from None
    except (OSError, ValueError) as error:  # a null character in the name is a ValueError
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{quote(file, 300)} cannot be read ({error_reason(error)}); check its name and its permissions."
        ) from None
    _check_content(file, suffix, head)
    return file, _READERS[suffix]


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


def _suffixes() -> str:
    *first, last = _READERS
    return f"{', '.join(first)} or {last}"


def _sibling(file: Path) -> str:
    try:
        return suggestion(file.name, os.listdir(file.parent))
    except OSError:
        return ""


# -- Parquet ----------------------------------------------------------------------------------------------------------


def parquet_chunks(path: Path, rows: int) -> Chunks:
    """The columns of a Parquet file, some rows at a time."""
    pd, pa, parquet = pandas(), arrow(), arrow("pyarrow.parquet")
    # With pandas's own types for what may be missing, a chunk has the type of the whole column.
    text = pd.StringDtype("pyarrow")
    whole = {pa.bool_(): pd.BooleanDtype(), pa.string(): text, pa.large_string(): text, pa.string_view(): text}
    for sign, bits in ((sign, bits) for sign in ("", "U") for bits in (8, 16, 32, 64)):
        whole[getattr(pa, f"{sign}int{bits}".lower())()] = getattr(pd, f"{sign}Int{bits}Dtype")()
    try:
        with parquet.ParquetFile(path) as file:
            repeated_texts = _repeated_texts(file, pa)
        with parquet.ParquetFile(path, read_dictionary=repeated_texts) as file:
            names = [name for name in file.schema_arrow.names if not _is_index(name)]
            _check_parquet_names(names, path)
            size, unpacked = os.stat(path).st_size, _stated_bytes(file.metadata)
            check_unpacked(path, size, unpacked)
            for batch in file.iter_batches(batch_size=max(1, min(rows, CHUNK_BYTES // (_CELL_BYTES * len(names))))):
                batch.validate(full=True)  # text that is not UTF-8, for one
                unpacked += sum(_text_bytes(array, pa) for array in batch.columns)
                check_unpacked(path, size, unpacked)
                columns = zip(batch.schema.names, batch.columns, strict=True)
                plain = ((name, _plain(array, pa)) for name, array in columns if not _is_index(name))
                yield {name: array.to_pandas(types_mapper=whole.get) for name, array in plain}
    except DataError:
        raise
    except FileRefusedError as error:
        raise DataError(
            f"{path} is refused ({error_reason(error)}); write it with compression='none' and use_dictionary=False."
        ) from None
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise DataError(
            f"{path} is a damaged Parquet file ({error_reason(error)}); copy it again or write it anew."
        ) from None


def _stated_bytes(metadata: Any) -> int:
    """How many bytes the columns take at least, by what the file says of them."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sum(max(_CELL_BYTES * column.num_values, column.total_uncompressed_size) for column in columns)


def _repeated_texts(file: Any, pa: Any) -> list[str]:
    """Columns of text that take little in the file and may take much in memory.

    They are read as codes of a dictionary, so that the bytes they take are known before they are written out.
    """
    metadata, found = file.metadata, set()
    texts = {column.name for column in file.schema_arrow if _is_text(column.type, pa)}
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            size = column.total_uncompressed_size
            if size < UNPACKED_BYTES // 4 or size > 50 * column.total_compressed_size:
                found.add(column.path_in_schema)
    return sorted(texts & found)


def _is_text(kind: Any, pa: Any) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _text_bytes(array: Any, pa: Any) -> int:
    """How many bytes the texts of a dictionary take once they are written out."""
    if not pa.types.is_dictionary(array.type) or not _is_text(array.type.value_type, pa):
        return 0
    compute = arrow("pyarrow.compute")
    lengths = compute.binary_length(array.dictionary)
    return compute.sum(lengths.take(array.indices)).as_py() or 0


def _is_index(name: str) -> bool:
    """Whether pandas kept the index of a table as this column."""
    return name.startswith("__index_level_")


def _plain(array: Any, pa: Any) -> Any:
    """Dictionaries unpacked, decimals as numbers, dates as texts: each cell on its own."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        return array.cast(pa.float64())
    if pa.types.is_date(array.type) or pa.types.is_timestamp(array.type) or pa.types.is_time(array.type):
        return array.cast(pa.large_string())
    return array


def _check_parquet_names(names: list[str], path: Path) -> None:
    if len(names) > TABLE_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns, but a table may have {TABLE_COLUMNS:,}; leave some out.")
    if not names:
        raise DataError(f"{path} has no columns; give a file that holds a table.")
    if (twice := first_duplicate(names)) is not None:
        raise DataError(f"{path} has two columns named {quote(twice)}; rename one of them.")


_READERS: dict[str, Callable[[Path, int], Chunks]] = {
    ".csv": csv_chunks,
    ".tsv": csv_chunks,
    ".csv.gz": csv_chunks,
    ".tsv.gz": csv_chunks,
    ".parquet": parquet_chunks,
    ".npz": npz_chunks,
}
