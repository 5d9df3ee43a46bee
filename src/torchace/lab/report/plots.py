"""Figures with λ on the x axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torchace._figures import HEIGHT, FigureSpec, Theme, add_tooltips, legend
from torchace.lab.report import formats
from torchace.lab.report.formats import at, capitalize
from torchace.lab.report.metrics import Metric
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import Interval, best_diversity, comparable_means, compare
from torchace.lab.report.tables import interval_coverage, main_arms, summarize_metric
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
DASHED = (0, (4, 3))
LABEL = 64  # characters of an arm in legends and titles
SEED_STYLE: dict[str, Any] = {"lw": 0.7, "alpha": 0.5, "marker": ".", "ms": 5}


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
        f"Each λ against λ=0{' of the same arm' * several}, paired by seed; below the line is better. Bars: 95 % "
        f"intervals that hold for all λ{' of an arm' * several} together; they cover {interval_coverage(tested)}. "
        "Filled: significant."
    )
    height = HEIGHT + 0.2 * max(0, len(found) - 3)
    return FigureSpec(f"difference_{key}", "scores", title, caption, title, draw, height)
