from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy import stats

from tests.lab.report.fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.model_findings import about_model, kept_run, model_headline, wilson


def _texts(results: Results) -> dict[str, str]:
    assert results.model is not None
    return {finding.topic: finding.text for finding in about_model(results, results.model)}


def _headline(results: Results) -> str:
    assert results.model is not None
    return model_headline(results, results.model)


def _with_arrays(tmp_path: Path, **arrays: np.ndarray) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"]))
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    save_file({**load_file(path), **arrays}, path)
    return read_results(directory)


def _with_test(tmp_path: Path, **changes: Any) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False))
    path = directory / "runs" / "model-l0.3-s7.json"
    run = json.loads(path.read_text())
    run["metrics"]["test"].update(changes)
    path.write_text(json.dumps(run))
    return read_results(directory)


def test_a_regressor_in_words(regression_fit: Path, regression_results: Results) -> None:
    test = json.loads((regression_fit / "runs" / "model-l0.3-s7.json").read_text())["metrics"]["test"]
    texts = _texts(regression_results)
    share = f"{100 * test['r2']:.1f} %"
    assert _headline(regression_results) == (
        f"Explains {share} of the target's variance in 240 rows it never saw (5 members, λ=0.3)."
    )
    text = texts["On the test set"]
    assert text.startswith(f"RMSE {test['rmse']:.2f} (95 % interval for this many rows: ")
    assert f", MAE {test['mae']:.2f}, in the target's units; R² {test['r2']:.4f}." in text
    assert f"a root mean squared error of {np.sqrt(test['member_mse']):.2f} on average" in texts["Members"]
    assert f"spread by {test['spread']:.2f} around the mean" in texts["Members"]


def test_the_interval_of_an_error_covers_the_truth(tmp_path: Path) -> None:
    """Over 400 draws of 240 normal errors, the interval holds the true RMSE about 95 times in 100."""
    held = 0
    for draw in range(400):
        error = np.random.default_rng(draw).normal(0, 3.0, 240)
        squares = error**2
        half = 1.96 * squares.std(ddof=1) / np.sqrt(240)
        held += np.sqrt(squares.mean() - half) <= 3.0 <= np.sqrt(squares.mean() + half)
    assert 0.92 <= held / 400 <= 0.98  # two standard errors of 400 draws are 0.022
    results = _with_arrays(tmp_path, predicted=error, observed=np.zeros(240), spread=np.ones(240))
    mse = results.runs[0].metrics["test"]["mse"]
    ends = [np.sqrt(max(0, mse + side * half)) for side in (-1, 1)]
    assert f"{ends[0]:.2f} to {ends[1]:.2f}" in _texts(results)["On the test set"]


def test_a_classifier_in_words(classification_results: Results) -> None:
    run = kept_run(classification_results)
    assert run is not None
    test = run.metrics["test"]
    assert _headline(classification_results) == (
        f"Right on {100 * test['accuracy']:.1f} % of 240 rows it never saw (5 members, λ=0.2)."
    )
    low, high = stats.binomtest(round(240 * test["accuracy"]), 240).proportion_ci(method="wilson")
    text = _texts(classification_results)["On the test set"]
    assert f"(95 % interval for this many rows: {low:.4f} to {high:.4f})" in text
    assert "Uncertainty" not in _texts(classification_results)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (97, 100), (9120, 10000)])
def test_wilson_is_scipys(right: int, n: int) -> None:
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    # the normal quantile is given to seven digits
    assert wilson(right / n, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_a_model_no_better_than_the_mean(tmp_path: Path) -> None:
    headline = _headline(_with_test(tmp_path, r2=-0.25))
    assert headline == "No better on 240 rows it never saw than the mean of the target (R² −0.2500; 5 members, λ=0.3)."


def test_a_target_without_variance_has_no_r2(tmp_path: Path) -> None:
    results = _with_test(tmp_path, r2=None)
    assert _headline(results) == ""
    assert "R²" not in _texts(results)["On the test set"]


@pytest.mark.parametrize(
    ("slope", "scale", "told"),
    [
        (1.0, 1.0, "It is about as large as the error (1 times the error)."),
        (1.0, 4.0, "As an error bar it is too short (0.25 times the error)"),
        (1.0, 0.5, "As an error bar it is too long (2 times the error)."),
        (0.0, 1.0, "The spread does not tell where the errors are"),
    ],
)
def test_how_honest_the_spread_is(tmp_path: Path, slope: float, scale: float, told: str) -> None:
    spread = np.linspace(1, 3, 240)
    error = scale * (spread if slope else np.full(240, spread.mean())) * np.where(np.arange(240) % 2, 1, -1)
    results = _with_arrays(tmp_path, predicted=error, observed=np.zeros(240), spread=spread)
    assert results.model is not None
    [found] = [f for f in about_model(results, results.model) if f.topic == "Uncertainty"]
    assert told in found.text
    assert found.warning == (not slope)
    if slope:
        thirds = [np.sqrt(np.mean(part**2)) for part in np.array_split(error, 3)]
        assert f"the error is {thirds[2] / thirds[0]:.1f} times that" in found.text


@pytest.mark.parametrize("rows", [1, 8, 29])
def test_few_rows_say_nothing_of_uncertainty(tmp_path: Path, rows: int) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], test=rows)))
    assert set(_texts(results)) == {"On the test set", "Members"}
    assert "95 %" not in _texts(results)["On the test set"]


def test_perfect_predictions(tmp_path: Path) -> None:
    zero = np.zeros(240)
    results = _with_arrays(tmp_path, predicted=zero, observed=zero, spread=np.linspace(0, 1, 240))
    assert "Uncertainty" not in _texts(results)


def test_one_member_has_no_members_to_speak_of(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(arms=["model"], num_members=1)))
    assert list(_texts(results)) == ["On the test set"]
    assert "(1 member, λ=0.3)" in _headline(results)


def test_a_model_that_was_not_tested_or_not_trained(tmp_path: Path) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arms=["model"], arrays=False))
    path = directory / "runs" / "model-l0.3-s7.json"
    run = json.loads(path.read_text())
    run["metrics"]["test"] = None
    path.write_text(json.dumps(run))
    assert _texts(read_results(directory)) == {"Not tested": "There are no scores of the model on test data."}
    path.unlink()
    results = read_results(directory)
    assert _texts(results) == {"No model": "The training of the model did not finish."}
    assert (_headline(results), kept_run(results)) == ("", None)


def test_an_experiment_keeps_no_model(table1_results: Results) -> None:
    assert kept_run(table1_results) is None
