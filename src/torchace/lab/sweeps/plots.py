"""Plot of a sweep on matplotlib axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchace import _checks
from torchace._figures import LIGHT, draw_on
from torchace.lab.report.formats import TASKS, Metric, capitalize, with_own_metrics
from torchace.lab.report.plots import DASHED, MARKERS, SEED_STYLE, LambdaPlot
from torchace.lab.report.statistics import Difference, compare, paired_differences, summarize
from torchace.lab.sweeps.result import SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame  # type: ignore[import-untyped]

Curve = tuple[str, dict[float, dict[int, float]], tuple[Difference, ...]]  # label, values by λ and seed, differences


def plot_diversity(result: SweepResult | DataFrame, metric: str | None = None, *, ax: Axes | None = None) -> Axes:
    """Plot a metric against λ: every seed, their mean, and intervals of the paired difference to λ=0.

    A bar that does not cross the dashed line of λ=0 shows a significant difference. Bars are 95 % intervals, corrected
    for the number of λ: those of `SweepResult.table()`, or over seeds alone for a frame. Without runs at λ=0 they are
    95 % intervals of each mean.

    Args:
        result: The result of a sweep, or a frame like its `to_frame()`, with columns `diversity`, `seed` and `metric`.
        metric: A column of `to_frame()`; the cross entropy or the mean squared error by default.
        ax: The matplotlib axes; those of a new figure by default.

    Returns:
        The axes.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"diversity": [0.0, 0.0, 0.5, 0.5], "seed": [0, 1] * 2})
        >>> frame["accuracy"] = [0.8, 0.9, 0.9, 0.96]
        >>> ax = plot_diversity(frame, "accuracy")
        >>> [line] = [line for line in ax.get_lines() if line.get_label() == "mean"]
        >>> line.get_xydata().round(2).tolist()
        [[0.0, 0.85], [0.5, 0.93]]
    """
    frame = result.to_frame() if isinstance(result, SweepResult) else result
    if not {"diversity", "seed"} <= set(getattr(frame, "columns", ())):
        raise TypeError(
            "Expected `result` to be a SweepResult or a DataFrame with columns `diversity` and `seed`, "
            f"but got {type(result).__name__}."
        )
    known = [name for name in frame if name not in ("diversity", "seed") and frame[name].dtype.kind in "fiu"]
    metric = metric or next((name for name in ("cross_entropy", "mse") if name in frame), "cross_entropy")
    _checks.check_choice(metric, "metric", known)
    curves = list(_sweep_curves(result, metric) if isinstance(result, SweepResult) else _frame_curves(frame, metric))
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        raise ValueError(f"There is nothing to plot: no run has a value of {metric!r}.")
    with draw_on(ax) as ax:
        plot = LambdaPlot(ax, [d for _, values, _ in curves for d in values], _metric(metric))
        for index, curve in enumerate(curves):
            _draw_curve(plot, curve, index, 0.07 * (index - (len(curves) - 1) / 2))
        ax.legend()
    return ax


def _draw_curve(plot: LambdaPlot, curve: Curve, index: int, shift: float) -> None:
    label, values, differences = curve
    style: dict[str, Any] = {"color": LIGHT.palette[index % len(LIGHT.palette)]}
    summaries = {diversity: summarize(list(by_seed.values())) for diversity, by_seed in values.items()}
    for seed in sorted({seed for by_seed in values.values() for seed in by_seed}):
        by_lambda = {diversity: by_seed[seed] for diversity, by_seed in values.items() if seed in by_seed}
        plot.line(by_lambda, shift=shift, label="_seed", mew=0, **SEED_STYLE, **style)
    intervals = {d: summary.interval for d, summary in summaries.items()}
    if 0.0 in values:
        plot.axes.axhline(plot.metric.scale * summaries[0.0].mean, lw=1.2, ls=DASHED, label="_zero", **style)
        moved = {d.diversity: summaries[d.diversity].mean - d.mean for d in differences}  # 0 for equal seeds
        intervals = {
            d.diversity: tuple(moved[d.diversity] + end for end in d.joint_interval)  # type: ignore[misc]
            for d in differences
            if d.joint_interval
        }
    plot.bars(intervals, shift=shift, lw=1.2, label="_interval", **style)
    means = {diversity: summary.mean for diversity, summary in summaries.items()}
    plot.line(means, shift=shift, marker=MARKERS[index % len(MARKERS)], lw=2, label=label or "mean", **style)


def _sweep_curves(result: SweepResult, metric: str) -> Iterator[Curve]:
    results, key = result._results(arrays=True), metric.removeprefix("validation_")
    split = "test" if key == metric else "validation"
    for arm in results.arms:
        found = {d: results.values(arm, d, key, split) for d in results.diversities(arm)}
        values = {diversity: by_seed for diversity, by_seed in found.items() if by_seed}
        if split == "test" and (comparison := compare(results, arm, key)):
            differences = comparison.differences
        else:
            differences = paired_differences({d: v for d, v in values.items() if d}, values.get(0.0, {}))
        yield arm.label if len(results.arms) > 1 else "", values, differences


def _frame_curves(frame: DataFrame, metric: str) -> Iterator[Curve]:
    names = list(frame)[: list(frame).index("status")] if "status" in frame else ["arm"]
    axes = [name for name in names if name in frame and name not in ("diversity", "seed")]
    for labels, part in frame.groupby(axes) if axes else [((), frame)]:
        values: dict[float, dict[int, float]] = {}
        for diversity, seed, value in zip(part["diversity"], part["seed"], part[metric], strict=True):
            if math.isfinite(value):  # failed runs have none
                values.setdefault(float(diversity), {})[int(seed)] = float(value)
        values = dict(sorted(values.items()))
        label = ", ".join(f"{axis.replace('_', ' ')} {value}" for axis, value in zip(axes, labels, strict=True))
        yield label, values, paired_differences({d: v for d, v in values.items() if d}, values.get(0.0, {}))


def _metric(key: str) -> Metric:
    known = {name: metric for task in TASKS.values() for name, metric in task.metrics.items()}
    metric = known.get(key) or with_own_metrics(TASKS["classification"], [key]).metrics[key]
    unit = metric.label.partition(", ")[2]  # a score and that of one member have the same label, but not the same noun
    return replace(metric, label=capitalize(f"{metric.noun}, {unit}" if unit else metric.noun))
