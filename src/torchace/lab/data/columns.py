"""Columns of a table by name, with checks of their values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from torchace._files import TABLE_COLUMNS
from torchace.lab.data.errors import (
    DataError,
    MissingTargetError,
    first_duplicate,
    more_rows,
    pandas,
    quote,
    row_number,
    suggestion,
)
from torchace.lab.data.parsing import MISSING, dates, numbers, texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

STRICT = ConfigDict(strict=True, extra="forbid")
KINDS = ("number", "category", "date")


@dataclass(frozen=True)
class Column:
    """Column of a table: its kind, and how its cells are written."""

    __pydantic_config__ = STRICT
    name: str
    kind: Annotated[str, Field(pattern="^(number|category|date)$")]
    format: str = ""  # of `parsing.NUMBER_FORMATS` or `parsing.DATE_FORMATS`
    lenient: bool = False  # cells that are no numbers or dates count as missing


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


def feature_numbers(cells: Series, column: Column) -> NDArray[np.float64]:
    """Numbers of a feature column, or seconds since 1970 of dates, `(N,)`, NaN where one is missing."""
    values, invalid = (dates if column.kind == "date" else numbers)(cells, column.format)
    check_features(cells, values, invalid & (not column.lenient), column.kind)
    return values


def target_numbers(column: Series, format: str = "") -> NDArray[np.float64]:
    """Numbers of a target column, `(N,)`, none missing."""
    values, invalid = numbers(column, format)
    check_targets(column, values, invalid)
    return values


def check_targets(column: Series, values: NDArray[np.float64], invalid: NDArray[np.bool_]) -> None:
    """Raise an error unless all cells are finite numbers."""
    _check_present(column, np.isnan(values) & ~invalid)
    check_features(column, values, invalid, remedy="correct it, or train for classification")


def target_texts(column: Series) -> Any:
    """Texts of a target column, an Arrow array, none missing; `-` or `?` may be a class."""
    cells = texts(column, MISSING)
    _check_present(column, np.asarray(cells.is_null()))
    return cells


def header_hint(names: Iterable[str]) -> str:
    """Hint at a missing header if at least half of the column names are numbers."""
    found, invalid = numbers(pandas().Series(list(names), dtype=object))
    return " (the first row of a file must hold the names)" if len(found) and invalid.mean() <= 0.5 else ""


def check_features(
    column: Series,
    values: NDArray[np.float64],
    invalid: NDArray[np.bool_],
    kind: str = "number",
    remedy: str = "correct it, or leave it empty",
) -> None:
    """Raise an error unless all cells are finite numbers, or dates, or missing."""
    for wrong, what in ((invalid, f"not a {kind}"), (np.isinf(values), "infinite or too large")):
        places = np.flatnonzero(wrong)
        if len(places):
            first = int(places[0])
            raise DataError(
                f"Column {quote(column.name)} holds {kind}s, but row {row_number(column, first)} has "
                f"{quote(column.iloc[first])}, which is {what}{more_rows(len(places) - 1, ' (likewise ', ')')}; "
                f"{remedy}."
            )


def _check_present(column: Series, missing: NDArray[np.bool_]) -> None:
    places = np.flatnonzero(missing)
    if len(places):
        first = int(places[0])
        raise MissingTargetError(
            f"The target {quote(column.name)} has no value in row {row_number(column, first)}"
            f"{more_rows(len(places) - 1)} ({quote(column.iloc[first])} stands for a missing value)"
        )
