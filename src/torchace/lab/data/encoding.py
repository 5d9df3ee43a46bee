"""Encoding of a table's rows as numbers, learnt from the training part.

The raw matrix of `Encoding.matrix` has one column for each column of the schema, in its order, of float64:

- a number: the number, NaN where it is missing;
- a category: its code. The known categories are 0, 1, ..., in the order of `CategoryColumn.categories`; then comes the
  code of all others, if training had rare ones, and then that of missing values, if training had any. A value without a
  code is -1.

Scaling and one-hot encoding are left to `torchace.models.TableEncoder`, which is saved with the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from torchace._checks import check_count
from torchace.lab.data.columns import check_columns, feature_numbers, get_column
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import first_duplicate, quote
from torchace.lab.data.parsing import positions, texts
from torchace.lab.data.table_schema import STRICT, Finite, Schema, adapter_of, damaged_json, parse_stored

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


@dataclass(frozen=True)
class NumberColumn:
    """Statistics of a column of numbers in the training part."""

    __pydantic_config__ = STRICT
    name: str
    mean: Finite  # of the values present; it replaces missing ones
    std: Annotated[Finite, Field(ge=0)]  # of the population; 0 for a constant column, which is not used
    missing: bool  # whether some were missing: then this is a feature of its own


@dataclass(frozen=True)
class CategoryColumn:
    """Categories of a column in the training part."""

    __pydantic_config__ = STRICT
    name: str
    categories: tuple[str, ...]  # sorted
    other: bool  # whether there were rarer ones, which share a code with all unseen ones
    missing: bool  # whether some were missing: then this is a code of its own

    @property
    def codes(self) -> list[str]:
        """Meaning of each code."""
        return [*self.categories, *["(other)"] * self.other, *["(missing)"] * self.missing]


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of a regression target in the training part."""

    __pydantic_config__ = STRICT
    mean: Finite
    std: Annotated[Finite, Field(gt=0)]


@dataclass(frozen=True)
class Encoding:
    """A table's schema, the statistics of its columns in the same order, and for regression those of its target."""

    __pydantic_config__ = STRICT
    schema: Schema
    columns: tuple[NumberColumn | CategoryColumn, ...]
    target: TargetScale | None = None
    version: Literal[1] = field(default=1, repr=False)

    def matrix(self, frame: DataFrame) -> Tensor:
        """Encode the rows of a table as the raw matrix, `(N, F)` of float64; columns outside the schema are ignored.

        Raises:
            DataError: A column is missing, or a column of numbers holds something else.

        Example:
            >>> import pandas as pd
            >>> from torchace.lab.data.table_schema import infer_schema
            >>> frame = pd.DataFrame({"age": [3, 4] * 6, "fur": ["long", "short"] * 6, "pet": ["cat", "dog"] * 6})
            >>> encoding = learn_encoding(infer_schema(frame, "pet"), frame)
            >>> encoding.matrix(pd.DataFrame({"fur": ["short", "none at all"], "age": ["5.5", ""]}))
            tensor([[ 5.5000,  1.0000],
                    [    nan, -1.0000]], dtype=torch.float64)
        """
        frame = check_columns(frame)
        raw = np.empty((len(frame), len(self.columns)))
        for place, column in enumerate(self.columns):
            values = get_column(frame, column.name, "needed for predictions")
            raw[:, place] = feature_numbers(values) if isinstance(column, NumberColumn) else _codes(values, column)
        return torch.from_numpy(raw)

    def targets(self, frame: DataFrame) -> Tensor:
        """Return the target of every row, `(N,)`; see `Schema.targets`."""
        return self.schema.targets(frame)

    @property
    def feature_names(self) -> list[str]:
        """Names of the encoder's features, in order: numbers, indicators of missing numbers, categories."""
        arguments = self.encoder_arguments()
        names = [column.name for column in self.columns]
        categories = (column for column in self.columns if isinstance(column, CategoryColumn) and _is_used(column))
        return [
            *(names[place] for place in arguments["number_columns"]),
            *(f"{names[place]} missing" for place in arguments["indicator_columns"]),
            *(f"{column.name} = {code}" for column in categories for code in column.codes),
        ]

    @property
    def num_features(self) -> int:
        """Number of features that the encoder makes of a row, D."""
        return len(self.feature_names)

    def encoder_arguments(self) -> dict[str, Any]:
        """Return the arguments of `TableEncoder.from_values`."""
        found = list(enumerate(self.columns))
        numbers = [(place, column) for place, column in found if isinstance(column, NumberColumn)]
        categories = [(place, column) for place, column in found if isinstance(column, CategoryColumn)]
        varying = [(place, column) for place, column in numbers if column.std > 0]
        codes = [(place, code) for place, column in categories if _is_used(column) for code in range(len(column.codes))]
        return {
            "num_columns": len(self.columns),
            "mean": [column.mean for _, column in varying],
            "std": [column.std for _, column in varying],
            "number_columns": [place for place, _ in varying],
            "indicator_columns": [place for place, column in numbers if column.missing],
            "code_columns": [place for place, _ in codes],
            "codes": [code for _, code in codes],
        }

    def to_json(self) -> dict[str, Any]:
        """Convert the encoding and its schema to JSON values."""
        return adapter_of(Encoding).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, content: object) -> Encoding:
        """Restore an encoding from `to_json`; anything else is a `DataError`."""
        encoding: Encoding = parse_stored(Encoding, content, "encoding")
        encoding.schema.check()
        kinds = [(c.name, "number" if isinstance(c, NumberColumn) else "category") for c in encoding.columns]
        if kinds != [(column.name, column.kind) for column in encoding.schema.columns]:
            raise damaged_json("encoding", "columns: expected those of the schema")
        if any(isinstance(c, CategoryColumn) and first_duplicate(c.categories) is not None for c in encoding.columns):
            raise damaged_json("encoding", "categories: expected different ones")
        if (encoding.target is None) == (encoding.schema.target.task == "regression"):
            raise damaged_json("encoding", "target: expected mean and std for regression alone")
        if not encoding.num_features:
            raise damaged_json("encoding", "columns: expected one that varies")
        return encoding


def learn_encoding(
    schema: Schema,
    frame: DataFrame,
    *,
    sample_weight: Tensor | Sequence[float] | NDArray[np.float64] | None = None,
    max_categories: int = 50,
) -> Encoding:
    """Learn the encoding of a table from the rows of its training part.

    Args:
        schema: The schema of the table.
        frame: The rows of the training part, and no others.
        sample_weight: Weight of each row, `(N,)`; a row of weight 2 counts as two, one of weight 0 is ignored.
        max_categories: Largest number of categories of a column; the rarest beyond that share one code.

    Raises:
        DataError: A value does not belong to its column, or no column varies in the training part.

    Example:
        >>> import pandas as pd
        >>> from torchace.lab.data.table_schema import infer_schema
        >>> frame = pd.DataFrame({"age": [3, 5] * 6, "fur": ["long", "short"] * 6, "pet": ["cat", "dog"] * 6})
        >>> encoding = learn_encoding(infer_schema(frame, "pet"), frame)
        >>> encoding.columns[0]
        NumberColumn(name='age', mean=4.0, std=1.0, missing=False)
        >>> encoding.feature_names
        ['age', 'fur = long', 'fur = short']
    """
    check_count(max_categories, "max_categories")
    frame = check_columns(frame)
    weights = _check_weights(sample_weight, len(frame))
    if not weights.all():
        frame, weights = frame[weights > 0], weights[weights > 0]
    if not len(frame):
        raise DataError("The training part has no rows; give it a larger share.")
    columns: list[NumberColumn | CategoryColumn] = []
    for column in schema.columns:
        values = get_column(frame, column.name, "in the schema")
        if column.kind == "number":
            columns.append(_learn_number(values, weights))
        else:
            columns.append(_learn_category(values, weights, max_categories))
    target = None
    if schema.target.task == "regression":
        mean, std = mean_and_std(schema.targets(frame).numpy(), weights)
        if std == 0:
            raise DataError(
                f"The target {quote(schema.target.name)} is the same in all rows of the training part; give it more "
                "rows, or choose another column."
            )
        target = TargetScale(mean, std)
    encoding = Encoding(schema, tuple(columns), target)
    if not encoding.num_features:
        raise DataError("No column varies within the training part; give it more rows, or other columns.")
    return encoding


def mean_and_std(values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> tuple[float, float]:
    """Mean and standard deviation (of the population) of numbers `(N,)` of any magnitude, NaN ignored.

    Args:
        values: The numbers.
        weights: Weight of each, `(N,)`.

    Returns:
        Both; 0 and 0 for no numbers, and exactly 0 for the deviation of equal numbers.

    Example:
        >>> mean_and_std(np.array([1e300, 3e300, np.nan]))
        (2e+300, 1e+300)
    """
    present = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
    values = values[present]
    if not len(values):
        return 0.0, 0.0
    if values.min() == values.max():
        return float(values[0]), 0.0
    share = np.ones(len(values)) if weights is None else weights[present] / weights[present].max()
    share = share / share.sum()
    # Scaling by a power of two is exact; squares of 1e200 and of 1e-200 then stay within float64.
    exponent = int(np.frexp(np.abs(values).max())[1])
    scaled = np.ldexp(values, -exponent)
    mean = (share * scaled).sum()
    mean += (share * (scaled - mean)).sum()  # corrects rounding, e.g. for numbers of 1e9 that differ by 1
    off = scaled - mean
    std = math.sqrt(max(0.0, (share * off**2).sum() - (share * off).sum() ** 2))  # where the mean is between two floats
    return float(np.ldexp(mean, exponent)), float(np.ldexp(std, exponent))


def _learn_number(column: Series, weights: NDArray[np.float64]) -> NumberColumn:
    values = feature_numbers(column)
    missing = np.isnan(values)
    mean, std = mean_and_std(values, weights)
    return NumberColumn(str(column.name), mean, std, bool(missing.any() and not missing.all()))


def _learn_category(column: Series, weights: NDArray[np.float64], limit: int) -> CategoryColumn:
    encoded = texts(column).dictionary_encode()
    known = encoded.dictionary.to_pylist()
    missing = np.asarray(encoded.indices.is_null())
    places = np.asarray(encoded.indices.fill_null(0), dtype=np.int64)
    counts = np.bincount(places[~missing], weights[~missing], minlength=len(known))
    frequent = sorted(range(len(known)), key=lambda place: (-counts[place], known[place]))[:limit]
    categories = tuple(sorted(known[place] for place in frequent))
    return CategoryColumn(str(column.name), categories, len(known) > limit, bool(missing.any()))


def _is_used(column: CategoryColumn) -> bool:
    return len(column.codes) > 1  # a single code carries no information


def _codes(cells: Series, column: CategoryColumn) -> NDArray[np.int64]:
    """Codes of a column's categories, `(N,)`, -1 for values without one."""
    found = texts(cells)
    codes = positions(found, column.categories)
    codes[codes < 0] = len(column.categories) if column.other else -1
    if column.missing:
        codes[np.asarray(found.is_null())] = len(column.codes) - 1
    return codes


def _check_weights(sample_weight: Any, count: int) -> NDArray[np.float64]:
    if sample_weight is None:
        return np.ones(count)
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(
            f"Expected `sample_weight` of shape ({count},) with finite numbers of at least 0, but got shape "
            f"{weights.shape} or other numbers. Give one weight for each row of `frame`."
        )
    return weights
