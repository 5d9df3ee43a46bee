"""Figures with λ on the x axis; figures and tables from arrays: reliability, predictions, contested cases."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, add_tooltips, legend
from torchace.lab.report import formats
from torchace.lab.report.formats import Metric, at, capitalize, quantity
from torchace.lab.report.results import Array, Results
from torchace.lab.report.statistics import Interval, best_diversity, comparable_means, compare
from torchace.lab.report.tables import (
    Cell,
    ReportTable,
    Row,
    interval_coverage,
    main_arms,
    make_table,
    summarize_metric,
)
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
DASHED = (0, (4, 3))
LABEL = 64  # characters of an arm in legends and titles
SEED_STYLE: dict[str, Any] = {"lw": 0.7, "alpha": 0.5, "marker": ".", "ms": 5}
MOST_CASES = 12  # contested cases to list
MOST_VOTES = 5  # classes to list for a contested case
RELIABILITY = ("reliability_count", "reliability_confidence", "reliability_correct")  # sums by bin


def arm_style(results: Results, arm: ArmSummary, theme: Theme) -> tuple[str, str]:
    """Return an arm's color and marker, the same in every figure."""
    index = results.arms.index(arm)
    return theme.palette[index % len(theme.palette)], MARKERS[index % len(MARKERS)]


def figure_title(results: Results, title: str, arm: ArmSummary) -> str:
    """Return a title, with the arm's label if there are several."""
    is_alone = len(main_arms(results)) == 1 and not arm.settings
    return title if is_alone else f"{title}: {formats.shorten(arm.label, LABEL)}"


def two_diversities(results: Results, arm: ArmSummary) -> list[float]:
    """Return the smallest λ and the best, or else the largest."""
    diversities, best = results.diversities(arm), best_diversity(results, arm)
    if not diversities or best is None:
        return []
    return sorted({diversities[0], best if best != diversities[0] else diversities[-1]})


def lambda_positions(values: Iterable[float]) -> tuple[dict[float, float], bool]:
    """Return x positions and whether they are to scale; close values are evenly spaced."""
    ordered = sorted(set(values))
    gaps = [b - a for a, b in pairwise(ordered)]
    if not gaps or min(gaps) >= 0.09 * (ordered[-1] - ordered[0]):
        return {value: value for value in ordered}, True
    return {value: float(i) for i, value in enumerate(ordered)}, False


class LambdaPlot:
    """Axes with λ on the x axis, with at most 12 ticks, and a metric, or differences of it, on the y axis.

    Shifts are in steps between two λ.
    """

    def __init__(self, axes: Axes, values: Iterable[float], metric: Metric, *, is_difference: bool = False) -> None:
        self.axes, self.metric, self.is_difference = axes, metric, is_difference
        self.positions, to_scale = lambda_positions(values)
        ticks = list(self.positions)[:: -(-len(self.positions) // 12) or 1]
        self.axes.set_xticks([self.positions[value] for value in ticks], [formats.diversity(value) for value in ticks])
        self.axes.set_xlabel("diversity λ" if to_scale else "diversity λ (evenly spaced)")
        self.axes.set_ylabel(metric.difference_label if is_difference else metric.label)
        self.axes.grid(axis="x", visible=False)

    def x(self, diversity: float, shift: float = 0.0) -> float:
        """Return the x position of a λ."""
        step = min((b - a for a, b in pairwise(self.positions.values())), default=1.0)
        return self.positions[diversity] + shift * step

    def line(self, values: Mapping[float, float], *, shift: float = 0.0, name: str = "", **style: Any) -> Any:
        """Draw values by λ; `name` begins the tooltips."""
        x = [self.x(diversity, shift) for diversity in values]
        [line] = self.axes.plot(x, [self.metric.scale * value for value in values.values()], **style)
        text = self.metric.difference if self.is_difference else self.metric.value
        prefix = f"{name}, " if name else ""
        add_tooltips(line, [f"{prefix}{at(diversity)}: {text(value)}" for diversity, value in values.items()])
        return line

    def bars(self, intervals: Mapping[float, Interval | None], *, shift: float = 0.0, **style: Any) -> None:
        """Draw intervals by λ as vertical bars."""
        for diversity, ends in intervals.items():
            if ends:
                x, y = [self.x(diversity, shift)] * 2, [self.metric.scale * end for end in ends]
                self.axes.plot(x, y, **style)


def lambda_figures(results: Results) -> list[FigureSpec]:
    """Return the figures of a sweep: scores, differences to λ=0 and diversity; none for a fit."""
    if results.model:
        return []
    found = [_score(results, key, "scores") for key in (results.task.loss, results.task.score)]
    found += [_difference(results), _score(results, results.task.spread, "diversity")]
    return [spec for spec in found if spec]


def _score(results: Results, key: str, group: str) -> FigureSpec | None:
    """A metric against λ; baselines with one λ are horizontal lines."""
    metric, series = results.metrics[key], []
    for arm in results.arms:
        found = {d: summarize_metric(results, arm, d, key) for d in results.diversities(arm)}
        if summaries := {diversity: summary for diversity, summary in found.items() if summary}:
            series.append((arm, summaries))
    if not series:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        plot = LambdaPlot(figure.add_subplot(), [d for _, found in series for d in found], metric)
        for index, (arm, found) in enumerate(series):
            shift = 0.07 * (index - (len(series) - 1) / 2)
            color, marker = arm_style(results, arm, theme)
            intervals, means = {d: s.interval for d, s in found.items()}, {d: s.mean for d, s in found.items()}
            plot.bars(intervals, shift=shift, color=color, lw=1.2, marker="_", ms=5.0)
            label = formats.shorten(arm.label, LABEL)
            plot.line(means, shift=shift, name=arm.label, color=color, marker=marker, label=label)
            if arm.baseline and len(means) == 1:
                plot.axes.axhline(metric.scale * next(iter(means.values())), color=color, ls=DASHED, lw=1.4)
        if group == "diversity":
            plot.axes.set_ylim(bottom=0)  # shows how close to zero it is
        legend(figure, *plot.axes.get_legend_handles_labels())

    title = f"{capitalize(('ensemble ' if group == 'scores' else '') + metric.noun)} against λ"
    caption = f"Mean over seeds; bars: 95 % t interval of each mean. {capitalize(metric.reading)}"
    height = HEIGHT + 0.2 * max(0, len(series) - 3)  # room for the legend
    return FigureSpec(key, group, title, caption, title, draw, height)


def _difference(results: Results) -> FigureSpec | None:
    """Paired differences of the loss to λ=0, in percent of it, so that arms can be compared."""
    key = results.task.loss
    metric = results.metrics[key]
    found = [comparison for arm in results.arms if (comparison := compare(results, arm, key))]
    tested = [d for comparison in found for d in comparison.differences if d.joint_interval]
    if not tested:
        return None
    percent = Metric(key, f"{metric.noun}, change in %", metric.noun, digits=1, scale=100.0, difference_unit=" %")

    def draw(figure: Figure, theme: Theme) -> None:
        diversities = [d.diversity for comparison in found for d in comparison.differences]
        plot = LambdaPlot(figure.add_subplot(), diversities, percent, is_difference=True)
        plot.axes.axhline(0, color=theme.quiet, lw=1)
        for index, comparison in enumerate(found):
            color, marker = arm_style(results, comparison.arm, theme)
            level = comparable_means(results, comparison.arm, key)[comparison.reference_diversity] or 1.0
            shift = 0.16 * (index - (len(found) - 1) / 2)
            for d in comparison.differences:
                low, high = d.joint_interval or (d.mean, d.mean)
                plot.bars({d.diversity: (low / level, high / level)}, shift=shift, color=color, lw=1.4)
                face = color if d.significant else theme.paper
                style = {"marker": marker, "color": color, "mfc": face, "mew": 1.3, "ms": 6.5}
                plot.line({d.diversity: d.mean / level}, shift=shift, name=comparison.arm.label, **style)
            label = formats.shorten(comparison.arm.label, LABEL)
            plot.axes.plot([], [], marker=marker, ls="", color=color, label=label)
        plot.axes.margins(x=0.08)
        legend(figure, *plot.axes.get_legend_handles_labels())

    title = f"{capitalize(metric.noun)}: change against λ=0"
    several = len(results.arms) > 1
    caption = (
        f"Below the line: better than λ=0{' of the same arm' * several}. Filled: significant. Bars: 95 % intervals, "
        f"paired by seed and joint for all λ{' of an arm' * several}; they cover {interval_coverage(tested)}."
    )
    height = HEIGHT + 0.2 * max(0, len(found) - 3)
    return FigureSpec(f"difference_{key}", "scores", title, caption, title, draw, height)


# -- arrays ------------------------------------------------------------------------------------------------------------


def array_figures(results: Results) -> list[FigureSpec]:
    """Return the figures drawn from arrays."""
    build = _predictions if results.task.name == "regression" else _reliability
    found = [build(results, arm) for arm in main_arms(results) or results.arms]
    return [spec for spec in found if spec]


def _reliability(results: Results, arm: ArmSummary) -> FigureSpec | None:
    curves: dict[float, tuple[Array, Array, Array]] = {}  # confidence, accuracy and share of cases of non-empty bins
    for diversity in two_diversities(results, arm):
        arrays = [results.arrays(run) for run in results.finished(arm, diversity)]
        recorded = [[a[key] for key in RELIABILITY] for a in arrays if RELIABILITY[0] in a]
        total: Array = np.asarray(recorded, dtype=np.float64).sum(0)  # (3, bins)
        if recorded and total[0].any():
            count, confidence, correct = total[:, total[0] > 0]
            curves[diversity] = confidence / count, correct / count, count / count.sum()
    if not curves:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        start = min(float(confidence.min()) for confidence, _, _ in curves.values())
        axes.plot([start, 1], [start, 1], color=theme.quiet, lw=1, ls=DASHED)
        colors = [theme.quiet, arm_style(results, arm, theme)[0]][-len(curves) :]
        for color, marker, (diversity, (x, y, share)) in zip(colors, "os", curves.items(), strict=False):
            [line] = axes.plot(x, y, color=color, lw=1.4, marker=marker, label=at(diversity))
            points = np.stack([x, y, share], 1)
            texts = [f"confidence {a:.3f}, accuracy {b:.3f}, {100 * c:.1f} % of cases" for a, b, c in points]
            add_tooltips(line, [f"{at(diversity)}: {text}" for text in texts])
        axes.set(xlabel="confidence", ylabel="accuracy")
        legend(figure, *axes.get_legend_handles_labels())

    title = figure_title(results, "Reliability", arm)
    together = "All seeds together. " * (len(results.experiment.seeds) > 1)
    caption = f"{together}Above the diagonal the ensemble is underconfident, below it overconfident."
    name = f"reliability_{results.arms.index(arm)}"
    return FigureSpec(name, "calibration", title, caption, title, draw)


def _predictions(results: Results, arm: ArmSummary) -> FigureSpec | None:
    """Predictions against observed values, at the best λ and the first seed that recorded them."""
    runs = [run for d in reversed(two_diversities(results, arm)) for run in results.finished(arm, d)]
    run = next((run for run in runs if results.arrays(run).get("predicted", np.empty(0)).size), None)
    if run is None:
        return None
    predicted, observed = (results.arrays(run)[key].astype(np.float64) for key in ("predicted", "observed"))
    size = len(observed)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        both = np.concatenate([observed, predicted])
        low, high = float(both.min()), float(both.max())
        margin = 0.04 * (high - low) or abs(high) or 1.0
        limits = (low - margin, high + margin)
        axes.plot(limits, limits, color=theme.quiet, lw=1, ls=DASHED)
        style: dict[str, Any] = {"ls": "", "marker": "o", "ms": 4, "mew": 0, "alpha": 0.75 if size <= 200 else 0.4}
        [dots] = axes.plot(observed, predicted, color=arm_style(results, arm, theme)[0], **style)
        pairs = zip(observed.tolist(), predicted.tolist(), strict=True)
        add_tooltips(dots, [f"observed {quantity(o)}, predicted {quantity(p)}" for o, p in pairs])
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="observed", ylabel="predicted")

    title = figure_title(results, "Predicted and observed", arm)
    caption = f"A dot is a test row; on the line, the prediction is exact. {at(run.diversity)}, seed {run.seed}."
    if size < results.data.test:
        caption += f" {size:,} of {results.data.test:,} test rows are drawn."
    name = f"predicted_{results.arms.index(arm)}"
    return FigureSpec(name, "predictions", title, caption, title, draw, HEIGHT + 0.7)


def contested_table(results: Results) -> ReportTable | None:
    """Table of the test cases on which members disagree most, of the first run at a best λ that recorded any."""
    best = [(arm, best_diversity(results, arm)) for arm in main_arms(results)]
    runs = [(arm, run) for arm, diversity in best if diversity is not None for run in results.finished(arm, diversity)]
    arm, run = next(((a, r) for a, r in runs if len(results.arrays(r).get("disputed_votes", ()))), (None, None))
    if arm is None or run is None:
        return None
    arrays, rows = results.arrays(run), list[Row]()
    in_file = "disputed_row" in arrays
    for i, votes in enumerate(arrays["disputed_votes"]):  # (K,)
        classes, counts = np.unique(votes, return_counts=True)
        if len(classes) == 1:
            continue
        ranked = sorted(zip(-counts, classes, strict=True))
        texts = [f"{_class_name(results, label)} ({-count})" for count, label in ranked[:MOST_VOTES]]
        if rest := -sum(count for count, _ in ranked[MOST_VOTES:]):
            texts.append(f"others ({rest})")
        image = _data_uri(arrays["disputed_images"][i]) if "disputed_images" in arrays else ""
        place = arrays["disputed_row" if in_file else "disputed_index"][i]
        rows.append(
            [Cell(f"{place:,}", image=image), _class_name(results, arrays["disputed_target"][i]), ", ".join(texts)]
        )
    if not rows:
        return None
    counted = "Rows are counted from 1 in the file." if in_file else "Cases are counted from 0 in the test set."
    note = f"Most contested first. {counted}"
    if not results.model:
        note = f"{formats.capitalize(arm.label)}, {at(run.diversity)}, seed {run.seed}. {note}"
    columns = ("Row of the file" if in_file else "Test case", "Class", "Votes of the members")
    return make_table("Test cases on which members disagree most", columns, [("", rows[:MOST_CASES])], note, "ntt")


def _data_uri(image: Array) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _class_name(results: Results, index: int) -> str:
    classes = results.data.classes
    return formats.shorten(classes[index], 40) if 0 <= index < len(classes) else str(index)
