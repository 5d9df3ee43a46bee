"""Gains of λ by arm, for experiments with many arms, and comparisons along the other axes of a sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, draw_cells
from torchace.lab.report import formats, tables
from torchace.lab.report.findings import Finding, Headline
from torchace.lab.report.formats import at
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import Difference, comparable_means, compare, correct, paired_difference, train_loss
from torchace.lab.report.tables import (
    DIFFERENCE_COLUMNS,
    Cell,
    ReportColumn,
    ReportTable,
    difference_cells,
    main_arms,
    make_table,
)
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MANY_ARMS = 7  # from here on, a report shows gains by arm instead of figures for each arm


@dataclass(frozen=True)
class ArmGain:
    """The λ chosen for an arm, and its paired difference in test loss to λ=0; losses are at λ=0."""

    arm: ArmSummary
    diversity: float
    difference: Difference | None  # None for λ=0
    test_loss: float
    validation_loss: float | None
    train_loss: float | None

    @property
    def relative(self) -> float:
        """Difference relative to the loss at λ=0; negative is better."""
        return self.difference.mean / self.test_loss if self.difference and self.test_loss else 0.0

    @property
    def verdict(self) -> str:
        """`lower`, `higher` or `within the noise`, from the interval of the difference."""
        if self.difference is None or not self.difference.significant:
            return "within the noise"
        return "lower" if self.difference.mean < 0 else "higher"


def has_many_arms(results: Results) -> bool:
    """Whether a report shows gains by arm."""
    return sum(len(results.diversities(arm)) > 1 for arm in results.arms) >= MANY_ARMS


def arm_gain(results: Results, arm: ArmSummary) -> ArmGain | None:
    """Choose λ on validation data and measure its gain on test data; None without λ=0 and another λ.

    With four seeds or more, the first half chooses and the others measure. Without validation data, the test data
    choose, and the interval is corrected for the number of λ.
    """
    loss, diversities = results.task.loss, results.diversities(arm)
    level = results.values(arm, 0.0, loss)
    if not level or len(diversities) < 2:
        return None
    validation = {d: results.values(arm, d, loss, "validation") for d in diversities}
    chooses = validation if all(validation.values()) else {d: results.values(arm, d, loss) for d in diversities}
    seeds = sorted(set.intersection(*(set(values) for values in chooses.values())))
    if not seeds:
        return None
    half = len(seeds) // 2 if len(seeds) >= 4 and chooses is validation else 0
    first, rest = seeds[:half] or seeds, seeds[half:]
    best = min(diversities, key=lambda d: math.fsum(chooses[d][seed] for seed in first))
    difference = None
    if best != 0:
        values = results.values(arm, best, loss)
        here, there = (results.sample_scores(arm, d, loss) for d in (best, 0.0))
        samples = {seed: here[seed] - there[seed] for seed in here.keys() & there.keys() & set(rest)}
        difference = paired_difference(
            {s: values[s] for s in rest if s in values}, {s: level[s] for s in rest if s in level}, best, samples
        )
        if difference is not None and chooses is not validation:
            difference = replace(difference, tests=len(diversities) - 1)
    return ArmGain(
        arm,
        best,
        difference,
        test_loss=_mean([level[seed] for seed in rest if seed in level] or list(level.values())),
        validation_loss=_mean(list(validation[0.0].values())) if validation[0.0] else None,
        train_loss=train_loss(results, arm),
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def arm_gains(results: Results) -> list[ArmGain]:
    """Return the gain of every arm with λ=0 and another λ."""
    if "arm_gains" not in results.cache:
        results.cache["arm_gains"] = [gain for arm in results.arms if (gain := arm_gain(results, arm))]
    found: list[ArmGain] = results.cache["arm_gains"]
    return found


def headline(results: Results, arm: ArmSummary) -> Headline | None:
    """Return the effect of the chosen λ on an arm's test loss; None without λ=0 and another λ, or for one member.

    Verdict and interval are those of the paired differences: corrected for the number of λ, however λ was chosen.
    """
    metric, comparison = results.metrics[results.task.loss], compare(results, arm, results.task.loss)
    if comparison is None or arm.num_members == 1:
        return None
    split = "validation" if comparable_means(results, arm, metric.key, "validation") else "test"
    means = comparable_means(results, arm, metric.key, split)
    chosen = min(means, key=means.__getitem__, default=None)
    best = min((d for d in means if d), key=means.__getitem__, default=None)
    difference = comparison.at(best)
    if best is None or difference is None:
        return None
    effect = "does not change" if not difference.significant else "lowers" if difference.mean < 0 else "raises"
    verdict = f"{at(best)} {effect} {metric.noun}{' beyond the noise' * (not difference.significant)}"
    level = comparable_means(results, arm, metric.key)[comparison.reference_diversity]
    number, *ends = formats.percentages([difference.mean, *(difference.joint_interval or ())], level)
    interval = f"95 % interval {' to '.join(ends)} %" if ends else ""
    interval += f", corrected for {difference.tests} λ" if ends and difference.tests > 1 else ""
    if not ends:
        verdict = f"{at(best)} may change {metric.noun} ({difference.note})"
    if not chosen:
        verdict = f"The {split} data choose λ=0; {verdict}"
    covered = "" if difference.samples is None else f" and {difference.samples:,} test samples"
    detail = (
        f"Test {metric.noun} at {at(best)} minus that at λ=0: {metric.difference(difference.mean)}, paired over "
        f"{formats.count(difference.n, 'seed')}{covered}. The {split} data chose λ."
    )
    return Headline(verdict, f"{number} %", interval, detail, tables.arm_title(arm))


def sweep_headline(results: Results) -> Headline | None:
    """Return the headline of a sweep: of its first arm, or of all if there are many."""
    if not has_many_arms(results):
        found = (headline(results, arm) for arm in main_arms(results))
        return next((entry for entry in found if entry), None)
    gains, noun = arm_gains(results), results.metrics[results.task.loss].noun
    lower, higher = ([gain for gain in gains if gain.verdict == verdict] for verdict in ("lower", "higher"))
    verdict = f"λ lowers {noun} beyond the noise in {len(lower)} of {formats.count(len(gains), 'arm')}"
    verdict += f" and raises it in {len(higher)}" if higher else " and raises it in none"
    if not lower:
        return Headline(verdict)
    best = min(lower, key=lambda gain: gain.relative)
    assert best.difference is not None
    assert best.difference.joint_interval is not None
    number, low, high = formats.percentages([best.difference.mean, *best.difference.joint_interval], best.test_loss)
    detail = f"The largest gain: “{best.arm.label}” at {at(best.diversity)}."
    return Headline(verdict, f"{number} %", f"95 % interval {low} to {high} %", detail)


def gain_table(results: Results) -> ReportTable:
    """Losses at λ=0, the chosen λ and its gain, one row an arm."""
    metric, rows = results.metrics[results.task.loss], list[list[str | Cell]]()
    for gain in arm_gains(results):
        d = gain.difference
        clear = gain.verdict == "lower"
        losses = [formats.NONE if v is None else metric.number(v) for v in (gain.train_loss, gain.validation_loss)]
        interval = metric.interval(d.joint_interval) if d and d.joint_interval else formats.NONE
        relative = formats.number(100 * gain.relative, 1, signed=True) if d else formats.NONE
        rows.append([
            gain.arm.label, *losses, metric.number(gain.test_loss), formats.diversity(gain.diversity),
            Cell(metric.change(d.mean) if d else formats.NONE, strong=clear), interval, Cell(relative, strong=clear),
        ])  # fmt: skip
    columns = ("Arm", "Training", "Validation", "Test", "Chosen λ", "Difference", "95 % interval", "Difference, %")
    choice = "The validation data choose λ with the first half of the seeds; the other seeds give the difference."
    if any(gain.validation_loss is None for gain in arm_gains(results)):
        choice = "Without validation data, the test data choose λ; intervals are corrected for the number of λ."
    note = (
        f"{formats.capitalize(metric.noun)} at λ=0, and the paired difference at the chosen λ on the test data. "
        f"{choice} Bold: the interval excludes 0 and the loss is lower."
    )
    return make_table("The gain of λ by arm", columns, [("", rows)], note, kinds="t")


def gain_figures(results: Results) -> list[FigureSpec]:
    """Return the map of gains of a grid with two axes, if the experiment is one."""
    gains = [gain for gain in arm_gains(results) if len(gain.arm.cell) == 2]
    names = {tuple(gain.arm.cell) for gain in gains}
    if len(names) != 1:
        return []
    (down, across), noun = names.pop(), results.metrics[results.task.loss].noun
    rows, columns = (list(dict.fromkeys(gain.arm.cell[axis] for gain in gains)) for axis in (down, across))
    values, texts = np.full((len(rows), len(columns)), np.nan), {}
    for gain in gains:
        place = rows.index(gain.arm.cell[down]), columns.index(gain.arm.cell[across])
        values[place] = 100 * gain.relative
        mark = "" if gain.verdict == "within the noise" else "*"
        texts[place] = f"{formats.number(values[place], 1, signed=True)}{mark}\n{formats.at(gain.diversity)}"

    def draw(figure: Figure, theme: Theme) -> None:
        axes, largest = figure.add_subplot(), float(np.nanmax(np.abs(values), initial=1.0))
        draw_cells(
            axes,
            values,
            lambda value: (theme.palette[value > 0], 0.7 * abs(value) / largest),
            lambda row, column: texts[row, column],
            lambda row, column: f"{down} {rows[row]}, {across} {columns[column]}: {texts[row, column]} %",
        )
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel=across, ylabel=down)

    parts = "; ".join(f"{gain.arm.label}: {formats.number(100 * gain.relative, 1, signed=True)} %" for gain in gains)
    title = f"Change of {noun} at the chosen λ, %"
    caption = "Blue: lower, which is better. Star: beyond the noise. The table of gains says how λ was chosen."
    return [FigureSpec("gain_map", "scores", title, caption, f"{title}. {parts}.", draw, max(HEIGHT, 0.62 * len(rows)))]


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
