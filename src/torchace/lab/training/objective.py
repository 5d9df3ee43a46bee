"""What runs are trained on and scored by: ACE and cross entropy, or NCL and squared error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from torchace.functional import amended_cross_entropy, ensemble_log_probs, ensemble_probs, negative_correlation
from torchace.functional.closed_form import ace_closed_form, ncl_closed_form
from torchace.lab.training.config import TrainConfig

LINKS = {"ace": "softmax", "ncl": "identity"}


class Objective(NamedTuple):
    losses: Tensor  # (R, K): what each member is trained on; not a score
    score: Tensor  # (R,): cross entropy or squared error, of the ensemble if its members share a batch, else of them
    gradient: Tensor  # (R, K, B, C): of the active runs' losses in the logits, every member's own


def objective_of(
    logits: Tensor,
    y: Tensor,
    weight: Tensor | None,
    diversity: Tensor,
    active: Tensor,
    mixture: Tensor | None,
    recipe: TrainConfig,
    *,
    num_members: int | None = None,
    batch_size: int | None = None,
) -> Objective:
    """What a step needs to know of the loss.

    Args:
        logits: `(R, K, B, C)`, detached.
        y: `(R, B)`, or `(R, K, B)` with batches of the members' own; for regression with an axis of outputs at the end.
        weight: Of the samples, as the first axes of `y`, relative to the mean weight of the training set; None where
            all count alike. Losses and score are divided by the batch size, whatever the weights in the batch sum to: a
            weight of k is then k repeats, in expectation.
        diversity: λ of each run, `(R,)`.
        active: False for a run that was stopped: its gradient is 0, `(R,)`.
        mixture: What the ensemble predicts on all its members' batches, `(R, K·B, C)`, for exchanged batches; on the
            one batch, `(R, B, C)`, where some of its members are on other ranks.
        recipe: Which loss.
        num_members: K of the whole ensemble, where some members are on other ranks.
        batch_size: Samples of the whole batch, where some are on other ranks: results are shares of its mean.
    """
    own = recipe.batches != "shared"
    num_members, batch_size = num_members or logits.shape[1], batch_size or logits.shape[2]
    if not recipe.detach_others or num_members > logits.shape[1]:
        return _by_autograd(logits, y, weight, diversity, active, mixture, recipe, num_members, batch_size)
    going = active.to(recipe.dtype).view(-1, *[1] * (1 + own))
    scale = going / batch_size
    if weight is not None:
        scale = scale * weight
    if mixture is not None:
        mixture = mixture.unflatten(1, logits.shape[1:3])
    if recipe.loss == "ace":
        smoothing = recipe.label_smoothing
        form = ace_closed_form(logits, y, diversity, scale, label_smoothing=smoothing, mixture=mixture)
    else:
        form = ncl_closed_form(logits, y, diversity, scale, mixture=mixture)
    return Objective(form.losses, _score(form.scores, weight, num_members, batch_size), form.gradient)


def losses_of(
    logits: Tensor,
    y: Tensor,
    diversity: Tensor,
    mixture: Tensor | None,
    recipe: TrainConfig,
    *,
    num_members: int | None = None,
) -> Tensor:
    """Every member's loss on every sample of its batch, `(R, K, B)`.

    Args:
        logits: `(R, K, B, C)`.
        y: `(R, B)`, or `(R, K, B)` with batches of the members' own; for regression with an axis of outputs at the end.
        diversity: λ of each run, `(R,)`.
        mixture: What the ensemble predicts on all its members' batches, `(R, K·B, C)`, for exchanged batches; on the
            one batch, `(R, B, C)`, where some of its members are on other ranks.
        recipe: Which loss.
        num_members: K of the whole ensemble, where some are on other ranks.
    """
    loss = _loss(recipe)
    count, size = logits.shape[1:3]
    if mixture is not None:
        share = torch.full((count,), 1 / (num_members or count), dtype=mixture.dtype, device=logits.device)
    if recipe.batches == "shared":
        if mixture is None:
            return over_runs(loss, logits, y, diversity)
        coupled = partial(_coupled, loss, share)
        return over_runs(coupled, logits, y, diversity, mixture)
    # Own batches: a member's loss needs the others' predictions on its batch and nothing else of them, so the K
    # batches of a run are rows of one member, `(1, K·B, C)`, with the ensemble's prediction given.
    rows, targets = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2)
    if mixture is None:  # separate batches: no coupling
        losses = over_runs(lambda z, t: loss(z, t, 0.0), rows, targets)
    else:
        losses = over_runs(partial(_coupled, loss, share[:1]), rows, targets, diversity, mixture)
    return losses.squeeze(1).unflatten(1, (count, size))


def scores_of(logits: Tensor, y: Tensor, recipe: TrainConfig) -> Tensor:
    """What an ensemble is judged by on every sample, `(R, N)`: its cross entropy, or its squared error.

    Args:
        logits: `(R, K, N, C)`.
        y: `(N,)` for all runs, or `(R, N)`; for regression with an axis of outputs at the end.
        recipe: Which score.
    """
    score = _cross_entropy if recipe.loss == "ace" else _squared_error
    shared = y.ndim == (1 if recipe.loss == "ace" else 2)
    return over_runs(score, logits, y.expand(len(logits), *y.shape) if shared else y)


def mixture_scores(mixture: Tensor, y: Tensor, recipe: TrainConfig) -> Tensor:
    """`scores_of` where an ensemble's prediction is known, `(R, N, C)`, and `y` is `(R, N)`.

    A probability that underflowed counts as the smallest number there is: its logarithm is not to be had from the sum.
    """
    if recipe.loss == "ace":
        log_probs = mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()
        return -log_probs.gather(2, y.unsqueeze(2)).squeeze(2)
    return (mixture - y).square().mean(-1)


def mixture_of(logits: Tensor, recipe: TrainConfig) -> Tensor:
    """What each run's ensemble predicts, `(R, N, C)`, from its members' logits `(R, K, N, C)`."""
    return over_runs(partial(ensemble_probs, link=LINKS[recipe.loss]), logits)


def member_predictions(logits: Tensor, recipe: TrainConfig) -> Tensor:
    """Each member's own prediction, in the shape of its logits: probabilities, or numbers."""
    logits = logits.to(recipe.dtype)
    return logits.softmax(-1) if recipe.loss == "ace" else logits


def mean_over_samples(values: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over the last axis, weighted where samples have weights; 0 where all of them weigh nothing."""
    if weight is None:
        return values.mean(-1)
    total = weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return (values * (weight / total)).sum(-1)


def _weighted_sum(values: Tensor, weight: Tensor | None) -> Tensor:
    """Sum over samples, weighted."""
    return (values if weight is None else values * weight).sum(-1)


def over_runs(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """`vmap` over the runs; a single one is computed as it is, which takes less than half the time."""
    if values[0].shape[0] == 1:
        return function(*(value[0] for value in values)).unsqueeze(0)
    return vmap(function)(*values)


def _score(scores: Tensor, weight: Tensor | None, num_members: int, batch_size: int) -> Tensor:
    """One number a run, `(R,)`, from `(R, B)`, or from `(R, K, B)`: as many ensembles of one member."""
    if scores.ndim == 3:
        scores, weight = scores.flatten(1), None if weight is None else weight.flatten(1)
        batch_size *= num_members
    return _weighted_sum(scores, weight) / batch_size


def _by_autograd(
    logits: Tensor,
    y: Tensor,
    weight: Tensor | None,
    diversity: Tensor,
    active: Tensor,
    mixture: Tensor | None,
    recipe: TrainConfig,
    num_members: int,
    batch_size: int,
) -> Objective:
    """`objective_of` where gradients flow into the other members, or some members are on other ranks."""
    own = recipe.batches != "shared"
    z = logits.detach().requires_grad_()
    losses = losses_of(z, y, diversity, mixture, recipe, num_members=num_members)  # (R, K, B)
    losses = _weighted_sum(losses, weight if own or weight is None else weight[:, None]) / batch_size
    (gradient,) = torch.autograd.grad(torch.where(active[:, None], losses, 0.0).sum(), z)
    with torch.no_grad():
        z = z.to(recipe.dtype)
        if own:
            scores = scores_of(z.flatten(1, 2).unsqueeze(1), y.flatten(1, 2), recipe).unflatten(1, z.shape[1:3])
        elif mixture is None:
            scores = scores_of(z, y, recipe)
        else:
            scores = mixture_scores(mixture, y, recipe)
    return Objective(losses.detach(), _score(scores, weight, num_members, batch_size), gradient)


def _coupled(loss: Callable[..., Tensor], share: Tensor, z: Tensor, y: Tensor, d: Tensor, mixture: Tensor) -> Tensor:
    return loss(z, y, d, mixture=mixture, member_weights=share)


def _loss(recipe: TrainConfig) -> Callable[..., Tensor]:
    """The loss of one run: `(K, B, C)` to `(K, B)`."""
    if recipe.loss == "ace":
        return partial(
            amended_cross_entropy,
            label_smoothing=recipe.label_smoothing,
            detach_others=recipe.detach_others,
            reduction="none",
        )
    # several outputs count as one: their mean
    return lambda *args, **options: negative_correlation(*args, reduction="none", **options).mean(-1)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(ensemble_log_probs(logits), y, reduction="none")


def _squared_error(predictions: Tensor, y: Tensor) -> Tensor:
    return (ensemble_probs(predictions, link="identity") - y).square().mean(-1)
