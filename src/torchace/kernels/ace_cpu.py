"""Amended cross entropy on the CPU: value and closed-form gradient together, in pieces that stay in the cache.

With w∘p the weighted target, s = Σ_c w_c p_c and b = λ s q̄ - w∘p, which all members share,

    e^k = <b, log q^k> - λ s α^k <q^k, log q^k>        ∂e^k/∂z^k = s (1-λ) q^k + b

so a piece needs one softmax with its logarithm, one weighted mean over members and three dot products; the logits are
read once and the gradient is written once. It is kept for the backward, which is a multiplication by one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchace.kernels.terms import Terms

# Elements of a piece: log-probabilities and probabilities of 2 MiB each in float32, measured best on two cores with
# 1 MiB of L2 each and a shared L3 (docs/LOG.md).
PIECE = 1 << 19
FEW_CLASSES = 64


def loss(logits: Tensor, terms: Terms, composite: Callable[[Tensor], Tensor], given: Sequence[Tensor] = ()) -> Tensor:
    """The summed loss, a scalar.

    Args:
        logits: `(K, N, C, ...)`.
        terms: Everything else.
        composite: The same loss in plain PyTorch, for second derivatives.
        given: What the terms were made of. A backward after one of them was changed in place is refused.
    """
    if not torch.is_grad_enabled():  # a Function's forward does not know, and would compute a gradient for nobody
        logits = logits.detach()
    return AceCpu.apply(logits, terms, composite, given)  # type: ignore[no-untyped-call]


class AceCpu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, terms: Terms, composite: Callable[[Tensor], Tensor], given: Sequence[Tensor]
    ) -> Tensor:
        ctx.composite = composite
        ctx.terms = terms
        value, gradient = _value_and_gradient(logits, terms, want_gradient=ctx.needs_input_grad[0])
        if not math.isfinite(value):  # 0·(-inf): rare, and the composite knows how
            value = composite(logits).item()
        # logits: for a second derivative or a second backward; the very input, not a copy
        # The rest: autograd then refuses a backward after an in-place change of them, as it does for torch's losses.
        ctx.save_for_backward(logits, *given)
        ctx.gradient = gradient
        return torch.tensor(value, dtype=terms.alpha.dtype, device=logits.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        logits, *_ = ctx.saved_tensors
        grad = grads[0]
        if torch.is_grad_enabled():  # create_graph=True: differentiate what this gradient was derived from
            (gradient,) = torch.autograd.grad(ctx.composite(logits), logits, grad, create_graph=True)
            return gradient, None, None, None
        gradient, ctx.gradient = ctx.gradient, None  # given away: whoever receives it need not copy it
        if gradient is None:  # a second backward of a retained graph
            gradient = _value_and_gradient(logits, ctx.terms, want_gradient=True)[1]
        assert gradient is not None
        if not _is_one(grad):
            gradient = gradient * grad
        return gradient.to(logits.dtype), None, None, None


def _is_one(grad: Tensor) -> bool:
    try:
        return grad.item() == 1.0
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a batch of gradients, not to be read
        return False


def _value_and_gradient(logits: Tensor, terms: Terms, *, want_gradient: bool) -> tuple[float, Tensor | None]:
    if torch.is_autocast_enabled("cpu"):  # the products below must not be rounded to bf16
        with torch.autocast("cpu", enabled=False):
            return _value_and_gradient(logits, terms, want_gradient=want_gradient)
    num_members, num_samples = logits.shape[:2]
    # float16 is kept in float32: rounded before a loss scale is applied, it would underflow all the same
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    gradient = torch.empty_like(logits, dtype=dtype) if want_gradient else None
    size = max(1, PIECE * num_samples // logits.numel())
    diversity = float(terms.diversity)
    total = 0.0
    # allocated once: fresh memory for every piece would cost more than the arithmetic
    elements = min(size, num_samples) * (logits.numel() // num_samples)
    work = terms.alpha.new_empty(elements), terms.alpha.new_empty(elements)
    for start in range(0, num_samples, size):
        piece = slice(start, start + size)
        z = logits[:, piece].to(terms.alpha.dtype)
        log_q, q = (part[: z.numel()].view(z.shape) for part in work)  # (K, n, C, ...), contiguous
        _log_softmax_and_softmax(z, log_q, q)
        flat_log_q, flat_q = log_q.view(num_members, -1), q.view(num_members, -1)
        mixture = _mixture(terms, q, piece) if diversity else None
        scale = _part(terms.scale, piece, log_q)
        weight, b = _shared_terms(terms, piece, mixture, diversity, log_q, scale)  # s and b times the scale

        if b.ndim < log_q.ndim:  # one b for all members
            values = torch.mv(flat_log_q, b.reshape(-1))
        else:
            values = torch.linalg.vecdot(b.reshape(num_members, -1), flat_log_q)
        total += values.sum().item()
        if isinstance(weight, Tensor):
            q.mul_(weight)
            weight = 1.0
        if diversity and terms.uniform:
            total -= diversity * weight / num_members * torch.dot(flat_q.view(-1), flat_log_q.view(-1)).item()
        elif diversity:
            total -= diversity * weight * torch.dot(terms.alpha, torch.linalg.vecdot(flat_q, flat_log_q)).item()
        if gradient is not None:
            own = weight * (1 - diversity)
            if gradient.dtype == q.dtype:
                torch.add(b, q, alpha=own, out=gradient[:, piece])
            else:  # bfloat16: rounded once, here
                gradient[:, piece] = torch.add(b, q, alpha=own)
    return total, gradient


def _log_softmax_and_softmax(z: Tensor, log_q: Tensor, q: Tensor) -> None:
    """Writes both, with one exp.

    torch's softmax has a faster exp than `torch.exp`, but is slow for few classes; the largest probability is the
    inverse of what all were divided by.
    """
    largest = z.amax(2, keepdim=True)
    if z.shape[2] < FEW_CLASSES:
        torch.exp(torch.sub(z, largest, out=log_q), out=q)
        total = q.sum(2, keepdim=True)
        q.div_(total)
        log_q.sub_(total.log())
        return
    if z.is_contiguous():
        torch.softmax(z, 2, out=q)
    else:  # member by member, each of them contiguous: torch would copy all first
        for own_z, own_q in zip(z, q, strict=True):
            torch.softmax(own_z, 1, out=own_q)
    torch.sub(z, largest - q.amax(2, keepdim=True).log(), out=log_q)


def _mixture(terms: Terms, q: Tensor, piece: slice) -> Tensor:
    """q̄ of this piece's samples, `(n, C, ...)`."""
    if terms.mixture is not None:
        return terms.mixture[piece]
    return torch.mm(terms.alpha[None], q.view(q.shape[0], -1)).view(q.shape[1:])


def _shared_terms(
    terms: Terms, piece: slice, mixture: Tensor | None, diversity: float, log_q: Tensor, scale: float | Tensor
) -> tuple[float | Tensor, Tensor]:
    """s, a number or `(n, 1, ...)`, and b = λ s q̄ - w∘p, `(n, C, ...)`; both times the scale.

    A scale of each member's own gives both a member axis.
    """
    target, class_weight, smoothing = terms.target[piece], terms.weight, terms.label_smoothing
    if terms.has_probabilities:
        wp = terms.weighted_target(log_q.shape[2], piece)
        s = wp.sum(1, keepdim=True)
        return s * scale, (-wp if mixture is None else mixture * (diversity * s) - wp) * scale

    index = target.unsqueeze(1)  # (n, 1, ...)
    if class_weight is None:
        hit, weight = (1 - smoothing) * scale, scale  # s = 1
    else:
        own = class_weight[index]
        hit, weight = (1 - smoothing) * own * scale, ((1 - smoothing) * own + smoothing * class_weight.mean()) * scale
    shape = log_q.shape if isinstance(scale, Tensor) and scale.ndim == log_q.ndim else log_q.shape[1:]
    b = log_q.new_zeros(shape) if mixture is None else mixture * (diversity * weight)
    axis = b.ndim - target.ndim
    index = index.expand(*b.shape[:axis], 1, *b.shape[axis + 1 :])
    b.scatter_add_(axis, index, -hit.expand(index.shape) if isinstance(hit, Tensor) else b.new_full(index.shape, -hit))
    if smoothing:
        spread = smoothing / log_q.shape[2] * scale
        b -= spread if class_weight is None else spread * class_weight.reshape(-1, *[1] * (target.ndim - 1))
    return weight, b


def _part(scale: float | Tensor, piece: slice, log_q: Tensor) -> float | Tensor:
    """The scale of this piece's samples, broadcast over classes: a number, `(n, 1, ...)` or `(K, n, 1, ...)`."""
    if isinstance(scale, float):
        return scale
    if scale.ndim == log_q.ndim - 2:
        return scale[piece].unsqueeze(1)
    return scale[:, piece].unsqueeze(2)
