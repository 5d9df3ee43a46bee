"""Headlines and findings, from paired differences; gains of λ by arm, for experiments with many arms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, draw_cells
from torchace.diagnosis.advice import advise_diversity
from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, at, capitalize
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import (
    EQUAL,
    Difference,
    best_diversity,
    comparable_means,
    compare,
    paired_difference,
    sample_differences,
)
from torchace.lab.report.tables import Cell, ReportTable, Row, arm_title, main_arms, make_table
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY_ARMS = 7  # from here on, a report shows gains by arm instead of figures for each arm
FEWEST_SPLIT = 4  # seeds from which on some choose λ and the others measure its gain
COLLAPSED = 0.002  # disagreement below which members count as collapsed
COLLAPSED_SPREAD = 0.01  # the same for the spread of regressors, relative to the ensemble's error


@dataclass(frozen=True)
class Finding:
    """Something to know before trusting the headline."""

    topic: str
    text: str


@dataclass(frozen=True)
class Headline:
    """The main result: a verdict, a number with its interval from the same test, and how both were measured."""

    verdict: str
    number: str = ""
    interval: str = ""
    detail: str = ""
    subject: str = ""
    diversity: float | None = None  # that it is about, in a sweep

    @property
    def sentence(self) -> str:
        """Verdict, number and interval."""
        interval = f" ({self.interval})" if self.interval else ""
        return f"{self.verdict}: {self.number}{interval}." if self.number else f"{self.verdict}."


def headline(results: Results, arm: ArmSummary) -> Headline | None:
    """Return the effect of the chosen λ on an arm's test loss; None without λ=0 and another λ, or for one member.

    Verdict and interval are those of the paired differences: corrected for the number of λ, however λ was chosen.
    """
    metric, comparison = results.metrics[results.task.loss], compare(results, arm, results.task.loss)
    if comparison is None:
        return None
    split = "validation" if comparable_means(results, arm, metric.key, "validation") else "test"
    means = comparable_means(results, arm, metric.key, split)
    chosen = min(means, key=means.__getitem__, default=None)
    best = min((d for d in means if d), key=means.__getitem__, default=None)
    difference = comparison.at(best)
    if best is None or difference is None:
        return None
    effect = "does not change" if not difference.significant else "lowers" if difference.mean < 0 else "raises"
    verdict = f"{at(best)} {effect} {metric.noun}{' significantly' * (not difference.significant)}"
    level = comparable_means(results, arm, metric.key)[comparison.reference_diversity]
    mean = 0.0 if difference.note == EQUAL else difference.mean
    number, *ends = formats.percentages([mean, *(difference.joint_interval or ())], level)
    interval = f"95 % interval {' to '.join(ends)} %" if ends else ""
    interval += f", corrected for {difference.tests} λ" if ends and difference.tests > 1 else ""
    if not ends:
        may = "does not" if difference.note == EQUAL else "may"
        verdict = f"{at(best)} {may} change {metric.noun} ({difference.note})"
    if not chosen:
        verdict = f"The {split} data choose λ=0; {verdict}"
    covered = "" if difference.samples is None else f" and {difference.samples:,} test samples"
    detail = (
        f"Test {metric.noun} at {at(best)} minus that at λ=0: {metric.difference(difference.mean)}, paired over "
        f"{formats.count(difference.n, 'seed')}{covered}. The {split} data chose λ."
    )
    return Headline(verdict, f"{number} %", interval, detail, arm_title(arm), best)


def other_gains(results: Results, arm: ArmSummary) -> str:
    """Return the λ that lower the loss significantly where the headline's does not."""
    comparison, main = compare(results, arm, results.task.loss), headline(results, arm)
    first = comparison.at(main.diversity) if comparison and main else None
    if comparison is None or first is None or first.significant:
        return ""
    found = [difference for difference in comparison.differences if difference.significant and difference.mean < 0]
    metric, texts = results.metrics[results.task.loss], []
    level = comparable_means(results, arm, metric.key)[comparison.reference_diversity]
    for difference in found:
        mean, low, high = formats.percentages([difference.mean, *(difference.joint_interval or ())], level)
        texts.append(f" {at(difference.diversity)} lowers {metric.noun}: {mean} % (95 % interval {low} to {high} %).")
    return "".join(texts)


def expectation(results: Results, arm: ArmSummary) -> str:
    """Return what the rule of `advise_diversity` says; empty for shared layers, or without validation data."""
    loss = results.task.loss
    validation = [list(results.values(arm, 0.0, key, "validation").values()) for key in (loss, f"member_{loss}")]
    config = results.experiment.config
    arms = config["arms"] if isinstance(config.get("arms"), list) else []
    models = [section.get("model") for section in (config, *arms) if isinstance(section, dict)]
    shares_layers = any(isinstance(model, dict) and model.get("kind", "separate") != "separate" for model in models)
    epochs = [run.history[: run.best_epoch or None][-1] for run in results.finished(arm, 0.0) if run.history]
    train = [value for epoch in epochs if (value := epoch.get(f"train_{loss}")) is not None]
    if results.task.name == "multilabel" or shares_layers or arm.num_members == 1 or not arm.parameters:
        return ""
    data = results.arm_data(arm)
    if not all([train, data.train, len(data.classes) != 1, *validation]):
        return ""
    validation_loss, member_loss = (math.fsum(values) / len(values) for values in validation)
    advice = advise_diversity(
        train_loss=math.fsum(train) / len(train),
        validation_loss=validation_loss,
        member_loss=member_loss,
        num_samples=data.train,
        num_parameters=max(1, arm.parameters // arm.num_members),
        task=results.task.name,
    )
    text = f" Rule of thumb: {advice.sentence[0].lower()}{advice.sentence[1:]}"
    comparison, main = compare(results, arm, loss), headline(results, arm)
    found = comparison.at(advice.diversity) if comparison and main and main.diversity != advice.diversity else None
    if found is None:
        return text
    (change,) = formats.percentages([found.mean], comparable_means(results, arm, loss)[0.0])
    return f"{text} Measured at {at(advice.diversity)}: {change} %."


def findings(results: Results, arm: ArmSummary) -> list[Finding]:
    """Return collapsed members of an arm, and baselines that do as well as it or better."""
    found = [collapsed_members(results, arm)]
    if not arm.baseline:
        found += [_against_baseline(results, arm, other) for other in results.arms if other.baseline]
    return [finding for finding in found if finding]


def collapsed_members(results: Results, arm: ArmSummary) -> Finding | None:
    """Return the finding that members hardly differ at some λ, if so."""
    metric = results.metrics[results.task.spread]
    means, is_share = comparable_means(results, arm, metric.key), metric.key == "disagreement"
    errors = comparable_means(results, arm, "rmse")
    limits = {d: COLLAPSED if is_share else COLLAPSED_SPREAD * errors.get(d, 0.0) for d in means}
    collapsed = [diversity for diversity, mean in means.items() if mean < limits[diversity]]
    if arm.num_members == 1 or not collapsed:
        return None
    where = "λ=" + formats.join([formats.diversity(value) for value in collapsed])
    below = "have a spread below 1 % of the ensemble's error"
    if is_share:
        below = f"differ on fewer than {metric.value(COLLAPSED)} of the test cases"
    text = (
        f"At {where if len(collapsed) < len(means) else 'every λ'}, the members {below}: they have collapsed onto each "
        "other. A gain over one network does not come from averaging."
    )
    return Finding(f"Collapsed members of “{arm.label}”", text)


def _against_baseline(results: Results, arm: ArmSummary, other: ArmSummary) -> Finding | None:
    metric = results.metrics[results.task.loss]
    comparison = compare(results, arm, metric.key, other)
    difference = comparison.at(best_diversity(results, arm)) if comparison else None
    if difference is None or difference.joint_interval is None or (difference.significant and difference.mean < 0):
        return None
    verdict = "is better"
    if not difference.significant:
        verdict = f"does as well, as far as {formats.count(difference.n, 'seed')} can tell"
    text = (
        f"The baseline {verdict}. {capitalize(metric.noun)} of “{arm.label}” at {at(difference.diversity)} minus that "
        f"of the baseline: {metric.difference(difference.mean)} (95 % interval "
        f"{metric.interval(difference.joint_interval)}, corrected for {formats.count(difference.tests, 'λ', 'λ')})."
    )
    return Finding(f"Against “{other.label}”", text)


def missing_runs(results: Results) -> list[Finding]:
    """Return the finding that runs are missing, if so."""
    finished = sum(run.finished for run in results.runs)
    planned = sum(len(arm.diversities) for arm in results.arms) * len(results.experiment.seeds)
    if finished >= planned and not results.damaged:
        return []
    text = (
        f"{finished:,} of {formats.count(planned, 'run')} finished, {len(results.failed):,} failed, and "
        f"{formats.count(len(results.damaged), 'file')} could not be read. Means are over the finished runs."
    )
    return [Finding("Incomplete", text)]


# -- gains by arm ------------------------------------------------------------------------------------------------------


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
    def percent(self) -> str:
        """`relative` in percent; a significant one is not rounded to zero."""
        if self.verdict == "not significant":
            return formats.number(100 * self.relative, 1, signed=True)
        return formats.percentages([self.relative], 1.0)[0]

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
    half = len(seeds) // 2 if len(seeds) >= FEWEST_SPLIT and chooses is validation else 0
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
            change, relative = metric.change(d.mean, with_sign=d.significant), gain.percent
            interval = metric.interval(d.joint_interval) if d.joint_interval else NONE
        strong = gain.verdict == "lower"
        row += [formats.diversity(gain.diversity), Cell(change, strong), interval, Cell(relative, strong)]
        rows.append(row)
    columns = ("Arm", "Validation", "Test", "Chosen λ", "Difference", "95 % interval", "Difference, %")
    choice = "The validation data choose λ with the first half of the seeds; the other seeds give the difference."
    if len(results.experiment.seeds) < FEWEST_SPLIT:
        choice = "The validation data choose λ; the same seeds give the difference."
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
        texts[place] = f"{gain.percent}{mark}\n{at(gain.diversity)}"

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
