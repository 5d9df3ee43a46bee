"""Advice about λ from one training at λ=0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchace.diagnosis import advise_diversity, diagnose

# ten networks of 16 units on 54,000 images of MNIST
UNDERFITTED: dict[str, Any] = {
    "train_loss": 0.186, "validation_loss": 0.204, "member_loss": 0.224, "disagreement": 0.034,
    "num_samples": 54_000, "num_parameters": 12_730,
}  # fmt: skip


def test_the_expected_gain_is_the_formula() -> None:
    advice = advise_diversity(**{**UNDERFITTED, "num_parameters": 108_000})
    ambiguity = (0.224 - 0.204) / 0.204
    assert advice.gain == pytest.approx(0.7 * 0.7 * ambiguity * math.sqrt(0.5))
    assert advise_diversity(**UNDERFITTED).gain == pytest.approx(0.7 * 0.7 * ambiguity * 2)  # at most twice


@pytest.mark.parametrize(("num_classes", "share"), [(2, 1 / 9), (4, 1 / 3), (10, 1), (26, 1)])
def test_few_classes_gain_less(num_classes: int, share: float) -> None:
    many, few = (advise_diversity(**UNDERFITTED, num_classes=count) for count in (None, num_classes))
    assert few.gain == pytest.approx(many.gain * share)
    assert (f"only {num_classes} classes" in few.sentence) == (num_classes < 10)


@pytest.mark.parametrize(("disagreement", "diversity"), [(0.0, 0.7), (0.059, 0.7), (0.06, 0.5), (0.15, 0.1), (1, 0.1)])
def test_members_that_disagree_much_start_with_a_small_diversity(disagreement: float, diversity: float) -> None:
    advice = advise_diversity(**{**UNDERFITTED, "disagreement": disagreement, "member_loss": 0.3})
    assert advice.diversity == diversity
    assert advice.sentence.startswith(f"λ={diversity:g} should lower the cross entropy by about")


@pytest.mark.parametrize(
    ("changes", "diversity", "start"),
    [
        ({"train_loss": 0.02}, 0.0, "Stop earlier before trying λ: at λ=0 the cross entropy is 0.02 on the training"),
        ({"member_loss": 0.205}, 0.0, "λ > 0 should not pay (a gain of 0.5 %)."),
        ({"member_loss": 0.2}, 0.0, "λ > 0 should not pay (a gain of 0.0 %)."),  # never negative
        ({"num_parameters": 10_000_000}, 0.0, "λ > 0 should not pay (a gain of 0.4 %)."),
        ({"validation_loss": 0.0, "train_loss": 0.0}, 0.0, "λ > 0 should not pay (a gain of 0.0 %)."),
    ],
)
def test_where_diversity_does_not_pay(changes: dict[str, float], diversity: float, start: str) -> None:
    advice = advise_diversity(**{**UNDERFITTED, **changes})
    assert advice.diversity == diversity
    assert advice.sentence.startswith(start)


@pytest.mark.parametrize(("num_parameters", "train_loss", "reason"), [
    (500, 5.0, ""),
    (510, 5.0, "a member has 0.51 parameters for each training sample, more than 0.5."),
    (510, 4.9, "a member has 0.51 parameters for each training sample, more than 0.5."),
    (500, 4.9, "The mean squared error on the training samples is below half of that on the validation samples."),
])  # fmt: skip
def test_regressors_gain_if_they_underfit_with_few_parameters(
    num_parameters: int, train_loss: float, reason: str
) -> None:
    advice = advise_diversity(
        train_loss=train_loss,
        validation_loss=10.0,
        member_loss=11.0,
        disagreement=None,
        num_samples=1000,
        num_parameters=num_parameters,
    )
    assert (advice.diversity, advice.gain) == ((0.0, 0.0) if reason else (0.7, pytest.approx(0.7 * 0.7 * 0.1)))
    start = (
        "λ > 0 should not pay (a gain of 0.0 %)." if reason else "λ=0.7 should lower the mean squared error by about"
    )
    assert advice.sentence.startswith(start)
    assert advice.sentence.endswith(reason)


def test_a_count_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `num_samples` to be at least 1, but got 0"):
        advise_diversity(**{**UNDERFITTED, "num_samples": 0})
    with pytest.raises(ValueError, match="Expected `num_classes` to be at least 2, but got 1"):
        advise_diversity(**UNDERFITTED, num_classes=1)


def test_a_diagnosis_gives_the_advice() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(8, (400,), generator=generator)
    logits = F.one_hot(target, 8) + torch.randn(5, 400, 8, generator=generator)  # weak members that differ much
    finding = diagnose(logits, target, train_logits=logits, train_target=target, num_parameters=100)["diversity"]
    losses = torch.stack([F.cross_entropy(member, target) for member in logits])
    loss = F.nll_loss(logits.softmax(2).mean(0).log(), target)
    expected = 0.7 * 0.1 * (losses.mean() / loss - 1) * 2 * 7 / 9
    assert (finding.severity, finding.numbers["diversity"]) == ("note", 0.1)
    assert finding.numbers["expected_gain"] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="`num_parameters` needs `train_logits`"):
        diagnose(logits, target, num_parameters=100)
