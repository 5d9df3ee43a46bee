"""Invalid input: one-sentence errors that state what was expected, what was given and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchace import functional as ace

LOGITS = torch.zeros(2, 3, 4)
TARGET = torch.tensor([0, 1, 2])
NAN = float("nan")


def call(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {"logits": LOGITS, "target": TARGET, "diversity": 0.5, **changes}
    return ace.amended_cross_entropy(
        arguments.pop("logits"), arguments.pop("target"), arguments.pop("diversity"), **arguments
    )


def binary(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {"logits": LOGITS, "target": torch.zeros(3, 4), "diversity": 0.5, **changes}
    return ace.binary_amended_cross_entropy(
        arguments.pop("logits"), arguments.pop("target"), arguments.pop("diversity"), **arguments
    )


def ncl(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {"predictions": LOGITS, "target": torch.zeros(3, 4), "diversity": 0.5, **changes}
    return ace.negative_correlation(
        arguments.pop("predictions"), arguments.pop("target"), arguments.pop("diversity"), **arguments
    )


DIVERSITY_RANGE = (
    r"Expected `diversity` in \[0, 1\], but got {}\. For the paper's gamma, use "
    r"diversity_from_gamma\(gamma, num_members\)\."
)
DIVERSITY_TYPE = r"Expected `diversity` to be a number or a 0-dimensional tensor, but got {}\."

# arguments that every loss has
COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"diversity": 1.4}, ValueError, DIVERSITY_RANGE.format(r"1\.4")),
    ({"diversity": -0.1}, ValueError, DIVERSITY_RANGE.format(r"-0\.1")),
    ({"diversity": NAN}, ValueError, DIVERSITY_RANGE.format("nan")),
    ({"diversity": torch.tensor(1.5)}, ValueError, DIVERSITY_RANGE.format(r"1\.5")),
    (
        {"diversity": torch.tensor([0.5, 0.5])},
        ValueError,
        r"Expected `diversity` to be a number or a 0-dimensional tensor, but got shape \(2,\)\. "
        r"For several values at once, use torch\.func\.vmap over them\.",
    ),
    ({"diversity": "0.5"}, TypeError, DIVERSITY_TYPE.format("str")),
    ({"diversity": True}, TypeError, DIVERSITY_TYPE.format("bool")),
    (
        {"reduction": "average"},
        ValueError,
        r"Expected `reduction` to be one of 'mean', 'sum', 'none', but got 'average'\.",
    ),
    (
        {"member_weights": [0.5, 0.3, 0.2]},
        ValueError,
        r"Expected `member_weights` of shape \(2,\), one for each member, but got \(3,\)\.",
    ),
    ({"member_weights": [1.5, -0.5]}, ValueError, r"Expected non-negative `member_weights`, but got \[1\.5, -0\.5\]\."),
    ({"member_weights": [NAN, 1.0]}, ValueError, r"Expected non-negative `member_weights`, but got \[nan, 1\.0\]\."),
    (
        {"member_weights": [0.5, 0.6]},
        ValueError,
        r"Expected `member_weights` that sum to 1, but they sum to 1\.1\. "
        r"Divide them by their sum: member_weights / member_weights\.sum\(\)\.",
    ),
    (
        {"member_weights": torch.tensor([0.5, 0.4])},
        ValueError,
        r"Expected `member_weights` that sum to 1, but they sum to 0\.9\. "
        r"Divide them by their sum: member_weights / member_weights\.sum\(\)\.",
    ),
    (
        {"member_weights": [0.5, 0.6], "mixture": torch.zeros(3, 4)},
        ValueError,
        r"Expected `member_weights` that sum to at most 1, but they sum to 1\.1\. "
        r"Divide them by their sum: member_weights / member_weights\.sum\(\)\.",
    ),
    (
        {"mixture": torch.zeros(2, 3, 4)},
        ValueError,
        r"Expected `mixture` of shape \(3, 4\), the members' shape without the member axis, but got \(2, 3, 4\)\.",
    ),
    (
        {"mixture": 0.5},
        TypeError,
        r"Expected `mixture` to be a tensor, but got float\. Use torch\.as_tensor\(\.\.\.\)\.",
    ),
    (
        {"sample_weight": torch.tensor([1.0, -1.0, 1.0])},
        ValueError,
        r"Expected non-negative `sample_weight`, but some weights are negative or NaN\.",
    ),
    (
        {"sample_weight": torch.tensor([1.0, float("inf"), 1.0])},
        ValueError,
        r"Expected finite `sample_weight`, but some weights are NaN or Inf\.",
    ),
    (
        {"sample_weight": torch.ones(3, dtype=torch.complex64)},
        TypeError,
        r"Expected a real `sample_weight`, but got torch\.complex64\.",
    ),
    (
        {"member_weights": torch.tensor([0.5, 0.5], dtype=torch.complex64)},
        TypeError,
        r"Expected a real `member_weights`, but got torch\.complex64\.",
    ),
    (
        {"sample_weight": [1.0, 1.0, 1.0]},
        TypeError,
        r"Expected `sample_weight` to be a tensor, but got list\. Use torch\.as_tensor\(\.\.\.\)\.",
    ),
    (
        {"target": [0, 1, 2]},
        TypeError,
        r"Expected `target` to be a tensor, but got list\. Use torch\.as_tensor\(\.\.\.\)\.",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), COMMON, ids=range(len(COMMON)))
@pytest.mark.parametrize("loss", [call, binary, ncl])
def test_arguments_of_every_loss(loss, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$") as caught:
        loss(**changes)
    assert type(caught.value) is error
    assert len(caught.value.args) == 1


SOFTMAX: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"logits": torch.zeros(128, 10)},
        ValueError,
        r"Expected `logits` of shape \(K, N, C, \.\.\.\) with the member axis first, but got \(128, 10\)\. "
        r"For one model, add the axis: logits\[None\]\.",
    ),
    (
        {"logits": torch.zeros(10)},
        ValueError,
        r"Expected `logits` of shape \(K, N, C, \.\.\.\) with the member axis first, but got \(10,\)\.",
    ),
    (
        {"logits": [[0.0]]},
        TypeError,
        r"Expected `logits` to be a tensor, but got list\. Use torch\.as_tensor\(\.\.\.\)\.",
    ),
    (
        {"logits": torch.zeros(2, 3, 4, dtype=torch.long)},
        TypeError,
        r"Expected `logits` of a floating-point type, but got torch\.int64\. Convert it: logits\.float\(\)\.",
    ),
    (
        {"logits": torch.zeros(0, 3, 4)},
        ValueError,
        r"Expected `logits` with at least one member, but got \(0, 3, 4\)\.",
    ),
    ({"logits": torch.zeros(2, 3, 0)}, ValueError, r"Expected `logits` with at least one class, but got \(2, 3, 0\)\."),
    # target: shape
    (
        {"target": torch.zeros(2, 3, dtype=torch.long)},
        ValueError,
        r"Expected `target` of shape \(3,\) \(class indices\) or \(3, 4\) \(class probabilities\) for `logits` "
        r"\(2, 3, 4\), but got \(2, 3\)\. The target has no member axis: all members share it\.",
    ),
    (
        {"logits": torch.zeros(2, 3, 4, 5, 6)},
        ValueError,
        r"Expected `target` of shape \(3, 5, 6\) \(class indices\) or \(3, 4, 5, 6\) \(class probabilities\) for "
        r"`logits` \(2, 3, 4, 5, 6\), but got \(3,\)\. The target has no member axis: all members share it\.",
    ),
    (
        {"weight": torch.tensor([1.0, NAN, 1.0, 1.0])},
        ValueError,
        r"Expected finite `weight`, but some weights are NaN or Inf\.",
    ),
    # target: type
    (
        {"target": TARGET.float()},
        TypeError,
        r"Expected class indices of an integer type in `target` of shape \(3,\), but got torch\.float32\. "
        r"Convert it: target\.long\(\)\.",
    ),
    (
        {"target": TARGET.bool()},
        TypeError,
        r"Expected `target` of an integer type \(class indices\) or floating-point type \(class probabilities\), "
        r"but got torch\.bool\.",
    ),
    (
        {"target": torch.zeros(3, 4, dtype=torch.long)},
        TypeError,
        r"Expected probabilities of a floating-point type in `target` of shape \(3, 4\), but got torch\.int64\. "
        r"Convert it: target\.float\(\)\.",
    ),
    # target: values
    (
        {"target": torch.tensor([0, 4, 1])},
        ValueError,
        r"Expected class indices in \[0, 3\] or ignore_index=-100, but got 4\.",
    ),
    (
        {"target": torch.tensor([0, -100, 1]), "ignore_index": 0},
        ValueError,
        r"Expected class indices in \[0, 3\] or ignore_index=0, but got -100\.",
    ),
    # probabilities
    (
        {"target": torch.full((3, 4), NAN)},
        ValueError,
        r"Expected class probabilities in `target`, but some are negative or NaN\. "
        r"If they are logits, use target\.softmax\(1\)\.",
    ),
    (
        {"target": torch.full((3, 4), 0.25), "ignore_index": 1},
        ValueError,
        r"Expected class indices with ignore_index=1, but got class probabilities\. "
        r"Mask samples with `sample_weight` instead\.",
    ),
    # options
    ({"weight": torch.ones(3)}, ValueError, r"Expected `weight` of shape \(4,\), one for each class, but got \(3,\)\."),
    ({"label_smoothing": 1.1}, ValueError, r"Expected `label_smoothing` in \[0, 1\], but got 1\.1\."),
    (
        {"label_smoothing": torch.tensor(0.1)},
        TypeError,
        r"Expected `label_smoothing` to be a number in \[0, 1\], but got Tensor\.",
    ),
    (
        {"sample_weight": torch.ones(4)},
        ValueError,
        r"Expected `sample_weight` of shape \(3,\) \(shared by all members\) or \(2, 3\) \(each member's own\), "
        r"but got \(4,\)\.",
    ),
    (
        {"detach_others": False, "mixture": torch.zeros(3, 4)},
        ValueError,
        r"Expected `detach_others=True` with a `mixture`, but got False\. A given mixture is a constant\.",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), SOFTMAX, ids=range(len(SOFTMAX)))
def test_amended_cross_entropy(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$") as caught:
        call(**changes)
    assert type(caught.value) is error
    assert len(caught.value.args) == 1


NO_MEMBER_AXIS = (
    r"Expected `{0}` of shape \(K, N, \.\.\.\) with the member axis first, but got \(3,\)\. "
    r"For one model, add the axis: {0}\[None\]\."
)
ELEMENTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (binary, {"logits": torch.zeros(3)}, ValueError, NO_MEMBER_AXIS.format("logits")),
    (
        binary,
        {"target": torch.zeros(2, 3, 4)},
        ValueError,
        r"Expected `target` of shape \(3, 4\) to match `logits` \(2, 3, 4\), but got \(2, 3, 4\)\. "
        r"The target has no member axis: all members share it\.",
    ),
    (
        ncl,
        {"target": torch.zeros(3, 1)},
        ValueError,
        r"Expected `target` of shape \(3, 4\) to match `predictions` \(2, 3, 4\), but got \(3, 1\)\. "
        r"The target has no member axis: all members share it\.",
    ),
    (
        binary,
        {"target": torch.full((3, 4), 1.5)},
        ValueError,
        r"Expected `target` in \[0, 1\], the probability of each output, but some values are outside\.",
    ),
    (
        binary,
        {"target": torch.full((3, 4), NAN)},
        ValueError,
        r"Expected `target` in \[0, 1\], the probability of each output, but some values are outside\.",
    ),
    (
        binary,
        {"logits": torch.zeros(2, 3, 4, dtype=torch.int32)},
        TypeError,
        r"Expected `logits` of a floating-point type, but got torch\.int32\. Convert it: logits\.float\(\)\.",
    ),
    (
        ncl,
        {"predictions": torch.zeros(0, 3, 4)},
        ValueError,
        r"Expected `predictions` with at least one member, but got \(0, 3, 4\)\.",
    ),
    (
        ncl,
        {"target": torch.zeros(3, 4, dtype=torch.complex64)},
        TypeError,
        r"Expected a real `target`, but got torch\.complex64\.",
    ),
    (
        binary,
        {"pos_weight": torch.tensor([1.0, NAN, 1.0, 1.0])},
        ValueError,
        r"Expected finite `pos_weight`, but some weights are NaN or Inf\.",
    ),
    (
        binary,
        {"pos_weight": torch.ones(3)},
        ValueError,
        r"Expected `pos_weight` that broadcasts to the target's shape \(3, 4\), but got \(3,\)\.",
    ),
    (
        ncl,
        {"sample_weight": torch.ones(4)},
        ValueError,
        r"Expected `sample_weight` of shape \(3, 4\) \(shared by all members\) or \(2, 3, 4\) \(each member's own\), "
        r"but got \(4,\)\.",
    ),
]


@pytest.mark.parametrize(("loss", "changes", "error", "message"), ELEMENTS, ids=range(len(ELEMENTS)))
def test_binary_and_regression(loss, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$") as caught:
        loss(**changes)
    assert type(caught.value) is error


PROBS = torch.full((3, 4), 0.25)
NOT_PROBABILITIES = (
    r"Expected probabilities that are non-negative and sum to 1 over axis 1\. "
    r"For logits, use ensemble_probs\(logits\) first\."
)
OTHERS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: ace.ensemble_log_probs(torch.zeros(3, 4)),
        ValueError,
        r"Expected `logits` of shape \(K, N, C, \.\.\.\) with the member axis first, but got \(3, 4\)\. "
        r"For one model, add the axis: logits\[None\]\.",
    ),
    (
        lambda: ace.ensemble_log_probs(LOGITS, link="identity"),
        ValueError,
        r"Predictions with link='identity' have no log-probabilities\. Use ensemble_probs\.",
    ),
    (
        lambda: ace.ensemble_probs(LOGITS, member_weights=[0.5, 0.6]),
        ValueError,
        r"Expected `member_weights` that sum to 1, but they sum to 1\.1\. "
        r"Divide them by their sum: member_weights / member_weights\.sum\(\)\.",
    ),
    (
        lambda: ace.ambiguity(LOGITS, torch.tensor([0, -100, 1])),
        ValueError,
        r"Expected class indices in \[0, 3\], but got -100\.",
    ),
    (
        lambda: ace.disagreement(LOGITS, reduction="max"),
        ValueError,
        r"Expected `reduction` to be one of 'mean', 'sum', 'none', but got 'max'\.",
    ),
    (lambda: ace.brier_score(torch.randn(3, 4), TARGET), ValueError, NOT_PROBABILITIES),
    (lambda: ace.calibration_error(2 * PROBS, TARGET), ValueError, NOT_PROBABILITIES),
    (
        lambda: ace.brier_score(torch.full((3, 4), NAN), TARGET),
        ValueError,
        r"Expected finite `probs`, but some are NaN or Inf\.",
    ),
    (
        lambda: ace.brier_score(torch.ones(3), TARGET),
        ValueError,
        r"Expected `probs` of shape \(N, C, \.\.\.\), but got \(3,\)\.",
    ),
    (
        lambda: ace.calibration_error(PROBS, PROBS),
        TypeError,
        r"Expected class indices in `target`, but got class probabilities\. Use target\.argmax\(1\)\.",
    ),
    (
        lambda: ace.calibration_error(PROBS, TARGET, num_bins=0),
        ValueError,
        r"Expected `num_bins` to be at least 1, but got 0\.",
    ),
    (lambda: ace.average_gradients(LOGITS, 0), ValueError, r"Expected `num_members` to be at least 1, but got 0\."),
    (
        lambda: ace.average_gradients([1.0], 2),
        TypeError,
        r"Expected `x` to be a tensor, but got list\. Use torch\.as_tensor\(\.\.\.\)\.",
    ),
    (lambda: ace.gamma_from_diversity(0.5, 1), ValueError, r"Expected `num_members` to be at least 2, but got 1\."),
    (
        lambda: ace.gamma_from_diversity(0.5, 3, loss="mse"),
        ValueError,
        r"Expected `loss` to be one of 'ace', 'ncl', but got 'mse'\.",
    ),
    (
        lambda: ace.diversity_from_gamma(0.9, 5),
        ValueError,
        r"Expected `gamma` in \[0, 0\.8\] for this number of members and loss='ace', but got 0\.9\. "
        r"Larger values would mean diversity above 1\.",
    ),
    (lambda: ace.diversity_from_gamma("0.5", 5), TypeError, r"Expected `gamma` to be a number, but got str\."),
    (lambda: ace.gamma_from_diversity(1.5, 5), ValueError, DIVERSITY_RANGE.format(r"1\.5")),
    (
        lambda: ace.bias_variance_covariance(torch.zeros(2, 3, 4), torch.zeros(3)),
        ValueError,
        r"Expected `target` of shape \(4,\) to match `predictions\[0\]` \(3, 4\), but got \(3,\)\. "
        r"The target has no member axis: all members share it\.",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), OTHERS, ids=range(len(OTHERS)))
def test_predictions_scores_and_scales(bad, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$") as caught:
        bad()
    assert type(caught.value) is error


def test_member_weights_rounded_by_hand_or_by_their_type_pass() -> None:
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1])
    expected = call(logits=logits, target=target)
    for weights in ([0.3333333] * 3, torch.full((3,), 1 / 3), torch.full((3,), 1 / 3, dtype=torch.float16)):
        ours = call(logits=logits, target=target, member_weights=weights)
        # weights off by a relative 2^-11 (float16) change a term of at most λ·|log q| < 4 by that
        torch.testing.assert_close(ours, expected, rtol=0, atol=3 * 4 * 2.0**-11)


def test_shapes_and_numbers_are_checked_under_transforms_too() -> None:
    for transformed, logits in (
        (torch.func.grad(lambda z: ace.amended_cross_entropy(z, TARGET, 1.4)), LOGITS),
        (torch.func.vmap(lambda z: ace.amended_cross_entropy(z, TARGET, 1.4)), LOGITS[None]),
    ):
        with pytest.raises(ValueError, match=r"^Expected `diversity` in \[0, 1\], but got 1\.4\."):
            transformed(logits)
    with pytest.raises(ValueError, match="with the member axis first"):
        torch.func.vmap(lambda z: ace.amended_cross_entropy(z, TARGET, 0.5))(LOGITS)
