from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.page import facts
from torchace.lab.report.tables import MOST_COLUMNS, ReportTable, column_table, failure_table


def _fit(tmp_path: Path, **schema: Any) -> Results:
    content = {"target": {"name": "y"}, "columns": [], "notes": [], **schema}
    return read_results(write_fit(tmp_path / "fit", FitSpec(arrays=False, schema=content)))


def _rows(table: ReportTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.sections[0].rows]


def test_facts(table1_results: Results) -> None:
    found = dict(facts(table1_results))
    assert found["Data"].startswith("mnist: 60,000 for training, 10,000 for testing; classes: 0, 1,")
    assert found["Seeds"] == "5 (0, 1, 2, 3, 4)"
    assert found["Hardware"] == "NVIDIA H200; two cores; 2 threads"
    assert found["Time"] == "9.8 s, started 2026-01-31 12:00"


def test_versions_and_machines_of_all_runs_are_named(table1_results: Results) -> None:
    other = {"versions": {"torchace": "0.2.0", "torch": "2.13.0"}, "device": "CPU", "cpu": "one core", "threads": 1}
    run, *runs = table1_results.runs
    found = dict(facts(replace(table1_results, runs=(run.model_copy(update=other), *runs))))
    assert found["Hardware"] == "NVIDIA H200; two cores; 2 threads; one core; 1 thread"
    assert found["Versions"] == "torchace 0.1.0, 0.2.0; torch 2.13.0; python 3.11.7"


def test_failures_and_damaged_files(failing: Path, table1_results: Results) -> None:
    table = failure_table(read_results(failing))
    assert table is not None
    rows = _rows(table)
    assert len(rows) == 9
    assert rows[0] == ["shared-l0.7-s0", "Step 1,204: The loss of member 3 is NaN."]
    assert rows[-1][0] == "runs/shared-l0.3-s0.safetensors"
    assert failure_table(table1_results) is None


def _columns(results: Results) -> ReportTable | None:
    return column_table(results.data.table, results.data.train) if results.data.table else None


def test_column_table_shows_how_columns_were_read(regression_results: Results) -> None:
    table = _columns(regression_results)
    assert table is not None
    assert table.caption == "Columns (24)"
    rows = {row[0]: row[1:] for row in _rows(table)}
    assert rows["living_area"] == ["number", "142.6 ± 51.3, 31 to 412", "0"]
    assert rows["lot_area"] == ["number", "10,517 ± 9981, 1300 to 215,245", "12 (1.2 %)"]
    assert rows["distance_to_station"] == ["number", "0.00042 ± 0.00031, 0 to 0.0031", "0"]
    assert rows["heating"] == ["category", "gas (512), district (301), oil (96), wood (51)", "40 (4.2 %)"]
    assert rows["pool"] == ["left out", "All values are missing.", "960 (100.0 %)"]
    assert any(row[1].endswith("H Street (2), and 204 more") for row in rows.values())


def test_formats_and_dates(tmp_path: Path) -> None:
    day = 86_400.0
    columns = [
        {"name": "price", "kind": "number", "format": "1.234,5", "mean": 2.0, "std": 1.0, "min": 0.5, "max": 4.0},
        {"name": "born", "kind": "date", "format": "%d.%m.%Y", "min": 0.0, "max": 366 * day},
        {"name": "seen", "kind": "date", "format": "ISO8601", "min": -day, "max": 90.0 * 60},
        {"name": "at", "kind": "date", "format": "%H:%M", "min": 60.0, "max": 90.0 * 60},
    ]
    table = _columns(_fit(tmp_path, columns=columns))
    assert table is not None
    assert [row[1:3] for row in _rows(table)] == [
        ["target: number", "–"],
        ["number like 1.234,5", "2 ± 1, 0.5 to 4"],
        ["date like %d.%m.%Y", "1970-01-01 to 1971-01-02"],
        ["date", "1969-12-31 to 1970-01-01 01:30"],
        ["date like %H:%M", "00:01 to 01:30"],
    ]


def test_the_target(classification_results: Results, table1_results: Results) -> None:
    table = _columns(classification_results)
    assert table is not None
    assert _rows(table)[0] == ["species", "target: classes", "setosa, versicolor, virginica", "0"]
    assert _columns(table1_results) is None


def test_columns_without_measures(tmp_path: Path) -> None:
    columns = [{"name": "a", "kind": "number"}, {"name": "b", "kind": "category"}, {"name": "c", "kind": "dropped"}]
    table = _columns(_fit(tmp_path, columns=columns))
    assert table is not None
    assert _rows(table) == [
        ["y", "target: number", "–", "0"],
        ["a", "number", "–", "0"],
        ["b", "category", "–", "0"],
        ["c", "left out", "no reason recorded", "0"],
    ]


def test_names_that_are_blank_or_long(tmp_path: Path) -> None:
    names = ["", " \n\t ", "<script>", "a" * 100 + "é" * 200, "line\nbreak"]
    table = _columns(_fit(tmp_path, columns=[{"name": name, "kind": "number"} for name in names]))
    assert table is not None
    found = [row[0] for row in _rows(table)[1:]]
    assert found[:3] == ["(blank)", "(blank)", "<script>"]
    assert (len(found[3]), found[3][:3], found[3][-2:]) == (80, "aaa", "éé")
    assert found[4] == "line break"


def test_long_tables_are_cut(tmp_path: Path) -> None:
    columns = [{"name": f"pixel{i}", "kind": "number"} for i in range(MOST_COLUMNS + 500)]
    table = _columns(_fit(tmp_path, columns=columns))
    assert table is not None
    assert table.caption == f"Columns ({MOST_COLUMNS + 500:,})"
    assert (len(_rows(table)), table.note) == (1 + MOST_COLUMNS, "500 more are not listed.")
