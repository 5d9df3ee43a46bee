"""`binary_amended_cross_entropy` against the slow reference, against torch, and against the two-class loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.reference import losses as reference
from tests.reference.loss_inputs import (
    CLOSE,
    U32,
    Case,
    check_case,
    diversities,
    element_cases,
    member_weights,
    value_and_gradient,
)
from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy


def rounding_bounds(case: Case, loss: reference.Loss) -> tuple[float, float]:
    """How far float32 may be from the float64 value and gradient, to first order in u = 2^-24.

    logsigmoid has two roundings of at most L = max|z| + 1, sigmoid a relative error of 4u. The loss is
    -a log q - b log(1-q) with |a| + |b| ≤ s(1+λ); a and b are off by s(1+λ)(K + 12)u (the mean over K members, the
    products, the rounded p, v and α), the products and the sum of n elements by n + 4 roundings more. The gradient is
    b q - a(1-q): the same errors times at most 1. Denominators are sums of n weights: n roundings.
    """
    num_members = loss.num_members
    n = math.prod(loss.sample_shape)
    depth = case.outputs.abs().max().item() + 1
    weights = [loss.scale(k, i) * loss.mass(i) for k in range(num_members) for i in loss.samples()]
    if case.upstream is not None:
        weights = [w * max(1.0, case.upstream.abs().max().item()) for w in weights]
    each = (1 + case.diversity) * U32 * ((num_members + 12) + 2 + (n + num_members + 4) + n)
    value = max(weights) if case.options["reduction"] == "none" else sum(weights)
    return value * each * depth, max(weights) * each


@given(element_cases("binary"))
def test_value_and_gradients_equal_the_reference(case: Case) -> None:
    check_case(binary_amended_cross_entropy, case, rounding_bounds)


def torch_value_and_gradient(case: Case) -> tuple[Tensor, Tensor]:
    def sum_losses(logits: Tensor, target: Tensor, diversity: float, **options) -> Tensor:
        losses = [F.binary_cross_entropy_with_logits(z, target.to(z), **options) for z in logits]
        return torch.stack(losses) if options["reduction"] == "none" else torch.stack(losses).sum()

    return value_and_gradient(sum_losses, case)


@pytest.mark.parametrize("how", ["λ=0 as a tensor", "K=1"])
@pytest.mark.parametrize("rest", [(), (2, 2)])
@pytest.mark.parametrize("kind", ["hard", "soft", "bool"])
@pytest.mark.parametrize("weighted", [None, "one", "each label"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_diversity_it_is_binary_cross_entropy(
    how: str, rest: tuple[int, ...], kind: str, weighted: str | None, reduction: str
) -> None:
    g = torch.Generator().manual_seed(3)
    num_members = 1 if how == "K=1" else 3
    logits = torch.randn(num_members, 4, *rest, generator=g, dtype=torch.float64)
    soft = torch.rand(4, *rest, generator=g, dtype=torch.float64)
    target = soft if kind == "soft" else (soft < 0.5).to(torch.float64 if kind == "hard" else torch.bool)
    options = {"reduction": reduction}
    if weighted is not None:
        shape = (1,) if weighted == "one" else (4, *rest)[-1:]
        options["pos_weight"] = torch.rand(shape, generator=g, dtype=torch.float64) * 3
    upstream = torch.randn(num_members, 4, *rest, generator=g, dtype=torch.float64) if reduction == "none" else None
    case = Case(logits, target, 0.0, options, upstream)
    value, gradient = torch_value_and_gradient(case)
    case.diversity = {"λ=0": 0.0, "λ=0 as a tensor": torch.tensor(0.0), "K=1": 0.7}[how]
    ours, our_gradient = value_and_gradient(binary_amended_cross_entropy, case)
    assert_close(ours, value, **CLOSE)
    assert_close(our_gradient, gradient, **CLOSE)


@given(st.integers(1, 4), st.integers(0, 2**16), diversities(), st.sampled_from(["uniform", "random", "zero", "one"]))
def test_it_is_the_softmax_loss_of_the_logits_0_and_z(num_members: int, seed: int, diversity: float, kind: str) -> None:
    g = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(num_members, 4, generator=g, dtype=torch.float64)
    target = torch.randint(2, (4,), generator=g)
    options = {"member_weights": member_weights(kind, num_members, g)}
    two = Case(torch.stack([torch.zeros_like(z), z], 2), target, diversity, options)
    one = Case(z, target, diversity, options)
    value, gradient = value_and_gradient(binary_amended_cross_entropy, one)
    other, other_gradient = value_and_gradient(amended_cross_entropy, two)
    assert_close(value, other, **CLOSE)
    assert_close(gradient, other_gradient[:, :, 1], **CLOSE)


@given(element_cases("binary"))
def test_positive_and_negative_are_two_names(case: Case) -> None:
    # z → -z and p → 1 - p swap the classes and change nothing but the gradient's sign
    case.options.pop("pos_weight", None)
    value, gradient = value_and_gradient(binary_amended_cross_entropy, case)
    if "mixture" in case.options:
        case.options["mixture"] = 1 - case.options["mixture"]
    swapped = Case(-case.outputs, 1 - case.target.double(), case.diversity, case.options, case.upstream)
    other_value, other_gradient = value_and_gradient(binary_amended_cross_entropy, swapped)
    assert_close(other_value, value, **CLOSE)
    assert_close(other_gradient, -gradient, **CLOSE)


def test_a_confident_and_right_output_keeps_its_small_gradient() -> None:
    # σ(-20) = 2e-9 is far below float32's rounding of 1; computed as a difference from 1 it would be lost
    logits = torch.tensor([[-20.0, 20.0]], requires_grad=True)
    loss = binary_amended_cross_entropy(logits, torch.tensor([0.0, 1.0]), 0.0, reduction="sum")
    loss.backward()
    tiny = 1 / (1 + math.exp(20.0))
    # exp and a division: a few roundings, relative to the tiny number itself
    assert_close(logits.grad, torch.tensor([[tiny, -tiny]]), rtol=8 * U32, atol=0)
    assert_close(loss.detach(), torch.tensor(2 * math.log1p(math.exp(-20.0))), rtol=8 * U32, atol=0)


@pytest.mark.parametrize("short", ["(N,)", "(K, N)"])
def test_sample_weights_without_the_last_axes_are_broadcast(short: str) -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    target = torch.rand(3, 5, generator=g, dtype=torch.float64)
    weight = torch.rand((3,) if short == "(N,)" else (2, 3), generator=g, dtype=torch.float64)
    full = weight[..., None].expand(*weight.shape, 5)
    ours = binary_amended_cross_entropy(logits, target, 0.4, sample_weight=weight)
    assert_close(ours, reference.binary_amended_cross_entropy(logits, target, 0.4, sample_weight=full).value(), **CLOSE)
