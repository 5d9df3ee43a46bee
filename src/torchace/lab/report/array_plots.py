"""Figures and tables from arrays: reliability, pairs of members, predictions, contested cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, legend
from torchace.lab.report import formats
from torchace.lab.report.arrays import (
    Array,
    ContestedCase,
    contested_cases,
    error_vs_spread,
    join_predictions,
    reliability,
)
from torchace.lab.report.formats import at, capitalize
from torchace.lab.report.plots import DASHED, arm_color, arms_with_figures, figure_title, two_diversities
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import best_diversity
from torchace.lab.report.tables import ReportTable, make_table
from torchace.lab.schema.results import ArmSummary, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Arrays = dict[str, Array]

COLUMNS = 4  # of contested images


def array_figures(results: Results) -> list[FigureSpec]:
    """Return the figures drawn from arrays."""
    arms = arms_with_figures(results)
    builders: list[Callable[[Results, ArmSummary], FigureSpec | None]] = [_reliability, _members_alone, _pairs]
    if results.task.name == "regression":
        builders = [_predictions, _error_vs_spread, _members_alone, _pairs]
    found = []
    for index, build in enumerate(builders):
        found += [build(results, arm) for arm in (arms or results.arms if index == 0 else arms)]
    return [spec for spec in (*found, _contested_images(results)) if spec]


def _curves(results: Results, arm: ArmSummary, summarize: Callable[[list[Arrays]], T | None]) -> dict[float, T]:
    found = {
        diversity: summarize([results.arrays(run) for run in results.finished(arm, diversity)])
        for diversity in two_diversities(results, arm)
    }
    return {diversity: curve for diversity, curve in found.items() if curve is not None}


def _reliability(results: Results, arm: ArmSummary) -> FigureSpec | None:
    curves = _curves(results, arm, reliability)
    if not curves:
        return None
    parts = []
    for diversity, bins in curves.items():
        gaps = np.abs(bins.confidence - bins.accuracy)[bins.share >= 0.01]
        worst = 100 * float(np.max(gaps, initial=0.0))
        parts.append(f"{at(diversity)}: at most {worst:.1f} points off in a bin with 1 % of the cases or more")

    def draw(figure: Figure, theme: Theme) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
        start = min(float(bins.confidence.min()) for bins in curves.values())
        top.plot([start, 1], [start, 1], color=theme.quiet, lw=1, ls=DASHED)
        colors = [theme.quiet, arm_color(results, arm, theme)][-len(curves) :]
        for color, marker, (diversity, bins) in zip(colors, "os", curves.items(), strict=False):
            top.plot(bins.confidence, bins.accuracy, color=color, lw=1.4, marker=marker, ms=0.1, alpha=0.8)
            many = bins.share >= 0.005
            for part, alpha in ((many, 1.0), (~many, 0.3)):
                x, y = bins.confidence[part], bins.accuracy[part]
                top.plot(x, y, ls="", marker=marker, color=color, alpha=alpha, mew=0)
            top.plot([], [], color=color, marker=marker, label=at(diversity))
            bottom.plot(bins.confidence, 100 * bins.share, color=color, lw=1.4, marker=marker, ms=3.5)
        bottom.set_yscale("log")
        bottom.yaxis.set_major_formatter("{x:g}")
        bottom.minorticks_off()
        top.set_ylabel("accuracy")
        bottom.set_ylabel("cases, %")
        bottom.set_xlabel("confidence")
        legend(figure, *top.get_legend_handles_labels())

    return FigureSpec(
        f"reliability_{results.arms.index(arm)}",
        "calibration",
        figure_title(results, "Reliability", arm),
        "All seeds together. On the diagonal, confidence equals accuracy; above it the ensemble is underconfident, "
        "below it overconfident. Faint points hold less than 0.5 % of the test cases. Below: the share of cases.",
        f"Accuracy against confidence of the ensemble, {arm.label}. {'; '.join(parts)}.",
        draw,
        height=HEIGHT + 0.7,
    )


def _pairs(results: Results, arm: ArmSummary) -> FigureSpec | None:
    """Disagreement, or correlation of errors, of each pair of members at two λ of one seed."""
    if results.task.name == "regression":
        key, title, scale, unit, top = "residual_correlation", "Correlation of errors between members", 1.0, "", 1.0
        caption = "Correlation of two members' errors on the test rows; averaging removes more where it is low"
    else:
        key, title, scale, unit, top = "disagreement_matrix", "Disagreement between members", 100.0, "%", 0.0
        caption = "Share of test cases on which two members predict different classes, in percent"
    by_seed: dict[int, dict[float, Array]] = {}
    for run in (run for d in two_diversities(results, arm) for run in results.finished(arm, d)):
        matrix = results.arrays(run).get(key)
        if matrix is not None and np.isfinite(_upper(matrix)).any():
            by_seed.setdefault(run.seed, {})[run.diversity] = scale * matrix
    if not by_seed:
        return None
    seed = min(by_seed, key=lambda seed: (-len(by_seed[seed]), seed))  # the first with both λ
    matrices = by_seed[seed]
    parts = [f"{at(d)}: {np.nanmin(_upper(m)):.2f} to {np.nanmax(_upper(m)):.2f}{unit}" for d, m in matrices.items()]
    return FigureSpec(
        f"matrix_{results.arms.index(arm)}",
        "members",
        figure_title(results, title, arm),
        f"{caption}. Seed {seed}.",
        f"{caption}, {arm.label}, seed {seed}. {'; '.join(parts)}.",
        lambda figure, theme: _draw_matrices(matrices, arm_color(results, arm, theme), unit, top, figure, theme),
        height=2.9,
    )


def _upper(matrix: Array) -> Array:
    upper: Array = matrix[np.triu_indices(len(matrix), 1)]
    return upper


def _draw_matrices(
    matrices: dict[float, Array], color: str, unit: str, top: float, figure: Figure, theme: Theme
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("ramp", [theme.grid, color]).with_extremes(bad=theme.paper)
    entries = np.concatenate([_upper(matrix) for matrix in matrices.values()])
    low, high = min(0.0, float(np.nanmin(entries))), top or float(np.nanmax(entries)) or 1.0
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (diversity, matrix) in zip(panels, matrices.items(), strict=True):
        size = len(matrix)
        values = np.where(np.eye(size, dtype=bool), np.nan, matrix)
        image = axes.imshow(values, cmap=ramp, vmin=low, vmax=high)
        axes.set_title(at(diversity), fontsize=10)
        ticks = range(0, size, 1 if size <= 10 else -(-size // 6))
        axes.set(xticks=ticks, yticks=ticks, xlabel="member")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for j, k in zip(*np.nonzero(np.isfinite(values)), strict=True) if size <= 6 else ():
            ink = theme.paper if values[j, k] > low + 0.6 * (high - low) else theme.ink
            axes.text(k, j, f"{values[j, k]:.2g}", ha="center", va="center", fontsize=8, color=ink)
    bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.set_ylabel(unit, rotation=0, labelpad=8)


def _members_alone(results: Results, arm: ArmSummary) -> FigureSpec | None:
    metric, run = results.metrics[results.task.error], results.model_run
    if run is None or arm != results.model or len(run.members) < 2 or metric.key not in results.scores(run):
        return None
    test = results.scores(run)
    parts = f"the ensemble's {metric.value(test[metric.key])}"
    if (key := f"member_{metric.key}") in test:
        parts += f", the members' mean {metric.value(test[key])}"
    errors = [metric.scale * results.task.member_error(value) for value in run.members]

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        axes.axhline(metric.scale * test[metric.key], color=arm_color(results, arm, theme), label="ensemble")
        axes.plot(range(len(errors)), errors, ls="", marker="o", color=theme.quiet, label="a member")
        axes.margins(y=0.15)
        axes.set_xticks(range(0, len(errors), -(-len(errors) // 12)))
        axes.set_xlabel("member")
        axes.set_ylabel(metric.label)
        axes.grid(axis="x", visible=False)
        legend(figure, *axes.get_legend_handles_labels())

    return FigureSpec(
        "alone",
        "members",
        figure_title(results, "Members and ensemble", arm),
        "A dot is the test error of one member, the line that of the ensemble.",
        f"{capitalize(metric.noun)} of each of the {len(errors)} members; {parts}.",
        draw,
    )


# -- regression --------------------------------------------------------------------------------------------------------


def _predictions(results: Results, arm: ArmSummary) -> FigureSpec | None:
    """Predictions against observed values, at the best λ and the first seed that recorded them."""
    runs = [run for d in reversed(two_diversities(results, arm)) for run in results.finished(arm, d)]
    found = ((run, rows) for run in runs if (rows := join_predictions([results.arrays(run)])))
    run, rows = next(found, (None, None))
    if run is None or rows is None:
        return None
    size = len(rows.observed)
    drawn = f" {size:,} of {results.data.test:,} test rows are drawn." if size < results.data.test else ""
    ends = f"{formats.quantity(float(rows.observed.min()))} to {formats.quantity(float(rows.observed.max()))}"
    typical = formats.quantity(float(np.median(np.abs(rows.error))))

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        both = np.concatenate([rows.observed, rows.predicted])
        low, high = float(both.min()), float(both.max())
        margin = 0.04 * (high - low) or abs(high) or 1.0
        limits = (low - margin, high + margin)
        axes.plot(limits, limits, color=theme.quiet, lw=1, ls=DASHED)
        alpha, size_ = (0.75, 4) if size <= 200 else (0.45, 4) if size <= 1500 else (0.25, 3)
        color = arm_color(results, arm, theme)
        axes.plot(rows.observed, rows.predicted, ls="", marker="o", ms=size_, mew=0, alpha=alpha, color=color)
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="observed", ylabel="predicted")

    return FigureSpec(
        f"predicted_{results.arms.index(arm)}",
        "predictions",
        figure_title(results, "Predicted and observed", arm),
        f"A dot is a test row; on the line, the prediction is exact. {at(run.diversity)}, seed {run.seed}.{drawn}",
        f"Predicted against observed, {formats.count(size, 'test row')}, observed from {ends}. "
        f"Half of the predictions are off by less than {typical}.",
        draw,
        height=HEIGHT + 0.7,
    )


def _error_vs_spread(results: Results, arm: ArmSummary) -> FigureSpec | None:
    curves = _curves(results, arm, lambda runs: (rows := join_predictions(runs)) and error_vs_spread(rows))
    if not curves:
        return None
    metric = results.metrics["spread"]
    parts = "; ".join(
        f"{at(d)}: the error goes from {metric.value(float(c.error[0]))} where the spread is smallest "
        f"({metric.value(float(c.spread[0]))}) to {metric.value(float(c.error[-1]))} where it is largest "
        f"({metric.value(float(c.spread[-1]))})"
        for d, c in curves.items()
    )
    groups = max(len(curve.error) for curve in curves.values())

    def draw(figure: Figure, theme: Theme) -> None:
        axes, unit = figure.add_subplot(), f",{metric.unit}" if metric.unit else ""
        colors = [theme.quiet, arm_color(results, arm, theme)][-len(curves) :]
        for color, marker, (diversity, curve) in zip(colors, "os", curves.items(), strict=False):
            x, y = metric.scale * curve.spread, metric.scale * curve.error
            axes.plot(x, y, color=color, marker=marker, label=at(diversity))
        right = metric.scale * max(float(curve.spread[-1]) for curve in curves.values())
        top = metric.scale * max(float(curve.error.max()) for curve in curves.values())
        reach = min(right, top)
        axes.plot([0, reach], [0, reach], color=theme.quiet, lw=1, ls=DASHED, label="error = spread")
        axes.set(xlim=(0, 1.06 * right), ylim=(0, 1.1 * max(top, reach) or 1.0))
        axes.set(xlabel=f"members' spread{unit}", ylabel=f"error{unit}")
        legend(figure, *axes.get_legend_handles_labels())

    return FigureSpec(
        f"uncertainty_{results.arms.index(arm)}",
        "predictions",
        figure_title(results, "Error against the members' spread", arm),
        f"Test rows of all seeds in {groups} groups of equal size, ordered by the members' spread; root mean squares. "
        "A rising curve: the spread predicts the error. On the dashed line both are equal; above it, the spread "
        "underestimates the error.",
        f"Error against the spread of the members, {arm.label}. {parts}.",
        draw,
        height=HEIGHT + 0.7,
    )


# -- contested cases ---------------------------------------------------------------------------------------------------


def _find_contested(results: Results) -> tuple[ArmSummary, RunResult, list[ContestedCase]] | None:
    """Return the contested cases of the first run at a best λ that recorded any."""
    for arm in arms_with_figures(results):
        best = best_diversity(results, arm)
        for run in results.finished(arm, best) if best is not None else ():
            if cases := contested_cases(results.arrays(run)):
                return arm, run, cases
    return None


def contested_table(results: Results) -> ReportTable | None:
    """Table of contested test rows, unless the data are images."""
    found = _find_contested(results)
    if found is None or found[2][0].image is not None:
        return None
    arm, run, cases = found
    in_file = all(case.row is not None for case in cases)
    rows = [
        [
            f"{case.row if in_file else case.position:,}",
            _class_name(results, case.target, 40),
            ", ".join(_votes(results, case, 5, 40)),
        ]
        for case in cases
    ]
    counted = "Rows are counted from 1 in the file." if in_file else "Rows are counted from 0 in the test part."
    note = f"{arm.label}, {at(run.diversity)}, seed {run.seed}; most contested first. {counted}"
    columns = ("Row of the file" if in_file else "Test row", "Class", "Votes of the members")
    return make_table("The test rows on which members disagree most", columns, [("", rows)], note, "ntt")


def _contested_images(results: Results) -> FigureSpec | None:
    found = _find_contested(results)
    if found is None or found[2][0].image is None:
        return None
    arm, run, cases = found
    rows = -(-len(cases) // COLUMNS)
    parts = "; ".join(
        f"case {case.position}, true class {_class_name(results, case.target)}, "
        f"votes {', '.join(_votes(results, case))}"
        for case in cases
    )

    def draw(figure: Figure, theme: Theme) -> None:
        panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for axes in panels:
            axes.set_axis_off()
        grey = {"cmap": "gray_r" if theme.name == "light" else "gray", "vmin": 0, "vmax": 255}
        for axes, case in zip(panels, cases, strict=False):
            assert case.image is not None  # all cases have images, or none
            axes.imshow(case.image, **(grey if case.image.ndim == 2 else {}), interpolation="nearest")
            axes.set_title(_class_name(results, case.target), fontsize=10.5, fontweight="bold", pad=3)
            style = {"ha": "center", "va": "top", "fontsize": 9.5, "linespacing": 1.15}
            axes.text(0.5, -0.04, "\n".join(_votes(results, case)), transform=axes.transAxes, **style)

    return FigureSpec(
        "disputed",
        "disputed",
        "The test images on which members disagree most",
        f"{arm.label}, {at(run.diversity)}, seed {run.seed}. Above each image its true class, "
        f"below it the votes of the {arm.num_members} members.",
        f"{formats.count(len(cases), 'test image')} with true class and the members' votes: {parts}.",
        draw,
        height=0.4 + 2.05 * rows,
        photographs=True,
    )


def _class_name(results: Results, index: int, width: int = 14) -> str:
    classes = results.data.classes
    return formats.shorten(classes[index], width) if 0 <= index < len(classes) else str(index)


def _votes(results: Results, case: ContestedCase, most: int = 3, width: int = 14) -> list[str]:
    lines = [f"{_class_name(results, label, width)} × {number}" for label, number in case.votes[:most]]
    rest = sum(number for _, number in case.votes[most:])
    return [*lines, f"others × {rest}"] if rest else lines
