"""The rules: what is looked for, from which number on it is said, and what follows.

A rule speaks only where the whole 99 % interval of its number lies beyond the threshold (for several members: of all
their numbers together). Where the interval holds the threshold, it says that it cannot tell. The thresholds come from
ensembles trained on scikit-learn's digits (1,000 images to train, 797 to test; K=2 to 50, λ from 0 to 1): separate
networks, SMOC, random forests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchace.diagnosis import intervals
from torchace.diagnosis.diagnosis import SEVERITIES, Finding
from torchace.diagnosis.intervals import Interval, Values
from torchace.diagnosis.measures import Measures

# Fewer samples than this give notes at most: intervals of so few lean on normality that nobody checked.
LEAST = 30

# Collapse: the share of the ensemble's uncertainty that is its members' difference, Σ I / Σ H(q̄). Separate networks had
# 1.4 to 76 % (0.7 % for wide ones trained briefly, which are one function too), linear heads on one feature vector 0.1
# to 0.7 % at λ≤0.5. A ratio of sums, because easy samples have neither.
COLLAPSED, WEAK = 0.01, 0.02
# It takes some samples on which an answer is open: 10 with a confidence below 0.9. With them, no 50 to 400 samples
# drawn from networks above the threshold raised an alarm in 400 draws; without, one draw in fifteen did.
OPEN, OPEN_SAMPLES = 0.9, 10

# Copies: Pinsker's inequality makes a mean divergence of 2e-6 a mean difference in probability of at most 1e-3.
COPIES = 2e-6

# Chance: a member that has less than a tenth of the ensemble's gain over guessing (2 points where the ensemble has no
# gain itself) adds hardly more than noise.
NEAR_CHANCE, POINTS = 0.1, 0.02

# Collusion: alone, a member has less of the ensemble's gain over guessing than ALONE, and half of the members lose more
# of it than HALVED. At λ=1 they had 5 to 80 % and lost 11 to 57 %; at λ≤0.9, with eight hidden units or more, 81 to
# 100 % and 0 to 7 %, never both; random forests of full trees 72 to 74 % and 0.5 to 2 %: weak alone, and no conspiracy.
ALONE, HALVED = 0.85, 0.05

# Vanishing: mutual information on test data below half of that on training data. In all ensembles trained on digits it
# was higher on test data.
VANISHED = 0.5

# Calibration: an error (or a gap between confidence and accuracy) worth 2 points beyond what perfect calibration would
# show by chance is a note, 5 points a warning.
UNEVEN, WRONG = 0.02, 0.05

# Domination: the ensemble gives one member's answer on nine of ten contested samples, and the next one's on 10 points
# fewer. (In a large ensemble of good members, everyone is with the majority nearly always.)
FOLLOWED, AHEAD = 0.9, 0.1

# Classes: right on less than half as many as overall, among at least 10 samples.
FORGOTTEN, CLASS_SAMPLES = 0.5, 10


def findings(m: Measures, train: Measures | None = None, class_names: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Everything that the rules say, the most severe first.

    Args:
        m: What was measured.
        train: The same on training data.
        class_names: A name for each class.
    """
    found = [chance(m), calibration(m), member_calibration(m), classes(m, class_names)]
    if m.num_members > 1:
        found = [collapse(m), copies(m), collusion(m), gain(m), domination(m), *found]
        if train is not None:
            found.append(vanishing(m, train))
    fewest = m.samples if train is None else min(m.samples, train.samples)
    if fewest < LEAST:
        found = [_hedged(finding, fewest) for finding in found]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def collapse(m: Measures) -> Finding:
    """Members that are nearly one model."""
    part = intervals.ratio(m.mutual_information, m.entropy)
    saved = intervals.ratio(m.ambiguity, m.member_weights @ m.member_cross_entropy)
    differ = float(m.disagreement.mean())
    uncertain = int((m.confidence < OPEN).sum())
    numbers = {**_numbers("uncertainty_share", part), "ambiguity_share": saved.value, "disagreement": differ}
    numbers["open_samples"] = uncertain
    seen = (
        f"{_percent(part)} of the ensemble's uncertainty is its members' difference; averaging them removes "
        f"{saved.value:.1%} of their cross entropy, and two of them answer differently on {differ:.2%} of the samples"
    )
    if uncertain < OPEN_SAMPLES and part.low < WEAK:
        return Finding(
            "collapse",
            "note",
            f"Only {uncertain} samples leave the answer open (confidence below {OPEN}): too few to tell whether the "
            f"members differ. {seen}.",
            "Diagnose on more, or harder, samples.",
            numbers,
        )
    if part.high < COLLAPSED:
        return Finding(
            "collapse",
            "warning",
            f"The members are nearly one model: {seen}.",
            "Linear heads on one feature vector that see the same samples contract onto each other, whatever λ is: let "
            "the members part earlier (branch), give each its own samples (batches='exchanged' or 'separate', "
            "sample_weight), or keep fewer members. For separate networks, raise λ.",
            numbers,
        )
    if part.low < WEAK:
        return Finding(
            "collapse",
            "note",
            f"The members differ little: {seen}.",
            "Raise λ, or let the members part earlier, if their difference is what you want.",
            numbers,
        )
    return Finding("collapse", "ok", f"The members differ: {seen}.", "", numbers)


def copies(m: Measures) -> Finding:
    """Members that are the same model."""
    distance = np.maximum(m.divergence, m.divergence.T)
    pairs = [(j, k) for j in range(m.num_members) for k in range(j + 1, m.num_members) if distance[j, k] < COPIES]
    numbers = {"pairs": [list(pair) for pair in pairs]}
    if not pairs:
        return Finding("copies", "ok", "No two members are copies of each other.", "", numbers)
    shown = ", ".join(f"{j} and {k}" for j, k in pairs[:5]) + (", ..." if len(pairs) > 5 else "")
    return Finding(
        "copies",
        "warning",
        f"Members {shown} predict the same: they differ by less than a thousandth in probability on average.",
        "Leave copies out: they cost time and count twice. Look for one file that was loaded twice, one seed that was "
        "used twice, or members that started from equal weights and saw the same samples.",
        numbers,
    )


def chance(m: Measures) -> Finding:
    """Members that are hardly better than guessing."""
    counts = m.member_correct.sum(1)
    shares = [intervals.share(int(count), m.samples, m.num_members) for count in counts]
    together = intervals.share(int(m.correct.sum()), m.samples)
    bar = m.chance + max(NEAR_CHANCE * (together.value - m.chance), POINTS)
    guessing = [k for k, accuracy in enumerate(shares) if accuracy.high < bar]
    unclear = [k for k, accuracy in enumerate(shares) if k not in guessing and accuracy.low <= m.chance]
    numbers = {"chance": m.chance, "threshold": bar, "members": guessing, "unclear": unclear}
    always = f"always answering the most frequent class has {m.chance:.1%}"
    if guessing:
        best = max(shares[k].value for k in guessing)
        many = f"{_named(guessing)} {'is' if len(guessing) == 1 else 'are'} hardly better than guessing"
        return Finding(
            "chance",
            "warning",
            f"{many}: accuracy {best:.1%}{' at most' if len(guessing) > 1 else ''}, where {always}.",
            "Lower λ: the closer it is to 1, the less a single member is held to the labels. If λ is low, look at how "
            "these members were trained.",
            numbers,
        )
    if unclear:
        return Finding(
            "chance",
            "note",
            f"{_named(unclear)} cannot be told from guessing on these samples: {always}.",
            "Diagnose on more samples.",
            numbers,
        )
    worst = min(accuracy.value for accuracy in shares)
    return Finding(
        "chance", "ok", f"Every member is better than guessing: at least {worst:.1%}, where {always}.", "", numbers
    )


def collusion(m: Measures) -> Finding:
    """Members that are good only together."""
    right = m.correct.astype(float)
    alone = intervals.ratio(m.member_correct.mean(0) - m.chance, right - m.chance)
    lost = intervals.ratio(right - m.half, right - m.chance)
    dropped = [float((right - without).mean()) for without in m.without]
    each = float(np.mean(dropped))
    best = int(m.member_correct.mean(1).argmax())
    behind = intervals.mean(right - m.member_correct[best], m.num_members)
    numbers = {**_numbers("alone", alone), **_numbers("half_loss", lost), "drop_one": dropped, "drop_one_mean": each}
    if intervals.share(int(right.sum()), m.samples).low <= m.chance:
        return Finding(
            "collusion", "note", "The ensemble itself cannot be told from guessing on these samples.", "", numbers
        )
    seen = (
        f"one member alone has {_percent(alone)} of the ensemble's gain over guessing, and half of the members lose "
        f"{_percent(lost)} of it; without any one member, accuracy changes by {_points(-each)} on average, "
        f"{_points(-max(dropped))} at worst"
    )
    weak = alone.high < ALONE
    if weak and behind.low <= 0:
        return Finding(
            "collusion",
            "note",
            f"The members are uneven: member {best} is as often right as the ensemble, and {seen}.",
            "",
            numbers,
        )
    if weak and lost.low > HALVED:
        return Finding(
            "collusion",
            "warning",
            f"The members are good only together: {seen}.",
            "Lower λ, and compare the accuracy of one member with that at λ=0: what they learnt is to make up for each "
            "other on the training data, not to be right.",
            numbers,
        )
    if weak:
        return Finding(
            "collusion", "note", f"The members are weak alone, but do not depend on each other: {seen}.", "", numbers
        )
    return Finding("collusion", "ok", f"The members stand on their own: {seen}.", "", numbers)


def gain(m: Measures) -> Finding:
    """An ensemble that is no better than one of its members."""
    best = int(m.member_cross_entropy.mean(1).argmin())
    # chosen among K on these very samples: an interval for all K together
    less = intervals.mean(m.member_cross_entropy[best] - m.cross_entropy, m.num_members)
    numbers = {"best_member": best, **_numbers("gain_over_best", less)}
    pair = f"cross entropy {m.cross_entropy.mean():.4f} against {m.member_cross_entropy[best].mean():.4f}"
    if less.high < 0:
        return Finding(
            "gain",
            "warning",
            f"Member {best} alone is better than the ensemble: {pair}.",
            "Weigh the members (fit_member_weights on held-out predictions), or leave out those that are much worse.",
            numbers,
        )
    if less.low <= 0:
        return Finding(
            "gain", "note", f"The ensemble is not clearly better than its best member, {best}: {pair}.", "", numbers
        )
    return Finding("gain", "ok", f"The ensemble is better than its best member, {best}: {pair}.", "", numbers)


def domination(m: Measures) -> Finding:
    """A member whose answers are the ensemble's."""
    contested = (m.choices != m.choices[0]).any(0)
    count = int(contested.sum())
    follows = m.choices[:, contested] == m.choice[contested]  # (K, contested)
    followed = follows.sum(1)
    first, second = (int(k) for k in np.argsort(-followed, kind="stable")[:2])
    leader = intervals.share(int(followed[first]), count, m.num_members)
    shares = [float(n) / max(count, 1) for n in followed]
    numbers = {"contested": count, "member": first, **_numbers("followed", leader), "follows": shares}
    if count < 2:
        return Finding(
            "domination", "ok", f"No member decides alone: their answers differ on {count} samples.", "", numbers
        )
    ahead = intervals.mean(follows[first].astype(float) - follows[second], m.num_members)
    seen = f"of the {count:,} samples on which members differ, it gives member {first}'s answer on {_percent(leader)}"
    if leader.low > FOLLOWED and ahead.low > AHEAD:
        weight = f" Its weight is {m.member_weights[first]:.0%}." if np.ptp(m.member_weights) > 1e-9 else ""
        return Finding(
            "domination",
            "warning",
            f"The ensemble is member {first}: {seen}, the next member's on {shares[second]:.0%}.{weight}",
            f"Weigh the members on held-out predictions (fit_member_weights), or use member {first} alone: the others "
            "cost time and change little. If it is far more confident than they are, look at their calibration.",
            numbers,
        )
    return Finding("domination", "ok", f"The ensemble follows no single member: {seen} at most.", "", numbers)


def vanishing(m: Measures, train: Measures) -> Finding:
    """Diversity on training data that is gone on new data."""
    here, there = intervals.mean(m.mutual_information), intervals.mean(train.mutual_information)
    differ, differed = float(m.disagreement.mean()), float(train.disagreement.mean())
    numbers = {
        **_numbers("mutual_information", here),
        **_numbers("train_mutual_information", there),
        "disagreement": differ,
        "train_disagreement": differed,
    }
    seen = (
        f"the members' mutual information is {here.value:.2g} on these samples and {there.value:.2g} on the training "
        f"data, their disagreement {differ:.2%} and {differed:.2%}"
    )
    if here.high < VANISHED * there.low:
        return Finding(
            "vanishing",
            "warning",
            f"The members differ on the training data alone: {seen}.",
            "The difference was fitted to the training samples. Lower λ, train less, and choose λ on data that was not "
            "trained on.",
            numbers,
        )
    return Finding("vanishing", "ok", f"The members differ on new data as well: {seen}.", "", numbers)


def calibration(m: Measures) -> Finding:
    """An ensemble that is surer, or less sure, than it is right."""
    error, beyond, gap = _calibration(m.bins)
    confidence, accuracy = m.bins[1].sum() / m.samples, m.bins[2].sum() / m.samples
    numbers = {"calibration_error": error, "beyond_chance": beyond, **_numbers("overconfidence", gap)}
    seen = f"confidence {confidence:.1%} on average, accuracy {accuracy:.1%}, calibration error {error:.3f}"
    size = max(beyond, gap.low, -gap.high)
    if size < UNEVEN:
        told = "The ensemble is as sure as it is right"
        if max(gap.high, -gap.low) > WRONG:  # it may be far off, and nothing shows it
            told = "Too few samples to say whether the ensemble is as sure as it is right"
        return Finding("calibration", "ok", f"{told}: {seen}.", "", numbers)
    severity = "warning" if size > WRONG else "note"
    if gap.low > 0:
        return Finding(
            "calibration",
            severity,
            f"The ensemble is too sure of itself: {seen}.",
            "Divide the logits by a temperature above 1 fitted on held-out data, smooth the labels, or train less.",
            numbers,
        )
    if gap.high < 0:
        return Finding(
            "calibration",
            severity,
            f"The ensemble is too modest: {seen}.",
            "Averaging members that differ lowers confidence, the more so the larger λ is: lower λ, or divide the "
            "logits by a temperature below 1 fitted on held-out data.",
            numbers,
        )
    return Finding(
        "calibration",
        severity,
        f"The ensemble is too sure in some places and too modest in others: {seen}.",
        "Look at the reliability figure.",
        numbers,
    )


def member_calibration(m: Measures) -> Finding:
    """Members that are surer, or less sure, than they are right; the ensemble may be well calibrated for it."""
    found = [_calibration(bins, m.num_members) for bins in m.member_bins]
    sure = [k for k, (_, _, gap) in enumerate(found) if gap.low > UNEVEN]
    modest = [k for k, (_, _, gap) in enumerate(found) if gap.high < -UNEVEN]
    errors = [error for error, _, _ in found]
    numbers = {"calibration_errors": errors, "too_sure": sure, "too_modest": modest}
    seen = f"calibration error {np.mean(errors):.3f} on average"
    if not sure and not modest:
        told = "The members are as sure as they are right"
        if any(max(gap.high, -gap.low) > WRONG for _, _, gap in found):
            told = "Too few samples to say whether the members are as sure as they are right"
        return Finding("member_calibration", "ok", f"{told}: {seen}.", "", numbers)
    counted = {"too sure": len(sure), "too modest": len(modest)}
    parts = [f"{count} {'is' if count == 1 else 'are'} {what}" for what, count in counted.items() if count]
    return Finding(
        "member_calibration",
        "note",
        f"Of {m.num_members} members, {' and '.join(parts)}: {seen}.",
        "Use the ensemble's probabilities, not a member's.",
        numbers,
    )


def classes(m: Measures, class_names: Sequence[str] = ()) -> Finding:
    """Classes that the ensemble has not learnt."""
    names = list(class_names) or [str(c) for c in range(m.num_classes)]
    sizes = np.bincount(m.target, minlength=m.num_classes)
    large = [int(c) for c in np.flatnonzero(sizes >= CLASS_SAMPLES)]
    accuracy = float(m.correct.mean())
    recall = {c: intervals.share(int(m.correct[m.target == c].sum()), int(sizes[c]), len(large)) for c in large}
    lost = [c for c in large if recall[c].high < FORGOTTEN * accuracy]
    contested = {c: float(m.disagreement[m.target == c].mean()) for c in large}
    numbers = {"classes": lost, "recall": {names[c]: recall[c].value for c in large}}
    if lost:
        shown = ", ".join(f"{names[c]} ({recall[c].value:.0%})" for c in lost[:5]) + (", ..." if len(lost) > 5 else "")
        return Finding(
            "classes",
            "warning",
            f"The ensemble is right on {accuracy:.0%} of all samples, but on far fewer of class {shown}.",
            "Look at how many training samples these classes have, and at class weights (weight=...).",
            numbers,
        )
    text = "No class is far worse than the others."
    if contested and m.num_members > 1:
        most = max(contested, key=contested.__getitem__)
        text += f" The members differ most on class {names[most]} ({contested[most]:.1%})."
    return Finding("classes", "ok", text, "", numbers)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _calibration(bins: Values, tests: int = 1) -> tuple[float, float, Interval]:
    """The calibration error, how far it is beyond that of perfect calibration by chance, and confidence - accuracy."""
    count, confidence, correct = bins
    samples = int(count.sum())
    error = float(np.abs(correct - confidence).sum()) / samples
    filled = count > 0
    mean = np.where(filled, confidence / np.where(filled, count, 1), 0)
    variance = count * mean * (1 - mean)  # of the number of right answers in a bin, were the confidence right
    draws = np.random.default_rng(0).standard_normal((2000, len(count))) * np.sqrt(variance)
    luck = np.abs(draws).sum(1) / samples
    level = 1 - (1 - intervals.LEVEL) / tests
    beyond = error - float(luck.mean()) if error > np.quantile(luck, level) else 0.0
    gap = float((confidence - correct).sum()) / samples
    half = intervals.critical(samples, tests) * float(np.sqrt(variance.sum())) / samples
    return error, max(beyond, 0.0), Interval(gap, gap - half, gap + half)


def _hedged(finding: Finding, samples: int) -> Finding:
    if finding.severity != "warning":
        return finding
    return replace(finding, severity="note", sentence=f"{finding.sentence} But these are {samples} samples only.")


def _named(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"Member {members[0]}"
    shown = [str(k) for k in members[:8]]
    return (
        f"Members {', '.join(shown)}, ..." if len(members) > 8 else f"Members {', '.join(shown[:-1])} and {shown[-1]}"
    )


def _percent(interval: Interval) -> str:
    digits = 1 if abs(interval.value) >= 0.1 else 2
    value, low, high = (f"{round(end, digits + 2) + 0.0:.{digits}%}" for end in interval)  # + 0.0: no minus zero
    return f"{value} ({low} to {high})"


def _points(change: float) -> str:
    return f"{round(100 * change, 1) + 0.0:+.1f} points"


def _numbers(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
