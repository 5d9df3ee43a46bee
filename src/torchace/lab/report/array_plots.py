"""Figures and tables from arrays: reliability, pairs of members, predictions, contested cases."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, add_tooltips, draw_cells, legend
from torchace.lab.report import formats
from torchace.lab.report.formats import at, capitalize, quantity
from torchace.lab.report.plots import DASHED, arm_color, figure_title, two_diversities
from torchace.lab.report.results import Array, Results, contested_cases, error_vs_spread, join_predictions, reliability
from torchace.lab.report.statistics import best_diversity
from torchace.lab.report.tables import Cell, ReportTable, main_arms, make_table
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Arrays = dict[str, Array]
MOST_VOTES = 5  # classes to list for a contested case


def array_figures(results: Results) -> list[FigureSpec]:
    """Return the figures drawn from arrays."""
    arms = main_arms(results)
    builders: list[Callable[[Results, ArmSummary], FigureSpec | None]] = [_reliability, _members_alone, _pairs]
    if results.task.name == "regression":
        builders = [_predictions, _error_vs_spread, _members_alone, _pairs]
    found = []
    for index, build in enumerate(builders):
        found += [build(results, arm) for arm in (arms or results.arms if index == 0 else arms)]
    return [spec for spec in found if spec]


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
                [dots] = top.plot(x, y, ls="", marker=marker, color=color, alpha=alpha, mew=0)
                pairs = zip(x, y, strict=True)
                add_tooltips(dots, [f"{at(diversity)}: confidence {a:.3f}, accuracy {b:.3f}" for a, b in pairs])
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
        key, title, scale, unit, top = "disagreement_matrix", "Disagreement between members", 100.0, " %", 0.0
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
        lambda figure, theme: _draw_matrices(matrices, arm_color(results, arm, theme), unit, top, figure),
        height=2.9,
    )


def _upper(matrix: Array) -> Array:
    upper: Array = matrix[np.triu_indices(len(matrix), 1)]
    return upper


def _draw_matrices(matrices: dict[float, Array], color: str, unit: str, top: float, figure: Figure) -> None:
    entries = np.concatenate([_upper(matrix) for matrix in matrices.values()])
    low, high = min(0.0, float(np.nanmin(entries))), top or float(np.nanmax(entries)) or 1.0
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (diversity, matrix) in zip(panels, matrices.items(), strict=True):
        size = len(matrix)
        values = np.where(np.eye(size, dtype=bool), np.nan, matrix)
        draw_cells(
            axes,
            values,
            lambda value: (color, 0.05 + 0.65 * (value - low) / (high - low)),
            lambda j, k, v=values: f"{v[j, k]:.2g}" if len(v) <= 6 else "",
            lambda j, k, v=values, d=diversity: f"{at(d)}, members {j} and {k}: {v[j, k]:.2f}{unit}",
        )
        ticks = range(0, size, 1 if size <= 10 else -(-size // 6))
        axes.set(xticks=ticks, yticks=ticks, xlabel="member", aspect="equal")
        axes.set_title(at(diversity), fontsize=10)


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
        [dots] = axes.plot(range(len(errors)), errors, ls="", marker="o", color=theme.quiet, label="a member")
        add_tooltips(
            dots, [f"member {k}: {formats.number(e, metric.digits)}{metric.unit}" for k, e in enumerate(errors)]
        )
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
    ends = f"{quantity(float(rows.observed.min()))} to {quantity(float(rows.observed.max()))}"
    typical = quantity(float(np.median(np.abs(rows.error))))

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        both = np.concatenate([rows.observed, rows.predicted])
        low, high = float(both.min()), float(both.max())
        margin = 0.04 * (high - low) or abs(high) or 1.0
        limits = (low - margin, high + margin)
        axes.plot(limits, limits, color=theme.quiet, lw=1, ls=DASHED)
        alpha, size_ = (0.75, 4) if size <= 200 else (0.45, 4) if size <= 1500 else (0.25, 3)
        color = arm_color(results, arm, theme)
        [dots] = axes.plot(rows.observed, rows.predicted, ls="", marker="o", ms=size_, mew=0, alpha=alpha, color=color)
        pairs = zip(rows.observed, rows.predicted, strict=True)
        add_tooltips(dots, [f"observed {quantity(float(o))}, predicted {quantity(float(p))}" for o, p in pairs])
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
            [line] = axes.plot(x, y, color=color, marker=marker, label=at(diversity))
            pairs = zip(curve.spread.tolist(), curve.error.tolist(), strict=True)
            add_tooltips(
                line, [f"{at(diversity)}: spread {metric.value(s)}, error {metric.value(e)}" for s, e in pairs]
            )
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


def contested_table(results: Results) -> ReportTable | None:
    """Table of contested test cases, with their images if the data are images.

    They are those of the first run at a best λ that recorded any.
    """
    best = [(arm, diversity) for arm in main_arms(results) if (diversity := best_diversity(results, arm)) is not None]
    runs = ((arm, run) for arm, diversity in best for run in results.finished(arm, diversity))
    found = ((arm, run, cases) for arm, run in runs if (cases := contested_cases(results.arrays(run))))
    arm, run, cases = next(found, (None, None, []))
    if arm is None or run is None:
        return None
    in_file = all(case.row is not None for case in cases)
    rows: list[list[str | Cell]] = []
    for case in cases:
        votes = [f"{_class_name(results, label)} × {number}" for label, number in case.votes[:MOST_VOTES]]
        if rest := sum(number for _, number in case.votes[MOST_VOTES:]):
            votes.append(f"others × {rest}")
        place = Cell(f"{case.row if in_file else case.position:,}", image=_data_uri(case.image))
        rows.append([place, _class_name(results, case.target), ", ".join(votes)])
    counted = "Rows are counted from 1 in the file." if in_file else "Cases are counted from 0 in the test set."
    note = f"{arm.label}, {at(run.diversity)}, seed {run.seed}; most contested first. {counted}"
    columns = ("Row of the file" if in_file else "Test case", "Class", "Votes of the members")
    return make_table("Test cases on which members disagree most", columns, [("", rows)], note, "ntt")


def _data_uri(image: Array | None) -> str:
    if image is None:
        return ""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _class_name(results: Results, index: int) -> str:
    classes = results.data.classes
    return formats.shorten(classes[index], 40) if 0 <= index < len(classes) else str(index)
