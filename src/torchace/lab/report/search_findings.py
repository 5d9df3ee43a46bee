"""How λ was found: the sentence, the table and the figure of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchace.lab.report import formats
from torchace.lab.report.drawing import Sketch, Theme, lambda_axis, legend, places
from torchace.lab.report.formats import NONE, Metric
from torchace.lab.report.phrases import at, capital
from torchace.lab.report.results import Results
from torchace.lab.report.search import Search
from torchace.lab.report.statistics import Difference, family, summary
from torchace.lab.report.tables import Cell, Column, Section, Table, difference_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def search_verdict(results: Results) -> str:
    """Whether the gain of the chosen λ is beyond the noise, in plain words.

    Args:
        results: A run directory.

    Returns:
        The sentence the search wrote, or one from its numbers; empty where λ was not searched for.
    """
    search = results.search
    if search is None or search.sentence:
        return search.sentence if search else ""
    if search.chosen == 0:
        return f"The {search.split} data picked λ=0: members that ignore each other."
    if (gain := search.gain) is None:
        return f"The {search.split} data picked {at(search.chosen)}; its gain was not measured on fresh seeds."
    metric = results.metrics[search.metric]
    about = [formats.count(len(gain.seeds), "seed")]
    if gain.low is not None and gain.high is not None:
        about.insert(0, f"95 % interval {metric.interval((-gain.high, -gain.low))}")
        about[-1] += " alone" if gain.samples is None else f" and {formats.count(gain.samples, 'sample')}"
    verdict = "That is beyond the noise." if gain.beyond_noise else "That is within the noise."
    return (
        f"On fresh seeds {at(search.chosen)} changes the {metric.noun} on the {gain.split} data by "
        f"{metric.difference(-gain.mean)} against λ=0 ({'; '.join(about)}). {verdict}"
    )


def search_table(results: Results) -> Table | None:
    """The held-out score of every λ that was tried, and its paired difference to λ=0.

    Args:
        results: A run directory.

    Returns:
        The table, the chosen λ standing out; None where λ was not searched for.
    """
    search = results.search
    if search is None or not search.scores:
        return None
    metric, scores = results.metrics[search.metric], search.scores
    differences = {d.diversity: d for d in _differences(search)}
    rows = []
    for diversity, values in scores.items():
        chosen = diversity == search.chosen
        rows.append(
            (
                Cell(f"{formats.diversity(diversity)}{' (chosen)' if chosen else ''}", strong=chosen),
                Cell(str(search.round_of(diversity) or NONE)),
                Cell(str(len(values))),
                Cell(metric.mean_sd(summary(list(values.values()))), strong=chosen),
                *difference_cells(metric, differences.get(diversity)),
            )
        )
    columns = [Column("λ"), Column("Round"), Column("Seeds"), Column(metric.label)]
    columns += [Column(label, "Against λ=0") for label in ("difference", "95 % interval", "p, corrected")]
    note = (
        f"Scores on the {search.split} data, mean ± standard deviation over seeds. Differences are paired by seed; "
        "their intervals hold together with 95 %, over the noise between seeds alone. The lowest of several is "
        "flattered by having been chosen: what it is worth is measured with other seeds, on the test data."
    )
    return Table("The values of λ that were tried", tuple(columns), (Section("", tuple(rows)),), note)


def search_figures(results: Results) -> list[Sketch]:
    """The held-out score against λ, and what is left of it once the differences between seeds are taken out.

    Args:
        results: A run directory.

    Returns:
        The two figures; the second where λ=0 and another λ were tried, none where λ was not searched for.
    """
    search = results.search
    if search is None or not search.scores:
        return []
    metric = results.metrics[search.metric]
    means = {diversity: summary(list(values.values())).mean for diversity, values in search.scores.items()}
    told = ", ".join(f"{metric.value(mean)} at {at(diversity)}" for diversity, mean in means.items())
    title = f"{capital(search.split)} {metric.noun} against λ"
    found = [
        Sketch(
            "search",
            "search",
            title,
            f"Thin lines and dots: one seed each. Thick line: their mean. Ring: the λ that was chosen, "
            f"{formats.diversity(search.chosen)}. Dashed: the level of λ=0. Lower is better.",
            f"{title}, mean over seeds: {told}. Chosen: {at(search.chosen)}.",
            partial(_draw, search, metric, means),
        )
    ]
    if differences := _differences(search):
        told = ", ".join(f"{metric.difference(d.mean)} at {at(d.diversity)}" for d in differences)
        found.append(
            Sketch(
                "search_difference",
                "search",
                "The same, seed by seed, against λ=0",
                "Each λ less λ=0 of the same seed: what differs between seeds is taken out. Bars: 95 % t intervals of "
                "the mean over seeds alone, each for itself. Below the line is better.",
                f"Paired difference of the {search.split} {metric.noun} to λ=0, mean over seeds: {told}.",
                partial(_draw_differences, search, metric, differences),
            )
        )
    return found


def _differences(search: Search) -> tuple[Difference, ...]:
    """The paired difference to λ=0 of every other λ that was tried."""
    others = {diversity: values for diversity, values in search.scores.items() if diversity != 0}
    return family(others, search.scores.get(0.0, {}))


def _draw(search: Search, metric: Metric, means: Mapping[float, float], figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    positions, to_scale = places(list(means))
    shade = theme.palette[0]
    for seed in sorted({seed for values in search.scores.values() for seed in values}):
        points = {positions[d]: values[seed] * metric.scale for d, values in search.scores.items() if seed in values}
        axes.plot(list(points), list(points.values()), color=theme.quiet, lw=0.7, alpha=0.5, marker=".", ms=5, mew=0)
    axes.plot([], [], color=theme.quiet, lw=0.7, marker=".", ms=5, label="a seed")
    if 0.0 in means:
        axes.axhline(means[0.0] * metric.scale, color=theme.quiet, lw=1.2, ls=(0, (4, 3)), label="λ=0")
    y = [mean * metric.scale for mean in means.values()]
    axes.plot([positions[d] for d in means], y, color=shade, marker="o", lw=2, label="mean")
    if search.chosen in means:
        chosen = [positions[search.chosen]], [means[search.chosen] * metric.scale]
        axes.plot(*chosen, label=f"chosen, λ={formats.diversity(search.chosen)}", **_ring(theme))
    axes.set_ylabel(metric.label)
    axes.margins(x=0.06)
    lambda_axis(axes, positions, to_scale)
    legend(figure, *axes.get_legend_handles_labels())


def _draw_differences(
    search: Search, metric: Metric, differences: Sequence[Difference], figure: Figure, theme: Theme
) -> None:
    axes = figure.add_subplot()
    positions, to_scale = places([d.diversity for d in differences])
    zero, shade = search.scores[0.0], theme.palette[0]
    axes.axhline(0, color=theme.quiet, lw=1.2, ls=(0, (4, 3)))
    for difference in differences:
        x, values = positions[difference.diversity], search.scores[difference.diversity]
        dots = [metric.scale * (values[seed] - zero[seed]) for seed in sorted(values.keys() & zero.keys())]
        axes.plot([x] * len(dots), dots, ls="", marker=".", ms=6, color=theme.quiet, mew=0)
        if difference.interval:
            axes.plot([x, x], [metric.scale * end for end in difference.interval], color=shade, lw=1.4, alpha=0.7)
        axes.plot([x], [metric.scale * difference.mean], marker="o", color=shade)
        if difference.diversity == search.chosen:
            axes.plot([x], [metric.scale * difference.mean], **_ring(theme))
    axes.set_ylabel(metric.label.replace(", %", ", points"))
    axes.margins(x=0.06)
    lambda_axis(axes, positions, to_scale)


def _ring(theme: Theme) -> dict[str, Any]:
    return {"ls": "", "marker": "o", "ms": 13, "mfc": "none", "mec": theme.palette[1], "mew": 2}
