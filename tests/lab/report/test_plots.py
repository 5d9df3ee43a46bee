from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.lab.report.figure_lines import draw, holds
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace._figures import FigureSpec
from torchace.lab.report import Results, read_results
from torchace.lab.report.plots import lambda_figures, lambda_positions


def _by_name(results: Results) -> dict[str, FigureSpec]:
    return {spec.name: spec for spec in lambda_figures(results)}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return read_results(write_fit(tmp_path_factory.mktemp("sweep") / "run", FitSpec(arm="sweep", arrays=False)))


def test_figures_of_a_sweep(sweep: Results) -> None:
    specs = _by_name(sweep)
    assert set(specs) == {"mse", "mae", "difference_mse", "spread"}
    assert specs["mse"].title == "Ensemble mean squared error against λ"
    for key in ("mse", "spread"):
        figure, scale = draw(specs[key]), sweep.metrics[key].scale
        values = [np.array(list(sweep.values(sweep.arms[0], d, key).values())) * scale for d in (0.0, 0.3, 0.9)]
        assert holds(figure, [0, 0.3, 0.9], [value.mean() for value in values])
        ends = stats.t.interval(0.95, 4, loc=values[2].mean(), scale=stats.sem(values[2]))
        assert holds(figure, [0.9, 0.9], ends)
        assert (figure.axes[0].get_ylim()[0] == 0) == (key != "mse")


def test_paired_differences(sweep: Results) -> None:
    spec = _by_name(sweep)["difference_mse"]
    assert spec.title == "Mean squared error: change against λ=0"
    values = {d: sweep.values(sweep.arms[0], d, "mse") for d in (0.0, 0.9)}
    difference = np.mean([values[0.9][seed] - values[0.0][seed] for seed in values[0.0]])
    assert holds(draw(spec), 0.9, 100 * difference / np.mean(list(values[0.0].values())))  # in percent of the loss


def test_lambda_values_too_close_are_evenly_spaced() -> None:
    assert lambda_positions([0, 0.5, 1]) == ({0: 0, 0.5: 0.5, 1: 1}, True)
    assert lambda_positions([0, 0.001, 0.5]) == ({0: 0.0, 0.001: 1.0, 0.5: 2.0}, False)
