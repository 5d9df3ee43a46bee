"""Comparisons along the axes of a sweep other than λ: learning rate, weight decay and label smoothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, product

from torchace.lab.report import formats
from torchace.lab.report.findings import Finding
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import Difference, correct, paired_difference
from torchace.lab.report.tables import DIFFERENCE_COLUMNS, Cell, ReportColumn, ReportTable, difference_cells, make_table
from torchace.lab.schema.results import ArmSummary

NOTE = (
    "Differences are paired: both sides have the same seed, λ and other settings. They are averaged within a seed. The "
    "intervals of one axis and column are joint 95 % intervals over seeds (Bonferroni); they do not cover new test "
    "samples. Bold: p below 0.05."
)


@dataclass(frozen=True)
class AxisComparison:
    """Differences of an axis's values to its first value; `diversity` of a difference is the value."""

    label: str
    axis: str
    reference: float
    differences: tuple[Difference, ...]

    def at(self, value: float) -> Difference | None:
        """Return the difference at one value."""
        return next((d for d in self.differences if d.diversity == value), None)


def compare_axes(results: Results, metric: str) -> list[AxisComparison]:
    """Compare the values of every axis with its first value."""
    found = []
    swept = [arm for arm in results.arms if arm.variant_of]
    for _, group in groupby(swept, key=lambda arm: arm.variant_of):
        variants = list(group)
        for axis, values in variants[0].axes.items():
            differences = correct(_difference(results, variants, axis, v, values[0], metric) for v in values[1:])
            if differences:
                found.append(AxisComparison(variants[0].base_label, axis, values[0], differences))
    return found


def _difference(
    results: Results, variants: list[ArmSummary], axis: str, value: float, reference: float, metric: str
) -> Difference | None:
    """Mean paired difference between two values, over seeds; within a seed over λ and the other settings."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for arm, other in product(variants, variants):
        if arm.settings != {**other.settings, axis: value} or other.settings[axis] != reference:
            continue
        for diversity in results.diversities(arm):
            ours, theirs = (results.values(side, diversity, metric) for side in (arm, other))
            for seed in ours.keys() & theirs.keys():
                pairs.setdefault(seed, []).append((ours[seed], theirs[seed]))
    means = [
        {seed: math.fsum(pair[side] for pair in found) / len(found) for seed, found in pairs.items()} for side in (0, 1)
    ]
    return paired_difference(means[0], means[1], value)


def axis_tables(results: Results) -> list[ReportTable]:
    """Table of all axes, if there are any."""
    keys = results.task.differences
    compared = {key: compare_axes(results, key) for key in keys}
    sections = []
    for first in compared[keys[0]]:
        rows = []
        same = {key: c for key in keys for c in compared[key] if (c.label, c.axis) == (first.label, first.axis)}
        for difference in first.differences:
            row: list[str | Cell] = [formats.quantity(difference.diversity), str(difference.n)]
            for key in same:
                row += difference_cells(results.metrics[key], same[key].at(difference.diversity))
            rows.append(row)
        title = f"{_noun(first.axis)} against {formats.quantity(first.reference)}"
        sections.append((f"{first.label}: {title}" if first.label else formats.capitalize(title), rows))
    if not sections:
        return []
    columns: list[str | ReportColumn] = ["Value", "Seeds"]
    for key in keys:
        if compared[key]:
            columns += [ReportColumn(label, results.metrics[key].difference_label) for label in DIFFERENCE_COLUMNS]
    return [make_table("Other settings: each value against the first", columns, sections, NOTE)]


def axis_findings(results: Results) -> list[Finding]:
    """Return one finding for each axis, on the task's loss."""
    metric, found = results.metrics[results.task.loss], []
    for comparison in compare_axes(results, results.task.loss):
        reference = formats.quantity(comparison.reference)
        clear = [d for d in comparison.differences if d.significant]
        if not any(d.estimate is not None for d in comparison.differences):
            text = f"There are too few seeds to compare the values with {reference}."
        elif not clear:
            text = f"No value changes {metric.noun} significantly compared with {reference}."
        else:
            best = min(clear, key=lambda d: d.mean)
            verb = "lowers" if best.mean < 0 else "raises"
            amount = metric.difference(abs(best.mean), best.margin, signed=False)
            value = formats.quantity(best.diversity)
            text = f"{value} {verb} {metric.noun} by {amount} compared with {reference}, averaged over λ."
        arm = f" (“{comparison.label}”)" if comparison.label else ""
        found.append(Finding(f"{formats.capitalize(_noun(comparison.axis))}{arm}", text))
    return found


def _noun(axis: str) -> str:
    return axis.replace("_", " ")
