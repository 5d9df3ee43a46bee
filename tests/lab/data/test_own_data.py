"""Arrays and tables as data sets, and errors for invalid ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from torchace.lab.data import DataError
from torchace.lab.data.own_data import DataOptions, make_dataset, read_data_file

X = torch.arange(24.0).view(12, 2)
Y = torch.arange(12) % 3
FRAME = pd.DataFrame({"a": np.arange(12.0), "b": ["x", "y"] * 6, "c": [0.0, 1.0, 2.0] * 4, "d": [0, 1] * 6})


def dataset(train: Any, test: Any = (X, Y), **options: Any) -> Any:
    return make_dataset(train, test, DataOptions(**options))


def test_classes_may_be_texts_booleans_or_columns() -> None:
    names = np.array(["cat", "dog", "ant"])[Y]
    found = dataset((X.numpy(), names), (X.numpy(), names))
    assert found.class_names == ("ant", "cat", "dog")
    assert found.train.y.tolist() == [1, 2, 0] * 4
    found = dataset((X, Y[:, None] > 0), (X, Y > 0))
    assert (found.num_classes, found.train.y.dtype) == (2, torch.int64)
    assert dataset((X, Y), num_classes=5).num_classes == 5
    assert torch.equal(dataset((X.tolist(), Y.tolist())).train.x, X)
    assert [x.shape for x in dataset(([X, X[:, 0]], Y), ((X, X[:, 0]), Y)).train.x] == [(12, 2), (12,)]


def test_the_names_of_inputs_matter_and_their_order_does_not() -> None:
    first = {"tokens": Y, "values": X}
    read = dataset((first, Y), ({"values": X, "tokens": Y}, Y))
    assert torch.equal(read.test.x["tokens"], Y)
    with pytest.raises(DataError, match=r"The test samples are 'ids' \(\) of int64, 'values'.*'tokens' \(\) of int64"):
        dataset((first, Y), ({"ids": Y, "values": X}, Y))


def test_several_targets_of_a_table_are_columns() -> None:
    found = dataset(FRAME, FRAME, task="regression", target=["c", "a"])
    assert found.train.y.tolist()[:2] == [[0.0, 0.0], [1.0, 1.0]]
    assert (found.num_classes, found.class_names, found.train.x.shape) == (2, (), (12, 3))
    labels = dataset(FRAME, FRAME, task="multilabel", target=["d"])
    assert (labels.class_names, labels.train.y.shape) == (("d",), (12, 1))
    joined = dataset((FRAME[["a"]], FRAME["b"]), (FRAME[["a"]], FRAME["b"]))
    assert joined.class_names == ("x", "y")


def test_images_of_whole_numbers_are_scaled_and_others_are_not() -> None:
    pixels = torch.randint(256, (12, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = dataset((pixels, Y), (pixels, Y))
    assert found.normalization("unit") == ((0.0,), (255.0,))
    assert found.normalization("standard")[0] == pytest.approx(pixels.double().mean((0, 2, 3)).tolist())
    assert dataset((X, Y)).normalization("unit") is None
    assert dataset((pixels[:, 0], Y), (pixels[:, 0], Y)).normalization("unit") == ((0.0,), (255.0,))


@pytest.mark.parametrize(
    "x",
    [X.tolist(), list(X), tuple(X), list(X.numpy()), tuple(map(tuple, X.tolist())), X.numpy().astype(object)],
    ids=["lists", "tensors", "tuple of tensors", "arrays", "tuples", "objects"],
)
def test_rows_are_samples(x: Any) -> None:
    """A list of rows is one input, not several."""
    read = dataset((x, Y), (X, Y)).train.x
    assert isinstance(read, Tensor)
    assert torch.equal(read.float(), X)


def test_a_list_of_samples_is_a_dataset() -> None:
    samples = list(zip(X, Y.tolist(), strict=True))
    read = dataset(samples, (X, Y)).train
    assert torch.equal(read.x, X)
    assert torch.equal(read.y, Y)
    read = dataset([{"x": x, "label": y} for x, y in samples], ({"x": X}, Y)).train
    assert torch.equal(read.x["x"], X)
    assert torch.equal(read.y, Y)


def at(values: Tensor, index: int, value: float) -> Tensor:
    return values.index_fill(0, torch.tensor([index]), value)


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ((X, Y[:5]), {}, r"The training inputs have shape \(12, 2\), but there are 5 targets; give inputs of shape"),
        (([X.tolist()], Y), {}, r"The training inputs have shape \(1, 12, 2\), but there are 12 targets; give inputs"),
        ((X, None), {}, r"Expected \(X, y\) for the training data, but got no targets; give "),
        ((at(X, 3, math.nan), Y), {}, "The training data has NaN or Inf in sample 3;"),
        ((at(X, 3, math.inf), Y), {}, "The training data has NaN or Inf in sample 3;"),
        ((X, at(Y, 4, -2)), {}, "The training data has label -2 in sample 4, outside 0 to 2;"),
        ((X, -Y), {}, "The training data has label -1 in sample 1, outside 0 to 1;"),
        ((X, Y), {"num_classes": 2}, "The training data has label 2 in sample 2, outside 0 to 1;"),
        ((X, Y % 2), {}, "The test data has label 2 in sample 2, outside 0 to 1;"),
        ((X, Y.float()), {}, "The training targets are of type torch.float32, but classes are whole numbers"),
        ((X, X), {}, r"The training targets have shape \(12, 2\); give one class per sample, or use task="),
        ((X, Y * 0), {}, "The training data has only one class; give at least two."),
        ((X[:, :1], Y), {}, r"The test samples are \(2,\) of float, but training samples are \(1,\) of float;"),
        ((X.byte(), Y), {}, r"The test samples are \(2,\) of float, but training samples are \(2,\) of uint8;"),
        ((X[:0], Y[:0]), {}, "The training data has no samples; give at least one."),
        ((X, Y), {"task": "multilabel"}, "The training labels of sample 2 are not between 0 and 1;"),
        ((X, at(X[:, 0], 5, math.nan)), {"task": "regression"}, "The training targets have NaN or Inf in sample 5;"),
        (
            (X, X),
            {"task": "regression"},
            "The test targets have 1 columns, but training targets have 2; use one number.",
        ),
        (([*X[1:], X[0, :1]], Y), {}, r"The training inputs have shape \(2,\), but there are 12 targets"),
        ((X, [["a"]] * 12), {"task": "regression"}, "The training data cannot be converted to a tensor"),
        ((X, np.array(["a", "b"] * 6)), {}, "The test data has the class '0', but the training data has 'a', 'b';"),
        (FRAME, {}, "Expected a DataFrame for the test data too, but got tuple."),
        ((X, ["a", None] * 6), {}, "The training data has no label in sample 1; leave such samples out."),
        ((X, np.array(["a", math.nan] * 6, dtype=object)), {}, "The training data has no label in sample 1;"),
        ((X, ["a", math.nan] * 6), {}, "The training data has no label in sample 1;"),
        ((X, pd.Series(["a", pd.NA] * 6, dtype="string")), {}, "The training data has no label in sample 1;"),
        ([(X[0], 0), (X[1], 1)], {}, "Expected one label for each sample, but they have several shapes;"),
        ({"x": X, "y": Y}, {}, r"The training data is dict; give \(X, y\)"),
        ((FRAME[["a"]], Y[:5]), {}, "The training inputs have 12 rows, but there are 5 targets;"),
        ("mine.csv", {}, "The training data is str; give "),
        (({"a": X}, Y), {}, r"The test samples are \(2,\) of float, but training samples are 'a' \(2,\) of float;"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(train: Any, options: dict[str, Any], message: str) -> None:
    is_array = isinstance(train, tuple) and isinstance(train[1], np.ndarray)
    with pytest.raises(DataError, match=message) as error:
        dataset(train, (X, Y.numpy() if is_array else Y), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "A table needs `target`, the name of the column"),
        ("e", "The table has no column 'e', the target; correct the name"),
    ],
)
def test_tables_need_a_target(target: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset(FRAME, FRAME, target=target)


@pytest.mark.parametrize("part", [0, 1])
def test_rows_without_a_target_are_refused(part: int) -> None:
    frames = [FRAME.drop(columns="c"), FRAME.drop(columns="c")]
    frames[part] = frames[part].assign(b=[None, *FRAME["b"][1:]])
    with pytest.raises(DataError, match=r"'b' has no value in row 1 .*remove such rows, for example with DataFrame"):
        dataset(*frames, target="b")


def test_files_are_split_by_class(tmp_path: Any) -> None:
    path = str(tmp_path / "mine.npz")
    np.savez(path, X=X.numpy(), y=Y.numpy())
    (x, _), (x_test, y_test), _ = read_data_file(path, target=None, test_file=None, test=0.25, task="classification")
    assert np.bincount(y_test).tolist() == [1, 1, 1]
    assert sorted([*x[:, 0], *x_test[:, 0]]) == X[:, 0].tolist()
    with pytest.raises(DataError, match=r"12 samples are too few for a test share of 0\.01"):
        read_data_file(path, target=None, test_file=None, test=0.01, task="classification")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(DataError, match="is not a readable NPZ file"):
        read_data_file(str(tmp_path / "bad.npz"), target=None, test_file=None, test=0.2, task="classification")
    with pytest.raises(DataError, match=r"There is no file .*none\.npz"):
        read_data_file(str(tmp_path / "none.npz"), target=None, test_file=None, test=0.2, task="classification")
