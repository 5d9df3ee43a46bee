"""What a task is trained and scored by: ACE and cross entropy, its binary form, or NCL and squared error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.functional import binary, ncl
from torchace.kernels import LossOptions, LossResult, composite, member_terms


class LossInputs(NamedTuple):
    """Arguments of a loss whose members share their batches."""

    logits: Tensor  # (R, K, B, C)
    y: Tensor  # (R, B) or (R, B, M)
    diversity: Tensor  # (R,)
    alpha: float | None = None  # member weight; None: 1/K
    mixture: Tensor | None = None  # (R, B, C)
    label_smoothing: float | Tensor = 0.0  # a number for all runs, or (R,)


@dataclass(frozen=True)
class TaskLoss:
    """Link, losses, scores and predictions of a task; a sample's loss is the mean over its outputs."""

    link: str
    score_name: str  # of `scores` in result files
    closed_form: Callable[[LossInputs, Tensor], LossResult]  # of inputs and scale (R, B)
    scores: Callable[[Tensor, Tensor], Tensor]  # of logits (R, K, N, C) and y, (N, ...) or (R, N, ...): (R, N)
    mixture_scores: Callable[[Tensor, Tensor], Tensor]  # the same of the ensemble's predictions (R, N, C)
    predictions: Callable[[Tensor], Tensor]  # of logits: probabilities or numbers, in their shape


def _ace_options(inputs: LossInputs, scale: float | Tensor, detach_others: bool = True) -> LossOptions:
    alpha = None if inputs.alpha is None else inputs.diversity.new_full((inputs.logits.shape[1],), inputs.alpha)
    return LossOptions(
        inputs.y,
        inputs.diversity,
        alpha=alpha,
        mixture=inputs.mixture,
        scale=scale,
        label_smoothing=inputs.label_smoothing,
        detach_others=detach_others,
    )


def _ace_closed_form(inputs: LossInputs, scale: Tensor) -> LossResult:
    return member_terms(inputs.logits, _ace_options(inputs, scale))


def ace_by_autograd(inputs: LossInputs, scale: Tensor) -> LossResult:
    """ACE with gradients into the other members, which has no closed form."""
    z = inputs.logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = composite.member_losses(z, _ace_options(inputs, 1.0, detach_others=False))
        losses = (losses * (scale if scale.ndim == 3 else scale.unsqueeze(1))).sum(2)
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    return LossResult(losses.detach(), _cross_entropy(inputs.logits.to(scale.dtype), inputs.y), gradient)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    index = y.expand(len(logits), -1)[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    hits = logits.log_softmax(3).gather(3, index).squeeze(3)  # (R, K, N)
    return math.log(logits.shape[1]) - hits.logsumexp(1)


def _log(mixture: Tensor) -> Tensor:
    """Logarithm; an underflowed probability counts as the smallest number."""
    return mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()


def _mixture_cross_entropy(mixture: Tensor, y: Tensor) -> Tensor:
    return -_log(mixture).gather(2, y.unsqueeze(2)).squeeze(2)


def _binary_closed_form(inputs: LossInputs, scale: Tensor) -> LossResult:
    z, y, diversity, alpha, mixture, smoothing = inputs
    if isinstance(smoothing, Tensor):
        smoothing = smoothing.view(-1, 1, 1)
    return binary.closed_form(z, y, diversity, scale, alpha, mixture, smoothing)


def _mixture_binary_cross_entropy(mixture: Tensor, y: Tensor) -> Tensor:
    return -(y * _log(mixture) + (1 - y) * _log(1 - mixture)).mean(-1)


def _ncl_closed_form(inputs: LossInputs, scale: Tensor) -> LossResult:
    f, y, diversity, alpha, mixture, _ = inputs
    return ncl.closed_form(f, y, diversity, scale, alpha, mixture)


def _squared_error(mean: Tensor, y: Tensor) -> Tensor:
    return (mean - y).square().mean(-1)


TASKS = {
    "classification": TaskLoss(
        link="softmax",
        score_name="cross_entropy",
        closed_form=_ace_closed_form,
        scores=_cross_entropy,
        mixture_scores=_mixture_cross_entropy,
        predictions=lambda logits: logits.softmax(-1),
    ),
    "multilabel": TaskLoss(
        link="sigmoid",
        score_name="cross_entropy",
        closed_form=_binary_closed_form,
        scores=binary.ensemble_cross_entropy,
        mixture_scores=_mixture_binary_cross_entropy,
        predictions=torch.sigmoid,
    ),
    "regression": TaskLoss(
        link="identity",
        score_name="mse",
        closed_form=_ncl_closed_form,
        scores=lambda logits, y: _squared_error(logits.mean(1), y),
        mixture_scores=_squared_error,
        predictions=lambda logits: logits,
    ),
}
