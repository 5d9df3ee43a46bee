"""Amended Cross Entropy of linear heads, in chunks of the logits `(K, N, C)`.

A chunk holds some rows; on a CUDA GPU, some classes of all rows where the options allow it (`kernels.linear_gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchace import _checks
from torchace.functional._options import resolve_options
from torchace.kernels import MAX_MEMBERS, total_loss, value_and_gradient
from torchace.kernels.options import LossOptions, compute_dtype, fold_mean, runs_kernels

Gradients = list[Tensor | None]  # in features, weights and bias

# Logits of a chunk: 64 MiB in float32 on a CPU; on a GPU so many that matrix products run at full rate.
CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}
LARGEST_LOSS_SCALE = 1 << 14


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
        chunk_rows: Rows of a chunk. By default chunks have 64 MiB (1 GiB on a GPU); class indices on a CUDA GPU use
            chunks of classes, of 768 MiB.

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
    if chunk_rows is not None:
        _checks.check_count(chunk_rows, "chunk_rows")
    (num_members, num_classes, _), num_samples = head_weight.shape, features.shape[-2]
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
    loss_scale = _loss_scale(features) if reduction == "mean" else 1.0
    options = options.replace(scale=options.scale * loss_scale)
    rows: int | None = None
    if chunk_rows is not None or not _fits_gpu(features, head_weight, head_bias, target):
        rows = chunk_rows or max(1, CHUNK.get(features.device.type, CHUNK["cpu"]) // (num_members * num_classes))
    total = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        features, head_weight, head_bias, options, loss_scale, rows, torch.is_grad_enabled()
    )
    return total if empty is None else total + empty


def _logits(features: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> Tensor:
    """Return the logits, `(K, N, C)`."""
    logits = torch.matmul(features, head_weight.transpose(1, 2))
    return logits if head_bias is None else logits + head_bias.unsqueeze(1).to(logits.dtype)


class _LinearLoss(torch.autograd.Function):
    """Compute value and gradients in the forward; the backward scales the gradients in place."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None,
        options: LossOptions,
        loss_scale: float,
        rows: int | None,
        with_grad: bool,
    ) -> Tensor:
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        ctx.dtypes = [None if source is None else source.dtype for source in (features, head_weight, head_bias)]
        ctx.by_classes = rows is None
        if rows is None:
            from torchace.kernels import linear_gpu

            features = features.to(_product_dtype(features))
            total, ctx.grads = linear_gpu.value_and_gradients(
                features, head_weight, head_bias, options, wanted, loss_scale=loss_scale
            )
        else:
            total, ctx.grads = _by_rows(features, head_weight, head_bias, options, wanted, loss_scale, rows)
        return total / loss_scale

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
        scaled: Gradients = []
        for grad, dtype in zip(grads, ctx.dtypes, strict=True):
            if grad is not None and ctx.by_classes:
                from torchace.kernels import ace_gpu

                grad = ace_gpu.scale_gradient(grad, outputs[0])
            elif grad is not None:  # not rounded to half precision first: a loss scale of 65,536 is infinite there
                grad = grad.mul_(outputs[0])
            scaled.append(None if grad is None else grad.to(dtype))
        return *scaled, None, None, None, None


def _by_rows(
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    options: LossOptions,
    wanted: Sequence[bool],
    loss_scale: float,
    rows: int,
) -> tuple[Tensor, Gradients]:
    """Compute some rows at a time; gradients in float32 for half precision, in which sums may overflow."""
    total = torch.zeros((), dtype=compute_dtype(features), device=features.device)
    grads = [
        torch.zeros_like(source, dtype=compute_dtype(source)) if want and source is not None else None
        for source, want in zip((features, head_weight, head_bias), wanted, strict=True)
    ]
    for start in range(0, features.shape[-2], rows):
        chunk = slice(start, start + rows)
        part = features[..., chunk, :]
        logits = _logits(part, head_weight, head_bias)  # (K, n, C)
        value, gradient = value_and_gradient(logits, options.samples(chunk), want_gradient=any(wanted))
        total += value
        if gradient is not None:
            _add_gradients(grads, chunk, part, head_weight, gradient)
    if loss_scale != 1:
        grads = [None if grad is None else grad.div_(loss_scale) for grad in grads]
    return total, grads


def _add_gradients(grads: Gradients, rows: slice, features: Tensor, head_weight: Tensor, logits_grad: Tensor) -> None:
    """Add the contribution of some rows, from the gradient in their logits, `(K, n, C)`."""
    # a sum over many rows may be infinite in float16, though their mean is not
    dtype = torch.float32 if logits_grad.dtype == torch.float16 else logits_grad.dtype
    for k, own in enumerate(logits_grad):  # member by member: (n, C) x (C, D)
        if grads[0] is not None:
            grad = grads[0] if features.ndim == 2 else grads[0][k]
            grad[rows] += (own @ head_weight[k].to(own.dtype)).to(grad.dtype)
        if grads[1] is not None:
            inputs = features if features.ndim == 2 else features[k]
            grads[1][k] += (own.to(dtype).mT @ inputs.to(dtype)).to(grads[1].dtype)
    if grads[2] is not None:
        grads[2] += logits_grad.sum(1, dtype=grads[2].dtype)


def _loss_scale(features: Tensor) -> float:
    """Return a factor against underflow in half precision, divided out after gradients are summed over rows."""
    if _product_dtype(features) not in (torch.float16, torch.bfloat16):
        return 1.0
    return float(min(LARGEST_LOSS_SCALE, 1 << max(0, features.shape[-2] - 1).bit_length()))


def _fits_gpu(features: Tensor, head_weight: Tensor, head_bias: Tensor | None, target: Tensor) -> bool:
    """Whether all tensors are plain, on one GPU that Triton supports, with class indices and one product dtype."""
    given = [features, head_weight, target] if head_bias is None else [features, head_weight, head_bias, target]
    lowered = _product_dtype(features) != features.dtype
    return (
        features.is_cuda
        and features.ndim == 2
        and all(type(value) in (Tensor, torch.nn.Parameter) and value.device == features.device for value in given)
        and not target.is_floating_point()
        and head_weight.dtype == (torch.float32 if lowered else features.dtype)
        and features.numel() > 0
        and len(head_weight) <= MAX_MEMBERS
        and runs_kernels(features.device)
    )


def _product_dtype(features: Tensor) -> torch.dtype:
    """Dtype of products with the features."""
    device = features.device.type
    lowered = torch.is_autocast_enabled(device) and features.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowered else features.dtype


def _check_shapes(features: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> None:
    shapes = ((features, "features", "(N, D) or (K, N, D)", (2, 3)), (head_weight, "head_weight", "(K, C, D)", (3,)))
    for value, name, axes, ndims in shapes:
        _checks.check_tensor(value, name)
        if value.ndim not in ndims:
            raise ValueError(f"Expected `{name}` of shape {axes}, but got {_checks.shape_of(value)}.")
        _checks.check_floating(value, name)
    num_members = "K" if features.ndim == 2 else len(features)
    if (
        head_weight.shape[2] != features.shape[-1]
        or not head_weight.shape[0]
        or not head_weight.shape[1]
        or num_members not in ("K", len(head_weight))
    ):
        raise ValueError(
            f"Expected `head_weight` of shape ({num_members}, C, {features.shape[-1]}) for features "
            f"{_checks.shape_of(features)}, but got {_checks.shape_of(head_weight)}."
        )
    if _product_dtype(features) != _product_dtype(head_weight):
        raise TypeError(
            f"Expected `features` and `head_weight` of one type, but got {features.dtype} and {head_weight.dtype}. "
            "Convert one of them, or use torch.autocast."
        )
    if head_bias is not None:
        _checks.check_shape(head_bias, "head_bias", _checks.shape_of(head_weight)[:2], "or None")
