"""Tables from files: values, equal results in chunks, errors for damaged files; no code is executed."""

from __future__ import annotations

import codecs
import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lab.data.damaged_files import mutations
from tests.lab.data.tables_support import one_sentence, write_csv
from torchace.lab.data import DataError
from torchace.lab.data.parsing import dates, numbers, texts
from torchace.lab.data.tables import iterate_table, read_table

CELLS: dict[str, list[object]] = {
    "a": ["1", "", "x, y"],
    "b b": ['say "no"', "two\nlines", "ü; ∂"],
    "c": ["", "NA", "3"],
}


def test_csv_cells_are_texts(tmp_path):
    frame = read_table(write_csv(tmp_path / "t.csv", CELLS))
    assert frame.to_dict("list") == CELLS
    assert isinstance(frame.index, pd.RangeIndex)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["t.csv", "T.CSV", "t.csv.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["Unix", "Windows", "old Mac"])
def test_csv_dialects(tmp_path, delimiter, name, mark, end):
    lines = ["größe{0}kind{0}n", '1.5{0}"a{0}b"{0}1', "", '"2"{0}c ""d{0}2', "  ", "3{0}{0} 3"]
    text = mark + end.join(lines).format(delimiter) + end
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    expected = {"größe": ["1.5", "2", "3"], "kind": [f"a{delimiter}b", 'c ""d', ""], "n": ["1", "2", "3"]}
    frame = read_table(tmp_path / name)
    assert {column: [cell.strip() for cell in frame[column]] for column in frame} == expected


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [
        *(("cp1252", b""), ("utf-8", b""), ("utf-16", b"")),  # Python writes a mark for "utf-16"
        *(("utf-16-be", codecs.BOM_UTF16_BE), ("utf-16-be", b""), ("utf-16-le", b"")),
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_encodings(tmp_path, encoding, mark, name):
    text = "größe;preis\r\n" + "groß;€ 1,5\r\nklein;7\r\n" * 40
    data = mark + text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    frame = read_table(tmp_path / name)
    assert frame.to_dict("list") == {"größe": ["groß", "klein"] * 40, "preis": ["€ 1,5", "7"] * 40}
    title = {"cp1252": "Windows-1252", "utf-8": None}.get(encoding, "UTF-16")
    assert frame.attrs.get("notes") == (title and [f"{name} is read as {title} text."])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"","a","b"\n"1",5,6\n"2",7,8\n', ["row names", "a", "b"]),  # R's write.csv, and pandas's index
        ('"a" "b"\n"r 1" 5 6\n"r 2" 7 8\n'.replace(" ", "\t").replace("r\t", "r "), ["row names", "a", "b"]),
        ("a;b;\n1;2;\n3;4;\n", ["a", "b", "column 3"]),
        ("a,b\n1,2,\n3,4,\n", ["a", "b", "column 3"]),  # a delimiter at the end of each row is no row name
    ],
)
def test_columns_without_a_name(tmp_path, text, names):
    (tmp_path / "t.csv").write_text(text)
    frame = read_table(tmp_path / "t.csv")
    assert list(frame.columns) == names
    assert frame["b"].tolist() in (["6", "8"], ["2", "4"])


@pytest.mark.parametrize("mark", ["", '"'])
def test_long_texts(tmp_path, mark):
    """Longer than the 131,072 characters of Python's csv module."""
    (tmp_path / "t.csv").write_text(f"a,b\n{mark}{'long ' * 50_000}{mark},1\n")
    assert read_table(tmp_path / "t.csv")["a"].str.len().tolist() == [250_000]


def test_a_byte_order_mark_within_a_cell(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n\ufeff3,4\n", encoding="utf-8")
    for rows in (1, 2):
        cells = [cell for chunk in iterate_table(tmp_path / "t.csv", rows=rows) for cell in chunk["a"]]
        assert cells == ["1", "\ufeff3"]


def test_decimal_commas_between_commas_make_no_row_names(tmp_path):
    """Row names differ from each other; a number cut in two would shift all columns."""
    (tmp_path / "t.csv").write_text("price,town\n1,5,Ulm\n1,7,Rome\n2,5,Ulm\n")
    with pytest.raises(DataError, match=r"3 values in row 1, but 2 column names"):
        read_table(tmp_path / "t.csv")


def test_tab_separated_values_are_never_split_at_commas(tmp_path):
    (tmp_path / "t.tsv").write_text("a,b\tc,d\n1,5\t2,5\n")
    assert read_table(tmp_path / "t.tsv").to_dict("list") == {"a,b": ["1,5"], "c,d": ["2,5"]}


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("price;amount\n1,5;2\n2,5;3\n", ["price", "amount"]),  # decimal commas
        ('"a;b",c\n1,2\n', ["a;b", "c"]),
        ("a b,c\n1;2,3\n4;5,6\n", ["a b", "c"]),
        ("one\n1\n2\n", ["one"]),
        ("one\n1;5\n2\n", ["one"]),
        ("0,1,2\n5,6,7\n", ["0", "1", "2"]),  # as pandas names the columns of an array
        ("2001,2002,2003\n5,6,7\n", ["2001", "2002", "2003"]),
        (" a , b \n1,2\n", ["a", "b"]),
        ("a,b\n1,2", ["a", "b"]),
        ("sep=;\na;b\n1,5;2\n", ["a", "b"]),  # Excel
        ("sep=;\r\na;b\r\n1,5;2\r\n", ["a", "b"]),
        ("sep=;b\n1;2\n", ["sep=", "b"]),
    ],
)
def test_the_delimiter_is_the_one_that_fits(tmp_path, text, columns):
    (tmp_path / "t.csv").write_text(text)
    assert list(read_table(tmp_path / "t.csv").columns) == columns


def test_spaces_after_a_delimiter_are_layout_and_those_in_quotes_are_text(tmp_path):
    (tmp_path / "t.csv").write_text('a, b, c\n 1, "x, y", z\n2," z",  " "\n')
    frame = read_table(tmp_path / "t.csv")
    assert frame.to_dict("list") == {"a": ["1", "2"], "b": ["x, y", " z"], "c": ["z", " "]}


@pytest.mark.parametrize("row", ['"x" y,2', '"x"y,2', '"x" "y",2', '"x\n" y,2'])
def test_text_behind_a_closing_quotation_mark_is_refused(tmp_path, row):
    (tmp_path / "t.csv").write_text(f"a,b\n1,2\n{row}\n")
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / "t.csv")
    one_sentence(caught.value, "quotation mark", "expected after")


def test_one_column_keeps_its_missing_values(tmp_path):
    (tmp_path / "t.csv").write_text('a\n1\n""\n\n3\n')
    assert list(read_table(tmp_path / "t.csv")["a"]) == ["1", "", "3"]


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_regular_and_irregular_lines_in_one_file(tmp_path, rows):
    """Regular lines are parsed by pyarrow, others by the csv module; the cells are the same."""
    (tmp_path / "t.csv").write_text('a,b\n,\n5", x\n"m\n\nn","say ""no"""\n" z",c \n1, "x, y"\n')
    table = list(iterate_table(tmp_path / "t.csv", rows=rows))
    assert [cell for chunk in table for cell in chunk["a"]] == ["", '5"', "m\n\nn", " z", "1"]
    assert [cell for chunk in table for cell in chunk["b"]] == ["", "x", 'say "no"', "c ", "x, y"]


def test_a_header_that_only_the_first_rows_fit(tmp_path):
    """The delimiter is judged by the first rows; a later one that does not fit is named."""
    (tmp_path / "t.csv").write_text("a;b\n" + "1;2\n" * 50 + "1,2\n")
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / "t.csv")
    one_sentence(caught.value, "1 values in row 51", "semicolon")


def test_chunks_before_a_bad_row_come(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n5,6\n7\n")
    chunks = iterate_table(tmp_path / "t.csv", rows=2)
    assert list(next(chunks)["a"]) == ["1", "3"]
    with pytest.raises(DataError, match="row 4"):
        next(chunks)


def test_a_file_is_opened_lazily_and_closed_at_the_end(tmp_path):
    path = write_csv(tmp_path / "t.csv", CELLS)
    chunks = iterate_table(path, rows=1)
    next(chunks)
    chunks.close()
    assert not [name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == str(path)]


@pytest.mark.parametrize("rows", [0, -1, 2.0, True])
def test_invalid_chunk_sizes(tmp_path, rows):
    with pytest.raises((TypeError, ValueError), match="rows"):
        iterate_table(write_csv(tmp_path / "t.csv", CELLS), rows=rows)


def test_a_csv_file_larger_than_a_chunk_is_read_in_chunks(tmp_path):
    """400,000 cells in chunks: memory holds a few blocks, not the file."""
    import tracemalloc

    with open(tmp_path / "t.csv", "w") as file:
        file.write("a,b\n")
        for start in range(0, 200_000, 1000):
            file.writelines(f"{row},{row / 7}\n" for row in range(start, start + 1000))
    count = 0
    tracemalloc.start()
    for chunk in iterate_table(tmp_path / "t.csv", rows=1000):
        count += len(chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 200_000
    assert peak < 2_000_000  # the file has 5 MB


# -- Parquet and NPZ ---------------------------------------------------------------------------------------------------


def parquet_table() -> pa.Table:
    return pa.table(
        {
            "int": pa.array([1, None, 2**60 + 1], pa.int64()),
            "byte": pa.array([1, 2, None], pa.uint8()),
            "float": pa.array([0.5, None, float("nan")], pa.float64()),
            "bool": pa.array([True, None, False]),
            "text": pa.array(["a", None, "ü"]),
            "text view": pa.array(["a", None, "ü"], pa.string_view()),
            "duration": pa.array([1_500_000, None, 0], pa.duration("us")),
            "dictionary": pa.array(["x", "y", "x"]).dictionary_encode(),
            "decimal": pa.array([Decimal("1.50"), None, Decimal("-2")], pa.decimal128(10, 2)),
            "date": pa.array([0, 1, None], pa.date32()),
            "time": pa.array([0, None, 86_400_000_000], pa.timestamp("us")),
            "nothing": pa.nulls(3),
        }
    )


def test_parquet(tmp_path):
    pq.write_table(parquet_table(), tmp_path / "t.parquet")
    frame = read_table(tmp_path / "t.parquet")
    said = {name: texts(frame[name]).to_pylist() for name in frame}
    assert said == {
        "int": ["1", None, str(2**60 + 1)],  # exact beside a missing value
        "byte": ["1", "2", None],
        "float": ["0.5", None, None],
        "bool": ["True", None, "False"],
        "text": ["a", None, "ü"],
        "text view": ["a", None, "ü"],
        "duration": ["1.5", None, "0"],
        "dictionary": ["x", "y", "x"],
        "decimal": ["1.5", None, "-2"],
        "date": ["1970-01-01", "1970-01-02", None],
        "time": ["1970-01-01 00:00:00.000000", None, "1970-01-02 00:00:00.000000"],
        "nothing": [None, None, None],
    }


def test_the_index_of_pandas_is_no_column(tmp_path):
    frame = pd.DataFrame({"a": [1, 2, 3]}, index=[7, 3, 5])
    frame.to_parquet(tmp_path / "t.parquet")
    assert "__index_level_0__" in pq.read_schema(tmp_path / "t.parquet").names
    again = read_table(tmp_path / "t.parquet")
    assert list(again.columns) == ["a"]
    assert list(again.index) == [0, 1, 2]
    frame.rename_axis("name").to_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").to_dict("list") == {"a": [1, 2, 3], "name": [7, 3, 5]}


def test_npz(tmp_path):
    arrays = {
        "X": np.arange(6.0).reshape(3, 2),
        "table": np.asfortranarray(np.arange(6).reshape(3, 2)),
        "big": np.arange(3, dtype=">i4"),
        "half": np.array([0.5, 1, 2], dtype=np.float16),
        "long": np.array([0.5, 1, 2], dtype=np.longdouble),
        "flag": np.array([True, False, True]),
        "text": np.array(["a", "ü", ""]),
        "bytes": np.array([b"a", b"b", b"\xc3\xbc"]),
        "date": np.array(["2020-01-01", "NaT", "2020-01-03"], dtype="datetime64[D]"),
        "nothing": np.array(["", "", ""]),
    }
    np.savez(tmp_path / "t.npz", **arrays)
    frame = read_table(tmp_path / "t.npz")
    assert list(frame.columns) == ["x0", "x1", "table0", "table1", *list(arrays)[2:]]
    assert frame["x1"].tolist() == [1.0, 3.0, 5.0]
    assert frame["table0"].tolist() == [0, 2, 4]
    assert (frame["big"].tolist(), frame["big"].nunique()) == ([0, 1, 2], 3)  # pandas cannot count big-endian numbers
    assert frame["flag"].dtype == bool
    assert frame["text"].tolist() == ["a", "ü", ""]
    assert texts(frame["bytes"]).to_pylist() == ["a", "b", "ü"]
    assert dates(frame["date"])[0].tolist()[::2] == [18262 * 86_400, 18264 * 86_400]
    for name in ("half", "long"):
        assert numbers(frame[name])[0].tolist() == [0.5, 1, 2]


WRITERS: dict[str, Callable[[Path], object]] = {
    "t.csv": lambda path: write_csv(path, {name: values * 5 for name, values in CELLS.items()}),
    "t.parquet": lambda path: pq.write_table(pa.concat_tables([parquet_table()] * 5), path, row_group_size=4),
    "t.npz": lambda path: np.savez(
        path, x=np.asfortranarray(np.eye(15)), z=np.eye(15), y=np.array(["a", "b", "c"] * 5)
    ),
}


@pytest.mark.parametrize("rows", [1, 2, 7, 14, 15, 100])
@pytest.mark.parametrize("name", WRITERS)
def test_chunks_equal_the_whole_table(tmp_path, name, rows):
    path = tmp_path / name
    WRITERS[name](path)
    whole = read_table(path)
    chunks = list(iterate_table(path, rows=rows))
    assert all(0 < len(chunk) <= rows for chunk in chunks)
    assert [row for chunk in chunks for row in chunk.index] == list(range(15))
    assert all((chunk.dtypes == whole.dtypes).all() for chunk in chunks)
    for column in whole:
        assert [cell for chunk in chunks for cell in texts(chunk[column]).to_pylist()] == texts(
            whole[column]
        ).to_pylist()


def test_nothing_is_unpickled(tmp_path):
    """An array of objects would run code when loaded; it is refused."""

    class CodeInPickle:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    np.savez(tmp_path / "t.npz", x=np.array([CodeInPickle(), CodeInPickle()], dtype=object))
    with pytest.raises(DataError, match="Object arrays cannot be loaded"):
        read_table(tmp_path / "t.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [*WRITERS, "t.csv.gz"])
def test_random_damage(tmp_path, name):
    """A damaged file is read or refused in one sentence; there is no other error."""
    path = tmp_path / name
    if name == "t.csv.gz":
        path.write_bytes(gzip.compress(WRITERS["t.csv"](tmp_path / "t.csv").read_bytes()))
    else:
        WRITERS[name](path)
    sentences = []
    for altered in mutations(path.read_bytes(), 150, seed=0):
        path.write_bytes(altered)
        try:
            for chunk in iterate_table(path, rows=4):
                for column in chunk:
                    texts(chunk[column])
        except DataError as error:
            sentences.append(str(error))
    assert len(sentences) > 20
    for sentence in sentences:
        assert "\n" not in sentence
        assert sentence.endswith(".")
        assert "; " in sentence


def test_pandas_is_imported_when_a_table_is_read():
    code = "import sys, torchace.lab.data, torchace.models; print('pandas' in sys.modules, 'pyarrow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "t.csv", CELLS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needs pandas.*pip install 'torchace\[tool\]'"):
        read_table(path)
