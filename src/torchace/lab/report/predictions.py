"""Figures of a regression's predictions: beside the truth, and how honest their uncertainty is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchace.lab.report import formats
from torchace.lab.report.arrays import Honesty, Predicted, honesty, predicted_rows
from torchace.lab.report.drawing import HEIGHT, Sketch, Theme, legend
from torchace.lab.report.phrases import at
from torchace.lab.report.plots import colour, shown, titled
from torchace.lab.report.results import Arm, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predicted_figure(results: Results, arm: Arm) -> Sketch | None:
    """Predictions beside the truth, of the arm's best λ and first seed.

    Args:
        results: A run directory.
        arm: One of its arms.

    Returns:
        The figure, None where no run recorded its predictions.
    """
    for diversity in reversed(shown(results, arm)):
        for run in results.finished(arm, diversity):
            if rows := predicted_rows([results.arrays(run)]):
                return _predicted(results, arm, run.seed, diversity, rows)
    return None


def _predicted(results: Results, arm: Arm, seed: int, diversity: float, rows: Predicted) -> Sketch:
    few = ""
    if len(rows.observed) < results.data.test:
        few = f" {len(rows.observed):,} of {results.data.test:,} test rows are drawn."
    ends = f"{formats.quantity(float(rows.observed.min()))} to {formats.quantity(float(rows.observed.max()))}"
    typical = formats.quantity(float(np.median(np.abs(rows.error))))
    return Sketch(
        f"predicted_{results.arms.index(arm)}",
        "predictions",
        titled(results, "Predicted and observed", arm),
        f"A dot is a test row; on the line, the prediction is right. {at(diversity)}, seed {seed}.{few}",
        f"Predicted against observed, {formats.count(len(rows.observed), 'test row')}, observed from {ends}. "
        f"Half of the predictions are off by less than {typical}.",
        partial(_draw_predicted, results, arm, rows),
        height=HEIGHT + 0.7,
    )


def _draw_predicted(results: Results, arm: Arm, rows: Predicted, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    both = np.concatenate([rows.observed, rows.predicted])
    low, high = float(both.min()), float(both.max())
    margin = 0.04 * (high - low) or abs(high) or 1.0
    ends = (low - margin, high + margin)
    axes.plot(ends, ends, color=theme.quiet, lw=1, ls=(0, (4, 3)))
    many = len(rows.observed)
    alpha = 0.75 if many <= 200 else 0.45 if many <= 1500 else 0.25
    axes.plot(
        rows.observed,
        rows.predicted,
        ls="",
        marker="o",
        ms=4 if many <= 1500 else 3,
        mew=0,
        alpha=alpha,
        color=colour(results, arm, theme),
    )
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_aspect("equal")
    axes.set_xlabel("observed")
    axes.set_ylabel("predicted")


def uncertainty_figure(results: Results, arm: Arm) -> Sketch | None:
    """The error against the members' spread: does the ensemble know where it errs?

    Args:
        results: A run directory.
        arm: One of its arms.

    Returns:
        The figure, None where no run recorded enough rows, or the members do not differ.
    """
    curves: dict[float, Honesty] = {}
    for diversity in shown(results, arm):
        rows = predicted_rows([results.arrays(run) for run in results.finished(arm, diversity)])
        if rows is not None and (found := honesty(rows)):
            curves[diversity] = found
    if not curves:
        return None
    metric = results.metrics["spread"]
    told = "; ".join(
        f"{at(d)}: the error goes from {metric.value(float(c.error[0]))} where the spread is smallest "
        f"({metric.value(float(c.spread[0]))}) to {metric.value(float(c.error[-1]))} where it is largest "
        f"({metric.value(float(c.spread[-1]))})"
        for d, c in curves.items()
    )
    groups = max(len(curve.error) for curve in curves.values())
    return Sketch(
        f"uncertainty_{results.arms.index(arm)}",
        "predictions",
        titled(results, "Error where members differ", arm),
        f"Test rows of all seeds in {groups} groups of equal size, ordered by the members' spread; root mean squares. "
        "A curve that rises: the spread tells where the errors are. On the dashed line it is also as large as they "
        "are; above it, too small to be an error bar.",
        f"Error against the spread of the members, {arm.label}. {told}.",
        partial(_draw_uncertainty, results, arm, curves),
        height=HEIGHT + 0.7,
    )


def _draw_uncertainty(results: Results, arm: Arm, curves: dict[float, Honesty], figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    metric = results.metrics["spread"]
    unit = f",{metric.unit}" if metric.unit else ""
    shades = [theme.quiet, colour(results, arm, theme)][-len(curves) :]
    for index, (diversity, curve) in enumerate(curves.items()):
        x, y = metric.scale * curve.spread, metric.scale * curve.error
        axes.plot(x, y, color=shades[index], marker="os"[index % 2], label=at(diversity))
    right = metric.scale * max(float(curve.spread[-1]) for curve in curves.values())
    top = metric.scale * max(float(curve.error.max()) for curve in curves.values())
    reach = min(right, top)
    axes.plot([0, reach], [0, reach], color=theme.quiet, lw=1, ls=(0, (4, 3)), label="error = spread")
    axes.set_xlim(0, 1.06 * right)
    axes.set_ylim(0, 1.1 * max(top, reach) or 1.0)
    axes.set_xlabel(f"members' spread{unit}")
    axes.set_ylabel(f"error{unit}")
    legend(figure, *axes.get_legend_handles_labels())
