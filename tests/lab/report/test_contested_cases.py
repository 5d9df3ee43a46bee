from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.lab.report import synthetic
from tests.lab.report.fits import CLASSES, FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.contested_cases import disputed_sheet, disputed_table
from torchace.lab.report.plots import drawn_arms


def test_disputed_rows_of_the_kept_model(classification_fit: Path, classification_results: Results) -> None:
    table = disputed_table(classification_results, drawn_arms(classification_results))
    assert table is not None
    arrays = load_file(classification_fit / "runs" / "model-l0.2-s7.safetensors")
    rows = [[cell.text for cell in row] for row in table.sections[0].rows]
    assert len(rows) == 12
    for i, (row, label, votes) in enumerate(rows):
        assert row == f"{arrays['disputed_row'][i]:,}"
        assert label == CLASSES[arrays["disputed_target"][i]]
        counted = dict(part.rsplit(" × ", 1) for part in votes.split(", "))
        expected = {CLASSES[c]: str(n) for c, n in enumerate(np.bincount(arrays["disputed_votes"][i])) if n}
        assert counted == expected
    assert table.note.startswith("the model that was kept, λ=0.2, seed 7; most disputed first.")
    assert "counted from 1 in the file" in table.note


def test_rows_of_the_test_part_where_the_file_is_not_known(tmp_path: Path) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(task="classification", arms=["model"]))
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    arrays = load_file(path)
    del arrays["disputed_row"]
    save_file(arrays, path)
    results = read_results(directory)
    table = disputed_table(results, drawn_arms(results))
    assert table is not None
    assert table.columns[0].label == "Test row"
    assert [row[0].text for row in table.sections[0].rows] == [f"{i:,}" for i in arrays["disputed_index"][:12]]


def test_images_are_shown_not_tabled(table1_results: Results, regression_results: Results) -> None:
    assert disputed_table(table1_results, drawn_arms(table1_results)) is None
    assert disputed_sheet(table1_results, drawn_arms(table1_results)) is not None
    assert disputed_table(regression_results, drawn_arms(regression_results)) is None


def test_an_experiment_on_tables_has_its_rows_too(tmp_path: Path) -> None:
    results = read_results(synthetic.small(tmp_path / "run", seeds=[3]))
    assert disputed_sheet(results, drawn_arms(results)) is None
    assert disputed_table(results, drawn_arms(results)) is not None


def test_a_class_without_a_name_is_its_number(tmp_path: Path) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(task="classification", arms=["model"]))
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    arrays = load_file(path)
    arrays["disputed_target"][0] = 99
    save_file(arrays, path)
    results = read_results(directory)
    table = disputed_table(results, drawn_arms(results))
    assert table is not None
    assert table.sections[0].rows[0][1].text == "99"
