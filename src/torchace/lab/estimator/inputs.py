"""Inputs of an estimator: arrays of numbers, and tables with other columns, as the raw matrix of an encoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_array, check_consistent_length, validate_data
from torch import Tensor

from torchace.lab.data.encoding import (
    CategoryColumn,
    Encoding,
    NumberColumn,
    TargetScale,
    learn_columns,
    learn_number,
    resolve_method,
)
from torchace.lab.data.errors import DataError, quote_all
from torchace.lab.data.inference import infer_columns
from torchace.lab.data.table_schema import Column, Schema, Target, check_columns

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

NUMBERS: dict[str, Any] = {"dtype": [np.float64, np.float32], "order": "C", "ensure_all_finite": "allow-nan"}


def read_inputs(estimator: Any, X: ArrayLike, *, reset: bool) -> NDArray[Any] | DataFrame:
    """Check samples: return numbers `(N, D)`, or a DataFrame if some of its columns are not numbers."""
    if not reset:
        _check_column_names(X, getattr(estimator, "feature_names_in_", None))
    if (frame := _mixed_frame(estimator, X, reset)) is None:
        return cast(NDArray[Any], validate_data(estimator, X, reset=reset, **NUMBERS))
    validate_data(estimator, frame, reset=reset, skip_check_array=True)
    if not len(frame):
        raise ValueError("Expected at least one sample, but got a table without rows.")
    return frame


def read_inputs_and_targets(
    estimator: Any, X: ArrayLike, y: ArrayLike, *, reset: bool, are_numbers: bool = False
) -> tuple[NDArray[Any] | DataFrame, NDArray[Any]]:
    """Check samples and targets, labels or numbers; see `read_inputs`."""
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    if hasattr(y, "isna") and np.any(cast(Any, y).isna()):
        raise ValueError("Expected a target for each sample, but `y` contains NaN. Leave such samples out.")
    dtype = getattr(y, "dtype", None)
    if are_numbers and getattr(dtype, "kind", "") in ("m", "M"):
        raise TypeError(f"Expected numbers in `y`, but got {dtype}. Convert them, for example to seconds.")
    if (dtype := getattr(dtype, "numpy_dtype", None)) is not None:  # a nullable type of pandas
        y = cast(Any, y).to_numpy(dtype=dtype)
    samples = read_inputs(estimator, X, reset=reset)
    dtype = np.float64 if are_numbers else None
    targets = check_array(y, ensure_2d=False, accept_sparse=not are_numbers, input_name="y", dtype=dtype)
    check_consistent_length(samples, targets)
    return samples, targets


def _mixed_frame(estimator: Any, X: Any, reset: bool) -> DataFrame | None:
    """Samples as a DataFrame if they are a table with other columns than numbers; None for numbers."""
    is_fitted = not reset and hasattr(estimator, "_encoding")
    has_names = not is_fitted or hasattr(estimator, "feature_names_in_")
    is_plain = not is_fitted or estimator._encoding.is_plain
    if type(X).__module__.startswith("polars"):
        X = X.to_pandas()
    if not hasattr(X, "columns") or not hasattr(X, "dtypes") or not has_names:
        if is_plain:
            return None
        import pandas as pd

        cells, names = np.asarray(X, dtype=object), list(estimator.feature_names_in_)
        if cells.ndim != 2 or cells.shape[1] != len(names):
            raise ValueError(f"Expected {len(names)} columns as in the training data, but got shape {cells.shape}.")
        X = pd.DataFrame(cells, columns=names)
    frame = check_columns(X)
    if not len(frame.columns):
        raise ValueError("Expected at least one column in `X`, but got a table without columns.")
    return None if is_plain and all(dtype.kind in "biufc" for dtype in frame.dtypes) else frame  # not Arrow's decimals


def learn_inputs(
    table: NDArray[Any] | DataFrame, names: Sequence[str], target: Target, method: str, weights: NDArray[np.float64]
) -> Encoding:
    """Learn the encoding of samples with weights `(N,)`; those of weight 0 are ignored."""
    scale = tuple(TargetScale(0.0, 1.0) for _ in target.formats)  # members predict in the targets' units
    used = weights > 0
    table, weights = (table, weights) if used.all() else (table[used], weights[used])
    columns: tuple[NumberColumn | CategoryColumn, ...]
    if isinstance(table, np.ndarray):
        schema = Schema(tuple(Column(name, "number") for name in names), target)
        method = resolve_method(method, table.T)
        values = (np.asarray(column, dtype=np.float64) for column in table.T)
        columns = tuple(learn_number(n, v, weights, method) for n, v in zip(names, values, strict=True))
        encoding = Encoding(schema, columns, scale)
        if not encoding.num_features:  # nothing varies: the network learns a constant
            first = replace(cast(NumberColumn, columns[0]), scale=1.0)
            encoding = replace(encoding, columns=(first, *columns[1:]))
        return encoding
    kinds, dropped, notes = infer_columns(table)
    if not kinds:
        raise DataError(f"No column is left to learn from ({dropped[-1][1]}); give columns that vary.")
    return Encoding(Schema(kinds, target, notes, dropped), learn_columns(kinds, table, weights, method), scale)


def raw_matrix(encoding: Encoding, table: NDArray[Any] | DataFrame) -> Tensor:
    """Samples as the raw matrix, `(N, F)` of float64."""
    if isinstance(table, np.ndarray):
        return torch.tensor(table, dtype=torch.float64)
    return encoding.matrix(table)


def precision_of(table: NDArray[Any] | DataFrame) -> str:
    """Precision in which to train: that of a matrix, float64 for a table."""
    return str(table.dtype) if isinstance(table, np.ndarray) else "float64"


def target_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Names for the targets that no column has."""
    free = (name for name in ("y", *(f"y{i}" for i in range(len(names) + count))) if name not in names)
    return tuple(itertools.islice(free, count))


def check_labels(y: NDArray[Any]) -> NDArray[Any]:
    """Return labels, objects that are numbers as numbers.

    Quantities, missing labels, labels of several types and several labels per sample that are not 0 and 1 are errors.
    """
    if y.dtype == object:
        if any(label is None for label in y.ravel()):
            raise ValueError("Expected a label for each sample, but `y` has None. Leave such samples out.")
        numbers = np.array(y.tolist())
        y = numbers if numbers.dtype.kind in "biuf" else y
        if y.dtype == object and not all(isinstance(label, str) for label in y.ravel()):
            kinds = sorted({type(label).__name__ for label in y.ravel()})
            raise TypeError(f"Expected strings or numbers as labels, but got {' and '.join(kinds)}. Use y.astype(str).")
    check_classification_targets(y)
    if type_of_target(y) == "multilabel-indicator" and not np.isin(y, (0, 1)).all():
        raise ValueError(f"Expected labels `(N, L)` of 0 and 1, but got {np.unique(y)}. Convert them.")
    return y


def _check_column_names(X: Any, expected: Sequence[str] | None) -> None:
    """Raise an error of one sentence unless a table has the columns of the training, in order."""
    names = list(X.columns) if hasattr(X, "columns") else None
    if expected is None or names is None or names == list(expected) or not all(isinstance(n, str) for n in names):
        return
    if absent := [name for name in expected if name not in names]:
        raise ValueError(
            f"Expected the columns of the training data, but these are absent: {quote_all(absent)}. Add them."
        )
    if unknown := [name for name in names if name not in expected]:
        raise ValueError(f"Training did not have the columns {quote_all(unknown)}. Leave them out.")
    raise ValueError("Expected the columns in the order of the training data. Use X[estimator.feature_names_in_].")
