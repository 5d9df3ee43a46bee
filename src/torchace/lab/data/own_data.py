"""A user's own data as a data set: arrays, tables, map-style Datasets and files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from torchace._checks import shape_of
from torchace._files import available_memory, error_reason
from torchace.lab.data.datasets import Dataset, channel_statistics
from torchace.lab.data.encoding import learn_encoding
from torchace.lab.data.errors import DataError, pandas
from torchace.lab.data.inference import infer_schema
from torchace.lab.data.map_datasets import Items, StreamedSplit, check_finite_inputs, is_random, read_all
from torchace.lab.data.splits import (
    Inputs,
    Split,
    as_targets,
    check_classes,
    convert_inputs,
    encode_labels,
    input_tensors,
    random_split,
)
from torchace.lab.data.tables import read_arrays, read_table

FORMS = "give (X, y), a DataFrame with `target`, or a map-style Dataset"
MEMORY_SHARE = 0.5  # of the available memory that the samples may take

AnySplit = Any  # Split or StreamedSplit


@dataclass(frozen=True)
class DataOptions:
    """Options for reading a user's data."""

    task: str = "classification"
    target: str | Sequence[str] | None = None  # column of a table, key of an item
    num_classes: int | None = None
    device: str = "cpu"
    stream: bool | str = "auto"  # "auto": Datasets that are random or do not fit into memory
    num_workers: int = 0


def make_dataset(
    train: Any, test: Any, options: DataOptions, name: str = "own data", validation: Any = None
) -> Dataset:
    """Return a data set of a user's training, test and perhaps validation data, checked."""
    parts = {"training": train, "test": test} | ({} if validation is None else {"validation": validation})
    parts = {part: _join_target(given, part) for part, given in parts.items()}
    if any(map(_is_frame, parts.values())):
        splits, names = _table_splits(parts, options)
    elif all(map(_is_pair, parts.values())):
        splits, names = _array_splits(parts, options)
    else:
        splits = {part: _dataset_split(given, part, options) for part, given in parts.items()}
        names = tuple(str(value) for value in getattr(train, "classes", ()))
    return _check(name, splits, names, options)


def _check(name: str, splits: dict[str, AnySplit], names: tuple[str, ...], options: DataOptions) -> Dataset:
    """Check that the parts of the data fit together."""
    train, num_targets = splits["training"], 1
    for part, split in splits.items():
        if not len(split):
            raise DataError(f"The {part} data has no samples; give at least one.")
    expected = _describe(train.x)
    for part, split in splits.items():
        if (found := _describe(split.x)) != expected:
            raise DataError(f"The {part} samples are {found}, but training samples are {expected}; use one form.")
    if options.task == "classification":
        names = _class_names(train, names, options)
        for part, split in splits.items():
            if split.y is not None:
                check_classes(split.y, len(names), part)
            if isinstance(split, StreamedSplit):
                splits[part] = replace(split, num_classes=len(names))
    else:
        sizes = {part: next(split.chunks(1))[1].shape[1] for part, split in splits.items()}
        num_targets = sizes["training"]
        if different := next((part for part, size in sizes.items() if size != num_targets), None):
            raise DataError(
                f"The {different} targets have {sizes[different]} columns, but training targets have {num_targets}; "
                "use one number."
            )
        names = () if options.task == "regression" else names or tuple(map(str, range(num_targets)))
    is_image = isinstance(train.x, Tensor) and train.x.ndim == 4 and train.x.shape[1] in (1, 3)
    is_pixels = isinstance(train.x, Tensor) and train.x.dtype == torch.uint8 and train.x.ndim > 2
    has_channels = is_pixels and train.x.ndim == 4 and isinstance(train, Split)
    mean, std = channel_statistics(train.x) if has_channels else ((), ())
    return Dataset(
        name,
        splits["training"],
        splits["test"],
        names,
        validation=splits.get("validation"),
        image_shape=tuple(train.x.shape[1:]) if is_image else None,
        max_value=255 if is_pixels else None,
        mean=mean,
        std=std,
        task=options.task,
        num_targets=num_targets,
    )


def _class_names(train: AnySplit, names: tuple[str, ...], options: DataOptions) -> tuple[str, ...]:
    """Return the names of all classes; their number is given, or known from the labels."""
    count = options.num_classes or len(names)
    if not count:
        labels = train.y
        if labels is None:  # read while training: one pass over the targets
            labels = torch.cat([y for _, y in train.chunks(512)])
        count = max(int(labels.max()) + 1, 2 * (int(labels.min()) < 0))  # negative labels are refused later
    if count < 2 and options.num_classes is None:
        raise DataError("The training data has only one class; give at least two.")
    return names if len(names) == count else tuple(map(str, range(count)))


def _describe(x: Inputs) -> str:
    """Describe the shapes and types of samples; all floating-point types are alike."""
    if isinstance(x, dict):
        return ", ".join(f"{name!r} {_describe(x[name])}" for name in sorted(x))
    if isinstance(x, tuple):
        return ", ".join(map(_describe, x))
    kind = "float" if x.is_floating_point() else str(x.dtype).removeprefix("torch.")
    return f"{tuple(x.shape[1:])} of {kind}"


# -- arrays ------------------------------------------------------------------------------------------------------------


def _is_pair(part: Any) -> bool:
    """Whether data is (X, y) and not a list of samples (x, y), which is a map-style Dataset."""
    has_samples = isinstance(part, list) and len(part) != 2 and all(isinstance(item, tuple | dict) for item in part)
    return isinstance(part, tuple | list) and not has_samples


def _array_splits(parts: dict[str, Any], options: DataOptions) -> tuple[dict[str, AnySplit], tuple[str, ...]]:
    for part, given in parts.items():
        if len(given) != 2 or given[1] is None:
            got = f"{len(given)} values" if len(given) != 2 else "no targets"
            raise DataError(f"Expected (X, y) for the {part} data, but got {got}; {FORMS}.")
    targets = {part: y for part, (_, y) in parts.items()}
    names: tuple[str, ...] = ()
    if options.task == "classification" and not isinstance(next(iter(targets.values())), Tensor):
        targets, names = encode_labels(targets)
    return {part: _array_split(parts[part][0], y, part, options) for part, y in targets.items()}, names


def _array_split(x: Any, y: Any, part: str, options: DataOptions) -> Split:
    targets = as_targets(_as_tensor(y, part), options.task, part)
    inputs = convert_inputs(lambda values: _as_tensor(values, part), _stack_rows(x, len(targets)))
    for values in input_tensors(inputs):
        if values.ndim == 0 or len(values) != len(targets):
            raise DataError(
                f"The {part} inputs have shape {shape_of(values)}, but there are {len(targets)} targets; give inputs "
                f"of shape ({len(targets)}, ...), one row for each target."
            )
    check_finite_inputs(inputs, part)
    return Split(inputs, targets).to(options.device)


def _stack_rows(x: Any, count: int) -> Any:
    """Return a list or tuple of samples as one array; one of several inputs is unchanged."""
    if not isinstance(x, tuple | list) or len(x) != count or all(np.shape(value)[:1] == (count,) for value in x):
        return x
    with suppress(RuntimeError, ValueError):  # samples of several shapes: the conversion to a tensor says so
        return torch.stack(list(x)) if isinstance(x[0], Tensor) else np.asarray(x)
    return list(x)


def _as_tensor(values: Any, part: str) -> Tensor:
    try:
        if isinstance(values, Tensor):
            return values.detach().cpu().to_dense()
        array = np.asarray(values)
        if array.dtype.kind == "O":  # such as a table's booleans and numbers
            array = np.asarray(array.tolist())
        wide = array.dtype.kind == "u" and array.itemsize > 1
        return torch.from_numpy(np.ascontiguousarray(array, np.int64 if wide else array.dtype.newbyteorder("=")).copy())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The {part} data cannot be converted to a tensor ({error_reason(error)}); give dense arrays of numbers."
        ) from None


# -- tables ------------------------------------------------------------------------------------------------------------


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _join_target(given: Any, part: str) -> Any:
    """Return (DataFrame, targets) as one DataFrame with columns "target", or "target 0", "target 1", …."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not _is_frame(given[0]):
        return given
    x, y = given[0], pandas().DataFrame(np.asarray(given[1]))
    if len(x) != len(y):
        raise DataError(f"The {part} inputs have {len(x)} rows, but there are {len(y)} targets; give one for each row.")
    names = ["target"] if y.shape[1] == 1 else [f"target {i}" for i in range(y.shape[1])]
    return pandas().concat([x.reset_index(drop=True), y.set_axis(names, axis=1)], axis=1)


def _table_splits(frames: dict[str, Any], options: DataOptions) -> tuple[dict[str, AnySplit], tuple[str, ...]]:
    for part, frame in frames.items():
        if not _is_frame(frame):
            raise DataError(f"Expected a DataFrame for the {part} data too, but got {type(frame).__name__}.")
    train = frames["training"]
    targets = [options.target] if isinstance(options.target, str) else list(options.target or ())
    targets = targets or [name for name in train.columns if re.fullmatch("target( [0-9]+)?", str(name))]
    if not targets:
        raise DataError("A table needs `target`, the name of the column to predict.")
    schema = infer_schema(train, targets, "classification" if options.task == "classification" else "regression")
    encoding = learn_encoding(
        schema, train, method="standard"
    )  # one input per column, so that networks know their width
    encoder = encoding.encoder()
    splits: dict[str, AnySplit] = {}
    for part, frame in frames.items():
        y = as_targets(schema.targets(frame), options.task, part)
        splits[part] = Split(encoder(encoding.matrix(frame)), y).to(options.device)
    return splits, tuple(targets) if options.task == "multilabel" else tuple(schema.target.class_names)


# -- map-style Datasets ------------------------------------------------------------------------------------------------


def _dataset_split(dataset: Any, part: str, options: DataOptions) -> AnySplit:
    if _is_pair(dataset):
        return _array_splits({part: dataset}, options)[0][part]
    is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map or isinstance(dataset, str | dict | Tensor | np.ndarray):
        raise DataError(f"The {part} data is {type(dataset).__name__}; {FORMS}, which has a length and items by index.")
    if isinstance(dataset, TensorDataset):
        *x, y = dataset.tensors
        return _array_split(x[0] if len(x) == 1 else tuple(x), y, part, options)
    if not len(dataset):
        raise DataError(f"The {part} data has no samples; give at least one.")
    items = Items(dataset, part, options.target if isinstance(options.target, str) else None)
    streams = is_random(items) or options.stream is True
    if not streams and options.stream == "auto":
        device = torch.device(options.device)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
        available = MEMORY_SHARE * min(free, available_memory() or math.inf)
        x, y, _ = items.read([(0, 0)])
        streams = sum(tensor.nbytes for tensor in (*input_tensors(x), y)) * len(items) > available
    if not streams:
        return _array_split(*read_all(items, options.num_workers), part, options)
    known, labels = None, getattr(dataset, "targets", None)  # as torchvision has them
    with suppress(TypeError, ValueError):  # other than class indices
        if labels is not None and len(labels) == len(items) and options.task == "classification":
            known = as_targets(torch.as_tensor(labels), options.task, part)
    return StreamedSplit(
        items,
        torch.arange(len(items)),
        torch.device(options.device),
        options.task,
        num_workers=options.num_workers,
        y=known,
    )


# -- files -------------------------------------------------------------------------------------------------------------


def read_data_file(
    file: str, *, target: Any, test_file: str | None, test: float, task: str, validation_file: str | None = None
) -> tuple[Any, Any, Any]:
    """Return training, test and validation data (or None) of files, in a form that `make_dataset` accepts.

    An `.npz` file holds arrays `x_train`, `y_train`, `x_test`, `y_test`, perhaps `x_validation` and `y_validation`, or
    `x` and `y` (or the name in `target`), or the columns of a table. Other files hold a table. Without a test file, a
    random `test` share is the test data, stratified by class.
    """
    part = _read_part(file, target)
    validation = None if validation_file is None else _read_part(validation_file, target)
    if isinstance(part, dict):
        train, held_out = ((part[f"x_{name}"], part[f"y_{name}"]) for name in ("train", "test"))
        if {"x_validation", "y_validation"} <= part.keys():
            validation = part["x_validation"], part["y_validation"]
        return train, held_out, validation
    if test_file is not None:
        return part, _read_part(test_file, target), validation
    if _is_frame(part):
        y = None
        if task == "classification" and isinstance(target, str) and target in part.columns:
            y = infer_schema(part, target, task).targets(part)
        rows = _random_rows(len(part), y, test)
        train, held_out = (part.iloc[index].reset_index(drop=True) for index in rows)
    else:
        x, y = part
        labels = np.unique(y, return_inverse=True)[1] if task == "classification" and np.ndim(y) == 1 else None
        rows = _random_rows(len(x), None if labels is None else torch.from_numpy(labels.astype(np.int64)), test)
        train, held_out = ((x[index], y[index]) for index in rows)
    return train, held_out, validation


def _read_part(file: str, target: Any) -> Any:
    """Return arrays of training and test data by name, (x, y), or a DataFrame."""
    if not file.lower().endswith(".npz"):
        return read_table(file)
    arrays = read_arrays(Path(file).expanduser())
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        return arrays
    x, y = arrays.get("x", arrays.get("X")), arrays.get(target if isinstance(target, str) else "y")
    return read_table(file) if x is None or y is None else (x, y)


def _random_rows(count: int, labels: Tensor | None, share: float) -> list[NDArray[np.int64]]:
    """Return the rows of the training and of the test part, stratified where labels are given."""
    size = round(share * count)
    if not 0 < size < count:
        raise DataError(f"{count} samples are too few for a test share of {share:g}; give more, or a `test_file`.")
    samples = Split(torch.arange(count), torch.zeros(count) if labels is None else labels)
    return [part.x.numpy() for part in random_split(samples, size, seed=0)]
