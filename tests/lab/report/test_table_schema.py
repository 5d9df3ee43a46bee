from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.report.fits import SCHEMAS, FitSpec, write_fit
from torchace.lab.report import ReportError, Results, read_results


def test_reads_target_columns_and_notes(regression_results: Results) -> None:
    schema = regression_results.data.schema
    assert schema is not None
    assert (schema.target.name, schema.target.classes, schema.target.numbers.mean) == ("price", (), 301.2)
    assert [len(schema.of(kind)) for kind in ("number", "category", "dropped")] == [19, 3, 2]
    lot = schema.columns[1]
    assert (lot.name, lot.missing, lot.numbers.low, lot.numbers.high) == ("lot_area", 12, 1300, 215245)
    street = schema.of("category")[1]
    assert street.categories[0] == ("A Street", 9)
    assert (len(street.categories), street.num_categories) == (8, 212)
    assert schema.of("dropped")[0].why == "Every row has another value."
    assert len(schema.notes) == 2


def test_a_table_may_have_no_schema(tmp_path: Path) -> None:
    data = {"name": "x.npz", "train": 5, "test": 240, "schema": None}
    assert (
        read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], overrides={"data": data}))).data.schema is None
    )


def test_what_may_be_left_out(tmp_path: Path) -> None:
    columns = [{"name": "a", "kind": "number"}, {"name": "b", "kind": "category"}]
    schema = {"target": {"name": "y"}, "columns": columns, "notes": ["", " \n"]}
    found = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], schema=schema))).data.schema
    assert found is not None
    assert found.columns[0].numbers.mean is None
    assert (found.columns[1].categories, found.columns[1].num_categories, found.notes) == ((), 0, ())


NAN = float("nan")


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ((), [], "Expected an object under `schema`"),
        ((), "a, b", "Expected an object under `schema`"),
        (("target",), None, "Expected an object under `target`"),
        (("target",), "price", "Expected an object under `target`"),
        (("target", "name"), None, "Expected a string under `name`"),
        (("target", "name"), 3, "Expected a string under `name`"),
        (("target", "classes"), ["a", 1], "Expected a list of names under `classes`"),
        (("target", "mean"), NAN, "Expected a finite number under `mean`"),
        (("columns",), None, "Expected a list of columns under `columns`"),
        (("columns",), {}, "Expected a list of columns under `columns`"),
        (("columns", 0), "living_area", "Expected an object"),
        (("columns", 0, "name"), None, "Expected a string under `name`"),
        (("columns", 0, "kind"), None, "Expected a string under `kind`"),
        (("columns", 0, "kind"), "text", "Expected the kind number, category, dropped of a column"),
        (("columns", 0, "missing"), -1, "Expected an integer of 0 or more under `missing`"),
        (("columns", 0, "missing"), 2.5, "Expected an integer of 0 or more under `missing`"),
        (("columns", 0, "missing"), 10**30, "Expected an integer of 0 or more under `missing`"),
        (("columns", 0, "mean"), "high", "Expected a finite number under `mean`"),
        (("columns", 0, "std"), NAN, "Expected a finite number under `std`"),
        (("columns", 0, "max"), float("inf"), "Expected a finite number under `max`"),
        (("columns", 0, "min"), -(10**400), "Expected a finite number under `min`"),
        (("columns", 19, "categories"), "gas", "Expected a list of labels with their counts"),
        (("columns", 19, "categories"), [["gas"]], "Expected a list of labels with their counts"),
        (("columns", 19, "categories"), [["gas", -2]], "Expected a list of labels with their counts"),
        (("columns", 19, "categories"), [[3, 2]], "Expected a list of labels with their counts"),
        (("columns", 19, "num_categories"), "many", "Expected an integer of 0 or more under `num_categories`"),
        (("columns", 22, "why"), ["no"], "Expected a string under `why`"),
        (("notes",), "none", "Expected a list of sentences under `notes`"),
        (("notes",), [None], "Expected a list of sentences under `notes`"),
    ],
)
def test_a_damaged_schema_is_one_sentence(tmp_path: Path, where: tuple[Any, ...], change: Any, message: str) -> None:
    schema = json.loads(json.dumps({"schema": SCHEMAS["regression"]}))
    inner = schema
    path = ("schema", *where)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False, schema=schema["schema"]))
    with pytest.raises(ReportError) as caught:
        read_results(directory)
    assert message in str(caught.value)
    assert "experiment.json" in str(caught.value)
    assert "\n" not in str(caught.value)
