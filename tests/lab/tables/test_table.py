"""A user's table as training data: read, split and encoded, from any file format."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.lab.cli.command_line import houses, pets, write_table
from torchace.lab.data import DataError
from torchace.lab.report.tables import column_table
from torchace.lab.tables.table import Table, TableSettings, load_table
from torchace.lab.training.members import MemberPlan

SUFFIXES = (".csv", ".parquet", ".npz")


def load(frame: pd.DataFrame, folder: Path, target: str = "pet", suffix: str = ".csv", **settings: Any) -> Table:
    return load_table(write_table(frame, folder / f"table{suffix}"), TableSettings((target,), **settings))


def same(one: Table, other: Table) -> bool:
    """Whether members would be trained, stopped and tested alike, bit for bit."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("train", "validation", "test")]
    return all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in pairs)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize(
    ("frame", "target"),
    [
        (pets(), "pet"),
        (houses(), "price"),
        (pets(pet=np.arange(60) % 3), "pet"),
        (pets(pet=np.arange(60) % 2 == 0), "pet"),
        (pets(pet=np.arange(60) % 2 + 0.5), "pet"),
    ],
    ids=["texts", "regression", "whole numbers", "truth values", "fractions"],
)
def test_the_same_table_in_any_file_is_the_same(frame: pd.DataFrame, target: str, suffix: str, tmp_path: Path) -> None:
    task = "regression" if target == "price" else "classification"
    ours = load(frame, tmp_path, target, task=task)
    theirs = load(frame, tmp_path, target, suffix, task=task)
    assert same(ours, theirs)
    assert ours.encoding.columns == theirs.encoding.columns
    assert ours.schema.columns == theirs.schema.columns
    assert ours.schema.target.class_names == theirs.schema.target.class_names
    assert torch.equal(ours.rows["test"], theirs.rows["test"])


def test_a_file_is_identified_by_name_and_content(tmp_path: Path) -> None:
    table = load(pets(), tmp_path)
    assert table.name == "table.csv"
    assert table.sha256 == hashlib.sha256((tmp_path / "table.csv").read_bytes()).hexdigest()


def test_a_file_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_table(pets(), tmp_path / "pets.csv")
    assert load_table(Path("~/pets.csv"), TableSettings(("pet",))).name == "pets.csv"


# -- splits -----------------------------------------------------------------------------------------------------------


def test_splits_equal_the_files_rows(tmp_path: Path) -> None:
    """The features of the test part are those of its rows in the file, and the three parts are the file."""
    frame = pets(50)
    table = load(frame, tmp_path)
    assert [len(table.train), len(table.validation), len(table.test)] == [30, 10, 10]
    raw = table.encoding.matrix(frame.iloc[table.rows["test"].numpy()])
    assert torch.equal(table.encoding.encoder()(raw), table.test.x)
    assert table.schema.target.labels(table.test.y) == frame["pet"].iloc[table.rows["test"].numpy()].tolist()
    everything = torch.cat([table.train.x, table.validation.x, table.test.x])
    whole = table.encoding.encoder()(table.encoding.matrix(frame))
    assert sorted(map(tuple, everything.tolist())) == sorted(map(tuple, whole.tolist()))


@pytest.mark.parametrize("seed", [0, 1])
def test_classes_are_shared_out_in_proportion(seed: int, tmp_path: Path) -> None:
    frame = pets(200, pet=np.repeat(["cat", "dog", "cow", "yak"], [120, 60, 15, 5]))
    table = load(frame, tmp_path, validation=0.2, test=0.2, seed=seed)
    for part, share in ((table.train, 0.6), (table.validation, 0.2), (table.test, 0.2)):
        counts = torch.bincount(part.y, minlength=4).tolist()  # cat, cow, dog, yak
        assert all(abs(count - share * all_) <= 1 for count, all_ in zip(counts, (120, 15, 60, 5), strict=True)), counts


def test_the_seed_chooses_the_rows(tmp_path: Path) -> None:
    rows = [tuple(load(pets(), tmp_path, seed=seed).rows["test"].tolist()) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_a_column_names_the_parts(tmp_path: Path) -> None:
    part = np.array(["Train", "val", " test ", "training", "TEST"])[np.arange(60) % 5]
    table = load(pets(part=part), tmp_path, split_column="part")
    assert [len(table.train), len(table.validation), len(table.test)] == [24, 12, 24]
    assert table.rows["test"].tolist() == [i for i in range(60) if i % 5 in (2, 4)]
    assert "part" not in [column.name for column in table.schema.columns]


def test_validation_rows_are_drawn_from_those_of_training(tmp_path: Path) -> None:
    part = np.array(["train", "train", "test"])[np.arange(60) % 3]
    table = load(pets(part=part), tmp_path, split_column="part", validation=0.25, test=0.25)
    assert [len(table.train), len(table.validation), len(table.test)] == [27, 13, 20]  # a third of 40, as 0.25 of 0.75


def test_no_test_part(tmp_path: Path) -> None:
    table = load(pets(), tmp_path, test=0.0)
    assert [len(table.train), len(table.validation), len(table.test), len(table.rows["test"])] == [48, 12, 0, 0]


def test_a_class_that_training_never_sees_is_named(tmp_path: Path) -> None:
    frame = pets(pet=np.array(["cat", "dog", "cow"])[np.arange(60) % 3])
    frame["part"] = np.where(frame["pet"] == "dog", "test", "train")
    with pytest.raises(DataError, match=r"^The class 'dog' is in the test part \(row 2\) but not in the training part"):
        load(frame, tmp_path, split_column="part")


# -- learned values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "target"), [(pets, "pet"), (houses, "price")])
def test_statistics_are_those_of_the_training_part(make: Any, target: str, tmp_path: Path) -> None:
    """With any values in the other rows, encoding, training part and target scale are the same bit for bit."""
    before = load(make(), tmp_path, target)
    parts = np.full(60, "train", dtype=object)
    parts[before.rows["test"].numpy()] = "test"
    kept = make(part=parts)
    other = kept.copy()
    tested = parts == "test"
    numbers = "age" if target == "pet" else "area"
    texts = "fur" if target == "pet" else "town"
    other.loc[tested, numbers] = np.where(np.arange(tested.sum()) % 2, 1e6, np.nan)
    other.loc[tested, texts] = "never seen"
    if target == "price":
        other.loc[tested, target] *= 100
    ours, theirs = (load(frame, tmp_path, target, split_column="part") for frame in (kept, other))
    assert ours.encoding.columns == theirs.encoding.columns
    assert ours.encoding.target_scales == theirs.encoding.target_scales
    assert torch.equal(ours.train.x, theirs.train.x)
    assert torch.equal(ours.train.y, theirs.train.y)
    assert not torch.equal(ours.test.x, theirs.test.x)


def test_features_and_targets_are_scaled_by_the_training_part(tmp_path: Path) -> None:
    table = load(houses(200), tmp_path, "price", encoding="standard")
    area = table.train.x[:, 0]
    # rounding of means over 120 numbers of about 1
    assert abs(area.mean()) < 1e-12
    assert abs(area.std(correction=0) - 1) < 1e-12
    assert table.train.y.shape == (120, 1)
    assert abs(table.train.y.mean()) < 1e-12
    assert abs(table.train.y.std(correction=0) - 1) < 1e-12
    assert abs(table.test.y.mean()) > 1e-6
    assert table.target_scaler is not None
    prices = table.target_scaler.inverse_transform(table.test.y)
    expected = houses(200)["price"].to_numpy()[table.rows["test"].numpy()]
    torch.testing.assert_close(prices.squeeze(1), torch.from_numpy(expected), rtol=1e-12, atol=0)
    assert table.target_variance == pytest.approx(table.target_scaler.std.item() ** 2)


def test_classes_have_no_scale(tmp_path: Path) -> None:
    table = load(pets(), tmp_path)
    assert table.target_scaler is None
    assert table.target_variance == 1
    assert table.num_outputs == 3


@pytest.mark.parametrize("size", [1e60, 1e-300])
def test_targets_whose_squares_are_no_numbers_are_refused(size: float, tmp_path: Path) -> None:
    frame = houses()
    frame["price"] = frame["price"] / frame["price"].max() * size
    with pytest.raises(
        DataError, match=r"^The variance of the target 'price' over- or underflows .*\. Rescale the target\.$"
    ):
        load(frame, tmp_path, "price")


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_parts_are_given_in_the_plans_precision(precision: str, tmp_path: Path) -> None:
    plan = MemberPlan("regression", precision=precision)
    part = load(houses(), tmp_path, "price").parts(plan, "cpu")[0]
    assert str(part.x.dtype) == str(part.y.dtype) == f"torch.{precision}"
    labels = load(pets(), tmp_path).parts(plan, "cpu")[0].y
    assert labels.dtype == torch.int64


def test_the_training_part_is_described(tmp_path: Path) -> None:
    """Counts and means are those of the training rows alone."""
    frame = pets(part=np.array(["train", "train", "test", "validation"])[np.arange(60) % 4])
    table = load(frame, tmp_path, split_column="part")
    columns = {column.name: column for column in table.description.columns}
    train = frame[frame["part"] == "train"]
    assert columns["age"].mean == pytest.approx(train["age"].mean())
    assert columns["age"].missing == train["age"].isna().sum()
    assert tuple(columns["fur"].categories[0]) == next(iter(train["fur"].value_counts().items()))
    assert columns["part"].kind == "dropped"
    shown = column_table(table.description, len(table.train)).sections[0].rows[0]
    counts = ", ".join(f"{name} ({count})" for name, count in train["pet"].value_counts().items())
    assert [cell.text for cell in shown] == ["pet", "target: classes", counts, "0"]


def test_numbers_to_predict_are_described_as_they_were_read(tmp_path: Path) -> None:
    """A decimal comma read as a separator of thousands would show here."""
    frame = pd.DataFrame({"x": np.arange(60) % 7, "price": [f"{1000 + i},5" for i in range(60)], "size": range(60)})
    table = load_table(write_table(frame, tmp_path / "t.csv"), TableSettings(("price", "size")))
    shown = column_table(table.description, 36)
    assert shown is not None
    cells = [[cell.text for cell in row] for row in shown.sections[0].rows]
    mean = 1000.5 + np.mean(table.rows["train"].numpy())
    assert cells[0][:2] == ["price", "target: number like 1234,5"]
    assert cells[0][2].startswith(f"{mean:.0f} ± ")
    assert cells[1][0] == "size"
