from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.lab.report.figure_lines import draw, holds
from tests.lab.report.synthetic_fits import FitSpec, validation_loss, write_fit
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
    assert set(specs) == {"rmse", "mae", "difference_mse", "spread"}
    assert specs["rmse"].title == "Ensemble root mean squared error against λ"
    for key in ("rmse", "spread"):
        figure, scale = draw(specs[key]), sweep.metrics[key].scale
        values = [np.array(list(sweep.values(sweep.arms[0], d, key).values())) * scale for d in (0.0, 0.3, 0.9)]
        assert holds(figure, [0, 0.3, 0.9], [value.mean() for value in values])
        ends = stats.t.interval(0.95, 4, loc=values[2].mean(), scale=stats.sem(values[2]))
        assert holds(figure, [0.9, 0.9], ends)
        assert (figure.axes[0].get_ylim()[0] == 0) == (key != "rmse")


def test_paired_differences(sweep: Results) -> None:
    spec = _by_name(sweep)["difference_mse"]
    assert spec.title == "Mean squared error: change against λ=0"
    values = {d: sweep.values(sweep.arms[0], d, "mse") for d in (0.0, 0.9)}
    difference = np.mean([values[0.9][seed] - values[0.0][seed] for seed in values[0.0]])
    assert holds(draw(spec), 0.9, 100 * difference / np.mean(list(values[0.0].values())))  # in percent of the loss


def test_the_papers_numbers_are_drawn(table1_results: Results) -> None:
    figure = draw(_by_name(table1_results)["cross_entropy"])
    # the six λ are evenly spaced
    assert holds(figure, range(6), [0.0669, 0.0663, 0.0664, 0.0658, 0.0649, 0.0659])


def test_training_curves(table1_results: Results) -> None:
    figure = draw(_by_name(table1_results)["training_0"])
    assert holds(figure, [1, 2], [0.4, 0.2])
    assert [line.get_label() for line in figure.axes[0].lines] == ["train, λ=0", "train, λ=0.5"]


def test_a_search_shows_every_seed_the_mean_and_the_choice(regression_results: Results) -> None:
    specs = _by_name(regression_results)
    assert set(specs) == {"search"}  # a model alone has nothing else on its λ axis
    assert regression_results.experiment.search is not None
    diversities = list(regression_results.experiment.search.scores)
    scores = {d: [validation_loss(FitSpec(), d, seed) for seed in (0, 1, 2)] for d in diversities}
    figure = draw(specs["search"])
    for seed in (0, 1, 2):
        assert holds(figure, diversities, [values[seed] for values in scores.values()])
    means = {d: np.mean(values) for d, values in scores.items()}
    assert holds(figure, diversities, list(means.values()))
    assert holds(figure, 0.3, means[0.3])  # the ring


@pytest.mark.parametrize("search", [{"chosen": 0.35}, {"candidates": [{"diversity": 0.2, "scores": {"0": 5.0}}]}, None])
def test_searches_without_the_choice_without_zero_or_none(tmp_path: Path, search: dict[str, object] | None) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arrays=False, search=search)))
    for spec in lambda_figures(results):
        draw(spec)
    assert bool(_by_name(results)) == (search is not None)


def test_lambda_values_too_close_are_evenly_spaced() -> None:
    assert lambda_positions([0, 0.5, 1]) == ({0: 0, 0.5: 0.5, 1: 1}, True)
    assert lambda_positions([0, 0.001, 0.5]) == ({0: 0.0, 0.001: 1.0, 0.5: 2.0}, False)
