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
    return ace.amended_cross_entropy(**{"logits": LOGITS, "target": TARGET, "diversity": 0.5, **changes})


def binary(**changes: Any) -> Tensor:
    given = {"logits": LOGITS, "target": torch.zeros(3, 4), "diversity": 0.5, **changes}
    return ace.binary_amended_cross_entropy(**given)


def ncl(**changes: Any) -> Tensor:
    return ace.negative_correlation(**{"predictions": LOGITS, "target": torch.zeros(3, 4), "diversity": 0.5, **changes})


AS_TENSOR = "Use torch.as_tensor(...)."
BY_SUM = "Divide them by their sum: member_weights / member_weights.sum()."
FOR_GAMMA = "For the paper's gamma, use diversity_from_gamma(gamma, num_members)."
NO_AXIS = "The target has no member axis: all members share it."
ONE_MODEL = "For one model, add the axis: logits[None]."
NOT_PROBABILITIES = (
    "Expected probabilities that are non-negative and sum to 1 over axis 1. "
    "For logits, use ensemble_probs(logits) first."
)


def refusals(values: list[Any], types: list[Any]) -> list[Any]:
    """Parameters of a test: arguments, the whole message, and the error: of values, and of types."""
    rows = [(*row, ValueError) for row in values] + [(*row, TypeError) for row in types]
    return [pytest.param(*row, id=str(i)) for i, row in enumerate(rows)]


def assert_refused(error: type[Exception], message: str, function: Any, **arguments: Any) -> None:
    with pytest.raises(error) as caught:
        function(**arguments)
    assert type(caught.value) is error
    assert caught.value.args == (message,)


ANY_VALUES: list[tuple[Any, ...]] = [
    ({"diversity": 1.4}, f"Expected `diversity` in [0, 1], but got 1.4. {FOR_GAMMA}"),
    ({"diversity": -0.1}, f"Expected `diversity` in [0, 1], but got -0.1. {FOR_GAMMA}"),
    ({"diversity": NAN}, f"Expected `diversity` in [0, 1], but got nan. {FOR_GAMMA}"),
    ({"diversity": torch.tensor(1.5)}, f"Expected `diversity` in [0, 1], but got 1.5. {FOR_GAMMA}"),
    (
        {"diversity": torch.tensor([0.5, 0.5])},
        "Expected `diversity` to be a number or a 0-dimensional tensor, but got shape (2,). "
        "For several values at once, use torch.func.vmap over them.",
    ),
    ({"reduction": "average"}, "Expected `reduction` to be one of 'mean', 'sum', 'none', but got 'average'."),
    (
        {"member_weights": [0.5, 0.3, 0.2]},
        "Expected `member_weights` of shape (2,), one for each member, but got (3,).",
    ),
    ({"member_weights": [1.5, -0.5]}, "Expected non-negative `member_weights`, but got [1.5, -0.5]."),
    ({"member_weights": [NAN, 1.0]}, "Expected non-negative `member_weights`, but got [nan, 1.0]."),
    ({"member_weights": [0.5, 0.6]}, f"Expected `member_weights` that sum to 1, but they sum to 1.1. {BY_SUM}"),
    (
        {"member_weights": torch.tensor([0.5, 0.4])},
        f"Expected `member_weights` that sum to 1, but they sum to 0.9. {BY_SUM}",
    ),
    (
        {"member_weights": [0.5, 0.6], "mixture": torch.zeros(3, 4)},
        f"Expected `member_weights` that sum to at most 1, but they sum to 1.1. {BY_SUM}",
    ),
    (
        {"mixture": torch.zeros(2, 3, 4)},
        "Expected `mixture` of shape (3, 4), the members' shape without the member axis, but got (2, 3, 4).",
    ),
    (
        {"sample_weight": torch.tensor([1.0, -1.0, 1.0])},
        "Expected non-negative `sample_weight`, but some weights are negative or NaN.",
    ),
    (
        {"sample_weight": torch.tensor([1.0, float("inf"), 1.0])},
        "Expected finite `sample_weight`, but some weights are NaN or Inf.",
    ),
]
ANY_TYPES: list[tuple[Any, ...]] = [
    ({"diversity": "0.5"}, "Expected `diversity` to be a number or a 0-dimensional tensor, but got str."),
    ({"diversity": True}, "Expected `diversity` to be a number or a 0-dimensional tensor, but got bool."),
    ({"mixture": 0.5}, f"Expected `mixture` to be a tensor, but got float. {AS_TENSOR}"),
    (
        {"sample_weight": torch.ones(3, dtype=torch.complex64)},
        "Expected a real `sample_weight`, but got torch.complex64.",
    ),
    (
        {"member_weights": torch.tensor([0.5, 0.5], dtype=torch.complex64)},
        "Expected a real `member_weights`, but got torch.complex64.",
    ),
    ({"sample_weight": [1.0, 1.0, 1.0]}, f"Expected `sample_weight` to be a tensor, but got list. {AS_TENSOR}"),
    ({"target": [0, 1, 2]}, f"Expected `target` to be a tensor, but got list. {AS_TENSOR}"),
]


@pytest.mark.parametrize(("changes", "message", "error"), refusals(ANY_VALUES, ANY_TYPES))
@pytest.mark.parametrize("loss", [call, binary, ncl])
def test_arguments_of_every_loss(loss: Any, changes: dict[str, Any], message: str, error: type[Exception]) -> None:
    assert_refused(error, message, loss, **changes)


SOFTMAX_VALUES: list[tuple[Any, ...]] = [
    (
        {"logits": torch.zeros(128, 10)},
        f"Expected `logits` of shape (K, N, C, ...) with the member axis first, but got (128, 10). {ONE_MODEL}",
    ),
    (
        {"logits": torch.zeros(10)},
        "Expected `logits` of shape (K, N, C, ...) with the member axis first, but got (10,).",
    ),
    ({"logits": torch.zeros(0, 3, 4)}, "Expected `logits` with at least one member, but got (0, 3, 4)."),
    ({"logits": torch.zeros(2, 3, 0)}, "Expected `logits` with at least one class, but got (2, 3, 0)."),
    (
        {"target": torch.zeros(2, 3, dtype=torch.long)},
        "Expected `target` of shape (3,) (class indices) or (3, 4) (class probabilities) for `logits` "
        f"(2, 3, 4), but got (2, 3). {NO_AXIS}",
    ),
    (
        {"logits": torch.zeros(2, 3, 4, 5, 6)},
        "Expected `target` of shape (3, 5, 6) (class indices) or (3, 4, 5, 6) (class probabilities) for `logits` "
        f"(2, 3, 4, 5, 6), but got (3,). {NO_AXIS}",
    ),
    ({"weight": torch.tensor([1.0, NAN, 1.0, 1.0])}, "Expected finite `weight`, but some weights are NaN or Inf."),
    ({"target": torch.tensor([0, 4, 1])}, "Expected class indices in [0, 3] or ignore_index=-100, but got 4."),
    (
        {"target": torch.tensor([0, -100, 1]), "ignore_index": 0},
        "Expected class indices in [0, 3] or ignore_index=0, but got -100.",
    ),
    (
        {"target": torch.full((3, 4), NAN)},
        "Expected class probabilities in `target`, but some are negative or NaN. "
        "If they are logits, use target.softmax(1).",
    ),
    (
        {"target": torch.full((3, 4), 0.25), "ignore_index": 1},
        "Expected class indices with ignore_index=1, but got class probabilities. "
        "Mask samples with `sample_weight` instead.",
    ),
    ({"weight": torch.ones(3)}, "Expected `weight` of shape (4,), one for each class, but got (3,)."),
    ({"label_smoothing": 1.1}, "Expected `label_smoothing` in [0, 1], but got 1.1."),
    (
        {"sample_weight": torch.ones(4)},
        "Expected `sample_weight` of shape (3,) (shared by all members) or (2, 3) (each member's own), but got (4,).",
    ),
    (
        {"detach_others": False, "mixture": torch.zeros(3, 4)},
        "Expected `detach_others=True` with a `mixture`, but got False. A given mixture is a constant.",
    ),
]
SOFTMAX_TYPES: list[tuple[Any, ...]] = [
    ({"logits": [[0.0]]}, f"Expected `logits` to be a tensor, but got list. {AS_TENSOR}"),
    (
        {"logits": torch.zeros(2, 3, 4, dtype=torch.long)},
        "Expected `logits` of a floating-point type, but got torch.int64. Convert it: logits.float().",
    ),
    (
        {"target": TARGET.float()},
        "Expected class indices of an integer type in `target` of shape (3,), but got torch.float32. "
        "Convert it: target.long().",
    ),
    (
        {"target": TARGET.bool()},
        "Expected `target` of an integer type (class indices) or floating-point type (class probabilities), but got "
        "torch.bool.",
    ),
    (
        {"target": torch.zeros(3, 4, dtype=torch.long)},
        "Expected probabilities of a floating-point type in `target` of shape (3, 4), but got torch.int64. "
        "Convert it: target.float().",
    ),
    ({"label_smoothing": torch.tensor(0.1)}, "Expected `label_smoothing` to be a number in [0, 1], but got Tensor."),
]


@pytest.mark.parametrize(("changes", "message", "error"), refusals(SOFTMAX_VALUES, SOFTMAX_TYPES))
def test_amended_cross_entropy(changes: dict[str, Any], message: str, error: type[Exception]) -> None:
    assert_refused(error, message, call, **changes)


ELEMENT_VALUES: list[tuple[Any, ...]] = [
    (
        binary,
        {"logits": torch.zeros(3)},
        f"Expected `logits` of shape (K, N, ...) with the member axis first, but got (3,). {ONE_MODEL}",
    ),
    (
        binary,
        {"target": torch.zeros(2, 3, 4)},
        f"Expected `target` of shape (3, 4) to match `logits` (2, 3, 4), but got (2, 3, 4). {NO_AXIS}",
    ),
    (
        ncl,
        {"target": torch.zeros(3, 1)},
        f"Expected `target` of shape (3, 4) to match `predictions` (2, 3, 4), but got (3, 1). {NO_AXIS}",
    ),
    (
        binary,
        {"target": torch.full((3, 4), 1.5)},
        "Expected `target` in [0, 1], the probability of each output, but some values are outside.",
    ),
    (
        binary,
        {"target": torch.full((3, 4), NAN)},
        "Expected `target` in [0, 1], the probability of each output, but some values are outside.",
    ),
    (ncl, {"predictions": torch.zeros(0, 3, 4)}, "Expected `predictions` with at least one member, but got (0, 3, 4)."),
    (
        binary,
        {"pos_weight": torch.tensor([1.0, NAN, 1.0, 1.0])},
        "Expected finite `pos_weight`, but some weights are NaN or Inf.",
    ),
    (
        binary,
        {"pos_weight": torch.ones(3)},
        "Expected `pos_weight` that broadcasts to the target's shape (3, 4), but got (3,).",
    ),
    (
        ncl,
        {"sample_weight": torch.ones(4)},
        "Expected `sample_weight` of shape (3, 4) (shared by all members) or (2, 3, 4) (each member's own), but got "
        "(4,).",
    ),
]
ELEMENT_TYPES: list[tuple[Any, ...]] = [
    (
        binary,
        {"logits": torch.zeros(2, 3, 4, dtype=torch.int32)},
        "Expected `logits` of a floating-point type, but got torch.int32. Convert it: logits.float().",
    ),
    (ncl, {"target": torch.zeros(3, 4, dtype=torch.complex64)}, "Expected a real `target`, but got torch.complex64."),
]


@pytest.mark.parametrize(("loss", "changes", "message", "error"), refusals(ELEMENT_VALUES, ELEMENT_TYPES))
def test_binary_and_regression(loss: Any, changes: dict[str, Any], message: str, error: type[Exception]) -> None:
    assert_refused(error, message, loss, **changes)


PROBS = torch.full((3, 4), 0.25)
OTHER_VALUES: list[tuple[Any, ...]] = [
    (
        lambda: ace.ensemble_log_probs(torch.zeros(3, 4)),
        f"Expected `logits` of shape (K, N, C, ...) with the member axis first, but got (3, 4). {ONE_MODEL}",
    ),
    (
        lambda: ace.ensemble_log_probs(LOGITS, link="identity"),
        "Predictions with link='identity' have no log-probabilities. Use ensemble_probs.",
    ),
    (
        lambda: ace.ensemble_probs(LOGITS, member_weights=[0.5, 0.6]),
        f"Expected `member_weights` that sum to 1, but they sum to 1.1. {BY_SUM}",
    ),
    (lambda: ace.ambiguity(LOGITS, torch.tensor([0, -100, 1])), "Expected class indices in [0, 3], but got -100."),
    (
        lambda: ace.disagreement(LOGITS, reduction="max"),
        "Expected `reduction` to be one of 'mean', 'sum', 'none', but got 'max'.",
    ),
    (lambda: ace.brier_score(torch.randn(3, 4), TARGET), NOT_PROBABILITIES),
    (lambda: ace.calibration_error(2 * PROBS, TARGET), NOT_PROBABILITIES),
    (lambda: ace.brier_score(torch.full((3, 4), NAN), TARGET), "Expected finite `probs`, but some are NaN or Inf."),
    (lambda: ace.brier_score(torch.ones(3), TARGET), "Expected `probs` of shape (N, C, ...), but got (3,)."),
    (lambda: ace.calibration_error(PROBS, TARGET, num_bins=0), "Expected `num_bins` to be at least 1, but got 0."),
    (lambda: ace.average_gradients(LOGITS, 0), "Expected `num_members` to be at least 1, but got 0."),
    (lambda: ace.gamma_from_diversity(0.5, 1), "Expected `num_members` to be at least 2, but got 1."),
    (lambda: ace.gamma_from_diversity(0.5, 3, loss="mse"), "Expected `loss` to be one of 'ace', 'ncl', but got 'mse'."),
    (
        lambda: ace.diversity_from_gamma(0.9, 5),
        "Expected `gamma` in [0, 0.8] for this number of members and loss='ace', but got 0.9. "
        "Larger values would mean diversity above 1.",
    ),
    (lambda: ace.gamma_from_diversity(1.5, 5), f"Expected `diversity` in [0, 1], but got 1.5. {FOR_GAMMA}"),
    (
        lambda: ace.bias_variance_covariance(torch.zeros(2, 3, 4), torch.zeros(3)),
        f"Expected `target` of shape (4,) to match `predictions[0]` (3, 4), but got (3,). {NO_AXIS}",
    ),
]
OTHER_TYPES: list[tuple[Any, ...]] = [
    (
        lambda: ace.calibration_error(PROBS, PROBS),
        "Expected class indices in `target`, but got class probabilities. Use target.argmax(1).",
    ),
    (lambda: ace.average_gradients([1.0], 2), f"Expected `x` to be a tensor, but got list. {AS_TENSOR}"),
    (lambda: ace.diversity_from_gamma("0.5", 5), "Expected `gamma` to be a number, but got str."),
]


@pytest.mark.parametrize(("bad", "message", "error"), refusals(OTHER_VALUES, OTHER_TYPES))
def test_predictions_scores_and_scales(bad: Any, message: str, error: type[Exception]) -> None:
    assert_refused(error, message, bad)


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
