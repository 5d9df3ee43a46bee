"""Figures with λ on the x axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, add_tooltips, legend
from torchace.lab.report import formats
from torchace.lab.report.findings import COLLAPSED
from torchace.lab.report.formats import at, capitalize
from torchace.lab.report.metrics import Metric
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import Interval, Summary, best_diversity, comparable_means, compare, summarize
from torchace.lab.report.tables import main_arms, search_differences, summarize_metric
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[float, Summary]

MARKERS = ("o", "s", "^", "D", "v", "P")
DASHED = (0, (4, 3))
LABEL = 64  # characters of an arm in legends and titles
SEED_STYLE: dict[str, Any] = {"lw": 0.7, "alpha": 0.5, "marker": ".", "ms": 5}


def arm_color(results: Results, arm: ArmSummary, theme: Theme) -> str:
    """Return an arm's color, the same in every figure."""
    return theme.palette[results.arms.index(arm) % len(theme.palette)]


def arm_marker(results: Results, arm: ArmSummary) -> str:
    """Return an arm's marker, the same in every figure."""
    return MARKERS[results.arms.index(arm) % len(MARKERS)]


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
    """Return the figures of the search, or of scores and diversity."""
    task = results.task
    found: list[FigureSpec | None] = [*_search_figures(results)]
    if results.model is None:
        found += [_score(results, key, "scores") for key in task.curves]
        found += [_difference(results, key) for key in (task.score, task.loss)]
        found += [_score(results, key, "diversity") for key in task.diversity]
        found += [_members(results, arm) for arm in main_arms(results)]
    return [spec for spec in found if spec]


def _series(results: Results, arm: ArmSummary, key: str) -> Series:
    found = {diversity: summarize_metric(results, arm, diversity, key) for diversity in results.diversities(arm)}
    return {diversity: summary for diversity, summary in found.items() if summary}


def _score(results: Results, key: str, group: str) -> FigureSpec | None:
    """A metric against λ; baselines with one λ are horizontal lines."""
    metric = results.metrics[key]
    series = [(arm, found) for arm in results.arms if (found := _series(results, arm, key))]
    swept = [(arm, found) for arm, found in series if not arm.baseline or len(found) > 1] or series
    levels = [(arm, next(iter(found.values()))) for arm, found in series if (arm, found) not in swept]
    if not swept:
        return None
    caption = f"Mean over seeds; bars: 95 % t interval of each mean. {formats.capitalize(metric.reading)}"
    if results.experiment.paper and any(key in row.values for row in results.experiment.paper.rows):
        caption += f" Open diamonds: {results.experiment.paper.table} of the paper."
    parts = [
        f"{arm.label}: " + ", ".join(f"{metric.value(s.mean)} at {at(d)}" for d, s in found.items())
        for arm, found in swept
    ]
    parts += [f"{arm.label} (baseline): {metric.value(level.mean)}" for arm, level in levels]
    title = f"{capitalize(('ensemble ' if group == 'scores' else '') + metric.noun)} against λ"

    def draw(figure: Figure, theme: Theme) -> None:
        diversities = [diversity for _, found in swept for diversity in found]
        plot = LambdaPlot(figure.add_subplot(), diversities, metric)
        axes, entries = plot.axes, list[tuple[Any, str]]()
        for index, (arm, found) in enumerate(swept):
            shift = 0.07 * (index - (len(swept) - 1) / 2)
            color, means = arm_color(results, arm, theme), {d: s.mean for d, s in found.items()}
            style = {"color": color, "lw": 1.2, "marker": "_", "ms": 5.0}
            plot.bars({d: s.interval for d, s in found.items()}, shift=shift, **style)
            line = plot.line(means, shift=shift, name=arm.label, color=color, marker=arm_marker(results, arm))
            entries.append((line, formats.shorten(arm.label, LABEL)))
        for arm, level in levels:
            color = arm_color(results, arm, theme)
            line = axes.axhline(level.mean * metric.scale, color=color, ls=(0, (4, 1.6)), lw=1.4)
            entries.append((line, formats.shorten(arm.label, LABEL)))
            if level.interval:
                axes.axhspan(*(end * metric.scale for end in level.interval), color=color, alpha=0.12, lw=0)
        if key in results.task.diversity:
            axes.set_ylim(bottom=0)  # shows how close to zero it is
        if key == "disagreement" and axes.get_ylim()[1] < 4 * 100 * COLLAPSED:
            axes.set_ylim(top=max(axes.get_ylim()[1], 115 * COLLAPSED))
            line = axes.axhline(100 * COLLAPSED, color=theme.quiet, lw=1.2, ls=(0, (1, 1.5)))
            entries.append((line, "collapsed below this"))
        if paper := _draw_paper(results, metric, {arm.num_members for arm, _ in swept}, plot, theme):
            entries.append((paper, "paper"))
        legend(figure, *zip(*entries, strict=True))

    height = HEIGHT + 0.2 * max(0, len(series) - 3)  # room for the legend
    return FigureSpec(key, group, title, caption, f"{title}. {'; '.join(parts)}.", draw, height)


def _draw_paper(results: Results, metric: Metric, sizes: set[int], plot: LambdaPlot, theme: Theme) -> Any:
    """Draw the paper's numbers; those far outside the range as text at the edge."""
    points = {
        row.diversity: row.values[metric.key] * metric.scale
        for row in (results.experiment.paper.rows if results.experiment.paper else ())
        if row.diversity in plot.positions and row.num_members in sizes and metric.key in row.values
    }
    if not points:
        return None
    low, high = plot.axes.get_ylim()
    reach = 1.5 * (high - low)
    near = {d: y / metric.scale for d, y in points.items() if d is not None and low - reach <= y <= high + reach}
    handle = plot.line(near, name="paper", ls="", marker="D", mfc="none", mec=theme.quiet, mew=1.2)
    low, high = plot.axes.get_ylim()
    for diversity, y in points.items():
        if diversity is not None and diversity not in near:
            edge, align, arrow = (high, "top", "↑") if y > high else (low, "bottom", "↓")
            text = f"paper {arrow}\n{formats.number(y, metric.digits)}"
            plot.axes.text(plot.x(diversity), edge, text, ha="center", va=align, fontsize=8, color=theme.quiet)
    plot.axes.set_ylim(low, high)
    return handle


def _difference(results: Results, key: str) -> FigureSpec | None:
    """Paired differences to λ=0; those of the loss in percent of it, so that arms can be compared."""
    metric, is_loss = results.metrics[key], key == results.task.loss
    found = [comparison for arm in results.arms if (comparison := compare(results, arm, key))]
    tested = [d for comparison in found for d in comparison.differences if d.joint_interval]
    if not tested:
        return None
    covered = "seeds, and test samples where these were recorded"
    if len({d.samples is None for d in tested}) == 1:
        covered = "seeds alone" if tested[0].samples is None else "seeds and test samples"
    caption = (
        "Each λ against λ=0 of the same arm, paired by seed; below the line is better. Bars: 95 % intervals that hold "
        f"for all λ of an arm together, over {covered}. Filled: significant."
    )
    levels, shown = [1.0] * len(found), metric
    if is_loss:
        levels = [comparable_means(results, c.arm, key)[c.reference_diversity] or 1.0 for c in found]
        shown = Metric(key, f"{metric.noun}, change in %", metric.noun, digits=1, scale=100.0, difference_unit=" %")
    parts = [
        f"{c.arm.label}: "
        + ", ".join(
            f"{metric.difference(d.mean)} at {at(d.diversity)}{' (significant)' if d.significant else ''}"
            for d in c.differences
        )
        for c in found
    ]
    title = f"{capitalize(metric.noun)}: {'change against' if is_loss else 'paired difference to'} λ=0"

    def draw(figure: Figure, theme: Theme) -> None:
        diversities = [d.diversity for comparison in found for d in comparison.differences]
        plot = LambdaPlot(figure.add_subplot(), diversities, shown, is_difference=True)
        plot.axes.axhline(0, color=theme.quiet, lw=1)
        for index, (comparison, level) in enumerate(zip(found, levels, strict=True)):
            color, marker = arm_color(results, comparison.arm, theme), arm_marker(results, comparison.arm)
            shift = 0.16 * (index - (len(found) - 1) / 2)
            intervals = {d.diversity: d.joint_interval for d in comparison.differences if d.joint_interval}
            relative = {diversity: (low / level, high / level) for diversity, (low, high) in intervals.items()}
            plot.bars(relative, shift=shift, color=color, lw=1.4)
            for d in comparison.differences:
                face = color if d.significant else theme.paper
                style = {"marker": marker, "color": color, "mfc": face, "mew": 1.3, "ms": 6.5}
                plot.line({d.diversity: d.mean / level}, shift=shift, name=comparison.arm.label, **style)
            label = formats.shorten(comparison.arm.label, LABEL)
            plot.axes.plot([], [], marker=marker, ls="", color=color, label=label)
        plot.axes.margins(x=0.08)
        legend(figure, *plot.axes.get_legend_handles_labels())

    height = HEIGHT + 0.2 * max(0, len(found) - 3)
    return FigureSpec(f"difference_{key}", "scores", title, caption, f"{title}. {'; '.join(parts)}.", draw, height)


def _members(results: Results, arm: ArmSummary) -> FigureSpec | None:
    metric = results.metrics[results.task.error]
    ensemble, members = _series(results, arm, metric.key), _series(results, arm, f"member_{metric.key}")
    if not ensemble or not members:
        return None
    parts = ", ".join(
        f"at {at(d)} {metric.value(ensemble[d].mean)} against {metric.value(members[d].mean)}"
        for d in ensemble
        if d in members
    )

    def draw(figure: Figure, theme: Theme) -> None:
        plot = LambdaPlot(figure.add_subplot(), ensemble, metric)
        for diversity in ensemble:
            runs = results.finished(arm, diversity)
            errors = [metric.scale * results.task.member_error(value) for run in runs for value in run.members]
            # evenly, not at random: reproducible
            shifts = 0.3 * (np.linspace(0, 1, len(errors)) - 0.5) if len(errors) > 1 else np.zeros(len(errors))
            x = [plot.x(diversity, float(shift)) for shift in shifts]
            plot.axes.plot(x, errors, ls="", marker=".", ms=5, color=theme.quiet, alpha=0.5, mew=0)
        plot.axes.plot([], [], ls="", marker=".", color=theme.quiet, label="a member")
        for found, style, label in ((members, "--", "members' mean"), (ensemble, "-", "ensemble")):
            means = {d: summary.mean for d, summary in found.items() if d in ensemble}
            plot.line(means, name=label, ls=style, marker="o", color=arm_color(results, arm, theme), label=label)
        legend(figure, *plot.axes.get_legend_handles_labels())

    return FigureSpec(
        f"members_{results.arms.index(arm)}",
        "members",
        figure_title(results, "Members and ensemble", arm),
        "Every dot is a member of one seed. The gap between the two lines is the gain from averaging.",
        f"{capitalize(metric.noun)} of the ensemble against the mean of its members, {arm.label}: {parts}.",
        draw,
    )


def _search_figures(results: Results) -> list[FigureSpec]:
    search = results.experiment.search
    if search is None or not search.scores:
        return []
    metric, scores, chosen = results.metrics[search.metric], search.scores, search.chosen
    means = {diversity: summarize(list(values.values())).mean for diversity, values in scores.items()}
    differences = search_differences(search)

    def draw_scores(figure: Figure, theme: Theme) -> None:
        plot = LambdaPlot(figure.add_subplot(), means, metric)
        for seed in sorted({seed for values in scores.values() for seed in values}):
            by_lambda = {d: values[seed] for d, values in scores.items() if seed in values}
            plot.line(by_lambda, name=f"seed {seed}", color=theme.quiet, mew=0, **SEED_STYLE)
        plot.axes.plot([], [], color=theme.quiet, label="a seed", **SEED_STYLE)
        if 0.0 in means:
            plot.axes.axhline(means[0.0] * metric.scale, color=theme.quiet, lw=1.2, ls=DASHED, label="λ=0")
        plot.line(means, name="mean", color=theme.palette[0], marker="o", lw=2, label="mean")
        if chosen in means:
            plot.line({chosen: means[chosen]}, label=f"chosen, {at(chosen)}", **_ring(theme))
        plot.axes.margins(x=0.06)
        legend(figure, *plot.axes.get_legend_handles_labels())

    def draw_differences(figure: Figure, theme: Theme) -> None:
        diversities = [d.diversity for d in differences]
        plot = LambdaPlot(figure.add_subplot(), diversities, metric, is_difference=True)
        plot.axes.axhline(0, color=theme.quiet, lw=1.2, ls=DASHED)
        for d in differences:
            values, zero = scores[d.diversity], scores[0.0]
            dots = [metric.scale * (values[seed] - zero[seed]) for seed in sorted(values.keys() & zero.keys())]
            x = [plot.x(d.diversity)] * len(dots)
            plot.axes.plot(x, dots, ls="", marker=".", ms=6, color=theme.quiet, mew=0)
            plot.bars({d.diversity: d.interval}, color=theme.palette[0], lw=1.4, alpha=0.7)
            plot.line({d.diversity: d.mean}, name="mean", marker="o", color=theme.palette[0])
            if d.diversity == chosen:
                plot.line({d.diversity: d.mean}, **_ring(theme))
        plot.axes.margins(x=0.06)

    title = f"{capitalize(search.split)} {metric.noun} against λ"
    parts = ", ".join(f"{metric.value(mean)} at {at(diversity)}" for diversity, mean in means.items())
    caption = (
        f"Thin lines and dots: one seed each. Thick line: their mean. Ring: the chosen λ, {formats.diversity(chosen)}. "
        "Dashed: the level of λ=0. Lower is better."
    )
    alt = f"{title}, mean over seeds: {parts}. Chosen: {at(chosen)}."
    found = [FigureSpec("search", "search", title, caption, alt, draw_scores)]
    if differences:
        title = "Paired difference to λ=0"
        parts = ", ".join(f"{metric.difference(d.mean)} at {at(d.diversity)}" for d in differences)
        caption = (
            "Each λ minus λ=0 of the same seed, which removes the differences between seeds. Bars: 95 % t interval of "
            "each mean over seeds. Below the line is better."
        )
        alt = f"Paired difference of the {search.split} {metric.noun} to λ=0, mean over seeds: {parts}."
        found.append(FigureSpec("search_difference", "search", title, caption, alt, draw_differences))
    return found


def _ring(theme: Theme) -> dict[str, Any]:
    return {"ls": "", "marker": "o", "ms": 13, "mfc": "none", "mec": theme.palette[1], "mew": 2}
