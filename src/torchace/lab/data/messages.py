"""Parts of error messages about tables: row numbers, quoted values, suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchace.lab.data.errors import pandas

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


def row_number(table: DataFrame | Series, place: int) -> int:
    """Number of a row counted from 1, across all chunks of a file.

    Tables of `read_table` and `iterate_table` have a RangeIndex of the file's rows; rows of other tables are counted
    from the table's start.
    """
    return int(table.index[place] if isinstance(table.index, pandas().RangeIndex) else place) + 1


def quote(value: object, limit: int = 60) -> str:
    """Quote a value on one line of at most `limit` characters."""
    text = repr(str(value))
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[0]}"


def quote_all(values: Iterable[object], limit: int = 10) -> str:
    """Quote the first few of many values."""
    quoted = [quote(value, 40) for value in values]
    more = len(quoted) - limit
    return ", ".join(quoted) if more <= 0 else f"{', '.join(quoted[:limit])} and {more} more"


def first_duplicate(names: Iterable[str]) -> str | None:
    """First name that occurs a second time, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def suggestion(name: str, names: Iterable[str]) -> str:
    """ " (did you mean 'age'?)", or nothing."""
    by_form = {known.strip().lower(): known for known in names}
    close = difflib.get_close_matches(name.strip().lower(), by_form, n=1)
    return f" (did you mean {quote(by_form[close[0]])}?)" if close else ""


def more_rows(count: int, before: str = " and ", after: str = "") -> str:
    """ " and 3 more rows", or nothing."""
    return "" if count <= 0 else f"{before}{count} more {'row' if count == 1 else 'rows'}{after}"
