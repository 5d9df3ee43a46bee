"""What the numbers say, in sentences computed from them."""

from __future__ import annotations

import math
from itertools import pairwise

from torchace.lab.report import formats
from torchace.lab.report.model_findings import about_model, model_headline
from torchace.lab.report.phrases import Finding, at, capital, evidence, lambdas, untold, verdict, why_not
from torchace.lab.report.results import Arm, Results
from torchace.lab.report.statistics import comparable_means, compare, lowest
from torchace.lab.report.tables import summarize

COLLAPSED = 0.002
"""Below this disagreement (a share of the test cases) members count as collapsed onto each other."""

COLLAPSED_SPREAD = 0.01
"""Below this spread (a share of the ensemble's error) regressors count as collapsed onto each other."""

PLURAL = {"does as well": "do as well", "is better": "are better"}


def findings(results: Results) -> list[tuple[Arm, list[Finding]]]:
    """What the knob did, arm by arm; of a fit, first what the kept model is worth.

    Args:
        results: A run directory.

    Returns:
        The arms there is something to say about, baselines only where their members collapsed.
    """
    found = []
    for arm in results.tested:
        about = [_diversity(results, arm)]
        if arm.role == "model":
            about = [*about_model(results, arm), *(finding for finding in about if finding and finding.warning)]
        elif not arm.baseline or len(results.diversities(arm)) > 1:
            about += [
                _score(results, arm, results.task.loss),
                _score(results, arm, results.task.score),
                _members(results, arm),
                _validation(results, arm) if arm.role == "sweep" else None,
                *(_baseline(results, arm, other) for other in results.swept if other.baseline and other != arm),
            ]
        kept = [finding for finding in about if finding]
        if kept and (len(kept) > 1 or kept[0].warning or arm.role == "model"):
            found.append((arm, kept))
    return found


def headline(results: Results, arm: Arm) -> str:
    """An arm in one sentence: did the members differ, did it pay, does a baseline do as well.

    Args:
        results: A run directory.
        arm: One of its arms.

    Returns:
        The sentence, empty where the arm has no λ=0 to compare with; for a kept model, its score.
    """
    if arm.role == "model":
        return model_headline(results, arm)
    comparison, best = compare(results, arm, results.task.loss), lowest(results, arm)
    if comparison is None or best is None:
        return ""
    loss = results.metrics[results.task.loss].noun
    if not comparison.tests:
        return f"{capital(loss)} is lowest at {at(best)}; {why_not(comparison)}."
    gain = comparison.at(best)
    if arm.role == "check" and len(comparison.differences) == 1:  # one λ to judge, the one that was chosen
        gain = comparison.differences[0]
        does = ("raises" if gain.mean > 0 else "lowers") if gain.significant else "does not change"
        paid = f"{at(gain.diversity)} {does} the {loss} beyond the noise"
    elif gain is not None and gain.significant:
        paid = f"{loss} is lower than at λ=0 beyond the noise, lowest at {at(best)}"
    else:
        paid = f"no λ lowers the {loss} beyond the noise"
    acted = _acted(results, arm)
    pays = gain is not None and gain.significant and gain.mean < 0
    link = "but" if ("rose" in acted) != pays else "and"
    text = f"{acted}, {link} {paid}" if acted else capital(paid)
    for how in ("does as well", "is better"):
        labels = [f"“{other.label}”" for other in results.swept if _against(results, arm, other) == how]
        if labels:
            text += f"; {formats.listed(labels)} {how if len(labels) == 1 else PLURAL[how]}"
    return f"{text}."


def _acted(results: Results, arm: Arm) -> str:
    spread = results.metrics[results.task.spread]
    comparison = compare(results, arm, spread.key) if arm.num_members > 1 else None
    if comparison is None:
        return ""
    means = comparable_means(results, arm, spread.key)
    if len(_collapsed(results, arm, means)) == len(means):
        return "The members collapsed onto each other"
    if any(difference.significant and difference.mean > 0 for difference in comparison.differences):
        return f"The members' {spread.noun} rose"
    return f"The members' {spread.noun} did not rise beyond the noise"


def _collapsed(results: Results, arm: Arm, spreads: dict[float, float]) -> list[float]:
    """The values of λ at which the members are one: they differ on next to no case, or by next to nothing."""
    if results.task.spread == "disagreement":
        return [d for d, spread in spreads.items() if spread < COLLAPSED]
    errors = comparable_means(results, arm, results.task.error)
    return [d for d, spread in spreads.items() if d in errors and spread < COLLAPSED_SPREAD * errors[d]]


def _against(results: Results, arm: Arm, other: Arm) -> str:
    """How a baseline does beside the arm's best λ, by the task's loss; empty where there is nothing to say."""
    if not other.baseline or other == arm:
        return ""
    best, comparison = lowest(results, arm), compare(results, arm, results.task.loss, other)
    difference = comparison.at(best) if comparison and best is not None else None
    if difference is None or difference.together is None:
        return ""
    if not difference.significant:
        return "does as well"
    return "is better" if difference.mean > 0 else "is worse"


def remarks(results: Results) -> list[Finding]:
    """What holds for all arms: how much was run, how it was chosen, how sure it can be.

    Args:
        results: A run directory.

    Returns:
        The remarks, the most important first.
    """
    found = [_completeness(results)]
    if results.tested and all(len(results.seeds_of(arm)) < 2 for arm in results.tested):
        text = "There is one seed. No interval can be given, and no difference here can be told from luck."
        if results.is_fit:
            text = "The model was trained once, and nothing beside it: how much of its score is luck cannot be told."
        found.append(Finding("One seed", text, warning=not results.is_fit))
    swept = [arm for arm in results.arms if arm.role == "sweep" and len(results.diversities(arm)) > 1]
    blind = [arm for arm in swept if not results.data_of(arm).validation]
    if blind:
        labels = formats.listed([f"“{arm.label}”" for arm in blind])
        where = "There is no validation data" if len(blind) == len(swept) else f"{labels} had no validation data"
        found.append(
            Finding(
                "Chosen on the test set",
                f"{where}, so the λ called lowest was read off the test set itself. The correction "
                "for the number of λ keeps the verdicts honest; the lowest value is still a little flattering. "
                "Whoever needs a λ should choose it on held-out data and confirm it with fresh seeds.",
            )
        )
    return found


def _completeness(results: Results) -> Finding:
    finished = sum(run.finished for run in results.runs)
    planned = formats.count(results.planned, "run")
    if finished == results.planned and not results.damaged:
        return Finding("Complete", f"All {planned} finished." if results.planned != 1 else "The one run finished.")
    parts = [f"{finished:,} of {planned} finished"]
    if results.failed:
        parts.append(f"{len(results.failed):,} failed")
    if results.damaged:
        parts.append(f"{formats.count(len(results.damaged), 'file')} could not be read")
    listed = " (listed at the end)" if len(parts) > 1 else ""
    text = f"{'; '.join(parts)}{listed}. Where runs are missing, means rest on fewer seeds."
    return Finding("Incomplete", text, warning=True)


def _diversity(results: Results, arm: Arm) -> Finding | None:
    """Whether the members differ, and whether λ changed that."""
    metric = results.metrics[results.task.spread]
    means = comparable_means(results, arm, metric.key)
    if arm.num_members == 1 or not means:
        return None
    share, topic = metric.key == "disagreement", capital(metric.noun)
    collapsed = _collapsed(results, arm, means)
    most = metric.value(max(means.values()))
    if len(collapsed) == len(means):
        little = f"they differ on at most {most} of the test cases"
        if not share:
            little = f"their spread is at most {most}, less than a hundredth of the ensemble's error"
        text = (
            f"The members have collapsed onto each other: {little}, whatever λ is. "
            "A gain over one network would not be an ensemble's."
        )
        return Finding("Collapsed members", text, warning=True)
    note = ""
    if collapsed:
        below = metric.value(COLLAPSED) if share else "a hundredth of the ensemble's error"
        note = f" At {lambdas(collapsed)} members have collapsed onto each other (below {below}): "
        note += "a gain there is not an ensemble's."
    comparison = compare(results, arm, metric.key)
    if comparison is None:
        ends = metric.value(means[max(means)])
        text = f"Members differ on {ends} of the test cases." if share else f"The members' spread is {ends}."
        return Finding(topic, text + note)
    first, last = min(means), max(means)
    cases = " of the test cases" if share else ""
    moved = f"from {metric.value(means[first])}{cases} at {at(first)} to {metric.value(means[last])} at {at(last)}"
    at_last = comparison.at(last)
    raised = [d.diversity for d in comparison.differences if d.significant and d.mean > 0]
    if not comparison.tests or at_last is None:
        text = f"It went {moved}; {why_not(comparison)}."
    elif at_last.significant and at_last.mean > 0:
        steady = all(means[a] <= means[b] for a, b in pairwise(sorted(means)))
        text = f"It rose with λ{'' if steady else ', not at every step'}, {moved}: the knob acted."
    elif raised:
        text = f"It rose at {lambdas(raised)} but not at the largest λ ({moved})."
    elif at_last.significant:
        text = f"It fell, {moved}: the knob did the opposite of what it is for."
    else:
        text = f"It did not change beyond the noise between seeds ({moved}): no sign that the knob acted."
    return Finding(topic, text + note, warning=bool(collapsed))


def _score(results: Results, arm: Arm, key: str) -> Finding | None:
    """Where a score is lowest, and whether that is beyond the noise."""
    metric = results.metrics[key]
    best = lowest(results, arm, key)
    comparison = compare(results, arm, key)
    if best is None or comparison is None:
        return None
    start = comparison.reference_diversity
    values = comparable_means(results, arm, key)
    better = [d.diversity for d in comparison.differences if d.significant and d.mean < 0]
    worse = [d.diversity for d in comparison.differences if d.significant and d.mean > 0]
    difference = comparison.at(best)
    if best == start:
        text = f"No λ above 0 lowered it: it is lowest at {at(start)} ({metric.value(values[start])})."
    elif difference is None:
        text = f"Lowest at {at(best)}, {metric.value(values[best])}."
    else:
        # of the seeds that both have: their difference is the one beside them
        both = [results.values(arm, d, key) for d in (best, start)]
        common = both[0].keys() & both[1].keys()
        here, there = (math.fsum(series[seed] for seed in common) / len(common) for series in both)
        shared = f" over the {formats.count(len(common), 'seed')} that both have"
        text = (
            f"Lowest at {at(best)}: {metric.value(here)} against {metric.value(there)} "
            f"at {at(start)}{'' if both[0].keys() == both[1].keys() else shared}, "
            f"a paired difference of {evidence(metric, difference, comparison)}. {verdict(difference)}"
        )
    others = [d for d in better if d != best]
    if others:
        text += f" Also lower beyond the noise at {lambdas(others)}."
    if worse:
        text += f" Higher beyond the noise at {lambdas(worse)}."
    return Finding(capital(metric.noun), text)


def _members(results: Results, arm: Arm) -> Finding | None:
    """What λ costs a single member."""
    best = lowest(results, arm)
    comparison = compare(results, arm, results.task.alone)
    if arm.num_members == 1 or best is None or comparison is None or best == comparison.reference_diversity:
        return None
    difference = comparison.at(best)
    if difference is None:
        return None
    metric, loss = results.metrics[results.task.alone], results.metrics[results.task.loss].noun
    change = metric.difference(difference.mean)
    if not difference.significant:
        sure = "not beyond the noise" if difference.together is not None else untold(difference.note)
        text = f"On its own a member's {loss} changes by {change} at {at(best)} ({sure})."
    elif difference.mean > 0:
        text = f"On its own a member gets worse at {at(best)}: its {loss} changes by {change}."
        ensemble = compare(results, arm, results.task.loss)
        gain = ensemble.at(best) if ensemble else None
        if gain and gain.significant:
            text += " The knob traded the members' scores for the ensemble's."
    else:
        text = f"On its own a member gets better too at {at(best)}: its {loss} changes by {change}."
    return Finding("One member", text)


def _validation(results: Results, arm: Arm) -> Finding | None:
    """The λ that held-out data picks, and what it brought on the test set."""
    picked = lowest(results, arm, split="validation")
    metric = results.metrics[results.task.loss]
    comparison = compare(results, arm, metric.key)
    if picked is None or comparison is None:
        return None
    if picked == comparison.reference_diversity:
        return Finding("Chosen on validation data", f"The validation data picks {at(picked)}: no coupling at all.")
    difference = comparison.at(picked)
    if difference is None:
        return None
    text = (
        f"The validation data picks {at(picked)}. On the test set its {metric.noun} differs from λ=0 by "
        f"{evidence(metric, difference, comparison)}. {verdict(difference)}"
    )
    return Finding("Chosen on validation data", text)


def _baseline(results: Results, arm: Arm, other: Arm) -> Finding | None:
    """Whether a baseline arm does as well as the best λ."""
    best = lowest(results, arm)
    metric = results.metrics[results.task.loss]
    comparison = compare(results, arm, metric.key, other)
    difference = comparison.at(best) if comparison and best is not None else None
    if comparison is None or difference is None:
        return None
    reference = summarize(results, other, comparison.reference_diversity, metric.key)
    if reference is None:
        return None
    weighed = {
        "": f"No verdict ({difference.note}).",
        "does as well": "No difference beyond the noise: the baseline does as well, as far as "
        f"{formats.count(difference.n, 'seed')} can tell.",
        "is better": "The baseline is better, beyond the noise.",
        "is worse": "The baseline is worse, beyond the noise.",
    }[_against(results, arm, other)]
    text = (
        f"Its {metric.noun} is {metric.value(reference.mean)} (K={other.num_members}, "
        f"{at(comparison.reference_diversity)}). At {at(difference.diversity)} the difference to it is "
        f"{evidence(metric, difference, comparison)}. {weighed}"
    )
    return Finding(f"Against “{other.label}”", text)
