"""CSV files, row by row: every cell a text, and every irregularity named by its row.

Spaces after a delimiter and behind a closing quotation mark belong to the layout of the file, not to the cell: `a, b`
holds `b`, and in `a, "b, c" ,d` the quotation marks count. Cells that are kept beside predictions come without them
too. A space that is part of a text stands in quotation marks, `a," b"`, and comes through; as a category it is the same
as without (see `cells`).
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torchace._files import CHUNK_BYTES, TABLE_COLUMNS, check_gzip, error_reason, open_regular
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import first_duplicate, quote
from torchace.lab.data.packages import arrow

_LINE_LIMIT = 1 << 24  # characters; a file without line breaks is not read into memory whole
_SAMPLE_ROWS = 20


def csv_chunks(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """The columns of a CSV file as texts, some rows at a time."""
    pa = arrow()
    _check_packed(path)
    delimiter = "\t" if ".tsv" in path.name.lower() else _delimiter(path)
    count = 0  # rows of data so far
    try:
        with _opened(path) as stream:
            reader = _reader(stream, delimiter)
            names = _checked_names(next(_filled(reader), []), path)
            filled = _filled(reader, blank_is_missing=len(names) == 1)
            rows = max(1, min(rows, CHUNK_BYTES // (8 * len(names))))
            while chunk := list(itertools.islice(filled, rows)):
                for row in chunk:
                    count += 1
                    if len(row) != len(names):
                        raise _ragged(path, count, len(row), len(names), delimiter)
                columns = zip(*chunk, strict=True)
                arrays = [pa.array(column, pa.large_string()).to_pandas() for column in columns]
                yield dict(zip(names, arrays, strict=True))
    except _NotText as error:
        raise DataError(f"{path} is not UTF-8 text in line {error.line}; save it as UTF-8.") from None
    except csv.Error as error:
        raise _malformed(path, reader.line_num, str(error)) from None
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors are among them
        raise DataError(
            f"{path} cannot be read to its end ({error_reason(error)}); copy it again or write it anew."
        ) from None


def _delimiter(path: Path) -> str:
    """Of comma, semicolon and tab, the one by which the first rows have most columns, all of them as many."""
    best, most = ",", 1
    for delimiter in ",;\t":
        try:
            with _opened(path) as stream:
                rows = list(itertools.islice(_filled(_reader(stream, delimiter)), _SAMPLE_ROWS))
        except (csv.Error, _NotText, OSError, EOFError, zlib.error):
            continue  # the reading proper says what is wrong
        widths = {len(row) for row in rows}
        if len(widths) == 1 and max(widths) > most:
            best, most = delimiter, max(widths)
    if most > 1:
        return best
    # No delimiter fits all rows: then that of the header, so that the row which does not fit can be named.
    with _opened(path) as stream:
        try:
            header = next((line for line in _lines(stream) if line.strip()), "")
        except (_NotText, OSError, EOFError, zlib.error):
            header = ""
    return max(",;\t", key=re.sub(r'"[^"]*"', "", header).count)


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _check_packed(path: Path) -> None:
    try:
        if _is_packed(path):
            check_gzip(path)
    except OSError as error:
        raise DataError(f"{path} is refused ({error_reason(error)}); unpack it if it is what you expect.") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """UTF-8 with or without a byte order mark; bytes that are no UTF-8 come through as lone surrogates."""
    with open_regular(path) as file:
        content: Any = gzip.GzipFile(fileobj=file) if _is_packed(path) else file
        yield io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _reader(stream: TextIO, delimiter: str) -> Any:
    lines = _without_gaps(_lines(stream), delimiter)
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)


def _without_gaps(lines: Iterable[str], delimiter: str) -> Iterator[str]:
    """Lines without the spaces between a closing quotation mark and what ends its cell, which `csv` refuses."""
    space = " " if delimiter == "\t" else r"[ \t]"
    rest = rf'(?:[^"]|"")*+)(?:"{space}*(?={delimiter}|[\r\n]*\Z)|(\Z))'  # of a cell in quotation marks
    cell = re.compile(rf'((?:\A|{delimiter}) *"{rest}')
    begun = re.compile(rf"\A({rest}")
    is_open = False  # whether a cell goes on in the next line

    def closed(match: re.Match[str]) -> str:
        nonlocal is_open
        is_open = match[2] is not None
        return match[1] if is_open else f'{match[1]}"'

    for line in lines:
        if is_open and '"' in line:
            end = match.end() if (match := begun.match(line)) is not None else 0
            is_open = False
            line = begun.sub(closed, line[:end]) + (cell.sub(closed, line[end:]) if end < len(line) else "")
        elif not is_open and '"' in line:
            line = cell.sub(closed, line)
        yield line


def _filled(rows: Iterable[list[str]], *, blank_is_missing: bool = False) -> Iterator[list[str]]:
    """Rows without blank lines; in a table of one column, `""` and spaces are a missing value."""
    return (row for row in rows if len(row) > 1 or (row and (blank_is_missing or row[0].strip())))


class _NotText(Exception):
    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def _lines(stream: TextIO) -> Iterator[str]:
    """The lines of a file, however they end."""
    for number in itertools.count(1):
        line = stream.readline(_LINE_LIMIT)
        if not line:
            return
        if len(line) == _LINE_LIMIT:
            raise csv.Error(f"line contains {_LINE_LIMIT} characters or more")
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError:
                raise _NotText(number) from None
        yield line


def _checked_names(header: list[str], path: Path) -> list[str]:
    """The column names in the first row."""
    names = [name.strip() for name in header]
    if len(names) > TABLE_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns, but a table may have {TABLE_COLUMNS:,}; leave some out.")
    if not any(names):
        raise DataError(f"{path} is empty; give a file with column names in its first row and data below.")
    for place, name in enumerate(names, start=1):
        if not name:
            raise DataError(
                f"{path} has no name for column {place}; give it one in the first row, or write the file without "
                "pandas's index (index=False)."
            )
    if _is_data(names):
        raise DataError(
            f"{path} seems to have no column names, since its first row is {quote(', '.join(names))}; put a row of "
            "names above it."
        )
    if (twice := first_duplicate(names)) is not None:
        raise DataError(f"{path} has two columns named {quote(twice)}; rename one of them.")
    return names


def _is_data(names: list[str]) -> bool:
    """Whether a first row is one of data: numbers alone, other than the numbers by which columns may be called."""
    try:
        [float(name) for name in names]
    except ValueError:
        return False
    return not all(name.isdecimal() for name in names) or len(set(names)) < len(names)


def _ragged(path: Path, row: int, found: int, expected: int, delimiter: str) -> DataError:
    mark = {",": "comma", ";": "semicolon", "\t": "tab"}[delimiter]
    return DataError(
        f"{path} has {found} {'value' if found == 1 else 'values'} in row {row}, but {expected} column "
        f"{'name' if expected == 1 else 'names'}; correct that row (a value with a {mark} in it needs quotation marks)."
    )


def _malformed(path: Path, line: int, why: str) -> DataError:
    if "expected after" in why:
        return DataError(
            f"{path} has something behind a closing quotation mark in line {line}; take it out, and write a "
            "quotation mark that belongs to a value twice."
        )
    if "unexpected end" in why:
        return DataError(f"{path} has a quotation mark that is never closed; close it, or take it out.")
    if "field limit" in why or "line contains" in why:
        return DataError(
            f"{path} has a value of more than {csv.field_size_limit():,} characters in line {line}; close the "
            "quotation mark before it, or leave the column out."
        )
    return DataError(f"{path} is no CSV file that can be read at line {line} ({why}); write it anew.")
