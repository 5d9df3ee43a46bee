"""Amended cross entropy in plain PyTorch with autograd, for every transform."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.kernels.options import LossOptions, compute_dtype, fold_mean


def member_losses(logits: Tensor, options: LossOptions) -> Tensor:
    """Losses times their scale, `(R, K, N)`, of logits `(R, K, N, C)`."""
    options, _ = fold_mean(options.replace(reduction="sum"), compute_dtype(logits))
    return _member_losses(logits, options)


def total_loss(logits: Tensor, options: LossOptions) -> Tensor:
    """Loss summed over runs, members and samples, a scalar."""
    options, empty = fold_mean(options, compute_dtype(logits))
    loss = _member_losses(logits, options).sum()
    return loss if empty is None else loss + empty


def _member_losses(logits: Tensor, options: LossOptions) -> Tensor:
    log_q = F.log_softmax(logits, 3, dtype=compute_dtype(logits))  # (R, K, N, C)
    wp = options.weighted_target(logits.shape[3], log_q.dtype).unsqueeze(1)  # (R, 1, N, C)
    if options.diversity_is_zero:
        u = wp.expand_as(log_q)
    else:
        lam = options.diversity
        if isinstance(lam, Tensor):
            lam = lam.reshape(-1, 1, 1, 1)
        q = (log_q.detach() if options.detach_others else log_q).exp()
        alpha_q = q / q.shape[1] if options.alpha is None else options.alpha.view(-1, 1, 1) * q
        mixture = alpha_q.sum(1, keepdim=True) if options.mixture is None else options.mixture.unsqueeze(1)
        # Σ_{j≠k} α^j q^j: without member k, for correct second derivatives
        others = mixture - alpha_q
        u = wp - lam * wp.sum(3, keepdim=True) * others
    # A class of weight 0 adds nothing, even where its log-probability is -inf.
    losses = -torch.where(u == 0, 0.0, u * log_q).sum(3)
    scale = options.scale
    if not isinstance(scale, Tensor):
        return losses * scale
    scale = scale.unsqueeze(1) if scale.ndim == 2 else scale
    # where, not a product: a sample of weight 0 may have an infinite loss
    return torch.where(scale == 0, 0.0, losses * scale)
