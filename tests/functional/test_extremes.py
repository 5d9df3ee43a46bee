"""Logits at the ends of their types: finite, correct gradients where the loss itself is huge or infinite."""

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
from tests.reference.loss_inputs import U32, Case, diversities, under_func, value_and_gradient
from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy, negative_correlation

INF = float("inf")
TYPES = [(torch.float64, 1e4), (torch.float32, 1e4), (torch.float16, 3e4), (torch.bfloat16, 1e4)]
IDS = [str(dtype).removeprefix("torch.") for dtype, _ in TYPES]


def extreme_logits(dtype: torch.dtype, big: float, shape: tuple[int, ...], seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return ((torch.randint(0, 3, shape, generator=g) - 1) * big).to(dtype)  # -big, 0 or big


@pytest.mark.parametrize(("dtype", "big"), TYPES, ids=IDS)
@given(
    st.sampled_from([(1, 2, 3), (3, 2, 4), (4, 3, 2, 2)]),
    st.integers(0, 2**16),
    diversities(),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.2]),
)
def test_huge_logits(
    dtype: torch.dtype,
    big: float,
    shape: tuple[int, ...],
    seed: int,
    diversity: float,
    reduction: str,
    label_smoothing: float,
) -> None:
    logits = extreme_logits(dtype, big, shape, seed)
    samples = (shape[1], *shape[3:])
    target = torch.randint(shape[2], samples, generator=torch.Generator().manual_seed(seed))
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    upstream = torch.ones(shape[0], *samples) if reduction == "none" else None
    case = Case(logits, target, diversity, options, upstream)
    exact = reference.amended_cross_entropy(logits, target, diversity, **options)
    # Differences of the logits are exact, so q is 0, or 1/m for a tie of m, to a few roundings of the type computed in;
    # the gradient is a mean over K of such numbers times a scale of at most 1. The value is a sum of products with
    # |log q| ≤ 2·big, of N·C·K terms with Σ|pull| ≤ 2 for each member and sample.
    u = 2.0**-53 if dtype == torch.float64 else U32
    terms = math.prod(shape)
    rounding = 0.0 if dtype in (torch.float64, torch.float32) else torch.finfo(dtype).eps  # of the gradient, at the end
    for value, gradient in (value_and_gradient(amended_cross_entropy, case), under_func(amended_cross_entropy, case)):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        assert_close(gradient.double(), exact.gradient(), rtol=rounding, atol=u * (shape[0] + 16))
        bound = 2 * 2 * big * math.prod((shape[0], *samples)) * u * (terms + 16)
        assert_close(value.double(), exact.value(), rtol=0, atol=bound)


@pytest.mark.parametrize(("dtype", "big"), TYPES, ids=IDS)
@pytest.mark.parametrize("diversity", [0.0, 0.5, 1.0])
def test_huge_logits_of_opposite_members(dtype: torch.dtype, big: float, diversity: float) -> None:
    # Written out by hand: member 0 is sure and right, member 1 sure and wrong; q̄ = (½, ½), p = (1, 0)
    logits = torch.tensor([[[big, -big]], [[-big, big]]], dtype=dtype)
    expected = torch.tensor(
        [[[0.5 * diversity - diversity, 0.5 * diversity]], [[0.5 * diversity - 1, (1 - diversity) + 0.5 * diversity]]]
    )
    case = Case(logits, torch.tensor([0]), diversity)
    for value, gradient in (value_and_gradient(amended_cross_entropy, case), under_func(amended_cross_entropy, case)):
        assert_close(gradient.float(), expected, rtol=0, atol=2 * U32)
        exact = float(logits[0, 0, 0]) * 2
        # e⁰ = 0 - λ/2 · 2big, e¹ = 2big - λ/2 · 2big
        assert value.item() == pytest.approx(exact - diversity * exact, rel=4 * U32, abs=4 * U32 * exact)


@pytest.mark.parametrize(("dtype", "big"), TYPES, ids=IDS)
@given(
    st.sampled_from([(1, 2), (3, 2), (4, 3, 2)]),
    st.integers(0, 2**16),
    diversities(),
    st.sampled_from(["mean", "sum", "none"]),
)
def test_huge_binary_logits(
    dtype: torch.dtype, big: float, shape: tuple[int, ...], seed: int, diversity: float, reduction: str
) -> None:
    logits = extreme_logits(dtype, big, shape, seed)
    target = torch.randint(2, shape[1:], generator=torch.Generator().manual_seed(seed)).double()
    upstream = torch.ones(shape) if reduction == "none" else None
    case = Case(logits, target, diversity, {"reduction": reduction}, upstream)
    u = 2.0**-53 if dtype == torch.float64 else U32
    q = logits.double().sigmoid()
    others = (q.mean(0) - q / shape[0]).double()
    z = logits.double()
    a = target - diversity * others
    b = 1 - target - diversity * (1 - 1 / shape[0] - others)
    losses = a * -F.logsigmoid(z) + b * -F.logsigmoid(-z)
    slopes = (1 - diversity) * q + diversity * q.mean(0) - target
    n = math.prod(shape[1:])
    scale = 1 / n if reduction == "mean" else 1.0
    rounding = 0.0 if dtype in (torch.float64, torch.float32) else torch.finfo(dtype).eps
    for value, gradient in (
        value_and_gradient(binary_amended_cross_entropy, case),
        under_func(binary_amended_cross_entropy, case),
    ):
        assert gradient.isfinite().all()
        # a and b are made of K + 12 roundings of at most 1; each value is at most 2·big
        assert_close(gradient.double(), scale * slopes, rtol=rounding, atol=2 * u * (shape[0] + 12))
        expected = losses if reduction == "none" else scale * losses.sum()
        assert_close(value.double(), expected, rtol=0, atol=2 * big * math.prod(shape) * u * (shape[0] + n + 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_huge_predictions(dtype: torch.dtype) -> None:
    predictions = torch.tensor([[1e4, -1e4], [-1e4, 3e4]]).to(dtype)
    target = torch.zeros(2)
    f = predictions.double()
    value, gradient = value_and_gradient(negative_correlation, Case(predictions, target, 0.5, {"reduction": "sum"}))
    expected = f - 0.5 * (f - f.mean(0))
    assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    losses = 0.5 * f**2 - 0.5 * (f - f.mean(0)) ** 2  # λ / (2(1 - ½)) = ½
    assert value.item() == pytest.approx(losses.sum().item(), rel=16 * U32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("diversity", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("soft", [False, True])
def test_classes_masked_by_minus_infinity(dtype: torch.dtype, reduction: str, diversity: float, soft: bool) -> None:
    # A class that no member may choose: the loss is that of the other classes, its gradient zero.
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=g).to(dtype)
    logits[:, :, 2] = -INF
    kept = [0, 1, 3, 4]
    target = torch.tensor([0, 1, 3, 4])
    labels = torch.tensor([0, 1, 2, 3])
    if soft:
        labels = torch.rand(4, 4, generator=g).softmax(1)
        target = torch.zeros(4, 5)
        target[:, kept] = labels
    upstream = torch.ones(3, 4) if reduction == "none" else None
    options = {"reduction": reduction}
    expected, expected_gradient = value_and_gradient(
        amended_cross_entropy, Case(logits[:, :, kept], labels, diversity, options, upstream)
    )
    masked = Case(logits, target, diversity, options, upstream)
    u = 2.0**-53 if dtype == torch.float64 else U32
    for value, gradient in (
        value_and_gradient(amended_cross_entropy, masked),
        under_func(amended_cross_entropy, masked),
    ):
        # the same numbers in sums of another length: 60 terms of at most 10
        assert_close(value, expected, rtol=0, atol=600 * u)
        assert_close(gradient[:, :, kept], expected_gradient, rtol=torch.finfo(dtype).eps, atol=16 * u)
        assert not gradient[:, :, 2].any()


def test_a_class_masked_in_one_member_alone() -> None:
    # H(q^j, q^k) is infinite, so e^k is -∞; its gradient is finite and the closed form's
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    logits[1, :, 2] = -INF
    target = torch.tensor([0, 1, 3])
    q = logits.softmax(2)
    p = F.one_hot(target, 4)
    expected = (0.5 * (q - p) + 0.5 * (q.mean(0) - p)) / 3
    case = Case(logits, target, 0.5)
    for value, gradient in (value_and_gradient(amended_cross_entropy, case), under_func(amended_cross_entropy, case)):
        assert value.item() == -INF
        assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_an_impossible_label_costs_infinity_as_in_torch(label_smoothing: float) -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 1, 2] = -INF
    target = torch.tensor([0, 2, 3])
    case = Case(logits, target, 0.0, {"label_smoothing": label_smoothing})
    plain = sum(F.cross_entropy(z, target, label_smoothing=label_smoothing) for z in logits)
    assert plain.item() == INF
    q = logits.softmax(2)
    p = F.one_hot(target, 4).double() * (1 - label_smoothing) + label_smoothing / 4
    for value, gradient in (value_and_gradient(amended_cross_entropy, case), under_func(amended_cross_entropy, case)):
        assert value.item() == INF
        assert_close(gradient, (q - p) / 3, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("diversity", [0.0, 0.5])
@pytest.mark.parametrize("how", ["ignored", "weight 0", "own weight 0"])
def test_an_ignored_sample_may_be_infinite(how: str, diversity: float) -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 2, 3])
    expected, expected_gradient = value_and_gradient(
        amended_cross_entropy, Case(logits[:, [0, 2]], target[[0, 2]], diversity)
    )
    logits[:, 1, 2] = -INF  # the label of sample 1 is impossible
    options = {}
    if how == "ignored":
        target[1] = -100
        logits[:, 1, 0] = -INF
    elif how == "weight 0":
        options["sample_weight"] = torch.tensor([1.0, 0.0, 1.0])
    else:
        options["sample_weight"] = torch.tensor([[1.0, 0.0, 1.0]] * 2)
    case = Case(logits, target, diversity, options)
    for value, gradient in (value_and_gradient(amended_cross_entropy, case), under_func(amended_cross_entropy, case)):
        assert_close(value, expected, rtol=1e-12, atol=1e-12)
        assert_close(gradient[:, [0, 2]], expected_gradient, rtol=1e-12, atol=1e-12)
        assert not gradient[:, 1].any()


def test_ignored_binary_and_ncl_samples_may_be_huge() -> None:
    outputs = torch.tensor([[1.0, 1e30], [0.5, -1e30]], requires_grad=True)
    weight = torch.tensor([1.0, 0.0])
    for loss in (binary_amended_cross_entropy, negative_correlation):
        value = loss(outputs, torch.tensor([1.0, 0.0]), 0.5, sample_weight=weight)
        (gradient,) = torch.autograd.grad(value, outputs)
        expected = loss(outputs[:, :1], torch.tensor([1.0]), 0.5)
        assert_close(value, expected)
        assert gradient.isfinite().all()
        assert not gradient[:, 1].any()


@pytest.mark.parametrize("diversity", [0.0, 0.5, 1.0])
def test_confident_members_keep_small_gradients(diversity: float) -> None:
    # With q = (1-ε, ε), ε = e^-30 ≪ 2^-24, all members sure and right: the wrong class's gradient is ε, not 0
    logits = torch.tensor([[[30.0, 0.0]], [[30.0, 0.0]]])
    case = Case(logits, torch.tensor([0]), diversity)
    tiny = math.exp(-30.0)
    for _, gradient in (value_and_gradient(amended_cross_entropy, case), under_func(amended_cross_entropy, case)):
        # exp(-30) in float32: the argument is exact, the result is rounded a few times
        assert_close(gradient[:, 0, 1], torch.full((2,), tiny), rtol=8 * U32, atol=0)


def test_nan_logits_give_a_nan_loss() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 0] = float("nan")
    for reduction in ("mean", "sum"):
        value = amended_cross_entropy(logits, torch.tensor([0, 1, 2]), 0.5, reduction=reduction)
        assert math.isnan(value.item())
