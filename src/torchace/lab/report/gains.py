"""Gains of λ by arm, for experiments with many arms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, draw_cells
from torchace.lab.report import formats
from torchace.lab.report.findings import Headline, headline
from torchace.lab.report.formats import NONE, at
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import Difference, paired_difference, sample_differences
from torchace.lab.report.tables import Cell, ReportTable, Row, main_arms, make_table
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

    @property
    def relative(self) -> float:
        """Difference relative to the loss at λ=0; negative is better."""
        return self.difference.mean / self.test_loss if self.difference and self.test_loss else 0.0

    @property
    def verdict(self) -> str:
        """`lower`, `higher` or `not significant`, from the interval of the difference."""
        if self.difference is None or not self.difference.significant:
            return "not significant"
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
        samples = sample_differences(results, arm, best, loss, results.sample_scores(arm, 0.0, loss))
        pairs = {seed: (values[seed], level[seed]) for seed in rest if seed in values and seed in level}
        ours, theirs = ({seed: pair[side] for seed, pair in pairs.items()} for side in (0, 1))
        difference = paired_difference(ours, theirs, best, samples)
        if difference is not None and chooses is not validation:
            difference = replace(difference, tests=len(diversities) - 1)
    return ArmGain(
        arm,
        best,
        difference,
        test_loss=fmean([level[seed] for seed in rest if seed in level] or level.values()),
        validation_loss=fmean(validation[0.0].values()) if validation[0.0] else None,
    )


def arm_gains(results: Results) -> list[ArmGain]:
    """Return the gain of every arm with λ=0 and another λ."""
    return [gain for arm in results.arms if (gain := arm_gain(results, arm))]


def sweep_headline(results: Results) -> Headline | None:
    """Return the headline of a sweep: of its first arm, or of all if there are many."""
    if not has_many_arms(results):
        found = (headline(results, arm) for arm in main_arms(results))
        return next((entry for entry in found if entry), None)
    gains, noun = arm_gains(results), results.metrics[results.task.loss].noun
    lower, higher = ([gain for gain in gains if gain.verdict == verdict] for verdict in ("lower", "higher"))
    verdict = f"λ lowers {noun} significantly in {len(lower)} of {formats.count(len(gains), 'arm')}"
    verdict += f" and raises it in {len(higher) or 'none'}"
    best = min(lower, key=lambda gain: gain.relative, default=None)
    if best is None or best.difference is None or best.difference.joint_interval is None:
        return Headline(verdict)
    number, low, high = formats.percentages([best.difference.mean, *best.difference.joint_interval], best.test_loss)
    detail = f"The largest gain: “{best.arm.label}” at {at(best.diversity)}."
    return Headline(verdict, f"{number} %", f"95 % interval {low} to {high} %", detail)


def gain_table(results: Results) -> ReportTable:
    """Losses at λ=0, the chosen λ and its gain, one row per arm."""
    gains, metric, rows = arm_gains(results), results.metrics[results.task.loss], list[Row]()
    for gain in gains:
        losses = (gain.validation_loss, gain.test_loss)
        row: list[str | Cell] = [gain.arm.label, *(NONE if loss is None else metric.number(loss) for loss in losses)]
        change, interval, relative, d = NONE, NONE, NONE, gain.difference
        if d:
            change, relative = metric.change(d.mean), formats.number(100 * gain.relative, 1, signed=True)
            interval = metric.interval(d.joint_interval) if d.joint_interval else NONE
        strong = gain.verdict == "lower"
        row += [formats.diversity(gain.diversity), Cell(change, strong), interval, Cell(relative, strong)]
        rows.append(row)
    columns = ("Arm", "Validation", "Test", "Chosen λ", "Difference", "95 % interval", "Difference, %")
    choice = "The validation data choose λ with the first half of the seeds; the other seeds give the difference."
    if any(gain.validation_loss is None for gain in gains):
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
        mark = "" if gain.verdict == "not significant" else "*"
        texts[place] = f"{formats.number(values[place], 1, signed=True)}{mark}\n{at(gain.diversity)}"

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

    title = f"Change of {noun} at the chosen λ, %"
    caption = "Blue: lower, which is better. Star: significant. The table of gains says how λ was chosen."
    alt = f"{title}, by {down} and {across}; the table of gains has the numbers."
    return [FigureSpec("gain_map", "scores", title, caption, alt, draw, max(HEIGHT, 0.62 * len(rows)))]
