from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lab.report import synthetic_sweeps
from tests.lab.report.figure_lines import draw, holds
from tests.lab.report.synthetic_fits import CLASSES, FitSpec, write_fit
from torchace._figures import FigureSpec
from torchace.lab.report import Results, read_results
from torchace.lab.report.plots import array_figures, contested_table

Arrays = dict[str, np.ndarray]


def _by_name(results: Results) -> dict[str, FigureSpec]:
    return {spec.name: spec for spec in array_figures(results)}


def _change(tmp_path: Path, change: Callable[[Arrays], Arrays], **spec: str) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(**spec))  # type: ignore[arg-type]
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    save_file(change(load_file(path)), path)
    return read_results(directory)


def test_figures_that_runs_did_not_record(tmp_path: Path) -> None:
    single = read_results(write_fit(tmp_path / "one", FitSpec(num_members=1)))
    assert set(_by_name(single)) == {"predicted_0"}
    bare = read_results(write_fit(tmp_path / "bare", FitSpec(arrays=False)))
    assert _by_name(bare) == {}


def test_reliability_adds_the_samples_of_all_runs(table1_results: Results) -> None:
    figure = draw(_by_name(table1_results)["reliability_0"])
    for diversity in (0.0, 0.5):
        runs = table1_results.finished(table1_results.arms[0], diversity)
        keys = ("reliability_count", "reliability_confidence", "reliability_correct")
        count, confidence, correct = (sum(table1_results.arrays(run)[key] for run in runs) for key in keys)
        filled = count > 0
        assert filled.sum() == 13
        assert holds(figure, confidence[filled] / count[filled], correct[filled] / count[filled])


def test_predicted_and_observed_values(regression_fit: Path, regression_results: Results, tmp_path: Path) -> None:
    spec = _by_name(regression_results)["predicted_0"]
    arrays = load_file(regression_fit / "runs" / "model-l0.3-s7.safetensors")
    figure = draw(spec)
    assert holds(figure, arrays["observed"], arrays["predicted"])
    low, high = figure.axes[0].get_xlim()
    assert low < min(arrays["observed"].min(), arrays["predicted"].min())
    assert high > max(arrays["observed"].max(), arrays["predicted"].max())
    assert figure.axes[0].get_ylim() == (low, high)
    assert holds(figure, [low, high], [low, high])  # the line of right predictions
    assert spec.caption == "A dot is a test row; on the line, the prediction is exact. λ=0.3, seed 7."
    rows = {key: np.linspace(1, 2, 100) for key in ("predicted", "observed", "spread")}
    some = _by_name(_change(tmp_path, lambda arrays: {**arrays, **rows}))["predicted_0"]
    assert some.caption.endswith("100 of 240 test rows are drawn.")


@pytest.mark.parametrize("value", [0.0, -1e60])
def test_one_value_everywhere_can_be_drawn(tmp_path: Path, value: float) -> None:
    rows = np.full(40, value)
    results = _change(tmp_path, lambda a: {**a, "predicted": rows, "observed": rows, "spread": np.zeros(40)})
    draw(_by_name(results)["predicted_0"])


def test_contested_rows_of_a_model(classification_fit: Path, classification_results: Results) -> None:
    table = contested_table(classification_results)
    assert table is not None
    arrays = load_file(classification_fit / "runs" / "model-l0.2-s7.safetensors")
    rows = [[cell.text for cell in row] for row in table.sections[0].rows]
    contested = [i for i, votes in enumerate(arrays["disputed_votes"]) if len(set(votes)) > 1]
    assert len(rows) == min(12, len(contested)) < len(arrays["disputed_votes"])
    for i, (row, label, votes) in zip(contested, rows, strict=False):
        assert row == f"{arrays['disputed_row'][i]:,}"
        assert label == CLASSES[arrays["disputed_target"][i]]
        counted = dict(part.removesuffix(")").rsplit(" (", 1) for part in votes.split(", "))
        expected = {CLASSES[c]: str(n) for c, n in enumerate(np.bincount(arrays["disputed_votes"][i])) if n}
        assert counted == expected
    assert table.note.startswith("Most contested first.")
    assert "counted from 1 in the file" in table.note


def test_contested_rows_without_file_rows_or_class_names(tmp_path: Path) -> None:
    def change(arrays: Arrays) -> Arrays:
        del arrays["disputed_row"]
        arrays["disputed_target"][0] = 99
        return arrays

    results = _change(tmp_path, change, task="classification")
    table = contested_table(results)
    assert table is not None
    assert table.columns[0].label == "Test case"
    arrays = results.arrays(results.runs[0])
    contested = [len(set(votes)) > 1 for votes in arrays["disputed_votes"]]
    assert [row[0].text for row in table.sections[0].rows] == [
        f"{i:,}" for i in arrays["disputed_index"][contested][:12]
    ]
    assert table.sections[0].rows[0][1].text == "99"


def test_contested_cases_have_their_images(
    table1_results: Results, regression_results: Results, tmp_path: Path
) -> None:
    assert contested_table(regression_results) is None
    rows = read_results(synthetic_sweeps.small(tmp_path / "run", seeds=[3]))
    for results, is_image in ((table1_results, True), (rows, False)):
        table = contested_table(results)
        assert table is not None
        assert all(bool(row[0].image) == is_image for row in table.sections[0].rows)
