"""Amended Cross Entropy: each member's cross entropy with the label, minus λ times its cross entropy with the others.

One formula, two ways to compute it. The composite below is plain PyTorch and right under every transform
(`torch.func`, `torch.compile`, forward mode, double backward). On the CPU in plain Python, `kernels.ace_cpu` computes
value and closed-form gradient together in cache-sized pieces; it falls back on the composite for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from torchace import _checks
from torchace.functional._members import along_members, compute_dtype
from torchace.kernels import ace_cpu
from torchace.kernels.terms import Terms


def amended_cross_entropy(
    logits: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    sample_weight: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mixture: Tensor | None = None,
    detach_others: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""The Amended Cross Entropy of K members, summed over members.

    $$e^k = H(p, q^k) - \lambda \sum_{j \ne k} \alpha^j H(q^j, q^k), \qquad
    \frac{\partial e^k}{\partial z^k} = (1 - \lambda)(q^k - p) + \lambda(\bar q - p)$$

    The other members are constants: no gradient flows into $q^j$. With λ=0 or K=1 it is
    `torch.nn.functional.cross_entropy` for every option, summed over members. The value is unbounded below and not a
    score: watch the ensemble's cross entropy instead.

    Args:
        logits: Members' logits, `(K, N, C)` or `(K, N, C, d1, ...)`.
        target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`. All members share it.
        diversity: λ in [0, 1], a number or a 0-dimensional tensor (which does not recompile when it changes).
        member_weights: The paper's α, `(K,)`; uniform unless given.
        sample_weight: `(N, ...)` for all members or `(K, N, ...)` for each; multiplies a sample's whole loss. The mean
            divides by the weights' sum, member by member; a member whose weights sum to 0 adds nothing.
        weight: Class weights, `(C,)`. A sample's diversity term is scaled by its own weight.
        ignore_index: Class index that does not count.
        label_smoothing: Share of the target that is spread evenly over the classes, in [0, 1].
        mixture: $\sum_j \alpha^j q^j$ computed elsewhere, `(N, C, ...)`; `member_weights` are then those of the members
            at hand and need not sum to 1.
        detach_others: False lets gradients flow into the other members; for ablation alone, it wrecks training.
        reduction: `"mean"` or `"sum"` over samples, then summed over members; `"none"` returns `(K, N, ...)`.

    Returns:
        A scalar, or `(K, N, ...)`; in float32 for half-precision logits.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]], requires_grad=True)
        >>> loss = amended_cross_entropy(logits, torch.tensor([0]), 0.5)
        >>> loss
        tensor(0.3651, grad_fn=<AceCpuBackward>)
        >>> loss.backward()
        >>> logits.grad
        tensor([[[-0.2144,  0.2144]],
        <BLANKLINE>
                [[-0.4048,  0.4048]]])
    """
    _checks.check_logits(logits)
    _checks.check_diversity(diversity)
    _checks.check_reduction(reduction)
    _checks.check_fraction(label_smoothing, "label_smoothing")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"Expected `ignore_index` to be an int, but got {type(ignore_index).__name__}.")
    probabilities = _checks.check_target(target, logits, ignore_index=ignore_index)
    num_members, num_classes = logits.shape[0], logits.shape[2]
    samples = (logits.shape[1], *logits.shape[3:])
    like = torch.empty((), dtype=compute_dtype(logits), device=logits.device)

    alpha = _checks.checked_member_weights(member_weights, num_members, like=like, partial=mixture is not None)
    if weight is not None:
        _checks.check_class_weight(weight, num_classes)
        weight = weight.detach().to(like)
    if mixture is not None:
        _checks.check_mixture(mixture, logits)
        if not detach_others:
            raise ValueError("Expected `detach_others=True` with a `mixture`, which is a constant computed elsewhere.")
        mixture = mixture.detach().to(like)
    if isinstance(diversity, Tensor):
        diversity = diversity.detach().to(like.dtype)

    # factor: what each sample counts, `(N, ...)` or `(K, N, ...)`; None where all count alike.
    factor = None
    if sample_weight is not None:
        factor = _checks.checked_sample_weight(sample_weight, num_members, samples, like)
    if probabilities:
        target = target.to(like)
        counted = factor
    else:
        target = target.long()  # before the comparison: -100 wraps around to 156 in uint8
        ignored = target == ignore_index
        if not _checks.can_read(target) or bool(ignored.any()):
            target = target.masked_fill(ignored, 0)
            factor = (~ignored).to(like.dtype) if factor is None else factor.masked_fill(ignored, 0)
        # torch's mean divides by the weights of the samples' own classes, label smoothing or not
        counted = factor if weight is None else (weight[target] if factor is None else factor * weight[target])

    scale, empty = _scale(factor, counted, samples, reduction, zero_is_zero=sample_weight is not None)
    terms = Terms(
        target, diversity, alpha, weight, float(label_smoothing), mixture, detach_others, member_weights is None, scale
    )
    if reduction == "none":
        return member_losses(terms, logits)
    if _fits_closed_form(logits, terms):
        # a number from here on: whoever changes the tensor before the backward does not change this loss
        terms = replace(terms, diversity=float(terms.diversity))
        loss = ace_cpu.loss(logits, terms, partial(_total, terms))
    else:
        loss = _total(terms, logits)
    return loss if empty is None else loss + empty


def member_losses(terms: Terms, logits: Tensor) -> Tensor:
    """The composite: every member's loss on every sample, `(K, N, ...)`, times its scale."""
    log_q = F.log_softmax(logits, 2, dtype=compute_dtype(logits))  # (K, N, C, ...)
    wp = terms.weighted_target(logits.shape[2])  # (N, C, ...), w∘p
    if terms.diversity_is_zero:
        pull = wp.expand_as(log_q)
    else:
        q = (log_q.detach() if terms.detach_others else log_q).exp()
        alpha_q = along_members(terms.alpha, q) * q
        mixture = alpha_q.sum(0) if terms.mixture is None else terms.mixture
        # Σ_{j≠k} α^j q^j: without member k itself, so that a second derivative in z^k is right too
        others = mixture - alpha_q
        pull = wp - terms.diversity * wp.sum(1, keepdim=True) * others
    # A class that nobody believes in adds nothing, even where its log-probability is -inf.
    losses = -torch.where(pull == 0, 0.0, pull * log_q).sum(2)
    if isinstance(terms.scale, float):
        return losses * terms.scale
    # where, not a product: a sample that does not count may have an infinite loss
    return torch.where(terms.scale == 0, 0.0, losses * terms.scale)


def _total(terms: Terms, logits: Tensor) -> Tensor:
    return member_losses(terms, logits).sum()


def _scale(
    factor: Tensor | None, counted: Tensor | None, samples: tuple[int, ...], reduction: str, *, zero_is_zero: bool
) -> tuple[float | Tensor, float | Tensor | None]:
    """What each sample's loss is multiplied by, and what to add so that an empty mean is NaN as in torch."""
    if reduction != "mean":
        return (1.0 if factor is None else factor), None
    if counted is None:
        count = 1
        for size in samples:
            count *= size
        return (1.0 / count, None) if count else (1.0, float("nan"))
    over = tuple(range(counted.ndim - len(samples), counted.ndim))
    denominator = counted.sum(over, keepdim=True)  # (1, ...) or (K, 1, ...)
    numerator = torch.ones_like(denominator).expand(samples) if factor is None else factor
    if zero_is_zero:
        return torch.where(denominator == 0, 0.0, numerator / denominator), None
    scale = torch.where(numerator == 0, 0.0, numerator / denominator)
    return scale, 0.0 / denominator.sum()


def _fits_closed_form(logits: Tensor, terms: Terms) -> bool:
    """Whether plain Python runs on plain CPU tensors and only a first derivative in the logits is asked for."""
    return (
        _checks.can_read(logits)
        and terms.detach_others
        and logits.numel() > 0
        and not terms.target.requires_grad
        and forward_ad.unpack_dual(logits).tangent is None
    )
