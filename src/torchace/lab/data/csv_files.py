"""CSV files in chunks of rows, every cell a text.

pyarrow parses the cells. Before that, each block is checked for errors that pyarrow accepts (text after a closing
quote, an unclosed quote), and spaces outside quotes next to a delimiter are removed: `a, "b, c" ,d` has three cells.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._files import CHUNK_BYTES, error_reason
from torchace.lab.data.errors import DataError, arrow, quote
from torchace.lab.data.table_schema import check_names

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1 << 24  # bounds memory for a file without line breaks
_SAMPLE_ROWS = 20
_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}


def csv_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the rows of a CSV file, at most `rows` at a time."""
    pa = arrow()
    try:
        stream = _read_blocks(path)
        first = next(stream, b"")
        delimiters = ["\t"] if ".tsv" in path.name.lower() else list(_DELIMITERS)
        delimiter, has_row_names = _find_layout(first, delimiters)
        blocks = _complete_rows(itertools.chain([first], stream), delimiter, path)
        lines = io.StringIO(next(blocks, b"").decode(), newline="")
        names = _read_header(lines, delimiter, path, has_row_names)
        rows = max(1, min(rows, CHUNK_BYTES // (8 * len(names))))
        count, pending = 0, None
        for block in itertools.chain([lines.read().encode()], blocks):
            table, bad_row = _parse(block, names, delimiter)
            count += len(table)
            pending = table if pending is None else pa.concat_tables([pending, table])
            while len(pending) >= rows:
                yield pending.slice(0, rows).to_pandas()
                pending = pending.slice(rows)
            if bad_row is not None:
                found, expected = bad_row.actual_columns, bad_row.expected_columns
                raise DataError(
                    f"{path} has {found} {'value' if found == 1 else 'values'} in row {count + 1}, but {expected} "
                    f"column {'name' if expected == 1 else 'names'}; correct that row (a value with a "
                    f"{_DELIMITERS[delimiter]} in it needs quotation marks)."
                )
        if pending is not None and len(pending):
            yield pending.to_pandas()
    except csv.Error as error:
        raise DataError(f"{path} is not a readable CSV file ({error}); save it again.") from None
    except (OSError, EOFError, zlib.error) as error:  # includes gzip's errors
        raise DataError(f"{path} cannot be read to its end ({error_reason(error)}); copy or save it again.") from None


def _read_blocks(path: Path) -> Iterator[bytes]:
    """Read a file as UTF-8 text, whatever its encoding and compression."""
    is_packed = path.name.lower().endswith(".gz")
    encoding = text_encoding(path)
    with open(path, "rb") as file:
        content: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        blocks: Iterator[bytes] = iter(lambda: content.read(_BLOCK_BYTES), b"")
        try:
            recoded = codecs.iterencode(codecs.iterdecode(blocks, encoding), "utf-8")
            yield from blocks if encoding == "UTF-8" else recoded
        except UnicodeError:
            raise DataError(f"{path} is neither UTF-8 nor {encoding} text; save it as UTF-8.") from None


def text_encoding(path: Path) -> str:
    """Encoding of a text file: UTF-8, UTF-16 by its byte order mark, else Windows-1252."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        stream: Any = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
        block = stream.read(_BLOCK_BYTES)
        if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "UTF-16"
        try:
            decoder.decode(block)
            while block:
                block = stream.read(_BLOCK_BYTES)
                decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            return "Windows-1252"
    return "UTF-8"


def _find_layout(sample: bytes, delimiters: list[str]) -> tuple[str, bool]:
    """Delimiter, and whether the rows have one value more than the header, as R writes row names.

    The delimiter is the one that gives the first rows the most columns, equally many each; else the header's most
    frequent.
    """
    if len(sample) >= io.DEFAULT_BUFFER_SIZE:  # the last row may be incomplete
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    text = sample.decode("utf-8-sig", errors="replace")
    best, most, has_row_names = delimiters[0], 1, False
    for delimiter in delimiters:
        with contextlib.suppress(csv.Error):
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
            width, *rows = [len(row) for row in itertools.islice(_skip_blank(reader), _SAMPLE_ROWS)] or [0]
            is_longer = width > 1 and set(rows) == {width + 1}
            if (is_longer or {width} >= set(rows)) and width > most:
                best, most, has_row_names = delimiter, width, is_longer
    if most > 1:
        return best, has_row_names
    header = next((line for line in text.splitlines() if line.strip()), "")
    return max(delimiters, key=re.sub(r'"[^"]*"', "", header).count), False


def _skip_blank(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    return (row for row in rows if len(row) > 1 or (row and row[0].strip()))


def _complete_rows(stream: Iterator[bytes], delimiter: str, path: Path) -> Iterator[bytes]:
    """Read blocks of complete rows, check them, and remove spaces around delimiters."""
    mark, space = re.escape(delimiter), " " if delimiter == "\t" else r"[ \t]"
    quoted = rf'(\A|[{mark}\r\n]) *+"([^"]*+(?:""[^"]*+)*+)("?){space}*+(?=([{mark}\r\n]|\Z)?)'
    quoted_cells = re.compile(quoted.encode())
    layout = re.compile(rf'{quoted}|({mark}) ++(?!")|(\A|[\r\n]) ++(?![\r\n"]|\Z)'.encode())
    rest, line, block = b"", 1, next(stream, b"").removeprefix(b"\xef\xbb\xbf")
    while rest or block:
        following = next(stream, b"")
        data = rest + block
        # keep \r\n together
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) if following else len(data)
        end = _check_quotes(data[:end], quoted_cells, path, line, is_last=not following)
        rows, rest, block = data[:end], data[end:], following
        line += _count_lines(rows)
        if b'"' in rows or b" " in rows:
            rows = layout.sub(lambda m: m[5] or m[6] or b"" if m[2] is None else b'%b"%b"' % (m[1], m[2]), rows)
        if rows:
            yield rows
        if len(rest) > _LINE_BYTES:
            raise DataError(f"{path} has more than {_LINE_BYTES:,} bytes in line {line}; write one row on each line.")


def _count_lines(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def _check_quotes(data: bytes, quoted_cells: re.Pattern[bytes], path: Path, line: int, *, is_last: bool) -> int:
    """Check quoted cells; return the start of the first row that continues in the next block."""
    row_start = last = 0
    limit = csv.field_size_limit()
    for match in quoted_cells.finditer(data) if b'"' in data else ():
        start, text, closing, after = match.start(), match[2], match[3], match[4]
        row_start = max(row_start, 1 + data.rfind(b"\n", last, start + 1), 1 + data.rfind(b"\r", last, start + 1))
        last = match.end()
        if closing and after is not None and len(text) <= limit:
            continue
        wrong = line + _count_lines(data[:last])
        if len(text) > limit:
            raise DataError(
                f"{path} has a value of more than {limit:,} characters in line {wrong}; close the quotation mark "
                "before it, or leave the column out."
            )
        if closing:
            raise DataError(
                f"{path} has text after a closing quotation mark in line {wrong}; remove it, and write a "
                "quotation mark inside a value twice."
            )
        if is_last:
            raise DataError(f"{path} has a quotation mark that is never closed; close it, or remove it.")
        return row_start
    return len(data)


def _read_header(lines: io.StringIO, delimiter: str, path: Path, has_row_names: bool) -> list[str]:
    """Read column names from the first row that is not blank, and name columns without one."""
    names = [name.strip() for name in next(_skip_blank(csv.reader(lines, delimiter=delimiter)), [])]
    if not any(names):
        raise DataError(f"{path} is empty; give a file with column names in its first row and data below.")
    if _is_data(names):
        raise DataError(
            f"{path} seems to have no column names, since its first row is {quote(', '.join(names))}; put a row of "
            "names above it."
        )
    names = [""] * has_row_names + names
    names = [name or ("row names" if place == 0 else f"column {place + 1}") for place, name in enumerate(names)]
    check_names(names, path)
    return names


def _is_data(names: list[str]) -> bool:
    """Whether a first row is data: only numbers, unless they are distinct whole numbers, which may be names."""
    try:
        [float(name) for name in names]
    except ValueError:
        return False
    return not all(name.isdecimal() for name in names) or len(set(names)) < len(names)


def _parse(block: bytes, names: list[str], delimiter: str) -> tuple[Any, Any]:
    """Parse complete rows into an Arrow table that ends before the first row of wrong width; return both."""
    pa, pa_csv = arrow(), arrow("pyarrow.csv")
    schema = pa.schema([(name, pa.large_string()) for name in names])
    if not block:
        return schema.empty_table(), None
    bad: list[Any] = []
    blank = 0

    def skip(row: Any) -> str:
        nonlocal blank
        if row.text.strip():
            bad.append(row)
        elif not bad:
            blank += 1
        return "skip"

    table = pa_csv.read_csv(
        pa.BufferReader(block),
        pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1),
        pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip),
        pa_csv.ConvertOptions(column_types=schema, strings_can_be_null=False, check_utf8=False),
    )
    return (table.slice(0, bad[0].number - 1 - blank), bad[0]) if bad else (table, None)
