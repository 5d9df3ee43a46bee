"""What holds for every loss: order of members, half precision, and which arguments receive a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.reference.loss_inputs import Case, ace_cases, element_cases, value_and_gradient
from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy, negative_correlation

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
STRATEGIES: dict[str, tuple[Any, st.SearchStrategy[Case]]] = {
    "ace": (amended_cross_entropy, ace_cases()),
    "binary": (binary_amended_cross_entropy, element_cases("binary")),
    "ncl": (negative_correlation, element_cases("ncl")),
}


@pytest.mark.parametrize("name", STRATEGIES)
@given(st.data(), st.randoms(use_true_random=False))
def test_permuting_members_permutes_the_result(name: str, data: st.DataObject, random) -> None:
    loss, cases = STRATEGIES[name]
    case = data.draw(cases)
    order = list(range(len(case.outputs)))
    random.shuffle(order)
    options = dict(case.options)
    if "member_weights" in options:
        options["member_weights"] = options["member_weights"][order]
    if "sample_weight" in options and options["sample_weight"].ndim == case.outputs.ndim - (name == "ace"):
        options["sample_weight"] = options["sample_weight"][order]
    upstream = None if case.upstream is None else case.upstream[order]
    value, gradient = value_and_gradient(loss, case)
    permuted = Case(case.outputs[order], case.target, case.diversity, options, upstream)
    other_value, other_gradient = value_and_gradient(loss, permuted)
    assert_close(other_value, value[order] if value.ndim else value, equal_nan=name == "ace", **CLOSE)
    assert_close(other_gradient, gradient[order], **CLOSE)


@pytest.mark.parametrize("name", STRATEGIES)
@given(st.data(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_outputs_give_a_float32_loss_of_their_values(
    name: str, data: st.DataObject, dtype: torch.dtype
) -> None:
    loss, cases = STRATEGIES[name]
    case = data.draw(cases)
    outputs = case.outputs.to(dtype)
    case = case.to(torch.float32)
    case.outputs = outputs.float()
    value, gradient = value_and_gradient(loss, case)
    case.outputs = outputs
    half_value, half_gradient = value_and_gradient(loss, case)
    assert half_value.dtype == torch.float32
    assert half_gradient.dtype == dtype
    # The same float32 arithmetic on the same numbers; the gradient is rounded to the half type once, at the end.
    assert_close(half_value, value, rtol=0, atol=0, equal_nan=name == "ace")
    assert_close(half_gradient, gradient.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "weight"), [("ace", "weight"), ("binary", "pos_weight"), ("ncl", None)])
def test_no_gradient_goes_to_the_options_or_the_other_members(name: str, weight: str | None, reduction: str) -> None:
    g, loss = torch.Generator().manual_seed(0), STRATEGIES[name][0]
    outputs = torch.randn(2, 3, 4, generator=g, requires_grad=True)
    target = torch.tensor([0, 1, 2]) if name == "ace" else torch.rand(3, 4, generator=g)
    # member 0 counts for nothing itself, and is a constant for member 1
    options = {"member_weights": torch.tensor([0.25, 0.75]), "sample_weight": torch.tensor([[0.0] * 3, [1.0] * 3])}
    options |= {} if weight is None else {weight: torch.rand(4, generator=g)}
    diversity, mixture = torch.tensor(0.5), torch.rand(3, 4, generator=g)
    constants = [constant.requires_grad_() for constant in (*options.values(), diversity, mixture)]
    for given_mixture in (None, mixture):
        outputs.grad = None
        loss(outputs, target, diversity, **options, mixture=given_mixture, reduction=reduction).sum().backward()
        assert outputs.grad is not None
        assert not outputs.grad[0].any()
        assert outputs.grad[1].all()
    assert all(constant.grad is None for constant in constants)
