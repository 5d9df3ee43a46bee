from __future__ import annotations

import json
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
from torchace.lab.report.array_plots import array_figures, contested_table

Arrays = dict[str, np.ndarray]


def _by_name(results: Results) -> dict[str, FigureSpec]:
    return {spec.name: spec for spec in array_figures(results)}


def _change(tmp_path: Path, change: Callable[[Arrays], Arrays], **spec: str) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(**spec))  # type: ignore[arg-type]
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    save_file(change(load_file(path)), path)
    return read_results(directory)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return read_results(write_fit(tmp_path_factory.mktemp("sweep") / "run", FitSpec(arm="sweep")))


def test_pairs_of_members_at_two_lambda(sweep: Results) -> None:
    spec = _by_name(sweep)["matrix_0"]
    figure = draw(spec)
    for axes, diversity in zip(figure.axes, (0.0, 0.3), strict=False):
        matrix = sweep.arrays(sweep.finished(sweep.arms[0], diversity)[0])["residual_correlation"]
        off = ~np.eye(5, dtype=bool)
        assert [text.get_text() for text in axes.texts] == [f"{value:.2g}" for value in matrix[off]]
        np.testing.assert_allclose([cell.get_alpha() for cell in axes.patches], 0.05 + 0.65 * matrix[off])
        upper = matrix[np.triu_indices(5, 1)]
        assert f"λ={diversity:g}: {upper.min():.2f} to {upper.max():.2f}" in spec.alt
    assert spec.title == "Correlation of errors between members"


def test_a_correlation_may_be_undefined_or_negative(tmp_path: Path) -> None:
    def change(arrays: Arrays) -> Arrays:
        arrays["residual_correlation"][0, 1] = arrays["residual_correlation"][1, 0] = np.nan
        arrays["residual_correlation"][0, 2] = arrays["residual_correlation"][2, 0] = -0.4
        return arrays

    results = _change(tmp_path, change)
    assert results.damaged == ()
    spec = _by_name(results)["matrix_0"]
    assert min(cell.get_alpha() for cell in draw(spec).axes[0].patches) == 0.05  # the lowest
    assert "nan" not in spec.alt
    undefined = _change(tmp_path / "none", lambda a: {**a, "residual_correlation": np.full((5, 5), np.nan)})
    assert "matrix_0" not in _by_name(undefined)


@pytest.mark.parametrize("name", ["regression_fit", "classification_fit"])
def test_each_member_of_a_model(name: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(name)
    results = read_results(directory)
    [path] = (directory / "runs").glob("model-*.json")
    test = json.loads(path.read_text())["metrics"]["test"]
    figure = draw(_by_name(results)["alone"])
    if results.task.name == "regression":
        errors, ensemble = np.sqrt(test["members"]), test["rmse"]
    else:
        errors, ensemble = 100 * (1 - np.array(test["members"])), 100 * (1 - test["accuracy"])
    assert holds(figure, np.arange(5), errors)
    assert holds(figure, [0, 1], [ensemble] * 2)


def test_figures_that_runs_did_not_record(sweep: Results, tmp_path: Path) -> None:
    assert "alone" not in _by_name(sweep)
    single = read_results(write_fit(tmp_path / "one", FitSpec(num_members=1)))
    assert set(_by_name(single)) == {"predicted_0"}
    bare = read_results(write_fit(tmp_path / "bare", FitSpec(arrays=False)))
    assert set(_by_name(bare)) == {"alone"}


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
    median = np.median(np.abs(arrays["predicted"] - arrays["observed"]))
    assert f"off by less than {median:.2f}" in spec.alt
    assert spec.caption == "A dot is a test row; on the line, the prediction is exact. λ=0.3, seed 7."
    rows = {key: np.linspace(1, 2, 100) for key in ("predicted", "observed", "spread")}
    some = _by_name(_change(tmp_path, lambda arrays: {**arrays, **rows}))["predicted_0"]
    assert some.caption.endswith("100 of 240 test rows are drawn.")


@pytest.mark.parametrize("value", [0.0, -1e60])
def test_one_value_everywhere_can_be_drawn(tmp_path: Path, value: float) -> None:
    rows = np.full(40, value)
    results = _change(tmp_path, lambda a: {**a, "predicted": rows, "observed": rows, "spread": np.zeros(40)})
    draw(_by_name(results)["predicted_0"])
    assert "uncertainty_0" not in _by_name(results)  # members that do not differ


def test_error_against_spread(sweep: Results) -> None:
    spec = _by_name(sweep)["uncertainty_0"]
    figure = draw(spec)
    for diversity in (0.0, 0.3):
        runs = [sweep.arrays(run) for run in sweep.finished(sweep.arms[0], diversity)]
        # plainly: all rows as triples, sorted by spread, ten groups
        rows = sorted(
            (float(s), float(p - o))
            for run in runs
            for p, o, s in zip(run["predicted"], run["observed"], run["spread"], strict=True)
        )
        groups = [rows[i * 120 : (i + 1) * 120] for i in range(10)]
        x = [np.sqrt(np.mean([s**2 for s, _ in group])) for group in groups]
        y = [np.sqrt(np.mean([e**2 for _, e in group])) for group in groups]
        assert holds(figure, x, y)
    assert "in 10 groups" in spec.caption
    [ends] = [line for line in figure.axes[0].lines if line.get_label() == "error = spread"]
    assert list(ends.get_xdata()) == list(ends.get_ydata())


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
        counted = dict(part.rsplit(" × ", 1) for part in votes.split(", "))
        expected = {CLASSES[c]: str(n) for c, n in enumerate(np.bincount(arrays["disputed_votes"][i])) if n}
        assert counted == expected
    assert table.note.startswith("the model, λ=0.2, seed 7; most contested first.")
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
