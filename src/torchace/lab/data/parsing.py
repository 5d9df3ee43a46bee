"""Parsing of table cells as numbers, dates, texts or missing values, the same for every file format and chunk.

- Surrounding spaces are ignored. Missing: empty cells, NaN, NA, NaT, None, and `MISSING` in any case; except in classes
  to predict, also `PLACEHOLDERS`.
- Numbers use a decimal point: `-1.5e3`, `.5`, `007`, but not `0x1F`. `inf` and `1e999` are infinite. A format of
  `NUMBER_FORMATS` allows other separators, and percent and currency signs, which are removed: `12,5 %` is 12.5.
- Truth values are the texts `True` and `False`; dates become texts in ISO 8601.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.errors import DataError, arrow, pandas, quote, row_number

if TYPE_CHECKING:
    from pandas import Series  # type: ignore[import-untyped]


MISSING = ("", "na", "n/a", "nan", "null", "(null)", "none", "<na>", "#n/a", "#div/0!", "#value!", "#ref!", "nat")
PLACEHOLDERS = ("?", "-", "--", ".", "unknown", "missing", "n.a.")

# written like the key; separators of thousands and decimals
NUMBER_FORMATS = {
    "1234.5": ("", "."),
    "1,234.5": (",", "."),
    "1234,5": ("", ","),
    "1.234,5": (".", ","),
    "1 234,5": (" ", ","),
    "1 234.5": (" ", "."),
    "1'234.5": ("'", "."),
}
_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y")
_MONTHS = ("%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%Y", "%d-%b-%y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
_TIMES = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M:%S %p")
DATE_FORMATS = (
    "ISO8601",
    *(f"{day}{time}" for day in (*_DAYS, *_MONTHS) for time in ("", *(f" {time}" for time in _TIMES))),
    *_TIMES,
)

# valid in RE2 (columns) and re (cells)
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_INFINITE = r"[+-]?(?:inf|infinity)"
_CURRENCY = r"(?:US\$|[€$£¥₹₽₩₺]|(?:EUR|USD|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|CZK)\b)"
_UNIT_SIGNS = (
    ("\u2212", "-"),
    ("[\u00a0\u2009\u202f]", " "),
    ("\u2019", "'"),
    (r"^\((.+)\)$", r"-\1"),  # negative in accounting
    (rf"^([+-]?) *{_CURRENCY} *", r"\1"),
    (rf" *(?:%|{_CURRENCY})$", ""),
    (r"^([0-9].*)-$", r"-\1"),
)
_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")


class CellError(DataError):
    """Cell that is neither number nor text, such as a list; `found` is the message without advice."""

    def __init__(self, column: Series, place: int, what: str) -> None:
        self.found = f"Column {quote(column.name)} has {what} in row {row_number(column, place)}"
        super().__init__(f"{self.found}, which is neither a number nor a text; convert the column, or leave it out.")


def texts(column: Series, missing: Sequence[str] = (*MISSING, *PLACEHOLDERS)) -> Any:
    """Parse cells as texts: an Arrow array of strings, null for missing values."""
    pa, pc = arrow(), arrow("pyarrow.compute")
    cells = pc.utf8_trim_whitespace(_to_strings(column).cast(pa.large_string()))
    is_present = pc.invert(pc.is_in(pc.utf8_lower(cells), value_set=pa.array(missing, pa.large_string())))
    return pc.if_else(is_present, cells, pa.scalar(None, pa.large_string()))


def numbers(column: Series, format: str = "") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse cells as numbers with NaN for missing and invalid ones, and a mask of invalid ones, both `(N,)`.

    `format` is one of `NUMBER_FORMATS`, or empty for plain numbers.
    """
    if is_numeric(column):
        column = _to_dense(column)
        if pandas().api.types.is_complex_dtype(column.dtype):
            raise CellError(column, 0, "a complex number")
        with np.errstate(over="ignore"):  # numbers of 128 bits
            values = column.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        return values, np.zeros(len(values), dtype=bool)
    pa, pc = arrow(), arrow("pyarrow.compute")
    cells, is_number = match_numbers(texts(column), format)
    parsed = pc.cast(pc.if_else(is_number, cells, pa.scalar(None, pa.large_string())), pa.float64())
    invalid = np.asarray(pc.fill_null(pc.invert(is_number), False))
    return parsed.to_numpy(zero_copy_only=False).astype(np.float64), invalid


def match_numbers(cells: Any, format: str = "") -> tuple[Any, Any]:
    """Rewrite the numbers among the cells of `texts` as plain ones; return the cells and a mask, null for null."""
    pc = arrow("pyarrow.compute")
    pattern = _NUMBER
    if format:
        thousands, decimal_mark = (re.escape(mark) for mark in NUMBER_FORMATS[format])
        for found, written in _UNIT_SIGNS:
            cells = pc.replace_substring_regex(cells, found, written)
        pattern = rf"(?:[0-9]+(?:{decimal_mark}[0-9]*)?|{decimal_mark}[0-9]+)(?:[eE][+-]?[0-9]+)?"
        if thousands:  # never with an exponent: 1.234e3 has a decimal point
            pattern += rf"|[1-9][0-9]{{0,2}}(?:{thousands}[0-9]{{3}})+(?:{decimal_mark}[0-9]*)?"
        pattern = rf"[+-]?(?:{pattern})"
    finite = pc.match_substring_regex(cells, f"^(?:{pattern})$")
    is_number = pc.or_(finite, pc.match_substring_regex(cells, f"^(?:{_INFINITE})$", ignore_case=True))
    if format:
        thousands, decimal_mark = NUMBER_FORMATS[format]
        cells = pc.replace_substring(cells, thousands, "") if thousands else cells
        cells = pc.replace_substring(cells, decimal_mark, ".")
    return cells, is_number


def dates(column: Series, format: str = "ISO8601") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse cells as seconds since 1970 (UTC) with NaN for missing and invalid ones, and a mask of invalid ones.

    `format` is one of `DATE_FORMATS`. Columns of a date type need none.
    """
    pd = pandas()
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        cells, stamps = None, column
    else:
        cells = texts(column)
        stamps = cells.to_pandas()
    stamps = pd.Series(pd.to_datetime(stamps, format=format, errors="coerce", utc=True)).dt.tz_localize(None)
    seconds = (stamps - pd.Timestamp(0)).dt.total_seconds().to_numpy(dtype=np.float64, copy=True)
    present = ~np.isnan(seconds) if cells is None else np.asarray(cells.is_valid())
    return seconds, present & np.isnan(seconds)


def is_numeric(column: Series) -> bool:
    """Whether the column's type is that of numbers."""
    types, dtype = pandas().api.types, column.dtype
    return not is_category(column) and types.is_numeric_dtype(dtype) and not types.is_bool_dtype(dtype)


def positions(cells: Any, known: Sequence[str]) -> NDArray[np.int64]:
    """Indices of the cells of `texts` among known texts, `(N,)`; -1 for unknown and missing ones.

    Numbers and truth values also match in other spellings (`1` and `1.0`, `True`, `true` and `1`): file formats differ.
    """
    pc = arrow("pyarrow.compute")
    exact = {text: place for place, text in enumerate(known)}
    forms = Counter(map(canonical, known))
    by_form = {canonical(text): place for place, text in enumerate(known) if forms[canonical(text)] == 1}
    for booleans, others in ((("false", "true"), ("0", "1")), (("0", "1"), ("false", "true"))):
        if set(by_form) == set(booleans):
            by_form |= {other: by_form[form] for form, other in zip(booleans, others, strict=True)}
            break
    encoded = cells.dictionary_encode()
    indices = [exact.get(text, by_form.get(canonical(text), -1)) for text in encoded.dictionary.to_pylist()]
    places = np.asarray(pc.fill_null(encoded.indices, len(indices)), dtype=np.int64)
    return np.asarray([*indices, -1], dtype=np.int64)[places]


def number_text(value: float) -> str:
    """Convert a number to text, whole numbers without a point."""
    plain = float(value)
    return str(int(plain)) if abs(plain) < 2**53 and plain == int(plain) else str(value)


def canonical(text: str) -> str:
    """Common form of all spellings of a number or truth value; other texts are unchanged."""
    if _WHOLE.fullmatch(text):
        return str(int(text))
    if re.fullmatch(_NUMBER, text):
        return number_text(float(text))
    return text.lower() if text.lower() in ("true", "false") else text


def _to_strings(column: Series) -> Any:
    """Convert the cells of a column to Arrow strings."""
    pd, pa = pandas(), arrow()
    column = _to_dense(column)
    types, dtype = pd.api.types, column.dtype
    if is_category(column):
        column = column.cat.remove_unused_categories()
        codes = column.cat.codes.to_numpy()
        try:
            return _to_strings(pd.Series(column.cat.categories)).take(pa.array(codes, mask=codes < 0))
        except CellError:
            return _to_strings(column.astype(object))  # same error with the row
    if types.is_bool_dtype(dtype):
        cells = ["True" if value else "False" for value in column.fillna(False)]
        return pa.array(cells, pa.large_string(), mask=np.asarray(column.isna()))
    if types.is_integer_dtype(dtype):
        return _one_chunk(pa.array(column)).cast(pa.large_string())
    if types.is_float_dtype(dtype):
        values, places = np.unique(column.to_numpy(na_value=np.nan), return_inverse=True)
        return pa.array([None if np.isnan(v) else number_text(v) for v in values], pa.large_string()).take(places)
    is_string = isinstance(dtype, pd.StringDtype) or types.infer_dtype(column, skipna=True) in ("string", "empty")
    try:
        if is_string:
            return _one_chunk(pa.array(column, type=pa.large_string(), from_pandas=True))
        return pa.array([_object_text(column, i, value) for i, value in enumerate(column)], pa.large_string())
    except UnicodeEncodeError:
        wrong = next(i for i, v in enumerate(column) if isinstance(v, str) and v != v.encode(errors="replace").decode())
        raise CellError(column, wrong, "an unpaired Unicode surrogate") from None


def _object_text(column: Series, place: int, value: Any) -> str | None:
    """Convert one cell of an object column."""
    pd = pandas()
    if isinstance(value, str):
        return value
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, bool | np.bool_):
        return "True" if value else "False"
    if isinstance(value, int | np.integer):
        value = int(value)
        return str(value) if value.bit_length() <= 1024 else ("inf" if value > 0 else "-inf")
    if isinstance(value, float | np.floating | decimal.Decimal):
        return None if math.isnan(value) else number_text(float(value) if isinstance(value, decimal.Decimal) else value)  # type: ignore[arg-type]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta | np.datetime64 | uuid.UUID | pd.Period | pd.Interval):
        return str(value)
    raise CellError(column, place, f"a value of type {type(value).__name__}")


def _one_chunk(array: Any) -> Any:
    return array.combine_chunks() if isinstance(array, arrow().ChunkedArray) else array


def _to_dense(column: Series) -> Series:
    is_sparse = isinstance(column.dtype, pandas().SparseDtype)
    return column.sparse.to_dense() if is_sparse else column


def is_category(column: Series) -> bool:
    """Whether the column has the type of pandas categories."""
    return isinstance(column.dtype, pandas().CategoricalDtype)


MIN_SHARE = 0.98  # of numbers or dates in a column of them; the other cells count as missing
SAMPLE = 1000  # distinct cells that rule out a format
MIXED_DATES = 0.2  # a smaller share of dates is chance

_EUROPEAN = ("1234,5", "1.234,5", "1 234,5")


def number_formats(columns: Mapping[str, Series]) -> dict[str, tuple[str, float]]:
    """Format of the numbers in each column, and their share of the present cells; empty and 0 for texts.

    A cell such as `1,234` is read as the other columns suggest: with a decimal comma if one of them must have it.
    """
    shares = {name: _number_shares(column) for name, column in columns.items()}
    european = any(
        max(found.get(format, 0.0) for format in _EUROPEAN) > max(found[""], found.get("1,234.5", 0.0))
        for found in shares.values()
    )
    formats = {}
    for name, found in shares.items():
        order = [*(format for format in _EUROPEAN if european and format in found), *found]
        best = max(order, key=lambda format: found[format])  # the first of equals
        formats[name] = (best, found[best])
    return formats


def _number_shares(column: Series) -> dict[str, float]:
    """Share of the present cells that are numbers, by format: the plain one, and others that fit most cells."""
    if is_numeric(column):
        return {"": 1.0}
    if pandas().api.types.is_datetime64_any_dtype(column.dtype):
        return {"": 0.0}
    try:
        counted = texts(column).drop_null().value_counts()
    except CellError:
        return {"": 0.0}
    cells, counts = counted.field("values"), counted.field("counts").to_numpy()
    if not len(cells) or is_category(column):
        return {"": float(not len(cells))}

    def share(format: str, rows: int) -> float:
        return float(counts[:rows][np.asarray(match_numbers(cells[:rows], format)[1])].sum() / counts[:rows].sum())

    found = {"": share("", len(cells))}
    if found[""] == 1 and not (pc := arrow("pyarrow.compute")).any(pc.match_substring(cells, ".")).as_py():
        return found  # whole numbers are the same in all formats
    for format in NUMBER_FORMATS if found[""] < 1 else ("1.234,5",):  # others give plain numbers the same values
        if share(format, SAMPLE) >= MIN_SHARE / 2 and (whole := share(format, len(cells))) >= MIN_SHARE:
            found[format] = whole
    return found


def date_format(column: Series) -> tuple[str, float]:
    """Format of most dates in a column, and their share of the present cells."""
    pd, pc = pandas(), arrow("pyarrow.compute")
    iso = DATE_FORMATS[0]
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        return iso, 1.0
    cells = texts(column).drop_null()
    if not len(cells) or pc.mean(pc.match_substring_regex(cells, r"[0-9][^0-9]+[0-9]")).as_py() < MIXED_DATES:
        return iso, 0.0
    sample = cells.unique()[:200].to_pandas()
    shares: dict[str, float] = {}
    for format in DATE_FORMATS:
        shares[format] = float(pd.to_datetime(sample, format=format, errors="coerce", utc=True).notna().mean())
        if shares[format] == 1:
            break
    best = max(shares, key=lambda format: shares[format])  # the first of equals
    return (best, float(1 - dates(cells.to_pandas(), best)[1].mean())) if shares[best] >= MIXED_DATES else (iso, 0.0)
