"""The closed form on the CPU against the composite: same numbers, nothing large saved, linear in the members."""

from __future__ import annotations

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
from tests.reference.cases import Case, ace_cases, check_changed_options, value_and_gradient
from torchace.functional import ace as functional_ace
from torchace.functional import amended_cross_entropy
from torchace.kernels import ace_cpu

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def composite_value_and_gradient(case: Case) -> tuple[Tensor, Tensor]:
    with mock.patch.object(functional_ace, "_fits_cpu", return_value=False):
        return value_and_gradient(amended_cross_entropy, case)


@given(ace_cases(), st.sampled_from(["mean", "sum"]), st.sampled_from([1, 7, 16, 1 << 19]))
def test_the_closed_form_equals_the_composite_in_pieces_of_every_size(case: Case, reduction: str, piece: int) -> None:
    case.options["reduction"], case.upstream = reduction, None
    value, gradient = composite_value_and_gradient(case)
    with mock.patch.object(ace_cpu, "PIECE", piece):
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
    with mock.patch.object(ace_cpu, "_value_and_gradient", wraps=ace_cpu._value_and_gradient) as computed:
        with torch.no_grad():
            amended_cross_entropy(logits, target, 0.5)
        amended_cross_entropy(logits, target, 0.5)
    assert [call.kwargs["want_gradient"] for call in computed.call_args_list] == [False, True]


@pytest.mark.parametrize("piece", [1, 40, 61, 10**6])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", ["members first", "samples first"])
def test_pieces_cover_every_sample_once(monkeypatch: pytest.MonkeyPatch, piece: int, own: bool, layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 13, 5, 2, generator=g, dtype=torch.float64)  # 20 elements a sample
    if layout == "samples first":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    target = torch.randint(5, (13, 2), generator=g)
    weight = torch.rand((2, 13, 2) if own else (13, 2), generator=g, dtype=torch.float64)
    options = {"sample_weight": weight, "weight": torch.rand(5, generator=g, dtype=torch.float64)}
    sizes: list[int] = []
    original = ace_cpu._log_softmax_and_softmax

    def counting(values: Tensor, *outputs: Tensor) -> None:
        sizes.append(values.shape[1])
        original(values, *outputs)

    monkeypatch.setattr(ace_cpu, "PIECE", piece)
    monkeypatch.setattr(ace_cpu, "_log_softmax_and_softmax", counting)
    leaf = logits.detach().requires_grad_()
    value = amended_cross_entropy(leaf, target, 0.5, **options)
    monkeypatch.undo()
    value.backward()
    assert sizes == {1: [1] * 13, 40: [2] * 6 + [1], 61: [3] * 4 + [1], 10**6: [13]}[piece]
    exact = reference.amended_cross_entropy(logits, target, 0.5, **options)
    assert_close(value.detach(), exact.value(), **CLOSE)
    assert_close(leaf.grad, exact.gradient(), **CLOSE)


def test_which_way_is_taken() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([0, 1, 2])

    def way(values: Tensor = logits, labels: Tensor = target, **options: Any) -> str:
        return type(amended_cross_entropy(values, labels, 0.5, **options).grad_fn).__name__

    assert way() == "AceCpuBackward"
    assert way(torch.nn.Parameter(logits.detach())) == "AceCpuBackward"
    assert way(reduction="sum") == "AceCpuBackward"
    # a second output, a gradient for someone else, or no elements: the composite
    assert way(reduction="none") != "AceCpuBackward"
    assert way(detach_others=False) != "AceCpuBackward"
    assert way(labels=torch.full((3, 4), 0.25, requires_grad=True)) != "AceCpuBackward"
    assert way(logits[:, :0], target[:0], reduction="sum") != "AceCpuBackward"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["members first", "samples first"])
def test_nothing_larger_than_the_logits_is_saved(dtype: torch.dtype, layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(5, 20, 30, generator=g).to(dtype)
    if layout == "samples first":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    logits = values.requires_grad_()
    target = torch.randint(30, (20,), generator=g)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = amended_cross_entropy(
            logits,
            target,
            0.5,
            weight=torch.rand(30, generator=g),
            sample_weight=torch.rand(5, 20, generator=g),
            label_smoothing=0.1,
        )
    # the logits themselves, which cost nothing, and one gradient
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
    with mock.patch.object(functional_ace, "_fits_cpu", return_value=closed), Traffic() as counted:
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
    monkeypatch.setattr(ace_cpu, "PIECE", 256)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 64, 8, generator=g)
    target = torch.randint(8, (64,), generator=g)
    with Traffic() as counted:
        amended_cross_entropy(logits, target, 0.5)
    assert counted.largest <= 256


def test_what_is_changed_in_place_before_the_backward() -> None:
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
