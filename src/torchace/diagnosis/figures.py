"""The figures of a diagnosis, drawn as those of the report are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchace._figures import DARK, HEIGHT, LIGHT, FigureSpec, Theme, legend, render
from torchace.diagnosis import intervals
from torchace.diagnosis.measures import Measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchace.diagnosis.diagnosis import Diagnosis


def drawn(diagnosis: Diagnosis, *, dark: bool = False) -> dict[str, bytes]:
    """The figures as PNG files, by name."""
    theme = DARK if dark else LIGHT
    return {sketch.name: render(sketch, theme) for sketch in sketches(diagnosis)}


def sketches(diagnosis: Diagnosis) -> list[FigureSpec]:
    """What there is to draw: members beside the ensemble, pairs, fewer members, reliability, train against test."""
    m, train = diagnosis.measures, diagnosis.train
    found = [
        FigureSpec(
            "members",
            "diagnosis",
            "Members beside the ensemble",
            "Accuracy; bars: 99 % interval of each. Line: the ensemble. Dots: always the most frequent class.",
            f"Accuracy of each of {m.num_members} members, of the ensemble ({m.correct.mean():.4f}) and of guessing "
            f"({m.chance:.4f}).",
            partial(_draw_members, m),
        ),
        FigureSpec(
            "reliability",
            "diagnosis",
            "Reliability",
            "On the diagonal, confidence is accuracy; above it the predictions are too modest, below it too sure.",
            "Accuracy against confidence of the ensemble and its members.",
            partial(_draw_reliability, m),
        ),
    ]
    if m.num_members > 1:
        found += [
            FigureSpec(
                "pairs",
                "diagnosis",
                "Who differs from whom",
                "Share of samples on which two members give different answers, in percent.",
                f"Disagreement of every pair of {m.num_members} members, {m.disagreement.mean():.2%} on average.",
                partial(_draw_pairs, m),
                height=HEIGHT + 0.5,
            ),
            FigureSpec(
                "fewer_members",
                "diagnosis",
                "With fewer members",
                "Change in accuracy without one member, and with a random half of them (line); bars: 99 % interval.",
                f"Change in accuracy without each of {m.num_members} members, and with half of them.",
                partial(_draw_fewer, m),
            ),
        ]
        if train is not None:
            found.append(
                FigureSpec(
                    "train_and_test",
                    "diagnosis",
                    "Diversity on training data and on new data",
                    "Bars: 99 % interval.",
                    f"Mutual information {train.mutual_information.mean():.2g} on training data and "
                    f"{m.mutual_information.mean():.2g} on new data.",
                    partial(_draw_both, m, train),
                )
            )
    return found


def _draw_members(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    shares = [intervals.share(int(count), m.samples) for count in m.member_correct.sum(1)]
    values = np.array([accuracy.value for accuracy in shares])
    ends = np.array([[s.value - s.low for s in shares], [s.high - s.value for s in shares]])
    axes.errorbar(range(m.num_members), values, ends, fmt="o", color=theme.palette[0], elinewidth=1, label="member")
    axes.axhline(float(m.correct.mean()), color=theme.palette[1], label="ensemble")
    if m.chance > values.min() - 0.5 * (1 - values.min()):  # else the line would squeeze everything else
        axes.axhline(m.chance, color=theme.quiet, ls=":", label="guessing")
    _member_axis(axes, m.num_members)
    axes.set_ylabel("accuracy")
    legend(figure, *axes.get_legend_handles_labels())


def _draw_reliability(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=theme.quiet, lw=1, ls=(0, (4, 3)))
    for k, bins in enumerate(m.member_bins if m.num_members > 1 else ()):
        count, confidence, correct = bins[:, bins[0] > 0]
        label = "member" if k == 0 else None
        axes.plot(confidence / count, correct / count, color=theme.palette[0], lw=0.8, alpha=0.4, label=label)
    count, confidence, correct = m.bins[:, m.bins[0] > 0]
    sizes = 12 + 120 * np.sqrt(count / m.samples)  # area: how many samples a bin holds
    axes.plot(confidence / count, correct / count, color=theme.palette[1], label="ensemble")
    axes.scatter(confidence / count, correct / count, sizes, color=theme.palette[1])
    axes.set_xlim(min(float((confidence / count).min()), 1 - 1e-3) - 0.03, 1.02)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    legend(figure, *axes.get_legend_handles_labels())


def _draw_pairs(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    differ = 100 * np.array([[(one != other).mean() for other in m.choices] for one in m.choices])
    image = axes.imshow(differ, cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, label="different answers, %")
    _member_axis(axes, m.num_members)
    axes.set_yticks(axes.get_xticks())
    axes.set_ylim(m.num_members - 0.5, -0.5)
    axes.set_ylabel("member")
    axes.grid(visible=False)
    if m.num_members <= 8:
        for (j, k), value in np.ndenumerate(differ):
            shade = "white" if value < 0.6 * max(differ.max(), 1e-9) else "black"
            axes.text(k, j, f"{value:.1f}", ha="center", va="center", color=shade, fontsize=8)


def _draw_fewer(m: Measures, figure: Figure, theme: Theme) -> None:
    axes = figure.add_subplot()
    right = m.correct.astype(float)
    changes = [intervals.mean(100 * (without - right)) for without in m.without]
    values = [change.value for change in changes]
    ends = [[change.value - change.low for change in changes], [change.high - change.value for change in changes]]
    axes.axhline(0, color=theme.quiet, lw=1)
    axes.errorbar(
        range(m.num_members), values, ends, fmt="o", color=theme.palette[0], elinewidth=1, label="without this member"
    )
    half = 100 * float((m.half - right).mean())
    axes.axhline(half, color=theme.palette[1], ls="--", label="half of the members")
    _member_axis(axes, m.num_members)
    axes.set_ylabel("change in accuracy, points")
    legend(figure, *axes.get_legend_handles_labels())


def _draw_both(m: Measures, train: Measures, figure: Figure, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "mutual_information"), (right, "disagreement")):
        found = [intervals.mean(getattr(measures, name)) for measures in (train, m)]
        for x, (value, low, high) in enumerate(found):
            ends = [[value - max(low, 0.0)], [high - value]]
            axes.errorbar(x, value, ends, fmt="o", color=theme.palette[x], elinewidth=1)
        axes.set_xticks([0, 1], ["training", "new"])
        axes.set_xlim(-0.5, 1.5)
        axes.set_ylim(0, 1.08 * max(found[0].high, found[1].high) or 1)
        axes.set_title(name.replace("_", " "), fontsize=10.5)


def _member_axis(axes: Axes, num_members: int) -> None:
    step = -(-num_members // 12)
    axes.set_xticks(range(0, num_members, step))
    axes.set_xlim(-0.5, num_members - 0.5)
    axes.set_xlabel("member")
    axes.grid(axis="x", visible=False)
