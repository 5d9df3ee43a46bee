"""Amended cross entropy and its closed-form gradient in plain PyTorch without autograd, for CPUs.

With w∘p the weighted target, s = Σ_c w_c p_c and b = λ s q̄ - w∘p, which all members share,

    e^k = <b, log q^k> - λ s α^k <q^k, log q^k>        ∂e^k/∂z^k = s (1-λ) q^k + b

One softmax serves value, gradient and the ensemble's score; large inputs are computed in pieces that stay in the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.kernels.options import LossOptions, compute_dtype, fold_mean

PIECE = 1 << 20  # elements of a piece, 4 MiB in float32: measured best with 1 MiB of L2 per core and a shared L3
SMALL = 1 << 15  # elements up to which the number of operations dominates
FEW_CLASSES = 64  # below, torch's softmax over the last axis is ten times slower than over the one before it


class LossResult(NamedTuple):
    """Losses, scores of the ensemble and the gradient in the logits."""

    losses: Tensor  # (R, K), summed over samples times their scale; a scalar if not `per_member`
    scores: Tensor | None  # (R, N), cross entropy of the members' mean
    gradient: Tensor | None  # (R, K, N, C), in the logits' dtype


def value_and_gradient(logits: Tensor, options: LossOptions, *, want_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Loss summed over members, a scalar, and its gradient in logits `(K, N, C)`; in float32 for float16."""
    options, empty = fold_mean(options, compute_dtype(logits))
    found = compute(logits.unsqueeze(0), options, want_gradient=want_gradient, per_member=False)
    value = found.losses if empty is None else found.losses + empty
    return value, None if found.gradient is None else found.gradient[0]


def is_gradient_kept(logits: Tensor) -> bool:
    """Whether the forward computes the gradient."""
    return True


def scaled_gradient(logits: Tensor, options: LossOptions, factor: Tensor) -> Tensor:
    """Gradient times a number, in the logits' dtype."""
    _, gradient = value_and_gradient(logits, options, want_gradient=True)
    assert gradient is not None
    return scale_gradient(gradient, factor).to(logits.dtype)


def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """Scale a gradient in place."""
    return gradient if factor.item() == 1.0 else gradient.mul_(factor)


def compute(
    logits: Tensor,
    options: LossOptions,
    *,
    want_gradient: bool = True,
    want_scores: bool = False,
    per_member: bool = True,
) -> LossResult:
    """Losses, scores (for class indices) and gradient of detached logits `(R, K, N, C)`; options from `fold_mean`."""
    if torch.is_autocast_enabled(logits.device.type):  # the products below must not be rounded to bf16
        with torch.autocast(logits.device.type, enabled=False):
            return compute(logits, options, want_gradient=want_gradient, want_scores=want_scores, per_member=per_member)
    # float32 for float16, which underflows before a loss scale is applied
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    on_cpu = logits.device.type == "cpu"
    axis = 2 if (on_cpu and logits.shape[3] < FEW_CLASSES) or logits.mT.is_contiguous() else 3  # of the classes
    z = logits.mT if axis == 2 else logits  # (R, K, C, N) or (R, K, N, C)
    if on_cpu and want_scores and want_gradient and z.numel() <= PIECE and _is_plain(options):
        return _compute_plain(z, axis, options, dtype)
    if on_cpu and z.numel() > PIECE:
        losses, scores, gradient = _compute_in_pieces(z, axis, options, dtype, want_gradient, want_scores, per_member)
    else:
        log_q, q = _log_softmax_and_softmax(z.to(compute_dtype(z)), axis)
        scores = _scores(log_q, axis, options.target) if want_scores else None
        losses = _losses_and_gradient(log_q, q, axis, options, q if want_gradient else None, per_member=per_member)
        gradient = q.to(dtype) if want_gradient else None
    return LossResult(losses, scores, gradient.mT if gradient is not None and axis == 2 else gradient)


def _is_plain(options: LossOptions) -> bool:
    """Whether these are a training step's options without extras: class indices, equal weights, all members at hand."""
    return (
        options.alpha is None
        and options.weight is None
        and options.mixture is None
        and isinstance(options.diversity, Tensor)
        and isinstance(options.scale, Tensor)
        and options.scale.ndim == 2
        and not options.has_probabilities
    )


def _compute_plain(z: Tensor, axis: int, options: LossOptions, dtype: torch.dtype) -> LossResult:
    """All results in the fewest operations, see `_is_plain`; nothing of one run depends on another."""
    target, lam, scale = options.target, options.diversity, options.scale
    assert isinstance(lam, Tensor)
    assert isinstance(scale, Tensor)
    num_runs, num_members = z.shape[:2]
    shape = (1, -1) if axis == 2 else (-1, 1)
    index, scale = target.view(num_runs, 1, *shape), scale.view(scale.shape[0], 1, *shape)
    lam, smoothing = lam.view(-1, 1, 1, 1), options.smoothing(4)
    log_q = torch.log_softmax(z, axis, dtype=compute_dtype(z))
    log_q.clamp_(min=torch.finfo(log_q.dtype).min)  # 0 · log 0 is 0
    strength = lam / num_members
    q = log_q.exp().mul_(scale)  # from here on, everything times its scale
    b = q.sum(1, keepdim=True).mul_(strength)
    b.scatter_add_(axis, index, (scale * (smoothing - 1)).expand_as(index))
    if options.has_smoothing:
        b -= scale * (smoothing / z.shape[axis])
    losses = torch.addcmul(b, q, strength, value=-1).mul_(log_q).sum((2, 3))
    scores = _mixture_scores(log_q.gather(axis, index.expand(-1, num_members, -1, -1)))
    gradient = torch.addcmul(b, q, torch.rsub(lam, 1), out=q)
    if dtype != q.dtype:
        gradient = gradient.to(dtype)
    return LossResult(losses, scores, gradient.mT if axis == 2 else gradient)


def _compute_in_pieces(
    z: Tensor,
    axis: int,
    options: LossOptions,
    dtype: torch.dtype,
    want_gradient: bool,
    want_scores: bool,
    per_member: bool,
) -> LossResult:
    """Compute some samples at a time; the gradient has the axes of `z`."""
    num_samples = z.shape[5 - axis]
    size = max(1, PIECE * num_samples // z.numel())
    # reused: allocation for every piece costs more than the arithmetic
    buffers = [z.new_empty(z.numel() // num_samples * size, dtype=compute_dtype(z)) for _ in range(2)]
    gradient = torch.empty_like(z, dtype=dtype) if want_gradient else None
    losses, scores = [], []
    for start in range(0, num_samples, size):
        count = min(size, num_samples - start)
        part, samples = z.narrow(5 - axis, start, count), options.samples(slice(start, start + count))
        log_q, q = (buffer[: part.numel()].view(part.shape) for buffer in buffers)
        _log_softmax_and_softmax(part.to(q.dtype), axis, log_q, q)
        if want_scores:
            scores.append(_scores(log_q, axis, samples.target))
        out = None if gradient is None else gradient.narrow(5 - axis, start, count)
        losses.append(_losses_and_gradient(log_q, q, axis, samples, out, per_member=per_member))
    return LossResult(torch.stack(losses).sum(0), torch.cat(scores, 1) if want_scores else None, gradient)


def _log_softmax_and_softmax(
    z: Tensor, axis: int, log_q: Tensor | None = None, q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute both, into `log_q` and `q` where given; for many classes log q from the softmax: max q = 1 / total."""
    if axis == 2:
        log_q = torch.log_softmax(z, axis, out=log_q)
        return log_q, torch.exp(log_q, out=q)
    if q is None or z.is_contiguous():
        q = torch.softmax(z, axis, out=q)
    else:  # member by member, each contiguous: avoids a copy
        for own_z, own_q in zip(z.flatten(0, 1), q.flatten(0, 1), strict=True):
            torch.softmax(own_z, 1, out=own_q)
    log_total = z.amax(axis, keepdim=True).sub_(q.amax(axis, keepdim=True).log_())
    return torch.sub(z, log_total, out=torch.empty_like(q) if log_q is None else log_q), q  # contiguous, as q


def _losses_and_gradient(
    log_q: Tensor, q: Tensor, axis: int, options: LossOptions, out: Tensor | None, *, per_member: bool
) -> Tensor:
    """Return losses of one piece and write its gradient to `out`, which may be `q`."""
    num_runs, num_members = q.shape[:2]
    lam = options.diversity if not isinstance(options.diversity, Tensor) else options.diversity.view(-1, 1, 1, 1)
    strength = lam / num_members if options.alpha is None else lam * options.alpha.view(1, -1, 1, 1)  # λ α^k
    mixture, factor = None, lam  # their product is λ q̄
    if options.diversity_is_zero:
        pass
    elif options.mixture is not None:
        mixture = _with_member_axis(options.mixture, axis)
    elif options.alpha is None:
        mixture, factor = q.sum(1, keepdim=True), strength
    else:
        mixture = torch.matmul(options.alpha, q.view(num_runs, num_members, -1)).view(num_runs, 1, *q.shape[2:])
    # from here on, everything times its scale
    s, b = _shared_terms(options, axis, q, mixture, factor)
    own = 1 - lam
    if isinstance(s, Tensor):
        q.mul_(s)
    else:
        own, strength = s * own, s * strength
    losses = None
    if log_q.device.type == "cpu":
        losses = _fast_losses(log_q, q, b, strength, per_member=per_member)
        if not math.isfinite(losses.sum().item() if per_member else losses.item()):
            losses = None
    if losses is None:  # 0·(-inf): a class or sample of weight 0 adds nothing, even with infinite logits
        if isinstance(s, Tensor):
            q.masked_fill_(s == 0, 0.0)
            b = b.masked_fill(s == 0, 0.0)
        u = b - strength * q
        losses = torch.where(u == 0, 0.0, u * log_q).sum((2, 3))
        losses = losses if per_member else losses.sum()
    if out is not None:
        result = out if out.dtype == q.dtype else q
        if isinstance(own, Tensor):
            torch.addcmul(b, q, own, out=result)
        else:
            torch.add(b, q, alpha=own, out=result)
        if result is not out:
            out.copy_(result)
    return losses


def _fast_losses(log_q: Tensor, q: Tensor, b: Tensor, strength: float | Tensor, *, per_member: bool) -> Tensor:
    """Losses <b - strength q^k, log q^k>, `(R, K)`, or their sum; NaN where a log-probability is -inf."""
    if q.numel() <= SMALL:  # fewest operations
        u = torch.addcmul(b, q, strength, value=-1) if isinstance(strength, Tensor) else b.sub(q, alpha=strength)
        return u.mul_(log_q).sum((2, 3)) if per_member else torch.dot(u.flatten(), log_q.view(-1))
    log_q, q = log_q.flatten(2), q.flatten(2)
    if b.shape[1] == 1:
        losses = torch.bmm(log_q, b.flatten(1).unsqueeze(2)).squeeze(2)
    else:
        losses = torch.linalg.vecdot(b.flatten(2), log_q)
    if not per_member and not isinstance(strength, Tensor):
        return losses.sum() - strength * torch.dot(q.view(-1), log_q.view(-1))
    strength = strength.flatten(1) if isinstance(strength, Tensor) else strength
    losses = losses - strength * torch.linalg.vecdot(q, log_q)
    return losses if per_member else losses.sum()


def _shared_terms(
    options: LossOptions, axis: int, q: Tensor, mixture: Tensor | None, factor: float | Tensor
) -> tuple[float | Tensor, Tensor]:
    """Return s and b = λ s q̄ - w∘p, with λ q̄ = `factor * mixture`, both times the scale.

    The member axis has size 1, or K where each member has its own scale; s is a number or has class axis 1.
    """
    scale, smoothing, num_classes = options.scale, options.smoothing(4), q.shape[axis]
    if isinstance(scale, Tensor):
        scale = (scale.unsqueeze(1) if scale.ndim == 2 else scale).unsqueeze(axis)
    if options.has_probabilities:
        wp = _with_member_axis(options.weighted_target(num_classes, q.dtype), axis)
        total = wp.sum(axis, keepdim=True)
        return total * scale, (-wp if mixture is None else mixture * (factor * total) - wp) * scale
    s: float | Tensor
    index = options.target.unsqueeze(1).unsqueeze(axis)
    hit, s = scale * (smoothing - 1), scale
    if options.weight is not None:
        own = options.weight[index]
        hit, s = hit * own, ((1 - smoothing) * own + smoothing * options.weight.mean()) * scale
    if mixture is not None:
        b = mixture * (factor * s)
    else:
        members = scale.shape[1] if isinstance(scale, Tensor) else 1
        b = q.new_zeros(q.shape[0], members, *q.shape[2:])
    index = index.expand(b.shape[0], b.shape[1], *index.shape[2:])
    b.scatter_add_(axis, index, hit.expand_as(index) if isinstance(hit, Tensor) else b.new_full(index.shape, hit))
    if options.has_smoothing:
        spread = scale * (smoothing / num_classes)
        b -= spread if options.weight is None else spread * options.weight.view([-1, 1] if axis == 2 else [-1])
    return s, b


def _scores(log_q: Tensor, axis: int, target: Tensor) -> Tensor:
    """Cross entropy of the members' mean, `(R, N)`; finite where every probability underflows."""
    index = target.unsqueeze(1).expand(-1, log_q.shape[1], -1).unsqueeze(axis)
    hit = log_q.gather(axis, index).clamp_(min=torch.finfo(log_q.dtype).min)
    return _mixture_scores(hit)


def _mixture_scores(hit: Tensor) -> Tensor:
    """Cross entropies `(R, N)` of the members' mean, from the labels' finite log-probabilities, `(R, K, ...)`."""
    # `torch.logsumexp` takes twice as many operations
    largest = hit.amax(1, keepdim=True)
    return (hit - largest).exp_().mean(1, keepdim=True).log_().add_(largest).neg_().view(hit.shape[0], -1)


def _with_member_axis(values: Tensor, axis: int) -> Tensor:
    """`(R, N, C)` as `(R, 1, N, C)`, or `(R, 1, C, N)` for the class axis 2."""
    return (values if axis == 3 else values.mT.contiguous()).unsqueeze(1)
