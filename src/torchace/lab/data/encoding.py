"""Encoding of table rows as numbers, learnt from the training part.

`Encoding.matrix` has one float64 column for each column of the schema: numbers with NaN for missing values, or category
codes. Codes are 0, 1, … for known categories, then "other" and "missing" if training had them, and -1 for other
values. Scaling and one-hot encoding are left to `torchace.models.TableEncoder`.
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
from torchace.lab.data.columns import STRICT, check_columns, feature_numbers, get_column
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import first_duplicate, quote
from torchace.lab.data.parsing import positions, texts
from torchace.lab.data.table_schema import Finite, Schema, adapter_of, damaged_json, parse_stored

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


@dataclass(frozen=True)
class NumberColumn:
    """Statistics of a column of numbers or dates in the training part."""

    __pydantic_config__ = STRICT
    name: str
    mean: Finite  # replaces missing values
    std: Annotated[Finite, Field(ge=0)]  # 0: constant, not used
    missing: bool  # adds an indicator of missing values


@dataclass(frozen=True)
class CategoryColumn:
    """Categories of a column in the training part."""

    __pydantic_config__ = STRICT
    name: str
    categories: tuple[str, ...]  # sorted
    other: bool  # one code for rare and unseen categories
    missing: bool  # one code for missing values

    @property
    def codes(self) -> list[str]:
        """Name of each code."""
        return [*self.categories, *["(other)"] * self.other, *["(missing)"] * self.missing]


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of a regression target in the training part."""

    __pydantic_config__ = STRICT
    mean: Finite
    std: Annotated[Finite, Field(gt=0)]


@dataclass(frozen=True)
class Encoding:
    """Schema of a table, statistics of its columns in the same order, and of a regression target."""

    __pydantic_config__ = STRICT
    schema: Schema
    columns: tuple[NumberColumn | CategoryColumn, ...]
    target: TargetScale | None = None
    version: Literal[1] = field(default=1, repr=False)

    def matrix(self, frame: DataFrame) -> Tensor:
        """Encode rows as the raw matrix, `(N, F)` of float64; columns outside the schema are ignored."""
        frame = check_columns(frame)
        raw = np.empty((len(frame), len(self.columns)))
        for place, (column, statistics) in enumerate(zip(self.schema.columns, self.columns, strict=True)):
            cells = get_column(frame, column.name, "needed for predictions")
            if isinstance(statistics, CategoryColumn):
                raw[:, place] = _codes(cells, statistics)
            else:
                raw[:, place] = feature_numbers(cells, column)
        return torch.from_numpy(raw)

    def targets(self, frame: DataFrame) -> Tensor:
        """Target of every row, `(N,)`; see `Schema.targets`."""
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
        """Number of encoded features, D."""
        return len(self.feature_names)

    def encoder_arguments(self) -> dict[str, Any]:
        """Arguments of `TableEncoder.from_values`."""
        indexed = list(enumerate(self.columns))
        numbers = [(place, column) for place, column in indexed if isinstance(column, NumberColumn)]
        categories = [(place, column) for place, column in indexed if isinstance(column, CategoryColumn)]
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
        """Restore an encoding from `to_json`; raise `DataError` for other content."""
        encoding: Encoding = parse_stored(Encoding, content, "encoding")
        encoding.schema.check()
        kinds = [(c.name, isinstance(c, CategoryColumn)) for c in encoding.columns]
        if kinds != [(column.name, column.kind == "category") for column in encoding.schema.columns]:
            raise damaged_json("encoding", "columns: expected those of the schema")
        if any(isinstance(c, CategoryColumn) and first_duplicate(c.categories) is not None for c in encoding.columns):
            raise damaged_json("encoding", "categories: expected unique ones")
        if (encoding.target is None) == (encoding.schema.target.task == "regression"):
            raise damaged_json("encoding", "target: expected mean and std for regression only")
        if not encoding.num_features:
            raise damaged_json("encoding", "columns: expected at least one that varies")
        return encoding


def learn_encoding(
    schema: Schema,
    frame: DataFrame,
    *,
    sample_weight: Tensor | Sequence[float] | NDArray[np.float64] | None = None,
    max_categories: int = 50,
) -> Encoding:
    """Learn the encoding of a table from its training part.

    `sample_weight` is `(N,)`; rows of weight 0 are ignored. Rare categories beyond `max_categories` share a code.
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
        if column.kind == "category":
            columns.append(_learn_category(values, weights, max_categories))
        else:
            columns.append(_learn_number(column.name, feature_numbers(values, column), weights))
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
    """Weighted mean and population standard deviation of numbers of any magnitude; NaN ignored, 0 if none."""
    present = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
    values = values[present]
    if not len(values):
        return 0.0, 0.0
    if values.min() == values.max():
        return float(values[0]), 0.0
    share = np.ones(len(values)) if weights is None else weights[present] / weights[present].max()
    share = share / share.sum()
    # Scaling by a power of two is exact, and squares of 1e200 or 1e-200 stay within float64.
    exponent = int(np.frexp(np.abs(values).max())[1])
    scaled = np.ldexp(values, -exponent)
    mean = (share * scaled).sum()
    mean += (share * (scaled - mean)).sum()  # corrects rounding
    off = scaled - mean
    std = math.sqrt(max(0.0, (share * off**2).sum() - (share * off).sum() ** 2))  # the mean was rounded
    return float(np.ldexp(mean, exponent)), float(np.ldexp(std, exponent))


def _learn_number(name: str, values: NDArray[np.float64], weights: NDArray[np.float64]) -> NumberColumn:
    missing = np.isnan(values)
    mean, std = mean_and_std(values, weights)
    return NumberColumn(name, mean, std, bool(missing.any() and not missing.all()))


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
    """Category codes, `(N,)`; -1 for values without a code."""
    values = texts(cells)
    codes = positions(values, column.categories)
    codes[codes < 0] = len(column.categories) if column.other else -1
    if column.missing:
        codes[np.asarray(values.is_null())] = len(column.codes) - 1
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
