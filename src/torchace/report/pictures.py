"""Figures of what the ensemble predicts: reliability, who disagrees with whom, and the cases in dispute."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchace.report import formats
from torchace.report.arrays import Array, Disputed, Reliability, disputed_images, reliability
from torchace.report.drawing import HEIGHT, Sketch, Theme, legend, name
from torchace.report.plots import colour, drawn_arms, titled
from torchace.report.results import Arm, Results, Run
from torchace.report.statistics import lowest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4


def pictures(results: Results) -> list[Sketch]:
    """The figures drawn from the runs' arrays.

    Args:
        results: A run directory.

    Returns:
        A reliability diagram and a matrix of disagreements for each arm, and one sheet of disputed images; what the
        runs did not record is left out.
    """
    arms = drawn_arms(results)
    found = [_reliability(results, arm) for arm in arms or list(results.arms)]
    found += [_matrices(results, arm) for arm in arms]
    found.append(_disputed(results, arms))
    return [sketch for sketch in found if sketch]


def _shown(results: Results, arm: Arm) -> list[float]:
    """Two values of λ worth a picture: the smallest and the one of lowest cross entropy, or the largest."""
    diversities = results.diversities(arm)
    best = lowest(results, arm)
    if not diversities or best is None:
        return []
    return sorted({diversities[0], best if best != diversities[0] else diversities[-1]})


def _reliability(results: Results, arm: Arm) -> Sketch | None:
    curves: dict[float, Reliability] = {}
    for diversity in _shown(results, arm):
        if bins := reliability([results.arrays(run) for run in results.finished(arm, diversity)]):
            curves[diversity] = bins
    if not curves:
        return None
    told = "; ".join(
        f"λ={formats.diversity(d)}: at most {_worst(bins):.1f} points off in a bin of a hundredth of the cases or more"
        for d, bins in curves.items()
    )
    return Sketch(
        f"reliability_{results.arms.index(arm)}",
        "calibration",
        titled(results, "Reliability", arm),
        "All seeds together. On the diagonal, confidence is accuracy; above it the ensemble is too modest, "
        "below it too sure. Faint points hold less than 0.5 % of the test cases. Below: where the cases lie.",
        f"Accuracy against confidence of the ensemble, {arm.label}. {told}.",
        partial(_draw_reliability, results, arm, curves),
        height=HEIGHT + 0.7,
    )


def _worst(bins: Reliability) -> float:
    gaps = np.abs(bins.confidence - bins.accuracy)[bins.share >= 0.01]
    return 100 * float(np.max(gaps, initial=0.0))


def _draw_reliability(
    results: Results, arm: Arm, curves: dict[float, Reliability], figure: Figure, theme: Theme
) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    start = min(float(bins.confidence.min()) for bins in curves.values())
    top.plot([start, 1], [start, 1], color=theme.quiet, lw=1, ls=(0, (4, 3)))
    shades = [theme.quiet, colour(results, arm, theme)][-len(curves) :]
    for index, (diversity, bins) in enumerate(curves.items()):
        label = f"λ={formats.diversity(diversity)}"
        marker = "os"[index % 2]
        top.plot(bins.confidence, bins.accuracy, color=shades[index], lw=1.4, marker=marker, ms=0.1, alpha=0.8)
        strong = bins.share >= 0.005
        for kept, alpha in ((strong, 1.0), (~strong, 0.3)):
            top.plot(
                bins.confidence[kept],
                bins.accuracy[kept],
                ls="",
                marker=marker,
                color=shades[index],
                alpha=alpha,
                mew=0,
            )
        top.plot([], [], color=shades[index], marker=marker, label=label)
        bottom.plot(bins.confidence, 100 * bins.share, color=shades[index], lw=1.4, marker=marker, ms=3.5)
    bottom.set_yscale("log")
    bottom.yaxis.set_major_formatter("{x:g}")
    bottom.minorticks_off()
    top.set_ylabel("accuracy")
    bottom.set_ylabel("cases, %")
    bottom.set_xlabel("confidence")
    legend(figure, *top.get_legend_handles_labels())


def _matrices(results: Results, arm: Arm) -> Sketch | None:
    """Two matrices of one seed: averaging over seeds would blur members that have nothing in common but a number."""
    matrices: dict[float, Array] = {}
    seeds = sorted({run.seed for d in _shown(results, arm) for run in results.finished(arm, d)})
    for seed in seeds:
        runs = [run for d in _shown(results, arm) for run in results.finished(arm, d) if run.seed == seed]
        found = {run.diversity: results.arrays(run)["disagreement_matrix"] for run in runs if _has_matrix(results, run)}
        if len(found) > len(matrices):
            matrices, chosen = found, seed
    if not matrices:
        return None
    told = "; ".join(
        f"λ={formats.diversity(d)}: pairs differ on {_pairs(m).min():.2%} to {_pairs(m).max():.2%} of the cases"
        for d, m in matrices.items()
    )
    return Sketch(
        f"matrix_{results.arms.index(arm)}",
        "members",
        titled(results, "Who disagrees with whom", arm),
        f"Share of test cases on which two members predict different classes, in percent; seed {chosen}.",
        f"Disagreement of every pair of members, {arm.label}, seed {chosen}. {told}.",
        partial(_draw_matrices, results, arm, matrices),
        height=2.9,
    )


def _has_matrix(results: Results, run: Run) -> bool:
    matrix = results.arrays(run).get("disagreement_matrix")
    return matrix is not None and len(matrix) > 1


def _pairs(matrix: Array) -> Array:
    upper: Array = matrix[np.triu_indices(len(matrix), 1)]
    return upper


def _draw_matrices(results: Results, arm: Arm, matrices: dict[float, Array], figure: Figure, theme: Theme) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", [theme.grid, colour(results, arm, theme)])
    ramp = shades.with_extremes(bad=theme.paper)
    high = 100 * max(float(_pairs(matrix).max()) for matrix in matrices.values()) or 1.0
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    image = None
    for axes, (diversity, matrix) in zip(panels, matrices.items(), strict=True):
        size = len(matrix)
        shown = np.where(np.eye(size, dtype=bool), np.nan, 100 * matrix)
        image = axes.imshow(shown, cmap=ramp, vmin=0, vmax=high)
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
            for j, k in zip(*np.nonzero(~np.eye(size, dtype=bool)), strict=True):
                ink = theme.paper if shown[j, k] > 0.6 * high else theme.ink
                axes.text(k, j, f"{shown[j, k]:.2g}", ha="center", va="center", fontsize=8, color=ink)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.set_ylabel("%", rotation=0, labelpad=8)


def _disputed(results: Results, arms: list[Arm]) -> Sketch | None:
    """The first run, by arm and seed, at the λ of lowest cross entropy, that recorded images."""
    for arm in arms:
        best = lowest(results, arm)
        for run in results.finished(arm, best) if best is not None else ():
            if cases := disputed_images(results.arrays(run)):
                return _sheet(results, arm, run, cases)
    return None


def _sheet(results: Results, arm: Arm, run: Run, cases: list[Disputed]) -> Sketch:
    told = "; ".join(
        f"case {case.position}, true class {_class(results, case.target)}, votes {', '.join(_votes(results, case))}"
        for case in cases
    )
    rows = -(-len(cases) // COLUMNS)
    return Sketch(
        "disputed",
        "disputed",
        "The test images the members dispute most",
        f"{arm.label}, λ={formats.diversity(run.diversity)}, seed {run.seed}. Above each image its true class, "
        f"below it the votes of the {arm.num_members} members.",
        f"{formats.count(len(cases), 'test image')} with true class and the members' votes: {told}.",
        partial(_draw_sheet, results, cases, rows),
        height=0.4 + 2.05 * rows,
        photographs=True,
    )


def _class(results: Results, index: int) -> str:
    classes = results.data.classes
    return name(classes[index], 14) if 0 <= index < len(classes) else str(index)


def _votes(results: Results, case: Disputed, most: int = 3) -> list[str]:
    lines = [f"{_class(results, label)} × {number}" for label, number in case.votes[:most]]
    rest = sum(number for _, number in case.votes[most:])
    return [*lines, f"others × {rest}"] if rest else lines


def _draw_sheet(results: Results, cases: list[Disputed], rows: int, figure: Figure, theme: Theme) -> None:
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, case in zip(panels, cases, strict=False):
        grey = {"cmap": "gray_r" if theme.name == "light" else "gray", "vmin": 0, "vmax": 255}
        axes.imshow(case.image, **(grey if case.image.ndim == 2 else {}), interpolation="nearest")
        axes.set_title(_class(results, case.target), fontsize=10.5, fontweight="bold", pad=3)
        text = "\n".join(_votes(results, case))
        axes.text(0.5, -0.04, text, transform=axes.transAxes, ha="center", va="top", fontsize=9.5, linespacing=1.15)
