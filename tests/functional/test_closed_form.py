"""The closed forms of a training step against the written-out losses, run by run and member by member."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.reference import losses as reference
from torchace.functional import ensemble_log_probs
from torchace.functional.closed_form import FEW_CLASSES, ClosedForm, ace_closed_form, ncl_closed_form

RUNS, SAMPLES = 3, 4
LAMS = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
# float64: a few roundings of numbers of about 1
WITHIN = {"rtol": 0, "atol": 1e-13}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape: int, classes: int = 5) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


def weights(*shape: int) -> Tensor:
    """Shares of the samples, of which one is 0."""
    weight = drawn(*shape, seed=2).abs()
    weight[..., 1] = 0.0
    return weight / weight.sum(-1, keepdim=True)


def assert_is(form: ClosedForm, run: int, members: slice, expected: reference.Loss) -> None:
    """The losses of `reduction="none"` and their gradients, which have their sample weights in them."""
    torch.testing.assert_close(form.losses[run, members], expected.value().flatten(1).sum(1), **WITHIN)
    torch.testing.assert_close(form.gradient[run, members], expected.autograd_gradient(), **WITHIN)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("classes", [5, FEW_CLASSES])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("members", [1, 3])
def test_shared_batches(members: int, smoothing: float, classes: int, turned: bool) -> None:
    logits = drawn(RUNS, members, classes, SAMPLES).mT if turned else drawn(RUNS, members, SAMPLES, classes)
    y, scale = labels(RUNS, SAMPLES, classes=classes), weights(RUNS, SAMPLES)
    form = ace_closed_form(logits, y, LAMS, scale, label_smoothing=smoothing)
    for run in range(RUNS):
        expected = reference.amended_cross_entropy(
            logits[run],
            y[run],
            float(LAMS[run]),
            sample_weight=scale[run],
            label_smoothing=smoothing,
            reduction="none",
        )
        assert_is(form, run, slice(None), expected)
        score = -ensemble_log_probs(logits[run])[torch.arange(SAMPLES), y[run]]
        torch.testing.assert_close(form.scores[run], score, **WITHIN)


@pytest.mark.parametrize("classes", [5, FEW_CLASSES])
@pytest.mark.parametrize("coupled", [False, True])
def test_own_batches(coupled: bool, classes: int) -> None:
    members = 3
    logits, y = drawn(RUNS, members, SAMPLES, classes), labels(RUNS, members, SAMPLES, classes=classes)
    scale = weights(RUNS, members, SAMPLES)
    mixture = drawn(RUNS, members, SAMPLES, classes, seed=3).softmax(3) if coupled else None
    form = ace_closed_form(logits, y, LAMS, scale, label_smoothing=0.2, mixture=mixture)
    for run in range(RUNS):
        for k in range(members):
            expected = reference.amended_cross_entropy(
                logits[run, k : k + 1],
                y[run, k],
                float(LAMS[run]) if coupled else 0.0,
                member_weights=[1 / members] if coupled else None,
                mixture=None if mixture is None else mixture[run, k],
                sample_weight=scale[run, k],
                label_smoothing=0.2,
                reduction="none",
            )
            assert_is(form, run, slice(k, k + 1), expected)
    hits = logits.log_softmax(3).gather(3, y.unsqueeze(3)).squeeze(3)
    torch.testing.assert_close(form.scores, -hits, **WITHIN)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", ["shared", "separate", "exchanged"])
def test_regression(kind: str, members: int) -> None:
    outputs = 2
    f = drawn(RUNS, members, SAMPLES, outputs)
    lead = (RUNS, SAMPLES) if kind == "shared" else (RUNS, members, SAMPLES)
    y, scale = drawn(*lead, outputs, seed=4), weights(*lead)
    mixture = drawn(*lead, outputs, seed=5) if kind == "exchanged" else None
    form = ncl_closed_form(f, y, LAMS, scale, mixture=mixture)
    for run in range(RUNS):
        for k in range(members):
            whole = kind == "shared"
            expected = reference.negative_correlation(
                f[run] if whole else f[run, k : k + 1],
                y[run] if whole else y[run, k],
                0.0 if kind == "separate" else float(LAMS[run]),
                member_weights=None if whole or kind == "separate" else [1 / members],
                mixture=None if mixture is None else mixture[run, k],
                sample_weight=(scale[run] if whole else scale[run, k])[:, None].expand(-1, outputs) / outputs,
                reduction="none",
            )
            mine = k if whole else 0
            torch.testing.assert_close(form.losses[run, k], expected.value()[mine].sum(), **WITHIN)
            torch.testing.assert_close(form.gradient[run, k], expected.gradient()[mine], **WITHIN)
    predicted = f.mean(1) if kind == "shared" else f
    torch.testing.assert_close(form.scores, (predicted - y).square().mean(-1), **WITHIN)


def test_one_scale_for_all_samples() -> None:
    logits, y = drawn(RUNS, 3, SAMPLES, 5), labels(RUNS, SAMPLES)
    one = ace_closed_form(logits, y, LAMS, torch.full((RUNS, 1), 1 / SAMPLES, dtype=torch.float64))
    each = ace_closed_form(logits, y, LAMS, torch.full((RUNS, SAMPLES), 1 / SAMPLES, dtype=torch.float64))
    for ours, theirs in zip(one, each, strict=True):
        torch.testing.assert_close(ours, theirs, **WITHIN)


def test_a_run_whose_scale_is_0_gets_no_gradient() -> None:
    scale = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)
    form = ace_closed_form(drawn(RUNS, 3, SAMPLES, 5), labels(RUNS, SAMPLES), LAMS, scale)
    assert not form.gradient[1].any()
    assert form.gradient[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_certain_members(size: float, dtype: torch.dtype) -> None:
    """Probabilities of 0 and cross entropies that no probability could tell."""
    logits = torch.zeros(1, 2, 2, 3, dtype=dtype)
    logits[0, :, 0, 0] = size  # both are certain of class 0, and wrong
    logits[0, 0, 1, 1], logits[0, 1, 1, 2] = size, size  # they disagree; the first is right
    form = ace_closed_form(logits, torch.tensor([[2, 1]]), LAMS[1:2].to(dtype), torch.ones(1, 2, dtype=dtype))
    assert form.scores.tolist() == [[pytest.approx(size, rel=1e-6), pytest.approx(math.log(2), rel=1e-6)]]
    expected = reference.amended_cross_entropy(logits[0], torch.tensor([2, 1]), 0.4, reduction="sum")
    # numbers of about 1 with the eps of the type
    torch.testing.assert_close(form.gradient[0].double(), expected.gradient(), rtol=0, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(form.losses.sum().double(), expected.value(), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_a_class_that_nobody_can_believe_in_adds_nothing() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[[[largest, 0.0, -largest]], [[largest, 0.0, -largest]]]])  # the difference overflows
    form = ace_closed_form(logits, torch.tensor([[0]]), torch.tensor([0.5]), torch.ones(1, 1))
    assert torch.isfinite(form.losses).all()
    assert form.gradient.abs().max() == 0


def test_half_precision_is_computed_in_float32() -> None:
    exact = drawn(RUNS, 3, SAMPLES, 5).bfloat16()
    y, scale = labels(RUNS, SAMPLES), torch.full((RUNS, 1), 0.25)
    half = ace_closed_form(exact, y, LAMS.float(), scale)
    full = ace_closed_form(exact.float(), y, LAMS.float(), scale)
    assert half.gradient.dtype == torch.bfloat16
    assert torch.equal(half.gradient, full.gradient.bfloat16())
    assert torch.equal(half.losses, full.losses)
    assert torch.equal(half.scores, full.scores)


@pytest.mark.parametrize("turned", [False, True])
def test_what_comes_in_is_left_alone(turned: bool) -> None:
    logits = drawn(RUNS, 3, 5, SAMPLES).mT if turned else drawn(RUNS, 3, SAMPLES, 5)
    given = logits, LAMS.clone(), weights(RUNS, SAMPLES), weights(RUNS, 3, SAMPLES, 5)
    before = [value.clone() for value in given]
    ace_closed_form(logits, labels(RUNS, SAMPLES), given[1], given[2])
    ace_closed_form(logits, labels(RUNS, 3, SAMPLES), given[1], weights(RUNS, 3, SAMPLES), mixture=given[3])
    ncl_closed_form(logits, drawn(RUNS, SAMPLES, 5), given[1], given[2])
    assert all(torch.equal(value, old) for value, old in zip(given, before, strict=True))
