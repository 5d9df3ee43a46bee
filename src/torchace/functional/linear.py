"""Amended Cross Entropy of linear heads, in chunks of rows of the logits `(K, N, C)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchace import _checks
from torchace.functional._options import resolve_options
from torchace.kernels import total_loss, value_and_gradient
from torchace.kernels.options import LossOptions, compute_dtype, fold_mean

# Logits of a chunk: 64 MiB in float32 on a CPU; on a GPU so many that matrix products run at full rate.
CPU_CHUNK, GPU_CHUNK = 1 << 24, 1 << 28


def linear_amended_cross_entropy(
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    sample_weight: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    r"""The Amended Cross Entropy of K linear heads, without holding all logits in memory.

    Equal to `amended_cross_entropy` of the logits `features @ head_weight.mT + head_bias[:, None]` up to rounding, in
    the memory of a chunk of logits. Second derivatives are not supported. The gradient of shared features is the sum
    over members: for a shared trunk, pass `average_gradients(features, K)`.

    Args:
        features: Shared features `(N, D)`, or each member's own, `(K, N, D)`.
        head_weight: `(K, C, D)`, such as `SMOC.head.weight`; for one shared head, `weight.expand(K, C, D)`.
        head_bias: `(K, C)`, or None.
        target: Class indices `(N,)`, or class probabilities `(N, C)`.
        diversity: λ in [0, 1], a number or a 0-dimensional tensor.
        member_weights: The paper's α, `(K,)`; uniform by default.
        sample_weight: `(N,)` for all members or `(K, N)`.
        weight: Class weights, `(C,)`.
        ignore_index: Target class to ignore.
        label_smoothing: Amount of label smoothing, in [0, 1].
        reduction: `"mean"` or `"sum"` over samples, then summed over members.
        chunk_rows: Rows of a chunk; by default a chunk has 64 MiB, 1 GiB on a GPU.

    Returns:
        A scalar; in float32 for half precision.

    Example:
        >>> features, head = torch.randn(6, 4, requires_grad=True), ace.StackedLinear(4, 100, num_members=3)
        >>> target = torch.randint(100, (6,))
        >>> loss = linear_amended_cross_entropy(features, head.weight, head.bias, target, 0.5, chunk_rows=2)
        >>> torch.allclose(loss, ace.amended_cross_entropy(head(features), target, 0.5))
        True
    """
    _check_shapes(features, head_weight, head_bias)
    _checks.check_choice(reduction, "reduction", ("mean", "sum"))
    (num_members, num_classes, _), num_samples = head_weight.shape, features.shape[-2]
    if chunk_rows is None:
        chunk_rows = max(1, (GPU_CHUNK if features.is_cuda else CPU_CHUNK) // (num_members * num_classes))
    _checks.check_count(chunk_rows, "chunk_rows")
    options = resolve_options(
        features.new_empty(()).expand(num_members, num_samples, num_classes),  # logits that take no memory
        target,
        diversity,
        member_weights=member_weights,
        sample_weight=sample_weight,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    if not _checks.is_eager():  # a transform needs the loss as plain operations
        return total_loss(_logits(features, head_weight, head_bias), options)
    if target.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "Expected a `target` that needs no gradient. Give target.detach(), or use amended_cross_entropy of the "
            "logits, which has a gradient in it."
        )
    options, empty = fold_mean(options, compute_dtype(features))
    total = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        features, head_weight, head_bias, options, chunk_rows, torch.is_grad_enabled()
    )
    return total if empty is None else total + empty


def _logits(features: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> Tensor:
    logits = torch.matmul(features, head_weight.transpose(1, 2))  # (K, N, C)
    return logits if head_bias is None else logits + head_bias.unsqueeze(1).to(logits.dtype)


class _LinearLoss(torch.autograd.Function):
    """Compute value and gradients in the forward, chunk by chunk; the backward scales the gradients in place."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None,
        options: LossOptions,
        rows: int,
        with_grad: bool,
    ) -> Tensor:
        sources = (features, head_weight, head_bias)
        ctx.dtypes = [None if source is None else source.dtype for source in sources]
        # in float32 for half precision, in which sums may overflow
        ctx.grads = [
            torch.zeros_like(source, dtype=compute_dtype(source))
            if source is not None and with_grad and needed
            else None
            for source, needed in zip(sources, ctx.needs_input_grad[:3], strict=True)
        ]
        want_gradient = any(grad is not None for grad in ctx.grads)
        total = torch.zeros((), dtype=compute_dtype(features), device=features.device)
        for start in range(0, features.shape[-2], rows):
            chunk = slice(start, start + rows)
            part = features[..., chunk, :]
            logits = _logits(part, head_weight, head_bias)
            if logits.dtype == torch.float16:  # the gradient of a mean underflows in float16
                logits = logits.float()
            value, gradient = value_and_gradient(logits, options.samples(chunk), want_gradient=want_gradient)
            total += value
            if gradient is not None:
                with torch.autocast(features.device.type, enabled=False):  # which would round to float16 again
                    _add_gradients(ctx.grads, chunk, part, head_weight, gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # not once_differentiable, which looks at the incoming gradient alone
            raise RuntimeError(
                "Expected a first derivative of linear_amended_cross_entropy, but got create_graph=True. For a second "
                "one use amended_cross_entropy of the logits."
            )
        if ctx.grads is None:
            raise RuntimeError(
                "Expected one backward through linear_amended_cross_entropy, but got a second. Call it again."
            )
        grads, ctx.grads = ctx.grads, None  # handed over: they are as large as the weights
        # scaled before they are rounded: a loss scale of 65,536 is infinite in float16
        scaled = [
            None if grad is None else grad.mul_(outputs[0]).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _add_gradients(
    grads: list[Tensor | None], rows: slice, features: Tensor, head_weight: Tensor, logits_grad: Tensor
) -> None:
    """Add the contribution of some rows, from the gradient in their logits, `(K, n, C)`."""
    dtype = logits_grad.dtype
    for k, own in enumerate(logits_grad):  # member by member: (n, C) x (C, D)
        if grads[0] is not None:
            grad = grads[0] if features.ndim == 2 else grads[0][k]
            grad[rows] += (own @ head_weight[k].to(dtype)).to(grad.dtype)
        if grads[1] is not None:
            inputs = features if features.ndim == 2 else features[k]
            grads[1][k] += (own.mT @ inputs.to(dtype)).to(grads[1].dtype)
    if grads[2] is not None:
        grads[2] += logits_grad.sum(1, dtype=grads[2].dtype)


def _check_shapes(features: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> None:
    shapes = ((features, "features", "(N, D) or (K, N, D)", (2, 3)), (head_weight, "head_weight", "(K, C, D)", (3,)))
    for value, name, axes, ndims in shapes:
        _checks.check_tensor(value, name)
        _checks.check_floating(value, name)
        if value.ndim not in ndims:
            raise ValueError(f"Expected `{name}` of shape {axes}, but got {_checks.shape_of(value)}.")
    num_members, num_classes, size = head_weight.shape
    if size != features.shape[-1] or features.shape[:-2] not in ((), (num_members,)) or not num_members * num_classes:
        raise ValueError(
            f"Expected `head_weight` of shape (K, C, {features.shape[-1]}) for features {_checks.shape_of(features)}, "
            f"but got {_checks.shape_of(head_weight)}."
        )
    if features.dtype != head_weight.dtype and not torch.is_autocast_enabled(features.device.type):
        raise TypeError(
            f"Expected `features` and `head_weight` of one type, but got {features.dtype} and {head_weight.dtype}. "
            "Convert one of them, or use torch.autocast."
        )
    if head_bias is not None:
        _checks.check_shape(head_bias, "head_bias", (num_members, num_classes), "or None")
