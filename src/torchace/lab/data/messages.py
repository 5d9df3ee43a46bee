"""Words for sentences about tables: rows as a person counts them, values on one line, names that may be meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchace.lab.data.packages import pandas

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


def row_number(table: DataFrame | Series, place: int) -> int:
    """The number by which a person knows a row: 1 for the first row of data, whatever chunk it came in.

    What `read_table` and `iterate_table` give is indexed by the rows of the file (a RangeIndex); of any other table,
    rows are counted as they come.
    """
    return int(table.index[place] if isinstance(table.index, pandas().RangeIndex) else place) + 1


def shown(value: object, limit: int = 60) -> str:
    """A value in quotation marks, on one line and not too long."""
    text = repr(str(value))
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[0]}"


def enumerated(values: Iterable[object], limit: int = 10) -> str:
    """Values in quotation marks, the first few of many."""
    listed = [shown(value, 40) for value in values]
    more = len(listed) - limit
    return ", ".join(listed) if more <= 0 else f"{', '.join(listed[:limit])} and {more} more"


def repeated(names: Iterable[str]) -> str | None:
    """The first name that comes a second time."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def suggestion(name: str, names: Iterable[str]) -> str:
    """ " (did you mean 'age'?)", or nothing."""
    names = list(names)
    by_form = {known.strip().lower(): known for known in names}
    close = difflib.get_close_matches(name.strip().lower(), by_form, n=1)
    return f" (did you mean {shown(by_form[close[0]])}?)" if close else ""


def reason(error: BaseException) -> str:
    """What others say of an error, as far as their first full stop."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return re.split(r"[\r\n]|\.(?:\s|$)", text.strip(), maxsplit=1)[0][:200]


def and_more(count: int) -> str:
    """ " and 3 more rows", or nothing."""
    return "" if count <= 0 else f" and {count} more {'row' if count == 1 else 'rows'}"
