from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lab.report.artists import drawn, holds
from tests.lab.report.fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.members import alone_figure, matrix_figure
from torchace.lab.report.results import Arm


def _arm(results: Results, role: str) -> Arm:
    return next(arm for arm in results.arms if arm.role == role)


def test_errors_of_pairs_at_both_lambda(regression_fit: Path, regression_results: Results) -> None:
    sketch = matrix_figure(regression_results, _arm(regression_results, "check"))
    assert sketch is not None
    figure = drawn(sketch)
    for axes, diversity in zip(figure.axes, ("0", "0.3"), strict=False):
        matrix = load_file(regression_fit / "runs" / f"check-l{diversity}-s100.safetensors")["residual_correlation"]
        shown = np.asarray(axes.images[0].get_array().filled(np.nan))
        off = ~np.eye(5, dtype=bool)
        np.testing.assert_allclose(shown[off], matrix[off])
        assert np.isnan(shown[~off]).all()
        assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (0, 1)
        upper = matrix[np.triu_indices(5, 1)]
        assert f"λ={diversity}: from {upper.min():.2f} to {upper.max():.2f}" in sketch.alt
    assert sketch.title == "Who errs with whom: fresh seeds"


@pytest.mark.parametrize("entry", [np.nan, -0.4])
def test_a_correlation_may_be_undefined_or_negative(tmp_path: Path, entry: float) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"]))
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    arrays = load_file(path)
    arrays["residual_correlation"][0, 1] = arrays["residual_correlation"][1, 0] = entry
    save_file(arrays, path)
    results = read_results(directory)
    assert results.damaged == ()
    sketch = matrix_figure(results, _arm(results, "model"))
    assert sketch is not None
    image = drawn(sketch).axes[0].images[0]
    assert image.norm.vmin == min(0, entry if entry == entry else 0)
    assert "nan" not in sketch.alt


def test_no_defined_pair_no_figure(tmp_path: Path) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"]))
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    save_file({**load_file(path), "residual_correlation": np.full((5, 5), np.nan)}, path)
    results = read_results(directory)
    assert matrix_figure(results, _arm(results, "model")) is None


@pytest.mark.parametrize("name", ["regression_fit", "classification_fit"])
def test_each_member_beside_the_ensemble(name: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(name)
    results = read_results(directory)
    sketch = alone_figure(results, _arm(results, "model"))
    assert sketch is not None
    [path] = (directory / "runs").glob("model-*.json")
    test = json.loads(path.read_text())["metrics"]["test"]
    figure = drawn(sketch)
    if results.task.name == "regression":
        errors, together = np.sqrt(test["members"]), test["rmse"]
    else:
        errors, together = 100 * (1 - np.array(test["members"])), 100 * (1 - test["accuracy"])
    assert holds(figure, np.arange(5), errors)
    assert holds(figure, [0, 1], [together] * 2)


def test_only_a_kept_model_with_several_members_is_drawn(regression_results: Results, tmp_path: Path) -> None:
    assert alone_figure(regression_results, _arm(regression_results, "check")) is None
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], num_members=1)))
    assert alone_figure(results, _arm(results, "model")) is None
    assert matrix_figure(results, _arm(results, "model")) is None
