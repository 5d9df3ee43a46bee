"""Brier score and calibration error against slow references and torchmetrics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torchmetrics.functional.classification import multiclass_calibration_error

from tests.reference import scores as reference
from tests.reference.loss_inputs import U32, logits_cases
from torchace.functional import brier_score, calibration_error
from torchace.functional.scores import CalibrationBins, bins_error, brier_scores, calibration_bins


@st.composite
def predictions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Probabilities `(N, C)` and labels, more samples than bins or fewer."""
    num_samples, num_classes = draw(st.integers(1, 40)), draw(st.integers(2, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    probs = (3 * torch.randn(num_samples, num_classes, generator=g, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(num_classes, (num_samples,), generator=g)


def away_from_bin_edges(probs: Tensor, num_bins: int) -> bool:
    """No confidence within 1e-5 of an edge, where float32 may put it into the neighboring bin."""
    place = probs.amax(1) * num_bins
    return bool(((place - place.round()).abs() > 1e-5 * num_bins).all())


@given(logits_cases(), st.booleans())
def test_brier_score(case: tuple[Tensor, Tensor, Tensor | None], soft: bool) -> None:
    logits, target, _ = case
    probs = logits[0].softmax(1)
    target = logits.flip(0)[0].exp().div(logits.flip(0)[0].exp().sum(1, keepdim=True)) if soft else target
    score = brier_score(probs, target)
    assert score.item() == pytest.approx(reference.brier_score(probs, target), rel=1e-12, abs=1e-12)
    assert 0 <= score.item() <= 2


@given(predictions(), st.integers(1, 20))
def test_calibration_error(case: tuple[Tensor, Tensor], num_bins: int) -> None:
    probs, target = case
    assume(away_from_bin_edges(probs, num_bins))
    error = calibration_error(probs, target, num_bins).item()
    assert error == pytest.approx(reference.calibration_error(probs, target, num_bins), rel=1e-12, abs=1e-12)


@given(predictions(), st.integers(1, 20))
def test_calibration_error_is_that_of_torchmetrics(case: tuple[Tensor, Tensor], num_bins: int) -> None:
    probs, target = case
    probs = probs.float()
    assume(away_from_bin_edges(probs, num_bins))
    theirs = multiclass_calibration_error(probs, target, probs.shape[1], n_bins=num_bins, norm="l1").item()
    # Theirs sums 40 confidences in float32: up to 40 roundings, then divides and adds up to 20 bins.
    assert calibration_error(probs, target, num_bins).item() == pytest.approx(theirs, rel=0, abs=80 * U32)


def test_calibration_error_of_dense_outputs() -> None:
    g = torch.Generator().manual_seed(0)
    probs = torch.randn(4, 3, 5, 2, generator=g, dtype=torch.float64).softmax(1)
    target = torch.randint(3, (4, 5, 2), generator=g)
    flat, labels = probs.movedim(1, -1).reshape(-1, 3), target.flatten()
    assert_close(calibration_error(probs, target), calibration_error(flat, labels), rtol=1e-12, atol=1e-12)
    assert calibration_error(probs, target).item() == pytest.approx(
        reference.calibration_error(probs, target, 15), rel=1e-12
    )
    assert brier_score(probs, target).item() == pytest.approx(reference.brier_score(probs, target), rel=1e-12)


@pytest.mark.parametrize(("right", "expected"), [(1.0, 0.0), (0.0, 1.0)])
def test_full_confidence_lies_in_the_last_bin(right: float, expected: float) -> None:
    probs = torch.tensor([[1.0, 0.0]])
    assert calibration_error(probs, torch.tensor([0 if right else 1])).item() == expected


def test_known_values() -> None:
    probs = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    assert brier_score(probs, torch.tensor([0, 1])).item() == pytest.approx((0.18 + 0.5) / 2)
    # one bin: |accuracy - mean confidence|; the tie of the second goes to class 0, which is wrong
    assert calibration_error(probs, torch.tensor([0, 1]), num_bins=1).item() == pytest.approx(abs(0.5 - 0.6))


def test_bins_of_several_batches_add_up() -> None:
    g = torch.Generator().manual_seed(0)
    probs = torch.randn(50, 3, generator=g).softmax(1)
    target = torch.randint(3, (50,), generator=g)
    parts = [calibration_bins(probs[:20], target[:20]), calibration_bins(probs[20:], target[20:])]
    together = CalibrationBins(*(a + b for a, b in zip(*parts, strict=True)))
    assert bins_error(together).item() == pytest.approx(calibration_error(probs, target).item(), rel=2 * U32)
    assert together.samples.sum().item() == 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    probs = torch.randn(50, 3, generator=g).softmax(1).to(dtype)
    target = torch.randint(3, (50,), generator=g)
    assert brier_score(probs, target).dtype == torch.float32
    assert_close(brier_scores(probs, target), brier_scores(probs.float(), target), rtol=0, atol=0)
    bins, full = calibration_bins(probs, target), calibration_bins(probs.float(), target)
    for mine, theirs in zip(bins, full, strict=True):
        assert_close(mine, theirs, rtol=0, atol=0)


def test_a_sample_that_is_ignored_is_an_error_not_a_wrong_number() -> None:
    probs = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    for score in (brier_score, calibration_error):
        with pytest.raises(ValueError, match=r"^Expected class indices in \[0, 1\], but got -100\.$"):
            score(probs, torch.tensor([0, -100]))
