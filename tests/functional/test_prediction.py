"""Predictions of an ensemble."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

from tests.reference import scores as reference
from tests.reference.loss_inputs import U32, logits_cases
from torchace.functional import ensemble_log_probs, ensemble_probs

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@given(logits_cases())
def test_probs_are_the_weighted_mean_of_the_members(case: tuple[Tensor, Tensor, Tensor | None]) -> None:
    logits, _, alpha = case
    expected = reference.ensemble_probs(logits, alpha)
    assert_close(ensemble_probs(logits, member_weights=alpha), expected, **CLOSE)
    assert_close(ensemble_log_probs(logits, member_weights=alpha), expected.log(), **CLOSE)
    assert_close(expected.sum(1), torch.ones_like(expected.sum(1)), **CLOSE)


@given(logits_cases())
def test_links_without_a_class_axis(case: tuple[Tensor, Tensor, Tensor | None]) -> None:
    values, _, alpha = case
    weights = torch.full((values.shape[0],), 1 / values.shape[0], dtype=torch.float64) if alpha is None else alpha
    mean, probability = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for k in range(values.shape[0]):
        mean += weights[k] * values[k]
        probability += weights[k] / (1 + (-values[k]).exp())
    assert_close(ensemble_probs(values, member_weights=alpha, link="identity"), mean, **CLOSE)
    assert_close(ensemble_probs(values, member_weights=alpha, link="sigmoid"), probability, **CLOSE)
    assert_close(ensemble_log_probs(values, member_weights=alpha, link="sigmoid"), probability.log(), **CLOSE)


def test_identical_members_predict_like_one() -> None:
    one = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(ensemble_log_probs(one.repeat(5, 1, 1)), one[0].log_softmax(1), **CLOSE)


def test_logits_are_never_averaged() -> None:
    # the mean of the logits is (0, 0); the mean of the probabilities is not even near it for three members
    logits = torch.tensor([[[8.0, -8.0]], [[-4.0, 4.0]], [[-4.0, 4.0]]])
    assert_close(ensemble_probs(logits)[0, 1], torch.tensor(2 / 3), rtol=0, atol=1e-3)  # σ(8) is within 4e-4 of 1


def test_exact_where_every_probability_underflows() -> None:
    logits = torch.tensor([[[0.0, -400.0]], [[0.0, -300.0]]])
    expected = torch.tensor([[0.0, -300.0 - math.log(2)]])
    assert_close(ensemble_log_probs(logits), expected, rtol=4 * U32, atol=0)
    assert_close(ensemble_log_probs(logits[:, :, 1], link="sigmoid"), expected[:, 1], rtol=4 * U32, atol=0)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("dtype", "big"), [(torch.float32, 1e4), (torch.float16, 3e4), (torch.bfloat16, 1e4)])
def test_extreme_logits(link: str, dtype: torch.dtype, big: float) -> None:
    logits = torch.tensor([[[big, -big]], [[-big, big]]], dtype=dtype, requires_grad=True)
    log_probs = ensemble_log_probs(logits, link=link)
    assert log_probs.dtype == torch.float32
    assert_close(log_probs.exp(), torch.full((1, 2), 0.5))
    log_probs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_member_of_weight_0_does_not_count() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 4, generator=g, dtype=torch.float64, requires_grad=True)
    alpha = [0.25, 0.0, 0.75]
    log_probs = ensemble_log_probs(logits, member_weights=alpha)
    without = ensemble_log_probs(logits[[0, 2]], member_weights=[0.25, 0.75])
    assert_close(log_probs, without, **CLOSE)
    (gradient,) = torch.autograd.grad(log_probs[:, 0].sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_classes_that_are_masked_by_minus_infinity() -> None:
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masked = logits.clone()
    masked[:, :, 2] = -float("inf")
    probs = ensemble_probs(masked)
    assert not probs[:, 2].any()
    assert_close(probs[:, [0, 1, 3]], ensemble_probs(logits[:, :, [0, 1, 3]]), **CLOSE)
    assert (ensemble_log_probs(masked)[:, 2] == -float("inf")).all()


@pytest.mark.parametrize("alpha", [None, [0.0, 0.25, 0.75]])
def test_the_gradient_through_masked_classes_is_that_without_them(alpha: list[float] | None) -> None:
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masked = logits.index_fill(2, torch.tensor(2), -math.inf).requires_grad_()
    without = logits[:, :, [0, 1, 3]].requires_grad_()
    for z, place in ((masked, 3), (without, 2)):
        ensemble_log_probs(z, member_weights=alpha)[:, place].sum().backward()
    assert masked.grad is not None
    assert not masked.grad[:, :, 2].any()
    assert_close(masked.grad[:, :, [0, 1, 3]], without.grad, **CLOSE)


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
def test_half_precision_is_computed_in_float32(link: str) -> None:
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs = ensemble_probs(logits, link=link)
    assert probs.dtype == torch.float32
    assert_close(probs, ensemble_probs(logits.float(), link=link), rtol=0, atol=0)


def test_transforms() -> None:
    torch._dynamo.reset()
    logits = torch.randn(5, 3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.stack([ensemble_log_probs(z) for z in logits])
    assert_close(torch.func.vmap(ensemble_log_probs)(logits), expected, **CLOSE)
    compiled = torch.compile(ensemble_log_probs, fullgraph=True, backend="aot_eager")
    assert_close(compiled(logits[0]), expected[0], **CLOSE)
