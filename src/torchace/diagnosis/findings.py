"""Checks of an ensemble's predictions, with their thresholds and advice.

A check warns only if the whole 99 % interval lies beyond the threshold (jointly for several members). The thresholds
come from separate networks, SMOC and random forests on scikit-learn's digits (K=2 to 50, λ from 0 to 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from torchace._statistics import (
    LEVEL,
    Interval,
    Values,
    critical_value,
    mean_interval,
    proportion_interval,
    ratio_interval,
)
from torchace.diagnosis.advice import advise_diversity
from torchace.diagnosis.diagnosis import SEVERITIES, Finding
from torchace.diagnosis.measures import Measures

MIN_SAMPLES = 30  # with fewer, findings are notes at most: the intervals rely on normality
# Epistemic share of the uncertainty, Σ I / Σ H(q̄): separate networks had 1.4 to 76 % (0.7 % for wide ones trained
# briefly), linear heads on one feature vector 0.1 to 0.7 % at λ≤0.5.
COLLAPSED, LITTLE_DIVERSITY = 0.01, 0.02
# Requires 10 samples with a confidence below 0.9; without this, 1 in 15 draws of samples raised a false alarm.
UNCERTAIN, UNCERTAIN_SAMPLES = 0.9, 10
COPY_DIVERGENCE = 2e-6  # by Pinsker's inequality, a mean difference in probability of at most 1e-3
CHANCE_SHARE, CHANCE_POINTS = 0.1, 0.02  # of the ensemble's gain over chance; the least gain, in accuracy
# Share of the ensemble's gain over chance that one member has, and that half of the members lose. At λ=1: 5 to 80 % and
# 11 to 57 %; at λ≤0.9 with eight hidden units or more: 81 to 100 % and 0 to 7 %; random forests: 73 % and 1 %.
ALONE, HALF_LOSS = 0.85, 0.05
DIVERSITY_RATIO = 0.5  # mutual information on new data over that on training data; above 1 for ensembles on digits
MISCALIBRATED, BADLY_MISCALIBRATED = 0.02, 0.05  # beyond what perfect calibration shows by chance
DOMINANT, DOMINANT_LEAD = 0.9, 0.1  # share of contested samples, and its lead over the next member's
LOW_RECALL, CLASS_SAMPLES = 0.5, 10  # of the overall accuracy; the least samples of a class

ADVICE = {
    "collapse": "Linear heads on one feature vector that see the same samples converge for every λ < 1: branch earlier "
    "(branch), give each member its own samples (batches='exchanged' or 'separate', sample_weight), or use fewer "
    "members. For separate networks, raise λ.",
    "copies": "Remove copies: they cost time and count twice. Look for a file loaded twice, a seed used twice, or "
    "members that started from equal weights and saw the same samples.",
    "chance": "Lower λ: the closer it is to 1, the less each member is fitted to the labels. At a low λ, check how "
    "these members were trained.",
    "co_adaptation": "Lower λ, and compare the accuracy of one member with that at λ=0.",
    "gain": "Weight the members (fit_member_weights on validation predictions), or remove those that are much worse.",
    "dominant_member": "Fit the weights on validation predictions (fit_member_weights), or use this member alone. If "
    "it is far more confident than the others, check their calibration.",
    "diversity_gap": "The diversity is overfitted. Lower λ, train less, and choose λ on validation data.",
    "overconfident": "Divide the logits by a temperature above 1 fitted on validation data, use label smoothing, or "
    "train less.",
    "underconfident": "Averaging members that differ lowers confidence, more so for larger λ: lower λ, or divide the "
    "logits by a temperature below 1 fitted on validation data.",
    "classes": "Check how many training samples these classes have, and try class weights (weight=...).",
}


def derive_findings(
    m: Measures, train: Measures | None = None, class_names: Sequence[str] = (), num_parameters: int | None = None
) -> tuple[Finding, ...]:
    """Return the findings of all checks, the most severe first."""
    findings = [check_chance(m), check_calibration(m), check_member_calibration(m), check_classes(m, class_names)]
    if m.num_members > 1:
        checks = (check_collapse, check_copies, check_co_adaptation, check_gain, check_dominant_member)
        findings = [*(check(m) for check in checks), *findings]
        if train is not None:
            findings.append(check_diversity_gap(m, train))
            if num_parameters is not None:
                findings.append(check_diversity(m, train, num_parameters))
    samples = m.samples if train is None else min(m.samples, train.samples)
    if samples < MIN_SAMPLES:
        few = f" Based on only {samples} samples."
        findings = [
            replace(finding, severity="note", sentence=finding.sentence + few)
            if finding.severity == "warning"
            else finding
            for finding in findings
        ]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def check_collapse(m: Measures) -> Finding:
    """Members that are nearly one model."""
    share = ratio_interval(m.mutual_information, m.entropy)
    reduction = ratio_interval(m.ambiguity, m.member_weights @ m.member_cross_entropy).value
    disagreement, uncertain = float(m.disagreement.mean()), int((m.confidence < UNCERTAIN).sum())
    numbers = {**_with_ends("uncertainty_share", share), "ambiguity_share": reduction}
    numbers |= {"disagreement": disagreement, "open_samples": uncertain}
    finding = partial(Finding, "collapse", numbers=numbers)
    details = (
        f"{_share(share)} of the ensemble's uncertainty is disagreement between members. Averaging lowers their "
        f"cross entropy by {_percent(reduction, 1)}; two members predict different classes on "
        f"{_percent(disagreement, 2)} of the samples."
    )
    if uncertain < UNCERTAIN_SAMPLES and share.low < LITTLE_DIVERSITY:
        few = f"only {uncertain} with a confidence below {UNCERTAIN}"
        sentence = f"Too few uncertain samples to say whether the members differ: {few}. {details}"
        return finding("note", sentence, "Diagnose on more, or harder, samples.")
    if share.high < COLLAPSED:
        return finding("warning", f"The members are nearly one model: {details}", ADVICE["collapse"])
    if share.low < LITTLE_DIVERSITY:
        advice = "For more diversity, raise λ or branch earlier."
        return finding("note", f"The members differ little: {details}", advice)
    return finding("ok", f"The members differ: {details}")


def check_diversity(m: Measures, train: Measures, num_parameters: int) -> Finding:
    """Whether a search for λ is worth it, for an ensemble trained with λ=0."""
    advice = advise_diversity(
        train_loss=float(train.cross_entropy.mean()),
        validation_loss=float(m.cross_entropy.mean()),
        member_loss=float((m.member_weights @ m.member_cross_entropy).mean()),
        num_samples=train.samples,
        num_parameters=num_parameters,
    )
    action = f"Compare λ={advice.diversity:g} with λ=0 over several seeds." if advice.diversity else ""
    return Finding("diversity", "note", advice.sentence, action, {"diversity": advice.diversity})


def check_copies(m: Measures) -> Finding:
    """Members that are the same model."""
    distance = np.maximum(m.divergence, m.divergence.T)
    pairs = [[int(j), int(k)] for j, k in np.argwhere(np.triu(distance < COPY_DIVERGENCE, k=1))]
    finding = partial(Finding, "copies", numbers={"pairs": pairs})
    if not pairs:
        return finding("ok", "No two members are copies of each other.")
    listed = _join([f"{j} and {k}" for j, k in pairs], 5)
    sentence = f"Members {listed} predict the same: their probabilities differ by less than 0.001 on average."
    return finding("warning", sentence, ADVICE["copies"])


def check_chance(m: Measures) -> Finding:
    """Members that are hardly better than chance."""
    accuracies = [proportion_interval(int(n), m.samples, m.num_members) for n in m.member_correct.sum(1)]
    threshold = m.chance + max(CHANCE_SHARE * (float(m.correct.mean()) - m.chance), CHANCE_POINTS)
    at_chance = [k for k, accuracy in enumerate(accuracies) if accuracy.high < threshold]
    unclear = [k for k, accuracy in enumerate(accuracies) if k not in at_chance and accuracy.low <= m.chance]
    numbers = {"chance": m.chance, "threshold": threshold, "members": at_chance, "unclear": unclear}
    finding = partial(Finding, "chance", numbers=numbers)
    baseline = f"the most frequent class alone gives {_percent(m.chance, 1)}"
    if at_chance:
        best = _percent(max(accuracies[k].value for k in at_chance), 1)
        sentence = f"Hardly better than chance: {_members(at_chance)}, with accuracy {best} at most; {baseline}."
        return finding("warning", sentence, ADVICE["chance"])
    if unclear:
        sentence = f"Not distinguishable from chance on these samples: {_members(unclear)}; {baseline}."
        return finding("note", sentence, "Diagnose on more samples.")
    worst = min(accuracy.value for accuracy in accuracies)
    return finding("ok", f"Every member is better than chance: accuracy {_percent(worst, 1)} at least; {baseline}.")


def check_co_adaptation(m: Measures) -> Finding:
    """Members that are accurate only together (learner collusion)."""
    correct = m.correct.astype(float)
    alone = ratio_interval(m.member_correct.mean(0) - m.chance, correct - m.chance)
    loss = ratio_interval(correct - m.half, correct - m.chance)
    drops = [float((correct - without).mean()) for without in m.without]
    best = int(m.member_correct.mean(1).argmax())
    lead = mean_interval(correct - m.member_correct[best], m.num_members)
    numbers = {**_with_ends("alone", alone), **_with_ends("half_loss", loss)}
    finding = partial(
        Finding, "co_adaptation", numbers=numbers | {"drop_one": drops, "drop_one_mean": float(np.mean(drops))}
    )
    if proportion_interval(int(correct.sum()), m.samples).low <= m.chance:
        return finding("note", "The ensemble itself cannot be distinguished from chance on these samples.")
    details = (
        f"one member alone has {_share(alone)} of the ensemble's gain over chance, and half of the members lose "
        f"{_share(loss)} of it. Without one member, accuracy changes by {_points(-float(np.mean(drops)))} on average "
        f"and {_points(-max(drops))} at worst."
    )
    if alone.high >= ALONE:
        return finding("ok", f"Each member is accurate alone: {details}")
    if lead.low <= 0:
        return finding("note", f"The members are uneven: member {best} is as accurate as the ensemble, and {details}")
    if loss.low <= HALF_LOSS:
        return finding("note", f"The members are weak alone, but do not depend on each other: {details}")
    sentence = f"The members are accurate only together (co-adaptation): {details}"
    return finding("warning", sentence, ADVICE["co_adaptation"])


def check_gain(m: Measures) -> Finding:
    """An ensemble that is no better than its best member."""
    best = int(m.member_cross_entropy.mean(1).argmin())
    # selected among K on these samples: corrected for K tests
    gain = mean_interval(m.member_cross_entropy[best] - m.cross_entropy, m.num_members)
    finding = partial(Finding, "gain", numbers={"best_member": best, **_with_ends("gain_over_best", gain)})
    scores = f"cross entropy {m.cross_entropy.mean():.4f} against {m.member_cross_entropy[best].mean():.4f}"
    if gain.high < 0:
        return finding("warning", f"The ensemble is worse than member {best} alone: {scores}.", ADVICE["gain"])
    if gain.low <= 0:
        return finding("note", f"The ensemble is not clearly better than its best member, {best}: {scores}.")
    return finding("ok", f"The ensemble is better than its best member, {best}: {scores}.")


def check_dominant_member(m: Measures) -> Finding:
    """A member whose predictions are the ensemble's."""
    contested = (m.choices != m.choices[0]).any(0)
    count = int(contested.sum())
    agrees = m.choices[:, contested] == m.choice[contested]  # (K, contested)
    first, second = (int(k) for k in np.argsort(-agrees.sum(1), kind="stable")[:2])
    agreement = proportion_interval(int(agrees[first].sum()), count, m.num_members)
    shares = [float(n) / max(count, 1) for n in agrees.sum(1)]
    numbers = {"contested": count, "member": first, **_with_ends("agreement", agreement), "agreements": shares}
    finding = partial(Finding, "dominant_member", numbers=numbers)
    if count < 2:
        return finding("ok", f"No member dominates: the predictions differ on {count} samples.")
    lead = mean_interval(agrees[first].astype(float) - agrees[second], m.num_members)
    details = f"on the {count:,} samples where members differ, the ensemble predicts as member {first} in"
    if agreement.low <= DOMINANT or lead.low <= DOMINANT_LEAD:
        return finding("ok", f"No member dominates: {details} {_share(agreement)} at most.")
    rest = f"the next in {_percent(shares[second], 0)}. Its weight is {_percent(m.member_weights[first], 0)}."
    sentence = f"Member {first} decides alone: {details} {_share(agreement)}, {rest}"
    return finding("warning", sentence, ADVICE["dominant_member"])


def check_diversity_gap(m: Measures, train: Measures) -> Finding:
    """Diversity on training data that is gone on new data."""
    here, there = mean_interval(m.mutual_information), mean_interval(train.mutual_information)
    differ, train_differ = float(m.disagreement.mean()), float(train.disagreement.mean())
    numbers = {**_with_ends("mutual_information", here), **_with_ends("train_mutual_information", there)}
    numbers |= {"disagreement": differ, "train_disagreement": train_differ}
    finding = partial(Finding, "diversity_gap", numbers=numbers)
    details = (
        f"mutual information {here.value:.2g} on new data, {there.value:.2g} on training data; disagreement "
        f"{_percent(differ, 2)} and {_percent(train_differ, 2)}."
    )
    if here.high < DIVERSITY_RATIO * there.low:
        sentence = f"The members differ on the training data only: {details}"
        return finding("warning", sentence, ADVICE["diversity_gap"])
    return finding("ok", f"The members differ on new data as well: {details}")


def check_calibration(m: Measures) -> Finding:
    """An overconfident or underconfident ensemble."""
    error, excess, gap = _calibration(m.bins)
    numbers = {"calibration_error": error, "beyond_chance": excess, **_with_ends("overconfidence", gap)}
    finding = partial(Finding, "calibration", numbers=numbers)
    confidence, accuracy = m.bins[1].sum() / m.samples, m.bins[2].sum() / m.samples
    details = f"mean confidence {_percent(confidence, 1)}, accuracy {_percent(accuracy, 1)}. "
    details += f"Calibration error {error:.3f}."
    size = max(excess, gap.low, -gap.high)
    if size < MISCALIBRATED:
        if max(gap.high, -gap.low) > BADLY_MISCALIBRATED:
            return finding("note", f"Too few samples to judge the ensemble's calibration: {details}")
        return finding("ok", f"The ensemble is well calibrated: {details}")
    severity = "warning" if size > BADLY_MISCALIBRATED else "note"
    if gap.low <= 0 <= gap.high:
        sentence = f"The ensemble is overconfident at some confidence levels and underconfident at others: {details}"
        return finding(severity, sentence, "See the reliability figure.")
    kind = "overconfident" if gap.low > 0 else "underconfident"
    return finding(severity, f"The ensemble is {kind}: {details}", ADVICE[kind])


def check_member_calibration(m: Measures) -> Finding:
    """Overconfident or underconfident members; the ensemble may be calibrated nevertheless."""
    errors, _, gaps = zip(*(_calibration(bins, m.num_members) for bins in m.member_bins), strict=True)
    over = [k for k, gap in enumerate(gaps) if gap.low > MISCALIBRATED]
    under = [k for k, gap in enumerate(gaps) if gap.high < -MISCALIBRATED]
    numbers = {"calibration_errors": list(errors), "overconfident": over, "underconfident": under}
    finding = partial(Finding, "member_calibration", numbers=numbers)
    details = f"calibration error {np.mean(errors):.3f} on average."
    if over or under:
        sentence = f"Of {m.num_members} members, {len(over)} overconfident and {len(under)} underconfident: {details}"
        return finding("note", sentence, "Use the ensemble's probabilities, not a member's.")
    if any(max(gap.high, -gap.low) > BADLY_MISCALIBRATED for gap in gaps):
        return finding("note", f"Too few samples to judge the members' calibration: {details}")
    return finding("ok", f"The members are well calibrated: {details}")


def check_classes(m: Measures, class_names: Sequence[str] = ()) -> Finding:
    """Classes with a low recall."""
    names = list(class_names) or [str(c) for c in range(m.num_classes)]
    sizes = np.bincount(m.target, minlength=m.num_classes)
    large = [int(c) for c in np.flatnonzero(sizes >= CLASS_SAMPLES)]
    accuracy = float(m.correct.mean())
    hits = {c: int(m.correct[m.target == c].sum()) for c in large}
    recall = {c: proportion_interval(hits[c], int(sizes[c]), len(large)) for c in large}
    low = [c for c in large if recall[c].high < LOW_RECALL * accuracy]
    numbers = {"classes": low, "recall": {names[c]: recall[c].value for c in large}}
    finding = partial(Finding, "classes", numbers=numbers)
    if not low:
        return finding("ok", "No class is far worse than the others.")
    listed = _join([f"{names[c]} ({_percent(recall[c].value, 0)})" for c in low], 5)
    sentence = f"Low recall of class {listed}, at an overall accuracy of {_percent(accuracy, 0)}."
    return finding("warning", sentence, ADVICE["classes"])


def _calibration(bins: Values, tests: int = 1) -> tuple[float, float, Interval]:
    """Return the calibration error, its excess over that of perfect calibration, and confidence - accuracy."""
    count, confidence, correct = bins
    samples = int(count.sum())
    error = float(np.abs(correct - confidence).sum()) / samples
    mean = confidence / np.maximum(count, 1)
    variance = count * mean * (1 - mean)  # of the number correct in a bin under perfect calibration
    draws = np.random.default_rng(0).standard_normal((2000, len(count))) * np.sqrt(variance)
    null_errors = np.abs(draws).sum(1) / samples
    significant = error > np.quantile(null_errors, 1 - (1 - LEVEL) / tests)
    excess = max(error - float(null_errors.mean()), 0.0) if significant else 0.0
    gap = float((confidence - correct).sum()) / samples
    half = critical_value(samples, tests) * float(np.sqrt(variance.sum())) / samples
    return error, excess, Interval(gap, gap - half, gap + half)


def _members(members: Sequence[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {_join([str(k) for k in members], 8)}"


def _join(items: Sequence[str], limit: int) -> str:
    return ", ".join(items[:limit]) + (", ..." if len(items) > limit else "")


def _number(value: float, digits: int, sign: str = "") -> str:
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")  # + 0.0: no minus zero


def _percent(share: float, digits: int) -> str:
    return f"{_number(100 * share, digits)} %"


def _share(interval: Interval) -> str:
    value, low, high = (_number(100 * end, 1 if abs(interval.value) >= 0.1 else 2) for end in interval)
    return f"{value} % ({low} to {high} %)" if math.isfinite(interval.high) else f"{value} %"  # one sample: no interval


def _points(change: float) -> str:
    return f"{_number(100 * change, 1, '+')} points"


def _with_ends(name: str, interval: Interval) -> dict[str, float | None]:
    low, high = (end if math.isfinite(end) else None for end in interval[1:])  # JSON has no infinity
    return {name: interval.value, f"{name}_low": low, f"{name}_high": high}
