"""Parsing of cells: exact numbers, missing values, equal results for every column type."""

from __future__ import annotations

import datetime
import math
import uuid
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.lab.data.parsing import (
    MISSING,
    PLACEHOLDERS,
    CellError,
    canonical,
    dates,
    number_text,
    numbers,
    positions,
    texts,
)


@given(
    st.from_regex(
        r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", fullmatch=True, alphabet=st.characters(codec="ascii")
    )
)
def test_numbers_are_those_of_python(text):
    values, wrong = numbers(pd.Series([text, f" {text}\t"]))
    assert not wrong.any()
    assert values.tolist() == [float(text)] * 2


@given(st.floats(allow_nan=False))
def test_numbers_come_back_from_their_text(value):
    for text in (repr(value), number_text(value)):
        assert numbers(pd.Series([text]))[0][0] == value


@pytest.mark.parametrize(
    "text", ["1,5", "1_000", "0x1F", "1e", "e5", "+", "--1", "1 2", "١", "½", "1d5", "1.2.3", "$1", "10%", "True", "in"]
)
def test_texts_that_are_no_numbers(text):
    values, wrong = numbers(pd.Series([text]))
    assert wrong[0]
    assert math.isnan(values[0])


@pytest.mark.parametrize(
    "word", [*MISSING, *PLACEHOLDERS, "Unknown", "NaN", "NA", "N/A", "NULL", "None", "  ", " nan\n"]
)
def test_missing_values(word):
    assert texts(pd.Series([word])).to_pylist() == [None]
    values, wrong = numbers(pd.Series([word]))
    assert math.isnan(values[0])
    assert not wrong[0]


@pytest.mark.parametrize("dtype", ["str", "datetime64[s]", pd.ArrowDtype(pa.timestamp("s"))])
def test_dates_far_from_now(dtype):
    """Such as 9999-12-31, which often means «no end»; nanoseconds would overflow."""
    years = ["0800-12-25", "1600-01-01", "1970-01-02", "9999-12-31", None]
    seconds, wrong = dates(pd.Series(years, dtype=dtype))
    assert not wrong.any()
    expected = [float(np.datetime64(day, "s").astype(np.int64)) for day in years[:-1]]
    assert np.array_equal(seconds, [*expected, np.nan], equal_nan=True)


COLUMNS: dict[str, tuple[pd.Series, list[str | None], bool]] = {
    "int8": (pd.Series([1, -2], dtype="int8"), ["1", "-2"], True),
    "uint64": (pd.Series([2**63 + 1], dtype="uint64"), [str(2**63 + 1)], True),
    "Int64": (pd.Series([2**53 + 1, None], dtype="Int64"), [str(2**53 + 1), None], True),
    "float": (pd.Series([1.0, 0.1, None, -0.0, 1e22]), ["1", "0.1", None, "-0", "1e+22"], True),
    "float32": (pd.Series([0.1, 3], dtype="float32"), ["0.1", "3"], True),
    "Float64": (pd.Series([1.5, None], dtype="Float64"), ["1.5", None], True),
    "bool": (pd.Series([True, False]), ["True", "False"], False),
    "boolean": (pd.Series([True, None], dtype="boolean"), ["True", None], False),
    "str": (pd.Series(["1", None, "x"]), ["1", None, "x"], False),
    "string": (pd.Series(["1", None], dtype="string[python]"), ["1", None], True),
    "Arrow text": (pd.Series(["1", None], dtype=pd.ArrowDtype(pa.string())), ["1", None], True),
    "Arrow int": (pd.Series([1, None], dtype=pd.ArrowDtype(pa.int32())), ["1", None], True),
    "Arrow bool": (pd.Series([True, None], dtype=pd.ArrowDtype(pa.bool_())), ["True", None], False),
    "category": (pd.Series(["b", None, "a", "b"], dtype="category"), ["b", None, "a", "b"], False),
    "category of int": (pd.Series([3, None, 1], dtype="category"), ["3", None, "1"], True),
    "category of bool": (pd.Series([True, None], dtype="category"), ["True", None], False),
    "intervals": (pd.Series(pd.cut([1, 9], [0, 5, 10])), ["(0, 5]", "(5, 10]"], False),
    "sparse": (pd.Series([0, 0, 1], dtype=pd.SparseDtype("int")), ["0", "0", "1"], True),
    "dates": (pd.Series(pd.to_datetime(["2020-01-02", None])), ["2020-01-02 00:00:00.000000", None], False),
    "dates in seconds": (
        pd.Series(pd.to_datetime(["2020-01-02"])).dt.as_unit("s"),
        ["2020-01-02 00:00:00.000000"],
        False,
    ),
    "times of day": (pd.Series([datetime.time(1), None, datetime.time(2, 3)]), ["01:00:00", None, "02:03:00"], False),
    "durations": (pd.Series(pd.to_timedelta([1, 2], unit="s")).dt.as_unit("ns"), ["1", "2"], True),
    "periods": (pd.Series(pd.period_range("2020-01", periods=2, freq="M")), ["2020-01", "2020-02"], False),
    "UUIDs": (pd.Series([uuid.UUID(int=7)]), ["00000000-0000-0000-0000-000000000007"], False),
    "dates of NumPy": (pd.Series([np.datetime64("2020-01-02")], dtype=object), ["2020-01-02"], False),
    "objects": (
        pd.Series([1, 2.5, Decimal("3.0"), None, np.nan, pd.NA, pd.NaT, np.int8(4), np.float32(0.1)], dtype=object),
        ["1", "2.5", "3.0", None, None, None, None, "4", "0.1"],
        True,
    ),
    "mixed objects": (
        pd.Series([True, "x", datetime.date(2020, 1, 2), datetime.time(1), 7, 8.0], dtype=object),
        ["True", "x", "2020-01-02", "01:00:00", "7", "8"],
        False,
    ),
    "nothing": (pd.Series([None, None]), [None, None], True),
    "no rows": (pd.Series([], dtype=object), [], True),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_types_of_columns(name):
    column, said, is_number = COLUMNS[name]
    assert texts(column).to_pylist() == said
    values, wrong = numbers(column)
    assert values.dtype == np.float64
    assert wrong.any() != is_number
    if is_number:
        expected = np.array([np.nan if text is None else float(text) for text in said])
        tolerance = 1e-3 if "float" in name and name != "float" else 0  # 0.1 of 16 bits is not 0.1 of 64
        assert np.allclose(values, expected, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", COLUMNS)
def test_cells_are_parsed_independently(name):
    """Independent of other cells, so that chunks give the same result as the whole column."""
    column, said, _ = COLUMNS[name]
    alone = [texts(column.iloc[i : i + 1]).to_pylist()[0] for i in range(len(column))]
    assert [text and canonical(text) for text in alone] == [text and canonical(text) for text in said]


def test_numbers_are_copies():
    column = pd.Series([1.0, 2.0])
    numbers(column)[0][:] = 7
    assert column.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "cells",
    [[1, [2]], [{}], [1, b"x"], [1j], [(1, 2)], [np.zeros(2)]],
    ids=["list", "dict", "bytes", "complex", "tuple", "array"],
)
@pytest.mark.parametrize("read", [texts, numbers])
def test_invalid_cells(cells, read):
    with pytest.raises(CellError, match=rf"'x'.*row {len(cells)}\b"):
        read(pd.Series(cells, name="x", dtype=object))


def test_positions_by_spelling_first():
    known = ["1", "1.0", "true", "yes"]
    cells = texts(pd.Series(["1.0", "1", "01", "TRUE", "True", "YES", "yes", "", "2"]))
    # 01 could be either of the first two
    assert positions(cells, known).tolist() == [1, 0, -1, 2, 2, -1, 3, -1, -1]


@pytest.mark.parametrize(("left", "right"), [("1", "1.0"), ("-0", "0"), ("1e2", "100"), ("TRUE", "true"), ("+5", "5")])
def test_spellings_of_one_value(left, right):
    assert canonical(left) == canonical(right)


@pytest.mark.parametrize(
    ("left", "right"), [("yes", "Yes"), (str(2**53), str(2**53 + 1)), ("1", "true"), ("a1", "a01")]
)
def test_values_that_differ(left, right):
    assert canonical(left) != canonical(right)


def test_the_text_of_a_very_long_number():
    assert canonical("9" * 10_000) == "inf"
    assert canonical("0" * 10_000 + "1") == "1"
