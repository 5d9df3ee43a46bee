"""Figures of scores and diversity against λ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace.lab.report import formats
from torchace.lab.report.drawing import MARKERS, Sketch, Theme, lambda_axis, legend, name, places
from torchace.lab.report.findings import COLLAPSED
from torchace.lab.report.formats import Metric
from torchace.lab.report.phrases import capital, covered
from torchace.lab.report.results import Arm, Results
from torchace.lab.report.statistics import Comparison, Summary, compare, lowest
from torchace.lab.report.tables import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[float, Summary]


def plots(results: Results) -> list[Sketch]:
    """The figures with λ on their axis.

    Args:
        results: A run directory.

    Returns:
        The ensemble's scores, their paired differences, diversity, and members beside the ensemble; figures without
        data are left out.
    """
    task = results.task
    found: list[Sketch | None] = []
    # a fit may have been checked at one λ alone, or not at all: then there is nothing to draw against λ
    if not results.is_fit or any(len(results.diversities(arm)) > 1 for arm in results.swept):
        found += [_against(results, key, "scores") for key in task.curves]
        found += [_differences(results, key) for key in task.differences if key != task.spread]
        found += [_against(results, key, "diversity") for key in task.diversity]
        found += [_members(results, arm) for arm in drawn_arms(results) if arm.role != "model"]
    return [sketch for sketch in found if sketch]


def drawn_arms(results: Results) -> list[Arm]:
    """The arms that get figures of their own: those with members, baselines only where there is nothing else."""
    several = [arm for arm in results.tested if arm.num_members > 1 and results.diversities(arm)]
    return [arm for arm in several if not arm.baseline or arm.role == "check"] or several


def shown(results: Results, arm: Arm) -> list[float]:
    """Two values of λ worth a picture: the smallest and the one of lowest loss, or the largest."""
    diversities = results.diversities(arm)
    best = lowest(results, arm)
    if not diversities or best is None:
        return []
    return sorted({diversities[0], best if best != diversities[0] else diversities[-1]})


def titled(results: Results, title: str, arm: Arm) -> str:
    """A figure's title, with the arm's label where there are several."""
    return title if len(drawn_arms(results)) == 1 else f"{title}: {name(arm.label)}"


def colour(results: Results, arm: Arm, theme: Theme) -> str:
    """An arm's colour, the same in every figure."""
    return theme.palette[results.arms.index(arm) % len(theme.palette)]


def marker(results: Results, arm: Arm) -> str:
    """An arm's marker, the same in every figure."""
    return MARKERS[results.arms.index(arm) % len(MARKERS)]


def _series(results: Results, arm: Arm, key: str) -> Series:
    if arm.num_members == 1 and key in results.task.diversity:
        return {}
    found = {diversity: summarize(results, arm, diversity, key) for diversity in results.diversities(arm)}
    return {diversity: summary for diversity, summary in found.items() if summary}


def _lines(results: Results, key: str) -> tuple[dict[Arm, Series], dict[Arm, Summary]]:
    """Arms drawn as points at their λ, and baselines drawn as a level."""
    series = {arm: found for arm in results.swept if (found := _series(results, arm, key))}
    levels = {arm: next(iter(found.values())) for arm, found in series.items() if arm.baseline and len(found) == 1}
    swept = {arm: found for arm, found in series.items() if arm not in levels}
    return (swept, levels) if swept else (series, {})


def _against(results: Results, key: str, group: str) -> Sketch | None:
    metric = results.metrics[key]
    swept, levels = _lines(results, key)
    if not swept:
        return None
    caption = f"Mean over seeds; bars: 95 % t interval of the mean, each for itself. {results.task.readings[key]}"
    if any(arm.role == "check" for arm in swept):
        caption += " Thin lines: one seed each."
    if results.paper and any(key in row.numbers for row in results.paper.rows):
        caption += f" Open diamonds: {results.paper.table} of the paper."
    told = [
        f"{arm.label}: " + ", ".join(f"{metric.value(s.mean)} at λ={formats.diversity(d)}" for d, s in found.items())
        for arm, found in swept.items()
    ]
    told += [f"{arm.label} (baseline): {metric.value(level.mean)}" for arm, level in levels.items()]
    title = capital(f"{'ensemble ' if group == 'scores' else ''}{metric.noun}")
    alt = f"{title} against λ. {'; '.join(told)}."
    draw = partial(_draw_against, results, metric, swept, levels)
    return Sketch(key, group, f"{title} against λ", caption, alt, draw)


def _draw_against(
    results: Results,
    metric: Metric,
    swept: dict[Arm, Series],
    levels: dict[Arm, Summary],
    figure: Figure,
    theme: Theme,
) -> None:
    axes = figure.add_subplot()
    at, to_scale = places(sorted({diversity for found in swept.values() for diversity in found}))
    width = _spacing(at)
    shown: dict[str, Any] = {}
    for index, (arm, found) in enumerate(swept.items()):
        shift = 0.07 * width * (index - (len(swept) - 1) / 2)
        x = [at[diversity] + shift for diversity in found]
        y = np.array([summary.mean for summary in found.values()]) * metric.scale
        ends = [s.interval or (s.mean, s.mean) for s in found.values()]
        bars = np.abs(np.array(ends).T * metric.scale - y)
        style: dict[str, Any] = {"color": colour(results, arm, theme), "marker": marker(results, arm)}
        if arm.role == "check":
            _draw_seeds(results, arm, metric, {diversity: at[diversity] + shift for diversity in found}, axes, theme)
        shown[name(arm.label)] = axes.errorbar(x, y, yerr=bars, capsize=2.5, elinewidth=1.2, **style)
    for arm, level in levels.items():
        shade = colour(results, arm, theme)
        shown[name(arm.label)] = axes.axhline(level.mean * metric.scale, color=shade, ls=(0, (4, 1.6)), lw=1.4)
        if level.interval:
            axes.axhspan(*(end * metric.scale for end in level.interval), color=shade, alpha=0.12, lw=0)
    axes.set_ylabel(metric.label)
    lambda_axis(axes, at, to_scale)
    if metric.key in results.task.diversity:
        axes.set_ylim(bottom=0)  # a diversity near zero shall look like one
    if metric.key == "disagreement" and axes.get_ylim()[1] < 4 * 100 * COLLAPSED:
        axes.set_ylim(top=max(axes.get_ylim()[1], 115 * COLLAPSED))
        shown["collapsed below this"] = axes.axhline(100 * COLLAPSED, color=theme.quiet, lw=1.2, ls=(0, (1, 1.5)))
    if paper := _draw_paper(results, metric, list(swept), at, axes, theme):
        shown["paper"] = paper
    legend(figure, list(shown.values()), list(shown))


def _draw_seeds(results: Results, arm: Arm, metric: Metric, at: dict[float, float], axes: Axes, theme: Theme) -> None:
    """A line a seed: what differs between seeds and what λ changes, side by side."""
    values = {diversity: results.values(arm, diversity, metric.key) for diversity in at}
    for seed in sorted({seed for found in values.values() for seed in found}):
        points = {at[d]: found[seed] * metric.scale for d, found in values.items() if seed in found}
        axes.plot(list(points), list(points.values()), color=theme.quiet, lw=0.7, alpha=0.6, marker=".", ms=5, mew=0)


def _spacing(at: dict[float, float]) -> float:
    steps = np.diff(sorted(at.values()))
    return float(steps.min()) if steps.size else 1.0


def _draw_paper(
    results: Results, metric: Metric, arms: Sequence[Arm], at: dict[float, float], axes: Axes, theme: Theme
) -> Any:
    """The paper's numbers; one far off our range is named at the edge instead of flattening everything else."""
    sizes = {arm.num_members for arm in arms}
    points = {
        at[row.diversity]: row.numbers[metric.key] * metric.scale
        for row in (results.paper.rows if results.paper else ())
        if row.diversity in at and row.num_members in sizes and metric.key in row.numbers
    }
    if not points:
        return None
    low, high = axes.get_ylim()
    reach = 1.5 * (high - low)
    near = {x: y for x, y in points.items() if low - reach <= y <= high + reach}
    mark: dict[str, Any] = {"ls": "", "marker": "D", "mfc": "none", "mec": theme.quiet, "mew": 1.2}
    [handle] = axes.plot(list(near), list(near.values()), **mark)
    low, high = axes.get_ylim()
    for x, y in points.items():
        if x not in near:
            above = y > high
            edge, align, arrow = (high, "top", "↑") if above else (low, "bottom", "↓")
            text = f"paper {arrow}\n{formats.number(y, metric.digits)}"
            axes.text(x, edge, text, ha="center", va=align, fontsize=8, color=theme.quiet)
    axes.set_ylim(low, high)
    return handle


def _differences(results: Results, key: str) -> Sketch | None:
    metric = results.metrics[key]
    # a check of one λ has its seeds drawn against λ already
    arms = [arm for arm in results.swept if arm.role != "check"]
    found = [comparison for arm in arms if (comparison := compare(results, arm, key))]
    if not any(comparison.tests for comparison in found):
        return None
    told = [
        f"{c.arm.label}: "
        + ", ".join(
            f"{metric.difference(d.mean)} at λ={formats.diversity(d.diversity)}"
            + (" (beyond the noise)" if d.significant else "")
            for d in c.differences
        )
        for c in found
    ]
    caption = (
        "Each λ against λ=0 of the same arm, seed by seed; below the line is better. Bars: 95 % intervals that hold "
        f"for all λ of an arm together, over {covered(found)}. Filled: beyond the noise."
    )
    title = f"{capital(metric.noun)}: paired difference to λ=0"
    alt = f"{title}. {'; '.join(told)}."
    return Sketch(
        f"difference_{key}", "scores", title, caption, alt, partial(_draw_differences, results, metric, found)
    )


def _draw_differences(
    results: Results, metric: Metric, found: Sequence[Comparison], figure: Figure, theme: Theme
) -> None:
    axes = figure.add_subplot()
    at, to_scale = places(sorted({d.diversity for comparison in found for d in comparison.differences}))
    width = _spacing(at)
    axes.axhline(0, color=theme.quiet, lw=1)
    for index, comparison in enumerate(found):
        shade = colour(results, comparison.arm, theme)
        shape = marker(results, comparison.arm)
        shift = 0.16 * width * (index - (len(found) - 1) / 2)
        for difference in comparison.differences:
            x, y = at[difference.diversity] + shift, difference.mean * metric.scale
            if difference.together:
                axes.plot([x, x], [end * metric.scale for end in difference.together], color=shade, lw=1.4)
            face = shade if difference.significant else theme.paper
            axes.plot([x], [y], marker=shape, color=shade, mfc=face, mew=1.3, ms=6.5)
        axes.plot([], [], marker=shape, ls="", color=shade, label=name(comparison.arm.label))
    axes.set_ylabel(metric.label.replace(", %", ", points"))
    axes.margins(x=0.08)
    lambda_axis(axes, at, to_scale)
    legend(figure, *axes.get_legend_handles_labels())


def _members(results: Results, arm: Arm) -> Sketch | None:
    metric = results.metrics[results.task.error]
    ensemble, alone = _series(results, arm, metric.key), _series(results, arm, f"member_{metric.key}")
    if not ensemble or not alone:
        return None
    told = ", ".join(
        f"at λ={formats.diversity(d)} {metric.value(ensemble[d].mean)} against {metric.value(alone[d].mean)}"
        for d in ensemble
        if d in alone
    )
    title = titled(results, "Members and ensemble", arm)
    return Sketch(
        f"members_{results.arms.index(arm)}",
        "members",
        title,
        "Every dot is a member of one seed. What lies between the two lines is what averaging the members is worth.",
        f"{capital(metric.noun)} of the ensemble against the mean of its members, {arm.label}: {told}.",
        partial(_draw_members, results, arm, metric, ensemble, alone),
    )


def _draw_members(
    results: Results, arm: Arm, metric: Metric, ensemble: Series, alone: Series, figure: Figure, theme: Theme
) -> None:
    axes = figure.add_subplot()
    at, to_scale = places(sorted(ensemble))
    width, shade = _spacing(at), colour(results, arm, theme)
    for diversity in ensemble:
        runs = results.finished(arm, diversity)
        errors = metric.scale * np.array([results.task.member_error(value) for run in runs for value in run.members])
        # spread evenly, not at random: the same page from the same files
        spread = (
            at[diversity] + 0.3 * width * (np.linspace(0, 1, len(errors)) - 0.5) if len(errors) > 1 else at[diversity]
        )
        axes.plot(spread * np.ones(len(errors)), errors, ls="", marker=".", ms=5, color=theme.quiet, alpha=0.5, mew=0)
    axes.plot([], [], ls="", marker=".", color=theme.quiet, label="a member")
    for found, style, label in ((alone, "--", "members' mean"), (ensemble, "-", "ensemble")):
        y = [metric.scale * summary.mean for summary in found.values()]
        axes.plot([at[d] for d in found], y, ls=style, marker="o", color=shade, label=label)
    axes.set_ylabel(metric.label)
    lambda_axis(axes, at, to_scale)
    legend(figure, *axes.get_legend_handles_labels())
