"""Columns of a table by name, with checks of their values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchace._files import TABLE_COLUMNS
from torchace.lab.data.errors import DataError, pandas
from torchace.lab.data.messages import first_duplicate, more_rows, quote, row_number, suggestion
from torchace.lab.data.parsing import numbers, texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


def check_columns(frame: DataFrame) -> DataFrame:
    """Return the table with unique strings as column names, or raise an error."""
    pd = pandas()
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"Expected `frame` to be a pandas DataFrame, but got {type(frame).__name__}. Use pandas.DataFrame(...)."
        )
    if isinstance(frame.columns, pd.MultiIndex):
        raise DataError(f"The table has column names of {frame.columns.nlevels} levels; give every column one name.")
    names = [str(name) for name in frame.columns]
    if (duplicate := first_duplicate(names)) is not None:
        raise DataError(f"The table has two columns named {quote(duplicate)}; rename one of them.")
    return frame if list(frame.columns) == names else frame.set_axis(names, axis=1)


def check_names(names: list[str], path: Path) -> None:
    """Raise an error if a file has no columns, too many, or duplicate names."""
    if len(names) > TABLE_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns, but a table may have {TABLE_COLUMNS:,}; leave some out.")
    if not names:
        raise DataError(f"{path} has no columns; give a file that holds a table.")
    if (duplicate := first_duplicate(names)) is not None:
        raise DataError(f"{path} has two columns named {quote(duplicate)}; rename one of them.")


def get_column(frame: DataFrame, name: str, role: str) -> Series:
    """Return a column by its name."""
    if name not in frame.columns:
        raise DataError(
            f"The table has no column {quote(name)}{suggestion(name, frame.columns)}, which is {role}; add it, or "
            f"rename the intended column{header_hint(frame.columns)}."
        )
    return frame[name]


def feature_numbers(column: Series) -> NDArray[np.float64]:
    """Numbers of a feature column, `(N,)`, NaN where one is missing."""
    values, invalid = numbers(column)
    check_features(column, values, invalid)
    return values


def date_part(column: Series, part: str) -> NDArray[np.float64]:
    """One part of every date, `(N,)`, NaN where one is missing; "elapsed" is in days since 1970, in UTC."""
    pd = pandas()
    moments = column if pd.api.types.is_datetime64_any_dtype(column.dtype) else _parse_dates(column)
    local = moments.dt.tz_localize(None)
    if part == "elapsed":
        start = pd.Timestamp(0, tz=moments.dt.tz)
        values = (moments - start) / pd.Timedelta(days=1)
    elif part == "hour":
        values = (local - local.dt.normalize()) / pd.Timedelta(hours=1)
    else:
        values = getattr(local.dt, part)
    return values.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)


def _parse_dates(column: Series) -> Series:
    """Texts as dates; raise an error for other texts."""
    pd = pandas()
    cells = pd.Series(texts(column).to_pandas(), index=column.index, name=column.name)
    moments = pd.to_datetime(cells, errors="coerce", utc=True, format="mixed")
    places = np.flatnonzero(moments.isna() & cells.notna())
    if len(places):
        first = int(places[0])
        raise DataError(
            f"Column {quote(column.name)} holds dates, but row {row_number(column, first)} has "
            f"{quote(column.iloc[first])}, which is not a date{more_rows(len(places) - 1, ' (likewise ', ')')}; "
            "correct it, or leave it empty."
        )
    return moments


def target_numbers(column: Series) -> NDArray[np.float64]:
    """Numbers of a target column, `(N,)`, none missing."""
    values, invalid = numbers(column)
    check_targets(column, values, invalid)
    return values


def check_features(column: Series, values: NDArray[np.float64], invalid: NDArray[np.bool_]) -> None:
    """Raise an error unless all cells are finite numbers or missing."""
    _check_numbers(column, values, invalid, "correct it, or leave it empty")


def check_targets(column: Series, values: NDArray[np.float64], invalid: NDArray[np.bool_]) -> None:
    """Raise an error unless all cells are finite numbers."""
    _check_present(column, np.isnan(values) & ~invalid)
    _check_numbers(column, values, invalid, "correct it, or train for classification")


def target_texts(column: Series) -> Any:
    """Texts of a target column, an Arrow array, none missing."""
    cells = texts(column)
    _check_present(column, np.asarray(cells.is_null()))
    return cells


def header_hint(names: Iterable[str]) -> str:
    """Hint at a missing header if at least half of the column names are numbers."""
    found, invalid = numbers(pandas().Series(list(names), dtype=object))
    return " (the first row of a file must hold the names)" if len(found) and invalid.mean() <= 0.5 else ""


def _check_numbers(column: Series, values: NDArray[np.float64], invalid: NDArray[np.bool_], remedy: str) -> None:
    for wrong, what in ((invalid, "not a number"), (np.isinf(values), "infinite or too large")):
        places = np.flatnonzero(wrong)
        if len(places):
            first = int(places[0])
            raise DataError(
                f"Column {quote(column.name)} holds numbers, but row {row_number(column, first)} has "
                f"{quote(column.iloc[first])}, which is {what}{more_rows(len(places) - 1, ' (likewise ', ')')}; "
                f"{remedy}."
            )


def _check_present(column: Series, missing: NDArray[np.bool_]) -> None:
    places = np.flatnonzero(missing)
    if len(places):
        first = int(places[0])
        raise DataError(
            f"The target {quote(column.name)} has no value in row {row_number(column, first)}"
            f"{more_rows(len(places) - 1)} ({quote(column.iloc[first])} stands for a missing value); fill in or remove "
            "such rows."
        )
