"""Errors of data, parts of their messages, and imports of optional packages at first use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchace._extras import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


class DataError(ValueError):
    """Data that cannot be read or used; the message is one sentence with the reason and the remedy."""

    def __init__(self, message: str) -> None:
        # a file name may hold a line break
        super().__init__(message.replace("\r", " ").replace("\n", " "))


def pandas() -> Any:
    """Import pandas."""
    return import_extra("pandas", "A table needs")


def arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow, or one of its modules by full name."""
    return import_extra(module, "A table needs")


def row_number(table: DataFrame | Series, place: int) -> int:
    """Number of a row counted from 1.

    A RangeIndex continues across chunks of a file; rows of other tables are counted from the table's start.
    """
    return int(table.index[place] if isinstance(table.index, pandas().RangeIndex) else place) + 1


def quote(value: object, limit: int = 60) -> str:
    """Quote a value on one line of at most `limit` characters."""
    text = repr(str(value))
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[0]}"


def quote_all(values: Iterable[object], limit: int = 10) -> str:
    """Quote the first `limit` values."""
    quoted = [quote(value, 40) for value in values]
    more = len(quoted) - limit
    return ", ".join(quoted) if more <= 0 else f"{', '.join(quoted[:limit])} and {more} more"


def first_duplicate(names: Iterable[str]) -> str | None:
    """First repeated name, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def suggestion(name: str, names: Iterable[str]) -> str:
    """Hint such as ` (did you mean 'age'?)`, or an empty string."""
    by_form = {known.strip().lower(): known for known in names}
    close = difflib.get_close_matches(name.strip().lower(), by_form, n=1)
    return f" (did you mean {quote(by_form[close[0]])}?)" if close else ""


def more_rows(count: int) -> str:
    """Count such as ` and 3 more rows`, or an empty string."""
    return "" if count <= 0 else f" and {count} more {'row' if count == 1 else 'rows'}"
