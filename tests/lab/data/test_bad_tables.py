"""Invalid tables: one-sentence errors that name the problem and say what to do."""

from __future__ import annotations

import copy
import gzip
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.lab.data.tables_support import learn, one_sentence, pets
from torchace.lab.data.encoding import Encoding, learn_encoding
from torchace.lab.data.inference import infer_schema
from torchace.lab.data.splits import train_val_test_split
from torchace.lab.data.tables import iterate_table, read_table

GOOD = b"age,fur,pet\n1,long,cat\n2,short,dog\n"


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def make_zip(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name.replace("__", "."), data)
    return buffer.getvalue()


NPZ = npz(x=np.arange(40.0).reshape(20, 2), y=np.arange(20))
PARQUET = parquet(pa.table({"age": list(range(100)), "pet": ["cat", "dog"] * 50}))
XLSX = make_zip(**{"[Content_Types]__xml": b"<Types/>"})

# file name, what it holds, words of the sentence beside the file's name
FILES: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "empty": ("t.csv", b"", ("no columns",)),
    "header alone": ("t.csv", b"age,fur\n", ("no rows",)),
    "two columns of one name": ("t.csv", b"age,fur,age\n1,2,3\n", ("'age'", "rename")),
    "two names but for a space": ("t.csv", b"age, age\n1,2\n", ("'age'", "rename")),
    "no header": ("t.csv", b"5.1,3.5,1\n4.9,3.0,0\n", ("5.1, 3.5, 1", "row of names")),
    "no header, whole numbers": ("t.csv", b"1,0,1\n0,1,0\n", ("1, 0, 1", "row of names")),
    "a value too many": ("t.csv", GOOD + b"3,long,cat,4\n", ("4 values in row 3", "3 column names", "comma")),
    "a value too few": ("t.csv", GOOD + b"3,long\n", ("2 values in row 3", "3 column names")),
    "a value too few after blank lines": ("t.csv", GOOD + b"\n\n\n3\n", ("1 values in row 3",)),
    "a value too many by semicolon": ("t.csv", b"a;b\n1;2\n1;2;3\n", ("3 values in row 2", "semicolon")),
    "a value too many by tab": ("t.tsv", b"a\tb\n1\t2\n1\t2\t3\n", ("3 values in row 2", "tab")),
    "quotation mark never closed": ("t.csv", GOOD + b'3,long,"cat\n4,long,dog\n', ("quotation mark", "line 5")),
    "quotation mark within a quoted value": ("t.csv", GOOD + b'3,"lo"ng",cat\n', ("quotation mark", "line 4", "twice")),
    "neither UTF-8 nor Windows-1252": ("t.csv", GOOD + b"3,long,k\x81tz\n", ("can't decode", "UTF-8")),
    "UTF-16 cut short": ("t.csv", GOOD.decode().encode("utf-16")[:-1], ("cannot be read",)),
    "binary": ("t.csv", bytes(range(256)), ("not a text file",)),
    "Parquet as CSV": ("t.csv", PARQUET, ("not a text file",)),
    "CSV as gzip": ("t.csv.gz", GOOD, ("gzip",)),
    "gzip cut short": ("t.csv.gz", gzip.compress(GOOD * 100)[:-20], ("cannot be read",)),
    "CSV as Parquet": ("t.parquet", GOOD, ("Parquet",)),
    "Parquet cut short": ("t.parquet", PARQUET[:-50], ("cannot be read",)),
    "Parquet without rows": ("t.parquet", parquet(pa.table({"a": pa.array([], pa.int64())})), ("no rows",)),
    "Parquet without columns": ("t.parquet", parquet(pa.table({})), ("no columns",)),
    "Parquet with two of one name": ("t.parquet", parquet(pa.table([[1], [2]], ["a", "a"])), ("'a'", "rename")),
    "CSV as NPZ": ("t.npz", GOOD, ("not a readable NPZ file",)),
    "NPZ cut short": ("t.npz", NPZ[:-30], ("not a readable NPZ file",)),
    "NPZ of objects": ("t.npz", npz(y=np.array([1, "a", None], dtype=object)), ("Object arrays cannot be loaded",)),
    "NPZ of a single number": ("t.npz", npz(x=np.zeros(3), k=np.array(5)), ("'k'", "()")),
    "NPZ of records": ("t.npz", npz(x=np.zeros(3, [("a", "f4")])), ("'x'", "'a'")),
    "NPZ of images": ("t.npz", npz(x=np.zeros((3, 8, 8))), ("'x'", "(3, 8, 8)")),
    "NPZ of other lengths": ("t.npz", npz(x=np.zeros((3, 2)), y=np.zeros(4)), ("'x' has 3 rows", "'y' has 4")),
    "NPZ of clashing names": ("t.npz", npz(x=np.zeros((3, 2)), x1=np.zeros(3)), ("'x1'", "rename")),
    "NPZ of no arrays": ("t.npz", npz(), ("no columns",)),
    "NPZ of no rows": ("t.npz", npz(x=np.zeros((0, 2))), ("no rows",)),
    "unknown kind": ("t.xlsx", XLSX, (".csv", ".parquet", ".npz")),
    "no kind": ("table", GOOD, (".csv", ".parquet", ".npz")),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, tmp_path: Path) -> None:
    name, content, words = FILES[case]
    path = tmp_path / name
    path.write_bytes(content)
    sentences = set()
    for read in (read_table, lambda path: list(iterate_table(path, rows=1))):
        with pytest.raises(ValueError) as caught:
            read(path)
        sentences.add(one_sentence(caught.value, str(path), *words))
    assert len(sentences) == 1


def folder(path: Path) -> None:
    path.mkdir()


PLACES: dict[str, tuple[str, Callable[[Path], Any], tuple[str, ...]]] = {
    "nothing": ("t.csv", lambda path: None, ("There is no file", "check the path")),
    "a similar name": ("tabel.csv", lambda path: (path.parent / "table.csv").write_bytes(GOOD), ("'table.csv'",)),
    "a folder": ("data", folder, ("is not a file",)),
    "a pipe": ("t.csv", os.mkfifo, ("is not a file",)),
}


@pytest.mark.parametrize("case", PLACES)
def test_paths_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    name, make, words = PLACES[case]
    make(tmp_path / name)
    with pytest.raises(ValueError) as caught:
        iterate_table(tmp_path / name)  # at once, not when the first rows are asked for
    one_sentence(caught.value, name[:3], *words)


def test_a_line_break_in_a_name(tmp_path: Path) -> None:
    path = tmp_path / "my\ntable.csv"
    path.write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        read_table(path)
    one_sentence(caught.value, "no columns")


LISTS = pd.Series([[1]] * 30)
TWICE = pd.DataFrame([[1, 2]] * 30, columns=["age", "age"])

# what is asked of which table, and words of the sentence
SCHEMAS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "unknown target": (lambda: infer_schema(pets(), "animal"), ("'animal'", "'age', 'fur', 'pet'")),
    "unknown target, nearly": (lambda: infer_schema(pets(), "Pets"), ("'Pets'", "did you mean 'pet'?")),
    "unknown target among many": (
        lambda: infer_schema(pd.DataFrame(np.zeros((30, 500))), "kind"),
        ("'kind'", "490 more"),
    ),
    "unknown task": (lambda: infer_schema(pets(), "pet", "ranking"), ("'ranking'", "classification or regression")),
    "unknown column to drop": (lambda: infer_schema(pets(), "pet", drop=["fir"]), ("'fir'", "did you mean 'fur'?")),
    "unknown kind": (lambda: infer_schema(pets(), "pet", kinds={"age": "text"}), ("'text'", "'age'", "number")),
    "target dropped": (lambda: infer_schema(pets(), "pet", drop=["pet"]), ("'pet'", "is the target")),
    "target with a kind": (lambda: infer_schema(pets(), "pet", kinds={"pet": "number"}), ("'pet'", "is the target")),
    "few rows": (lambda: infer_schema(pets(9), "pet"), ("9 rows", "at least 10")),
    "two columns of one name": (lambda: infer_schema(TWICE, "age"), ("'age'", "rename")),
    "two columns of one text": (lambda: infer_schema(pets().set_axis([1, "1", "pet"], axis=1), "pet"), ("'1'",)),
    "one class": (lambda: infer_schema(pets(pet="cat"), "pet"), ("'pet'", "one class", "'cat'")),
    "one class in two spellings": (lambda: infer_schema(pets(pet=["1", "1.0"] * 15), "pet"), ("one class", "'1'")),
    "NaN in the target": (
        lambda: infer_schema(pets(pet=[1.0, 2.0, np.nan] * 10), "pet"),
        ("'pet'", "row 3", "9 more rows", "'nan'"),
    ),
    "NA in the target": (
        lambda: infer_schema(pets(pet=["cat"] * 15 + ["dog"] * 14 + ["NA"]), "pet"),
        ("'pet'", "row 30", "'NA'"),
    ),
    "more classes than half the rows": (
        lambda: infer_schema(pets(pet=[f"pet {i}" for i in range(30)]), "pet"),
        ("'pet'", "30 classes in 30 rows"),
    ),
    "more classes of numbers than half the rows": (
        lambda: infer_schema(pets(pet=np.arange(30) + 0.5), "pet", "classification"),
        ("30 classes in 30 rows", "regression"),
    ),
    "a class of one row": (
        lambda: infer_schema(pets(pet=["cat", "dog"] * 7 + ["cow"] + ["cat"] * 15), "pet"),
        ("'cow'", "row 15", "one row", "or add rows of it."),
    ),
    "a number of one row": (
        lambda: infer_schema(pets(pet=[1, 2] * 14 + [1, 3]), "pet", "classification"),
        ("'3'", "row 30", "or set the task to regression"),
    ),
    "regression of texts": (
        lambda: infer_schema(pets(), "pet", "regression"),
        ("'pet'", "row 1", "'cat'", "29 more rows", "classification"),
    ),
    "regression of one number": (lambda: infer_schema(pets(pet=0.5), "pet"), ("'pet'", "'0.5' in every row")),
    "regression of an infinite number": (
        lambda: infer_schema(pets(pet=[0.5, np.inf] * 15), "pet"),
        ("'pet'", "row 2", "'inf'"),
    ),
    "classes of infinite numbers": (
        lambda: infer_schema(pets(pet=[1.0, -np.inf] * 15), "pet", "classification"),
        ("'pet'", "row 2", "'-inf'"),
    ),
    "a target of lists": (lambda: infer_schema(pets(pet=LISTS), "pet"), ("'pet'", "list", "row 1")),
    "the target alone": (lambda: infer_schema(pets()[["pet"]], "pet"), ("'pet'", "No column")),
    "everything dropped": (lambda: infer_schema(pets(), "pet", drop=["age", "fur"]), ("'pet'", "No column")),
    "nothing that varies": (lambda: infer_schema(pets(age=1, fur="x"), "pet"), ("No column", "'fur'")),
    "an infinite number": (lambda: infer_schema(pets(age=[1.0] * 29 + [np.inf]), "pet"), ("'age'", "row 30", "'inf'")),
    "a number too large": (lambda: infer_schema(pets(age=["1", "1e999"] * 15), "pet"), ("'age'", "row 2", "'1e999'")),
    "a whole number too large": (
        lambda: infer_schema(pets(age=pd.Series([1, 10**400] * 15, dtype=object)), "pet"),
        ("'age'", "row 2", "too large"),
    ),
    "texts called numbers": (
        lambda: infer_schema(pets(), "pet", kinds={"fur": "number"}),
        ("'fur'", "row 1", "'long'"),
    ),
    "truth called numbers": (
        lambda: infer_schema(pets(fur=[True, False] * 15), "pet", kinds={"fur": "number"}),
        ("'fur'", "'True'"),
    ),
    "lists called categories": (
        lambda: infer_schema(pets(fur=LISTS), "pet", kinds={"fur": "category"}),
        ("'fur'", "list", "row 1"),
    ),
}

CLASSES, QUANTITIES = learn(pets()), learn(pets(pet=np.arange(30) / 7))


def later(**replace: Any) -> pd.DataFrame:
    """A later chunk of a file, whose first row is row 101."""
    frame = pets(30, **replace)
    return frame.set_axis(pd.RangeIndex(100, 130))


def damaged_json(kind: str, *path: Any, to: Any) -> Callable[[], object]:
    """An encoding or schema of which one entry is something else."""

    def read() -> object:
        content = copy.deepcopy((QUANTITIES if kind == "regression" else CLASSES).to_dict())
        *keys, last = path
        place = content
        for key in keys:
            place = place[key]
        place[last] = to
        return Encoding.from_dict(content)

    return read


ENCODINGS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a column is missing": (lambda: CLASSES.matrix(pets()[["age", "pet"]]), ("'fur'", "add it")),
    "a column has another name": (
        lambda: CLASSES.matrix(pets().rename(columns={"age": "Age "})),
        ("'age'", "did you mean 'Age '?"),
    ),
    "text among numbers": (
        lambda: CLASSES.matrix(pets(age=["1"] * 16 + ["old"] + ["2"] * 13)),
        ("'age'", "row 17", "'old'"),
    ),
    "text among numbers of a later chunk": (
        lambda: CLASSES.matrix(later(age=["1"] * 16 + ["old"] * 14)),
        ("'age'", "row 117", "'old'", "13 more rows"),
    ),
    "text of many lines among numbers": (
        lambda: CLASSES.matrix(pets(age=["a\nb\u2028c" * 100] * 30)),
        ("'age'", "row 1", "a\\nb\\u2028c"),
    ),
    "an infinite number": (lambda: CLASSES.matrix(later(age=[1.0] * 29 + [-np.inf])), ("'age'", "row 130", "'-inf'")),
    "lists among numbers": (lambda: CLASSES.matrix(pets(age=LISTS)), ("'age'", "list")),
    "two columns of one name": (lambda: CLASSES.matrix(TWICE), ("'age'", "rename")),
    "a class never seen": (
        lambda: CLASSES.schema.targets(later(pet=["cat"] * 4 + ["cow"] + ["dog"] * 25)),
        ("'pet'", "Row 105", "'cow'", "'cat', 'dog'"),
    ),
    "a class in other letters": (lambda: CLASSES.schema.targets(pets(pet="Cat")), ("Row 1", "'Cat'")),
    "no class": (
        lambda: CLASSES.schema.targets(later(pet=["cat"] * 4 + [None] * 26)),
        ("'pet'", "row 105", "25 more rows"),
    ),
    "no target": (lambda: CLASSES.schema.targets(pets()[["age"]]), ("'pet'", "target")),
    "no number to compare with": (
        lambda: QUANTITIES.schema.targets(later(pet=["0.5"] * 4 + [""] * 26)),
        ("'pet'", "row 105"),
    ),
    "text to compare with": (lambda: QUANTITIES.schema.targets(pets()), ("'pet'", "row 1", "'cat'")),
    "nothing to learn from": (lambda: learn_encoding(CLASSES.schema, pets().iloc[:0]), ("training part", "no rows")),
    "nothing that varies": (
        lambda: learn_encoding(CLASSES.schema, pets().iloc[[0, 0, 0]]),
        ("training part", "No column"),
    ),
    "a target that does not vary": (
        lambda: learn_encoding(QUANTITIES.schema, pets(pet=0.5)),
        ("training part", "'pet'"),
    ),
    "JSON: a list": (lambda: Encoding.from_dict([]), ("encoding", "damaged")),
    "JSON: a newer version": (damaged_json("classification", "version", to=4), ("encoding", "version")),
    "JSON: a newer schema": (damaged_json("classification", "schema", "version", to=7), ("schema.version",)),
    "JSON: a field more": (damaged_json("classification", "code", to="import os"), ("code",)),
    "JSON: an infinite mean": (damaged_json("classification", "columns", 0, "mean", to=float("inf")), ("mean",)),
    "JSON: no deviation of a quantity": (damaged_json("regression", "target_scales", 0, "std", to=0.0), ("target",)),
}

LABELS = torch.tensor([0, 1] * 15)


def parts(*words: Any) -> pd.Series:
    return pd.Series([*words, *["train", "test", "val"] * 10], name="part").iloc[:30]


SPLITS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "too much": (lambda: train_val_test_split(LABELS, fractions=(0.6, 0.6, 0.2)), ("0.6, 0.6, 0.2", "add up to 1")),
    "a fraction of NaN": (lambda: train_val_test_split(LABELS, fractions=(0.6, 0.4, float("nan"))), ("nan",)),
    "no training": (lambda: train_val_test_split(LABELS, fractions=(0.0, 0.5, 0.5)), ("above 0",)),
    "too few rows": (lambda: train_val_test_split(torch.zeros(2)), ("2 rows", "test part")),
    "a share of nearly nothing": (
        lambda: train_val_test_split(torch.zeros(10), fractions=(0.999, 0.001, 0.0)),
        ("10 rows", "validation part of 0.1 %"),
    ),
    "another word": (lambda: train_val_test_split(LABELS, column=parts("train", "tst")), ("'part'", "row 2", "'tst'")),
    "no word": (
        lambda: train_val_test_split(LABELS, column=parts("train", "test", None)),
        ("'part'", "row 3", "nothing"),
    ),
    "no word of a later chunk": (
        lambda: train_val_test_split(LABELS, column=parts("NA").set_axis(pd.RangeIndex(100, 130))),
        ("'part'", "row 101"),
    ),
    "no row for training": (
        lambda: train_val_test_split(LABELS, column=pd.Series(["test", "val"] * 15, name="part")),
        ("'part'", "no row for train"),
    ),
    "no row for testing": (
        lambda: train_val_test_split(LABELS, column=pd.Series(["train", "val"] * 15, name="part")),
        ("'part'", "no row for test"),
    ),
    "a class for testing alone": (
        lambda: train_val_test_split(torch.tensor([0, 1, 0] * 10), column=parts(), classes=("cat", "dog")),
        ("'dog'", "row 2", "test part", "training part"),
    ),
}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(*case, id=f"{kind}: {name}")
        for kind, cases in (("schema", SCHEMAS), ("encoding", ENCODINGS), ("train_val_test_split", SPLITS))
        for name, case in cases.items()
    ],
)
def test_tables(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    one_sentence(caught.value, *words)
