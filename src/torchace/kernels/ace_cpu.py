"""Amended cross entropy on the CPU: value and closed-form gradient together, in pieces that stay in the cache.

With w∘p the weighted target, s = Σ_c w_c p_c and b = λ s q̄ - w∘p, which all members share,

    e^k = <b, log q^k> - λ s α^k <q^k, log q^k>        ∂e^k/∂z^k = s (1-λ) q^k + b

so a piece needs one softmax with its logarithm, one weighted mean over members and three dot products; the logits are
read once and the gradient is written once. It is kept for the backward, which is a multiplication by one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchace.kernels.terms import Terms

# Elements of a piece: log-probabilities and probabilities of 2 MiB each in float32, measured best on two cores with
# 1 MiB of L2 each and a shared L3 (docs/LOG.md).
PIECE = 1 << 19


def loss(logits: Tensor, terms: Terms, composite: Callable[[Tensor], Tensor]) -> Tensor:
    """The summed loss, a scalar. `composite` is the same loss in plain PyTorch, for second derivatives."""
    return AceCpu.apply(logits, terms, composite)  # type: ignore[no-untyped-call]


class AceCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, terms: Terms, composite: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.composite = composite
        exactly = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
        with exactly:  # the products below must not be rounded to bf16
            value, gradient = _value_and_gradient(logits, terms, want_gradient=ctx.needs_input_grad[0])
        if not math.isfinite(value):  # 0·(-inf): rare, and the composite knows how
            value = composite(logits).item()
        # logits: for a second derivative; the very input, not a copy
        ctx.save_for_backward(logits, gradient)
        return torch.tensor(value, dtype=terms.alpha.dtype, device=logits.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        logits, gradient = ctx.saved_tensors
        grad = grads[0]
        if torch.is_grad_enabled():  # create_graph=True: differentiate what this gradient was derived from
            (gradient,) = torch.autograd.grad(ctx.composite(logits), logits, grad, create_graph=True)
            return gradient, None, None
        if not _is_one(grad):
            gradient = gradient * grad
        return gradient.to(logits.dtype), None, None


def _is_one(grad: Tensor) -> bool:
    try:
        return grad.item() == 1.0
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a batch of gradients, not to be read
        return False


def _value_and_gradient(logits: Tensor, terms: Terms, *, want_gradient: bool) -> tuple[float, Tensor | None]:
    num_members, num_samples = logits.shape[:2]
    # float16 is kept in float32: rounded before a loss scale is applied, it would underflow all the same
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    gradient = torch.empty_like(logits, dtype=dtype) if want_gradient else None
    size = max(1, PIECE * num_samples // logits.numel())
    diversity = float(terms.diversity)
    total = 0.0
    for start in range(0, num_samples, size):
        piece = slice(start, start + size)
        log_q, q = _log_softmax_and_softmax(logits[:, piece].to(terms.alpha.dtype))  # (K, n, C, ...)
        flat_log_q = log_q.view(num_members, -1)
        mixture = _mixture(terms, q, piece) if diversity else None
        s, b = _shared_terms(terms, piece, mixture, diversity, log_q)
        scale = _part(terms.scale, piece, log_q)
        b = b * scale

        if b.ndim < log_q.ndim:  # one b for all members
            values = torch.mv(flat_log_q, b.reshape(-1))
        else:
            values = torch.linalg.vecdot(b.reshape(num_members, -1), flat_log_q)
        q.mul_(s * scale)
        if diversity:
            entropies = torch.linalg.vecdot(q.view(num_members, -1), flat_log_q)
            values = values - diversity * terms.alpha * entropies
        total += values.sum().item()
        if gradient is not None:
            if gradient.dtype == q.dtype:
                torch.add(b, q, alpha=1 - diversity, out=gradient[:, piece])
            else:  # bfloat16: rounded once, here
                gradient[:, piece] = torch.add(b, q, alpha=1 - diversity)
    return total, gradient


def _log_softmax_and_softmax(z: Tensor) -> tuple[Tensor, Tensor]:
    """Both with one exp, contiguous; three times faster than torch's log_softmax for ten classes, never slower."""
    log_q = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    torch.sub(z, z.amax(2, keepdim=True), out=log_q)
    q = log_q.exp()
    total = q.sum(2, keepdim=True)
    return log_q.sub_(total.log()), q.div_(total)


def _mixture(terms: Terms, q: Tensor, piece: slice) -> Tensor:
    """q̄ of this piece's samples, `(n, C, ...)`."""
    if terms.mixture is not None:
        return terms.mixture[piece]
    return torch.mm(terms.alpha[None], q.view(q.shape[0], -1)).view(q.shape[1:])


def _shared_terms(
    terms: Terms, piece: slice, mixture: Tensor | None, diversity: float, log_q: Tensor
) -> tuple[float | Tensor, Tensor]:
    """s, a number or `(n, 1, ...)`, and b = λ s q̄ - w∘p, `(n, C, ...)`."""
    target, weight, smoothing = terms.target[piece], terms.weight, terms.label_smoothing
    s: float | Tensor = 1.0
    if terms.has_probabilities:
        wp = terms.weighted_target(log_q.shape[2], piece)
        s = wp.sum(1, keepdim=True)
        return s, (-wp if mixture is None else mixture * (diversity * s) - wp)

    index = target.unsqueeze(1)  # (n, 1, ...)
    hit: Tensor | None = None
    if weight is not None:
        hit = (1 - smoothing) * weight[index]
        s = hit + smoothing * weight.mean()
    b = log_q.new_zeros(log_q.shape[1:]) if mixture is None else mixture * (diversity * s)
    b.scatter_add_(1, index, b.new_full(index.shape, smoothing - 1) if hit is None else -hit)
    if smoothing:
        spread = smoothing / log_q.shape[2]
        b -= spread if weight is None else spread * weight.reshape(-1, *[1] * (b.ndim - 2))
    return s, b


def _part(scale: float | Tensor, piece: slice, log_q: Tensor) -> float | Tensor:
    """The scale of this piece's samples, broadcast over classes: a number, `(n, 1, ...)` or `(K, n, 1, ...)`."""
    if isinstance(scale, float):
        return scale
    if scale.ndim == log_q.ndim - 2:
        return scale[piece].unsqueeze(1)
    return scale[:, piece].unsqueeze(2)
