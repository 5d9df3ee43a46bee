"""Losses and scores of runs: ACE and cross entropy, or NCL and squared error."""

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
    """Losses, scores and gradient of one step."""

    losses: Tensor  # (R, K): training loss of each member
    score: Tensor  # (R,): of the ensemble if members share a batch, else mean over members
    gradient: Tensor  # (R, K, B, C): with respect to the logits; 0 for stopped runs


def compute_objective(
    logits: Tensor,  # (R, K, B, C), detached
    y: Tensor,  # (R, B), or (R, K, B) with own batches; for regression (..., M)
    weight: Tensor | None,  # first axes of y, or (R, K, B); relative to the training set's mean
    diversity: Tensor,  # (R,)
    active: Tensor,  # (R,): False for stopped runs
    mixture: Tensor | None,  # (R, K·B, C) for exchanged batches, (R, B, C) for members on other ranks or own weights
    config: TrainConfig,
    *,
    num_members: int | None = None,
    batch_size: int | None = None,
) -> Objective:
    """Losses, scores and gradient of one training step.

    Losses and score are divided by the batch size, not by the sum of weights: a weight of k counts as k repeats in
    expectation. `num_members` and `batch_size` are those of all ranks; results are then shares of the whole.
    """
    num_runs, local_members, size = logits.shape[:3]
    num_members, batch_size = num_members or local_members, batch_size or size
    own = config.batches != "shared"
    by_member = weight is not None and weight.ndim == 3  # (R, K, B)
    scale = active.to(config.dtype).view(-1, *[1] * (1 + (own or by_member))) / batch_size
    if weight is not None:
        scale = scale * weight
    if not config.detach_others:  # no closed form
        z = logits.detach().requires_grad_()
        with torch.enable_grad():
            losses = member_losses(z, y, diversity, mixture, config, num_members=num_members)
            losses = (losses * (scale if scale.ndim == 3 else scale.unsqueeze(1))).sum(2)
        (gradient,) = torch.autograd.grad(losses.sum(), z)
        if own:
            logits, y = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2)
        result = LossResult(losses.detach(), ensemble_scores(logits.to(config.dtype), y, config), gradient)
    elif config.loss == "ace" and mixture is None and not own:  # most steps: as few layers as possible
        result = member_terms(logits, LossOptions(y, diversity, scale=scale, label_smoothing=config.label_smoothing))
    else:
        rows = _rows(logits, y, diversity, mixture, num_members, config)
        if own:
            scale = scale.expand(num_runs, local_members, -1).flatten(0, 1)
        if config.loss == "ace":
            result = member_terms(rows.logits, rows.options(scale, config.label_smoothing))
        else:
            result = ncl.closed_form(rows.logits, rows.y, rows.diversity, scale, alpha=rows.alpha, mixture=rows.mixture)
    losses, scores = result.losses, result.scores
    assert scores is not None
    assert result.gradient is not None
    gradient = result.gradient
    if own and config.detach_others:
        losses, scores = losses.view(num_runs, local_members), scores.view(num_runs, -1)
        gradient = gradient.squeeze(1).unflatten(0, (num_runs, local_members))
    elif not own and mixture is not None:  # some members are on other ranks, or do not train on a sample
        scores = mixture_scores(mixture, y, config)
    if weight is not None:
        scores = scores * (weight.mean(1) if by_member and not own else weight.flatten(1))
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
    """Differentiable loss of every member on every sample, `(R, K, B)`; arguments as in `compute_objective`."""
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


def ensemble_scores(
    logits: Tensor,  # (R, K, N, C)
    y: Tensor,  # (N,) or (R, N); for regression (..., M)
    config: TrainConfig,
    members: Tensor | None = None,  # (K, N): those that predict each sample; None: all
) -> Tensor:
    """Ensemble's cross entropy or squared error on every sample, `(R, N)`."""
    if config.loss == "ncl":
        share = 1 / logits.shape[1] if members is None else (members / members.sum(0)).unsqueeze(2)
        return ((logits * share).sum(1) - y).square().mean(-1)
    index = y.expand(len(logits), -1)[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    hits = logits.log_softmax(3).gather(3, index).squeeze(3)  # (R, K, N)
    if members is None:
        return math.log(logits.shape[1]) - hits.logsumexp(1)
    return members.sum(0).log() - hits.masked_fill(~members, -torch.inf).logsumexp(1)


def mixture_scores(
    mixture: Tensor,  # (R, N, C)
    y: Tensor,  # (R, N); for regression (R, N, M)
    config: TrainConfig,
) -> Tensor:
    """Like `ensemble_scores`, from the mixture; an underflowed probability counts as the smallest number."""
    if config.loss == "ace":
        log_probs = mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()
        return -log_probs.gather(2, y.unsqueeze(2)).squeeze(2)
    return (mixture - y).square().mean(-1)


def ensemble_predictions(logits: Tensor, config: TrainConfig) -> Tensor:
    """Each run's ensemble prediction, `(R, N, C)`, from its members' logits `(R, K, N, C)`."""
    return member_predictions(logits, config).mean(1)


def member_predictions(logits: Tensor, config: TrainConfig) -> Tensor:
    """Each member's prediction in the shape of its logits: probabilities, or numbers."""
    logits = logits.to(config.dtype)
    return logits.softmax(-1) if config.loss == "ace" else logits


def mean_over_samples(values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over the last axis, weighted if `weight` is given; 0 if the weights sum to 0."""
    if weight is None:
        return values.mean(-1)
    total = weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return (values * (weight / total)).sum(-1)


class _Rows(NamedTuple):
    """Arguments of a loss whose members share their batches."""

    logits: Tensor  # (R, K, B, C)
    y: Tensor  # (R, B) or (R, B, M)
    diversity: Tensor  # (R,)
    alpha: float | None  # member weight; None: 1/K
    mixture: Tensor | None  # (R, B, C)

    def options(self, scale: float | Tensor, label_smoothing: float, detach_others: bool = True) -> LossOptions:
        """Options of the ACE loss."""
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
    """Own batches as R·K runs of one member: its loss needs only the others' predictions on its batch."""
    alpha = None if mixture is None else 1 / num_members
    if config.batches == "shared":
        return _Rows(logits, y, diversity, alpha, mixture)
    lead = logits.shape[:2]
    # no mixture: separate batches, no coupling
    lam = torch.zeros_like(diversity) if mixture is None else diversity
    if mixture is not None:
        mixture = mixture.unflatten(1, logits.shape[1:3]).flatten(0, 1)
    lam = lam.unsqueeze(1).expand(lead).flatten()
    return _Rows(logits.flatten(0, 1).unsqueeze(1), y.flatten(0, 1), lam, alpha, mixture)
