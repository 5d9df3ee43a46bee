"""What columns are taken for, and what is remembered of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.lab.data.tables_support import mutated, pets
from torchace.lab.data import Column, DataError, Schema, Target, infer_schema
from torchace.lab.data.parsing import MISSING


def kind_of(values: Any, **options: Any) -> str | None:
    """What a column is taken for; None if it is left out, which a note must say."""
    schema = infer_schema(pets(column=values), "pet", **options)
    kinds = {column.name: column.kind for column in schema.columns}
    assert ("column" in kinds) != any("'column'" in note and "left out" in note for note in schema.notes)
    return kinds.get("column")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (range(30), "number"),
        (np.arange(30) * 0.1, "number"),
        ([1, 2, None] * 10, "number"),
        (["1", "2.5", "NA"] * 10, "number"),
        (["1", " 2 ", "-3e5"] * 10, "number"),
        (pd.Series([1, None, 3] * 10, dtype="Int64"), "number"),
        (["1", "2", "x"] * 10, "category"),
        (["1"] * 29 + ["x"], "category"),
        (["inf", "a", "b"] * 10, "category"),  # among words, not a number
        ([True, False] * 15, "category"),
        (["true", "false"] * 15, "category"),
        (pd.Series([True, None] * 15, dtype="boolean"), "category"),
        (["a", "b", None] * 10, "category"),
        (["a", None] * 15, "category"),  # whether it is there is something to learn from
        ([1.0, None] * 15, "number"),
        (["2020-01-01", "2020-01-02"] * 15, "category"),
        (pd.to_datetime(["2020-01-01", "2020-01-02"] * 15), "date"),
        (["1,5", "2,5"] * 15, "category"),
        (pd.Series(["1", "2"] * 15, dtype="category"), "category"),
        ([f"name {i}" for i in range(30)], None),
        ([f"name {i}" for i in range(28)] + ["name 0"] * 2, None),
        ([f"name {i}" for i in range(27)] + ["name 0"] * 3, "category"),  # nine in ten, not more
        ([f"name {i}" for i in range(15)] + [None] * 15, None),
        ([7] * 30, None),
        (["7", "7.0"] * 15, None),
        (["x"] * 30, None),
        ([None] * 30, None),
        ([*MISSING, "NaN", "N/A"] * 3, None),
        ([[1]] * 30, None),
        ([b"x", b"y"] * 15, None),
        ([1j] * 30, None),
        (pd.date_range("2020-01-01", periods=30), "date"),
        (pd.to_datetime(["2020-01-01"] * 30), None),
    ],
)
def test_kinds(values, kind):
    assert kind_of(pd.Series(list(values) if isinstance(values, range) else values)) == kind


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        (range(30), "category"),
        ([f"name {i}" for i in range(30)], "category"),
        ([7] * 30, "number"),
        ([None] * 30, "number"),
        (["a", "b"] * 15, "category"),
    ],
)
def test_kinds_can_be_given(values, asked):
    assert kind_of(pd.Series(list(values)), kinds={"column": asked}) == asked


def test_columns_can_be_left_out():
    frame = pets(other=[[1]] * 30)
    for options in ({"drop": ["age", "other"]}, {"drop": "age"}, {"kinds": {"age": "drop", "other": "drop"}}):
        schema = infer_schema(frame, "pet", **options)
        assert [column.name for column in schema.columns] == ["fur"]
    assert not any("'age'" in note for note in schema.notes)  # drops by request need no note


def test_an_infinite_number_in_a_column_that_is_left_out_does_no_harm():
    infer_schema(pets(age=[1.0, np.inf] * 15), "pet", drop=["age"])


def test_decimal_commas_are_noticed():
    for values in (["1,5", "2,5", "3"] * 10, [f"{i},5" for i in range(30)]):
        notes = infer_schema(pets(column=values), "pet").notes
        assert any("'column'" in note and "decimal point" in note for note in notes)


def test_notes_are_sentences():
    frame = pets(a=1, b=None, c=[f"n\n{i}" for i in range(30)], d=[[1]] * 30, e=["1,5", "2"] * 15, y=[0, 1] * 15)
    notes = infer_schema(frame, "y").notes
    assert len(notes) == 6
    for note in notes:
        assert "\n" not in note
        assert note.endswith(".")
        assert ". " not in note


def test_names_that_are_numbers():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 3)))
    schema = infer_schema(frame, "2")
    assert [column.name for column in schema.columns] == ["0", "1"]
    assert torch.equal(schema.targets(frame), torch.from_numpy(frame[2].to_numpy(copy=True)))


# -- the target --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["yes", "no"] * 15, "classification", ("no", "yes")),
        ([True, False] * 15, "classification", (False, True)),
        (["True", "false"] * 15, "classification", ("false", "True")),
        ([1, 0] * 15, "classification", (0, 1)),
        ([2.0, 1.0] * 15, "classification", (1.0, 2.0)),
        (["10", "9", "1"] * 10, "classification", ("1", "9", "10")),  # by size, not by letter
        (["1.0", "0.0"] * 15, "classification", ("0.0", "1.0")),
        (["1", "1.0", "0", "1", "00"] * 6, "classification", ("0", "1")),  # as it is written most often
        (["1", "1.0", "x"] * 10, "classification", ("1", "1.0", "x")),  # among words, words
        (pd.Series([3, 7] * 15, dtype="Int64"), "classification", (3, 7)),
        (pd.Series(["b", "a"] * 15, dtype="category"), "classification", ("a", "b")),
        (pd.Series([5, 4] * 15, dtype="category"), "classification", (4, 5)),
        (pd.Series([2**60, 2**60 + 1] * 15), "classification", (2**60, 2**60 + 1)),
        (list(range(10)) * 3, "classification", tuple(range(10))),
        (list(range(11)) * 3, "classification", tuple(range(11))),
        (list(range(15)) * 2, "regression", ()),  # 2 rows each are too few to be classes
        (range(30), "regression", ()),
        ([0.5, 1.5] * 15, "regression", ()),
        (["0.5", "1"] * 15, "regression", ()),
        ([1e300, -1e300] * 15, "classification", (-1e300, 1e300)),
    ],
)
def test_tasks(values, task, classes):
    values = pd.Series(list(values) if isinstance(values, range) else values)
    schema = infer_schema(pd.DataFrame({"x": np.arange(len(values)), "y": values}), "y")
    assert schema.target == Target("y", task, classes)
    assert [type(label) for label in schema.target.classes] == [type(label) for label in classes]


def test_many_rows_of_more_than_twenty_whole_numbers_are_quantities():
    for distinct, task in ((20, "classification"), (21, "regression")):
        values = list(range(distinct)) * 50
        assert infer_schema(pd.DataFrame({"x": np.arange(len(values)), "y": values}), "y").target.task == task


def test_a_task_that_could_be_otherwise_is_noted():
    assert any("ask for regression" in note for note in infer_schema(pets(pet=[0, 1] * 15), "pet").notes)
    assert any("ask for classification" in note for note in infer_schema(pets(pet=range(30)), "pet").notes)
    assert not infer_schema(pets(), "pet").notes
    assert not infer_schema(pets(pet=[0, 1] * 15), "pet", "classification").notes


def test_tasks_can_be_given():
    assert infer_schema(pets(pet=[0, 1] * 15), "pet", "regression").target == Target("pet", "regression")
    halves = infer_schema(pets(pet=[0.5, 1.5] * 15), "pet", "classification")
    assert halves.target.classes == (0.5, 1.5)


@pytest.mark.parametrize(
    "values",
    [["b", "a"] * 15, [True, False] * 15, [7, 3] * 15, [0.5, -1.0] * 15, ["2.0", "10"] * 15],
    ids=["text", "truth", "whole", "number", "text of numbers"],
)
@pytest.mark.parametrize("form", ["as it is", "text", "JSON"])
def test_classes_are_found_again(values, form):
    """In the file they come from, and in a CSV file of the same."""
    frame = pets(pet=values)
    schema = infer_schema(frame, "pet", "classification")
    if form == "JSON":
        schema = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    codes = schema.targets(frame.astype({"pet": str}) if form == "text" else frame)
    assert codes.dtype == torch.int64
    assert schema.target.labels(codes) == list(values)
    assert [schema.target.class_names[code] for code in codes] == [str(value) for value in values]


def test_numbers_are_found_whatever_the_file():
    schema = infer_schema(pets(pet=np.array([1, 0] * 15)), "pet")
    for same in (
        ["1", "0"],
        [1.0, 0.0],
        ["1.0", "0.0"],
        pd.Series([1, 0], dtype="Int64"),
        pd.Series([1, 0], dtype="uint8"),
    ):
        assert schema.targets(pd.DataFrame({"pet": same})).tolist() == [1, 0]


def test_targets_of_regression():
    frame = pets(pet=["0.1", "1e3", " -7 "] * 10)
    schema = infer_schema(frame, "pet")
    targets = schema.targets(frame)
    assert targets.dtype == torch.float64
    assert targets.tolist() == [0.1, 1000.0, -7.0] * 10


# -- JSON --------------------------------------------------------------------------------------------------------------


SCHEMA = infer_schema(pets(id=[f"é\n{i}" for i in range(30)], y=[0, 1] * 15), "y")


def test_json_round_trip():
    content = json.loads(json.dumps(SCHEMA.to_json()))
    assert content == SCHEMA.to_json()
    assert Schema.from_json(content) == SCHEMA


def test_any_other_json_is_refused_or_is_another_schema():
    sentences = []
    for document in mutated(SCHEMA.to_json()):
        try:
            schema = Schema.from_json(document)
        except DataError as error:
            sentences.append(str(error))
        else:
            assert schema.to_json() == document
    assert len(sentences) > 100
    assert all("\n" not in sentence and sentence.endswith(".") for sentence in sentences)


def test_schemas_cannot_be_changed():
    with pytest.raises(AttributeError):
        SCHEMA.columns = ()
    assert hash(Column("a", "number")) == hash(Column("a", "number"))


def test_other_types_than_a_data_frame():
    with pytest.raises(TypeError, match="DataFrame"):
        infer_schema({"pet": [1]}, "pet")  # type: ignore[arg-type]


def test_the_table_is_not_changed():
    frame = pets(note=["1", None, "x"] * 10)
    before = frame.copy(deep=True)
    schema = infer_schema(frame, "pet")
    schema.targets(frame)
    pd.testing.assert_frame_equal(frame, before)
