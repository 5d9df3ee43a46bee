"""The bias-variance-covariance decomposition against its definition and against the error it decomposes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.reference import scores as reference
from torchace.functional import bias_variance_covariance


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Predictions `(T, K, N, ...)` and a target."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    rest = draw(st.sampled_from([(), (2,)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    offset = draw(st.sampled_from([0.0, 10.0]))
    predictions = torch.randn(*shape, *rest, generator=g, dtype=torch.float64) + offset
    return predictions, torch.randn(shape[2], *rest, generator=g, dtype=torch.float64)


@given(trainings())
def test_the_terms_equal_the_reference(case: tuple[Tensor, Tensor]) -> None:
    predictions, target = case
    terms = bias_variance_covariance(predictions, target)
    expected = reference.bias_variance_covariance(predictions, target)
    assert [term.item() for term in terms] == pytest.approx(list(expected), rel=1e-12, abs=1e-12)


@given(trainings())
def test_the_three_add_up_to_the_ensembles_squared_error(case: tuple[Tensor, Tensor]) -> None:
    predictions, target = case
    terms = bias_variance_covariance(predictions, target)
    error = (predictions.mean(1) - target).square().mean().item()
    assert sum(term.item() for term in terms) == pytest.approx(error, rel=1e-12)
    assert terms.error.item() == pytest.approx(error, rel=1e-12)
    assert terms.variance.item() >= 0
    assert terms.bias.item() >= 0


def test_names_and_known_values() -> None:
    # one sample, target 2; trainings (1, 3) and (2, 4): mean bias ½, variances ¼ and ¼, covariance ¼
    terms = bias_variance_covariance(torch.tensor([[[1.0], [3.0]], [[2.0], [4.0]]]), torch.tensor([2.0]))
    assert terms._fields == ("bias", "variance", "covariance")
    assert [term.item() for term in terms] == pytest.approx([0.25, 0.5 / 4, 0.5 / 4])


def test_one_training_has_bias_alone() -> None:
    predictions = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = bias_variance_covariance(predictions, torch.zeros(4, dtype=torch.float64))
    assert terms.variance.item() == 0.0
    assert terms.covariance.item() == pytest.approx(0.0, abs=1e-15)


def test_opposite_members_have_negative_covariance() -> None:
    noise = torch.randn(20, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = bias_variance_covariance(torch.cat([noise, -noise], 1), torch.zeros(3, dtype=torch.float64))
    assert terms.covariance.item() == pytest.approx(-terms.variance.item(), rel=1e-12)
    assert terms.error.item() == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("shape", [(3, 4), (0, 2, 4), (2, 0, 4)])
def test_shapes_that_cannot_be_decomposed(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^Expected `predictions` of shape \(T, K, N, \.\.\.\), trainings first"):
        bias_variance_covariance(torch.zeros(shape), torch.zeros(4))


def test_non_finite_predictions_name_training_and_member() -> None:
    predictions = torch.zeros(3, 2, 4)
    predictions[2, 1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^Expected finite `predictions\[2\]`, but those of member 1 hold NaN"):
        bias_variance_covariance(predictions, torch.zeros(4))
