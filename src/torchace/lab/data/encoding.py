"""From the rows of a table to numbers: what the training part taught about each column, and how rows are coded by it.

The raw matrix that `Encoding.matrix` gives has one column for each column of the schema, in its order, of float64:

- of a number: the number, NaN where it is missing;
- of a category: its code. The known categories are 0, 1, ..., in the order of `CategoryColumn.categories`; then comes
  the code for all others, if training had rare ones to learn it from, and then that of missing values, if training had
  any. Whatever has no code is -1.

Scaling and one-hot coding are left to `torchace.models.TableEncoder`, which is saved with the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchace._checks import check_count
from torchace.lab.data.columns import check_columns, feature_numbers, get_column
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import first_duplicate, quote
from torchace.lab.data.parsing import positions, texts
from torchace.lab.data.table_schema import Schema, damaged_json, json_object

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

_VERSION = 1


@dataclass(frozen=True)
class NumberColumn:
    """What training taught about a column of numbers.

    Attributes:
        name: The column.
        mean: Of the values that were there; it stands for those that are missing.
        std: Their standard deviation (of the population); 0 if they were all the same, and the column is not used.
        missing: Whether some were missing, so that this is a feature of its own.
    """

    name: str
    mean: float
    std: float
    missing: bool


@dataclass(frozen=True)
class CategoryColumn:
    """What training taught about a column of categories.

    Attributes:
        name: The column.
        categories: The known categories, sorted.
        other: Whether there were rarer ones, which share a code with all that were never seen.
        missing: Whether some were missing, so that this is a code of its own.
    """

    name: str
    categories: tuple[str, ...]
    other: bool
    missing: bool

    @property
    def codes(self) -> list[str]:
        """What each code stands for."""
        return [*self.categories, *["(other)"] * self.other, *["(missing)"] * self.missing]


@dataclass(frozen=True)
class Encoding:
    """A table's schema and what the training part taught about its columns.

    Attributes:
        schema: What the columns are.
        columns: What is known of each, in the order of the schema.
        target_mean: For regression, the mean of the training part's target; otherwise None.
        target_std: Likewise its standard deviation.
    """

    schema: Schema
    columns: tuple[NumberColumn | CategoryColumn, ...]
    target_mean: float | None = None
    target_std: float | None = None

    def matrix(self, frame: DataFrame) -> Tensor:
        """The rows of a table as the raw matrix, `(N, F)` of float64; see the top of this file.

        Columns that the schema does not have are ignored.

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
        """The target of every row, `(N,)`: class indices of int64, or numbers of float64; see `Schema.targets`."""
        return self.schema.targets(frame)

    @property
    def feature_names(self) -> list[str]:
        """What the encoder's features are, in order: numbers, whether numbers are missing, categories."""
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
        """D, how many features the encoder makes of a row."""
        return len(self.feature_names)

    def encoder_arguments(self) -> dict[str, Any]:
        """What `TableEncoder.from_values` takes: `TableEncoder.from_values(**encoding.encoder_arguments())`."""
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
        """This encoding as JSON can hold it, its schema included."""
        return {
            "version": _VERSION,
            "schema": self.schema.to_json(),
            "columns": [_column_to_json(column) for column in self.columns],
            "target": None if self.target_mean is None else {"mean": self.target_mean, "std": self.target_std},
        }

    @classmethod
    def from_json(cls, content: object) -> Encoding:
        """The encoding that `to_json` gave, and nothing else.

        Raises:
            DataError: The content is no encoding.
        """
        fields = json_object(content, "encoding", version=int, schema=dict, columns=list, target=None)
        if fields["version"] != _VERSION:
            raise damaged_json("encoding", f"its version is {fields['version']}, not {_VERSION}")
        schema = Schema.from_json(fields["schema"])
        columns = tuple(_column_from_json(column) for column in fields["columns"])
        kinds = [(c.name, "number" if isinstance(c, NumberColumn) else "category") for c in columns]
        if kinds != [(column.name, column.kind) for column in schema.columns]:
            raise damaged_json("encoding", "it has other columns than its schema")
        if schema.target.task == "regression":
            target = json_object(fields["target"], "encoding", "the target", mean=float, std=float)
            if not (math.isfinite(target["mean"]) and math.isfinite(target["std"]) and target["std"] > 0):
                raise damaged_json("encoding", "the target has no valid mean and std")
            encoding = cls(schema, columns, target["mean"], target["std"])
        elif fields["target"] is None:
            encoding = cls(schema, columns)
        else:
            raise damaged_json("encoding", "classes have no mean")
        if not encoding.num_features:
            raise damaged_json("encoding", "it makes no features")
        return encoding


def learn_encoding(
    schema: Schema,
    frame: DataFrame,
    *,
    sample_weight: Tensor | Sequence[float] | NDArray[np.float64] | None = None,
    max_categories: int = 50,
) -> Encoding:
    """What the training part of a table teaches about its columns. Give it no other part.

    Of each column of numbers: mean, standard deviation, and whether some are missing. Of each column of categories: the
    most frequent ones, and whether there are rarer ones or missing ones.

    Args:
        schema: What the columns are.
        frame: The rows of the training part.
        sample_weight: How much each row counts, `(N,)`; a row of weight 2 counts as two, one of weight 0 is not there.
        max_categories: How many categories a column may have; the rarest beyond that are taken together.

    Raises:
        DataError: A value does not belong to its column, or nothing in the training part varies.

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
    weights = _checked_weights(sample_weight, len(frame))
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
    target_mean = target_std = None
    if schema.target.task == "regression":
        target_mean, target_std = mean_and_std(schema.targets(frame).numpy(), weights)
        if target_std == 0:
            raise DataError(
                f"The target {quote(schema.target.name)} is the same in all rows of the training part; give it more "
                "rows, or choose another column."
            )
    encoding = Encoding(schema, tuple(columns), target_mean, target_std)
    if not encoding.num_features:
        raise DataError("No column varies within the training part; give it more rows, or other columns.")
    return encoding


def mean_and_std(values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> tuple[float, float]:
    """Mean and standard deviation (of the population) of numbers `(N,)`, whatever their size; NaN does not count.

    Args:
        values: The numbers.
        weights: How much each counts, `(N,)`.

    Returns:
        Both; 0 and 0 for no numbers, and exactly 0 for the deviation of numbers that are all the same.

    Example:
        >>> mean_and_std(np.array([1e300, 3e300, np.nan]))
        (2e+300, 1e+300)
    """
    there = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
    values = values[there]
    if not len(values):
        return 0.0, 0.0
    if values.min() == values.max():
        return float(values[0]), 0.0
    share = np.ones(len(values)) if weights is None else weights[there] / weights[there].max()
    share = share / share.sum()
    # Scaling by a power of two is exact; squares of 1e200 and of 1e-200 then stay within float64.
    exponent = int(np.frexp(np.abs(values).max())[1])
    scaled = np.ldexp(values, -exponent)
    mean = (share * scaled).sum()
    mean += (share * (scaled - mean)).sum()  # what rounding left: numbers of 1e9 that differ by 1
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
    return len(column.codes) > 1  # one code alone says nothing


def _codes(cells: Series, column: CategoryColumn) -> NDArray[np.int64]:
    """The codes of a column's categories, `(N,)`, -1 where there is none."""
    found = texts(cells)
    codes = positions(found, column.categories)
    rest = len(column.categories) if column.other else -1
    codes[codes < 0] = rest
    if column.missing:
        codes[np.asarray(found.is_null())] = len(column.codes) - 1
    return codes


def _checked_weights(sample_weight: Any, count: int) -> NDArray[np.float64]:
    if sample_weight is None:
        return np.ones(count)
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(
            f"Expected `sample_weight` of shape ({count},) with finite numbers of at least 0, but got shape "
            f"{weights.shape} or other numbers. Give one weight for each row of `frame`."
        )
    return weights


def _column_to_json(column: NumberColumn | CategoryColumn) -> dict[str, Any]:
    if isinstance(column, NumberColumn):
        return {"name": column.name, "mean": column.mean, "std": column.std, "missing": column.missing}
    return {
        "name": column.name,
        "categories": list(column.categories),
        "other": column.other,
        "missing": column.missing,
    }


def _column_from_json(content: object) -> NumberColumn | CategoryColumn:
    part = "a column"
    if isinstance(content, dict) and "categories" in content:
        fields = json_object(content, "encoding", part, name=str, categories=list, other=bool, missing=bool)
        categories = fields["categories"]
        if any(type(category) is not str for category in categories) or first_duplicate(categories) is not None:
            raise damaged_json("encoding", f"{quote(fields['name'])} has no valid categories")
        return CategoryColumn(fields["name"], tuple(categories), fields["other"], fields["missing"])
    fields = json_object(content, "encoding", part, name=str, mean=float, std=float, missing=bool)
    if not (math.isfinite(fields["mean"]) and math.isfinite(fields["std"]) and fields["std"] >= 0):
        raise damaged_json("encoding", f"{quote(fields['name'])} has no valid mean and std")
    return NumberColumn(**fields)
