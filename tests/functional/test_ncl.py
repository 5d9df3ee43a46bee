"""`negative_correlation` against the slow reference, half the squared error and the paper's γ form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.reference import losses as reference
from tests.reference.loss_inputs import CLOSE, U32, Case, check_case, element_cases, value_and_gradient
from torchace.functional import diversity_from_gamma, ncl, negative_correlation


def rounding_bounds(case: Case, loss: reference.Loss) -> tuple[float, float]:
    """How far float32 may be from the float64 value and gradient, to first order in u = 2^-24.

    With B the largest |F|, |Y|, |F̄|: F - Y is at most 2B and has one rounding and those of its inputs, 3u·2B; F - F̄ is
    made of K + 6 roundings of at most 2B. So the gradient (F - Y) - λ(F - F̄) is off by u·2B(3 + λ(K + 8)), and the
    loss, half of one square minus λ/(2(1-α)) times another, by twice its factors: u·4B²(4 + λ(K + 10)), where
    (F - F̄)²/(1-α) = (1-α)(F - the others' mean)² ≤ 4B², and α off by u changes 1/(1-α) by u/(1-α).
    The sums add n roundings of each element's magnitude and n of the denominator.
    """
    num_members = loss.num_members
    n = math.prod(loss.sample_shape)
    values = [case.outputs, case.target, case.options.get("mixture", case.target)]
    biggest = max(value.double().abs().max().item() for value in values)
    weights = [loss.scale(k, i) for k in range(num_members) for i in loss.samples()]
    if case.upstream is not None:
        weights = [w * max(1.0, case.upstream.abs().max().item()) for w in weights]
    alpha = case.options.get("member_weights", torch.full((num_members,), 1 / num_members))
    rest = [1 - a for a in alpha.tolist() if a < 1]
    steep = max([1 / r for r in rest], default=1.0)
    lam = case.diversity
    gradient = U32 * 2 * biggest * (3 + lam * (num_members + 8) + 2 * n)
    value = U32 * 4 * biggest**2 * (4 + lam * steep * (num_members + 10) + (1 + lam) * (2 * n + num_members))
    total = max(weights) if case.options["reduction"] == "none" else sum(weights)
    return total * value, max(weights) * gradient


@given(element_cases("ncl"))
def test_value_and_gradients_equal_the_reference(case: Case) -> None:
    check_case(negative_correlation, case, rounding_bounds)


@pytest.mark.parametrize("how", ["λ=0", "λ=0 as a tensor", "K=1"])
@pytest.mark.parametrize("rest", [(), (3,), (2, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_diversity_it_is_half_the_squared_error(how: str, rest: tuple[int, ...], reduction: str) -> None:
    g = torch.Generator().manual_seed(3)
    num_members = 1 if how == "K=1" else 3
    predictions = torch.randn(num_members, 4, *rest, generator=g, dtype=torch.float64)
    target = torch.randn(4, *rest, generator=g, dtype=torch.float64)
    upstream = torch.randn(num_members, 4, *rest, generator=g, dtype=torch.float64) if reduction == "none" else None

    def plain(outputs: Tensor, target: Tensor, diversity: float, *, reduction: str) -> Tensor:
        losses = [0.5 * torch.nn.functional.mse_loss(f, target, reduction=reduction) for f in outputs]
        return torch.stack(losses) if reduction == "none" else torch.stack(losses).sum()

    case = Case(predictions, target, 0.0, {"reduction": reduction}, upstream)
    value, gradient = value_and_gradient(plain, case)
    case.diversity = {"λ=0": 0.0, "λ=0 as a tensor": torch.tensor(0.0), "K=1": 0.7}[how]
    ours, our_gradient = value_and_gradient(negative_correlation, case)
    assert_close(ours, value, **CLOSE)
    assert_close(our_gradient, gradient, **CLOSE)


@given(st.integers(2, 5), st.integers(0, 2**16), st.floats(0, 1))
def test_the_paper_s_gamma_form_agrees(num_members: int, seed: int, fraction: float) -> None:
    # e^k = ½(F^k - Y)² - γ(F^k - F̄)², γ in [0, K / (2(K-1))]
    g = torch.Generator().manual_seed(seed)
    f = torch.randn(num_members, 3, generator=g, dtype=torch.float64)
    y = torch.randn(3, generator=g, dtype=torch.float64)
    gamma = fraction * num_members / (2 * (num_members - 1))
    lam = diversity_from_gamma(gamma, num_members, loss="ncl")
    expected = 0.5 * (f - y) ** 2 - gamma * (f - f.mean(0)) ** 2
    assert_close(negative_correlation(f, y, lam, reduction="none"), expected, **CLOSE)
    # and with the penalty written as the paper first has it, γ(F^k - F̄) Σ_{j≠k}(F^j - F̄)
    deviations = f - f.mean(0)
    penalty = deviations * (deviations.sum(0) - deviations)
    assert_close(negative_correlation(f, y, lam, reduction="none"), 0.5 * (f - y) ** 2 + gamma * penalty, **CLOSE)


@given(element_cases("ncl"), st.floats(-20, 20))
def test_moving_predictions_and_target_together_changes_nothing(case: Case, constant: float) -> None:
    case.options.pop("mixture", None)
    alpha = case.options.get("member_weights")
    if alpha is not None:  # of the members at hand now
        case.options["member_weights"] = alpha / alpha.sum()
    value, gradient = value_and_gradient(negative_correlation, case)
    moved = Case(case.outputs + constant, case.target + constant, case.diversity, case.options, case.upstream)
    other_value, other_gradient = value_and_gradient(negative_correlation, moved)
    # 20 is rounded to 2e-15; times differences below 20, factors 1/(1-α) below 40 and 48 elements
    assert_close(other_value, value, rtol=1e-10, atol=1e-10)
    assert_close(other_gradient, gradient, rtol=1e-11, atol=1e-11)


def test_full_diversity_fits_the_ensemble_alone() -> None:
    # λ=1: every member's gradient is F̄ - Y
    g = torch.Generator().manual_seed(0)
    predictions = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, generator=g, dtype=torch.float64)
    alpha = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    negative_correlation(predictions, target, 1.0, member_weights=alpha, reduction="sum").backward()
    expected = (alpha[:, None] * predictions.detach()).sum(0) - target
    assert_close(predictions.grad, expected.expand(4, 3), **CLOSE)


def test_whole_number_targets() -> None:
    predictions = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, -2, 3])
    assert_close(negative_correlation(predictions, target, 0.5), negative_correlation(predictions, target.float(), 0.5))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_closed_form_of_several_runs(elsewhere: bool, members: int) -> None:
    """Losses, gradients and squared errors of a training step; outputs of a sample count as their mean."""
    g = torch.Generator().manual_seed(0)
    f = torch.randn(3, members, 4, 2, generator=g, dtype=torch.float64)
    y, mixture = torch.randn(2, 3, 4, 2, generator=g, dtype=torch.float64)
    lam, scale = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64), torch.rand(3, 4, generator=g, dtype=torch.float64)
    given = {"alpha": 0.25, "mixture": mixture} if elsewhere else {}
    found = ncl.closed_form(f, y, lam, scale, **given)
    assert found.gradient is not None
    for run in range(3):
        expected = reference.negative_correlation(
            f[run],
            y[run],
            float(lam[run]),
            member_weights=[0.25] * members if elsewhere else None,
            mixture=mixture[run] if elsewhere else None,
            sample_weight=scale[run][:, None].expand(-1, 2) / 2,
            reduction="none",
        )
        assert_close(found.losses[run], expected.value().flatten(1).sum(1), **CLOSE)
        assert_close(found.gradient[run], expected.gradient(), **CLOSE)
    assert_close(found.scores, (f.mean(1) - y).square().mean(-1))
