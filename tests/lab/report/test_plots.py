from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.lab.report.artists import drawn, holds
from tests.lab.report.fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.drawing import Sketch
from torchace.lab.report.plots import plots


def _by_name(results: Results) -> dict[str, Sketch]:
    return {sketch.name: sketch for sketch in plots(results)}


@pytest.mark.parametrize("key", ["rmse", "mae", "spread", "ambiguity", "averaged"])
def test_a_check_is_drawn_seed_by_seed(regression_fit: Path, regression_results: Results, key: str) -> None:
    def value(diversity: str, seed: int) -> float:
        run = json.loads((regression_fit / "runs" / f"check-l{diversity}-s{seed}.json").read_text())
        test = run["metrics"]["test"]
        return 100 * test["ambiguity"] / test["member_mse"] if key == "averaged" else test[key]

    figure = drawn(_by_name(regression_results)[key])
    pairs = np.array([[value(diversity, seed) for diversity in ("0", "0.3")] for seed in range(100, 105)])
    for pair in pairs:
        assert holds(figure, [0, 0.3], pair)
    assert holds(figure, [0, 0.3], pairs.mean(0))
    assert (figure.axes[0].get_ylim()[0] == 0) == (key in ("spread", "ambiguity", "averaged"))


def test_members_of_regressors_are_drawn_by_the_root_of_their_error(
    regression_fit: Path, regression_results: Results
) -> None:
    sketch = _by_name(regression_results)["members_1"]
    tests = [
        json.loads((regression_fit / "runs" / f"check-l0.3-s{seed}.json").read_text())["metrics"]["test"]
        for seed in range(100, 105)
    ]
    together = np.mean([np.sqrt(test["mse"]) for test in tests])
    alone = np.mean([np.sqrt(test["member_mse"]) for test in tests])
    assert f"at λ=0.3 {together:.2f} against {alone:.2f}" in sketch.alt
    dots = np.sqrt([member for test in tests for member in test["members"]])
    assert any(np.array_equal(line.get_ydata(), dots) for line in drawn(sketch).axes[0].lines)


def test_a_regressions_sweep_has_its_paired_differences(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "run", FitSpec(arms=["sweep"], arrays=False)))
    sketches = _by_name(results)
    assert {"rmse", "mae", "difference_mse", "difference_mae", "spread", "ambiguity", "averaged", "members_0"} == set(
        sketches
    )
    assert sketches["difference_mse"].title == "Mean squared error: paired difference to λ=0"
    assert sketches["rmse"].title == "Ensemble root mean squared error against λ"
    values = {d: results.values(results.arms[0], d, "mse") for d in (0.0, 0.9)}
    difference = np.mean([values[0.9][seed] - values[0.0][seed] for seed in values[0.0]])
    assert holds(drawn(sketches["difference_mse"]), 0.9, difference)


def test_one_lambda_of_a_fit_has_nothing_on_its_axis(tmp_path: Path) -> None:
    for arms in (["model"], ["check", "model"]):
        spec = FitSpec(arms=arms, arrays=False, chosen=0.0)
        assert plots(read_results(write_fit(tmp_path / arms[0], spec))) == []
