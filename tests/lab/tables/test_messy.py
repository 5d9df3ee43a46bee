"""One messy file, as from spreadsheets, R and manual editing: the columns read, and the effect on scores."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.lab.cli.command_line import write_table
from torchace.lab.data.table_schema import Column, feature_numbers
from torchace.lab.tables.table import Table, TableSettings, load_table
from torchace.lab.training.members import MemberPlan, train_members

ROWS = 600
GAPS = ("?", "-", ".", "NA", "unknown", "")


def _clean() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    area, rate = draw.normal(100, 30, ROWS).round(2), draw.uniform(0, 20, ROWS).round(1)
    income = np.exp(draw.normal(10.5, 0.5, ROWS)).round(2)
    town, day = draw.choice(["Köln", "Zürich", "Málaga"], ROWS), draw.integers(0, 1000, ROWS)
    score = area / 30 + np.log(income) - rate / 5 + 1.5 * (town == "Köln") + day / 400 + draw.normal(0, 0.5, ROWS)
    dates = [datetime.date(2020, 1, 1) + datetime.timedelta(int(days)) for days in day]
    label = np.where(score > np.median(score), "ja", "nein")
    return pd.DataFrame({"fläche": area, "einkommen": income, "rate": rate, "datum": dates, "ort": town, "gut": label})


def _messy(clean: pd.DataFrame, path: Path) -> Path:
    """Semicolons, decimal commas, thousands, percent signs, German dates, six marks of gaps, R's row names, cp1252."""
    draw = np.random.default_rng(1)

    def number(value: float, sign: str = "") -> str:
        return f"{value:,.2f}".translate(str.maketrans(",.", ".,")) + sign

    frame = pd.DataFrame(
        {
            "kunden_id": [f"K-{10_000 + 7 * row}" for row in range(ROWS)],
            "fläche": [str(draw.choice(GAPS)) if draw.random() < 0.05 else number(v) for v in clean["fläche"]],
            "einkommen": [
                f"€ {number(value)}" if row % 2 else number(value) for row, value in enumerate(clean["einkommen"])
            ],
            "rate": [number(value, " %") for value in clean["rate"]],
            "datum": [f"{date:%d.%m.%Y}" for date in clean["datum"]],
            "ort": clean["ort"],
            "bemerkung": [f"Kunde {row} war sehr zufrieden" for row in range(ROWS)],
            "land": "DE",
            "leer": "",
            "ort_2": clean["ort"],
            "gut": clean["gut"],
        }
    )
    frame.loc[[17, 200], "einkommen"] = "k.A."
    lines = [";".join(frame.columns)]  # R's header has no name for the row names
    lines += [";".join([str(row + 1), *cells]) for row, cells in enumerate(frame.itertuples(index=False, name=None))]
    path.write_bytes("\r\n".join([*lines, ""]).encode("cp1252"))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, Table]:
    folder, clean = tmp_path_factory.mktemp("messy"), _clean()
    settings = TableSettings(("gut",))
    return load_table(write_table(clean, folder / "clean.csv"), settings), load_table(
        _messy(clean, folder / "messy.csv"), settings
    )


def test_columns_are_understood(tables: tuple[Table, Table]) -> None:
    schema = tables[1].schema
    assert schema.columns == (
        Column("fläche", "number", "1234,5"),
        Column("einkommen", "number", "1.234,5", lenient=True),
        Column("rate", "number", "1234,5"),
        Column("datum", "date", "%d.%m.%Y"),
        Column("ort", "category"),
    )
    assert dict(schema.dropped) == {
        "row names": "an identifier: 600 of 600 values differ",
        "kunden_id": "an identifier: 600 of 600 values differ",
        "bemerkung": "free text: 600 of 600 values differ",
        "land": "it is 'DE' in every row",
        "leer": "it is empty",
        "ort_2": "its values are those of 'ort'",
    }
    assert schema.notes == (
        "messy.csv is read as Windows-1252 text.",
        "Column 'einkommen' holds numbers; 2 of 600 values, such as 'k.A.', are not and count as missing.",
    )
    assert {column.name: column.kind for column in tables[1].description.columns}["leer"] == "dropped"


def test_every_value_that_is_there_is_the_same(tables: tuple[Table, Table]) -> None:
    clean, messy = tables
    assert (clean.rows["test"] == messy.rows["test"]).all()
    assert [column.name for column in clean.encoding.columns] == [column.name for column in messy.encoding.columns]
    for part in ("train", "test"):
        left, right = clean.raw[part], messy.raw[part]
        gaps = right.isnan()
        assert 0 < gaps.sum() < 0.07 * len(right)  # 5 of 6 in 5 % of the areas, and two incomes
        assert ((left == right) | gaps).all()


def test_messy_cells_cost_no_more_than_missing_values(tables: tuple[Table, Table]) -> None:
    """Cross entropy with and without the mess; a wrong column would cost 0.1 to 0.6 (see permutation importances)."""
    losses = []
    for table in tables:
        plan = MemberPlan("classification", num_members=4, hidden=(16,), epochs=30)
        trained = train_members(plan, table.train, 2, diversities=[0.0], seeds=[0], validation=table.validation)
        losses.append(float(trained.losses(table.test).mean()))
    assert losses[0] < 0.3
    assert losses[1] - losses[0] < 0.05


def test_a_later_file_is_read_in_the_same_way(tables: tuple[Table, Table]) -> None:
    column = tables[1].schema.columns[1]
    values = feature_numbers(pd.Series(["1.234", "€ 1.234,5", "k.A.", "7"], name="einkommen"), column)
    assert np.array_equal(values, [1234, 1234.5, np.nan, 7], equal_nan=True)
