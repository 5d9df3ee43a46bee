"""The ensemble beside its baselines: sentence and tables."""

from __future__ import annotations

from torchace.lab.report import formats
from torchace.lab.report.findings import Finding
from torchace.lab.report.formats import NONE, quantity
from torchace.lab.report.tables import Cell, ReportTable, make_table
from torchace.lab.schema.values import ENSEMBLE, ModelComparison, ModelScores

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
_HIGHER_IS_BETTER = ("accuracy", "auc", "r2")


def comparison_headline(comparison: ModelComparison) -> str:
    """Return the difference to the best baseline with its interval; a baseline that wins comes first."""
    best, own = comparison.best, comparison.ensemble
    if best is None or best.difference is None or best.low is None or best.high is None:
        return ""
    rows = formats.count(comparison.rows, f"{comparison.split} row")
    if best.low > 0:
        lead = f"The ensemble beats the best baseline, {best.label}: its"
    elif best.high < 0:
        lead = f"A baseline is better: {best.label} beats the ensemble; its"
    else:
        lead = f"The ensemble is not better than the best baseline, {best.label}, beyond the noise: its"
    text = f"{lead} {_difference(comparison, best)} on {rows}."
    key = "accuracy" if comparison.loss == "cross_entropy" else "r2"
    if own.scores.get(key) is not None and best.scores.get(key) is not None:
        ours, theirs = _score(key, own.scores[key]), _score(key, best.scores[key])
        text += f" {LABELS[key]} is {ours} for the ensemble, {theirs} for {best.label}."
    return text


def _difference(comparison: ModelComparison, best: ModelScores) -> str:
    """Size of the difference with its interval, in favor of the model that has the lower loss."""
    assert best.difference is not None
    assert best.low is not None
    assert best.high is not None
    values = [best.difference, best.low, best.high]
    if best.difference < 0:
        values = [-best.difference, -best.high, -best.low]
    # the sentence is about the ensemble's loss unless a baseline wins
    direction = "higher" if best.difference < 0 <= best.high else "lower"
    if comparison.loss == "cross_entropy":
        mean, low, high = (formats.number(value, 4) for value in values)
        return f"cross entropy is {direction} by {mean} (95 % interval {low} to {high})"
    loss = (comparison.ensemble if best.high < 0 else best).scores[comparison.loss] or 0.0
    mean, low, high = (formats.number(100 * value / loss if loss else 0.0, 1) for value in values)
    return f"mean squared error is {direction} by {mean} % (95 % interval {low} to {high} %)"


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
    loss = {"cross_entropy": "cross entropy", "mse": "mean squared error"}[comparison.loss]
    loss += " of the scaled targets" if len(comparison.targets) > 1 else ""
    note = (
        f"Difference: {loss} minus the ensemble's, with a 95 % interval over the rows; above 0, the ensemble is better."
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
    return [_format_signed(model.difference), f"{_format_signed(model.low)} to {_format_signed(model.high)}"]


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
