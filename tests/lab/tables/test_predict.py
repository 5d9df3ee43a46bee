"""Predictions for files: equal results in chunks, little memory, complete output or none."""

from __future__ import annotations

import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lab.cli.command_line import folder_contents, houses, pets, write_table
from tests.lab.tables.small_fits import fitted
from torchace.lab.data import DataError
from torchace.lab.tables.model import TableModel, predict_file
from torchace.lab.training import run_group
from torchace.lab.training.loop import Interrupted

# Small enough for a test, long enough that a file that is read whole would show.
LONG, FIRST, CHUNK = 200_000, 20_000, 8192


@pytest.fixture(scope="module")
def classifier() -> TableModel:
    return fitted(pets(), "pet", epochs=5)


@pytest.fixture(scope="module")
def regressor() -> TableModel:
    return fitted(houses(), "price", epochs=5)


def read_back(path: Path) -> pd.DataFrame:
    read = pd.read_parquet if path.suffix == ".parquet" else pd.read_csv
    return read(path)


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """The same columns; numbers to rounding, since matrices of other sizes are multiplied in another order."""
    assert list(found) == list(expected)
    assert len(found) == len(expected)
    for name in expected:
        if name == "prediction" and expected[name].dtype.kind not in "f":
            assert found[name].tolist() == expected[name].tolist()
        else:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
@pytest.mark.parametrize(
    ("source", "suffix", "rows"),
    [(".csv", ".parquet", 7), (".parquet", ".csv", 50), (".npz", ".csv", 7), (".csv", ".csv", None)],
)
def test_a_file_of_any_kind_in_chunks_of_any_size(
    kind: str, suffix: str, source: str, rows: int | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: TableModel = request.getfixturevalue(kind)
    frame = pets(50, seed=1) if kind == "classifier" else houses(50, seed=1)
    data, out = write_table(frame, tmp_path / f"data{source}"), tmp_path / f"out{suffix}"
    assert predict_file(model, data, out, rows=rows) == 50
    assert_same(read_back(out), model.predict(frame))
    assert {path.name for path in tmp_path.iterdir()} == {data.name, out.name}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_copied_columns_are_unchanged(classifier: TableModel, suffix: str, tmp_path: Path) -> None:
    frame = pets(20, name=[f'"{i}", a\nname' for i in range(20)], when=pd.Timestamp("2020-01-31"))
    data, out = write_table(frame, tmp_path / "data.parquet"), tmp_path / f"out{suffix}"
    predict_file(classifier, data, out, keep=["name", "pet", "age", "chipped"], rows=7)
    kept = read_back(out)
    assert list(kept)[:5] == ["name", "pet", "age", "chipped", "prediction"]
    assert kept["name"].tolist() == frame["name"].tolist()
    assert kept["chipped"].tolist() == frame["chipped"].tolist()
    np.testing.assert_array_equal(kept["age"], frame["age"])


def test_texts_of_a_csv_file_stay_texts(classifier: TableModel, tmp_path: Path) -> None:
    frame = pets(6).assign(id=["007", "1e5", "NA", "", " x", "=1+1"])
    data = write_table(frame, tmp_path / "data.csv")
    predict_file(classifier, data, tmp_path / "out.parquet", keep=["id"])
    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == ["007", "1e5", "NA", "", "x", "=1+1"]


def test_spaces_around_a_text_change_no_prediction(classifier: TableModel, tmp_path: Path) -> None:
    """Of what was fitted without them, and the other way round; kept, those in quotation marks come through."""
    plain, frame = pets(20), pets(20)
    frame["fur"] = frame["fur"].map(lambda fur: f"  {fur} " if isinstance(fur, str) else fur)
    quoted = plain.to_csv(index=False).replace("long", '" long"').replace(",short", ",  short")
    (tmp_path / "quoted.csv").write_text(quoted)
    files = [write_table(frame, tmp_path / name) for name in ("spaced.csv", "spaced.parquet")]
    model = fitted(pets(60).assign(fur=lambda table: " " + table["fur"]), "pet", epochs=5)
    for known in (classifier, model):
        predict_file(known, write_table(plain, tmp_path / "plain.csv"), tmp_path / "expected.csv")
        expected = read_back(tmp_path / "expected.csv")
        for data in (*files, tmp_path / "quoted.csv"):
            predict_file(known, data, tmp_path / "out.csv", keep=["fur"])
            assert_same(read_back(tmp_path / "out.csv").drop(columns="fur"), expected)
    kept = read_back(tmp_path / "out.csv")["fur"].dropna().unique()
    assert sorted(kept) == [" long", "none at all", "short"]


@pytest.mark.parametrize("labels", [np.arange(60) % 3, np.arange(60) % 2 == 0, np.arange(60) % 2 + 0.5], ids=str)
def test_a_parquet_file_has_the_classes_own_type(labels: Any, tmp_path: Path) -> None:
    model = fitted(pets(pet=labels), "pet", ".parquet", task="classification")
    data = write_table(pets(30), tmp_path / "data.csv")
    predict_file(model, data, tmp_path / "out.parquet", rows=4)
    column = pq.read_table(tmp_path / "out.parquet")["prediction"]
    assert column.type == pa.array(labels).type
    assert set(column.to_pylist()) <= set(labels.tolist())


def test_existing_output_is_replaced(classifier: TableModel, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("old")
    predict_file(classifier, write_table(pets(5), tmp_path / "data.csv"), out)
    assert out.read_text().startswith("prediction,probability_cat")


def test_a_folder_is_made(classifier: TableModel, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out.csv"
    assert predict_file(classifier, write_table(pets(5), tmp_path / "data.csv"), out) == 5
    assert len(read_back(out)) == 5


def test_empty_groups_of_rows_are_skipped(classifier: TableModel, tmp_path: Path) -> None:
    table = pa.Table.from_pandas(pets(10), preserve_index=False)
    with pq.ParquetWriter(tmp_path / "data.parquet", table.schema) as writer:
        for part in (table[:0], table[:4], table[:0], table[4:]):
            writer.write_table(part)
    assert predict_file(classifier, tmp_path / "data.parquet", tmp_path / "out.csv") == 10


# -- complete output or none ------------------------------------------------------------------------------------------


def failing(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype({"age": object}).assign(age=lambda f: f["age"].where(f.index != 25, "young"))


@pytest.mark.parametrize(("suffix", "there"), [(".csv", True), (".parquet", False)])
def test_an_invalid_row_late_in_the_file_leaves_no_output(
    classifier: TableModel, suffix: str, there: bool, tmp_path: Path
) -> None:
    data, out = write_table(failing(pets(30)), tmp_path / "data.csv"), tmp_path / f"out{suffix}"
    if there:
        out.write_text("old")
    before = folder_contents(tmp_path)
    with pytest.raises(DataError, match="row 26 has 'young'"):
        predict_file(classifier, data, out, rows=7)
    assert folder_contents(tmp_path) == before


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_an_interrupted_prediction_leaves_no_output(classifier: TableModel, suffix: str, tmp_path: Path) -> None:
    data = write_table(pets(30), tmp_path / "data.csv")
    before = folder_contents(tmp_path)
    answers = iter([False, False, True])
    with pytest.raises(Interrupted):
        predict_file(classifier, data, tmp_path / f"out{suffix}", rows=7, stop=lambda: next(answers))
    assert folder_contents(tmp_path) == before


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_full_disk_leaves_no_output(
    classifier: TableModel, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_table(pets(30), tmp_path / "data.csv")
    before = folder_contents(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/out{suffix}'"):
        predict_file(classifier, data, tmp_path / f"out{suffix}")
    assert folder_contents(tmp_path) == before


def test_copied_columns_of_any_type_can_be_read_by_pandas(classifier: TableModel, tmp_path: Path) -> None:
    frame = pets(8).assign(state=pd.Categorical(["on", "off"] * 4), price=[Decimal("1.50")] * 8)
    frame.to_parquet(tmp_path / "data.parquet")
    predict_file(classifier, tmp_path / "data.parquet", tmp_path / "out.parquet", keep=["state", "price"], rows=4)
    kept = pd.read_parquet(tmp_path / "out.parquet")
    assert kept["state"].tolist() == ["on", "off"] * 4
    assert kept["price"].tolist() == [Decimal("1.50")] * 8


def test_copied_columns_keep_their_type_in_every_chunk(classifier: TableModel, tmp_path: Path) -> None:
    """Also a column of lists of which the first chunk has none."""
    frame = pets(8)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.append_column("tags", pa.array([None] * 4 + [["a"]] * 4, pa.list_(pa.string())))
    pq.write_table(table, tmp_path / "data.parquet")
    for name in ("out.parquet", "out.csv"):
        assert predict_file(classifier, tmp_path / "data.parquet", tmp_path / name, keep=["tags"], rows=4) == 8
    assert pq.read_table(tmp_path / "out.parquet")["tags"].to_pylist() == [None] * 4 + [["a"]] * 4


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (["nothing"], "no column 'nothing'"),
        (["age", "age"], "two columns named 'age'"),
        (["age", "prediction"], "two columns named 'prediction'"),
    ],
)
def test_columns_that_cannot_be_copied(classifier: TableModel, keep: list[str], words: str, tmp_path: Path) -> None:
    data = write_table(pets(8, prediction=1), tmp_path / "data.csv")
    with pytest.raises(DataError, match=words):
        predict_file(classifier, data, tmp_path / "new" / "out.csv", keep=keep)
    assert os.listdir(tmp_path) == ["data.csv"]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_many_members_and_classes_are_predicted_in_smaller_chunks(
    classifier: TableModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    width = max(max(p.shape) for p in classifier.ensemble.parameters() if p.ndim == 2)
    monkeypatch.setattr(run_group, "CHUNK_BYTES", 10 * 8 * width * classifier.ensemble.num_members)
    sizes: list[int] = []
    real = TableModel.predict
    monkeypatch.setattr(TableModel, "predict", lambda self, frame: sizes.append(len(frame)) or real(self, frame))
    predict_file(classifier, write_table(pets(25), tmp_path / "data.csv"), tmp_path / "out.csv")
    assert sizes == [10, 10, 5]


MEASURED = r"""
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from torchace.lab.tables.model import predict_file
from torchace.lab.tables.model import TableModel
model = TableModel.load(sys.argv[1])
for data in map(Path, sys.argv[3:]):
    rows = predict_file(model, data, data.with_name(f"out{data.suffix}"), keep=["note"], rows=int(sys.argv[2]))
    # the peak of this program; what getrusage says starts with what the process had before it became this one
    print(rows, re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_long_file_takes_no_more_memory_than_a_short_one(classifier: TableModel, tmp_path: Path) -> None:
    classifier.save(tmp_path / "model")
    frame = pets(100).sample(LONG, replace=True, random_state=0, ignore_index=True)
    frame["note"] = [f"{number:09}" * 33 for number in np.random.default_rng(0).integers(0, 10**9, LONG)]
    sizes = (FIRST, LONG, FIRST, LONG)
    names = [f"{size}{suffix}" for size, suffix in zip(sizes, (".csv", ".csv", ".parquet", ".parquet"), strict=True)]
    files = [write_table(frame[:size], tmp_path / name) for size, name in zip(sizes, names, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, (tmp_path / "model", CHUNK, *files))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counted = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [rows for rows, _ in counted] == list(sizes)
    peaks = [1024 * peak for _, peak in counted]
    # the notes alone, 297 letters each, are 60 MB, and more in a table; what is left to grow is the allocators' slack
    assert peaks[1] - peaks[0] < 0.5 * 297 * LONG, peaks
    assert peaks[3] - peaks[2] < 0.5 * 297 * LONG, peaks


def test_formulas_are_escaped_on_request(classifier: TableModel, tmp_path: Path) -> None:
    frame = pets(6)
    cells = ["=1+1", "+2+A1", "plain", "@x", "-1.5e-05", "-1,5"]
    frame["=note"] = cells
    data = write_table(frame, tmp_path / "data.csv")
    escaped = ["'=1+1", "'+2+A1", "plain", "'@x", "-1.5e-05", "-1,5"]  # a number is no formula
    for escape, expected in ((True, escaped), (False, cells)):
        predict_file(classifier, data, tmp_path / "out.csv", keep=["=note"], escape_formulas=escape)
        found = read_back(tmp_path / "out.csv")
        assert found.iloc[:, 0].astype(str).tolist() == expected
        assert found.columns[0] == ("'=note" if escape else "=note")
        assert (found["entropy"] >= 0).all()
