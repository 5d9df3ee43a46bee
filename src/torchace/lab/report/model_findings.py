"""Findings about the model of a fit."""

from __future__ import annotations

import math

import numpy as np

from torchace._statistics import mean_over_seeds
from torchace.lab.report import formats
from torchace.lab.report.arrays import Predictions, error_vs_spread, join_predictions
from torchace.lab.report.comparison import comparison_findings, comparison_headline
from torchace.lab.report.findings import Finding, diversity_finding
from torchace.lab.report.formats import at
from torchace.lab.report.results import Results
from torchace.lab.schema.results import ArmSummary, RunResult


def model_headline(results: Results, arm: ArmSummary) -> str:
    """Return the main result of a model; empty without test scores."""
    run = results.model_run
    test = results.scores(run) if run else {}
    comparison = results.experiment.comparison
    if run is not None and comparison is not None and (text := comparison_headline(comparison)):
        return f"{text} The ensemble has {formats.count(arm.num_members, 'member')}, trained with {at(run.diversity)}."
    rows = formats.count(results.data.test, "test row")
    if run is None or not {"accuracy", "r2"} & set(test):
        return ""
    if "accuracy" in test:
        text = f"Accuracy is {formats.number(100 * test['accuracy'], 1)} % on {rows}."
    elif test["r2"] <= 0:
        r2 = results.metrics["r2"].value(test["r2"])
        text = f"The model predicts {rows} no better than the target's mean (R² {r2})."
    else:
        share = formats.number(100 * test["r2"], 1)
        text = f"The model explains {share} % of the target's variance in {rows}."
    return f"{text} It has {formats.count(arm.num_members, 'member')}, trained with {at(run.diversity)}."


def model_findings(results: Results, arm: ArmSummary) -> list[Finding]:
    """Return the findings about scores, members and uncertainty."""
    run = results.model_run
    if run is None:
        return [Finding("No model", "The training of the model did not finish.", warning=True)]
    if not results.scores(run):
        return [Finding("Not tested", "There are no scores of the model on test data.", warning=True)]
    rows = join_predictions([results.arrays(run)])
    scored = _regression(results, run, rows) if results.task.name == "regression" else _classification(results, run)
    found: list[Finding | None] = [scored]
    if results.experiment.comparison is not None:
        found += comparison_findings(results.experiment.comparison)
    if arm.num_members > 1:
        diversity = diversity_finding(results, arm)
        found += [_members(results, arm, run), _uncertainty(rows)]
        found.append(diversity if diversity and diversity.warning else None)
    return [finding for finding in found if finding]


def _classification(results: Results, run: RunResult) -> Finding:
    test, metrics = results.scores(run), results.metrics
    text = f"Accuracy is {metrics['accuracy'].value(test['accuracy'])}"
    if results.data.test:
        low, high = wilson_interval(test["accuracy"], results.data.test)
        text += f" (95 % interval {metrics['accuracy'].number(low)} to {metrics['accuracy'].number(high)})"
    text += f". Cross entropy is {metrics['cross_entropy'].value(test['cross_entropy'])}."
    if "calibration_error" in test:
        text += f" Confidence and accuracy are {100 * test['calibration_error']:.1f} points apart on average."
    return Finding("On the test set", text)


def _regression(results: Results, run: RunResult, rows: Predictions | None) -> Finding:
    test, metrics = results.scores(run), results.metrics
    text = f"RMSE is {metrics['rmse'].value(test['rmse'])}"
    several = results.data.table is not None and results.data.table.target.num_columns > 1
    if (
        not several
        and rows is not None
        and len(rows.error) >= 30
        and (estimate := mean_over_seeds(np.square(rows.error)))
    ):
        ends = estimate.interval(0.05)
        low, high = (math.sqrt(max(0.0, test["mse"] + end - estimate.mean)) for end in ends)
        text += f" (95 % interval {metrics['rmse'].number(low)} to {metrics['rmse'].value(high)})"
    text += ", of targets scaled to a standard deviation of 1." if several else ", in the target's units."
    for key, name in (("mae", "MAE"), ("r2", "R²")):
        if key in test:
            text += f" {name} is {metrics[key].value(test[key])}."
    return Finding("On the test set", text)


def _members(results: Results, arm: ArmSummary, run: RunResult) -> Finding | None:
    test, error = results.scores(run), results.metrics[results.task.error]
    spread, key = results.metrics[results.task.spread], f"member_{results.task.error}"
    if key not in test or spread.key not in test:
        return None
    text = (
        f"A single member's {error.noun} is {error.value(test[key])} on average; "
        f"the ensemble of {arm.num_members} has {error.value(test[error.key])}."
    )
    if spread.key == "disagreement":
        return Finding("Members", f"{text} Two members differ on {spread.value(test[spread.key])} of the test rows.")
    return Finding("Members", f"{text} The members' predictions have a spread of {spread.value(test[spread.key])}.")


def _uncertainty(rows: Predictions | None) -> Finding | None:
    thirds = error_vs_spread(rows, 3) if rows is not None else None
    if rows is None or thirds is None or len(thirds.error) < 3 or not thirds.error[0]:
        return None
    ratio = float(thirds.error[2] / thirds.error[0])
    predicts = ratio >= 1.2
    text = (
        f"The members' spread {'predicts' if predicts else 'does not predict'} where errors are large. In the third of "
        f"the test rows with the largest spread, the error is {ratio:.1f} times that in the third with the smallest."
    )
    share = math.sqrt(float(np.mean(np.square(rows.spread)) / np.mean(np.square(rows.error))))
    size = f"{share:.2g} times the error"
    if share < 0.8:
        text += f" The spread underestimates the error ({size}): it does not cover errors common to all members."
    elif share <= 1.25:
        text += f" The spread is about as large as the error ({size})."
    else:
        text += f" The spread overestimates the error ({size})."
    return Finding("Uncertainty", text, warning=not predicts)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n cases."""
    from scipy.stats import binomtest  # type: ignore[import-untyped]

    found = binomtest(min(n, max(0, round(share * n))), n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)
