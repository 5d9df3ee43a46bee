"""Figures of single members: how each does alone, and who errs with whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchace.lab.report import formats
from torchace.lab.report.arrays import Array
from torchace.lab.report.drawing import Sketch, Theme, legend
from torchace.lab.report.phrases import capital
from torchace.lab.report.plots import colour, shown, titled
from torchace.lab.report.results import Arm, Results, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _Kind:
    """A matrix of all pairs of members: the array's name, and what it says. Entries are multiplied by `scale`."""

    key: str
    title: str
    caption: str
    alt: str
    pairs: str
    scale: float
    digits: int
    unit: str
    top: float | None


_DISAGREEMENT = _Kind(
    "disagreement_matrix",
    "Who disagrees with whom",
    "Share of test cases on which two members predict different classes, in percent",
    "Disagreement",
    "pairs differ on {:.2f}% to {:.2f}% of the cases",
    100.0,
    2,
    "%",
    None,
)
_CORRELATION = _Kind(
    "residual_correlation",
    "Who errs with whom",
    "Correlation of two members' errors on the test rows: at 1 they err together and averaging removes nothing, the "
    "lower the more it removes",
    "Correlation of the errors",
    "from {:.2f} to {:.2f}",
    1.0,
    2,
    "",
    1.0,
)


def matrix_figure(results: Results, arm: Arm) -> Sketch | None:
    """Every pair of members at two λ: how often they disagree, or how alike their errors are.

    Args:
        results: A run directory.
        arm: One of its arms.

    Returns:
        The figure, None where no run recorded a matrix.
    """
    kind = _CORRELATION if results.task.name == "regression" else _DISAGREEMENT
    # of one seed: averaging over seeds would blur members that have nothing in common but a number
    matrices: dict[float, Array] = {}
    by_seed: dict[int, dict[float, Array]] = {}
    for run in (run for d in shown(results, arm) for run in results.finished(arm, d)):
        if _has_matrix(results, run, kind):
            by_seed.setdefault(run.seed, {})[run.diversity] = results.arrays(run)[kind.key]
    for seed, found in sorted(by_seed.items()):
        if len(found) > len(matrices):
            matrices, chosen = found, seed
    if not matrices:
        return None
    told = "; ".join(
        f"λ={formats.diversity(d)}: {kind.pairs.format(_pairs(m, kind).min(), _pairs(m, kind).max())}"
        for d, m in matrices.items()
    )
    return Sketch(
        f"matrix_{results.arms.index(arm)}",
        "members",
        titled(results, kind.title, arm),
        f"{kind.caption}; seed {chosen}.",
        f"{kind.alt} of every pair of members, {arm.label}, seed {chosen}. {told}.",
        partial(_draw_matrices, results, arm, kind, matrices),
        height=2.9,
    )


def _has_matrix(results: Results, run: Run, kind: _Kind) -> bool:
    matrix = results.arrays(run).get(kind.key)
    return matrix is not None and len(matrix) > 1 and _pairs(matrix, kind).size > 0


def _pairs(matrix: Array, kind: _Kind) -> Array:
    """The entries of all pairs that are defined."""
    upper: Array = kind.scale * matrix[np.triu_indices(len(matrix), 1)]
    return upper[np.isfinite(upper)]


def _draw_matrices(
    results: Results, arm: Arm, kind: _Kind, matrices: dict[float, Array], figure: Figure, theme: Theme
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", [theme.grid, colour(results, arm, theme)])
    ramp = shades.with_extremes(bad=theme.paper)
    low = min(0.0, *(float(_pairs(matrix, kind).min()) for matrix in matrices.values()))
    high = kind.top or max(float(_pairs(matrix, kind).max()) for matrix in matrices.values()) or 1.0
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    image = None
    for axes, (diversity, matrix) in zip(panels, matrices.items(), strict=True):
        size = len(matrix)
        values = np.where(np.eye(size, dtype=bool), np.nan, kind.scale * matrix)
        image = axes.imshow(values, cmap=ramp, vmin=low, vmax=high)
        axes.set_title(f"λ={formats.diversity(diversity)}", fontsize=10)
        step = 1 if size <= 10 else -(-size // 6)
        axes.set_xticks(range(0, size, step))
        axes.set_yticks(range(0, size, step))
        axes.grid(visible=False)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_xlabel("member")
        if size <= 6:
            for j, k in zip(*np.nonzero(np.isfinite(values)), strict=True):
                ink = theme.paper if values[j, k] > low + 0.6 * (high - low) else theme.ink
                text = f"{values[j, k]:.{kind.digits}g}"
                axes.text(k, j, text, ha="center", va="center", fontsize=8, color=ink)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.set_ylabel(kind.unit, rotation=0, labelpad=8)


def alone_figure(results: Results, arm: Arm) -> Sketch | None:
    """The error of each member of a kept model, beside the ensemble's.

    Args:
        results: A run directory.
        arm: The arm of the model.

    Returns:
        The figure, None where the model did not record its members.
    """
    metric = results.metrics[results.task.error]
    runs = [run for d in results.diversities(arm) for run in results.finished(arm, d)]
    run = next((run for run in runs if len(run.members) > 1 and metric.key in run.metrics["test"]), None)
    if run is None or arm.role != "model":
        return None
    test = run.metrics["test"]
    told = f"the ensemble's {metric.value(test[metric.key])}"
    if (key := f"member_{metric.key}") in test:
        told += f", the members' mean {metric.value(test[key])}"
    return Sketch(
        "alone",
        "members",
        titled(results, "Each member alone", arm),
        "A dot is one member of the model on the test set, the line the ensemble of all.",
        f"{capital(metric.noun)} of each of the {len(run.members)} members; {told}.",
        partial(_draw_alone, results, arm, run),
    )


def _draw_alone(results: Results, arm: Arm, run: Run, figure: Figure, theme: Theme) -> None:
    metric, shade = results.metrics[results.task.error], colour(results, arm, theme)
    axes = figure.add_subplot()
    errors = [metric.scale * results.task.member_error(value) for value in run.members]
    together = metric.scale * run.metrics["test"][metric.key]
    axes.axhline(together, color=shade, label="ensemble")
    axes.plot(range(len(errors)), errors, ls="", marker="o", color=theme.quiet, label="a member")
    axes.margins(y=0.15)
    step = -(-len(errors) // 12)
    axes.set_xticks(range(0, len(errors), step))
    axes.set_xlabel("member")
    axes.set_ylabel(metric.label)
    axes.grid(axis="x", visible=False)
    legend(figure, *axes.get_legend_handles_labels())
