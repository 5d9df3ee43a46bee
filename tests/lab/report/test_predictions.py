from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lab.report.artists import drawn, holds
from tests.lab.report.fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.arrays import Predicted, honesty, predicted_rows
from torchace.lab.report.predictions import predicted_figure, uncertainty_figure
from torchace.lab.report.results import Arm


def _arm(results: Results, role: str) -> Arm:
    return next(arm for arm in results.arms if arm.role == role)


def _changed(tmp_path: Path, **arrays: np.ndarray) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"]))
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    save_file({**load_file(path), **arrays}, path)
    return read_results(directory)


def test_every_row_is_drawn_beside_the_truth(regression_fit: Path, regression_results: Results) -> None:
    sketch = predicted_figure(regression_results, _arm(regression_results, "model"))
    assert sketch is not None
    arrays = load_file(regression_fit / "runs" / "model-l0.3-s7.safetensors")
    figure = drawn(sketch)
    assert holds(figure, arrays["observed"], arrays["predicted"])
    low, high = figure.axes[0].get_xlim()
    assert low < min(arrays["observed"].min(), arrays["predicted"].min())
    assert high > max(arrays["observed"].max(), arrays["predicted"].max())
    assert figure.axes[0].get_ylim() == (low, high)
    assert holds(figure, [low, high], [low, high])  # the line of right predictions
    median = np.median(np.abs(arrays["predicted"] - arrays["observed"]))
    assert f"off by less than {median:.2f}" in sketch.alt
    assert sketch.caption == "A dot is a test row; on the line, the prediction is right. λ=0.3, seed 7."


def test_a_sample_of_the_rows_says_so(tmp_path: Path) -> None:
    rows = {key: np.linspace(1, 2, 100) for key in ("predicted", "observed", "spread")}
    results = _changed(tmp_path, **rows)
    sketch = predicted_figure(results, _arm(results, "model"))
    assert sketch is not None
    assert sketch.caption.endswith("100 of 240 test rows are drawn.")


@pytest.mark.parametrize("value", [0.0, 5.0, -1e60])
def test_one_value_everywhere_can_be_drawn(tmp_path: Path, value: float) -> None:
    rows = np.full(40, value)
    results = _changed(tmp_path, predicted=rows, observed=rows, spread=np.zeros(40))
    arm = _arm(results, "model")
    sketch = predicted_figure(results, arm)
    assert sketch is not None
    drawn(sketch)
    assert uncertainty_figure(results, arm) is None  # members that do not differ


def test_the_error_where_members_differ(regression_fit: Path, regression_results: Results) -> None:
    sketch = uncertainty_figure(regression_results, _arm(regression_results, "check"))
    assert sketch is not None
    figure = drawn(sketch)
    for diversity in ("0", "0.3"):
        runs = [
            load_file(regression_fit / "runs" / f"check-l{diversity}-s{seed}.safetensors") for seed in range(100, 105)
        ]
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
    assert "in 10 groups" in sketch.caption
    [ends] = [line for line in figure.axes[0].lines if line.get_label() == "error = spread"]
    assert list(ends.get_xdata()) == list(ends.get_ydata())


def test_groups_have_ten_rows_or_there_are_none() -> None:
    def rows(n: int) -> Predicted:
        return Predicted(np.arange(n) * 1.0, np.zeros(n), 1.0 + np.arange(n))

    assert honesty(rows(19)) is None
    found = honesty(rows(35))
    assert found is not None
    assert len(found.spread) == 3
    assert (np.diff(found.spread) > 0).all()
    many = honesty(rows(1000))
    assert many is not None
    assert len(many.error) == 10


def test_rows_of_several_runs_are_taken_together() -> None:
    run = {key: np.array([1.0, 2.0], dtype=np.float32) for key in ("predicted", "observed", "spread")}
    found = predicted_rows([run, {}, run])
    assert found is not None
    assert found.observed.tolist() == [1, 2, 1, 2]
    assert found.observed.dtype == np.float64
    assert predicted_rows([{}]) is None
    assert predicted_rows([{key: np.zeros(0) for key in run}]) is None


def test_runs_without_arrays_have_no_figures(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False)))
    assert predicted_figure(results, _arm(results, "model")) is None
    assert uncertainty_figure(results, _arm(results, "model")) is None
