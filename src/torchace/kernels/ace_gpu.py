"""The kernels of `ace_triton`, launched: which of them, with which tiles, for the logits and options at hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.ace_triton import _counts, _in_blocks, _multiplied, _whole

ON_CHIP = 1 << 14  # logits of a program, members and classes filled up to powers of two
ONE_PROGRAM = 1 << 14  # so few in all are left to one: it needs nobody to add up
READ_TWICE = 1 << 16  # logits of a sample that one program reads twice: the second time they are still in the L2 cache
SPAN = 1 << 15  # logits that a program reads where several share a sample
SOME_LOGITS = 1 << 12  # of several samples, in one program
BLOCK_LOGITS = 1 << 13  # that a program takes at once where it reads them in blocks
COUNTED = 2048  # so many targets are counted by every program for itself
FEW = 1 << 20  # numbers that torch multiplies faster than a kernel here starts


class Options(NamedTuple):
    """Everything but the logits; None of it receives a gradient."""

    target: Tensor  # (N,) or probabilities (N, C)
    diversity: Tensor | None  # λ on the device, else
    number: float  # λ as a number
    alpha: Tensor | None  # (K,); uniform unless given
    weight: Tensor | None  # (C,)
    mixture: Tensor | None  # (N, C)
    scale: Tensor | None  # what a sample's loss is multiplied by, (N,) or (K, N)
    label_smoothing: float
    ignore_index: int
    mean: bool  # over the samples that count, by the weights of their classes; with a scale, this is all in it


def value_and_gradient(
    logits: Tensor, options: Options, *, want_gradient: bool, by: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The loss summed over members, a scalar, and its gradient in the logits, `(K, N, C)`; the latter times `by`."""
    members, samples, classes = logits.shape
    target, acc = options.target, torch.float64 if logits.dtype == torch.float64 else torch.float32
    gradient = torch.empty_like(logits) if want_gradient else logits
    some_members, some_classes = triton.next_power_of_2(members), triton.next_power_of_2(classes)
    tile = some_members * some_classes
    counts, count, block, blocks = logits, 0, 1, 1
    if not options.mean or options.scale is not None:
        pass
    elif target.is_floating_point():
        count = 3
    elif samples <= COUNTED:
        count, blocks = 2, triton.next_power_of_2(samples)
    else:
        block = max(1024, triton.next_power_of_2(triton.cdiv(samples, 256)))
        count, blocks = 1, triton.cdiv(samples, block)
        counts = torch.empty(blocks, dtype=acc, device=logits.device)
        weighted = options.weight is not None
        weight = options.weight if weighted else counts
        _counts[(blocks,)](
            target,
            target.stride(0),
            weight,
            counts,
            samples,
            classes,
            options.ignore_index,
            WEIGHTED=weighted,
            BLOCK=block,
        )
        blocks = triton.next_power_of_2(blocks)
    align = _alignment(logits, gradient)
    common = _arguments(logits, gradient, options, counts, by, align)
    flags: dict[str, Any] = {
        "MEMBERS": members,
        "CLASSES": classes,
        "ALIGN": align,
        "WRITE": want_gradient,
        "PROBABILITIES": target.is_floating_point(),
        "WEIGHTED": options.weight is not None,
        "UNIFORM": options.alpha is None,
        "MIXTURE": options.mixture is not None,
        "SCALE": options.scale is not None,
        "COUNT": count,
        "COUNTS": blocks,
        "BLOCK": block,
        "BY": by is not None,
        "ON_DEVICE": options.diversity is not None,
        "ACC": tl.float64 if acc == torch.float64 else tl.float32,
        "SOME_MEMBERS": some_members,
    }
    if tile <= ON_CHIP:
        some = triton.next_power_of_2(samples)
        if some * tile > ONE_PROGRAM:
            some = max(1, min(some, SOME_LOGITS // tile))
        programs = triton.cdiv(samples, some)
        values = torch.empty(programs, dtype=acc, device=logits.device)
        _whole[(programs,)](
            logits, gradient, values, *common, **flags, SOME=some, SOME_CLASSES=some_classes,
            num_warps=_warps(some * tile),
        )  # fmt: skip
        return (values[0] if programs == 1 else values.sum()), (gradient if want_gradient else None)
    some_classes = max(16, BLOCK_LOGITS // some_members)
    flags |= {"SOME_CLASSES": some_classes, "num_warps": _warps(some_members * some_classes)}
    if members * classes <= READ_TWICE:
        span, spans = triton.cdiv(classes, some_classes) * some_classes, 1
    else:
        span = triton.cdiv(max(some_classes, SPAN // some_members), some_classes) * some_classes
        spans = triton.cdiv(classes, span)
    values = torch.empty(samples * spans, dtype=acc, device=logits.device)
    statistics = values if spans == 1 else torch.empty((samples, spans, 3, members), dtype=acc, device=logits.device)
    flags |= {"SPAN": span, "SPANS": spans, "SOME_SPANS": triton.next_power_of_2(spans)}
    for stage in (0,) if spans == 1 else (1, 2):
        _in_blocks[(samples, spans)](
            logits, gradient, values, *common, **flags, statistics=statistics, STAGE=stage
        )  # fmt: skip
    return values.sum(), (gradient if want_gradient else None)


def multiplied(gradient: Tensor, by: Tensor) -> Tensor:
    """A gradient as `value_and_gradient` makes it, dense, times a number on the device, in place."""
    if gradient.numel() < FEW:
        return gradient.mul_(by)
    block = 4096
    _multiplied[(triton.cdiv(gradient.numel(), block),)](gradient, by, gradient.numel(), BLOCK=block)
    return gradient


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 1024))


def _alignment(*tensors: Tensor) -> int:
    """What all places of rows are multiples of: told to the compiler, it reads as many numbers at once."""
    align = 8
    for tensor in tensors:
        for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True):
            while size > 1 and stride % align:
                align //= 2
    return align


def _arguments(
    logits: Tensor, gradient: Tensor, options: Options, counts: Tensor, by: Tensor | None, align: int
) -> tuple[Any, ...]:
    """What both kernels take after logits, gradient and values; the logits stand in for what is not there."""
    target, weight, mixture, scale = options.target, options.weight, options.mixture, options.scale
    probabilities = target.is_floating_point()
    smoothing = options.label_smoothing
    mean_weight = weight.mean() if weight is not None and smoothing and not probabilities else weight
    return (
        target,
        logits if weight is None else weight,
        logits if mean_weight is None else mean_weight,
        logits if options.alpha is None else options.alpha,
        logits if mixture is None else mixture,
        logits if scale is None else scale,
        counts,
        logits if by is None else by,
        options.number if options.diversity is None else options.diversity,
        logits.stride(0) // align,
        logits.stride(1) // align,
        logits.stride(2),
        gradient.stride(0) // align,
        gradient.stride(1) // align,
        gradient.stride(2),
        target.stride(0),
        target.stride(1) if probabilities else 0,
        0 if mixture is None else mixture.stride(0),
        0 if mixture is None else mixture.stride(1),
        0 if scale is None or scale.ndim == 1 else scale.stride(0),
        0 if scale is None else scale.stride(-1),
        smoothing,
        options.ignore_index,
        logits.shape[1],
    )
