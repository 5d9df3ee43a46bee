"""Scores for every link: equal to EnsembleMetrics and plain arithmetic, for any batches."""

from __future__ import annotations

import pytest
import torch

from torchace.metrics import EnsembleMetrics
from torchace.metrics.ensemble import RegressionMetrics, TaskMetrics

ROUNDED = {"rtol": 1e-6, "atol": 1e-6}  # results are float32
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def add_batches(metrics, outputs, target, **kwargs):
    """All samples, in batches of 7."""
    for start in range(0, outputs.shape[1], 7):
        metrics.update(outputs[:, start : start + 7], target[start : start + 7], **kwargs)
    return metrics.compute()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_softmax(weights):
    torch.manual_seed(0)
    logits, target = torch.randn(3, 40, 5).double(), torch.randint(5, (40,))
    target[3] = -100
    found = add_batches(TaskMetrics(3), logits, target, member_weights=weights)
    metrics = EnsembleMetrics(3, 5)
    metrics.update(logits, target, member_weights=weights)
    expected = metrics.compute()
    members = expected.pop("members")
    assert found.keys() == {*expected, *(f"member_accuracy_{k}" for k in range(3))}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **ROUNDED)
    torch.testing.assert_close(torch.stack([found[f"member_accuracy_{k}"] for k in range(3)]), members)


def test_soft_targets_are_scored_by_their_most_likely_class():
    logits, soft = torch.randn(3, 40, 5), torch.rand(40, 5).softmax(1)
    assert add_batches(TaskMetrics(3), logits, soft) == add_batches(TaskMetrics(3), logits, soft.argmax(1))


@pytest.mark.parametrize("shape", [(40,), (40, 4), (40, 4, 2)])
def test_sigmoid(shape):
    torch.manual_seed(0)
    logits, target = torch.randn(3, *shape).double(), torch.randint(2, shape).double()
    found = add_batches(TaskMetrics(3, "sigmoid"), logits, target, member_weights=WEIGHTS)
    q = torch.sigmoid(logits)
    mixture = sum(w * member for w, member in zip(WEIGHTS, q, strict=True))
    right = torch.where(target == 1, mixture, 1 - mixture)
    torch.testing.assert_close(found["cross_entropy"].double(), -right.log().mean(), **ROUNDED)
    torch.testing.assert_close(found["accuracy"].double(), (right > 0.5).double().mean(), **ROUNDED)
    # both classes' squares
    torch.testing.assert_close(found["brier"].double(), 2 * (mixture - target).square().mean(), **ROUNDED)
    differ = [((q[j] > 0.5) != (q[k] > 0.5)).double().mean() for j, k in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(found["disagreement"].double(), sum(differ) / 3, **ROUNDED)
    one = torch.where(target == 1, q[2], 1 - q[2])
    torch.testing.assert_close(found["member_accuracy_2"].double(), (one > 0.5).double().mean(), **ROUNDED)


@pytest.mark.parametrize("shape", [(40,), (40, 2)])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_identity(shape, weights):
    torch.manual_seed(0)
    predictions, target = 100 + torch.randn(3, *shape), torch.randn(shape)
    found = add_batches(TaskMetrics(3, "identity"), predictions, target, member_weights=weights)
    f, y = predictions.double(), target.double()
    alpha = torch.full((3,), 1 / 3, dtype=torch.float64) if weights is None else weights
    mean = sum(a * member for a, member in zip(alpha, f, strict=True))
    torch.testing.assert_close(found["mean_squared_error"].double(), (mean - y).square().mean(), **ROUNDED)
    spread = sum(a * (member - mean).square().mean() for a, member in zip(alpha, f, strict=True))
    torch.testing.assert_close(found["ambiguity"].double(), spread, **ROUNDED)
    members = [(member - y).square().mean() for member in f]
    torch.testing.assert_close(found["member_mean_squared_error"].double(), sum(members) / 3, **ROUNDED)
    torch.testing.assert_close(found["member_mean_squared_error_1"].double(), members[1], **ROUNDED)


def test_samples_that_are_all_ignored_have_no_scores():
    assert add_batches(TaskMetrics(2), torch.randn(2, 9, 3), torch.full((9,), -100)) == {}


def test_a_reset_forgets():
    metrics = TaskMetrics(2)
    assert metrics.compute() == {}
    first = add_batches(metrics, torch.randn(2, 9, 3), torch.randint(3, (9,)))
    metrics.reset()
    assert metrics.compute() == {}
    logits, target = torch.randn(2, 9, 3), torch.randint(3, (9,))
    again = add_batches(metrics, logits, target)
    assert again == add_batches(TaskMetrics(2), logits, target)
    assert again != first


def test_errors():
    with pytest.raises(ValueError, match="`link` to be one of"):
        TaskMetrics(2, "logit")
    metrics = RegressionMetrics(2)
    with pytest.raises(ValueError, match=r"`target` of shape \(4,\) to match `predictions`"):
        metrics.update(torch.zeros(2, 4), torch.zeros(4, 1))
    with pytest.raises(ValueError, match="finite `predictions`, but those of member 1"):
        metrics.update(torch.tensor([[0.0], [torch.nan]]), torch.zeros(1))
    with pytest.raises(ValueError, match="at least one sample"):
        metrics.compute()
