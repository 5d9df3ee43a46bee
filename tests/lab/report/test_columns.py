from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.lab.report.fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.columns import MOST, all_classes, folded, schema_tables, target_facts
from torchace.lab.report.tables import Table


def _fit(tmp_path: Path, **schema: Any) -> Results:
    content = {"target": {"name": "y"}, "columns": [], "notes": [], **schema}
    return read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False, schema=content)))


def _rows(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.sections[0].rows]


def test_a_table_for_each_kind_of_column(regression_results: Results) -> None:
    numbers, categories, dropped = schema_tables(regression_results)
    assert [table.caption for table in (numbers, categories, dropped)] == [
        "Numbers (19)",
        "Categories (3)",
        "Left out (2)",
    ]
    assert _rows(numbers)[:5] == [
        ["living_area", "142.6 ± 51.3", "31 to 412", "0"],
        ["lot_area", "10,517 ± 9981", "1300 to 215,245", "12 (1.2 %)"],
        ["year_built", "1971 ± 30.2", "1872 to 2010", "3 (0.3 %)"],
        ["distance_to_station", "0.00042 ± 0.00031", "0 to 0.0031", "0"],
        ["income", "5.1×10⁷ ± 2.2×10⁷", "810,000 to 3.9×10⁸", "0"],
    ]
    assert _rows(categories)[0] == ["heating", "4", "gas (512), district (301), oil (96), wood (51)", "40 (4.2 %)"]
    assert _rows(categories)[1][2].endswith("H Street (2), and 204 more")
    assert _rows(dropped) == [
        ["id", "Every row has another value.", "0"],
        ["pool", "All values are missing.", "960 (100.0 %)"],
    ]


def test_the_target_in_words(regression_results: Results, classification_results: Results) -> None:
    assert target_facts(regression_results) == [
        ("Target", "price, a number: 301.2 ± 175.9 in the training part, 12.5 to 1190"),
        ("Predicted from", "19 numbers and 3 categories; 2 columns left out"),
        ("Rows", "960 to train, 240 to validate, 240 to test"),
    ]
    facts = dict(target_facts(classification_results))
    assert facts["Target"] == "species, one of 3 classes: setosa, versicolor, virginica"
    assert facts["Predicted from"] == "2 numbers and 1 category"


def test_an_experiment_has_no_schema_to_show(table1_results: Results) -> None:
    assert schema_tables(table1_results) == []
    assert target_facts(table1_results) == []
    assert all_classes(table1_results) == ""


def test_what_was_not_measured(tmp_path: Path) -> None:
    columns = [{"name": "a", "kind": "number"}, {"name": "b", "kind": "category"}, {"name": "c", "kind": "dropped"}]
    numbers, categories, dropped = schema_tables(_fit(tmp_path, columns=columns))
    assert _rows(numbers) == [["a", "–", "–", "0"]]
    assert _rows(categories) == [["b", "0", "–", "0"]]
    assert _rows(dropped) == [["c", "–", "0"]]
    assert dict(target_facts(_fit(tmp_path / "none")))["Predicted from"] == "nothing"


def test_names_that_are_blank_long_or_hostile(tmp_path: Path) -> None:
    names = ["", " \n\t ", "<script>", "a" * 100 + "é" * 200, "line\nbreak"]
    [table] = schema_tables(_fit(tmp_path, columns=[{"name": name, "kind": "number"} for name in names]))
    found = [row[0] for row in _rows(table)]
    assert found[:3] == ["(blank)", "(blank)", "<script>"]
    assert len(found[3]) == 80
    assert found[3].startswith("aaa")
    assert found[3].endswith("éé")
    assert found[4] == "line break"


def test_long_tables_are_folded(tmp_path: Path) -> None:
    columns = [{"name": f"pixel{i}", "kind": "number"} for i in range(MOST + 500)]
    [table] = schema_tables(_fit(tmp_path, columns=columns))
    assert table.caption == f"Numbers ({MOST + 500:,})"
    head, rest = folded(table)
    assert rest is not None
    assert _rows(head) + _rows(rest) == _rows(table)
    assert (len(_rows(head)), len(_rows(table))) == (12, MOST)
    assert (head.note, rest.note) == ("", "500 more are not listed.")


def test_a_fold_that_would_hide_next_to_nothing_is_none(tmp_path: Path) -> None:
    for number, shown in ((15, 15), (16, 12)):
        columns = [{"name": str(i), "kind": "number"} for i in range(number)]
        [table] = schema_tables(_fit(tmp_path / str(number), columns=columns))
        assert len(_rows(folded(table)[0])) == shown


def test_many_classes_are_named_once_in_full(tmp_path: Path) -> None:
    classes = [f"class {i}" for i in range(MOST + 1)]
    results = _fit(tmp_path, target={"name": "y", "classes": classes})
    text = dict(target_facts(results))["Target"]
    assert text.startswith("y, one of 1,001 classes: class 0, class 1,")
    assert text.endswith("class 9, …")
    listed = all_classes(results)
    assert listed.split(", ")[:-1] == classes[:MOST]
    assert listed.endswith(", and 1 more")
