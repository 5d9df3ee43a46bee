from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy import stats

from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.findings import Finding, remarks
from torchace.lab.report.model_findings import model_findings, model_headline, wilson_interval


def _findings(results: Results) -> list[Finding]:
    assert results.model is not None
    return model_findings(results, results.model)


def _texts(results: Results) -> dict[str, str]:
    return {finding.topic: finding.text for finding in _findings(results)}


def _headline(results: Results) -> str:
    found = model_headline(results)
    return f"{found.sentence} {found.detail}" if found else ""


def _with_arrays(tmp_path: Path, **arrays: np.ndarray) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec())
    path = directory / "runs" / "model-l0.3-s7.safetensors"
    save_file({**load_file(path), **arrays}, path)
    return read_results(directory)


def _with_test(tmp_path: Path, **changes: Any) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(arrays=False))
    path = directory / "runs" / "model-l0.3-s7.json"
    run = json.loads(path.read_text())
    run["metrics"]["test"].update(changes)
    path.write_text(json.dumps(run))
    return read_results(directory)


def test_a_regressor(regression_results: Results) -> None:
    [run] = regression_results.runs
    test, texts = regression_results.scores(run), _texts(regression_results)
    assert _headline(regression_results) == (
        f"The model explains {100 * test['r2']:.1f} % of the target's variance in 240 test rows. "
        "The ensemble has 5 members, trained with λ=0.3."
    )
    assert texts["On the test set"].startswith(f"RMSE is {test['rmse']:.2f} (95 % interval ")
    assert texts["On the test set"].endswith(
        f", in the target's units. MAE is {test['mae']:.2f}. R² is {test['r2']:.4f}."
    )
    assert f"root mean squared error is {np.sqrt(test['member_mse']):.2f} on average" in texts["Members"]
    assert f"a spread of {test['spread']:.2f}." in texts["Members"]
    assert remarks(regression_results)[1].text.startswith("The model was trained once")


def test_the_interval_of_the_rmse(tmp_path: Path) -> None:
    error = np.random.default_rng(0).normal(0, 3.0, 240)
    results = _with_arrays(tmp_path, predicted=error, observed=np.zeros(240), spread=np.ones(240))
    low, high = stats.t.interval(0.95, 239, scale=stats.sem(error**2))
    mse = results.scores(results.runs[0])["mse"]
    ends = [np.sqrt(max(0, mse + end)) for end in (low, high)]
    assert f"{ends[0]:.2f} to {ends[1]:.2f}" in _texts(results)["On the test set"]


def test_a_classifier(classification_results: Results) -> None:
    [run] = classification_results.runs
    test = classification_results.scores(run)
    low, high = wilson_interval(test["accuracy"], 240)
    assert _headline(classification_results) == (
        f"Accuracy on 240 test rows: {100 * test['accuracy']:.1f} % "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %). The ensemble has 5 members, trained with λ=0.2."
    )
    text = _texts(classification_results)["On the test set"]
    assert f"(95 % interval {low:.4f} to {high:.4f})" in text
    assert "Uncertainty" not in _texts(classification_results)
    p, n, z = 0.97, 100, stats.norm.ppf(0.975)
    center, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert wilson_interval(p, n) == pytest.approx(((center - half) / (1 + z**2 / n), (center + half) / (1 + z**2 / n)))


def test_a_model_no_better_than_the_mean(tmp_path: Path) -> None:
    assert _headline(_with_test(tmp_path, r2=-0.25)).startswith(
        "The model predicts 240 test rows no better than the target's mean (R² −0.2500)."
    )
    without_variance = _with_test(tmp_path / "flat", r2=None)
    assert _headline(without_variance) == ""
    assert "R²" not in _texts(without_variance)["On the test set"]


@pytest.mark.parametrize(
    ("slope", "scale", "text"),
    [
        (1.0, 1.0, "The spread is about as large as the error (1 times the error)."),
        (1.0, 4.0, "The spread underestimates the error (0.25 times the error)"),
        (1.0, 0.5, "The spread overestimates the error (2 times the error)."),
        (0.0, 1.0, "The members' spread does not predict where errors are large."),
    ],
)
def test_uncertainty(tmp_path: Path, slope: float, scale: float, text: str) -> None:
    spread = np.linspace(1, 3, 240)
    error = scale * (spread if slope else np.full(240, spread.mean())) * np.where(np.arange(240) % 2, 1, -1)
    results = _with_arrays(tmp_path, predicted=error, observed=np.zeros(240), spread=spread)
    [found] = [finding for finding in _findings(results) if finding.topic == "Uncertainty"]
    assert text in found.text
    assert found.warning == (not slope)
    if slope:
        thirds = [np.sqrt(np.mean(part**2)) for part in np.array_split(error, 3)]
        assert f"the error is {thirds[2] / thirds[0]:.1f} times that" in found.text


@pytest.mark.parametrize("rows", [1, 29])
def test_few_rows_give_no_interval(tmp_path: Path, rows: int) -> None:
    results = read_results(write_fit(tmp_path / "fit", FitSpec(test=rows)))
    assert set(_texts(results)) == {"On the test set", "Members"}
    assert "95 %" not in _texts(results)["On the test set"]


def test_perfect_predictions_and_a_single_member(tmp_path: Path) -> None:
    zero = np.zeros(240)
    results = _with_arrays(tmp_path, predicted=zero, observed=zero, spread=np.linspace(0, 1, 240))
    assert "Uncertainty" not in _texts(results)
    single = read_results(write_fit(tmp_path / "one", FitSpec(num_members=1)))
    assert list(_texts(single)) == ["On the test set"]
    assert _headline(single).endswith("The ensemble has 1 member, trained with λ=0.3.")


def test_collapsed_members_are_a_warning(tmp_path: Path) -> None:
    results = _with_test(tmp_path, spread=1e-6)
    assert _findings(results)[-1].topic == "Collapsed members"


def test_a_model_that_was_not_tested_or_not_trained(tmp_path: Path) -> None:
    directory = write_fit(tmp_path / "fit", FitSpec(arrays=False))
    path = directory / "runs" / "model-l0.3-s7.json"
    run = json.loads(path.read_text())
    run["metrics"]["test"] = None
    path.write_text(json.dumps(run))
    assert _texts(read_results(directory)) == {"Not tested": "There are no scores of the model on test data."}
    path.unlink()
    results = read_results(directory)
    assert _texts(results) == {"No model": "The training of the model did not finish."}
    assert (_headline(results), results.model_run) == ("", None)
