"""Tables from CSV, Parquet and NPZ files, whole or in chunks; `parsing` interprets the cells."""

from __future__ import annotations

import csv
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from numpy.typing import NDArray

from torchace._checks import check_count
from torchace._files import error_reason, read_npz
from torchace.lab.data.errors import DataError, arrow, first_duplicate, pandas, quote, suggestion

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

SAMPLE_ROWS = 20  # that decide about the delimiter of a CSV file
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
ENCODINGS = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252"}
csv.field_size_limit(1 << 24)  # characters in a cell; the default of 131,072 is less than some texts
FILE_ERRORS = (OSError, EOFError, ValueError, csv.Error, zlib.error)  # ValueError: Unicode, Arrow


def read_table(path: str | os.PathLike[str]) -> DataFrame:
    """Read a table from a file; its suffix gives the format.

    - `.csv`, `.tsv` (also `.gz`): UTF-8, UTF-16 or Windows-1252 with a header, separated by commas, semicolons, tabs
      or vertical bars; every cell is a text. A column without a name, as R and pandas write row names, gets one.
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
        what = "has an unknown suffix" if file.is_file() else "is not a file"
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
        remedy = "save it as UTF-8" if isinstance(error, UnicodeError) else "copy or save it again"
        raise DataError(f"{file} cannot be read ({error_reason(error)}); {remedy}.") from None
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
    delimiter, unnamed = _find_layout(path, encoding)
    dialect: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True, "strict": True}
    with _open_text(path, encoding) as file:
        _skip_separator(file)
        reader, previous, count = csv.reader(file, **dialect), 0, 0
        try:
            names = _column_names(next(filter(any, reader), []), unnamed, path)
            previous = reader.line_num
            while lines := list(islice(file, rows)):
                frame = _parse_regular("".join(lines), names, delimiter)
                if frame is None:
                    reader = csv.reader(chain(lines, file), **dialect)
                    frame = _parse_any(reader, len(lines), names, count, path, delimiter)
                    previous += reader.line_num - len(lines)  # the last row may go on
                previous += len(lines)
                count += len(frame)
                if encoding != "utf-8-sig":
                    frame.attrs["notes"] = [f"{path.name} is read as {ENCODINGS[encoding]} text."]
                if len(frame):
                    yield frame
        except csv.Error as error:
            raise DataError(
                f"{path} has a wrong quotation mark near line {previous + reader.line_num} ({error}); close it, remove "
                "it, or write it twice inside a quoted value."
            ) from None


def _parse_regular(text: str, names: list[str], delimiter: str) -> DataFrame | None:
    """Parse lines with pyarrow; None if a row has another width or quotation marks are not around whole cells."""
    pa, pc, pa_csv = arrow(), arrow("pyarrow.compute"), arrow("pyarrow.csv")
    has_quotes = '"' in text
    if has_quotes:
        other = rf"[^{delimiter}\r\n]"
        rest = "\n" + re.sub(rf'"(?<!{other}")[^"]*+(?:""[^"]*+)*+"(?!{other})', "", text)
        if '"' in rest or any(f"{mark} " in rest for mark in (delimiter, "\n", "\r")):  # spaces are layout there
            return None
    data, kind = b"\xef\xbb\xbf" + text.encode(), pa.large_string()  # pyarrow removes a mark, but none of the cells
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(data),
            pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
            pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pa_csv.ConvertOptions(column_types=dict.fromkeys(names, kind), strings_can_be_null=False),
        )
    except pa.ArrowInvalid:
        return None
    if not has_quotes:
        table = pa.table({name: pc.utf8_ltrim(table[name], " ") for name in names})
    return table.to_pandas()


def _parse_any(reader: Any, lines: int, names: list[str], count: int, path: Path, delimiter: str) -> DataFrame:
    """Parse at least this many lines, to the end of a row, which is slower; `count` rows came before."""
    cells = []
    for row in reader:
        if any(row) or len(row) == len(names):  # else a blank line
            cells.append(row)
            if len(row) != len(names):
                raise DataError(
                    f"{path} has {len(row)} values in row {count + len(cells)}, but {len(names)} column names; correct "
                    f"that row (a value with a {DELIMITERS[delimiter]} in it needs quotation marks), or remove lines "
                    "above and below the table."
                )
        if reader.line_num >= lines:
            break
    return pandas().DataFrame(cells, columns=names, dtype="str")


def _open_text(path: Path, encoding: str) -> IO[str]:
    open_file: Callable[..., IO[str]] = gzip.open if path.name.lower().endswith(".gz") else open
    return open_file(path, "rt", encoding=encoding, newline="")


def _skip_separator(file: IO[str]) -> None:
    """Skip the line `sep=;` that Excel may write first."""
    if not re.fullmatch("sep=.[\r\n]+", file.readline(10)):
        file.seek(0)


def _text_encoding(path: Path) -> str:
    """Encoding of a text file: UTF-16 by its byte order mark or zero bytes, UTF-8 if valid, else Windows-1252."""
    with _open_text(path, "latin-1") as file:
        start = file.read(4096)
    if start.startswith(("\xff\xfe", "\xfe\xff")):
        return "utf-16"
    for place, encoding in enumerate(("utf-16-be", "utf-16-le")):  # most characters of a header have one zero byte
        if start[place::2].count("\0") > len(start) / 4 and "\0" not in start[1 - place :: 2]:
            return encoding
    if "\0" in start:
        raise DataError(f"{path} is not a text file; save the table as CSV, Parquet or NPZ.")
    try:
        with _open_text(path, "utf-8-sig") as file:
            while file.read(1 << 16):
                pass
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _find_layout(path: Path, encoding: str) -> tuple[str, int | None]:
    """Delimiter that gives the first rows the most columns, equally many each; place of a column that has no name.

    If rows have one cell more than the header, it is the first, as R writes row names, which differ, or the last if
    it is empty.
    """
    samples: dict[str, list[list[str]]] = {}
    for delimiter in ["\t"] if ".tsv" in path.name.lower() else DELIMITERS:
        with _open_text(path, encoding) as file:
            _skip_separator(file)
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
            samples[delimiter] = list(islice(filter(any, reader), SAMPLE_ROWS)) or [[]]

    def unnamed(delimiter: str) -> int | None:
        header, *rows = samples[delimiter]
        if {len(row) for row in rows} != {len(header) + 1}:
            return None
        if not any(row[-1] for row in rows):
            return len(header)
        return 0 if len({row[0] for row in rows}) == len(rows) else None

    def fit(delimiter: str) -> tuple[bool, int]:
        width, *others = map(len, samples[delimiter])
        return width > 1 and (set(others) <= {width} or unnamed(delimiter) is not None), width

    best = max(samples, key=fit)
    return best, unnamed(best) if fit(best)[0] else None


def _column_names(header: list[str], unnamed: int | None, path: Path) -> list[str]:
    names = [name.strip() for name in header]
    if names and _is_data(names):
        raise DataError(
            f"{path} seems to have no column names, since its first row is {quote(', '.join(names))}; put a row of "
            "names above it."
        )
    _check_names([name for name in names if name], path)
    if unnamed is not None:
        names.insert(unnamed, "")
    return [name or ("row names" if i == 0 else f"column {i + 1}") for i, name in enumerate(names)]


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
    pa = arrow()
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}  # unknown to pandas
    with arrow("pyarrow.parquet").ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if not name.startswith("__index_level_")]  # of pandas
        _check_names(names, path)
        for batch in file.iter_batches(batch_size=rows, columns=names):
            # without pandas's metadata, which make a named index of a column
            yield batch.to_pandas(
                types_mapper=lambda kind: pandas().ArrowDtype(views.get(kind, kind)), ignore_metadata=True
            )


def npz_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the columns of an NPZ file, at most `rows` rows at a time."""
    columns: list[tuple[str, NDArray[Any]]] = []
    arrays = read_arrays(path)
    for name, array in arrays.items():
        if array.ndim not in (1, 2) or array.dtype.kind == "V":
            raise DataError(
                f"{path} has an array {quote(name)} of shape {array.shape} and type {array.dtype}, but a table is made "
                "of arrays of numbers or texts with one or two axes; save it as (N,) or (N, D), or leave it out."
            )
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # pandas needs this machine's byte order
        stem = "x" if name == "X" else name
        columns += [(name, array)] if array.ndim == 1 else [(f"{stem}{i}", column) for i, column in enumerate(array.T)]
    _check_names([name for name, _ in columns], path)
    first, *others = arrays
    if other := next((name for name in others if len(arrays[name]) != len(arrays[first])), None):
        raise DataError(
            f"{path} has arrays of different lengths ({quote(first)} has {len(arrays[first])} rows, but {quote(other)} "
            f"has {len(arrays[other])}); save those of one table in one file."
        )
    frame = pandas().DataFrame(dict(columns))
    yield from (frame[start : start + rows] for start in range(0, len(frame), rows))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read all arrays of an NPZ file; Python objects are never unpickled."""
    try:
        return read_npz(path)
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; check the path.") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a readable NPZ file ({error_reason(error)}); write numbers or texts with numpy.savez(file, "
            "x=x, y=y)."
        ) from None


READERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".tsv.gz"), csv_chunks),
    ".parquet": parquet_chunks,
    ".npz": npz_chunks,
}
