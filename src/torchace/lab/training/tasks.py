"""Losses and scores of the tasks: ACE and cross entropy, its binary form, or NCL and squared error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchace.functional import binary, ncl
from torchace.kernels import LossOptions, LossResult, composite, member_terms
from torchace.lab.training.config import TrainConfig


@dataclass(frozen=True)
class TaskLoss:
    """Link, losses, scores and predictions of a task; a sample's loss is the mean over its outputs."""

    link: str
    score_name: str  # of `scores` in result files
    # of logits (R, K, B, C), y (R, B) or (R, B, M), λ (R,), scale (R, B) or (R, K, B), member weight (None: 1/K),
    # mixture (R, B, C) or None, label smoothing (a number or (R,))
    closed_form: Callable[..., LossResult]
    scores: Callable[[Tensor, Tensor], Tensor]  # of logits (R, K, N, C) and y, (N, ...) or (R, N, ...): (R, N)
    mixture_scores: Callable[[Tensor, Tensor], Tensor]  # the same of the ensemble's predictions (R, N, C)
    predictions: Callable[[Tensor], Tensor]  # of logits: probabilities or numbers, in their shape


def _ace(
    logits: Tensor,
    y: Tensor,
    diversity: Tensor,
    scale: Tensor,
    alpha: float | None = None,
    mixture: Tensor | None = None,
    smoothing: float | Tensor = 0.0,
    *,
    detach_others: bool = True,
) -> LossResult:
    alphas = None if alpha is None else diversity.new_full((logits.shape[1],), alpha)
    options = LossOptions(y, diversity, alphas, mixture=mixture, scale=scale, label_smoothing=smoothing)
    if detach_others:
        return member_terms(logits, options)
    z = logits.detach().requires_grad_()  # gradients into the other members have no closed form
    with torch.enable_grad():
        losses = composite.member_losses(z, replace(options, scale=1.0, detach_others=False))
        losses = (losses * (scale if scale.ndim == 3 else scale.unsqueeze(1))).sum(2)
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    return LossResult(losses.detach(), _cross_entropy(logits.to(scale.dtype), y), gradient)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    index = y.expand(len(logits), -1)[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    hits = logits.log_softmax(3).gather(3, index).squeeze(3)  # (R, K, N)
    return math.log(logits.shape[1]) - hits.logsumexp(1)


def _log(mixture: Tensor) -> Tensor:
    """Logarithm; an underflowed probability counts as the smallest number."""
    return mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()


def _binary(*arguments: Any) -> LossResult:
    *others, smoothing = arguments
    shaped = smoothing.view(-1, 1, 1) if isinstance(smoothing, Tensor) else smoothing
    return binary.closed_form(*(*others, shaped))


def _squared_error(mean: Tensor, y: Tensor) -> Tensor:
    return (mean - y).square().mean(-1)


TASKS = {
    "classification": TaskLoss(
        link="softmax",
        score_name="cross_entropy",
        closed_form=_ace,
        scores=_cross_entropy,
        mixture_scores=lambda mixture, y: -_log(mixture).gather(2, y.unsqueeze(2)).squeeze(2),
        predictions=lambda logits: logits.softmax(-1),
    ),
    "multilabel": TaskLoss(
        link="sigmoid",
        score_name="cross_entropy",
        closed_form=_binary,
        scores=binary.ensemble_cross_entropy,
        mixture_scores=lambda mixture, y: -(y * _log(mixture) + (1 - y) * _log(1 - mixture)).mean(-1),
        predictions=torch.sigmoid,
    ),
    "regression": TaskLoss(
        link="identity",
        score_name="mse",
        closed_form=lambda *arguments: ncl.closed_form(*arguments[:6]),
        scores=lambda logits, y: _squared_error(logits.mean(1), y),
        mixture_scores=_squared_error,
        predictions=lambda logits: logits,
    ),
}


def compute_objective(
    logits: Tensor,  # (R, K, B, C), detached
    y: Tensor,  # (R, B), or (R, K, B) with own batches; (..., M) for numbers and labels
    weight: Tensor | None,  # first axes of y, or (R, K, B); relative to the training set's mean
    diversity: Tensor,  # (R,)
    active: Tensor,  # (R,): False for stopped runs
    mixture: Tensor | None,  # (R, K·B, C) for exchanged batches, (R, B, C) for members on other ranks or own weights
    config: TrainConfig,
    *,
    num_members: int | None = None,
    batch_size: int | None = None,
    label_smoothing: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each member's loss `(R, K)`, each run's score `(R,)`, and the gradient in the logits, 0 for stopped runs.

    The score is the ensemble's if members share a batch, else the members' mean. Losses and score are divided by the
    batch size, not by the sum of weights: a weight of k counts as k repeats in expectation. `num_members` and
    `batch_size` are those of all ranks; results are then shares of the whole. `label_smoothing` `(R,)` replaces that
    of the configuration.
    """
    num_runs, local_members, size = logits.shape[:3]
    num_members, batch_size = num_members or local_members, batch_size or size
    own, task = config.batches != "shared", TASKS[config.task]
    by_member = weight is not None and weight.ndim == 3  # (R, K, B)
    scale = active.to(config.dtype).view(-1, *[1] * (1 + (own or by_member))) / batch_size
    if weight is not None:
        scale = scale * weight
    smoothing = config.label_smoothing if label_smoothing is None else label_smoothing
    z, target, shared = logits, y, mixture
    if own:  # R·K runs of one member: its loss needs only the others' predictions on its batch
        z, target = logits.flatten(0, 1).unsqueeze(1), y.flatten(0, 1)
        scale = scale.expand(num_runs, local_members, -1).flatten(0, 1)
        if mixture is None:  # separate batches, no coupling
            diversity = torch.zeros_like(diversity)
        else:
            shared = mixture.unflatten(1, logits.shape[1:3]).flatten(0, 1)
        diversity = diversity.repeat_interleave(local_members)
        smoothing = smoothing.repeat_interleave(local_members) if isinstance(smoothing, Tensor) else smoothing
    # members with own batches are not coupled by gradients
    options = {} if config.detach_others or own else {"detach_others": False}
    alpha = None if mixture is None else 1 / num_members
    losses, scores, gradient = task.closed_form(z, target, diversity, scale, alpha, shared, smoothing, **options)
    assert scores is not None
    assert gradient is not None
    if own:
        losses, scores = losses.view(num_runs, local_members), scores.view(num_runs, -1)
        gradient = gradient.squeeze(1).unflatten(0, (num_runs, local_members))
    elif mixture is not None:  # some members are on other ranks, or do not train on a sample
        scores = task.mixture_scores(mixture, y)
    if weight is not None:
        scores = scores * (weight.mean(1) if by_member and not own else weight.flatten(1))
    count = batch_size * num_members if own else batch_size
    return losses, scores.mean(-1) if count == scores.shape[-1] else scores.sum(-1) / count, gradient


def ensemble_predictions(logits: Tensor, config: TrainConfig) -> Tensor:
    """Each run's ensemble prediction, `(R, N, C)`, from its members' logits `(R, K, N, C)`."""
    return member_predictions(logits, config).mean(1)


def partial_mixture(logits: Tensor, members: Tensor, config: TrainConfig) -> Tensor:
    """Mean prediction of some members of each run, `(R, N, C)`: `members` is `(K, N)` or `(R, K, N)`; 0 for none."""
    share = members.to(config.dtype)
    share = share / share.sum(-2, keepdim=True).clamp_min(1)
    return (member_predictions(logits, config) * share.unsqueeze(-1)).sum(1)


def member_predictions(logits: Tensor, config: TrainConfig) -> Tensor:
    """Each member's prediction in the shape of its logits: probabilities, or numbers."""
    return TASKS[config.task].predictions(logits.to(config.dtype))


def mean_over_samples(values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over the last axis, weighted if `weight` is given; 0 if the weights sum to 0."""
    if weight is None:
        return values.mean(-1)
    total = weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return (values * (weight / total)).sum(-1)
