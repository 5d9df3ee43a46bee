"""Amended Cross Entropy of linear heads on one feature vector, without the logits of all samples at once.

With C classes of a language model's vocabulary, the logits `(K, N, C)` are what does not fit in memory. Here a few rows
at a time are multiplied by the heads, give their part of the value and of the gradients, and are forgotten: the memory
beside weights and gradients is that of a chunk, whatever N is. On a CUDA GPU a chunk is of classes instead, all rows of
them (`kernels.linear_gpu`); what that form does not know is computed by rows there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchace import _checks
from torchace.functional._members import compute_dtype
from torchace.functional.ace import MOST_MEMBERS, amended_cross_entropy
from torchace.kernels.available import runs_kernels
from torchace.kernels.terms import Terms

Gradients = list[Tensor | None]  # in features, weights and bias

# Logits of a chunk: 64 MiB in float32 on a CPU; on a GPU so many that matrix products run at full rate.
CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}


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
    r"""The Amended Cross Entropy of K linear heads on shared features, never holding all their logits.

    Equal to `amended_cross_entropy` of the logits `features @ head_weight.mT + head_bias[:, None]` to rounding, value
    and gradients, in the memory of a chunk of logits. Gradients are accumulated in float32 for half precision; there is
    no second derivative. The features' gradient is the sum over members: for a shared trunk, give it
    `average_gradients(features, K)`.

    Args:
        features: `(N, D)`.
        head_weight: `(K, C, D)`, such as `SMOC.head.weight`.
        head_bias: `(K, C)`, or None.
        target: Class indices `(N,)`, or class probabilities `(N, C)`.
        diversity: λ in [0, 1], a number or a 0-dimensional tensor.
        member_weights: The paper's α, `(K,)`; uniform unless given.
        sample_weight: `(N,)` for all members or `(K, N)` for each.
        weight: Class weights, `(C,)`.
        ignore_index: Class index that does not count.
        label_smoothing: Share of the target that is spread evenly over the classes, in [0, 1].
        reduction: `"mean"` or `"sum"` over samples, then summed over members.
        chunk_rows: Rows at a time; as many as make chunks of 64 MiB (1 GiB on a GPU) unless given. Without it, class
            indices on a CUDA GPU are taken some classes at a time, in chunks of 768 MiB.

    Returns:
        A scalar; in float32 for half precision.

    Example:
        >>> features, head = torch.randn(6, 4, requires_grad=True), ace.StackedLinear(4, 100, num_members=3)
        >>> target = torch.randint(100, (6,))
        >>> loss = linear_amended_cross_entropy(features, head.weight, head.bias, target, 0.5, chunk_rows=2)
        >>> torch.allclose(loss, ace.amended_cross_entropy(head(features), target, 0.5))
        True
        >>> loss.backward()
        >>> features.grad.shape, head.weight.grad.shape
        (torch.Size([6, 4]), torch.Size([3, 100, 4]))
    """
    _check_shapes(features, head_weight, head_bias)
    _checks.check_choice(reduction, "reduction", ("mean", "sum"))
    if chunk_rows is not None:
        _checks.check_count(chunk_rows, "chunk_rows")
    num_members, num_classes = head_weight.shape[:2]
    _checks.check_diversity(diversity)
    _checks.check_fraction(label_smoothing, "label_smoothing")
    if weight is not None:
        _checks.check_class_weight(weight, num_classes)
    loss = partial(
        amended_cross_entropy,
        diversity=diversity,
        member_weights=member_weights,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    # The target is checked here as a whole, on logits that take no memory.
    empty = torch.empty((), dtype=features.dtype, device=features.device).expand(
        num_members, len(features), num_classes
    )
    probabilities = _checks.check_target(target, empty, ignore_index=ignore_index)
    if not _checks.is_eager():  # a transform needs the loss as plain operations
        logits = _logits(features, head_weight, head_bias)
        return loss(logits, target, sample_weight=sample_weight, reduction=reduction)
    if not torch.is_grad_enabled():  # a Function's forward does not know, and would compute gradients for nobody
        features, head_weight, target = features.detach(), head_weight.detach(), target.detach()
        head_bias = None if head_bias is None else head_bias.detach()
    if target.requires_grad:
        raise ValueError(
            "Expected a `target` that needs no gradient. Give target.detach(), or use amended_cross_entropy of the "
            "logits, which has a gradient in it."
        )
    if sample_weight is not None:
        like = torch.empty((), dtype=compute_dtype(features), device=features.device)
        sample_weight = _checks.as_sample_weight(sample_weight, num_members, (len(features),), like)
    share = None
    if reduction == "mean":
        share, sample_weight = _means(target, sample_weight, weight, ignore_index, probabilities, features)

    if chunk_rows is None and _fits_gpu(features, head_weight, head_bias, target, ignore_index):
        own = target.long()
        ignored = own == ignore_index
        outside = ~ignored & ((own < 0) | (own >= num_classes))  # nobody has looked on the device: NaN, as by rows
        scale = _scale(share, sample_weight, ignored, features).masked_fill(outside, torch.nan)
        own = own.masked_fill(ignored | outside, 0)
        terms = _terms(scale, head_weight, own, diversity, member_weights, weight, label_smoothing)
        form = partial(_by_classes, terms, reduction == "mean")
        total = _AtOnce.apply(features, head_weight, head_bias, form, _scaled_on_gpu)  # type: ignore[no-untyped-call]
        return total if share is None else total + 0 * share  # NaN for no samples: 1 / 0

    def chunk_loss(start: int, end: int, logits: Tensor) -> Tensor:
        own = None if sample_weight is None else sample_weight[..., start:end]
        return loss(logits, target[start:end], sample_weight=own, reduction="sum")

    rows = chunk_rows or max(1, CHUNK.get(features.device.type, CHUNK["cpu"]) // (num_members * num_classes))
    form = partial(_by_rows, chunk_loss, rows)
    total = _AtOnce.apply(features, head_weight, head_bias, form, _scaled)  # type: ignore[no-untyped-call]
    # NaN for no samples, as in torch: 1 / 0, which must not come to the gradients
    return total if share is None else total * share.masked_fill(share.isinf(), 0) + 0 * share


def _logits(features: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> Tensor:
    """`(K, N, C)`."""
    logits = torch.matmul(features, head_weight.transpose(1, 2))
    return logits if head_bias is None else logits + head_bias.unsqueeze(1).to(logits.dtype)


def _means(
    target: Tensor,
    sample_weight: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    probabilities: bool,
    features: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """What a sum over samples is multiplied by to be a mean as torch takes it, and the samples' weights, divided.

    With weights of the samples, every member's are divided by their own sum; a sum of 0 leaves 0.
    """
    dtype = compute_dtype(features)
    counted = torch.ones(len(features), dtype=dtype, device=features.device)
    if not probabilities:
        valid = target.long() != ignore_index
        counted = valid.to(dtype)
        if weight is not None:
            counted = counted * weight.detach().to(counted)[target.long().masked_fill(~valid, 0)]
    if sample_weight is None:
        return 1 / counted.sum(), None
    total = (sample_weight * counted).sum(-1, keepdim=True)
    return None, torch.where(total == 0, 0.0, sample_weight / torch.where(total == 0, 1.0, total))


class _AtOnce(torch.autograd.Function):
    """Value and gradients together; the gradients wait for the backward, which scales them in place."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None,
        form: Callable[[Tensor, Tensor, Tensor | None, Sequence[bool]], tuple[Tensor, Gradients]],
        scaled: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        total, ctx.grads = form(features, head_weight, head_bias, ctx.needs_input_grad[:3])
        ctx.dtypes = [None if source is None else source.dtype for source in (features, head_weight, head_bias)]
        ctx.scaled = scaled
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # they would pass for constants: once_differentiable asks the incoming one alone
            raise RuntimeError(
                "Expected a first derivative of linear_amended_cross_entropy, but got create_graph=True. For a second "
                "one use amended_cross_entropy of the logits."
            )
        if ctx.grads is None:
            raise RuntimeError(
                "Expected one backward through linear_amended_cross_entropy, but got a second. Call it again."
            )
        grads, ctx.grads = ctx.grads, None  # given away: they are as large as the weights
        pairs = zip(grads, ctx.dtypes, strict=True)
        return (
            *(None if grad is None else ctx.scaled(grad, outputs[0]).to(dtype) for grad, dtype in pairs),
            None,
            None,
        )


def _by_rows(
    chunk_loss: Callable[[int, int, Tensor], Tensor],
    rows: int,
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Gradients]:
    """Some rows at a time; gradients in float32 for half precision, in which their sums may be infinite."""
    total = torch.zeros((), dtype=compute_dtype(features), device=features.device)
    sources = (features, head_weight, head_bias)
    grads = [
        torch.zeros(source.shape, dtype=compute_dtype(source), device=source.device)
        if want and source is not None
        else None
        for source, want in zip(sources, wanted, strict=True)
    ]
    for start in range(0, len(features), rows):
        part = features[start : start + rows]
        logits = _logits(part, head_weight, head_bias)  # (K, n, C)
        if not any(wanted):
            total += chunk_loss(start, start + rows, logits)
            continue
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = chunk_loss(start, start + rows, logits)
            (pull,) = torch.autograd.grad(loss, logits)
        total += loss.detach()
        _add_gradients(grads, slice(start, start + rows), part, head_weight, pull)
    return total, grads


def _add_gradients(grads: list[Tensor | None], rows: slice, part: Tensor, head_weight: Tensor, pull: Tensor) -> None:
    """Adds what some rows contribute; `pull` is the loss's gradient in their logits, `(K, n, C)`."""
    if grads[0] is not None:
        for member, head in zip(pull, head_weight, strict=True):  # member by member: (n, C) x (C, D)
            grads[0][rows] += (member @ head.to(member.dtype)).to(grads[0].dtype)
    if grads[1] is not None:
        # a sum over many rows may be infinite in float16, though their mean is not
        dtype = torch.float32 if pull.dtype == torch.float16 else pull.dtype
        for place, member in enumerate(pull):
            grads[1][place] += (member.to(dtype).mT @ part.to(dtype)).to(grads[1].dtype)
    if grads[2] is not None:
        grads[2] += pull.sum(1, dtype=grads[2].dtype)


def _scaled(grad: Tensor, by: Tensor) -> Tensor:
    return grad.mul_(by)  # not rounded to half precision first: a loss scale of 65,536 is infinite there


def _by_classes(
    terms: Terms,
    averaged: bool,
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Gradients]:
    """Some classes at a time, on a GPU; gradients in features and bias in float32 for half precision."""
    from torchace.kernels import linear_gpu

    features = features.to(_product_dtype(features))
    return linear_gpu.value_and_gradients(features, head_weight, head_bias, terms, wanted, averaged=averaged)


def _scaled_on_gpu(grad: Tensor, by: Tensor) -> Tensor:
    from torchace.kernels import linear_gpu

    return linear_gpu.scale_(grad, by)


def _fits_gpu(
    features: Tensor, head_weight: Tensor, head_bias: Tensor | None, target: Tensor, ignore_index: object
) -> bool:
    """Whether class indices and plain tensors lie on one GPU that Triton knows, in types that one product takes."""
    given = [features, head_weight, target] if head_bias is None else [features, head_weight, head_bias, target]
    lowered = _product_dtype(features) != features.dtype
    return (
        features.is_cuda
        and all(type(value) in (Tensor, torch.nn.Parameter) and value.device == features.device for value in given)
        and not target.is_floating_point()
        and head_weight.dtype == (torch.float32 if lowered else features.dtype)
        and features.numel() > 0
        and head_weight.numel() > 0
        and len(head_weight) <= MOST_MEMBERS
        and type(ignore_index) is int
        and runs_kernels(features.device)
    )


def _product_dtype(features: Tensor) -> torch.dtype:
    """The type that a product with the features is computed in."""
    device = features.device.type
    lowered = torch.is_autocast_enabled(device) and features.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowered else features.dtype


def _scale(share: Tensor | None, sample_weight: Tensor | None, ignored: Tensor, features: Tensor) -> Tensor:
    """What a sample's loss is multiplied by, `(N,)` or `(K, N)`; 0 where it does not count."""
    scale = torch.ones(len(features), dtype=compute_dtype(features), device=features.device)
    for factor in (share, sample_weight):
        scale = scale if factor is None else scale * factor
    return scale.masked_fill(ignored, 0)


def _terms(
    scale: Tensor,
    head_weight: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    member_weights: Tensor | Sequence[float] | None,
    weight: Tensor | None,
    label_smoothing: float,
) -> Terms:
    alpha = _checks.as_member_weights(member_weights, len(head_weight), like=scale[..., 0])
    return Terms(
        target=target,
        diversity=diversity.detach() if isinstance(diversity, Tensor) else diversity,
        alpha=alpha,
        weight=None if weight is None else weight.detach().to(alpha),
        label_smoothing=float(label_smoothing),
        mixture=None,
        detach_others=True,
        uniform=member_weights is None,
        scale=scale,
    )


def _check_shapes(features: object, head_weight: object, head_bias: object) -> None:
    for value, name, axes in ((features, "features", "(N, D)"), (head_weight, "head_weight", "(K, C, D)")):
        _checks.check_tensor(value, name)
        assert isinstance(value, Tensor)
        if value.ndim != axes.count(",") + 1:
            raise ValueError(f"Expected `{name}` of shape {axes}, but got {_checks.shape_of(value)}.")
        _checks.check_floating(value, name)
    assert isinstance(features, Tensor)
    assert isinstance(head_weight, Tensor)
    if head_weight.shape[2] != features.shape[1] or not head_weight.shape[0] or not head_weight.shape[1]:
        raise ValueError(
            f"Expected `head_weight` of shape (K, C, {features.shape[1]}) for features {_checks.shape_of(features)}, "
            f"but got {_checks.shape_of(head_weight)}."
        )
    if _product_dtype(features) != _product_dtype(head_weight):
        raise TypeError(
            f"Expected `features` and `head_weight` of one type, but got {features.dtype} and {head_weight.dtype}. "
            "Convert one of them, or use torch.autocast."
        )
    if head_bias is not None:
        _checks.check_tensor(head_bias, "head_bias")
        assert isinstance(head_bias, Tensor)
        if head_bias.shape != head_weight.shape[:2]:
            raise ValueError(
                f"Expected `head_bias` of shape {tuple(head_weight.shape[:2])}, or None, "
                f"but got {_checks.shape_of(head_bias)}."
            )
