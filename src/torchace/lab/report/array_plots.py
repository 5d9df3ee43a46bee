"""Figures of what the ensemble predicts: who errs with whom, the cases in dispute, how far to trust it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchace.lab.report import formats
from torchace.lab.report.arrays import Reliability, reliability
from torchace.lab.report.contested_cases import disputed_sheet
from torchace.lab.report.drawing import HEIGHT, Sketch, Theme, legend
from torchace.lab.report.members import alone_figure, matrix_figure
from torchace.lab.report.plots import colour, drawn_arms, shown, titled
from torchace.lab.report.predictions import predicted_figure, uncertainty_figure
from torchace.lab.report.results import Arm, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pictures(results: Results) -> list[Sketch]:
    """The figures drawn from the runs' arrays.

    Args:
        results: A run directory.

    Returns:
        For each arm a matrix of its members; of classifiers a reliability diagram and one sheet of disputed images, of
        regressors predictions beside the truth and errors beside the spread. What the runs did not record is left out.
    """
    arms = drawn_arms(results)
    every = arms or list(results.tested)
    if results.task.name == "regression":
        found = _one_each(results, every, predicted_figure, "model")
        found += _one_each(results, arms, uncertainty_figure, "check")
    else:
        found = _one_each(results, every, _reliability, "check")
    found += _one_each(results, arms, alone_figure, "model") + _one_each(results, arms, matrix_figure, "check")
    sheet = disputed_sheet(results, arms)
    return [*found, sheet] if sheet else found


def _one_each(
    results: Results, arms: Sequence[Arm], draw: Callable[[Results, Arm], Sketch | None], role: str
) -> list[Sketch]:
    """A figure an arm. Of a fit, one in all: from the arm with that role where it recorded what is drawn."""
    found = [draw(results, arm) for arm in sorted(arms, key=lambda arm: arm.role != role)]
    sketches = [sketch for sketch in found if sketch]
    return sketches[:1] if results.is_fit else sketches


def _reliability(results: Results, arm: Arm) -> Sketch | None:
    curves: dict[float, Reliability] = {}
    for diversity in shown(results, arm):
        if bins := reliability([results.arrays(run) for run in results.finished(arm, diversity)]):
            curves[diversity] = bins
    if not curves:
        return None
    told = "; ".join(
        f"λ={formats.diversity(d)}: at most {_worst(bins):.1f} points off in a bin of a hundredth of the cases or more"
        for d, bins in curves.items()
    )
    return Sketch(
        f"reliability_{results.arms.index(arm)}",
        "calibration",
        titled(results, "Reliability", arm),
        "All seeds together. On the diagonal, confidence is accuracy; above it the ensemble is too modest, "
        "below it too sure. Faint points hold less than 0.5 % of the test cases. Below: where the cases lie.",
        f"Accuracy against confidence of the ensemble, {arm.label}. {told}.",
        partial(_draw_reliability, results, arm, curves),
        height=HEIGHT + 0.7,
    )


def _worst(bins: Reliability) -> float:
    gaps = np.abs(bins.confidence - bins.accuracy)[bins.share >= 0.01]
    return 100 * float(np.max(gaps, initial=0.0))


def _draw_reliability(
    results: Results, arm: Arm, curves: dict[float, Reliability], figure: Figure, theme: Theme
) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    start = min(float(bins.confidence.min()) for bins in curves.values())
    top.plot([start, 1], [start, 1], color=theme.quiet, lw=1, ls=(0, (4, 3)))
    shades = [theme.quiet, colour(results, arm, theme)][-len(curves) :]
    for index, (diversity, bins) in enumerate(curves.items()):
        label = f"λ={formats.diversity(diversity)}"
        marker = "os"[index % 2]
        top.plot(bins.confidence, bins.accuracy, color=shades[index], lw=1.4, marker=marker, ms=0.1, alpha=0.8)
        strong = bins.share >= 0.005
        for kept, alpha in ((strong, 1.0), (~strong, 0.3)):
            top.plot(
                bins.confidence[kept],
                bins.accuracy[kept],
                ls="",
                marker=marker,
                color=shades[index],
                alpha=alpha,
                mew=0,
            )
        top.plot([], [], color=shades[index], marker=marker, label=label)
        bottom.plot(bins.confidence, 100 * bins.share, color=shades[index], lw=1.4, marker=marker, ms=3.5)
    bottom.set_yscale("log")
    bottom.yaxis.set_major_formatter("{x:g}")
    bottom.minorticks_off()
    top.set_ylabel("accuracy")
    bottom.set_ylabel("cases, %")
    bottom.set_xlabel("confidence")
    legend(figure, *top.get_legend_handles_labels())
