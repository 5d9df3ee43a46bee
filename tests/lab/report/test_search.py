from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.report.fits import GRID, REFINED, FitSpec, write_fit
from torchace.lab.report import ReportError, Results, read_results

NAN = float("nan")


def test_reads_candidates_rounds_and_gain(regression_results: Results) -> None:
    search = regression_results.search
    assert search is not None
    assert (search.chosen, search.metric, search.split) == (0.3, "mse", "validation")
    assert list(search.scores) == sorted([*GRID, *REFINED])
    arm = regression_results.arms[0]
    assert search.scores[0.5] == regression_results.values(arm, 0.5, "mse", "validation")
    assert [search.round_of(d) for d in (0.0, 0.3, 0.2, 0.25)] == [1, 1, 2, None]
    assert search.gain is not None
    assert search.gain.beyond_noise
    assert search.gain.seeds == (100, 101, 102, 103, 104)


def test_an_experiment_has_no_search(table1_results: Results) -> None:
    assert table1_results.search is None


def test_failed_trainings_have_no_score(tmp_path: Path) -> None:
    candidates = [{"diversity": 0, "scores": {"0": 1.5, "1": None}}, {"diversity": 0.5, "scores": {"0": None}}]
    found = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["search"], search={"candidates": candidates})))
    assert found.search is not None
    assert found.search.scores == {0: {0: 1.5}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": None}, "Expected a finite number under `chosen`"),
        ({"chosen": "0.3"}, "Expected a finite number under `chosen`"),
        ({"chosen": NAN}, "Expected a finite number under `chosen`"),
        ({"metric": None}, "Expected a string under `metric`"),
        ({"metric": "cross_entropy"}, "under `metric` in experiment.json, but got 'cross_entropy'"),
        ({"split": "<b>"}, "Expected one of train, validation, test under `split`"),
        ({"rounds": [0, 1]}, "Expected a list of lists of numbers under `rounds`"),
        ({"rounds": [[NAN]]}, "Expected a list of lists of numbers under `rounds`"),
        ({"candidates": None}, "Expected a list of λ under `candidates`"),
        ({"candidates": [0.1]}, "Expected an object"),
        ({"candidates": [{"diversity": 0.1}]}, "Expected an object under `scores`"),
        ({"candidates": [{"scores": {"0": 1}}]}, "Expected a finite number under `diversity`"),
        ({"candidates": [{"diversity": 0.1, "scores": {"first": 1}}]}, "Expected seeds as the keys of `scores`"),
        ({"candidates": [{"diversity": 0.1, "scores": {"-1": 1}}]}, "Expected seeds as the keys of `scores`"),
        ({"candidates": [{"diversity": 0.1, "scores": {"9" * 5000: 1}}]}, "Expected a list of λ"),
        ({"candidates": [{"diversity": 0.1, "scores": {"0": NAN}}]}, "Expected a finite number under `0`"),
        ({"candidates": [{"diversity": 0.1, "scores": {"0": "1"}}]}, "Expected a finite number under `0`"),
        ({"gain": 0.1}, "Expected an object under `gain`"),
        ({"gain": {"mean": 0.1}}, "Expected true or false under `beyond_noise`"),
        ({"gain": {"mean": NAN, "beyond_noise": True}}, "Expected a finite number under `mean`"),
        ({"gain": {"mean": 1, "low": "0", "beyond_noise": True}}, "Expected a finite number under `low`"),
        ({"gain": {"mean": 1, "beyond_noise": True, "seeds": 5}}, "Expected a list of integers under `seeds`"),
        ({"gain": {"mean": 1, "beyond_noise": 1}}, "Expected true or false under `beyond_noise`"),
        ({"sentence": 7}, "Expected a string under `sentence`"),
    ],
)
def test_a_damaged_search_is_one_sentence(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["search"], search=change))
    with pytest.raises(ReportError) as caught:
        read_results(directory)
    assert message in str(caught.value)
    assert "experiment.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("search", [[], "auto", 3])
def test_a_search_that_is_no_object_is_one_sentence(tmp_path: Path, search: Any) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False, overrides={"search": search}))
    with pytest.raises(ReportError, match=r"Expected an object under `search` in experiment\.json"):
        read_results(directory)
