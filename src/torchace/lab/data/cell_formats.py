"""How the numbers and dates of a column are written, inferred from its cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchace.lab.data.errors import arrow, pandas
from torchace.lab.data.parsing import (
    DATE_FORMATS,
    NUMBER_FORMATS,
    CellError,
    dates,
    is_category,
    is_numeric,
    match_numbers,
    texts,
)

if TYPE_CHECKING:
    from pandas import Series  # type: ignore[import-untyped]

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
    shares = {
        format: float(pd.to_datetime(sample, format=format, errors="coerce", utc=True).notna().mean())
        for format in DATE_FORMATS
    }
    best = max(shares, key=lambda format: shares[format])  # the first of equals
    return (best, float(1 - dates(cells.to_pandas(), best)[1].mean())) if shares[best] >= MIXED_DATES else (iso, 0.0)
