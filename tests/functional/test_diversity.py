"""The scores of diversity against slow references."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.reference import scores as reference
from tests.reference.loss_inputs import logits_cases
from torchace.functional import (
    ambiguity,
    amended_cross_entropy,
    disagreement,
    ensemble_log_probs,
    mutual_information,
    pairwise_cross_entropy,
    predictive_entropy,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
Drawn = tuple[Tensor, Tensor, Tensor | None]
reductions = st.sampled_from(["mean", "sum", "none"])


@given(logits_cases(), reductions)
def test_disagreement(case: Drawn, reduction: str) -> None:
    logits, _, _ = case
    score = disagreement(logits, reduction=reduction)
    assert_close(score, reference.disagreement(logits, reduction), **CLOSE)


@given(logits_cases(), reductions)
def test_mutual_information(case: Drawn, reduction: str) -> None:
    logits, _, alpha = case
    score = mutual_information(logits, member_weights=alpha, reduction=reduction)
    assert_close(score, reference.mutual_information(logits, alpha, reduction), **CLOSE)
    assert (score >= 0).all()


@given(logits_cases(), reductions, st.booleans())
def test_ambiguity(case: Drawn, reduction: str, soft: bool) -> None:
    logits, target, alpha = case
    if soft:
        target = logits.flip(0)[0].softmax(1)
    score = ambiguity(logits, target, member_weights=alpha, reduction=reduction)
    assert_close(score, reference.ambiguity(logits, target, alpha, reduction), **CLOSE)
    assert (score >= -1e-12).all()


@given(logits_cases())
def test_pairwise_cross_entropy(case: Drawn) -> None:
    logits, _, _ = case
    assert_close(pairwise_cross_entropy(logits), reference.pairwise_cross_entropy(logits), **CLOSE)


@given(logits_cases(), st.floats(0, 1))
def test_the_loss_is_made_of_the_scores(case: Drawn, diversity: float) -> None:
    # mean e^k = H(p, q^k) - λ Σ_{j≠k} α^j H(q^j, q^k), with the matrix's columns
    logits, target, _ = case
    num_members = logits.shape[0]
    matrix = pairwise_cross_entropy(logits)
    off_diagonal = matrix - torch.diag(matrix.diagonal())
    plain = sum(F.cross_entropy(z, target) for z in logits)
    expected = plain - diversity / num_members * off_diagonal.sum()
    assert_close(amended_cross_entropy(logits, target, diversity), expected, **CLOSE)


@given(logits_cases())
def test_ambiguity_equals_the_ensembles_gain(case: Drawn) -> None:
    logits, target, alpha = case
    weights = torch.full((logits.shape[0],), 1 / logits.shape[0], dtype=torch.float64) if alpha is None else alpha
    members = sum(w * F.cross_entropy(z, target) for w, z in zip(weights, logits, strict=True))
    ensemble = F.nll_loss(ensemble_log_probs(logits, member_weights=alpha), target)
    assert_close(ambiguity(logits, target, member_weights=alpha), members - ensemble, **CLOSE)


@pytest.mark.parametrize("score", [disagreement, mutual_information])
def test_identical_members_do_not_differ(score) -> None:
    one = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    # float32: q̄ = Σ q/5 is rounded, so each log-ratio is off by a few 2^-24 and no more
    assert score(one).item() == pytest.approx(0.0, abs=1e-6)
    assert score(one.repeat(5, 1, 1)).item() == pytest.approx(0.0, abs=1e-6)


def test_known_values() -> None:
    # three members, two agree: one of three pairs agrees
    logits = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 2.0]]])
    assert disagreement(logits).item() == pytest.approx(2 / 3)
    # two members sure of different classes: one bit
    sure = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
    assert mutual_information(sure).item() == pytest.approx(math.log(2))
    assert mutual_information(sure, member_weights=[0.25, 0.75]).item() == pytest.approx(
        -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    )


@pytest.mark.parametrize(("dtype", "big"), [(torch.float32, 1e4), (torch.float16, 3e4), (torch.bfloat16, 1e4)])
def test_extreme_logits(dtype: torch.dtype, big: float) -> None:
    logits = torch.tensor([[[big, -big]], [[-big, big]]], dtype=dtype)
    exact = float(logits[0, 0, 0])
    target = torch.tensor([0])
    assert disagreement(logits).item() == 1.0
    assert mutual_information(logits).item() == pytest.approx(math.log(2))
    assert ambiguity(logits, target).item() == pytest.approx(exact - math.log(2))
    assert_close(pairwise_cross_entropy(logits), torch.tensor([[0.0, 2 * exact], [2 * exact, 0.0]]))


def test_ties_go_to_the_first_class() -> None:
    assert disagreement(torch.zeros(3, 2, 4)).item() == 0.0
    assert disagreement(torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]]])).item() == 1.0


def test_scores_of_half_precision_are_float32() -> None:
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.tensor([0, 1])
    for half, full in (
        (disagreement(logits), disagreement(logits.float())),
        (mutual_information(logits), mutual_information(logits.float())),
        (ambiguity(logits, target), ambiguity(logits.float(), target)),
        (pairwise_cross_entropy(logits), pairwise_cross_entropy(logits.float())),
    ):
        assert half.dtype == torch.float32
        assert_close(half, full, rtol=0, atol=0)


def test_autocast_does_not_round_the_scores() -> None:
    logits = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))
    expected = pairwise_cross_entropy(logits), mutual_information(logits)
    with torch.autocast("cpu", torch.bfloat16):
        ours = pairwise_cross_entropy(logits), mutual_information(logits)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_close(mine, theirs, rtol=0, atol=0)


def test_scores_under_vmap() -> None:
    logits = torch.randn(5, 3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 3])
    for score in (disagreement, mutual_information, pairwise_cross_entropy, lambda z: ambiguity(z, target)):
        assert_close(torch.func.vmap(score)(logits), torch.stack([score(z) for z in logits]), **CLOSE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_name_the_member(bad: float) -> None:
    logits = torch.zeros(3, 2, 4)
    logits[1, 0, 2] = bad
    calls = [
        lambda: disagreement(logits),
        lambda: mutual_information(logits),
        lambda: ambiguity(logits, torch.tensor([0, 1])),
        lambda: pairwise_cross_entropy(logits),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^Expected finite `logits`, but those of member 1 hold NaN or Inf"):
            call()


@pytest.mark.parametrize("num_members", range(1, 21))
def test_predictive_entropy_is_never_negative(num_members: int) -> None:
    # rounding makes the log-probability of a sure class positive for some numbers of members
    logits = torch.tensor([100.0, 0.0, 0.0], dtype=torch.float64).expand(num_members, 1, 3)
    assert 0 <= float(predictive_entropy(logits)) < 1e-12
