"""Advice about λ from one training at λ=0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchace.diagnosis import advise_diversity, diagnose

UNDERFITTED: dict[str, Any] = {
    "train_loss": 0.5, "validation_loss": 1.0, "member_loss": 1.25, "num_samples": 5000, "num_parameters": 2500,
}  # fmt: skip


@pytest.mark.parametrize(("task", "changes", "diversity", "sentence"), [
    ("classification", {}, 0.3, "Search λ on validation data, from λ=0.3. Averaging lowers the members' cross entropy "
     "by 20.0 %, the members do not overfit, and there are at least 5,000 training samples."),
    ("classification", {"train_loss": 0.25, "num_parameters": 10_000_000, "member_loss": 1.0102}, 0.3, "Search λ on"),
    ("classification", {"member_loss": 1.009}, 0.0, "No gain from λ > 0 can be predicted. Averaging lowers the "
     "members' cross entropy by less than 1 %, and λ enlarges only this gain."),
    ("classification", {"num_samples": 4999}, 0.0, "No gain from λ > 0 can be predicted. With fewer than "
     "5,000 training samples (here 4,999), λ > 0 often raises the cross entropy."),
    ("classification", {"train_loss": 0.249}, 0.0, "Stop earlier before trying λ. At λ=0 the cross entropy is 0.249 "),
    ("classification", {"train_loss": 0.0, "validation_loss": 0.0, "member_loss": 0.0}, 0.0, "No gain from λ > 0 can "),
    ("regression", {}, 0.7, "Search λ on validation data, from λ=0.7. Averaging lowers the members' mean squared error "
     "by 20.0 %, the members do not overfit, and there are 2 or more training samples for each parameter."),
    ("regression", {"num_samples": 100, "num_parameters": 50}, 0.7, "Search λ on validation data"),
    ("regression", {"member_loss": 0.9}, 0.0, "No gain from λ > 0 can be predicted. Averaging lowers the members' "
     "mean squared error by less than 1 %"),
    ("regression", {"num_samples": 4999}, 0.0, "No gain from λ > 0 can be predicted. There are fewer than 2 tr"),
    ("regression", {"train_loss": 0.499}, 0.0, "No gain from λ > 0 can be predicted. The mean squared error on"),
    ("regression", {"train_loss": 0.249}, 0.0, "Stop earlier before trying λ. At λ=0 the mean squared error is 0.249"),
])  # fmt: skip
def test_the_advice_follows_from_losses_and_samples(
    task: str, changes: dict[str, float], diversity: float, sentence: str
) -> None:
    advice = advise_diversity(**{**UNDERFITTED, **changes}, task=task)
    assert advice.diversity == diversity
    assert advice.sentence.startswith(sentence)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["train_loss", "validation_loss", "member_loss"])
def test_losses_that_are_not_finite_predict_no_gain(name: str, value: float) -> None:
    advice = advise_diversity(**{**UNDERFITTED, name: value})
    assert advice == (0.0, "No gain from λ > 0 can be predicted. The cross entropy at λ=0 is not finite.")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected `num_samples` to be at least 1, but got 0"):
        advise_diversity(**{**UNDERFITTED, "num_samples": 0})
    with pytest.raises(ValueError, match="Expected `task` to be 'classification' or 'regression', but got 'nlp'"):
        advise_diversity(**UNDERFITTED, task="nlp")


@pytest.mark.parametrize(("num_samples", "diversity"), [(4000, 0.0), (5000, 0.3)])
def test_a_diagnosis_gives_the_advice(num_samples: int, diversity: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(8, (num_samples,), generator=generator)
    logits = F.one_hot(target, 8) + torch.randn(3, num_samples, 8, generator=generator)
    finding = diagnose(logits, target, train_logits=logits, train_target=target, num_parameters=100)["diversity"]
    assert (finding.severity, finding.numbers) == ("note", {"diversity": diversity})
    assert bool(finding.advice) == (diversity > 0)
    with pytest.raises(ValueError, match="`num_parameters` needs `train_logits`"):
        diagnose(logits, target, num_parameters=100)
