"""Helpers shared by the functions of this package."""

from __future__ import annotations

import torch
from torch import Tensor

from torchace import _checks
from torchace.kernels.options import compute_dtype as compute_dtype


def along_members(values: Tensor, like: Tensor) -> Tensor:
    """Reshape member values `(K,)` to broadcast against `(K, ...)`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def log_mixture(log_terms: Tensor) -> Tensor:
    """`logsumexp` over members of `(K, ...)`; where all terms are -inf, the gradient is 0 instead of NaN."""
    if not torch.is_grad_enabled():
        return log_terms.logsumexp(0)
    all_zero = (log_terms == -torch.inf).all(0)
    return log_terms.masked_fill(all_zero, 0.0).logsumexp(0).masked_fill(all_zero, -torch.inf)


def reduce_samples(losses: Tensor, reduction: str) -> Tensor:
    """Mean or sum over samples, or the losses unchanged."""
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def member_mean(losses: Tensor, sample_weight: Tensor | None, reduction: str) -> Tensor:
    """Weight losses `(K, N, ...)`, reduce them over each member's elements and sum over members."""
    if sample_weight is None:
        if reduction == "mean":
            return losses.flatten(1).mean(1).sum()
        return losses.sum() if reduction == "sum" else losses
    weight = _checks.as_sample_weight(sample_weight, losses.shape[0], tuple(losses.shape[1:]), losses)
    # where, not a product: an element of weight 0 may have an infinite loss
    weighted = torch.where(weight == 0, 0.0, losses * weight)
    if reduction == "none":
        return weighted
    if reduction == "mean":
        total = weight.expand_as(losses).flatten(1).sum(1)
        sums = weighted.flatten(1).sum(1)
        return torch.where(total == 0, 0.0, sums / torch.where(total == 0, 1.0, total)).sum()
    return weighted.sum()
