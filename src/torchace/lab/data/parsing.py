"""Parsing of table cells as numbers, dates, texts or missing values, the same for every file format and chunk.

- Surrounding spaces are ignored. Missing: empty cells, NaN, NA, NaT, None, and `MISSING` in any case; except in classes
  to predict, also `PLACEHOLDERS`.
- Numbers use a decimal point: `-1.5e3`, `.5`, `007`, but not `0x1F`. `inf` and `1e999` are infinite. A format of
  `NUMBER_FORMATS` allows other separators, and percent and currency signs, which are removed: `12,5 %` is 12.5.
- Durations are numbers of seconds.
- Truth values are the texts `True` and `False`; dates become texts in ISO 8601.
"""

from __future__ import annotations

import re
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
MIN_SHARE = 0.98  # of numbers or dates in a column of them; the other cells count as missing
MIXED_DATES = 0.2  # a smaller share of dates is chance

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
_TIMES = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
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
    ("[\u2212\u2013]", "-"),
    ("[\u00a0\u2009\u202f]", " "),
    ("\u2019", "'"),
    (r"^\((.+)\)$", r"-\1"),  # negative in accounting
    (r"^([0-9.,' ]*[.,][0-9][0-9])-$", r"-\1"),  # negative in SAP; 2- may be a grade
    (rf"^([+-]?) *{_CURRENCY} *", r"\1"),
    (rf" *(?:%|{_CURRENCY})$", ""),
)


class CellError(DataError):
    """Cell that is neither number nor text, such as a list; `found` is the message without advice."""

    def __init__(self, column: Series, place: int) -> None:
        self.found = f"a value of type {type(column.iloc[place]).__name__} in row {row_number(column, place)}"
        super().__init__(
            f"Column {quote(column.name)} has {self.found}, which is neither a number nor a text; convert the column, "
            "or leave it out."
        )


def texts(column: Series, missing: Sequence[str] = (*MISSING, *PLACEHOLDERS)) -> Any:
    """Parse cells as texts: an Arrow array of strings, null for missing values."""
    pa, pc = arrow(), arrow("pyarrow.compute")
    cells = pc.utf8_trim_whitespace(_to_strings(column))
    is_present = pc.invert(pc.is_in(pc.utf8_lower(cells), value_set=pa.array(missing, pa.large_string())))
    return pc.if_else(is_present, cells, pa.scalar(None, pa.large_string()))


def numbers(column: Series, format: str = "") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse cells as numbers with NaN for missing and invalid ones, and a mask of invalid ones, both `(N,)`.

    `format` is one of `NUMBER_FORMATS`, or empty for plain numbers.
    """
    if is_numeric(column):
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
    cells = column if is_date(column) else texts(column).to_pandas()
    stamps = pd.Series(pd.to_datetime(cells, format=format, errors="coerce", utc=True)).dt.tz_localize(None)
    values = stamps.to_numpy(dtype="datetime64[us]")  # nanoseconds would overflow in the years 1677 and 2262
    seconds = np.where(np.isnat(values), np.nan, values.astype(np.int64) / 1e6)
    return seconds, np.asarray(cells.notna()) & np.isnan(seconds)


def is_numeric(column: Series) -> bool:
    """Whether the column's type is that of real numbers."""
    types, dtype = pandas().api.types, column.dtype
    is_other = is_category(column) or types.is_bool_dtype(dtype) or types.is_complex_dtype(dtype)
    return types.is_numeric_dtype(dtype) and not is_other


def is_date(column: Series) -> bool:
    """Whether the column's type is that of dates and times."""
    return pandas().api.types.is_datetime64_any_dtype(column.dtype)


def is_category(column: Series) -> bool:
    """Whether the column has the type of pandas categories."""
    return isinstance(column.dtype, pandas().CategoricalDtype)


def positions(cells: Any, known: Sequence[str]) -> NDArray[np.int64]:
    """Indices of the cells of `texts` among known texts, `(N,)`; -1 for unknown and missing ones.

    Numbers and truth values also match in other spellings (`1` and `1.0`, `True`, `true` and `1`): file formats differ.
    """
    exact = {text: place for place, text in enumerate(known)}
    forms = Counter(map(canonical, known))
    by_form = {canonical(text): place for place, text in enumerate(known) if forms[canonical(text)] == 1}
    pairs = (("false", "0"), ("true", "1"))
    if set(by_form) in ({"false", "true"}, {"0", "1"}):
        by_form |= {form: by_form[pair[pair[0] not in by_form]] for pair in pairs for form in pair}
    encoded = cells.dictionary_encode()
    indices = [exact.get(text, by_form.get(canonical(text), -1)) for text in encoded.dictionary.to_pylist()]
    places = np.asarray(encoded.indices.fill_null(len(indices)), dtype=np.int64)
    return np.asarray([*indices, -1], dtype=np.int64)[places]


def number_text(value: float) -> str:
    """Convert a number to text, whole numbers without a point."""
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else str(value)


def canonical(text: str) -> str:
    """Common form of all spellings of a number or truth value; other texts are unchanged."""
    if re.fullmatch(r"[+-]?[0-9]{1,300}", text):
        return str(int(text))
    if re.fullmatch(_NUMBER, text):
        return number_text(float(text))
    return text.lower() if text.lower() in ("true", "false") else text


def _to_strings(column: Series) -> Any:
    """Convert the cells of a column to Arrow strings."""
    pd, pa, pc = pandas(), arrow(), arrow("pyarrow.compute")
    if isinstance(column.dtype, pd.SparseDtype):
        column = column.sparse.to_dense()
    if is_category(column):
        codes = column.cat.codes.to_numpy()
        return _to_strings(pd.Series(column.cat.categories)).take(pa.array(codes, mask=codes < 0))
    try:
        cells = pa.array(column, from_pandas=True)
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        if pa.types.is_boolean(cells.type):
            cells = pc.if_else(cells, "True", "False")
        if pa.types.is_duration(cells.type):  # in seconds
            cells = pc.divide(
                cells.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6
            )
        units = {"decimal": pa.float64(), "time": pa.time32("s")}
        for name, unit in {**units, "timestamp": pa.timestamp("us")}.items():  # the same texts from all files
            if getattr(pa.types, f"is_{name}")(cells.type):
                cells = cells.cast(unit, safe=False)
        if not isinstance(cells.type, pa.BaseExtensionType):  # such as periods
            return cells.cast(pa.large_string())
    except (pa.ArrowException, OverflowError, TypeError):  # objects of several types
        pass
    is_text = [pd.api.types.is_scalar(cell) and not isinstance(cell, bytes | complex) for cell in column]
    if not all(is_text):
        raise CellError(column, is_text.index(False))
    values = (number_text(cell) if isinstance(cell, float) else str(cell) for cell in column)
    return pa.array(values, pa.large_string(), mask=np.asarray(column.isna()))


# -- formats of columns ------------------------------------------------------------------------------------------------


def number_formats(columns: Mapping[str, Series]) -> dict[str, tuple[str, float]]:
    """Format of the numbers in each column, and their share of the present cells; empty and 0 for texts.

    A cell such as `1,234` is read as the other columns suggest: with a decimal comma if one of them must have it.
    """
    commas = ("1234,5", "1.234,5", "1 234,5")
    shares = {name: _number_shares(column) for name, column in columns.items()}
    has_commas = any(
        max(found.get(format, 0.0) for format in commas) > max(found[""], found.get("1,234.5", 0.0))
        for found in shares.values()
    )
    formats = {}
    for name, found in shares.items():
        order = [*(format for format in commas if has_commas and format in found), *found]
        best = max(order, key=lambda format: found[format])  # the first of equals
        formats[name] = (best, found[best])
    return formats


def _number_shares(column: Series) -> dict[str, float]:
    """Share of the present cells that are numbers, by format: the plain one, and others that fit most cells."""
    if is_numeric(column):
        return {"": 1.0}
    if is_date(column):
        return {"": 0.0}
    try:
        counted = texts(column).drop_null().value_counts()
    except CellError:
        return {"": 0.0}
    cells, counts = counted.field("values"), counted.field("counts").to_numpy()
    if not len(cells) or is_category(column):
        return {"": float(not len(cells))}

    def share(format: str, rows: int = len(cells)) -> float:
        is_number = np.asarray(match_numbers(cells[:rows], format)[1])
        return float(counts[:rows][is_number].sum() / counts[:rows].sum())

    found = {"": share("")}
    # other formats give plain numbers the same values
    others = [format for format in NUMBER_FORMATS if found[""] < 1 or format == "1.234,5"]
    likely = [format for format in others if share(format, 1000) >= MIN_SHARE / 2]
    found |= {format: whole for format in likely if (whole := share(format)) >= MIN_SHARE}
    if found.get("1.234,5", 0.0) >= found[""] and _has_thousands(cells):
        found[""] = 0.0
    return found


def _has_thousands(cells: Any) -> bool:
    """Whether 1.410 stands beside 842, but not beside 1234: decimals would be written as 1.41 and 842.000."""
    pc = arrow("pyarrow.compute")
    patterns = (r"[.][0-9]{2}0$", "^[+-]?[0-9]{1,3}$", "^[+-]?[0-9]{4,}$")
    end_in_0, are_short, are_long = (pc.any(pc.match_substring_regex(cells, found)).as_py() for found in patterns)
    return end_in_0 and are_short and not are_long


def date_format(column: Series) -> tuple[str, float]:
    """Format of most dates in a column, and their share of the present cells."""
    pd, pc = pandas(), arrow("pyarrow.compute")
    iso = DATE_FORMATS[0]
    if is_date(column):
        return iso, 1.0
    cells = texts(column).drop_null()
    if not len(cells) or pc.mean(pc.match_substring_regex(cells, r"[0-9][^0-9]+[0-9]")).as_py() < MIXED_DATES:
        return iso, 0.0
    counted = cells.value_counts()[:200]
    sample, counts = counted.field("values").to_pandas(), counted.field("counts").to_numpy()
    shares: dict[str, float] = {}
    for format in DATE_FORMATS:
        is_read = pd.to_datetime(sample, format=format, errors="coerce", utc=True).notna()
        shares[format] = float(np.average(is_read, weights=counts))
        if shares[format] == 1:
            break
    best = max(shares, key=lambda format: shares[format])  # the first of equals
    return (best, float(1 - dates(cells.to_pandas(), best)[1].mean())) if shares[best] >= MIXED_DATES else (iso, 0.0)
