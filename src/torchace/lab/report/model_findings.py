"""Findings about the model of a fit, and the ensemble beside its baselines: sentences, figure and tables."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torchace._figures import FigureSpec, Theme, add_tooltips
from torchace._statistics import mean_over_seeds
from torchace.lab.report import formats
from torchace.lab.report.findings import Finding, Headline, diversity_finding
from torchace.lab.report.formats import NONE, at, quantity
from torchace.lab.report.results import Predictions, Results, error_vs_spread, join_predictions
from torchace.lab.report.tables import Cell, ReportTable, make_table
from torchace.lab.schema.results import ArmSummary, RunResult
from torchace.lab.schema.values import ENSEMBLE, ModelComparison, ModelScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def model_headline(results: Results) -> Headline | None:
    """Return the main result of a model: against the best baseline, else its score; None without test scores."""
    run, arm, comparison = results.model_run, results.model, results.experiment.comparison
    test = results.scores(run) if run else {}
    if run is None or arm is None:
        return None
    found = comparison_headline(comparison) if comparison else None
    rows = formats.count(results.data.test, "test row")
    if found is None and "accuracy" in test:
        interval = ""
        if results.data.test:
            low, high = (formats.number(100 * end, 1) for end in wilson_interval(test["accuracy"], results.data.test))
            interval = f"95 % interval {low} to {high} %"
        found = Headline(f"Accuracy on {rows}", f"{formats.number(100 * test['accuracy'], 1)} %", interval)
    elif found is None and "r2" in test:
        verdict = f"The model explains {formats.number(100 * test['r2'], 1)} % of the target's variance in {rows}"
        if test["r2"] <= 0:
            r2 = results.metrics["r2"].value(test["r2"])
            verdict = f"The model predicts {rows} no better than the target's mean (R² {r2})"
        found = Headline(verdict)
    if found is None:
        return None
    members = f"The ensemble has {formats.count(arm.num_members, 'member')}, trained with {at(run.diversity)}."
    return replace(found, detail=f"{found.detail} {members}".strip())


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


MOST_IMPORTANCES = 30  # columns to list
LABELS = {
    "accuracy": "Accuracy",
    "cross_entropy": "Cross entropy",
    "auc": "AUC",
    "brier": "Brier score",
    "r2": "R²",
    "rmse": "RMSE",
    "mae": "MAE",
}
LOSSES = {"cross_entropy": "cross entropy", "mse": "mean squared error"}
_HIGHER_IS_BETTER = ("accuracy", "auc", "r2")


def comparison_headline(comparison: ModelComparison) -> Headline | None:
    """Return the difference to the best baseline with its interval; a baseline that wins comes first."""
    best, own = comparison.best, comparison.ensemble
    if best is None or best.difference is None or best.low is None or best.high is None:
        return None
    if best.low > 0:
        verdict = f"The ensemble beats the best baseline, {best.label}"
    elif best.high < 0:
        verdict = f"A baseline is better: {best.label} beats the ensemble"
    else:
        verdict = f"The ensemble and the best baseline, {best.label}, do not differ beyond the noise"
    # the ensemble minus the baseline: negative if the ensemble is better
    values = [-best.difference, -best.high, -best.low]
    mean, low, high = formats.percentages(values, best.scores.get(comparison.loss) or 0.0)
    rows = formats.count(comparison.rows, f"{comparison.split} row")
    detail = f"{formats.capitalize(LOSSES[comparison.loss])} of the ensemble against that of {best.label} on {rows}."
    key = "accuracy" if comparison.loss == "cross_entropy" else "r2"
    if own.scores.get(key) is not None and best.scores.get(key) is not None:
        ours, theirs = _score(key, own.scores[key]), _score(key, best.scores[key])
        detail += f" {LABELS[key]} is {ours} for the ensemble, {theirs} for {best.label}."
    return Headline(verdict, f"{mean} %", f"95 % interval {low} to {high} %", detail)


def comparison_figures(comparison: ModelComparison) -> list[FigureSpec]:
    """Return the figure of the differences to all baselines."""
    found = [(m, m.difference, m.low, m.high) for m in comparison.models]
    tested = [(m, d, low, high) for m, d, low, high in found if d is not None and low is not None and high is not None]
    if not tested:
        return []
    title = f"{formats.capitalize(LOSSES[comparison.loss])} of the ensemble minus that of each baseline"
    texts = [f"{m.label}: {' ('.join(_interval(m))})" for m, *_ in tested]

    def draw(figure: Figure, theme: Theme) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
        axes.axvline(0, color=theme.quiet, lw=1, ls=(0, (4, 3)))
        for row, (text, (_, difference, low, high)) in enumerate(zip(texts, tested, strict=True)):
            color = theme.palette[0] if low > 0 else theme.palette[1] if high < 0 else theme.quiet
            axes.plot([-high, -low], [row, row], color=color, lw=2.2)
            [dot] = axes.plot([-difference], [row], marker="o", ms=8, color=color)
            add_tooltips(dot, [text])
        axes.set_yticks(range(len(tested)), [textwrap.fill(m.label, 20) for m, *_ in tested])
        axes.set_ylim(len(tested) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("← the ensemble is better")
        axes.xaxis.set_major_locator(MaxNLocator(5))

    caption = "95 % intervals over the rows. Blue: the ensemble is better. Orange: the baseline is better."
    return [FigureSpec("baselines", "headline", title, caption, f"{title}. {'; '.join(texts)}.", draw, 3.2)]


def comparison_findings(comparison: ModelComparison) -> list[Finding]:
    """Return findings about the constant prediction, missed classes and residuals."""
    found = []
    constant = next((model for model in comparison.models if model.name == "constant"), None)
    own = comparison.ensemble.scores.get("accuracy")
    if constant is not None and own is not None and (share := constant.scores.get("accuracy")) is not None:
        largest = max(comparison.classes, key=lambda entry: entry.train, default=None)
        answer = f"“{formats.shorten(largest.name, 40)}”" if largest else "the most frequent class"
        text = f"Always predicting {answer} is correct for {_score('accuracy', share)} of the rows"
        text += f", the ensemble for {_score('accuracy', own)}."
        found.append(Finding("Constant prediction", text, warning=own <= share))
    missed = [entry.name for entry in comparison.classes if entry.rows and entry.recall == 0]
    if missed:
        names = ", ".join(formats.shorten(name, 40) for name in missed[:5])
        text = f"No row of {names}{' and others' if len(missed) > 5 else ''} is classified correctly."
        found.append(Finding("Missed classes", f"{text} Class weights may help.", warning=True))
    for target in comparison.targets:
        values = {key: quantity(value) for key, value in target.residuals.items() if value is not None}
        if {"0.025", "0.25", "0.75", "0.975"} <= values.keys():
            of = f" of {formats.shorten(target.name, 40)}" if len(comparison.targets) > 1 else ""
            text = f"Half of the residuals{of} lie between {values['0.25']} and {values['0.75']}, "
            text += f"95 % between {values['0.025']} and {values['0.975']}."
            found.append(Finding("Residuals", text))
    return found


def comparison_tables(comparison: ModelComparison) -> list[ReportTable]:
    """Tables of the models, the classes, the confusion matrix and the importances."""
    return [table for table in (model_table(comparison), *_detail_tables(comparison)) if table]


def model_table(comparison: ModelComparison) -> ReportTable:
    """Scores of the ensemble and its baselines, with the difference of the loss."""
    keys = [key for key in LABELS if any(model.scores.get(key) is not None for model in comparison.models)]
    best = {}
    for key in keys:
        values = [value for model in comparison.models if (value := model.scores.get(key)) is not None]
        best[key] = max(values) if key in _HIGHER_IS_BETTER else min(values)
    rows = []
    timed = any(model.seconds is not None for model in comparison.models)
    for model in comparison.models:
        cells: list[str | Cell] = [Cell(formats.capitalize(model.label), kind="text", strong=model.name == ENSEMBLE)]
        for key in keys:
            value = model.scores.get(key)
            cells.append(NONE if value is None else Cell(_score(key, value), strong=value == best[key]))
        seconds = [NONE if model.seconds is None else formats.duration(model.seconds)] if timed else []
        rows.append([*cells, *_interval(model), *seconds])
    loss = LOSSES[comparison.loss] + (" of the scaled targets" if len(comparison.targets) > 1 else "")
    note = (
        f"Difference: {loss} of the ensemble minus that of the model, with a 95 % interval over the rows; below 0, the "
        "ensemble is better."
    )
    if failed := [f"{model.label} ({model.failure})" for model in comparison.models if model.failure]:
        note += f" Not trained: {', '.join(failed)}."
    heads = ("Model", *(LABELS[key] for key in keys), "Difference", "95 % interval", *["Time"] * timed)
    caption = f"The ensemble and its baselines on {formats.count(comparison.rows, f'{comparison.split} row')}"
    return make_table(caption, heads, [("", rows)], note, "t" + "n" * (len(heads) - 1))


def _detail_tables(comparison: ModelComparison) -> list[ReportTable]:
    tables = []
    if comparison.classes:
        rows = [
            [
                formats.shorten(entry.name, 40),
                f"{entry.train:,}",
                f"{entry.rows:,}",
                *map(_share, (entry.recall, entry.precision)),
            ]
            for entry in comparison.classes
        ]
        heads = ("Class", "Training rows", f"{formats.capitalize(comparison.split)} rows", "Recall", "Precision")
        tables.append(make_table("Classes", heads, [("", rows)], kinds="tnnnn"))
    if comparison.confusion:
        names = [formats.shorten(entry.name, 20) for entry in comparison.classes]
        counted: list[list[str | Cell]] = [
            [name, *(Cell(f"{count:,}", strong=i == j) for j, count in enumerate(counts))]
            for i, (name, counts) in enumerate(zip(names, comparison.confusion, strict=True))
        ]
        predicted = ["True class", *(f"Predicted {name}" for name in names)]
        tables.append(make_table("Confusion matrix", predicted, [("", counted)], kinds="t" + "n" * len(names)))
    if len(comparison.targets) > 1:
        keys = ("r2", "rmse", "mae")
        rows = [
            [formats.shorten(target.name, 40), *(_score(key, target.scores.get(key)) for key in keys)]
            for target in comparison.targets
        ]
        columns = ("Target", *(LABELS[key] for key in keys))
        tables.append(make_table("The ensemble's scores for each target", columns, [("", rows)], kinds="tnnn"))
    if comparison.importances:
        listed = comparison.importances[:MOST_IMPORTANCES]
        rows = [[formats.shorten(e.name, 80), f"{quantity(e.mean)} ± {quantity(e.std)}"] for e in listed]
        note = "Mean increase of the loss if the column's values are permuted, ± standard deviation over permutations."
        if (rest := len(comparison.importances) - len(listed)) > 0:
            note += f" {rest:,} more columns are not listed."
        tables.append(make_table("Importance of the columns", ("Column", "Increase"), [("", rows)], note, "tn"))
    return tables


def _interval(model: ModelScores) -> list[str]:
    if model.difference is None or model.low is None or model.high is None:
        return [NONE, NONE]
    return [_format_signed(-model.difference), f"{_format_signed(-model.high)} to {_format_signed(-model.low)}"]


def _format_signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{quantity(abs(value))}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{formats.number(100 * value, 1)} %"


def _score(key: str, value: float | None) -> str:
    if value is None:
        return NONE
    if key == "accuracy":
        return _share(value)
    return quantity(value) if key in ("rmse", "mae") else formats.number(value, 4 if key == "cross_entropy" else 3)
