"""Sample weights, regression, and scores of runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lab.training.small_trainings import (
    BATCH,
    CLASSES,
    FEATURES,
    MEMBERS,
    make_group,
    members,
    train_config,
    weights,
)
from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy, negative_correlation
from torchace.lab.data import Batches, Split
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.loop import fit
from torchace.lab.training.tasks import TASKS, compute_objective, ensemble_predictions, mean_over_samples

KINDS = ["shared", "exchanged", "separate"]
# float64 sums in another order, through 20 steps of Adam
WITHIN = 1e-9


def targets(task: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if task == "classification":
        return torch.randint(CLASSES, shape, generator=generator)
    y = torch.randn(*shape, CLASSES, generator=generator, dtype=torch.float64)
    return y if task == "regression" else y.sigmoid().round()


def samples(count: int = BATCH, task: str = "classification") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, targets(task, (count,), generator)


def loss_of_each_sample(z: Tensor, y: Tensor, lam: Tensor, mixture: Tensor | None, how: TrainConfig) -> Tensor:
    """The loss function of the task, run by run, and member by member with own batches: `(R, K, B)`."""

    def loss(z: Tensor, y: Tensor, diversity: Tensor, **given: object) -> Tensor:
        options: dict[str, Any] = {**given, "reduction": "none"}
        if how.task == "classification":
            return amended_cross_entropy(z, y, diversity, label_smoothing=how.label_smoothing, **options)
        y = y * (1 - how.label_smoothing) + how.label_smoothing / 2 if how.task == "multilabel" else y
        function = binary_amended_cross_entropy if how.task == "multilabel" else negative_correlation
        return function(z, y, diversity, **options).mean(-1)

    if how.batches == "shared":
        return torch.stack([loss(z[r], y[r], lam[r]) for r in range(len(z))])
    runs = []
    for r in range(len(z)):
        given: list[dict[str, Any]] = [{}] * MEMBERS
        if mixture is not None:
            alpha = torch.tensor([1 / MEMBERS], dtype=torch.float64)
            given = [{"mixture": part, "member_weights": alpha} for part in mixture[r].unflatten(0, z.shape[1:3])]
        diversity = lam[r] if mixture is not None else 0 * lam[r]
        members = [loss(z[r, k : k + 1], y[r, k], diversity, **given[k]) for k in range(MEMBERS)]
        runs.append(torch.cat(members))
    return torch.stack(runs)


def _add(total: Tensor, gradient: Tensor) -> None:
    total += gradient


def train(split: Split, kind: str, task: str, diversity: float = 0.4) -> dict[str, Tensor]:
    """The weights after 20 steps on the whole split."""
    network = make_group([3])
    settings = train_config(kind, 20, task=task)
    fit(network, Batches(split, len(split), dtype=torch.float64), settings, diversities=[diversity], seeds=[3])
    return weights(network, 0)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_n_is_a_sample_n_times_and_a_weight_of_0_is_none(kind: str, task: str) -> None:
    x, y = samples(task=task)
    times = torch.tensor([1, 0, 3, 2, 0, 1, 1, 2])
    diversity = 0.0 if kind == "separate" else 0.4
    weighted = train(Split(x, y, times.double()), kind, task, diversity)
    repeated = train(Split(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)), kind, task, diversity)
    other = train(Split(x, y), kind, task, diversity)
    for name, value in weighted.items():
        torch.testing.assert_close(value, repeated[name], rtol=0, atol=WITHIN)
    assert any((value - other[name]).abs().max() > 1e-3 for name, value in weighted.items())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_gradients_of_an_epochs_batches_average_to_that_of_the_whole_set(kind: str, task: str) -> None:
    """A weight of k is k repeats in expectation: batches that happen to hold large weights count for more."""
    x, y = samples(5 * BATCH, task)
    times = torch.ones(5 * BATCH, dtype=torch.long)
    times[3], times[4] = 200, 0  # in one batch of five
    repeated = Split(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
    found = {}
    for size, split in ((BATCH, Split(x, y, times.double())), (len(repeated), repeated)):
        network = make_group([3])
        sums = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
        for name, p in network.named_parameters():
            p.register_hook(partial(_add, sums[name]))
        data = Batches(split, size, dtype=torch.float64)
        how = train_config(kind, data.steps_per_epoch, task=task, optimizer="sgd", learning_rate=0.0)
        fitted = fit(network, data, how, diversities=[0.0 if kind == "separate" else 0.4], seeds=[3])
        found[size] = {name: total / how.steps for name, total in sums.items()}, fitted.history[0]["score"]
    (ours, score), (whole, expected) = found.values()
    for name, value in ours.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)  # float64, sums of numbers of about 1
    assert score == pytest.approx(expected, abs=1e-12)  # of the epoch: the weighted mean


@pytest.mark.parametrize("task", ["multilabel", "regression"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_member_moves_by_its_own_gradient(kind: str, task: str) -> None:
    """∂e^k/∂z^k = (q^k - p) - λ(q^k - q̄), through each member alone; q is the link of z."""
    link = torch.sigmoid if task == "multilabel" else torch.nn.Identity()
    diversity = 0.0 if kind == "separate" else 0.7
    network, plain = make_group([3]), members(3)
    x, y = samples(task=task)
    data = Batches(Split(x, y), BATCH, dtype=torch.float64)
    settings = train_config(kind, 1, task=task, optimizer="sgd", momentum=0.0, learning_rate=1.0)
    fit(network, data, settings, diversities=[diversity], seeds=[3])
    ensemble = network.ensemble(0)
    for k, member in enumerate(plain):
        xk, yk = (part[0] for part in data.batch_many([3], 0, 0, streams=0 if kind == "shared" else k))
        prediction = member(xk)
        q, mean = link(prediction), sum(link(other(xk)) for other in plain).detach() / MEMBERS  # type: ignore[union-attr]
        gradient = (q - yk) - diversity * (q - mean)
        # the mean over samples and outputs
        (prediction * gradient.detach()).sum().div(BATCH * CLASSES).backward()
        for name, parameter in member.named_parameters():
            expected = parameter.detach() - parameter.grad
            torch.testing.assert_close(ensemble[k].get_parameter(name).detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_equals_autograd(kind: str, task: str, weighted: bool) -> None:
    """The closed form of a step against the loss functions, run by run; a run that was stopped gets nothing."""
    generator = torch.Generator().manual_seed(6)
    how = train_config(kind, task=task, **({} if task == "regression" else {"label_smoothing": 0.1}))
    logits = torch.randn(3, MEMBERS, BATCH, CLASSES, generator=generator, dtype=torch.float64)
    lead = (3, BATCH) if kind == "shared" else (3, MEMBERS, BATCH)
    y = targets(task, lead, generator)
    weight = torch.rand(lead, generator=generator, dtype=torch.float64) if weighted else None
    lam = torch.tensor([0.0, 0.4, 0.9], dtype=torch.float64)
    mixture = None
    if kind == "exchanged":
        others = torch.randn(3, MEMBERS, MEMBERS * BATCH, CLASSES, generator=generator, dtype=torch.float64)
        mixture = ensemble_predictions(others, how)
    found_losses, found_score, found_gradient = compute_objective(
        logits, y, weight, lam, torch.tensor([True, False, True]), mixture, how
    )

    z = logits.clone().requires_grad_()
    per_sample = loss_of_each_sample(z, y, lam, mixture, how)
    # the batch size divides, not the weights' sum
    losses = (per_sample if weight is None else per_sample * (weight[:, None] if kind == "shared" else weight)).mean(-1)
    (gradient,) = torch.autograd.grad(losses[::2].sum(), z)
    assert not found_gradient[1].any()
    # float64, a few roundings of numbers of about 1
    torch.testing.assert_close(found_losses[::2], losses[::2].detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-13)
    if kind == "shared":
        scores = TASKS[task].scores(logits, y)
    else:
        scores = TASKS[task].scores(logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2))
    score = (scores if weight is None else scores * weight.flatten(1)).mean(1)
    torch.testing.assert_close(found_score, score, rtol=0, atol=1e-13)


def test_scores_are_those_of_the_ensemble_not_of_its_members() -> None:
    logits = torch.randn(2, MEMBERS, BATCH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, y = samples()
    q = logits.softmax(3).mean(1)
    expected = torch.stack([-q[r, torch.arange(BATCH), y].log() for r in range(2)])
    scores = TASKS["classification"].scores
    torch.testing.assert_close(scores(logits, y), expected)
    torch.testing.assert_close(scores(logits, y.expand(2, -1)), expected)
    torch.testing.assert_close(TASKS["classification"].mixture_scores(q, y.expand(2, -1)), expected)
    _, target = samples(task="multilabel")
    q = logits.sigmoid().mean(1)
    expected = torch.stack([F.binary_cross_entropy(q[r], target, reduction="none").mean(1) for r in range(2)])
    torch.testing.assert_close(TASKS["multilabel"].scores(logits, target), expected)
    torch.testing.assert_close(TASKS["multilabel"].mixture_scores(q, target), expected)
    _, target = samples(task="regression")
    expected = ((logits.mean(1) - target) ** 2).mean(2)
    torch.testing.assert_close(TASKS["regression"].scores(logits, target), expected)


def test_a_confident_correct_label_keeps_its_small_gradient() -> None:
    """σ(-30) is 9.4e-14, far below the spacing of float32 at 1."""
    logits, y = torch.full((1, 1, 1, 2), 30.0), torch.tensor([[[1.0, 1.0]]])
    result = TASKS["multilabel"].closed_form(logits, y, torch.zeros(1), torch.ones(1, 1), None, None, 0.0)
    assert result.gradient is not None
    torch.testing.assert_close(result.gradient, torch.full_like(logits, -9.357623e-14 / 2), rtol=1e-5, atol=0)


def test_a_batch_of_zero_weight_changes_no_parameter() -> None:
    assert mean_over_samples(torch.ones(2, 3), torch.zeros(3)).tolist() == [0.0, 0.0]
    x, y = samples()
    before = weights(make_group([3]), 0)
    after = train(Split(x, y, torch.zeros(BATCH, dtype=torch.float64)), "shared", "classification")
    assert all(value.equal(before[name]) for name, value in after.items())


def test_weights_follow_their_samples_through_the_shuffle() -> None:
    x = torch.arange(20.0).view(20, 1)
    data = Batches(Split(x, torch.arange(20), 2 * torch.arange(20.0)), 6)
    for epoch in range(2):
        for step in range(3):
            drawn, _ = data.batch_many([4, 9], epoch, step, streams=[0, 1])
            given = data.weights_many([4, 9], epoch, step, streams=[0, 1])
            assert given is not None
            assert torch.equal(given, 2 * drawn[..., 0])
    assert Batches(Split(x, torch.arange(20)), 6).weights_many([0], 0, 0) is None


def test_weights_must_fit_the_samples() -> None:
    x, y = samples()
    with pytest.raises(ValueError, match=r"Expected `weight` of shape \(8,\)"):
        Split(x, y, torch.ones(3))
    kept = Split(x, y, torch.arange(8.0)).take(torch.tensor([5, 1]))
    assert kept.weight is not None
    assert kept.weight.tolist() == [5.0, 1.0]
