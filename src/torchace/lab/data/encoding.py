"""Encoding of table rows as numbers, learned from the training part.

`Encoding.matrix` has float64 columns: numbers with NaN for missing values, parts of dates, or category codes. Codes are
0, 1, … for known categories, then "other" and "missing" if training had them, and -1 for other values. Scaling,
piecewise-linear and one-hot encoding are left to `torchace.models.TableEncoder`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from torchace.lab.data.errors import DataError, quote
from torchace.lab.data.parsing import positions, texts
from torchace.lab.data.table_schema import STRICT, Column, Finite, Schema, check_columns, feature_numbers, get_column
from torchace.models.encoder import TableEncoder

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


ENCODINGS = ("auto", "standard", "robust", "piecewise")
NUM_BINS = 8  # of a piecewise-linear encoding
MAX_LEVELS = 16  # with a bin for each
MAX_CATEGORIES = 50  # of a column, each with a code of its own
LARGE_CATEGORY = 16  # categories of a column, above which their features are smaller
MIN_COLUMNS, MIN_OVERLAP = 4, 0.5  # "auto": see `resolve_method`
SMOOTH_LIMIT = 3.0  # of robustly scaled numbers
DatePart = Literal["elapsed", "year", "month", "weekday", "hour"]
DATE_PARTS: tuple[DatePart, ...] = get_args(DatePart)


@dataclass(frozen=True)
class NumberColumn:
    """Statistics of a column of numbers, or of one part of a date, in the training part."""

    __pydantic_config__ = STRICT
    name: str
    fill: Finite  # replaces missing values
    center: Finite
    scale: Annotated[Finite, Field(ge=0)]  # 0: no scaled number
    inverse_limit: Annotated[Finite, Field(ge=0)]  # see `TableEncoder`
    knots: tuple[Finite, ...]  # limits of the bins, increasing; two for a two-valued column
    missing: bool  # adds an indicator of missing values
    part: DatePart | None = None

    @property
    def feature_name(self) -> str:
        """Name of the column, and of its part."""
        return self.name if self.part is None else f"{self.name} {self.part}"


@dataclass(frozen=True)
class CategoryColumn:
    """Categories of a column in the training part."""

    __pydantic_config__ = STRICT
    name: str
    categories: tuple[str, ...]  # sorted
    other: bool  # one code for rare and unseen categories
    missing: bool  # one code for missing values
    scale: Annotated[Finite, Field(gt=0)] = 1.0  # of the one-hot features

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
    """Schema of a table, statistics of its columns in the same order, and of regression targets."""

    __pydantic_config__ = STRICT
    schema: Schema
    columns: tuple[NumberColumn | CategoryColumn, ...]
    target_scales: tuple[TargetScale, ...] = ()  # of each target of a regression
    version: Literal[3] = field(default=3, repr=False)

    def matrix(self, frame: DataFrame) -> Tensor:
        """Encode rows as the raw matrix, `(N, F)` of float64; columns outside the schema are ignored."""
        frame = check_columns(frame)
        raw = np.empty((len(frame), len(self.columns)))
        schema = {column.name: column for column in self.schema.columns}
        for place, column in enumerate(self.columns):
            cells = get_column(frame, column.name, "needed for predictions")
            if isinstance(column, CategoryColumn):
                raw[:, place] = _codes(cells, column)
            else:
                values = feature_numbers(cells, schema[column.name])
                raw[:, place] = values if column.part is None else date_part(values, column.part)
        return torch.from_numpy(raw)

    @property
    def is_plain(self) -> bool:
        """Whether rows of numbers are the raw matrix: no column is left out or read in another way."""
        columns = self.schema.columns
        return not self.schema.dropped and all(column == Column(column.name, "number") for column in columns)

    def encoder(self) -> TableEncoder:
        """Module from the raw matrix to the features, in float64."""
        numbers = [(place, column) for place, column in enumerate(self.columns) if isinstance(column, NumberColumn)]
        scaled = [(place, column) for place, column in numbers if column.scale > 0]
        ramps = [(place, low, high - low) for place, column in numbers for low, high in pairwise(column.knots)]
        codes = [
            (place, code, column.scale)
            for place, column in enumerate(self.columns)
            if isinstance(column, CategoryColumn) and _is_used(column)
            for code in range(len(column.codes))
        ]
        return TableEncoder.from_values(
            fill=[getattr(column, "fill", 0.0) for column in self.columns],
            number_columns=[place for place, _ in scaled],
            center=[column.center for _, column in scaled],
            scale=[column.scale for _, column in scaled],
            inverse_limit=[column.inverse_limit for _, column in scaled],
            ramp_columns=[place for place, _, _ in ramps],
            low=[low for _, low, _ in ramps],
            width=[min(width, np.finfo(np.float64).max) for _, _, width in ramps],
            indicator_columns=[place for place, column in numbers if column.missing],
            code_columns=[place for place, _, _ in codes],
            codes=[code for _, code, _ in codes],
            code_scale=[scale for _, _, scale in codes],
        ).double()

    @property
    def feature_names(self) -> list[str]:
        """Names of the encoder's features, in order: numbers, bins, indicators of missing numbers, categories."""
        numbers = [column for column in self.columns if isinstance(column, NumberColumn)]
        categories = (column for column in self.columns if isinstance(column, CategoryColumn) and _is_used(column))
        return [
            *(column.feature_name for column in numbers if column.scale > 0),
            *(f"{column.feature_name} from {low:g}" for column in numbers for low in column.knots[:-1]),
            *(f"{column.feature_name} missing" for column in numbers if column.missing),
            *(f"{column.name} = {code}" for column in categories for code in column.codes),
        ]

    @property
    def num_features(self) -> int:
        """Number of encoded features, D."""
        return len(self.feature_names)

    def to_dict(self) -> dict[str, Any]:
        """Convert the encoding and its schema to JSON values."""
        return _type_adapter().dump_python(self, mode="json")

    @classmethod
    def from_dict(cls, content: object) -> Encoding:
        """Restore an encoding from `to_dict`; raise `DataError` for other content."""
        try:
            return cast(Encoding, _type_adapter().validate_json(json.dumps(content)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise DataError(
                f"The encoding of the table is damaged ({why}); copy the model again or train it again."
            ) from None


@cache  # takes milliseconds to build
def _type_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Encoding)


def learn_encoding(schema: Schema, frame: DataFrame, *, method: str = "auto") -> Encoding:
    """Learn the encoding of a table from its training part.

    `method` is one of `ENCODINGS`; see `learn_number`. Rare categories beyond `MAX_CATEGORIES` share a code.
    """
    frame = check_columns(frame)
    if not len(frame):
        raise DataError("The training part has no rows; give it a larger share.")
    columns = learn_columns(schema.columns, frame, np.ones(len(frame)), method)
    scales = []
    if schema.target.task == "regression":
        targets = schema.targets(frame).view(len(frame), -1).numpy()
        for name, values in zip(schema.target.names, targets.T, strict=True):
            mean, std = mean_and_std(values)
            if std == 0:
                raise DataError(
                    f"The target {quote(name)} is the same in all rows of the training part; give it more rows, or "
                    "choose another column."
                )
            scales.append(TargetScale(mean, std))
    return Encoding(schema, columns, tuple(scales))


def learn_columns(
    columns: Sequence[Column], frame: DataFrame, weights: NDArray[np.float64], method: str = "auto"
) -> tuple[NumberColumn | CategoryColumn, ...]:
    """Learn the statistics of some columns of a table, with weights `(N,)` above 0."""
    numbers = (feature_numbers(frame[column.name], column) for column in columns if column.kind == "number")
    method = resolve_method(method, numbers)
    learned: list[NumberColumn | CategoryColumn] = []
    for column in columns:
        values = get_column(frame, column.name, "in the schema")
        if column.kind == "category":
            learned.append(_learn_category(values, weights, method))
        elif column.kind == "date":
            seconds = feature_numbers(values, column)
            parts = [learn_number(column.name, date_part(seconds, p), weights, method, p) for p in DATE_PARTS]
            learned += [part for part in parts if _is_used(part)] or parts[:1]
        else:
            learned.append(learn_number(column.name, feature_numbers(values, column), weights, method))
    if not any(map(_is_used, learned)):
        raise DataError("No column varies within the training part; give it more rows, or other columns.")
    return tuple(learned)


def resolve_method(method: str, columns: Iterable[NDArray[np.float64]]) -> str:
    """Resolve "auto" for columns of numbers: "robust" if they share their levels, else "piecewise".

    Columns of one kind with the same few levels, such as pixels or scores from 0 to 15, work better without bins.
    They share their levels if a column has at least half of the distinct numbers of all columns together, on average
    over at least four columns with more than two levels.
    """
    if method != "auto":
        return method
    levels = [found for values in columns if len(found := np.unique(values[~np.isnan(values)])) > 2]
    if len(levels) < MIN_COLUMNS:
        return "piecewise"
    overlap = np.mean([len(found) for found in levels]) / len(np.unique(np.concatenate(levels)))
    return "robust" if overlap >= MIN_OVERLAP else "piecewise"


def learn_number(
    name: str, values: NDArray[np.float64], weights: NDArray[np.float64], method: str, part: DatePart | None = None
) -> NumberColumn:
    """Learn how numbers `(N,)` with weights `(N,)` become features.

    - "standard": mean 0, standard deviation 1.
    - "robust": two-valued columns become 0 and 1; others have median 0 and interquartile range 1, and outliers are
      bounded smoothly.
    - "piecewise": like "robust", plus a piecewise-linear encoding in `NUM_BINS` bins between quantiles, or between all
      levels of a column with at most `MAX_LEVELS`, such as a count.

    Callers resolve "auto" by `resolve_method`.
    """
    missing = np.isnan(values)
    present, weights = values[~missing], weights[~missing]
    indicator = bool(missing.any() and not missing.all())
    mean, std = mean_and_std(present, weights)
    levels = np.unique(present)
    if method == "standard" or len(levels) < 2:
        return NumberColumn(name, mean, mean, std, 0.0, (), indicator, part)
    if len(levels) == 2:
        return NumberColumn(name, mean, 0.0, 0.0, 0.0, tuple(levels.tolist()), indicator, part)
    quantiles = weighted_quantiles(present, weights, np.arange(NUM_BINS + 1) / NUM_BINS)
    low, median, high = (float(quantiles[NUM_BINS * i // 4]) for i in (1, 2, 3))
    scale = high / 2 - low / 2  # halves: no overflow
    scale = min(2 * scale, np.finfo(np.float64).max) if scale > 0 else std
    limits = levels if len(levels) <= MAX_LEVELS else np.unique(quantiles)  # counts may act by a step at a rare level
    knots = tuple(limits.tolist()) if method == "piecewise" else ()
    return NumberColumn(name, median, median, scale, 1 / SMOOTH_LIMIT, knots, indicator, part)


def date_part(seconds: NDArray[np.float64], part: DatePart) -> NDArray[np.float64]:
    """A part of dates given in seconds since 1970, `(N,)`; "elapsed" is in days."""
    days = np.floor(seconds / 86_400)
    if part == "elapsed":
        return seconds / 86_400
    if part == "hour":
        return seconds % 86_400 / 3600
    if part == "weekday":
        return (days + 3) % 7  # 1970 began on a Thursday
    missing = np.isnan(days)
    months = np.where(missing, 0, days).astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
    return np.where(missing, np.nan, 1970 + months // 12 if part == "year" else months % 12 + 1)


def weighted_quantiles(
    values: NDArray[np.float64], weights: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Smallest values with at least these shares of the weight at or below them; weights count as repeated values."""
    order = values.argsort(kind="stable")
    total = weights[order].cumsum()
    places = np.searchsorted(total, shares * total[-1] * (1 - 1e-9), side="left")  # sums of weights are rounded
    return values[order[places.clip(max=len(values) - 1)]]


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


def _learn_category(column: Series, weights: NDArray[np.float64], method: str) -> CategoryColumn:
    encoded = texts(column).dictionary_encode()
    known = encoded.dictionary.to_pylist()
    missing = np.asarray(encoded.indices.is_null())
    places = np.asarray(encoded.indices.fill_null(0), dtype=np.int64)
    counts = np.bincount(places[~missing], weights[~missing], minlength=len(known))
    frequent = sorted(range(len(known)), key=lambda place: (-counts[place], known[place]))[:MAX_CATEGORIES]
    categories = tuple(sorted(known[place] for place in frequent))
    has_other, has_missing = len(known) > MAX_CATEGORIES, bool(missing.any())
    size = len(categories) + has_other + has_missing
    # each of many categories has few rows: smaller features are learnt more slowly
    scale = 1.0 if method == "standard" else min(1.0, LARGE_CATEGORY / size) ** 2
    return CategoryColumn(str(column.name), categories, has_other, has_missing, scale)


def _is_used(column: NumberColumn | CategoryColumn) -> bool:
    if isinstance(column, NumberColumn):
        return column.scale > 0 or len(column.knots) > 0 or column.missing
    return len(column.codes) > 1  # a single code carries no information


def _codes(cells: Series, column: CategoryColumn) -> NDArray[np.int64]:
    """Category codes, `(N,)`; -1 for values without a code."""
    values = texts(cells)
    codes = positions(values, column.categories)
    codes[codes < 0] = len(column.categories) if column.other else -1
    if column.missing:
        codes[np.asarray(values.is_null())] = len(column.codes) - 1
    return codes
