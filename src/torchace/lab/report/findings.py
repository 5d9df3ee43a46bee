"""The headline of an arm and the findings below it, from paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchace.diagnosis.advice import advise_diversity
from torchace.lab.report import formats
from torchace.lab.report.formats import at, capitalize
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import EQUAL, best_diversity, comparable_means, compare
from torchace.lab.report.tables import arm_title
from torchace.lab.schema.results import ArmSummary

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
    number, *ends = formats.percentages([difference.mean, *(difference.joint_interval or ())], level)
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
    """Return what the runs at λ=0 let expect of λ; empty for shared layers, or without validation data."""
    loss = results.task.loss
    keys = (loss, f"member_{loss}", *(() if loss == "mse" else ("disagreement",)))
    validation = [list(results.values(arm, 0.0, key, "validation").values()) for key in keys]
    config = results.experiment.config
    kinds = {section.get("model", {}).get("kind", "separate") for section in (config, *config.get("arms", []))}
    epochs = [
        run.history[(run.best_epoch or len(run.history)) - 1] for run in results.finished(arm, 0.0) if run.history
    ]
    train = [value for epoch in epochs if (value := epoch.get(f"train_{loss}")) is not None]
    if kinds != {"separate"} or arm.num_members == 1 or not arm.parameters:
        return ""
    if not all([train, *validation]):
        return ""
    validation_loss, member_loss, *disagreement = (math.fsum(values) / len(values) for values in validation)
    data = results.arm_data(arm)
    advice = advise_diversity(
        train_loss=math.fsum(train) / len(train),
        validation_loss=validation_loss,
        member_loss=member_loss,
        disagreement=next(iter(disagreement), None),
        num_samples=data.train,
        num_parameters=max(1, arm.parameters // arm.num_members),
        num_classes=len(data.classes) or None,
    )
    return f" Expected from λ=0 alone: {advice.sentence}"


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
