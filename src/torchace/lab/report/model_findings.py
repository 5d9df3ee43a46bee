"""The model of a fit beside its baselines: headline, findings, figure and tables."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from torchace._figures import FigureSpec, Theme, add_tooltips
from torchace.lab.report import formats
from torchace.lab.report.findings import Finding, Headline, collapsed_members
from torchace.lab.report.formats import NONE, at, quantity
from torchace.lab.report.results import Results
from torchace.lab.report.tables import Cell, ReportTable, Row, make_table
from torchace.lab.schema.results import ArmSummary
from torchace.lab.schema.values import ENSEMBLE, ModelComparison, ModelScores, TargetScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IMPORTANCES = 30  # columns to list
LABELS = {"accuracy": "Accuracy", "cross_entropy": "Cross entropy", "auc": "AUC", "brier": "Brier score"}
LABELS |= {"r2": "R²", "rmse": "RMSE", "mae": "MAE"}
LOSSES = {"cross_entropy": "cross entropy", "mse": "mean squared error"}
HIGHER_IS_BETTER = ("accuracy", "auc", "r2")


def model_headline(results: Results) -> Headline | None:
    """Return the main result of a model: against the best baseline, else its score; None without test scores."""
    run, arm, comparison = results.model_run, results.model, results.experiment.comparison
    if run is None or arm is None:
        return None
    found, test, n = comparison_headline(comparison) if comparison else None, results.scores(run), results.data.test
    rows, interval = formats.count(n, "test row"), ""
    if found is None and "accuracy" in test:
        if n:
            from scipy.stats import binomtest  # type: ignore[import-untyped]

            ends = binomtest(min(n, max(0, round(test["accuracy"] * n))), n).proportion_ci(method="wilson")
            interval = f"95 % interval {100 * ends.low:.1f} to {100 * ends.high:.1f} %"
        found = Headline(f"Accuracy on {rows}", _score("accuracy", test["accuracy"]), interval)
    elif found is None and "r2" in test:
        found = Headline(f"R² on {rows}", _score("r2", test["r2"]))
    if found is None:
        return None
    members = f"The ensemble has {formats.count(arm.num_members, 'member')}, trained with {at(run.diversity)}."
    return replace(found, detail=f"{found.detail} {members}".strip())


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
        verdict = f"The ensemble and the best baseline, {best.label}, do not differ significantly"
    # the ensemble minus the baseline: negative if the ensemble is better
    values = [-best.difference, -best.high, -best.low]
    mean, low, high = formats.percentages(values, best.scores.get(comparison.loss) or 0.0)
    rows = formats.count(comparison.rows, f"{comparison.split} row")
    detail = f"{formats.capitalize(LOSSES[comparison.loss])} of the ensemble against that of {best.label} on {rows}; "
    detail += "lower is better."
    key = "accuracy" if comparison.loss == "cross_entropy" else "r2"
    if own.scores.get(key) is not None and best.scores.get(key) is not None:
        ours, theirs = _score(key, own.scores[key]), _score(key, best.scores[key])
        detail += f" {LABELS[key]} is {ours} for "
        detail += "both." if ours == theirs else f"the ensemble, {theirs} for {best.label}."
    return Headline(verdict, f"{mean} %", f"95 % interval {low} to {high} %", detail)


def model_findings(results: Results, arm: ArmSummary) -> list[Finding]:
    """Return what is wrong with a model: no scores, no better than a constant, missed classes, collapsed members."""
    if results.model_run is None:
        return [Finding("No model", "The training of the model did not finish.")]
    if not results.scores(results.model_run):
        return [Finding("Not tested", "There are no scores of the model on test data.")]
    collapsed, comparison = collapsed_members(results, arm), results.experiment.comparison
    found = [collapsed] if collapsed else []
    if comparison is None:
        return found
    constant = next((model.scores.get("accuracy") for model in comparison.models if model.name == "constant"), None)
    own = comparison.ensemble.scores.get("accuracy")
    if constant is not None and own is not None and own <= constant:
        text = f"Always predicting the most frequent class is correct for {_score('accuracy', constant)} of the rows"
        found.append(Finding("Constant prediction", f"{text}, the ensemble for {_score('accuracy', own)}."))
    if missed := [formats.shorten(entry.name, 40) for entry in comparison.classes if entry.rows and entry.recall == 0]:
        names = ", ".join(missed[:5]) + (" and others" if len(missed) > 5 else "")
        text = f"No row of {names} is classified correctly. Class weights may help."
        found.append(Finding("Missed classes", text))
    return found


def comparison_figures(comparison: ModelComparison) -> list[FigureSpec]:
    """Return the figure of the differences to all baselines."""
    found = [(m, m.difference, m.low, m.high) for m in comparison.models]
    tested = [(m, d, low, high) for m, d, low, high in found if d is not None and low is not None and high is not None]
    if not tested:
        return []

    def draw(figure: Figure, theme: Theme) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
        axes.axvline(0, color=theme.quiet, lw=1, ls=(0, (4, 3)))
        for row, (model, difference, low, high) in enumerate(tested):
            color = theme.palette[0] if low > 0 else theme.palette[1] if high < 0 else theme.quiet
            axes.plot([-high, -low], [row, row], color=color, lw=2.2)
            [dot] = axes.plot([-difference], [row], marker="o", ms=8, color=color)
            add_tooltips(dot, [f"{model.label}: {' ('.join(_interval(model))})"])
        axes.set_yticks(range(len(tested)), [textwrap.fill(m.label, 20) for m, *_ in tested])
        axes.set_ylim(len(tested) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("← the ensemble is better")
        axes.xaxis.set_major_locator(MaxNLocator(5))

    title = f"{formats.capitalize(LOSSES[comparison.loss])} of the ensemble minus that of each baseline"
    caption = "95 % intervals over the rows. Blue: the ensemble is better; orange: the baseline; gray: open."
    return [FigureSpec("baselines", "headline", title, caption, title, draw, 3.2)]


def model_table(comparison: ModelComparison) -> ReportTable:
    """Scores of the ensemble and its baselines, with the difference of the loss."""
    keys = [key for key in LABELS if any(model.scores.get(key) is not None for model in comparison.models)]
    best = {}
    for key in keys:
        values = [value for model in comparison.models if (value := model.scores.get(key)) is not None]
        best[key] = max(values) if key in HIGHER_IS_BETTER else min(values)
    is_timed = any(model.seconds is not None for model in comparison.models)  # not in a model directory
    rows = []
    for model in comparison.models:
        cells: list[str | Cell] = [Cell(formats.capitalize(model.label), kind="text", strong=model.name == ENSEMBLE)]
        for key in keys:
            value = model.scores.get(key)
            cells.append(Cell(_score(key, value), strong=value == best[key]))
        rows.append([*cells, *_interval(model), *[formats.duration(model.seconds)] * is_timed])
    loss = LOSSES[comparison.loss] + (" of the scaled targets" if len(comparison.targets) > 1 else "")
    note = (
        f"Difference: {loss} of the ensemble minus that of the model, with a 95 % interval over the rows; below 0, the "
        "ensemble is better."
    )
    if failed := [f"{model.label} ({model.failure})" for model in comparison.models if model.failure]:
        note += f" Not trained: {', '.join(failed)}."
    heads = ("Model", *(LABELS[key] for key in keys), "Difference", "95 % interval", *["Time"] * is_timed)
    caption = f"The ensemble and its baselines on {formats.count(comparison.rows, f'{comparison.split} row')}"
    return make_table(caption, heads, [("", rows)], note, "t")


def detail_tables(comparison: ModelComparison) -> list[ReportTable]:
    """Tables of the classes, the confusion matrix, the residuals and the importances."""
    tables, rows = [], list[Row]()
    if classes := comparison.classes:
        for entry in classes:
            shares = [_score("accuracy", share) for share in (entry.recall, entry.precision)]
            rows.append([formats.shorten(entry.name, 40), f"{entry.train:,}", f"{entry.rows:,}", *shares])
        heads = ["Class", "Training rows", f"{formats.capitalize(comparison.split)} rows", "Recall", "Precision"]
        tables.append(make_table("Classes", heads, [("", rows)], kinds="t"))
    if comparison.confusion:
        names = [formats.shorten(entry.name, 20) for entry in classes]
        rows = [
            [name, *(Cell(f"{count:,}", strong=i == j) for j, count in enumerate(counts))]
            for i, (name, counts) in enumerate(zip(names, comparison.confusion, strict=True))
        ]
        heads = ["True class", *(f"Predicted {name}" for name in names)]
        tables.append(make_table("Confusion matrix", heads, [("", rows)], kinds="t"))
    if comparison.targets:
        keys = ("r2", "rmse", "mae") if len(comparison.targets) > 1 else ()  # one target's are in the table of models
        rows = [
            [
                formats.shorten(target.name, 40),
                *(_score(key, target.scores.get(key)) for key in keys),
                _residuals(target, "0.25", "0.75"),
                _residuals(target, "0.025", "0.975"),
            ]
            for target in comparison.targets
        ]
        heads = ["Target", *(LABELS[key] for key in keys), "Half of the residuals", "95 % of the residuals"]
        tables.append(make_table("Residuals of the ensemble", heads, [("", rows)], kinds="t"))
    if comparison.importances:
        listed = comparison.importances[:MOST_IMPORTANCES]
        rows = [[formats.shorten(e.name, 80), f"{quantity(e.mean)} ± {quantity(e.std)}"] for e in listed]
        note = "Mean increase of the loss if the column's values are permuted, ± standard deviation over permutations."
        if rest := len(comparison.importances) - len(listed):
            note += f" {rest:,} more columns are not listed."
        tables.append(make_table("Importance of the columns", ("Column", "Increase"), [("", rows)], note, "t"))
    return tables


def _residuals(target: TargetScores, *quantiles: str) -> str:
    found = [value for key in quantiles if (value := target.residuals.get(key)) is not None]
    return " to ".join(map(quantity, found)) or NONE


def _interval(model: ModelScores) -> list[str]:
    if model.difference is None or model.low is None or model.high is None:
        return [NONE, NONE]
    difference, low, high = (quantity(-value, signed=True) for value in (model.difference, model.high, model.low))
    return [difference, f"{low} to {high}"]


def _score(key: str, value: float | None) -> str:
    if value is None:
        return NONE
    if key == "accuracy":
        return f"{formats.number(100 * value, 1)} %"
    return quantity(value) if key in ("rmse", "mae") else formats.number(value, 4 if key == "cross_entropy" else 3)
