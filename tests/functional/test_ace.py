"""`amended_cross_entropy` against the slow reference, against torch, and against the paper's other forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.reference import losses as reference
from tests.reference.loss_inputs import (
    CLOSE,
    U32,
    Case,
    ace_cases,
    check_case,
    diversities,
    member_weights,
    value_and_gradient,
)
from torchace.functional import amended_cross_entropy, diversity_from_gamma


def rounding_bounds(case: Case, loss: reference.Loss) -> tuple[float, float]:
    """How far float32 may be from the float64 value and gradient, to first order in u = 2^-24.

    With L the largest |log q| and Z the largest |z|: the norm logsumexp(z) has an error of u(C + 3 + Z) (a sum of C
    exponentials and a logarithm, then rounded), the subtraction from z adds u L, so log q is off by
    δ = u(L + Z + C + 3) and q by the relative δ + u. The rounded inputs p, w, α add 3u, the mean over K members K u.

    Gradient, an element: scale s((1-λ)q + λq̄) - scale w p; all factors of s are at most 1, so its error is at most
    scale s (2δ + u(K + n + 12)), n roundings being in the denominator's sum.

    Value: <pull, log q> with Σ|pull| ≤ s(1+λ). The error of log q gives s(1+λ)δ, that of pull s(1+λ)(δ + (K+8)u)L, the
    products and the sum of all m = N·C terms s(1+λ)(m + n + 4)u L.
    """
    z = case.outputs.double()
    num_members, _, num_classes = z.shape[:3]
    n = math.prod(loss.sample_shape)
    biggest = z.abs().max().item()
    depth = z.log_softmax(2).abs().max().item() if num_classes > 1 else 0.0
    delta = U32 * (depth + biggest + num_classes + 3)
    counted = [(loss.scale(k, i), i) for k in range(num_members) for i in loss.samples()]
    weights = [scale * loss.mass(i) for scale, i in counted if scale]
    if case.upstream is not None:
        weights = [w * max(1.0, case.upstream.abs().max().item()) for w in weights]
    # with members elsewhere, q̄ is rounded once more; it is at most 1 all the same
    m = n * num_classes + num_members
    each = (1 + case.diversity) * (delta + (delta + U32 * (num_members + 8)) * depth + U32 * (m + n + 4) * (depth + 1))
    value = max(weights, default=0.0) if case.options["reduction"] == "none" else sum(weights)
    return value * each, max(weights, default=0.0) * (2 * delta + U32 * (num_members + n + 12))


@given(ace_cases())
def test_value_and_gradients_equal_the_reference(case: Case) -> None:
    check_case(amended_cross_entropy, case, rounding_bounds)


def torch_value_and_gradient(case: Case) -> tuple[Tensor, Tensor]:
    def sum_losses(logits: Tensor, target: Tensor, diversity: float, **options) -> Tensor:
        target = target if target.is_floating_point() else target.long()
        losses = [F.cross_entropy(member, target, **options) for member in logits]
        return torch.stack(losses) if options["reduction"] == "none" else torch.stack(losses).sum()

    return value_and_gradient(sum_losses, case)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "ignored", "all ignored", "a class ignored", "probabilities"])
@pytest.mark.parametrize("rest", [(), (2, 2)])
@pytest.mark.parametrize("how", ["λ=0 as a tensor", "K=1"])
def test_without_diversity_it_is_cross_entropy(
    how: str, rest: tuple[int, ...], kind: str, weighted: bool, label_smoothing: float, reduction: str
) -> None:
    g = torch.Generator().manual_seed(7)
    num_members = 1 if how == "K=1" else 3
    logits = torch.randn(num_members, 5, 4, *rest, generator=g, dtype=torch.float64)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.rand(4, generator=g, dtype=torch.float64) + 0.1
    if kind == "probabilities":
        target = torch.randn(5, 4, *rest, generator=g, dtype=torch.float64).softmax(1)
    else:
        target = torch.randint(4, (5, *rest), generator=g)
        if kind == "ignored":
            target[[0, 3]] = -100
        elif kind == "all ignored":
            target[:] = -100
        elif kind == "a class ignored":
            options["ignore_index"] = int(target.flatten()[0])
    upstream = torch.randn(num_members, 5, *rest, generator=g, dtype=torch.float64) if reduction == "none" else None
    case = Case(logits, target, 0.0, options, upstream)
    value, gradient = torch_value_and_gradient(case)
    case.diversity = {"λ=0": 0.0, "λ=0 as a tensor": torch.tensor(0.0), "K=1": 0.7}[how]
    ours, our_gradient = value_and_gradient(amended_cross_entropy, case)
    assert_close(ours, value, equal_nan=True, **CLOSE)
    assert_close(our_gradient, gradient, **CLOSE)


@given(ace_cases(torch_options=True))
def test_a_member_of_weight_1_has_no_others(case: Case) -> None:
    num_members = case.outputs.shape[0]
    case.options["reduction"] = "none"
    case.upstream = torch.ones(num_members, case.outputs.shape[1], *case.outputs.shape[3:])
    plain, plain_gradient = torch_value_and_gradient(case)
    case.options["member_weights"] = [1.0] + [0.0] * (num_members - 1)
    value, gradient = value_and_gradient(amended_cross_entropy, case)
    assert_close(value[0], plain[0], **CLOSE)
    assert_close(gradient[0], plain_gradient[0], **CLOSE)


def test_no_samples() -> None:
    logits, target = torch.zeros(2, 0, 3, requires_grad=True), torch.zeros(0, dtype=torch.long)
    assert math.isnan(amended_cross_entropy(logits, target, 0.5).item())  # as F.cross_entropy
    total = amended_cross_entropy(logits, target, 0.5, reduction="sum")
    assert total.item() == 0.0
    total.backward()
    assert logits.grad is not None
    assert logits.grad.shape == (2, 0, 3)
    assert amended_cross_entropy(logits, target, 0.5, reduction="none").shape == (2, 0)


@given(ace_cases(), diversities())
def test_the_three_forms_of_the_paper_agree(case: Case, diversity: float) -> None:
    logits = case.outputs
    assume(logits.ndim == 3)
    num_members, num_samples, num_classes = logits.shape
    target = torch.arange(num_samples) % num_classes
    ours = amended_cross_entropy(logits, target, diversity, reduction="none")
    assert_close(ours, reference.rewritten(logits, target, diversity), **CLOSE)
    alpha = case.options.get("member_weights")
    if alpha is not None and "mixture" not in case.options:
        weighted = amended_cross_entropy(logits, target, diversity, member_weights=alpha, reduction="none")
        assert_close(weighted, reference.rewritten(logits, target, diversity, alpha), **CLOSE)
    if num_members > 1:
        gamma = diversity * (num_members - 1) / num_members
        assert_close(ours, reference.gamma_form(logits, target, gamma), **CLOSE)
        lam = diversity_from_gamma(gamma, num_members)
        again = amended_cross_entropy(logits, target, lam, reduction="none")
        assert_close(again, reference.gamma_form(logits, target, gamma), **CLOSE)


@given(ace_cases(), st.floats(-50, 50))
def test_a_constant_added_to_a_members_logits_changes_nothing(case: Case, constant: float) -> None:
    value, gradient = value_and_gradient(amended_cross_entropy, case)
    case.outputs = case.outputs.clone()
    case.outputs[-1] += constant
    shifted, shifted_gradient = value_and_gradient(amended_cross_entropy, case)
    # z + 50 is rounded to 50 · 2^-53 = 6e-15; each of at most 64 log-probabilities moves by that, times weights below 4
    assert_close(shifted, value, rtol=1e-11, atol=1e-11, equal_nan=True)
    assert_close(shifted_gradient, gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("short", ["(N,)", "(K, N)"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sample_weights_without_the_dense_axes_are_broadcast(short: str, reduction: str) -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 4, 5, 6, generator=g, dtype=torch.float64)
    target = torch.randint(4, (3, 5, 6), generator=g)
    weight = torch.rand((3,) if short == "(N,)" else (2, 3), generator=g, dtype=torch.float64)
    full = weight[..., None, None].expand(*weight.shape, 5, 6)
    ours = amended_cross_entropy(logits, target, 0.4, sample_weight=weight, reduction=reduction)
    loss = reference.amended_cross_entropy(logits, target, 0.4, sample_weight=full, reduction=reduction)
    assert_close(ours, loss.value(), **CLOSE)


def test_integer_weights_repeat_samples() -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    target = torch.tensor([0, 3, 1])
    weighted = amended_cross_entropy(logits, target, 0.6, sample_weight=torch.tensor([2, 0, 1]))
    repeated = amended_cross_entropy(logits[:, [0, 0, 2]], target[[0, 0, 2]], 0.6)
    assert_close(weighted, repeated, **CLOSE)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_zero_sample_weights_add_nothing(reduction: str) -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([0, 1, 2])
    loss = amended_cross_entropy(logits, target, 0.5, sample_weight=torch.zeros(3), reduction=reduction)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()
    # one member without samples: the other's loss alone, still coupled to both
    own = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 1.0]])
    alone = amended_cross_entropy(logits.detach(), target, 0.5, sample_weight=own, reduction="none")[1]
    expected = alone.sum() / 4 if reduction == "mean" else alone.sum()
    assert_close(amended_cross_entropy(logits.detach(), target, 0.5, sample_weight=own, reduction=reduction), expected)


def test_class_weights_of_zero_follow_torch() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.tensor([0.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    for target in (torch.tensor([0, 1, 2]), torch.tensor([0, 3, 0])):  # the second has a mean over nothing
        case = Case(logits, target, 0.0, {"weight": weight, "reduction": "mean"})
        value, _ = value_and_gradient(amended_cross_entropy, case)
        expected, _ = torch_value_and_gradient(case)
        assert_close(value, expected, equal_nan=True, **CLOSE)
        case.options["reduction"] = "sum"
        value, gradient = value_and_gradient(amended_cross_entropy, case)
        expected, expected_gradient = torch_value_and_gradient(case)
        assert_close(value, expected, **CLOSE)
        assert_close(gradient, expected_gradient, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets_of_every_integer_type(dtype: torch.dtype, reduction: str) -> None:
    logits = torch.randn(2, 3, 120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 119, 3])
    expected = amended_cross_entropy(logits, target, 0.5, reduction=reduction)
    assert_close(amended_cross_entropy(logits, target.to(dtype), 0.5, reduction=reduction), expected, rtol=0, atol=0)


def test_small_integer_types_do_not_wrap_around_ignore_index() -> None:
    # -100 is 156 in uint8, and 255 is -1 in int8: neither may be confused
    logits = torch.randn(2, 2, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([156, 3])
    expected = amended_cross_entropy(logits, target, 0.5)
    assert_close(amended_cross_entropy(logits, target.to(torch.uint8), 0.5), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"or ignore_index=255, but got -1\."):
        amended_cross_entropy(logits, torch.tensor([-1, 3], dtype=torch.int8), 0.5, ignore_index=255)
    many = torch.randn(2, 2, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ignored = torch.tensor([-100, 50], dtype=torch.int8)  # 300 is 44 in int8
    assert_close(
        amended_cross_entropy(many, ignored, 0.5), amended_cross_entropy(many, ignored.long(), 0.5), rtol=0, atol=0
    )
    # masks of segmentation: uint8 with 255 for "ignore"
    mask = torch.tensor([255, 3], dtype=torch.uint8)
    assert_close(
        amended_cross_entropy(logits, mask, 0.5, ignore_index=255),
        amended_cross_entropy(logits[:, 1:], torch.tensor([3]), 0.5),
        **CLOSE,
    )


@pytest.mark.parametrize(
    "diversity",
    [
        np.float32(0.5),
        np.float64(0.5),
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.float64),
        torch.tensor(0.5, dtype=torch.float16),
        torch.tensor(0.5, requires_grad=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_kind_of_diversity(diversity, reduction: str) -> None:
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.tensor([0, 1, 2, 3])
    expected = amended_cross_entropy(logits, target, 0.5, reduction=reduction)
    loss = amended_cross_entropy(logits, target, diversity, reduction=reduction)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=0, atol=0)
    loss.sum().backward()
    assert not isinstance(diversity, Tensor) or diversity.grad is None


@pytest.mark.parametrize("diversity", [0, 1, torch.tensor(0), torch.tensor(1)], ids=repr)
def test_whole_numbers_are_diversities(diversity) -> None:
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 3])
    assert_close(
        amended_cross_entropy(logits, target, diversity),
        amended_cross_entropy(logits, target, float(diversity)),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_undetached_others_receive_their_gradient(reduction: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 4, generator=g, dtype=torch.float64, requires_grad=True)
    target, alpha, lam = torch.tensor([1, 3]), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), 0.6
    loss = amended_cross_entropy(logits, target, lam, member_weights=alpha, detach_others=False, reduction=reduction)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)

    log_q = logits.log_softmax(2)
    losses = []
    for k, n in itertools.product(range(3), range(2)):
        e = -log_q[k, n, target[n]]
        for j in range(3):
            if j != k:
                e = e + lam * alpha[j] * (log_q[j, n].exp() * log_q[k, n]).sum()
        losses.append(e)
    plain = torch.stack(losses).reshape(3, 2)
    (expected,) = torch.autograd.grad(plain.mean(1).sum() if reduction == "mean" else plain.sum(), logits)
    assert_close(gradient, expected, **CLOSE)
    detached = amended_cross_entropy(logits, target, lam, member_weights=alpha, reduction=reduction)
    assert_close(loss, detached, **CLOSE)  # the value is the same, the gradient is not
    assert not torch.allclose(torch.autograd.grad(detached.sum(), logits)[0], expected)


def test_a_target_that_requires_grad_receives_its_gradient() -> None:
    # torch's cross entropy differentiates in probabilities too (distillation into a learned target)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 4, generator=g, dtype=torch.float64).softmax(1).requires_grad_()
    ours = torch.autograd.grad(amended_cross_entropy(logits, target, 0.0), (logits, target))
    plain = torch.autograd.grad(sum(F.cross_entropy(z, target) for z in logits), (logits, target))
    for mine, theirs in zip(ours, plain, strict=True):
        assert_close(mine, theirs, **CLOSE)
    # with λ > 0 the logits' gradient is that of a constant target
    (gradient,) = torch.autograd.grad(amended_cross_entropy(logits, target, 0.5), logits)
    (expected,) = torch.autograd.grad(amended_cross_entropy(logits, target.detach(), 0.5), logits)
    assert_close(gradient, expected, **CLOSE)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("own", [False, True])
def test_logits_in_another_memory_order(reduction: str, own: bool) -> None:
    g = torch.Generator().manual_seed(0)
    batch_first = torch.randn(6, 3, 5, generator=g, dtype=torch.float64)  # (N, K, C) memory, as a model may emit it
    target = torch.randint(5, (6,), generator=g)
    weight = torch.rand(3, 6, generator=g, dtype=torch.float64) if own else None
    upstream = torch.randn(3, 6, generator=g, dtype=torch.float64) if reduction == "none" else None
    options = {"sample_weight": weight, "reduction": reduction}
    plain = Case(batch_first.transpose(0, 1).contiguous(), target, 0.3, options, upstream)
    value, gradient = value_and_gradient(amended_cross_entropy, plain)
    for view in (
        batch_first.transpose(0, 1),
        batch_first.permute(2, 1, 0).contiguous().permute(1, 2, 0),
        batch_first.transpose(0, 1).repeat(1, 1, 2)[:, :, :5],
    ):
        leaf = view.detach().requires_grad_()
        loss = amended_cross_entropy(leaf, target, 0.3, **options)
        assert_close(loss, value, **CLOSE)
        (loss if upstream is None else (loss * upstream).sum()).backward()
        assert_close(leaf.grad, gradient, **CLOSE)
    # one model's logits seen as K members: expanded, stride 0
    one = torch.randn(1, 6, 5, generator=g, dtype=torch.float64, requires_grad=True)
    loss = amended_cross_entropy(one.expand(3, 6, 5), target, 0.3, **options)
    repeated = amended_cross_entropy(one.repeat(3, 1, 1), target, 0.3, **options)
    assert_close(loss, repeated, **CLOSE)
    assert_close(torch.autograd.grad(loss.sum(), one)[0], torch.autograd.grad(repeated.sum(), one)[0], **CLOSE)


@pytest.mark.parametrize("num_classes", [5, 70])  # the softmax runs along another axis for many classes
def test_targets_and_mixtures_in_another_memory_order(num_classes: int) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, num_classes, generator=g, dtype=torch.float64, requires_grad=True)
    target, mixture = torch.rand(2, 3, num_classes, generator=g, dtype=torch.float64).softmax(2)
    expected = amended_cross_entropy(logits, target, 0.5, mixture=mixture)
    for own in (target.mT.contiguous().mT, target):
        loss = amended_cross_entropy(logits, own, 0.5, mixture=mixture.mT.contiguous().mT)
        assert_close(loss, expected, **CLOSE)
        assert_close(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, expected)), **CLOSE)


def test_logits_without_gradient_give_a_loss_without_gradient() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2])
    loss = amended_cross_entropy(logits, target, 0.5)
    assert not loss.requires_grad
    with torch.inference_mode():
        assert_close(amended_cross_entropy(logits, target, 0.5), loss, rtol=0, atol=0)
    with torch.no_grad():
        assert not amended_cross_entropy(logits.requires_grad_(), target, 0.5).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("diversity", [0.0, 0.5])
def test_the_default_device_does_not_matter(diversity: float, reduction: str) -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2])
    options = {"member_weights": [0.25, 0.75], "label_smoothing": 0.1, "reduction": reduction}
    expected = amended_cross_entropy(logits, target, diversity, **options)
    with torch.device("meta"):
        ours = amended_cross_entropy(logits, target, diversity, **options)
    assert_close(ours, expected, rtol=0, atol=0)


@given(st.integers(1, 4), st.integers(0, 2**16), diversities(), st.booleans())
def test_a_mixture_computed_elsewhere_gives_the_same_losses(
    num_members: int, seed: int, diversity: float, weighted: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_members + 1, 3, 4, generator=g, dtype=torch.float64)
    target = torch.randint(4, (3,), generator=g)
    alpha = member_weights("random" if weighted else "uniform", num_members + 1, g)
    if alpha is None:
        alpha = torch.full((num_members + 1,), 1 / (num_members + 1), dtype=torch.float64)
    mixture = torch.tensordot(alpha, logits.softmax(2), 1)
    options = {"member_weights": alpha, "reduction": "none"}
    whole = amended_cross_entropy(logits, target, diversity, **options)
    # spread over two places: the first members here, the last one there
    here = amended_cross_entropy(
        logits[:-1], target, diversity, member_weights=alpha[:-1], mixture=mixture, reduction="none"
    )
    there = amended_cross_entropy(
        logits[-1:], target, diversity, member_weights=alpha[-1:], mixture=mixture, reduction="none"
    )
    assert_close(torch.cat([here, there]), whole, **CLOSE)
