"""Findings about the effect of λ, from paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from torchace.diagnosis.advice import DiversityAdvice, advise_diversity
from torchace.lab.report import formats
from torchace.lab.report.formats import at, capitalize
from torchace.lab.report.metrics import Metric
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import (
    Comparison,
    Difference,
    best_diversity,
    comparable_means,
    compare,
    train_loss,
)
from torchace.lab.report.tables import summarize_metric
from torchace.lab.schema.results import ArmSummary

ADVICE_METRICS = ("cross_entropy", "member_cross_entropy", "disagreement")
COLLAPSED = 0.002  # disagreement below which members count as collapsed
COLLAPSED_SPREAD = 0.01  # the same for the spread of regressors, relative to the ensemble's error


@dataclass(frozen=True)
class Finding:
    """Sentences under a heading."""

    topic: str
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Headline:
    """The main result: a verdict, a number with its interval from the same test, and how both were measured."""

    verdict: str
    number: str = ""
    interval: str = ""
    detail: str = ""
    subject: str = ""

    @property
    def sentence(self) -> str:
        """Verdict, number and interval."""
        interval = f" ({self.interval})" if self.interval else ""
        return f"{self.verdict}: {self.number}{interval}." if self.number else f"{self.verdict}."


def findings(results: Results, arm: ArmSummary) -> list[Finding]:
    """Return the findings about an arm; for a baseline with one λ, only collapsed members."""
    found = [diversity_finding(results, arm)]
    if not arm.baseline or len(results.diversities(arm)) > 1:
        found += [
            _score(results, arm, results.task.loss),
            _score(results, arm, results.task.score),
            _one_member(results, arm),
            Finding("Expected from λ=0 alone", expected.sentence) if (expected := advice(results, arm)) else None,
            *(_against_baseline(results, arm, other) for other in results.arms if other.baseline and other != arm),
        ]
    known = [finding for finding in found if finding]
    return known if len(known) > 1 or (known and known[0].warning) else []


def diversity_finding(results: Results, arm: ArmSummary) -> Finding | None:
    """Return the finding about the members' diversity and its dependence on λ."""
    metric = results.metrics[results.task.spread]
    means = comparable_means(results, arm, metric.key)
    if arm.num_members == 1 or not means:
        return None
    is_share = metric.key == "disagreement"
    cases = " of the test cases" if is_share else ""
    errors = comparable_means(results, arm, results.task.error)
    collapsed = [d for d, m in means.items() if m < (COLLAPSED if is_share else COLLAPSED_SPREAD * errors.get(d, 0.0))]
    if len(collapsed) == len(means):
        most = metric.value(max(means.values()))
        little = f"they differ on at most {most}{cases}"
        if not is_share:
            little = f"their spread is at most {most}, less than 1 % of the ensemble's error"
        text = f"The members have collapsed onto each other: {little}, for every λ. "
        return Finding(
            "Collapsed members", text + "A gain over one network does not come from averaging.", warning=True
        )
    note = ""
    if collapsed:
        below = metric.value(COLLAPSED) if is_share else "1 % of the ensemble's error"
        note = f" At {_lambdas(collapsed)} members have collapsed onto each other (below {below}): "
        note += "a gain there does not come from averaging."
    comparison = compare(results, arm, metric.key)
    if comparison is None:
        level = metric.value(means[max(means)])
        text = f"Members differ on {level}{cases}." if is_share else f"The members' spread is {level}."
    else:
        text = _diversity_text(metric, comparison, means, cases)
    return Finding(capitalize(metric.noun), text + note, warning=bool(collapsed))


def _diversity_text(metric: Metric, comparison: Comparison, means: dict[float, float], cases: str) -> str:
    first, last = min(means), max(means)
    change = f"from {metric.value(means[first])}{cases} at {at(first)} to {metric.value(means[last])} at {at(last)}"
    at_last = comparison.at(last)
    raised = [d.diversity for d in comparison.differences if d.significant and d.mean > 0]
    if not comparison.tests or at_last is None:
        notes = {difference.note for difference in comparison.differences if difference.note}
        reason = f"{min(notes)}, so this may be noise" if notes else "there is nothing to test"
        return f"It goes {change}. {capitalize(reason)}."
    if at_last.significant and at_last.mean > 0:
        steady = all(means[a] <= means[b] for a, b in pairwise(sorted(means)))
        return f"It rises with λ{'' if steady else ', though not at every step'}, {change}."
    if raised:
        return f"It rises at {_lambdas(raised)}, but not at the largest λ. It goes {change}."
    if at_last.significant:
        return f"It falls with λ, {change}: the opposite of the intended effect."
    return f"It goes {change}. With {formats.count(at_last.n, 'seed')}, that is not significant."


def _lambdas(values: list[float]) -> str:
    return "λ=" + formats.join([formats.diversity(value) for value in values])


def _evidence(metric: Metric, difference: Difference, subject: str = "The paired difference") -> str:
    if difference.p is None:
        return f"{subject} is {metric.difference(difference.mean)}; {difference.note}, so it may be noise."
    p = "p < 0.001" if difference.p < 0.001 else f"p = {difference.p:.3f}"
    corrected = "" if difference.tests == 1 else f", corrected for {difference.tests} λ"
    verdict = "significant" if difference.significant else "not significant"
    amount = metric.difference(difference.mean, difference.margin)
    return f"{subject} is {amount}. It is {verdict} ({p}{corrected})."


def _score(results: Results, arm: ArmSummary, key: str) -> Finding | None:
    metric, best, comparison = results.metrics[key], best_diversity(results, arm, key), compare(results, arm, key)
    if best is None or comparison is None:
        return None
    start = comparison.reference_diversity
    difference = comparison.at(best)
    if best == start:
        level = metric.value(comparable_means(results, arm, key)[start])
        text = f"No λ above 0 lowers it: it is lowest at {at(start)} ({level})."
    elif difference is None:
        text = f"Lowest at {at(best)}, {metric.value(comparable_means(results, arm, key)[best])}."
    else:
        both = [results.values(arm, d, key) for d in (best, start)]
        common = both[0].keys() & both[1].keys()
        here, there = (math.fsum(series[seed] for seed in common) / len(common) for series in both)
        shared = f", over the {formats.count(len(common), 'seed')} that both have"
        text = (
            f"Lowest at {at(best)}: {metric.value(here)}, against {metric.value(there)} at {at(start)}"
            f"{'' if both[0].keys() == both[1].keys() else shared}. {_evidence(metric, difference)}"
        )
        if difference.estimate is not None:
            samples = " alone" if difference.samples is None else f" and {difference.samples:,} test samples"
            text += f" The interval covers {formats.count(difference.n, 'seed')}{samples}."
    for word, prefix, sign in (("lower", "Also s", -1), ("higher", "S", 1)):
        others = [d.diversity for d in comparison.differences if d.significant and d.mean * sign > 0]
        if others := [d for d in others if d != best]:
            text += f" {prefix}ignificantly {word} at {_lambdas(others)}."
    return Finding(capitalize(metric.noun), text)


def _one_member(results: Results, arm: ArmSummary) -> Finding | None:
    best, comparison = best_diversity(results, arm), compare(results, arm, f"member_{results.task.loss}")
    difference = comparison.at(best) if comparison else None
    if arm.num_members == 1 or best is None or difference is None:
        return None
    metric, loss = results.metrics[f"member_{results.task.loss}"], results.metrics[results.task.loss].noun
    amount = metric.difference(difference.mean, difference.margin)
    if difference.estimate is None:
        text = f"A single member's {loss} changes by {amount} at {at(best)}; {difference.note}, so it may be noise."
    elif not difference.significant:
        text = f"A single member's {loss} does not change significantly at {at(best)} ({amount})."
    elif difference.mean < 0:
        text = f"A single member gets better too at {at(best)}: its {loss} changes by {amount}."
    else:
        text = f"A single member gets worse at {at(best)}: its {loss} changes by {amount}."
        ensemble = compare(results, arm, results.task.loss)
        gain = ensemble.at(best) if ensemble else None
        if gain and gain.significant:
            text += " Averaging gains more than the members lose."
    return Finding("One member", text)


def advice(results: Results, arm: ArmSummary) -> DiversityAdvice | None:
    """Return what the runs at λ=0 let expect of λ; None for other tasks, shared layers or without validation data."""
    validation = {key: results.values(arm, 0.0, key, "validation").values() for key in ADVICE_METRICS}
    config, train = results.experiment.config, train_loss(results, arm)
    kinds = [section.get("model", {}).get("kind", "separate") for section in (config, *config.get("arms", []))]
    if results.task.loss != "cross_entropy" or set(kinds) != {"separate"} or arm.num_members == 1:
        return None
    if train is None or not arm.parameters or not all(validation.values()):
        return None
    loss, member_loss, disagreement = (math.fsum(values) / len(values) for values in validation.values())
    return advise_diversity(
        train_loss=train,
        validation_loss=loss,
        member_loss=member_loss,
        disagreement=disagreement,
        num_samples=results.arm_data(arm).train,
        num_parameters=max(1, arm.parameters // arm.num_members),
    )


def _against_baseline(results: Results, arm: ArmSummary, other: ArmSummary) -> Finding | None:
    metric = results.metrics[results.task.loss]
    comparison = compare(results, arm, metric.key, other)
    difference = comparison.at(best_diversity(results, arm)) if comparison else None
    if comparison is None or difference is None:
        return None
    reference = summarize_metric(results, other, comparison.reference_diversity, metric.key)
    if reference is None:
        return None
    text = (
        f"Its {metric.noun} is {metric.value(reference.mean)} (K={other.num_members}, "
        f"{at(comparison.reference_diversity)}). "
        f"{_evidence(metric, difference, f'At {at(difference.diversity)} the difference to it')}"
    )
    if difference.estimate is not None:
        verdict = "is better" if difference.mean > 0 else "is worse"
        if not difference.significant:
            verdict = f"does as well, as far as {formats.count(difference.n, 'seed')} can tell"
        text += f" The baseline {verdict}."
    warning = difference.estimate is not None and (difference.mean > 0 or not difference.significant)
    return Finding(f"Against “{other.label}”", text, warning)


def remarks(results: Results) -> list[Finding]:
    """Return remarks on the whole experiment."""
    finished, planned = sum(run.finished for run in results.runs), formats.count(results.planned, "run")
    if finished == results.planned and not results.damaged:
        text = f"All {planned} finished." if results.planned != 1 else "The one run finished."
        found = [Finding("Complete", text)]
    else:
        problems = [f"{len(results.failed):,} failed"] if results.failed else []
        if results.damaged:
            problems.append(f"{formats.count(len(results.damaged), 'file')} could not be read")
        listed = f" {formats.join(problems)} (listed below)." if problems else ""
        text = f"{finished:,} of {planned} finished.{listed} Where runs are missing, means are over fewer seeds."
        found = [Finding("Incomplete", text, warning=True)]
    if len(results.experiment.seeds) < 2:
        text = "There is one seed. No interval can be given, and every difference may be chance."
        if results.model:
            text = "The model was trained once, so the variation between trainings is unknown."
        found.append(Finding("One seed", text, warning=not results.model))
    swept = [arm for arm in results.arms if arm.role == "sweep" and len(results.diversities(arm)) > 1]
    blind = [arm for arm in swept if not results.arm_data(arm).validation]
    if blind:
        labels = formats.join([f"“{arm.label}”" for arm in blind])
        where = "There is no validation data" if len(blind) == len(swept) else f"{labels} had no validation data"
        text = (
            f"{where}, so the best λ was chosen on the test set. Tests are corrected for the number of λ, but the "
            "lowest value is still biased. Choose λ on validation data and confirm it with fresh seeds."
        )
        found.append(Finding("Chosen on the test set", text))
    return found
