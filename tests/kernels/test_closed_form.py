"""The closed form against the composite and the reference: same numbers, nothing large saved, linear in the members."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import losses as reference
from tests.reference.loss_inputs import Case, ace_cases, check_changed_options, value_and_gradient
from torchace import kernels
from torchace.functional import amended_cross_entropy, ensemble_log_probs
from torchace.kernels import LossOptions, LossResult, closed_form

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def composite_value_and_gradient(case: Case) -> tuple[Tensor, Tensor]:
    with mock.patch.object(kernels, "fits_cpu", return_value=False):
        return value_and_gradient(amended_cross_entropy, case)


@given(ace_cases(), st.sampled_from(["mean", "sum"]), st.sampled_from([1, 7, 16, 1 << 19]))
def test_the_closed_form_equals_the_composite_in_pieces_of_every_size(case: Case, reduction: str, piece: int) -> None:
    case.options["reduction"], case.upstream = reduction, None
    value, gradient = composite_value_and_gradient(case)
    with mock.patch.multiple(closed_form, PIECE=piece, SMALL=piece):
        closed_value, closed_gradient = value_and_gradient(amended_cross_entropy, case)
    assert_close(closed_value, value, equal_nan=True, **CLOSE)
    assert_close(closed_gradient, gradient, **CLOSE)


@given(ace_cases(), st.sampled_from(["mean", "sum"]))
def test_the_value_alone_equals_the_value_with_a_gradient(case: Case, reduction: str) -> None:
    case.options["reduction"], case.upstream = reduction, None
    value, _ = value_and_gradient(amended_cross_entropy, case)
    assert_close(amended_cross_entropy(*case.args, **case.options), value, equal_nan=True, rtol=0, atol=0)


def test_without_gradients_none_is_computed() -> None:
    logits, target = torch.randn(2, 5, 3, requires_grad=True), torch.zeros(5, dtype=torch.long)
    with mock.patch.object(closed_form, "value_and_gradient", wraps=closed_form.value_and_gradient) as computed:
        with torch.no_grad():
            amended_cross_entropy(logits, target, 0.5)
        amended_cross_entropy(logits, target, 0.5)
    assert [call.kwargs["want_gradient"] for call in computed.call_args_list] == [False, True]


@pytest.mark.parametrize("piece", [1, 40, 61, 10**6])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", ["members first", "samples first"])
def test_pieces_cover_every_sample_once(monkeypatch: pytest.MonkeyPatch, piece: int, own: bool, layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 13, 10, generator=g, dtype=torch.float64)  # 20 elements a sample
    if layout == "samples first":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    target = torch.randint(10, (13,), generator=g)
    weight = torch.rand((2, 13) if own else (13,), generator=g, dtype=torch.float64)
    options = {"sample_weight": weight, "weight": torch.rand(10, generator=g, dtype=torch.float64)}
    sizes: list[int] = []
    original = closed_form._log_softmax_and_softmax

    def counting(values: Tensor, axis: int, *outputs: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(values.shape[5 - axis])
        return original(values, axis, *outputs)

    monkeypatch.setattr(closed_form, "PIECE", piece)
    monkeypatch.setattr(closed_form, "_log_softmax_and_softmax", counting)
    leaf = logits.detach().requires_grad_()
    value = amended_cross_entropy(leaf, target, 0.5, **options)
    monkeypatch.undo()
    value.backward()
    assert sizes == {1: [1] * 13, 40: [2] * 6 + [1], 61: [3] * 4 + [1], 10**6: [13]}[piece]
    exact = reference.amended_cross_entropy(logits, target, 0.5, **options)
    assert_close(value.detach(), exact.value(), **CLOSE)
    assert_close(leaf.grad, exact.gradient(), **CLOSE)


def test_conditions_for_the_closed_form() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([0, 1, 2])

    def way(values: Tensor = logits, labels: Tensor = target, **options: Any) -> str:
        return type(amended_cross_entropy(values, labels, 0.5, **options).grad_fn).__name__

    assert way() == "AmendedCrossEntropyBackward"
    assert way(torch.nn.Parameter(logits.detach())) == "AmendedCrossEntropyBackward"
    assert way(reduction="sum") == "AmendedCrossEntropyBackward"
    # a second output, a gradient for someone else, or no elements: the composite
    assert way(reduction="none") != "AmendedCrossEntropyBackward"
    assert way(detach_others=False) != "AmendedCrossEntropyBackward"
    assert way(labels=torch.full((3, 4), 0.25, requires_grad=True)) != "AmendedCrossEntropyBackward"
    assert way(logits[:, :0], target[:0], reduction="sum") != "AmendedCrossEntropyBackward"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["members first", "samples first"])
def test_nothing_larger_than_the_logits_is_saved(dtype: torch.dtype, layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(5, 20, 70, generator=g).to(dtype)
    if layout == "samples first":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    logits = values.requires_grad_()
    target = torch.randint(70, (20,), generator=g)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = amended_cross_entropy(
            logits,
            target,
            0.5,
            weight=torch.rand(70, generator=g),
            sample_weight=torch.rand(5, 20, generator=g),
            label_smoothing=0.1,
        )
    # many classes: of few, the gradient has another layout than a leaf
    fresh = [tensor for tensor in saved if tensor.data_ptr() != logits.data_ptr()]
    assert len(fresh) < len(saved)
    assert all(tensor.numel() <= 5 * 20 for tensor in fresh)  # target, weights: nothing with a class axis
    node = loss.grad_fn
    assert isinstance(node.gradient, Tensor)
    assert node.gradient.shape == logits.shape
    assert node.gradient.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    given = node.gradient.data_ptr()
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    assert node.gradient is None  # handed over, not kept beside what backward returns
    if dtype != torch.float16 and layout == "members first":
        assert logits.grad.data_ptr() == given


class Traffic(TorchDispatchMode):
    """Counts the elements that operations write, and the largest tensor among them: work and memory without a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.written += tensor.numel()
                self.largest = max(self.largest, tensor.numel())
        return out


def traffic(num_members: int, *, closed: bool, backward: bool = True) -> Traffic:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(num_members, 16, 8, generator=g, requires_grad=True)
    target = torch.randint(8, (16,), generator=g)
    with mock.patch.object(kernels, "fits_cpu", return_value=closed), Traffic() as counted:
        loss = amended_cross_entropy(logits, target, 0.5)
        if backward:
            loss.backward()
    return counted


@pytest.mark.parametrize("closed", [True, False])
def test_work_and_memory_are_linear_in_the_members(closed: bool) -> None:
    few, twice, many = (traffic(k, closed=closed) for k in (10, 20, 80))
    # a + bK: from K to 2K adds bK, from 2K to 8K adds six times that; a pairwise form would add 20 times as much
    assert many.written - twice.written == pytest.approx(6 * (twice.written - few.written), rel=0.01)
    assert many.largest <= 80 * 16 * 8


def test_the_closed_form_writes_less_than_the_composite() -> None:
    assert traffic(10, closed=True).written < traffic(10, closed=False).written


def test_a_piece_bounds_the_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    # all but the gradient itself stays below the piece
    monkeypatch.setattr(closed_form, "PIECE", 256)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 64, 8, generator=g)
    target = torch.randint(8, (64,), generator=g)
    with Traffic() as counted:
        amended_cross_entropy(logits, target, 0.5)
    assert counted.largest <= 256


def test_in_place_changes_before_the_backward() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target, diversity = torch.tensor([0, 1, 2]), torch.tensor(0.5)
    expected = torch.autograd.grad(amended_cross_entropy(logits, target, 0.5), logits)[0]
    loss = amended_cross_entropy(logits, target, diversity)
    diversity.fill_(0.0)  # a schedule may move on: the loss was computed with what it was
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    assert_close(gradient, expected)
    loss = amended_cross_entropy(logits, target, 0.5)
    target.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_backward_after_an_option_was_changed_in_place_is_refused(reduction: str) -> None:
    check_changed_options(torch.randn(3, 4, 5, dtype=torch.float64), reduction)


RUNS, SAMPLES = 3, 4
LAMS = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape: int, classes: int = 5) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


def run_terms(logits: Tensor, y: Tensor, diversity: Tensor, scale: Tensor, **options: Any) -> LossResult:
    return closed_form.compute(logits, LossOptions(y, diversity, scale=scale, **options), want_scores=True)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("classes", [5, closed_form.FEW_CLASSES])
@pytest.mark.parametrize(("members", "smoothing", "piece"), [(1, 0.3, 1 << 20), (3, 0.0, 40), (3, 0.3, 1 << 20)])
def test_several_runs_at_once(members: int, smoothing: float, piece: int, classes: int, turned: bool) -> None:
    logits = randn(RUNS, members, classes, SAMPLES).mT if turned else randn(RUNS, members, SAMPLES, classes)
    scale = randn(RUNS, SAMPLES, seed=2).abs()
    scale[:, 1] = 0.0
    y, before = labels(RUNS, SAMPLES, classes=classes), logits.clone()
    with mock.patch.multiple(closed_form, PIECE=piece, SMALL=piece):
        found = run_terms(logits, y, LAMS, scale, label_smoothing=smoothing)
    assert found.scores is not None
    assert found.gradient is not None
    for run in range(RUNS):
        options = {"sample_weight": scale[run], "label_smoothing": smoothing, "reduction": "none"}
        expected = reference.amended_cross_entropy(logits[run], y[run], float(LAMS[run]), **options)
        assert_close(found.losses[run], expected.value().sum(1), **CLOSE)
        assert_close(found.gradient[run], expected.autograd_gradient(), **CLOSE)
        score = -ensemble_log_probs(logits[run])[torch.arange(SAMPLES), y[run]]
        assert_close(found.scores[run], score, **CLOSE)
    assert torch.equal(logits, before)


def test_one_scale_for_all_samples_and_none_for_a_stopped_run() -> None:
    logits, y = randn(RUNS, 3, SAMPLES, 5), labels(RUNS, SAMPLES)
    scale = torch.tensor([[0.25], [0.0], [0.25]], dtype=torch.float64)
    one, each = run_terms(logits, y, LAMS, scale), run_terms(logits, y, LAMS, scale.expand(RUNS, SAMPLES))
    for ours, theirs in zip(one, each, strict=True):
        assert_close(ours, theirs, **CLOSE)
    assert one.gradient is not None
    assert not one.gradient[1].any()
    assert one.gradient[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_certain_members(size: float, dtype: torch.dtype) -> None:
    """Probabilities of 0 and cross entropies that no probability could tell."""
    logits = torch.zeros(1, 2, 2, 3, dtype=dtype)
    logits[0, :, 0, 0] = size  # both are certain of class 0, and wrong
    logits[0, 0, 1, 1], logits[0, 1, 1, 2] = size, size  # they disagree; the first is right
    found = run_terms(logits, torch.tensor([[2, 1]]), LAMS[1:2].to(dtype), torch.ones(1, 2, dtype=dtype))
    assert found.scores is not None
    assert found.gradient is not None
    assert found.scores.tolist() == [[pytest.approx(size, rel=1e-6), pytest.approx(math.log(2), rel=1e-6)]]
    expected = reference.amended_cross_entropy(logits[0], torch.tensor([2, 1]), 0.4, reduction="sum")
    eps = 4 * torch.finfo(dtype).eps  # numbers of about 1
    assert_close(found.gradient[0].double(), expected.gradient(), rtol=0, atol=eps)
    assert_close(found.losses.sum().double(), expected.value(), rtol=eps, atol=0)


def test_an_impossible_class_adds_nothing() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[[[largest, 0.0, -largest]], [[largest, 0.0, -largest]]]])  # the difference overflows
    found = run_terms(logits, torch.tensor([[0]]), torch.tensor([0.5]), torch.ones(1, 1))
    assert torch.isfinite(found.losses).all()
    assert found.gradient is not None
    assert found.gradient.abs().max() == 0


def test_half_precision_is_computed_in_float32() -> None:
    exact, y, scale = randn(RUNS, 3, SAMPLES, 5).bfloat16(), labels(RUNS, SAMPLES), torch.full((RUNS, 1), 0.25)
    half, full = (run_terms(z, y, LAMS.float(), scale) for z in (exact, exact.float()))
    assert half.gradient is not None
    assert full.gradient is not None
    assert torch.equal(half.gradient, full.gradient.bfloat16())
    assert torch.equal(half.losses, full.losses)
