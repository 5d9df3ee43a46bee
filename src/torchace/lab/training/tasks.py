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
    member_losses: Callable[[LossInputs, bool], Tensor]  # of inputs and detach_others: differentiable, (R, K, B)
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


def _ace_member_losses(inputs: LossInputs, detach_others: bool) -> Tensor:
    return composite.member_losses(inputs.logits, _ace_options(inputs, 1.0, detach_others))


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
    z, y, diversity, alpha, mixture, _ = inputs
    return binary.closed_form(z, y, diversity, scale, alpha, mixture, _binary_smoothing(inputs))


def _binary_smoothing(inputs: LossInputs) -> float | Tensor:
    """Label smoothing, broadcast against targets `(R, B, M)`."""
    smoothing = inputs.label_smoothing
    return smoothing.view(-1, 1, 1) if isinstance(smoothing, Tensor) else smoothing


def _binary_member_losses(inputs: LossInputs, detach_others: bool) -> Tensor:
    smoothing = _binary_smoothing(inputs)
    p = inputs.y * (1 - smoothing) + smoothing / 2
    return _element_losses(binary.element_losses, inputs, p)


def _mixture_binary_cross_entropy(mixture: Tensor, y: Tensor) -> Tensor:
    return -(y * _log(mixture) + (1 - y) * _log(1 - mixture)).mean(-1)


def _ncl_closed_form(inputs: LossInputs, scale: Tensor) -> LossResult:
    f, y, diversity, alpha, mixture, _ = inputs
    return ncl.closed_form(f, y, diversity, scale, alpha, mixture)


def _ncl_member_losses(inputs: LossInputs, detach_others: bool) -> Tensor:
    return _element_losses(ncl.element_losses, inputs, inputs.y)


def _element_losses(function: Callable[..., Tensor], inputs: LossInputs, y: Tensor) -> Tensor:
    """Mean over outputs of a loss of single outputs, `(R, K, B)`."""
    z = inputs.logits.to(y.dtype).transpose(0, 1)  # members first
    alpha = torch.full_like(z[:, :1, :1, :1], 1 / z.shape[0] if inputs.alpha is None else inputs.alpha)
    losses = function(z, y, inputs.diversity.view(-1, 1, 1), alpha, inputs.mixture)
    return losses.mean(-1).transpose(0, 1)


def _squared_error(mean: Tensor, y: Tensor) -> Tensor:
    return (mean - y).square().mean(-1)


TASKS = {
    "classification": TaskLoss(
        link="softmax",
        score_name="cross_entropy",
        closed_form=_ace_closed_form,
        member_losses=_ace_member_losses,
        scores=_cross_entropy,
        mixture_scores=_mixture_cross_entropy,
        predictions=lambda logits: logits.softmax(-1),
    ),
    "multilabel": TaskLoss(
        link="sigmoid",
        score_name="cross_entropy",
        closed_form=_binary_closed_form,
        member_losses=_binary_member_losses,
        scores=binary.ensemble_cross_entropy,
        mixture_scores=_mixture_binary_cross_entropy,
        predictions=torch.sigmoid,
    ),
    "regression": TaskLoss(
        link="identity",
        score_name="mse",
        closed_form=_ncl_closed_form,
        member_losses=_ncl_member_losses,
        scores=lambda logits, y: _squared_error(logits.mean(1), y),
        mixture_scores=_squared_error,
        predictions=lambda logits: logits,
    ),
}
