"""Every finding: reported where the problem is, absent where it is not, and no false alarms on few samples."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import torch
from scipy import stats

from tests.diagnosis import ensembles
from torchace import _statistics as intervals
from torchace import diagnose

PROBLEMS = {
    "collapse": ensembles.make_collapsed,
    "chance": ensembles.with_member_at_chance,
    "copies": ensembles.with_copy,
    "co_adaptation": ensembles.make_co_adapted,
    "dominant_member": ensembles.make_dominated,
    "gain": ensembles.make_dominated,
    "classes": ensembles.with_lost_class,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_is_detected(name):
    diagnosis = diagnose(*PROBLEMS[name]())
    assert diagnosis[name].severity == "warning", diagnosis
    assert diagnosis[name].advice
    assert diagnosis.findings[0].severity == "warning"


def test_healthy_ensemble_has_no_warnings():
    diagnosis = diagnose(*ensembles.healthy(), train_logits=ensembles.healthy(seed=1)[0],
                         train_target=ensembles.healthy(seed=1)[1])  # fmt: skip
    assert not diagnosis.warnings, diagnosis
    assert diagnosis["collapse"].severity == "ok"
    assert diagnosis["co_adaptation"].severity == "ok"
    assert diagnosis["diversity_gap"].severity == "ok"
    assert diagnosis["calibration"].severity == "ok"


@pytest.mark.parametrize("members", [2, 8])
@pytest.mark.parametrize(("classes", "own"), [(2, 0.8), (4, 0.8), (10, 2.0)])
def test_false_alarm_rate_on_fifty_samples(members, classes, own):
    """60 draws of 50 samples: a false alarm in 2 of 100 draws would make 5 of them one time in a hundred."""
    alarms = collections.Counter()
    for seed in range(60):
        diagnosis = diagnose(*ensembles.healthy(50, seed, members=members, classes=classes, own=own))
        alarms.update({finding.name for finding in diagnosis.warnings} - {"calibration"})
        if classes < 10:  # members with much noise of their own are not calibrated
            alarms["calibration"] += diagnosis["calibration"].severity == "warning"
    assert stats.binom.sf(4, 60, 0.02) < 0.01
    assert sum(alarms.values()) <= 4, alarms


@pytest.mark.parametrize("name", ["co_adaptation", "copies", "dominant_member", "classes"])
def test_power_on_two_hundred_samples(name):
    found = sum(diagnose(*PROBLEMS[name](200, seed))[name].severity == "warning" for seed in range(10))
    assert found == 10


@pytest.mark.parametrize("name", PROBLEMS)
def test_few_samples_give_notes_only(name):
    diagnosis = diagnose(*PROBLEMS[name](29))
    assert not diagnosis.warnings
    if name == "copies":
        assert diagnosis["copies"].severity == "note"
        assert diagnosis["copies"].sentence.endswith("Based on only 29 samples.")


@pytest.mark.parametrize(
    ("factor", "severity", "words"),
    [(4.0, "warning", "overconfident"), (1.0, "ok", "well calibrated"), (0.3, "warning", "underconfident")],
)
def test_calibration(factor, severity, words):
    finding = diagnose(*ensembles.scale_logits(factor))["calibration"]
    assert finding.severity == severity
    assert words in finding.sentence
    assert (finding.numbers["overconfidence"] > 0) == (factor > 1)


@pytest.mark.parametrize(("samples", "few"), [(60, True), (5000, False)])
def test_calibration_on_few_samples(samples, few):
    diagnosis = diagnose(*ensembles.healthy(samples))
    for name in ("calibration", "member_calibration")[: 1 + few]:
        assert diagnosis[name].severity == ("note" if few else "ok")
        assert diagnosis[name].sentence.startswith("Too few samples to judge") == few


def test_miscalibration_that_cancels_on_average():
    """Half of the samples with 0.95 that are right 80 times of 100, half with 0.55 that are right 70 times."""
    target = torch.zeros(4000, dtype=torch.long)
    high = torch.arange(4000) < 2000
    right = torch.where(high, torch.arange(4000) % 100 < 80, torch.arange(4000) % 100 < 70)
    p = torch.where(high, 0.95, 0.55)
    said = torch.where(right, 0, 1)
    probs = torch.where(said[:, None] == torch.arange(2), p[:, None], 1 - p[:, None])
    finding = diagnose(probs.log()[None], target)["calibration"]
    assert finding.severity == "warning"
    assert "at some confidence levels" in finding.sentence
    assert finding.numbers["calibration_error"] == pytest.approx(0.15, abs=1e-7)  # of float32 probabilities


def test_member_calibration():
    logits, target = ensembles.scale_logits(1.0)
    logits[0] *= 6
    logits[1] *= 0.2
    finding = diagnose(logits, target)["member_calibration"]
    assert finding.severity == "note"
    assert 0 in finding.numbers["overconfident"]
    assert finding.numbers["underconfident"] == [1]


def test_diversity_gap():
    (test, target), (train, train_target) = ensembles.healthy(own=0.3), ensembles.healthy(seed=1, own=1.5)
    there = diagnose(test, target, train_logits=train, train_target=train_target)
    assert there["diversity_gap"].severity == "warning"
    assert there["diversity_gap"].numbers["train_disagreement"] > there["diversity_gap"].numbers["disagreement"]
    # the other way round it is what members that fit their training data do
    assert diagnose(train, train_target, train_logits=test, train_target=target)["diversity_gap"].severity == "ok"
    with pytest.raises(KeyError, match="There are"):
        diagnose(test, target)["diversity_gap"]


def test_collapse_needs_uncertain_samples():
    g = torch.Generator().manual_seed(0)
    target = torch.randint(4, (300,), generator=g)
    easy = 9.0 * torch.nn.functional.one_hot(target, 4) + 0.3 * torch.randn(5, 300, 4, generator=g)
    finding = diagnose(easy, target)["collapse"]
    assert finding.numbers["uncertainty_share_high"] < 0.01  # what would be a warning
    assert finding.severity == "note"
    assert "only 0 with a confidence below 0.9" in finding.sentence


def test_weak_learners_are_not_co_adapted():
    """Forty members that are each right half of the time, on their own: any half of them does as well."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(10, (1000,), generator=g)
    right = torch.rand(40, 1000, generator=g) < 0.5
    said = torch.where(right, target, torch.randint(10, (40, 1000), generator=g))
    finding = diagnose(3.0 * torch.nn.functional.one_hot(said, 10), target)["co_adaptation"]
    assert finding.severity == "note"
    assert "do not depend on each other" in finding.sentence


def test_one_accurate_member_is_not_co_adaptation():
    logits, target = ensembles.make_dominated()
    finding = diagnose(logits, target)["co_adaptation"]
    assert finding.severity == "note"
    assert "member 1 is as accurate as the ensemble" in finding.sentence


def test_a_large_weight_makes_a_member_dominant():
    logits, target = ensembles.healthy()
    assert diagnose(logits, target)["dominant_member"].severity == "ok"
    finding = diagnose(logits, target, member_weights=[0.02, 0.02, 0.92, 0.02, 0.02])["dominant_member"]
    assert finding.severity == "warning"
    assert finding.numbers["member"] == 2
    assert "weight is 92 %" in finding.sentence


def test_class_names():
    logits, target = ensembles.with_lost_class()
    finding = diagnose(logits, target, class_names=["cat", "dog", "emu", "fox"])["classes"]
    assert "Low recall of class emu (" in finding.sentence
    assert finding.numbers["recall"].keys() == {"cat", "dog", "emu", "fox"}


def test_invariance_to_member_order():
    for make in {*PROBLEMS.values(), ensembles.healthy}:
        logits, target = make()
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(3))
        one, other = diagnose(logits, target), diagnose(logits[order], target)
        assert {f.name: f.severity for f in one.findings} == {f.name: f.severity for f in other.findings}


# -- trained ensembles ------------------------------------------------------------------------------------------------


def test_trained_separate_networks():
    diagnosis = diagnose(**ensembles.train_on_digits("separate"))
    assert not diagnosis.warnings, diagnosis
    assert diagnosis["collapse"].severity == "ok"
    assert diagnosis["co_adaptation"].severity == "ok"


def test_trained_linear_heads_collapse():
    diagnosis = diagnose(**ensembles.train_on_digits("smoc"))
    assert [finding.name for finding in diagnosis.warnings] == ["collapse"]
    assert "branch" in diagnosis["collapse"].advice
    assert "exchanged" in diagnosis["collapse"].advice


def test_members_trained_at_full_diversity_are_co_adapted():
    diagnosis = diagnose(**ensembles.train_on_digits("λ=1"))
    assert diagnosis["co_adaptation"].severity == "warning"
    assert diagnosis["co_adaptation"].advice.startswith("Lower λ")
    assert diagnosis["co_adaptation"].numbers["drop_one_mean"] > 0


# -- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [30, 100, 5000])
@pytest.mark.parametrize("tests", [1, 10])
def test_critical_values_against_t(samples, tests):
    exact = stats.t.ppf(1 - 0.005 / tests, samples - 1)
    assert intervals.critical_value(samples, tests) == pytest.approx(exact, rel=0.02)  # first order in 1/(n - 1)


@pytest.mark.parametrize(("hits", "samples"), [(0, 40), (1, 40), (17, 40), (40, 40), (999, 5000)])
def test_proportions_against_wilson(hits, samples):
    found = intervals.proportion_interval(hits, samples)
    level = 1 - 2 * stats.norm.sf(intervals.critical_value(samples))
    exact = stats.binomtest(hits, samples).proportion_ci(level, method="wilson")
    assert found == pytest.approx((hits / samples, exact.low, exact.high), abs=1e-12)
    assert intervals.proportion_interval(0, 0) == (0.0, 0.0, 1.0)


def test_coverage_of_ratios():
    """99 of 100 intervals hold the true ratio, 0.5; of 2,000 at least 1,960 (4.5 standard deviations)."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        below = rng.exponential(size=200)
        found = intervals.ratio_interval(0.5 * below * rng.uniform(0, 2, 200), below)
        held += found.low < 0.5 < found.high
    assert held >= 1960
    assert intervals.ratio_interval(np.zeros(5), np.zeros(5)) == (0.0, 0.0, 0.0)
    assert intervals.mean_interval(np.array([2.0])) == (2.0, -math.inf, math.inf)
