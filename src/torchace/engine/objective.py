"""What runs are trained on and scored by: ACE and cross entropy, or NCL and squared error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from torchace.engine.recipe import Recipe
from torchace.functional import amended_cross_entropy, ensemble_log_probs, ensemble_probs, negative_correlation

LINKS = {"ace": "softmax", "ncl": "identity"}


def losses_of(logits: Tensor, y: Tensor, diversity: Tensor, mixture: Tensor | None, recipe: Recipe) -> Tensor:
    """Every member's loss on every sample of its batch, `(R, K, B)`.

    Args:
        logits: `(R, K, B, C)`.
        y: `(R, B)`, or `(R, K, B)` with batches of the members' own; for regression with an axis of outputs at the end.
        diversity: λ of each run, `(R,)`.
        mixture: What the ensemble predicts on all its members' batches, `(R, K·B, C)`, for exchanged batches.
        recipe: Which loss.
    """
    loss = _loss(recipe)
    if recipe.batches == "shared":
        return vmap(loss)(logits, y, diversity)
    # Own batches: a member's loss needs the others' predictions on its batch and nothing else of them, so the K
    # batches of a run are rows of one member, `(1, K·B, C)`, with the ensemble's prediction given.
    num_members, size = logits.shape[1:3]
    rows, targets = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2)
    if mixture is None:  # separate batches: no coupling
        losses = vmap(lambda z, t: loss(z, t, 0.0))(rows, targets)
    else:
        share = torch.full((1,), 1 / num_members, dtype=mixture.dtype, device=logits.device)
        coupled = vmap(lambda z, t, d, m: loss(z, t, d, mixture=m, member_weights=share))
        losses = coupled(rows, targets, diversity, mixture)
    return losses.squeeze(1).unflatten(1, (num_members, size))


def scores_of(logits: Tensor, y: Tensor, recipe: Recipe) -> Tensor:
    """What an ensemble is judged by on every sample, `(R, N)`: its cross entropy, or its squared error.

    Args:
        logits: `(R, K, N, C)`.
        y: `(N,)` for all runs, or `(R, N)`; for regression with an axis of outputs at the end.
        recipe: Which score.
    """
    score = _cross_entropy if recipe.loss == "ace" else _squared_error
    shared = y.ndim == (1 if recipe.loss == "ace" else 2)
    return vmap(score, in_dims=(0, None if shared else 0))(logits, y)


def mixture_of(logits: Tensor, recipe: Recipe) -> Tensor:
    """What each run's ensemble predicts, `(R, N, C)`, from its members' logits `(R, K, N, C)`."""
    return vmap(partial(ensemble_probs, link=LINKS[recipe.loss]))(logits)


def mean_over_samples(values: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over the last axis, weighted where samples have weights; 0 where all of them weigh nothing."""
    if weight is None:
        return values.mean(-1)
    weight = weight.expand_as(values)
    return (values * weight).sum(-1) / weight.sum(-1).clamp_min(torch.finfo(weight.dtype).tiny)


def _loss(recipe: Recipe) -> Callable[..., Tensor]:
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
