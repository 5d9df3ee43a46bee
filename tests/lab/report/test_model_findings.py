from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.findings import missing_runs
from torchace.lab.report.model_findings import model_findings, model_headline


def _texts(results: Results) -> dict[str, str]:
    assert results.model is not None
    return {finding.topic: finding.text for finding in model_findings(results, results.model)}


def _headline(results: Results) -> str:
    found = model_headline(results)
    return f"{found.sentence} {found.detail}" if found else ""


def _with_test(tmp_path: Path, **changes: Any) -> Results:
    directory = write_fit(tmp_path / "fit", FitSpec(arrays=False))
    path = directory / "runs" / "model-l0.3-s7.json"
    run = json.loads(path.read_text())
    run["metrics"]["test"].update(changes)
    path.write_text(json.dumps(run))
    return read_results(directory)


def test_a_regressor(regression_results: Results) -> None:
    [run] = regression_results.runs
    r2 = regression_results.scores(run)["r2"]
    assert _headline(regression_results) == (
        f"R² on 240 test rows: {r2:.3f}. The ensemble has 5 members, trained with λ=0.3."
    )
    assert (_texts(regression_results), missing_runs(regression_results)) == ({}, [])


def test_a_classifier(classification_results: Results) -> None:
    [run] = classification_results.runs
    test = classification_results.scores(run)
    p, n, z = test["accuracy"], 240, stats.norm.ppf(0.975)
    center, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))  # Wilson's interval
    low, high = (center - half) / (1 + z**2 / n), (center + half) / (1 + z**2 / n)
    assert _headline(classification_results) == (
        f"Accuracy on 240 test rows: {100 * test['accuracy']:.1f} % "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %). The ensemble has 5 members, trained with λ=0.2."
    )


def test_a_model_without_a_score(tmp_path: Path) -> None:
    assert _headline(_with_test(tmp_path, r2=-0.25)).startswith("R² on 240 test rows: −0.250.")
    assert _headline(_with_test(tmp_path / "flat", r2=None)) == ""


def test_collapsed_members_are_a_finding(tmp_path: Path) -> None:
    assert list(_texts(_with_test(tmp_path, spread=1e-6))) == ["Collapsed members of “the model”"]


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
