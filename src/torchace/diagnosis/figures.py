"""Figures of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchace._figures import DARK, HEIGHT, LIGHT, FigureSpec, Theme, legend, render, set_member_axis
from torchace._statistics import Interval, Values, mean_interval, proportion_interval
from torchace.diagnosis.measures import Measures
from torchace.diagnosis.plots import draw_reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchace.diagnosis.diagnosis import Diagnosis


def render_figures(diagnosis: Diagnosis, *, dark: bool = False) -> dict[str, bytes]:
    """Return the figures as PNG files by name."""
    m, train = diagnosis.measures, diagnosis.train
    figures = {"members": ("Members and the ensemble", partial(_draw_members, m))}
    figures["reliability"] = ("Reliability", partial(_draw_reliability, m))
    if m.num_members > 1:
        figures["pairs"] = ("Disagreement of each pair", partial(_draw_pairs, m))
        figures["fewer_members"] = ("Accuracy with fewer members", partial(_draw_fewer_members, m))
        if train is not None:
            figures["train_and_test"] = ("Diversity on training and new data", partial(_draw_train_and_test, m, train))
    heights = {"pairs": HEIGHT + 0.5}
    return {
        name: render(
            FigureSpec(name, "diagnosis", title, "", "", draw, heights.get(name, HEIGHT)), DARK if dark else LIGHT
        )
        for name, (title, draw) in figures.items()
    }


def _draw_members(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    accuracies = [proportion_interval(int(count), m.samples) for count in m.member_correct.sum(1)]
    values = _draw_intervals(axes, accuracies, theme, "member")
    axes.axhline(float(m.correct.mean()), color=theme.palette[1], label="ensemble")
    if m.chance > values.min() - 0.5 * (1 - values.min()):  # else the line would compress the rest
        axes.axhline(m.chance, color=theme.quiet, ls=":", label="chance")
    axes.set_ylabel("accuracy")
    legend(figure, *axes.get_legend_handles_labels())


def _draw_fewer_members(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    correct = m.correct.astype(float)
    axes.axhline(0, color=theme.quiet, lw=1)
    changes = [mean_interval(100 * (without - correct)) for without in m.without]
    _draw_intervals(axes, changes, theme, "without this member")
    half = 100 * float((m.half - correct).mean())
    axes.axhline(half, color=theme.palette[1], ls="--", label="half of the members")
    axes.set_ylabel("change in accuracy, points")
    legend(figure, *axes.get_legend_handles_labels())


def _draw_reliability(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=theme.quiet, lw=1, ls=(0, (4, 3)))
    for k, bins in enumerate(m.member_bins if m.num_members > 1 else ()):
        count, confidence, correct = bins[:, bins[0] > 0]
        label = "member" if k == 0 else None
        axes.plot(confidence / count, correct / count, color=theme.palette[0], lw=0.8, alpha=0.4, label=label)
    lowest = draw_reliability(axes, m.bins, color=theme.palette[1], label="ensemble")
    axes.set_xlim(min(lowest, 1 - 1e-3) - 0.03, 1.02)
    legend(figure, *axes.get_legend_handles_labels())


def _draw_pairs(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    disagreement = 100 * m.pair_disagreement
    image = axes.imshow(disagreement, cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, label="disagreement, %")
    set_member_axis(axes, m.num_members)
    axes.set_yticks(axes.get_xticks())
    axes.set_ylim(m.num_members - 0.5, -0.5)
    axes.set_ylabel("member")
    axes.grid(visible=False)
    if m.num_members <= 8:
        for (j, k), value in np.ndenumerate(disagreement):
            color = "white" if value < 0.6 * max(disagreement.max(), 1e-9) else "black"
            axes.text(k, j, f"{value:.1f}", ha="center", va="center", color=color, fontsize=8)


def _draw_train_and_test(m: Measures, train: Measures, figure: Figure, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "mutual_information"), (right, "disagreement")):
        intervals = [mean_interval(getattr(measures, name)) for measures in (train, m)]
        for x, (value, low, high) in enumerate(intervals):
            ends = [[value - max(low, 0.0)], [high - value]]
            axes.errorbar(x, value, ends, fmt="o", color=theme.palette[x], elinewidth=1)
        axes.set_xticks([0, 1], ["training", "new"])
        axes.set_xlim(-0.5, 1.5)
        axes.set_ylim(0, 1.08 * max(intervals[0].high, intervals[1].high) or 1)
        axes.set_title(name.replace("_", " "), fontsize=10.5)


def _draw_intervals(axes: Axes, intervals: Sequence[Interval], theme: Theme, label: str) -> Values:
    """Draw one interval for each member and return the values."""
    values, low, high = np.array(intervals).T
    axes.errorbar(
        range(len(values)), values, [values - low, high - values],
        fmt="o", color=theme.palette[0], elinewidth=1, label=label,
    )  # fmt: skip
    set_member_axis(axes, len(values))
    return values
