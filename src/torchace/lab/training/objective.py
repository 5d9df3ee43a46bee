"""The losses and scores of runs: ACE and cross entropy, or NCL and squared error."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.functional import ncl
from torchace.kernels import LossOptions, LossResult, composite, member_terms
from torchace.lab.training.config import TrainConfig

LINKS = {"ace": "softmax", "ncl": "identity"}


class Objective(NamedTuple):
    losses: Tensor  # (R, K): each member's training loss; not a score
    score: Tensor  # (R,): cross entropy or squared error, of the ensemble if its members share a batch, else of them
    gradient: Tensor  # (R, K, B, C): of the active runs' losses in the logits, every member's own


def compute_objective(
    logits: Tensor,
    y: Tensor,
    weight: Tensor | None,
    diversity: Tensor,
    active: Tensor,
    mixture: Tensor | None,
    config: TrainConfig,
    *,
    num_members: int | None = None,
    batch_size: int | None = None,
) -> Objective:
    """Losses, scores and the gradient of one training step.

    Args:
        logits: `(R, K, B, C)`, detached.
        y: `(R, B)`, or `(R, K, B)` with batches of the members' own; for regression with an axis of outputs at the end.
        weight: Sample weights, as the first axes of `y`, relative to the mean weight of the training set; None where
            all count alike. Losses and score are divided by the batch size, not by the sum of the batch's weights: a
            weight of k is then k repeats, in expectation.
        diversity: λ of each run, `(R,)`.
        active: False for a run that was stopped: its gradient is 0, `(R,)`.
        mixture: The ensemble's predictions on all its members' batches, `(R, K·B, C)`, for exchanged batches; on the
            one batch, `(R, B, C)`, where some of its members are on other ranks.
        config: Which loss.
        num_members: K of the whole ensemble, where some members are on other ranks.
        batch_size: Samples of the whole batch, where some are on other ranks: results are shares of its mean.
    """
    num_runs, local_members, size = logits.shape[:3]
    num_members, batch_size = num_members or local_members, batch_size or size
    own = config.batches != "shared"
    scale = active.to(config.dtype).view(-1, *[1] * (1 + own)) / batch_size
    if weight is not None:
        scale = scale * weight
    if not config.detach_others:  # gradients in the other members have no closed form of their own
        z = logits.detach().requires_grad_()
        with torch.enable_grad():
            losses = member_losses(z, y, diversity, mixture, config, num_members=num_members)
            losses = (losses * (scale if own else scale.unsqueeze(1))).sum(2)
        (gradient,) = torch.autograd.grad(losses.sum(), z)
        if own:
            logits, y = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2)
        found = LossResult(losses.detach(), ensemble_scores(logits.to(config.dtype), y, config), gradient)
    elif config.loss == "ace" and mixture is None and not own:  # most steps: as few layers as possible
        found = member_terms(logits, LossOptions(y, diversity, scale=scale, label_smoothing=config.label_smoothing))
    else:
        rows = _rows(logits, y, diversity, mixture, num_members, config)
        if own:
            scale = scale.expand(num_runs, local_members, -1).flatten(0, 1)
        if config.loss == "ace":
            found = member_terms(rows.logits, rows.options(scale, config.label_smoothing))
        else:
            found = ncl.closed_form(rows.logits, rows.y, rows.diversity, scale, alpha=rows.alpha, mixture=rows.mixture)
    losses, scores = found.losses, found.scores
    assert scores is not None
    assert found.gradient is not None
    gradient = found.gradient
    if own and config.detach_others:
        losses, scores = losses.view(num_runs, local_members), scores.view(num_runs, -1)
        gradient = gradient.squeeze(1).unflatten(0, (num_runs, local_members))
    elif not own and mixture is not None:  # the members at hand are not the whole ensemble
        scores = mixture_scores(mixture, y, config)
    if weight is not None:
        scores = scores * weight.flatten(1)
    count = batch_size * num_members if own else batch_size
    return Objective(losses, scores.mean(-1) if count == scores.shape[-1] else scores.sum(-1) / count, gradient)


def member_losses(
    logits: Tensor,
    y: Tensor,
    diversity: Tensor,
    mixture: Tensor | None,
    config: TrainConfig,
    *,
    num_members: int | None = None,
) -> Tensor:
    """Every member's loss on every sample of its batch, `(R, K, B)`, differentiable.

    Args:
        logits: `(R, K, B, C)`.
        y: `(R, B)`, or `(R, K, B)` with batches of the members' own; for regression with an axis of outputs at the end.
        diversity: λ of each run, `(R,)`.
        mixture: The ensemble's predictions on all its members' batches, `(R, K·B, C)`, for exchanged batches; on the
            one batch, `(R, B, C)`, where some of its members are on other ranks.
        config: Which loss.
        num_members: K of the whole ensemble, where some are on other ranks.
    """
    rows = _rows(logits, y, diversity, mixture, num_members or logits.shape[1], config)
    if config.loss == "ace":
        options = rows.options(1.0, config.label_smoothing, config.detach_others)
        losses = composite.member_losses(rows.logits, options)
    else:
        f = rows.logits.to(config.dtype).transpose(0, 1)  # members first
        alpha = torch.full_like(f[:, :1, :1, :1], 1 / f.shape[0] if rows.alpha is None else rows.alpha)
        lam = rows.diversity.view(-1, 1, 1)
        losses = ncl.element_losses(f, rows.y, lam, alpha, rows.mixture).mean(-1).transpose(0, 1)
    return losses.view(logits.shape[:3])


def ensemble_scores(logits: Tensor, y: Tensor, config: TrainConfig) -> Tensor:
    """The ensemble's cross entropy or squared error on every sample, `(R, N)`.

    Args:
        logits: `(R, K, N, C)`.
        y: `(N,)` for all runs, or `(R, N)`; for regression with an axis of outputs at the end.
        config: Which score.
    """
    if config.loss == "ncl":
        return (logits.mean(1) - y).square().mean(-1)
    index = y.expand(len(logits), -1)[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    hits = logits.log_softmax(3).gather(3, index).squeeze(3)  # (R, K, N)
    return math.log(logits.shape[1]) - hits.logsumexp(1)


def mixture_scores(mixture: Tensor, y: Tensor, config: TrainConfig) -> Tensor:
    """`ensemble_scores` where the ensemble's prediction is known, `(R, N, C)`, and `y` is `(R, N)`.

    A probability that underflowed counts as the smallest positive number: the sum does not have its logarithm.
    """
    if config.loss == "ace":
        log_probs = mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()
        return -log_probs.gather(2, y.unsqueeze(2)).squeeze(2)
    return (mixture - y).square().mean(-1)


def ensemble_predictions(logits: Tensor, config: TrainConfig) -> Tensor:
    """Each run's ensemble prediction, `(R, N, C)`, from its members' logits `(R, K, N, C)`."""
    return member_predictions(logits, config).mean(1)


def member_predictions(logits: Tensor, config: TrainConfig) -> Tensor:
    """Each member's own prediction, in the shape of its logits: probabilities, or numbers."""
    logits = logits.to(config.dtype)
    return logits.softmax(-1) if config.loss == "ace" else logits


def mean_over_samples(values: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over the last axis, weighted where samples have weights; 0 where the weights sum to 0."""
    if weight is None:
        return values.mean(-1)
    total = weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return (values * (weight / total)).sum(-1)


class _Rows(NamedTuple):
    """The arguments of a loss whose members share their batches."""

    logits: Tensor  # (R, K, B, C)
    y: Tensor  # (R, B) or (R, B, M)
    diversity: Tensor  # (R,)
    alpha: float | None  # weight of every member; None: 1/K
    mixture: Tensor | None  # (R, B, C)

    def options(self, scale: float | Tensor, label_smoothing: float, detach_others: bool = True) -> LossOptions:
        alpha = None if self.alpha is None else self.diversity.new_full((self.logits.shape[1],), self.alpha)
        return LossOptions(
            self.y,
            self.diversity,
            alpha=alpha,
            mixture=self.mixture,
            scale=scale,
            label_smoothing=label_smoothing,
            detach_others=detach_others,
        )


def _rows(
    logits: Tensor, y: Tensor, diversity: Tensor, mixture: Tensor | None, num_members: int, config: TrainConfig
) -> _Rows:
    """Own batches as R·K runs of one member: its loss needs the others' predictions on its batch and nothing else."""
    alpha = None if mixture is None else 1 / num_members
    if config.batches == "shared":
        return _Rows(logits, y, diversity, alpha, mixture)
    lead = logits.shape[:2]
    # without a mixture, batches are separate: no coupling
    lam = torch.zeros_like(diversity) if mixture is None else diversity
    if mixture is not None:
        mixture = mixture.unflatten(1, logits.shape[1:3]).flatten(0, 1)
    lam = lam.unsqueeze(1).expand(lead).flatten()
    return _Rows(logits.flatten(0, 1).unsqueeze(1), y.flatten(0, 1), lam, alpha, mixture)
