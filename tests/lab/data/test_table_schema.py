"""Inferred types of columns, and the schema that stores them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.lab.data.tables_support import pets
from torchace.lab.data import DataError
from torchace.lab.data.errors import quote
from torchace.lab.data.inference import infer_schema, missing_targets
from torchace.lab.data.parsing import MISSING, PLACEHOLDERS
from torchace.lab.data.table_schema import Column, Target, feature_numbers


def inferred_kind(values: Any, **options: Any) -> str | None:
    """Return the inferred type of a column; None if it is dropped, with a reason."""
    schema = infer_schema(pets(column=values), "pet", **options)
    kinds = {column.name: column.kind for column in schema.columns}
    assert ("column" in kinds) != bool(dict(schema.dropped).get("column"))
    return kinds.get("column")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (range(30), None),  # counts the rows
        (range(3, 33), "number"),
        (np.arange(30) * 0.1, "number"),
        ([1, 2, None] * 10, "number"),
        (["1", "2.5", "NA"] * 10, "number"),
        (pd.Series([1, None, 3] * 10, dtype="Int64"), "number"),
        (["1", "2", "x"] * 10, "category"),
        (["inf", "a", "b"] * 10, "category"),  # among words, not a number
        ([True, False] * 15, "category"),
        (pd.Series([True, None] * 15, dtype="boolean"), "category"),
        (["a", "b", None] * 10, "category"),
        (["a", None] * 15, "category"),  # whether it is there is something to learn from
        (["2020-01-01", "2020-01-02"] * 15, "date"),
        (pd.to_datetime(["2020-01-01", "2020-01-02"] * 15), "date"),
        (["1,5", "2,5"] * 15, "number"),
        (pd.Series(["1", "2"] * 15, dtype="category"), "category"),
        ([f"name {i}" for i in range(30)], None),
        ([f"name {i}" for i in range(28)] + ["name 0"] * 2, None),
        ([f"name {i}" for i in range(27)] + ["name 0"] * 3, "category"),  # nine in ten, not more
        ([7] * 30, None),
        (["7", "7.0"] * 15, None),
        ([None] * 30, None),
        (([*MISSING, *PLACEHOLDERS] * 2)[:30], None),
        ([[1]] * 30, None),
        ([f"word {i % 20} in a sentence" for i in range(30)], None),
        ([f"2020-01-{i + 1:02}" if i % 2 else f"soon {i}" for i in range(30)], None),
        (["long", "short", "none at all"] * 10, None),  # another column's values
    ],
)
def test_kinds(values, kind):
    assert inferred_kind(pd.Series(list(values) if isinstance(values, range) else values)) == kind


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
    assert inferred_kind(pd.Series(list(values)), kinds={"column": asked}) == asked


def test_columns_can_be_left_out():
    frame = pets(other=[[1]] * 30)
    for options in ({"drop": ["age", "other"]}, {"drop": "age"}, {"kinds": {"age": "drop", "other": "drop"}}):
        schema = infer_schema(frame, "pet", **options)
        assert [column.name for column in schema.columns] == ["fur"]
    assert not any("'age'" in note for note in schema.notes)  # drops by request need no note


def test_an_infinite_number_in_a_dropped_column_is_ignored():
    infer_schema(pets(age=[1.0, np.inf] * 15), "pet", drop=["age"])


@pytest.mark.parametrize(
    ("cells", "format", "values"),
    [
        (["1,5", "2,25", "3"], "1234,5", [1.5, 2.25, 3]),
        (["1.234,5", "12,25", "?"], "1.234,5", [1234.5, 12.25, np.nan]),
        (["1,234", "12,345", "7"], "1,234.5", [1234, 12345, 7]),
        (["1,234.5", "-", "7"], "1,234.5", [1234.5, np.nan, 7]),
        (["12 %", "7.5%", "."], "1234.5", [12, 7.5, np.nan]),
        (["1\u202f234,5", "-7", "8"], "1 234,5", [1234.5, -7, 8]),
        (["1'234.5", "CHF", "8"], None, []),
        (["1'234.5", "7", "8"], "1'234.5", [1234.5, 7, 8]),
        (["€ 1.50", "-$2", "3"], "1234.5", [1.5, -2, 3]),
        (["1.234.567", "1.000", "3"], "1.234,5", [1234567, 1000, 3]),
        (["1.410", "842", "12.345"], "1.234,5", [1410, 842, 12345]),  # as decimals 1.41 and 842.000
        (["1.410", "8420", "12.345"], "", [1.41, 8420, 12.345]),
        (["1.415", "842", "12.345"], "", [1.415, 842, 12.345]),
        (["CHF 1'234.50", "12.25 USD", "₹7"], "1'234.5", [1234.5, 12.25, 7]),
        (["($1,234.50)", "-2.25", "missing"], "1,234.5", [-1234.5, -2.25, np.nan]),
        (["#DIV/0!", "2.5", "(null)"], "", [np.nan, 2.5, np.nan]),
        (["\u22121.5", "\u20132.25", "3"], "1234.5", [-1.5, -2.25, 3]),
        (["1.234,50-", "12,25", "7,00-"], "1.234,5", [-1234.5, 12.25, -7]),
        (["1-", "2", "3-"], None, []),  # grades
    ],
)
def test_number_formats(cells, format, values):
    frame = pets(column=cells * 10)
    columns = {column.name: column for column in infer_schema(frame, "pet").columns}
    if format is None:
        assert columns["column"].kind == "category"
    else:
        assert columns["column"] == Column("column", "number", format)
        assert np.array_equal(feature_numbers(frame["column"], columns["column"])[:3], values, equal_nan=True)
        if format:
            with pytest.raises(DataError, match=f"is not a number; write it like {re.escape(format)}, or leave"):
                feature_numbers(pd.Series(["1;5"], name="column"), columns["column"])


def test_ambiguous_commas_are_read_as_in_the_other_columns():
    formats = {}
    for other in (["3,5", "4"], ["3.5", "4"]):
        frame = pets(column=["1,234", "5,678"] * 15, points=["1.234", "2.000"] * 15, other=other * 15)
        frame["exponent"] = ["1.084e+00", "2.500e-01"] * 15  # no point of thousands
        columns = infer_schema(frame, "pet").columns
        formats[other[0]] = {column.name: column.format for column in columns if column.kind == "number"}
    assert formats["3,5"] == {"age": "", "column": "1234,5", "points": "1.234,5", "other": "1234,5", "exponent": ""}
    assert formats["3.5"] == {"age": "", "column": "1,234.5", "points": "", "other": "", "exponent": ""}


@pytest.mark.parametrize(
    ("cells", "format"),
    [
        (["2020-01-31", "2020-02-01T12:30:00"], "ISO8601"),
        (["31.01.2020", "01.02.2020"], "%d.%m.%Y"),
        (["31/01/2020 12:30", "01/02/2020 00:00"], "%d/%m/%Y %H:%M"),
        (["31 Jan 2020", "1 Feb 2020"], "%d %b %Y"),
        (["1/31/2020 1:05 PM", "2/1/2020 11:59 AM"], "%m/%d/%Y %I:%M %p"),
        (["12:30", "00:15"], "%H:%M"),
        (["31.01.2020 12:30:00.250", "01.02.2020 00:00:00.000"], "%d.%m.%Y %H:%M:%S.%f"),
    ],
)
def test_date_formats(cells, format):
    frame = pets(column=[*cells, ""] * 10)
    column = next(column for column in infer_schema(frame, "pet").columns if column.name == "column")
    assert column == Column("column", "date", format)
    seconds = feature_numbers(frame["column"], column)
    assert np.isnan(seconds[2])
    if format != "%H:%M":
        assert pd.to_datetime(seconds[:2], unit="s").normalize().tolist() == [
            pd.Timestamp("2020-01-31"),
            pd.Timestamp("2020-02-01"),
        ]


@pytest.mark.parametrize(
    ("others", "format", "is_noted"),
    [
        ([], "%d/%m/%Y", True),
        (["31/01/2020", "30/01/2020"], "%d/%m/%Y", False),
        (["01/31/20", "01/30/20"], "%m/%d/%Y", False),
        (["01-31-2020", "01-30-2020", "29/01/20", "28/01/20"], "%d/%m/%Y", True),
    ],
)
def test_ambiguous_dates_are_read_as_in_the_other_columns(others, format, is_noted):
    settled = {f"other {i}": others[i : i + 2] * 20 for i in range(0, len(others), 2)}
    schema = infer_schema(pets(40, when=["03/04/2020", "05/06/2020"] * 20, **settled), "pet")
    assert Column("when", "date", format) in schema.columns
    note = f"Column 'when' has dates that may have the day or the month first; they are read like {format}. "
    assert schema.notes == ((f"{note}Write the year first if that is wrong.",) if is_noted else ())


def test_a_few_other_cells_in_a_column_of_numbers_are_missing():
    frame = pets(
        200, column=["1.5"] * 196 + ["2", "x", "inches", "3"], when=["2020-01-01", "2021-05-06"] * 99 + ["soon"] * 2
    )
    schema = infer_schema(frame, "pet")
    columns = {column.name: column for column in schema.columns}
    assert columns["column"] == Column("column", "number", lenient=True)
    assert columns["when"] == Column("when", "date", "ISO8601", lenient=True)
    assert np.isnan(feature_numbers(frame["column"], columns["column"])).sum() == 2
    assert schema.notes == (
        "Column 'column' holds numbers; 2 of 200 values, such as 'x', are not and count as missing.",
        "Column 'when' holds dates; 2 of 200 values, such as 'soon', are not and count as missing.",
    )
    with pytest.raises(DataError, match="row 198"):
        feature_numbers(frame["column"], Column("column", "number"))


def test_percent_signs_in_some_cells_only_are_announced():
    schema = infer_schema(pets(mixed=["12.5 %", "0.125", "?"] * 10, all=["12.5 %", "0.1%", "?"] * 10), "pet")
    assert schema.notes == ("Column 'mixed' has a percent sign in 10 of 20 values; it is ignored.",)


def test_digits_with_leading_zeros_are_codes():
    frame = pets(zip=["01067", "10115", "80331"] * 10, month=["01", "02", "12"] * 10, number=range(30))
    frame["number"] = frame["number"].map("{:06d}".format)
    schema = infer_schema(frame, "pet")
    kinds = {column.name: column.kind for column in schema.columns}
    assert (kinds["zip"], kinds["month"]) == ("category", "number")
    assert schema.dropped == (("number", "an identifier: 30 of 30 values differ"),)
    assert schema.notes == ("Column 'zip' holds codes, such as '01067'; set its kind to number if not.",)
    forced = infer_schema(frame, "pet", kinds={"zip": "number"})
    assert next(column.kind for column in forced.columns if column.name == "zip") == "number"


def test_a_mixture_is_named_by_what_most_of_its_values_are():
    years = [f"{1900 + i}.{i % 10}" if i % 15 else "error" for i in range(120)]  # 1905.5 could be a month
    days = [f"2020-01-{i % 28 + 1:02}" if i % 2 else f"soon {i}" for i in range(120)]  # few dates, many texts
    reasons = dict(infer_schema(pets(120, years=years, days=days), "pet").dropped)
    assert reasons["years"].startswith("93 % of its values are numbers")
    assert reasons["days"].startswith("50 % of its values are dates")


def test_mixtures_of_numbers_and_texts_are_announced():
    cells = [f"{i / 7:.3f}" if i % 15 else "error" for i in range(60)]
    schema = infer_schema(pets(60, unique=cells, repeated=[f"{i % 20}.5" if i % 4 else "x" for i in range(60)]), "pet")
    assert schema.dropped == (("unique", "93 % of its values are numbers, the others are not; correct them"),)
    note = "Column 'repeated' is read as categories, though 75 % of its values are numbers; correct the others."
    assert schema.notes == (note,)


@pytest.mark.parametrize(
    ("labels", "alike"),
    [
        (["Cat", "cat", "dog"], "'Cat', 'cat'"),
        (["True", "true", "false"], None),  # one class each
        (["New York", "New\u00a0York", "Rome"], r"'New York', 'New\xa0York'"),
        (["New  York", "New York", "Rome"], "'New  York', 'New York'"),
        (["Z\u00fcrich", "Zu\u0308rich", "Bern"], "'Zu\u0308rich', 'Z\u00fcrich'"),
        (["a\u200b", "a", "b"], r"'a', 'a\u200b'"),
        (["yes", "NO", "Y", "1", "0"], "'0', 'NO'"),
        (["yes", "no", "maybe", "y"], None),
        (["f", "n", "y"], None),
    ],
)
def test_labels_that_seem_the_same_are_announced(labels, alike):
    frame = pets(12 * len(labels), color=[*labels, f"{labels[0]} ", *labels[1:]] * 6)
    notes = infer_schema(frame, "color").notes
    seem = f"has labels that seem to be the same: {alike}; they are kept apart."
    assert notes == (() if alike is None else (f"The target 'color' {seem}",))
    if labels[1] != "true":
        assert infer_schema(frame, "pet").notes == (() if alike is None else (f"Column 'color' {seem}",))


@pytest.mark.parametrize(
    ("cells", "unit"),
    [
        ([f"{i}.5 kg" for i in range(20)], "0.5 kg"),
        ([f"<{i},5" if i % 4 == 0 else f"{i},5" for i in range(20)], "<0,5"),
        ([f"1,{i % 10}34.{i}0 CR" if i % 2 else f"{i} DR" for i in range(20)], "0 DR"),
        ([f"{i}{'ABCD'[i % 4]}" for i in range(20)], None),  # codes
        ([f"A{i}" for i in range(20)], None),
        ([f"+49 170 {i}" for i in range(20)], None),
    ],
)
def test_numbers_with_units_are_announced(cells, unit):
    schema = infer_schema(pets(40, repeated=cells * 2), "pet")
    advice = f"such as {quote(unit)}; write the numbers alone"
    assert [advice in note for note in schema.notes] == [True] * (unit is not None)
    reasons = dict(infer_schema(pets(20, unique=cells), "pet").dropped)
    assert (advice in reasons["unique"]) == (unit is not None)


def test_a_row_of_totals_is_announced():
    prices = [f"{i},5" for i in range(30)]
    note = "Row 31 seems to hold totals: its 'price' is the sum of all others; remove it."
    frame = pets(31, price=[*prices, "450,0"], color=[*["red", "blue"] * 15, "Total"])
    assert infer_schema(frame, "pet").notes == infer_schema(frame[["color", "price"]], "price").notes == (note,)
    frame["price"] = [*["0"] * 29, "3", "3"]
    assert infer_schema(frame, "pet").notes == ()


@pytest.mark.parametrize(
    ("cells", "mark"),
    [
        (["-999", "1.5", "2.5"], "-999"),
        (["9999", "15", "-25"], "9999"),
        (["999", "400", "2"], None),
        (["-99", "1", "2"], None),
        (["1000", "1", "2"], None),
    ],
)
def test_marks_of_missing_values_among_numbers_are_announced(cells, mark):
    cells = [*cells * 10, *["1", "2"] * 15]
    note = (
        f"Column 'level' is {mark} in 10 rows, far from its other values; leave these cells empty if it stands for a "
    )
    note = (f"{note}missing value.",) if mark else ()
    assert infer_schema(pets(60, level=cells), "pet").notes == note
    assert infer_schema(pets(60, level=cells), "level", "regression").notes == note


def test_columns_that_determine_the_target_are_announced():
    frame = pets(
        40, code=[[1, 0][i // 2 % 2] for i in range(40)], near=[[1, 0][i // 2 % 2 or i == 0] for i in range(40)]
    )
    note = "Column '{}' determines the target '{}'; leave it out if it is not known before predicting."
    assert infer_schema(frame, "pet").notes == (note.format("code", "pet"),)
    frame = pets(40, price=[f"{i},5" for i in range(40)], copy=[i + 0.5 for i in range(40)])
    assert infer_schema(frame, "price").notes == (note.format("copy", "price"),)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("id", range(100, 160, 2)),
        ("customer_id", range(900, 930)),
        ("userId", [f"u{i}" for i in range(30)]),
        ("row names", [str(i) for i in range(30, 60)]),
        ("serial", [2**64 - 1 - i for i in range(30)]),  # one number in float64
        ("post_id", [str(2**53 + i) for i in range(30)]),  # 16 numbers in float64
    ],
)
def test_identifiers(name, values):
    schema = infer_schema(pets(**{name: list(values)}), "pet")
    assert schema.dropped == ((name, "an identifier: 30 of 30 values differ"),)


def test_reasons_are_short():
    frame = pets(a=1, b=None, c=[f"n\n{i}" for i in range(30)], d=[[1]] * 30, e=range(30))
    dropped = dict(infer_schema(frame, "pet").dropped)
    assert list(dropped) == ["a", "b", "c", "d", "e"]
    assert all("\n" not in reason and len(reason) < 80 for reason in dropped.values())


def test_numbers_of_a_target_may_have_decimal_commas():
    frame = pets(pet=[f"{i},5" for i in range(30)])
    schema = infer_schema(frame, "pet")
    assert schema.target == Target(("pet",), "regression", formats=("1234,5",))
    assert schema.targets(frame).tolist() == [i + 0.5 for i in range(30)]


def test_marks_of_missing_values_may_be_classes():
    frame = pets(pet=["+", "-", "?"] * 10)
    assert infer_schema(frame, "pet").target.classes == ("+", "-", "?")
    assert missing_targets(frame["pet"]).sum() == 0
    assert missing_targets(pd.Series(["1.5", "-", "?", "", "2"])).tolist() == [False, True, True, True, False]
    assert missing_targets(pd.Series(["a", "-", "", "b", "NA"])).tolist() == [False, False, True, False, True]


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
        (["10", "9", "1"] * 10, "classification", ("1", "9", "10")),  # by size, not by letter
        (["1", "1.0", "0", "1", "00"] * 6, "classification", ("0", "1")),  # as it is written most often
        (["1", "1.0", "x"] * 10, "classification", ("1", "1.0", "x")),  # among words, words
        (pd.Series([3, 7] * 15, dtype="Int64"), "classification", (3, 7)),
        (pd.Series(["b", "a"] * 15, dtype="category"), "classification", ("a", "b")),
        (pd.Series([2**60, 2**60 + 1] * 15), "classification", (2**60, 2**60 + 1)),
        (list(range(10)) * 3, "classification", tuple(range(10))),
        (list(range(15)) * 2, "regression", ()),  # 2 rows each are too few to be classes
        (range(30), "regression", ()),
        ([0.5, 1.5] * 15, "regression", ()),
        ([1e300, -1e300] * 15, "classification", (-1e300, 1e300)),
    ],
)
def test_tasks(values, task, classes):
    values = pd.Series(list(values) if isinstance(values, range) else values)
    schema = infer_schema(pd.DataFrame({"x": np.arange(len(values)), "y": values}), "y")
    assert schema.target == Target(("y",), task, classes, () if classes else ("",))
    assert [type(label) for label in schema.target.classes] == [type(label) for label in classes]


def test_many_rows_of_more_than_twenty_whole_numbers_are_quantities():
    for distinct, task in ((20, "classification"), (21, "regression")):
        values = list(range(distinct)) * 50
        assert infer_schema(pd.DataFrame({"x": np.arange(len(values)), "y": values}), "y").target.task == task


def test_a_task_that_could_be_otherwise_is_noted():
    assert any("set the task to regression" in note for note in infer_schema(pets(pet=[0, 1] * 15), "pet").notes)
    assert any("set the task to classification" in note for note in infer_schema(pets(pet=range(30)), "pet").notes)
    assert not infer_schema(pets(), "pet").notes
    assert not infer_schema(pets(pet=[0, 1] * 15), "pet", "classification").notes


def test_tasks_can_be_given():
    assert infer_schema(pets(pet=[0, 1] * 15), "pet", "regression").target == Target(
        ("pet",), "regression", formats=("",)
    )
    halves = infer_schema(pets(pet=[0.5, 1.5] * 15), "pet", "classification")
    assert halves.target.classes == (0.5, 1.5)


@pytest.mark.parametrize(
    "values",
    [["b", "a"] * 15, [True, False] * 15, [7, 3] * 15, [0.5, -1.0] * 15, ["2.0", "10"] * 15],
    ids=["text", "truth", "whole", "number", "text of numbers"],
)
@pytest.mark.parametrize("form", ["as it is", "text"])
def test_classes_are_matched_after_reading(values, form):
    """In the file they come from, and in a CSV file of the same."""
    frame = pets(pet=values)
    schema = infer_schema(frame, "pet", "classification")
    codes = schema.targets(frame.astype({"pet": str}) if form == "text" else frame)
    assert codes.dtype == torch.int64
    assert schema.target.labels(codes) == list(values)
    assert [schema.target.class_names[code] for code in codes] == [str(value) for value in values]


def test_numbers_are_inferred_from_every_file_type():
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


def test_schemas_cannot_be_changed():
    with pytest.raises(AttributeError):
        infer_schema(pets(), "pet").columns = ()
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
