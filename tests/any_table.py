"""Random tables of every kind, many of them unusual, as files."""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

ODD_NAMES = [
    *("", " ", " a", "a ", "=cmd|' /C calc'!A0", '"', "'", "a,b", "a;b", "a\tb", "a\nb", "a\r\nb"),
    *("[bold]", "[/red]", ":cat:", "prediction", "entropy", "λ", "名前", "🦤", "e\u0301", "é", "\u200b"),
    *("NaN", "1", "1.5", "index", "../x", "<b>", "{{x}}", "__index_level_0__", "x" * 300, "\x1b[31m"),
    *("-", "--out", "None", "lock", "y"),
]
NAMES = st.one_of(
    st.sampled_from(["a", "b", "c", "d", "e", "f", "g"]),
    st.sampled_from(ODD_NAMES),
    st.text(st.characters(codec="utf-8"), max_size=6),
)
MISSING = ["", "NA", "n/a", "null", "None", "NaN", " "]


@dataclass(frozen=True)
class AnyTable:
    """A file to be written, and what is said about it."""

    suffix: str
    names: tuple[str, ...]
    columns: tuple[tuple[Any, ...], ...]
    target: str
    task: str | None
    delimiter: str = ","

    def write(self, folder: Path) -> Path:
        path = folder / f"table{self.suffix}"
        if self.suffix == ".csv":
            with open(path, "w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, delimiter=self.delimiter)
                writer.writerow(self.names)
                writer.writerows(
                    [["" if cell is None else cell for cell in row] for row in zip(*self.columns, strict=True)]
                )
        elif self.suffix == ".parquet":
            pq.write_table(
                pa.Table.from_arrays([_arrow(column) for column in self.columns], names=list(self.names)), path
            )
        else:
            arrays = {name: _numpy(column) for name, column in zip(self.names, self.columns, strict=True)}
            np.savez(path, **arrays)
        return path


def _arrow(column: tuple[Any, ...]) -> pa.Array:
    if len({type(cell) for cell in column if cell is not None}) > 1:
        return pa.array([None if cell is None else str(cell) for cell in column], pa.string())
    return pa.array(column)


def _numpy(column: tuple[Any, ...]) -> np.ndarray:
    kinds = {type(cell) for cell in column}
    if len(kinds) == 1 and kinds <= {int, float, bool}:
        return np.array(column)
    return np.array(["" if cell is None else str(cell) for cell in column], dtype=str)


# A column: what a row of it is, from a generator and the row's number.
KINDS: dict[str, Any] = {
    "normal": lambda draw, row: float(draw.normal()),
    "large": lambda draw, row: 1e9 + int(draw.integers(1000)),
    "huge": lambda draw, row: float(draw.normal() * 1e300),
    "tiny": lambda draw, row: float(draw.normal() * 1e-300),
    "any float": lambda draw, row: float(np.frombuffer(draw.bytes(8))[0]),
    "whole": lambda draw, row: int(draw.integers(-5, 5)),
    "beyond int64": lambda draw, row: str(int(draw.integers(1, 9)) * 10**25),
    "two": lambda draw, row: int(draw.integers(2)),
    "counted": lambda draw, row: row,
    "constant": lambda draw, row: 7,
    "truth": lambda draw, row: bool(draw.integers(2)),
    "letters": lambda draw, row: str(draw.choice(list("uvw"))),
    "odd texts": lambda draw, row: str(
        draw.choice(["ä", " ä", "1", "01", "1.0", "true", "True", "a\nb", '"', "[x]", ":cat:"])
    ),
    "spelled": lambda draw, row: str(draw.choice(["1", "1.0", "01", "2", "2.00", "1e0"])),
    "words": lambda draw, row: f"word {draw.integers(10**6)}",
    "days": lambda draw, row: str(datetime.date(2020, 1, 1) + datetime.timedelta(int(draw.integers(400)))),
    "commas": lambda draw, row: f"{draw.integers(9)},{draw.integers(9)}",
    "nothing": lambda draw, row: None,
    "mostly numbers": lambda draw, row: (
        float(draw.normal()) if draw.random() < 0.95 else str(draw.choice(["x", "inf", "-"]))
    ),
    "missing words": lambda draw, row: str(draw.choice([*MISSING, "u", "v"])),
    "two values, rare": lambda draw, row: "rare" if row % 20 == 19 else "common",
}
# Kinds that a model is likely to be made from and of.
PLAIN = ["normal", "large", "whole", "two", "truth", "letters", "days", "odd texts", "missing words", "huge", "counted"]
TARGETS = ["normal", "large", "whole", "two", "truth", "letters", "odd texts", "huge", "tiny", "spelled"]
TARGETS += ["two values, rare"]


@st.composite
def any_table(draw: st.DrawFn) -> AnyTable:
    """A table of up to 60 rows; about half of them can be learned from."""
    plain = draw(st.integers(0, 2)) > 0
    rows = draw(st.integers(12, 60)) if plain else draw(st.integers(0, 60))
    kinds = draw(
        st.lists(st.sampled_from(PLAIN if plain else sorted(KINDS)), min_size=0 if not plain else 1, max_size=5)
    )
    kinds.append(draw(st.sampled_from(TARGETS if plain else sorted(KINDS))))
    usable = NAMES.filter(lambda name: name.strip() and not name.startswith("__"))
    unique = {"unique_by": str.strip} if plain else {}
    names = draw(st.lists(usable if plain else NAMES, min_size=len(kinds), max_size=len(kinds), **unique))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.9]), min_size=len(kinds), max_size=len(kinds)))
    if plain:
        gaps[-1] = 0.0
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = []
    for kind, gap in zip(kinds, gaps, strict=True):
        cells = [None if random.random() < gap else KINDS[kind](random, row) for row in range(rows)]
        columns.append(tuple(cells))
    order = draw(st.permutations(range(len(names))))
    target = names[-1] if plain or draw(st.integers(0, 9)) else draw(NAMES)
    return AnyTable(
        suffix=draw(st.sampled_from([".csv", ".csv", ".parquet", ".npz"])),
        names=tuple(names[i] for i in order),
        columns=tuple(columns[i] for i in order),
        target=target,
        task=draw(st.sampled_from([None, None, None, "classification", "regression"])),
        delimiter=draw(st.sampled_from(",;\t")),
    )
