"""Learnable and fitted member weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize

from torchace.functional import amended_cross_entropy, ensemble_log_probs, fit_member_weights, mixture_cross_entropy
from torchace.nn import MemberWeights


def case(num_members: int = 4, num_samples: int = 60, classes: int = 5, seed: int = 0) -> tuple:
    """Members of different quality: logits `(K, N, C)` in float64 and a target."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (num_samples,), generator=g)
    truth = F.one_hot(target, classes).double()
    skill = torch.linspace(0, 3, num_members).double()[:, None, None]
    logits = skill * truth + torch.randn(num_members, num_samples, classes, generator=g).double()
    return logits, target


def test_starts_uniform():
    weights = MemberWeights(4)
    assert torch.equal(weights(), torch.full((4,), 0.25))
    assert weights().requires_grad
    assert [name for name, _ in weights.named_parameters()] == ["logits"]
    assert "num_members=4" in repr(weights)
    with pytest.raises(ValueError, match="at least 1"):
        MemberWeights(0)


def test_its_loss_is_the_ensembles_cross_entropy_and_reaches_the_weights_alone():
    logits, target = case()
    logits.requires_grad_()
    weights = MemberWeights(4).double()
    with torch.no_grad():
        weights.logits.copy_(torch.randn(4))
    loss = weights.loss(logits, target)
    expected = F.nll_loss(ensemble_log_probs(logits.detach(), member_weights=weights()), target)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    assert logits.grad is None
    # ∂/∂a^k = α^k (1 - mean over samples of q^k / q̄ at the true class)
    alpha, q = weights().detach(), logits.detach().softmax(2)[:, torch.arange(60), target]
    torch.testing.assert_close(weights.logits.grad, alpha * (1 - (q / (alpha @ q)).mean(1)), rtol=0, atol=1e-12)


def test_the_members_loss_holds_the_weights_constant():
    logits, target = case()
    weights = MemberWeights(4).double()
    together = logits.clone().requires_grad_()
    loss = amended_cross_entropy(together, target, 0.7, member_weights=weights()) + weights.loss(together, target)
    loss.backward()
    alone = logits.clone().requires_grad_()
    amended_cross_entropy(alone, target, 0.7).backward()  # uniform, as at the start
    torch.testing.assert_close(together.grad, alone.grad, rtol=0, atol=1e-15)
    only = copy.deepcopy(weights)
    only.zero_grad()
    only.loss(logits, target).backward()
    assert torch.equal(weights.logits.grad, only.logits.grad)

    weights.zero_grad()
    loss = amended_cross_entropy(logits.clone().requires_grad_(), target, 0.7, member_weights=weights())
    loss.backward()
    assert weights.logits.grad is None


def test_gradient_by_finite_differences():
    logits, target = case()
    probs = torch.randn(60, 5).double().softmax(1)
    free = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for wanted in (target, probs):
        assert torch.autograd.gradcheck(
            lambda a, wanted=wanted: mixture_cross_entropy(logits, wanted, a.softmax(0)), free
        )


def test_a_weight_that_underflowed_has_a_finite_gradient():
    logits, target = case()
    weights = MemberWeights(4)
    with torch.no_grad():
        weights.logits.copy_(torch.tensor([0.0, -200.0, 0.0, 0.0]))
    assert weights()[1] == 0
    weights.loss(logits.float(), target).backward()
    assert torch.isfinite(weights.logits.grad).all()
    assert weights.logits.grad[1] == 0

    alpha = torch.tensor([0.5, 0.0, 0.25, 0.25], requires_grad=True)  # the derivative in α itself is not zero
    mixture_cross_entropy(logits.float(), target, alpha).backward()
    q = logits.softmax(2)[:, torch.arange(60), target]
    torch.testing.assert_close(alpha.grad, -(q / (alpha.detach().double() @ q)).mean(1).float())


def test_training_and_em_find_the_same_weights():
    logits, target = case(num_members=3, seed=1)
    weights = MemberWeights(3).double()
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        weights.loss(logits, target).backward()
        optimizer.step()
    fitted = fit_member_weights(logits.log_softmax(2), target)
    ours, theirs = (mixture_cross_entropy(logits, target, alpha).item() for alpha in (weights(), fitted))
    assert theirs - 1e-9 <= ours <= theirs + 2e-3  # the least is at α^0 = 0, which a softmax only approaches


@pytest.mark.parametrize("seed", range(3))
def test_fitted_weights_against_slsqp(seed):
    num_members = 2 + seed
    logits, target = case(num_members=num_members, seed=seed)
    log_probs = logits.log_softmax(2)
    q = log_probs[:, torch.arange(60), target].exp().numpy()
    result = minimize(
        lambda a: -np.log(a @ q).mean(),
        np.full(num_members, 1 / num_members),
        jac=lambda a: -(q / (a @ q)).mean(1),
        method="SLSQP",
        bounds=[(0, 1)] * num_members,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones_like(a)},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert result.success
    alpha = fit_member_weights(log_probs, target)
    assert alpha.dtype is torch.float64
    assert (alpha >= 0).all()
    assert alpha.sum().item() == pytest.approx(1, abs=1e-12)
    # its tolerance bounds the distance of the cross entropy from the least one
    assert -np.log(alpha.numpy() @ q).mean() <= result.fun + 2e-9
    assert np.abs(alpha.numpy() - result.x).max() < 1e-3


def test_fitted_weights_of_dense_outputs():
    logits, target = case()
    dense = logits.reshape(4, 6, 2, 5, 5).permute(0, 1, 4, 2, 3)  # (K, 6, C, 2, 5)
    alpha = fit_member_weights(dense.log_softmax(2), target.reshape(6, 2, 5))
    torch.testing.assert_close(alpha, fit_member_weights(logits.log_softmax(2), target), rtol=0, atol=1e-9)


def test_degenerate_fits():
    uniform = torch.full((3, 8, 2), 0.5).log()
    target = torch.zeros(8, dtype=torch.long)
    torch.testing.assert_close(fit_member_weights(uniform, target), torch.full((3,), 1 / 3))  # equal members
    assert torch.equal(fit_member_weights(uniform[:1], target), torch.ones(1))  # one member

    best = torch.tensor([0.9, 0.1]).log().expand(8, 2)
    alpha = fit_member_weights(torch.stack([uniform[0], best, uniform[0]]), target)
    torch.testing.assert_close(alpha, torch.tensor([0.0, 1.0, 0.0]), rtol=0, atol=1e-6)

    # each member alone knows one of two samples: half each, though each rules one of them out
    sure = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]).log()
    torch.testing.assert_close(fit_member_weights(sure, torch.tensor([0, 1])), torch.tensor([0.5, 0.5]))

    # probabilities far below what float64 can hold
    tiny = torch.tensor([[-2000.0, -1.0], [-2001.0, -1.0]]).unsqueeze(1)
    alpha = fit_member_weights(tiny.expand(2, 4, 2), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(alpha, torch.tensor([1.0, 0.0]), rtol=0, atol=1e-6)

    # a sample that all members hold impossible says nothing; nor do two of them
    some = torch.tensor([[[0.5, 0.5], [0.0, 1.0]], [[0.9, 0.1], [0.0, 1.0]]]).log()
    alpha = fit_member_weights(some, torch.tensor([0, 0]))
    torch.testing.assert_close(alpha, torch.tensor([0.0, 1.0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(fit_member_weights(some[:, 1:], torch.tensor([0])), torch.tensor([0.5, 0.5]))


def test_one_step_lowers_the_cross_entropy():
    logits, target = case()
    values = [
        mixture_cross_entropy(logits, target, fit_member_weights(logits.log_softmax(2), target, max_steps=steps)).item()
        for steps in (1, 2, 5, 20, 100)
    ]
    assert values == sorted(values, reverse=True)


def test_errors():
    logits, target = case()
    with pytest.raises(ValueError, match=r"use logits\.log_softmax"):
        fit_member_weights(logits, target)
    with pytest.raises(ValueError, match="log-probabilities"):
        fit_member_weights(torch.full((2, 3, 2), float("nan")), torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="class indices"):
        fit_member_weights(logits.log_softmax(2), torch.full((60, 5), 0.2))
    with pytest.raises(ValueError, match="at least one sample"):
        fit_member_weights(torch.zeros(2, 0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="class indices in"):
        fit_member_weights(logits.log_softmax(2), target - 1)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        mixture_cross_entropy(logits, target, MemberWeights(3)())


@pytest.mark.parametrize("soft", [False, True])
def test_classes_of_probability_zero_do_not_count(soft):
    logits, target = case(classes=4)
    masked = F.pad(logits, (0, 1), value=-torch.inf)
    found = []
    for given, classes in ((logits, 4), (masked, 5)):
        weights = MemberWeights(4).double()
        loss = weights.loss(given, F.one_hot(target, classes).double() if soft else target)
        loss.backward()
        found.append((loss.detach(), weights.logits.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("dense", [False, True])
def test_ignored_samples(dense, ignore_index):
    logits, target = case()
    kept = torch.arange(60) % 3 > 0
    kept &= target != ignore_index
    target = target.masked_fill(~kept, ignore_index)
    logits[:, ~kept] = float("nan")  # padding may hold anything
    log_probs = logits.log_softmax(2)
    weights = MemberWeights(4).double()
    with torch.no_grad():
        weights.logits.copy_(torch.randn(4, generator=torch.Generator().manual_seed(3)))
    expected = mixture_cross_entropy(logits[:, kept], target[kept], weights())
    (gradient,) = torch.autograd.grad(expected, weights.logits)
    fitted = fit_member_weights(log_probs[:, kept], target[kept])
    each = mixture_cross_entropy(logits, target, weights(), ignore_index=ignore_index, reduction="none")
    assert each[~kept].eq(0).all()
    if dense:
        logits, target = (logits.reshape(4, 6, 10, 5).transpose(2, 3), target.reshape(6, 10))
        log_probs = logits.log_softmax(2)
    loss = weights.loss(logits, target, ignore_index=ignore_index)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, weights.logits)[0], gradient, rtol=0, atol=1e-12)
    found = fit_member_weights(log_probs, target, ignore_index=ignore_index)
    torch.testing.assert_close(found, fitted, rtol=0, atol=1e-12)


def test_all_samples_ignored():
    logits, target = case()
    target = torch.full_like(target, -100)
    weights = MemberWeights(4).double()
    loss = weights.loss(logits, target)
    loss.backward()
    assert loss.item() == 0
    assert weights.logits.grad.eq(0).all()
    with pytest.raises(ValueError, match=r"at least one sample .* but got none: all have the ignore_index=-100\.$"):
        fit_member_weights(logits.log_softmax(2), target)
    with pytest.raises(ValueError, match=r"in \[0, 4\] or ignore_index=-100, but got -1"):
        weights.loss(logits, target + 99)
    with pytest.raises(TypeError, match="Expected `ignore_index` to be an int"):
        fit_member_weights(logits.log_softmax(2), target, ignore_index=None)
