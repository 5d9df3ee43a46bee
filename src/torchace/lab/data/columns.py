"""The columns of a table by name, with the sentence for every value that does not belong there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import and_more, repeated, row_number, shown, suggestion
from torchace.lab.data.packages import pandas
from torchace.lab.data.parsing import numbers, texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


def named(frame: DataFrame) -> DataFrame:
    """A table whose columns have one name each, a text."""
    pd = pandas()
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"Expected `frame` to be a pandas DataFrame, but got {type(frame).__name__}. Use pandas.DataFrame(...)."
        )
    if isinstance(frame.columns, pd.MultiIndex):
        raise DataError(f"The table has column names of {frame.columns.nlevels} levels; give every column one name.")
    names = [str(name) for name in frame.columns]
    if (twice := repeated(names)) is not None:
        raise DataError(f"The table has two columns named {shown(twice)}; rename one of them.")
    return frame if list(frame.columns) == names else frame.set_axis(names, axis=1)


def column_of(frame: DataFrame, name: str, role: str) -> Series:
    """A column by its name."""
    if name not in frame.columns:
        raise DataError(
            f"The table has no column {shown(name)}{suggestion(name, frame.columns)}, which is {role}; add it, or "
            f"rename the column that is meant{header_hint(frame.columns)}."
        )
    return frame[name]


def feature_numbers(column: Series) -> NDArray[np.float64]:
    """The numbers in a column of numbers, `(N,)`, NaN where one is missing."""
    values, wrong = numbers(column)
    check_features(column, values, wrong)
    return values


def target_numbers(column: Series) -> NDArray[np.float64]:
    """The numbers in a target, `(N,)`, none missing."""
    values, wrong = numbers(column)
    check_targets(column, values, wrong)
    return values


def check_features(column: Series, values: NDArray[np.float64], wrong: NDArray[np.bool_]) -> None:
    """What `numbers` found are numbers, or missing."""
    _check_numbers(column, values, wrong, "correct it, or leave it empty")


def check_targets(column: Series, values: NDArray[np.float64], wrong: NDArray[np.bool_]) -> None:
    """What `numbers` found are numbers, none missing."""
    _check_filled(column, np.isnan(values) & ~wrong)
    _check_numbers(column, values, wrong, "correct it, or train for classification")


def target_texts(column: Series) -> Any:
    """The texts in a target, an Arrow array, none missing."""
    cells = texts(column)
    _check_filled(column, np.asarray(cells.is_null()))
    return cells


def header_hint(names: Iterable[str]) -> str:
    """Where column names look like data, the first row of a file may be missing."""
    found, wrong = numbers(pandas().Series(list(names), dtype=object))
    return " (the first row of a file must hold the names)" if len(found) and wrong.mean() <= 0.5 else ""


def _check_numbers(column: Series, values: NDArray[np.float64], wrong: NDArray[np.bool_], remedy: str) -> None:
    infinite = np.isinf(values)
    for places, what in ((np.flatnonzero(wrong), "no number"), (np.flatnonzero(infinite), "infinite or too large")):
        if len(places):
            first = int(places[0])
            raise DataError(
                f"Column {shown(column.name)} holds numbers, but row {row_number(column, first)} has "
                f"{shown(column.iloc[first])}, which is {what}{_likewise(len(places) - 1)}; {remedy}."
            )


def _likewise(count: int) -> str:
    return "" if count <= 0 else f" (likewise {count} more {'row' if count == 1 else 'rows'})"


def _check_filled(column: Series, missing: NDArray[np.bool_]) -> None:
    places = np.flatnonzero(missing)
    if len(places):
        first = int(places[0])
        raise DataError(
            f"The target {shown(column.name)} has no value in row {row_number(column, first)}"
            f"{and_more(len(places) - 1)} ({shown(column.iloc[first])} stands for a missing value); fill in or remove "
            "such rows."
        )
