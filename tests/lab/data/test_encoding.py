"""From rows to numbers: against a slow reference, in chunks, and on random tables."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lab.data.tables_support import learn, matrix_of_chunks, one_sentence, pets, same, write_csv
from tests.reference.tables import category_features, exact_root, number_features
from torchace.lab.data import DataError
from torchace.lab.data.encoding import (
    MAX_LEVELS,
    NUM_BINS,
    CategoryColumn,
    Encoding,
    NumberColumn,
    learn_columns,
    learn_encoding,
    learn_number,
    mean_and_std,
    resolve_method,
)
from torchace.lab.data.inference import infer_schema
from torchace.lab.data.splits import train_val_test_split
from torchace.lab.data.table_schema import Schema, Target
from torchace.lab.data.tables import iterate_table, read_table


def encode(encoding: Encoding, frame: pd.DataFrame) -> Tensor:
    return encoding.encoder()(encoding.matrix(frame))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 4.0],
        [1e308, -1e308, 1e308],
        [1.7e308] * 5 + [-1.7e308],
        [5e-324, 0.0, 1e-323],
        [1e-300, 3e-300],
        [1.7e9, 1.7e9 + 1, 1.7e9 + 2],
        [2.0**52, 2.0**52 + 1],
        [1e16, 1e16 + 2, 1e16 + 4],
        [0.0, -0.0, 1.0],
    ],
)
def test_mean_and_std(values):
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    std = exact_root(sum((value - mean) ** 2 for value in exact) / len(exact))
    got_mean, got_std = mean_and_std(np.array([*values, np.nan]))
    # a few roundings of the mean, each of half a unit in the last place of the largest value
    assert got_mean == pytest.approx(float(mean), rel=1e-15, abs=4e-16 * max(map(abs, values)))
    assert got_std == pytest.approx(std, rel=1e-14, abs=5e-324)


@pytest.mark.parametrize("value", [0.1, 1e300, -5e-324, 1 / 3])
def test_numbers_that_are_all_the_same(value):
    assert mean_and_std(np.full(1001, value)) == (value, 0.0)
    assert mean_and_std(np.array([])) == (0.0, 0.0)
    assert mean_and_std(np.array([np.nan])) == (0.0, 0.0)


def test_weights_count_rows(monkeypatch):
    monkeypatch.setattr("torchace.lab.data.encoding.MAX_CATEGORIES", 2)
    rng = np.random.default_rng(0)
    frame = pets(60, age=rng.normal(size=60) * 1e5, size=[None, 1.0, 2.0] * 20)
    frame.loc[::7, "fur"] = None
    weights = rng.integers(0, 4, 60)
    columns, used = infer_schema(frame, "pet").columns, frame[weights > 0]
    weighted = learn_columns(columns, used, weights[weights > 0].astype(float))
    repeated = frame.loc[frame.index.repeat(weights)]
    for one, other in zip(weighted, learn_columns(columns, repeated, np.ones(len(repeated))), strict=True):
        if isinstance(one, NumberColumn):
            # sums of 60 numbers in another order
            assert (one.center, one.scale, one.knots) == (other.center, other.scale, other.knots)
            assert one.fill == pytest.approx(other.fill, rel=1e-12, abs=1e-9)
        else:
            assert one == other
    assert learn_columns(columns, frame, np.full(60, 0.3))[1] == learn(frame).columns[1]


def test_robust_and_piecewise_features_value_by_value():
    """Median, quartiles and knots by sorting repeated values; bins and smooth bounds one number at a time."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=41) ** 3
    times = rng.integers(1, 4, 41)
    column = learn_number("x", np.append(values, np.nan), np.append(times, 5.0) * 0.5, "piecewise")
    ordered = sorted(values.repeat(times).tolist())

    def quantile(share: Fraction) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]  # smallest with at least this share at or below

    knots = [quantile(Fraction(i, 8)) for i in range(9)]
    assert column.knots == tuple(sorted(set(knots)))
    assert (column.center, column.scale, column.missing) == (knots[4], pytest.approx(knots[6] - knots[2]), True)
    raw = [*values.tolist(), 1e6, -1e6, math.nan]
    encoder = Encoding(Schema((), Target("y", "regression")), (column,)).encoder()
    features = encoder(torch.tensor(raw, dtype=torch.float64)[:, None])
    for value, row in zip(raw, features.tolist(), strict=True):
        x = knots[4] if math.isnan(value) else value
        z = max(-1e4, min(1e4, (x - knots[4]) / (knots[6] - knots[2])))
        bins = [min(1.0, max(0.0, (x - low) / (high - low))) for low, high in pairwise(column.knots)]
        assert row == pytest.approx([z / math.sqrt(1 + (z / 3) ** 2), *bins, float(math.isnan(value))], abs=1e-12)
    constant = learn_number("x", np.full(5, 7.0), np.ones(5), "piecewise")
    assert (constant.scale, constant.knots) == (0.0, ())


def test_bins_are_for_columns_with_levels_of_their_own():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 17, (200, 6)).astype(float)
    assert resolve_method("auto", pixels.T) == "robust"
    assert resolve_method("auto", pixels.T[:3]) == "piecewise"  # too few columns to tell
    assert resolve_method("auto", rng.normal(size=(200, 6)).T) == "piecewise"
    assert resolve_method("standard", pixels.T) == "standard"


# -- against the reference ---------------------------------------------------------------------------------------------


def random_cells(seed: int, rows: int) -> dict[str, list[str]]:
    rng = np.random.default_rng(seed)
    missing = ["", "NA", " nan ", "None"]

    def some_missing(cells: list[str], share: float) -> list[str]:
        return [rng.choice(missing) if rng.random() < share else cell for cell in cells]

    return {
        "normal": [repr(value) for value in rng.normal(size=rows).tolist()],
        "time": some_missing([str(1_700_000_000 + value) for value in rng.integers(0, 1000, rows)], 0.2),
        "huge": [repr(value) for value in (rng.normal(size=rows) * 1e300).tolist()],
        "tiny": some_missing([repr(value) for value in (rng.normal(size=rows) * 1e-300).tolist()], 0.1),
        "fur": some_missing([f" {rng.choice(['long', 'short', 'ü', '1.5'])}" for _ in range(rows)], 0.1),
        "town": [f"town {min(int(rng.exponential(20)), 80)}" for _ in range(rows)],
        "flag": [str(rng.random() < 0.5) for _ in range(rows)],
        "y": [f"class {i % 3}" for i in range(rows)],
    }


@pytest.mark.parametrize("seed", range(5))
def test_features_are_those_of_the_reference(tmp_path, monkeypatch, seed):
    """Learned from the first rows, applied to all; with categories beyond the limit and categories never seen."""
    monkeypatch.setattr("torchace.lab.data.encoding.MAX_CATEGORIES", 10)
    cells = random_cells(seed, 300)
    frame = read_table(write_csv(tmp_path / "t.csv", cells))
    schema = infer_schema(frame, "y")
    kinds = {column.name: column.kind for column in schema.columns}
    assert list(kinds.values()) == ["number"] * 4 + ["category"] * 3
    encoding = learn_encoding(schema, frame.iloc[:120], method="standard")
    assert encoding.columns[5].other  # more than ten towns
    numbers = [number_features(cells[name][:120], cells[name]) for name in kinds if kinds[name] == "number"]
    categories = [category_features(cells[name][:120], cells[name], 10) for name in kinds if kinds[name] == "category"]
    expected = [
        *(features[0] for features in numbers),
        *(features[1] for features in numbers if len(features) > 1),
        *(feature for features in categories for feature in features),
    ]
    features = encode(encoding, frame)
    assert features.shape == (300, len(expected)) == (300, encoding.num_features)
    # (x - mean) / std: half a unit in the last place of x, mean and std each, over std; times are 6e6 std from 0
    assert torch.allclose(features, torch.tensor(expected, dtype=torch.float64).T, rtol=1e-12, atol=1e-9)
    assert len(set(encoding.feature_names)) == len(expected)


def test_only_the_training_part_is_learned_from():
    frame = pets()
    other = frame.copy()
    other.loc[20:, "age"], other.loc[20:, "fur"] = None, "unheard of"
    schema = infer_schema(frame, "pet")
    assert learn_encoding(schema, frame.iloc[:20]) == learn_encoding(schema, other.iloc[:20])
    assert learn_encoding(schema, frame) != learn_encoding(schema, other)


def test_the_order_of_rows_does_not_matter():
    frame = pets(60, town=[f"town {i * i % 40}" for i in range(60)])
    one, other = learn(frame), learn(frame.iloc[::-1])
    assert [c for c in one.columns if isinstance(c, CategoryColumn)] == [
        c for c in other.columns if isinstance(c, CategoryColumn)
    ]


# -- codes -------------------------------------------------------------------------------------------------------------


CODES = {
    # training, limit, categories, code of others, code of missing
    "known alone": (["b", "a", "b"] * 10, 50, ("a", "b"), -1, -1),
    "missing": (["b", "a", ""] * 10, 50, ("a", "b"), -1, 2),
    "others": (["b", "b", "a", "a", "c"] * 6, 2, ("a", "b"), 2, -1),
    "others and missing": (["b", "b", "a", "a", "c", None] * 5, 2, ("a", "b"), 2, 3),
    "ties by name": (["d", "c", "b", "a"] * 8, 2, ("a", "b"), 2, -1),
}


@pytest.mark.parametrize("name", CODES)
def test_codes(name, monkeypatch):
    cells, limit, categories, other, missing = CODES[name]
    monkeypatch.setattr("torchace.lab.data.encoding.MAX_CATEGORIES", limit)
    frame = pets(len(cells), fur=cells)
    encoding = learn_encoding(infer_schema(frame, "pet"), frame)
    assert encoding.columns[1].categories == categories
    later = pets(6, fur=["a", "b", "zebra", None, "NA", " a "], age=[1, None, "x" * 0, "NaN", 2.5, "3"])
    matrix = encoding.matrix(later)
    unknown = missing if missing >= 0 else other
    assert matrix[:, 1].tolist() == [0, 1, other, unknown, unknown, 0]
    assert [None if math.isnan(value) else value for value in matrix[:, 0].tolist()] == [1, None, None, None, 2.5, 3]
    # one feature is 1 where there is a code, none where there is none
    one_hot = encode(encoding, later)[:, [i for i, n in enumerate(encoding.feature_names) if n.startswith("fur")]]
    assert one_hot.sum(1).tolist() == [float(code >= 0) for code in matrix[:, 1].tolist()]
    assert one_hot.shape[1] == len(encoding.columns[1].codes)


@pytest.mark.parametrize(("count", "method", "scale"), [(16, "auto", 1.0), (32, "robust", 0.25), (32, "standard", 1.0)])
def test_many_categories_have_smaller_features(count, method, scale):
    frame = pets(3 * count, fur=[f"fur {i % count}" for i in range(3 * count)])
    encoding = learn_encoding(infer_schema(frame, "pet"), frame, method=method)
    assert encoding.columns[1].scale == scale
    assert encoding.encoder()(encoding.matrix(frame))[:, -count:].unique().tolist() == [0.0, scale]
    assert Encoding.from_dict(encoding.to_dict()) == encoding


def test_few_levels_have_a_bin_each():
    """A step at a rare level, such as more than three calls, is one bin; quantiles would join it to the maximum."""
    calls = [0.0] * 10 + [1.0] * 10 + [2.0] * 7 + [4.0, 5.0, 9.0]
    encoding = learn_encoding(infer_schema(pets(age=calls), "pet"), pets(age=calls), method="piecewise")
    assert encoding.columns[0].knots == (0.0, 1.0, 2.0, 4.0, 5.0, 9.0)
    many = list(range(MAX_LEVELS + 1)) + [3.0] * (30 - MAX_LEVELS - 1)
    encoding = learn_encoding(infer_schema(pets(age=many), "pet"), pets(age=many), method="piecewise")
    assert len(encoding.columns[0].knots) <= NUM_BINS + 1


def test_columns_that_do_not_vary_in_training_are_no_features():
    """Also if they vary later, because their weights were never trained."""
    frame = pets(a=[1.0] * 20 + [2.0] * 10, b=["x"] * 20 + ["y"] * 10, c=[None] * 20 + [1.0, 2.0] * 5)
    encoding = learn_encoding(infer_schema(frame, "pet"), frame.iloc[:20], method="robust")
    assert encoding.feature_names == ["age", "fur = long", "fur = none at all", "fur = short"]
    assert encoding.matrix(frame).shape == (30, 5)
    features = encode(encoding, frame)
    assert same(features, encode(encoding, pets(a=-7.0, b="z", c=[None, 9.0] * 15)))


def test_a_missing_indicator_alone():
    frame = pets(size=[7.0, None] * 15)
    encoding = learn_encoding(infer_schema(frame, "pet"), frame, method="robust")
    assert encoding.feature_names[:2] == ["age", "size missing"]


@pytest.mark.parametrize("value", [1e300, -1e300, 1.7e308, 5e-324])
def test_extreme_values_stay_finite(value):
    encoding = learn(pets())
    raw = encoding.matrix(pets(1, age=value))
    assert raw[0, 0] == value
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        features = encoding.encoder().to(dtype)(raw)
        assert features.dtype == dtype
        assert features.isfinite().all()


def test_other_columns_and_their_order_do_not_matter():
    encoding, frame = learn(pets()), pets()
    shuffled = pets(more=[[1]] * 30)[["more", "fur", "age"]]
    assert same(encoding.matrix(frame), encoding.matrix(shuffled))


def test_no_rows():
    matrix = learn(pets()).matrix(pets().iloc[:0])
    assert matrix.shape == (0, 2)
    assert matrix.dtype == torch.float64


def test_the_same_table_in_every_kind_of_file(tmp_path):
    """Learned from one kind of file, applied to another: the same bits."""
    rows = 40
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=rows),
        "count": rng.integers(0, 9, rows),
        "flag": rng.random(rows) < 0.5,
        "fur": np.array(["long", "short"])[rng.integers(0, 2, rows)],
        "zip": rng.integers(10, 15, rows),
        "y": np.arange(rows) % 3,
    }
    frame = pd.DataFrame(columns)
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", **columns)
    tables = [frame, *(read_table(tmp_path / f"t.{kind}") for kind in ("csv", "parquet", "npz"))]
    for table in tables:
        encoding = learn(table, "y", kinds={"zip": "category"})
        assert [column.kind for column in encoding.schema.columns] == ["number", "number", *["category"] * 3]
        reference = encoding.matrix(table)
        for other in tables:
            assert same(encoding.matrix(other), reference)
            assert torch.equal(encoding.schema.targets(other), torch.arange(rows) % 3)


def test_a_column_of_other_types_in_other_chunks(tmp_path):
    """Integers, then floats, then text, then missing values only: pandas would infer each chunk separately."""
    cells = {
        "a": [str(i) for i in range(20)] + [f"{i}.50" for i in range(20)] + ["x", "y"] * 10,
        "b": ["1", "2"] * 10 + [""] * 20 + ["True", "False"] * 10,
        "c": [""] * 20 + ["007"] * 20 + ["7"] * 20,
        "d": ["True", "False"] * 20 + ["1", "0"] * 10,
        "y": ["0", "1"] * 20 + ["no", "yes"] * 10,
    }
    path = write_csv(tmp_path / "t.csv", cells)
    whole = read_table(path)
    encoding = learn(whole, "y", kinds={"a": "category", "c": "category"})
    assert encoding.schema.target.classes == ("0", "1", "no", "yes")
    for rows in (1, 7, 20, 59, 60):
        assert same(matrix_of_chunks(encoding, path, rows), encoding.matrix(whole))
        targets = torch.cat([encoding.schema.targets(chunk) for chunk in iterate_table(path, rows=rows)])
        assert torch.equal(targets, encoding.schema.targets(whole))


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["pet", "size"])
def test_json_round_trip(target):
    frame = pets(size=[0.1, None, 1 / 3] * 10 if target == "pet" else [0.1, 7e300, 1 / 3] * 10, town=["ü", None] * 15)
    encoding = learn(frame, target)
    content = json.loads(json.dumps(encoding.to_dict(), allow_nan=False))
    assert content == encoding.to_dict()
    again = Encoding.from_dict(content)
    assert again == encoding
    assert same(again.matrix(frame), encoding.matrix(frame))
    if target == "size":
        assert (again.target_scales[0].mean, again.target_scales[0].std) == mean_and_std(frame["size"].to_numpy())
    else:
        assert again.target_scales == ()


# -- random tables -----------------------------------------------------------------------------------------------------


MISSING_CELLS = st.sampled_from(["", "NA", "nan", "NULL", " None "])
# all of Unicode but half characters; a byte order mark at the start of a file would not be part of it
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufeff"), max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "whole": st.integers(-5, 5).map(str),
    "long": st.integers(-(10**20), 10**20).map(str),
    "number": NUMBERS.map(repr),
    "small": st.floats(-10, 10).map("{:.2f}".format),
    "time": st.integers(1_700_000_000, 1_700_000_100).map(str),
    "truth": st.sampled_from(["True", "False"]),
    "word": st.sampled_from(["red", "green", 'say "x"', "two\nlines", "a,b;c\td", "ü", "'"]),
    "text": TEXT,
    "mixed": st.one_of(st.integers(0, 3).map(str), st.sampled_from(["x", "1e5", "-.5", "inf"])),
    "constant": st.just("7"),
}
TARGETS = {
    "words": st.sampled_from(["yes", "no", "may\nbe"]),
    "codes": st.integers(0, 3).map(str),
    "quantity": NUMBERS.map(repr),
    "small": st.floats(-1, 1).map(repr),
    "anything": TEXT,
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, list[str]], str]:
    """Columns of cells, and the target among them."""
    rows = draw(st.integers(0, 8) if draw(st.integers(0, 9)) == 0 else st.integers(10, 40))
    names = draw(st.lists(TEXT.filter(str.strip), min_size=2, max_size=6, unique_by=str.strip))
    columns = {}
    for name in names[1:]:
        cell = CELLS[draw(st.sampled_from(sorted(CELLS)))]
        if draw(st.booleans()):
            cell = st.one_of(cell, MISSING_CELLS)
        columns[name] = draw(st.lists(cell, min_size=rows, max_size=rows))
    target = TARGETS[draw(st.sampled_from(sorted(TARGETS)))]
    columns[names[0]] = draw(st.lists(target, min_size=rows, max_size=rows))
    return columns, names[0]


def check_table(columns: dict[str, list[str]], target: str, delimiter: str, seed: int) -> str | None:
    """Encodes a table and checks all that must hold of it; the sentence with which it was refused, if it was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.csv")
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter).writerows([list(columns), *zip(*columns.values(), strict=True)])
        try:
            frame = read_table(path)
            schema = infer_schema(frame, target.strip())
            targets = schema.targets(frame)
            parts = train_val_test_split(targets, seed=seed)
            encoding = learn_encoding(schema, frame.iloc[parts.train.numpy()])
        except DataError as error:
            return one_sentence_of_any_table(error)
        assert len(frame) == len(next(iter(columns.values())))
        for name, cells in columns.items():
            assert [cell.strip() for cell in frame[name.strip()]] == [cell.strip() for cell in cells]
        matrix = encoding.matrix(frame)
        assert matrix.shape == (len(frame), len(schema.columns))
        for rows in (1, 7):
            assert same(matrix_of_chunks(encoding, path, rows), matrix)
            chunks = iterate_table(path, rows=rows)
            assert torch.equal(torch.cat([encoding.schema.targets(chunk) for chunk in chunks]), targets)
    again = Encoding.from_dict(json.loads(json.dumps(encoding.to_dict(), allow_nan=False)))
    assert again == encoding
    assert again.schema == schema
    encoder = encoding.encoder()
    for dtype in (torch.float64, torch.float32):
        features = encoder.to(dtype)(matrix)
        assert features.shape == (len(frame), encoding.num_features)
        assert features.dtype == dtype
        assert features.isfinite().all()
    if schema.target.task == "classification":
        assert set(targets[parts.train].tolist()) == set(range(len(schema.target.classes)))
        assert all(str(label) == label for label in schema.target.labels(targets))
    else:
        assert targets.isfinite().all()
        assert 0 < encoding.target_scales[0].std < math.inf
    trained = encoder.double()(matrix[parts.train])
    numbers = sum(isinstance(c, NumberColumn) and c.scale > 0 for c in encoding.columns)
    assert trained[:, :numbers].abs().max() <= 1e4 if numbers else True
    return None


def one_sentence_of_any_table(error: DataError) -> str:
    """Names and values in it may hold anything, but no line breaks."""
    sentence = str(error)
    assert len(sentence.splitlines()) == 1, sentence
    assert sentence.endswith("."), sentence
    assert "; " in sentence, sentence
    assert len(sentence) < 800, sentence
    return sentence


def test_random_tables():
    """80 tables of anything: each is encoded, or refused in one sentence; and not all of them refused."""
    outcomes: Counter[str] = Counter()

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(tables(), st.sampled_from(",;\t"), st.integers(0, 1000))
    def check(table: tuple[dict[str, list[str]], str], delimiter: str, seed: int) -> None:
        sentence = check_table(*table, delimiter, seed)
        outcomes["encoded" if sentence is None else "refused"] += 1
        event("encoded" if sentence is None else "refused")

    check()
    assert outcomes["encoded"] >= 15
    assert outcomes["refused"] >= 5


def test_one_sentence_is_checked():
    """The check itself would notice two sentences, a line break, or nothing to do."""
    one_sentence(DataError("It is wrong; do better."))
    for bad in ("It is wrong. Do better; now.", "It is wrong.", "It is wrong; do better"):
        with pytest.raises(AssertionError):
            one_sentence(DataError(bad))
