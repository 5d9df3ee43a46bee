"""Schema of a table: its feature columns and the target; columns by name, with checks of their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor

from torchace.lab.data.errors import (
    DataError,
    first_duplicate,
    more_rows,
    pandas,
    quote,
    quote_all,
    row_number,
    suggestion,
)
from torchace.lab.data.parsing import MISSING, dates, number_text, numbers, positions, texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


STRICT = ConfigDict(strict=True, extra="forbid")
KINDS = ("number", "category", "date")
TASKS = ("classification", "regression")

Finite = Annotated[float, Field(allow_inf_nan=False)]
Label = str | int | Finite | bool


@dataclass(frozen=True)
class Column:
    """Column of a table: its kind, and how its cells are written."""

    __pydantic_config__ = STRICT
    name: str
    kind: Annotated[str, Field(pattern="^(number|category|date)$")]
    format: str = ""  # of `parsing.NUMBER_FORMATS` or `parsing.DATE_FORMATS`
    lenient: bool = False  # cells that are not numbers or dates count as missing


@dataclass(frozen=True)
class Target:
    """Column to predict, for "classification" or "regression"; "multilabel" (estimators) has labels in `classes`.

    A regression may have several columns.
    """

    __pydantic_config__ = STRICT
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    task: Annotated[str, Field(pattern="^(classification|multilabel|regression)$")]
    classes: tuple[Label, ...] = ()  # typed as in the file; empty for regression
    formats: tuple[str, ...] = ()  # of the numbers of each column, see `Column`

    @property
    def name(self) -> str:
        """Names of the columns, for messages."""
        return " and ".join(self.names)

    @property
    def num_outputs(self) -> int:
        """Number of classes, or of columns."""
        return len(self.classes) or len(self.names)

    @property
    def class_names(self) -> list[str]:
        """Classes as texts."""
        return [str(label) for label in self.classes]

    def labels(self, codes: Tensor) -> list[Label]:
        """Convert class indices `(N,)` to classes."""
        return [self.classes[code] for code in codes.tolist()]


@dataclass(frozen=True)
class Schema:
    """Feature columns of a table, in file order, and its target."""

    __pydantic_config__ = STRICT
    columns: tuple[Column, ...]
    target: Target
    notes: tuple[str, ...] = ()  # decisions of `infer_schema`
    dropped: tuple[tuple[str, str], ...] = ()  # columns left out, with the reasons
    version: Literal[2] = field(default=2, repr=False)

    def targets(self, frame: DataFrame) -> Tensor:
        """Target of every row, `(N,)`: class indices of int64, or numbers of float64, `(N, M)` for several columns."""
        frame = check_columns(frame)
        columns = [get_column(frame, name, "the target") for name in self.target.names]
        if self.target.task == "regression":
            found = []
            for column, format in zip(columns, self.target.formats, strict=True):
                values, invalid = numbers(column, format)
                check_targets(column, values, invalid)
                found.append(values)
            return torch.from_numpy(np.stack(found, 1) if len(found) > 1 else found[0])
        if self.target.task == "multilabel":
            raise DataError("A multilabel model cannot be scored on a file; score it in Python.")
        cells = target_texts(columns[0])
        labels = (number_text(label) if isinstance(label, float) else str(label) for label in self.target.classes)
        codes = positions(cells, list(labels))
        unknown = np.flatnonzero(codes < 0)
        if len(unknown):
            place = int(unknown[0])
            raise DataError(
                f"Row {row_number(frame, place)} has the class {quote(cells[place])} in the target "
                f"{quote(self.target.name)}, but training had only {quote_all(self.target.classes)}; correct or "
                "remove such rows, or train with them."
            )
        return torch.from_numpy(codes)


def check_columns(frame: DataFrame) -> DataFrame:
    """Return the table with unique strings as column names, or raise an error."""
    if not isinstance(frame, pandas().DataFrame):
        raise TypeError(
            f"Expected `frame` to be a pandas DataFrame, but got {type(frame).__name__}. Use pandas.DataFrame(...)."
        )
    names = [str(name) for name in frame.columns]
    if (duplicate := first_duplicate(names)) is not None:
        raise DataError(f"The table has two columns named {quote(duplicate)}; rename one of them.")
    return frame if list(frame.columns) == names else frame.set_axis(names, axis=1)


def get_column(frame: DataFrame, name: str, role: str) -> Series:
    """Return a column by its name."""
    if name not in frame.columns:
        raise DataError(
            f"The table has no column {quote(name)}{suggestion(name, frame.columns)}, {role}; correct the "
            f"name or add it: the columns are {quote_all(frame.columns)}."
        )
    return frame[name]


def feature_numbers(cells: Series, column: Column) -> NDArray[np.float64]:
    """Numbers of a feature column, or seconds since 1970 of dates, `(N,)`, NaN where one is missing."""
    values, invalid = (dates if column.kind == "date" else numbers)(cells, column.format)
    if invalid.any() and column == Column(column.name, "number"):  # truth values were numbers in training
        truth = positions(texts(cells), ("False", "True"))
        values, invalid = np.where(invalid & (truth >= 0), truth, values), invalid & (truth < 0)
    advice = {"remedy": f"write it like {column.format}, or leave it empty"} if column.format else {}
    check_features(cells, values, invalid & (not column.lenient), column.kind, **advice)
    return values


def target_texts(column: Series) -> Any:
    """Texts of a target column, an Arrow array, none missing; `-` or `?` may be a class."""
    cells = texts(column, MISSING)
    _check_present(column, np.asarray(cells.is_null()))
    return cells


def check_targets(column: Series, values: NDArray[np.float64], invalid: NDArray[np.bool_]) -> None:
    """Raise an error unless all cells are finite numbers."""
    _check_present(column, np.isnan(values) & ~invalid)
    check_features(column, values, invalid, remedy="correct it, or train for classification")


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
            first, others = int(places[0]), more_rows(len(places) - 1)
            raise DataError(
                f"Column {quote(column.name)} holds {kind}s, but row {row_number(column, first)} has "
                f"{quote(column.iloc[first])}, which is {what}{others and f' ({others.strip()})'}; {remedy}."
            )


def _check_present(column: Series, missing: NDArray[np.bool_]) -> None:
    places = np.flatnonzero(missing)
    if len(places):
        first = int(places[0])
        raise DataError(
            f"The target {quote(column.name)} has no value in row {row_number(column, first)}"
            f"{more_rows(len(places) - 1)} ({quote(column.iloc[first])} stands for a missing value); fill in or remove "
            "such rows, for example with DataFrame.dropna or --skip-missing-target."
        )
