"""What the numbers say, in sentences computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torchace.report import formats
from torchace.report.formats import METRICS
from torchace.report.results import Arm, Results
from torchace.report.statistics import Comparison, Difference, compare, lowest
from torchace.report.tables import summarize

COLLAPSED = 0.002
"""Below this disagreement (a share of the test cases) members count as collapsed onto each other."""

PLURAL = {"does as well": "do as well", "is better": "are better"}


@dataclass(frozen=True)
class Finding:
    """A sentence or two under a short heading; `warning` where a reader should be careful."""

    topic: str
    text: str
    warning: bool = False


def findings(results: Results) -> list[tuple[Arm, list[Finding]]]:
    """What the knob did, arm by arm.

    Args:
        results: A run directory.

    Returns:
        The arms there is something to say about, baselines only where their members collapsed.
    """
    found = []
    for arm in results.arms:
        about = [_diversity(results, arm)]
        if not arm.baseline or len(results.diversities(arm)) > 1:
            about += [
                _score(results, arm, "cross_entropy"),
                _score(results, arm, "error"),
                _members(results, arm),
                _validation(results, arm),
                *(_baseline(results, arm, other) for other in results.arms if other.baseline and other != arm),
            ]
        kept = [finding for finding in about if finding]
        if kept and (len(kept) > 1 or kept[0].warning):
            found.append((arm, kept))
    return found


def headline(results: Results, arm: Arm) -> str:
    """An arm in one sentence: did the members differ, did it pay, does a baseline do as well.

    Args:
        results: A run directory.
        arm: One of its arms.

    Returns:
        The sentence, empty where the arm has no λ=0 to compare with.
    """
    comparison, best = compare(results, arm, "cross_entropy"), lowest(results, arm)
    if comparison is None or best is None:
        return ""
    if not comparison.tests:
        return f"Cross entropy is lowest at {_at(best)}; {_why_not(comparison)}."
    gain = comparison.at(best)
    if gain is not None and gain.significant:
        paid = f"cross entropy is lower than at λ=0 beyond the noise, lowest at {_at(best)}"
    else:
        paid = "no λ lowers the cross entropy beyond the noise"
    acted = _acted(results, arm)
    link = "but" if ("rose" in acted) != (gain is not None and gain.significant) else "and"
    text = f"{acted}, {link} {paid}" if acted else paid[0].upper() + paid[1:]
    for verdict in ("does as well", "is better"):
        labels = [f"“{other.label}”" for other in results.arms if _against(results, arm, other) == verdict]
        if labels:
            text += f"; {formats.listed(labels)} {verdict if len(labels) == 1 else PLURAL[verdict]}"
    return f"{text}."


def _acted(results: Results, arm: Arm) -> str:
    comparison = compare(results, arm, "disagreement") if arm.num_members > 1 else None
    if comparison is None:
        return ""
    means = [found.mean for at in results.diversities(arm) if (found := summarize(results, arm, at, "disagreement"))]
    if max(means) < COLLAPSED:
        return "The members collapsed onto each other"
    if any(difference.significant and difference.mean > 0 for difference in comparison.differences):
        return "The members' disagreement rose"
    return "The members' disagreement did not rise beyond the noise"


def _against(results: Results, arm: Arm, other: Arm) -> str:
    """How a baseline does beside the arm's best λ, in cross entropy; empty where there is nothing to say."""
    if not other.baseline or other == arm:
        return ""
    best, comparison = lowest(results, arm), compare(results, arm, "cross_entropy", other)
    difference = comparison.at(best) if comparison and best is not None else None
    if difference is None or difference.holm is None:
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
    if len(results.seeds) < 2:
        text = "There is one seed. No interval can be given, and no difference here can be told from luck."
        found.append(Finding("One seed", text, warning=True))
    if any(len(results.diversities(arm)) > 1 for arm in results.arms) and not results.data.validation:
        found.append(
            Finding(
                "Chosen on the test set",
                "There is no validation data, so the λ called lowest was read off the test set itself. The correction "
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
    metric = METRICS["disagreement"]
    summaries = {at: summarize(results, arm, at, metric.key) for at in results.diversities(arm)}
    means = {at: found.mean for at, found in summaries.items() if found}
    if arm.num_members == 1 or not means:
        return None
    collapsed = [at for at, mean in means.items() if mean < COLLAPSED]
    if len(collapsed) == len(means):
        text = (
            "The members have collapsed onto each other: they differ on at most "
            f"{metric.value(max(means.values()))} of the test cases, whatever λ is. "
            "A gain over one network would not be an ensemble's."
        )
        return Finding("Collapsed members", text, warning=True)
    note = ""
    if collapsed:
        note = f" At {_lambdas(collapsed)} members have collapsed onto each other (below {metric.value(COLLAPSED)}): "
        note += "a gain there is not an ensemble's."
    comparison = compare(results, arm, metric.key)
    if comparison is None:
        ends = sorted(means)[-1]
        return Finding("Disagreement", f"Members differ on {metric.value(means[ends])} of the test cases.{note}")
    first, last = min(means), max(means)
    moved = f"from {metric.value(means[first])} of the test cases at {_at(first)} to {metric.value(means[last])}"
    moved += f" at {_at(last)}"
    at_last = comparison.at(last)
    raised = [d.diversity for d in comparison.differences if d.significant and d.mean > 0]
    if not comparison.tests or at_last is None:
        text = f"It went {moved}; {_why_not(comparison)}."
    elif at_last.significant and at_last.mean > 0:
        steady = all(means[a] <= means[b] for a, b in pairwise(sorted(means)))
        text = f"It rose with λ{'' if steady else ', not at every step'}, {moved}: the knob acted."
    elif raised:
        text = f"It rose at {_lambdas(raised)} but not at the largest λ ({moved})."
    elif at_last.significant:
        text = f"It fell, {moved}: the knob did the opposite of what it is for."
    else:
        text = f"It did not change beyond the noise between seeds ({moved}): no sign that the knob acted."
    return Finding("Disagreement", text + note, warning=bool(collapsed))


def _score(results: Results, arm: Arm, key: str) -> Finding | None:
    """Where a score is lowest, and whether that is beyond the noise."""
    metric = METRICS[key]
    best = lowest(results, arm, key)
    comparison = compare(results, arm, key)
    if best is None or comparison is None:
        return None
    start = comparison.reference_diversity
    values = {at: found.mean for at in (start, best) if (found := summarize(results, arm, at, key))}
    better = [d.diversity for d in comparison.differences if d.significant and d.mean < 0]
    worse = [d.diversity for d in comparison.differences if d.significant and d.mean > 0]
    difference = comparison.at(best)
    topic = metric.noun.capitalize()
    if best == start:
        text = f"No λ above 0 lowered it: it is lowest at {_at(start)} ({metric.value(values[start])})."
    elif difference is None:
        text = f"Lowest at {_at(best)}, {metric.value(values[best])}."
    else:
        text = (
            f"Lowest at {_at(best)}: {metric.value(values[best])} against {metric.value(values[start])} "
            f"at {_at(start)}, a paired difference of {_evidence(key, difference, comparison)}. {_verdict(difference)}"
        )
    others = [at for at in better if at != best]
    if others:
        text += f" Also lower beyond the noise at {_lambdas(others)}."
    if worse:
        text += f" Higher beyond the noise at {_lambdas(worse)}."
    return Finding(topic, text)


def _members(results: Results, arm: Arm) -> Finding | None:
    """What λ costs a single member."""
    best = lowest(results, arm)
    comparison = compare(results, arm, "member_cross_entropy")
    if arm.num_members == 1 or best is None or comparison is None or best == comparison.reference_diversity:
        return None
    difference = comparison.at(best)
    if difference is None:
        return None
    metric = METRICS["member_cross_entropy"]
    change = metric.difference(difference.mean)
    if not difference.significant:
        sure = "not beyond the noise" if difference.holm is not None else _short(difference.note)
        text = f"On its own a member's cross entropy changes by {change} at {_at(best)} ({sure})."
    elif difference.mean > 0:
        text = f"On its own a member gets worse at {_at(best)}: its cross entropy changes by {change}."
        ensemble = compare(results, arm, "cross_entropy")
        gain = ensemble.at(best) if ensemble else None
        if gain and gain.significant:
            text += " The knob traded the members' scores for the ensemble's."
    else:
        text = f"On its own a member gets better too at {_at(best)}: its cross entropy changes by {change}."
    return Finding("One member", text)


def _validation(results: Results, arm: Arm) -> Finding | None:
    """The λ that held-out data picks, and what it brought on the test set."""
    picked = lowest(results, arm, split="validation")
    comparison = compare(results, arm, "cross_entropy")
    if picked is None or comparison is None:
        return None
    if picked == comparison.reference_diversity:
        return Finding("Chosen on validation data", f"The validation data picks {_at(picked)}: no coupling at all.")
    difference = comparison.at(picked)
    if difference is None:
        return None
    text = (
        f"The validation data picks {_at(picked)}. On the test set its cross entropy differs from λ=0 by "
        f"{_evidence('cross_entropy', difference, comparison)}. {_verdict(difference)}"
    )
    return Finding("Chosen on validation data", text)


def _baseline(results: Results, arm: Arm, other: Arm) -> Finding | None:
    """Whether a baseline arm does as well as the best λ."""
    best = lowest(results, arm)
    comparison = compare(results, arm, "cross_entropy", other)
    difference = comparison.at(best) if comparison and best is not None else None
    if comparison is None or difference is None:
        return None
    metric = METRICS["cross_entropy"]
    reference = summarize(results, other, comparison.reference_diversity, metric.key)
    if reference is None:
        return None
    verdict = {
        "": f"No verdict ({difference.note}).",
        "does as well": "No difference beyond the noise: the baseline does as well, as far as "
        f"{formats.count(difference.n, 'seed')} can tell.",
        "is better": "The baseline is better, beyond the noise.",
        "is worse": "The baseline is worse, beyond the noise.",
    }[_against(results, arm, other)]
    text = (
        f"Its cross entropy is {metric.value(reference.mean)} (K={other.num_members}, "
        f"{_at(comparison.reference_diversity)}). At {_at(difference.diversity)} the difference to it is "
        f"{_evidence(metric.key, difference, comparison)}. {verdict}"
    )
    return Finding(f"Against “{other.label}”", text)


def _evidence(key: str, difference: Difference, comparison: Comparison) -> str:
    metric = METRICS[key]
    seeds = formats.count(difference.n, "seed")
    text = metric.difference(difference.mean)
    if difference.together is None or difference.holm is None:
        return f"{text} ({difference.note})" if difference.n == 1 else f"{text} ({seeds}; {difference.note})"
    holds = "" if comparison.tests == 1 else f", holding for all {comparison.tests} λ together"
    interval = f"95 % interval {metric.interval(difference.together)}{holds}"
    return f"{text} ({interval}; Holm {formats.p_phrase(difference.holm)}; {seeds})"


def _verdict(difference: Difference) -> str:
    if difference.holm is None:
        return "That cannot be told from the noise between seeds."
    return "That is beyond the noise between seeds." if difference.significant else "That is within the noise."


def _why_not(comparison: Comparison) -> str:
    notes = {difference.note for difference in comparison.differences if difference.note}
    return _short(min(notes)) if notes else "there is nothing to test"


def _short(note: str) -> str:
    return f"{note}, so this cannot be told from noise" if note else "nothing to test"


def _at(diversity: float) -> str:
    return f"λ={formats.diversity(diversity)}"


def _lambdas(values: list[float]) -> str:
    return "λ=" + formats.listed([formats.diversity(value) for value in values])
