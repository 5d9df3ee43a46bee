"""Amended cross entropy on a GPU, in Triton: value and closed-form gradient together, the logits read once.

With w∘p the weighted target, s = Σ_c w_c p_c, t^k = z^k - max z^k, L^k = log Σ exp t^k and b = λ s q̄ - w∘p, which all
members share,

    Σ_k e^k = <b, Σ_k (t^k - L^k)> - λ s Σ_k α^k <q^k, t^k - L^k>        ∂e^k/∂z^k = s (1-λ) q^k + b

A program has all members' logits of some samples on chip (`_whole`). Where a sample's do not fit, they are read twice
(`_in_blocks`): once for t and L, once for the rest, by one program or by several. No sum is left to the order in which
programs come, so that a repeated step has the same bits. Nothing is read back from the device.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ON_CHIP = 1 << 14  # logits of a program, members and classes filled up to powers of two
ONE_PROGRAM = 1 << 14  # so few in all are left to one: it needs nobody to add up
READ_TWICE = 1 << 16  # logits of a sample that one program reads twice: the second time they are still in the L2 cache
SPAN = 1 << 15  # logits that a program reads where several share a sample
SOME_LOGITS = 1 << 12  # of several samples, in one program
BLOCK_LOGITS = 1 << 13  # that a program takes at once where it reads them in blocks
COUNTED = 2048  # so many targets are counted by every program for itself
FEW = 1 << 20  # numbers that torch multiplies faster than a kernel here starts


@triton.jit
def _counts(
    target,
    stride,
    weight,
    counts,
    samples,
    classes,
    ignored,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the samples of a block count in the mean."""
    block = tl.program_id(0)
    tl.store(
        counts + block, _counted(target, stride, weight, block * BLOCK, samples, classes, ignored, WEIGHTED, BLOCK)
    )


@triton.jit
def _counted(target, stride, weight, start, samples, classes, ignored, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    sample = start + tl.arange(0, BLOCK)
    there = sample < samples
    label = tl.load(target + sample * stride, mask=there, other=0).to(tl.int64)
    there = there & (label != ignored)
    if WEIGHTED:
        counted = tl.load(weight + label, mask=there & (label >= 0) & (label < classes), other=0.0)
    else:
        counted = tl.where(there, 1, 0)
    return tl.sum(counted, 0)


@triton.jit
def _labels(target, target_n, ignored, n, real, CLASSES: tl.constexpr, PROBABILITIES: tl.constexpr):
    """The labels of some samples, whether they count, and NaN where a label is none of the classes, else 0."""
    label = tl.zeros((1, 1, 1), tl.int64)
    valid = real
    wrong = tl.zeros((1, 1, 1), tl.float32)
    if not PROBABILITIES:
        label = tl.load(target + n * target_n, mask=real, other=0).to(tl.int64)
        valid = real & (label != ignored)
        known = valid & (label >= 0) & (label < CLASSES)
        wrong = tl.where(valid & ~known, float("nan"), 0.0)
        label = tl.where(known, label, 0)
    return label, valid, wrong


@triton.jit
def _aims(
    target,
    target_n,
    target_c,
    weight,
    smoothing,
    label,
    n,
    c,
    real,
    CLASSES: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """w∘p of some samples and classes."""
    inside = c < CLASSES
    if PROBABILITIES:
        p = tl.load(target + n * target_n + c * target_c, mask=real & inside, other=0.0) * (1 - smoothing)
    else:
        p = tl.where(c == label, 1 - smoothing, 0.0)
    p += (tl.zeros((1, 1, 1), ACC) + smoothing) / CLASSES
    if WEIGHTED:
        p *= tl.load(weight + c, mask=inside, other=0.0)
    return tl.where(inside, p, 0.0).to(ACC)


@triton.jit
def _label_weight(label, weight, mean_weight, smoothing, WEIGHTED: tl.constexpr, ACC: tl.constexpr):
    """s of samples with class indices."""
    s = tl.full((1, 1, 1), 1.0, ACC)
    if WEIGHTED:
        s = ((1 - smoothing) * tl.load(weight + label) + smoothing * tl.load(mean_weight)).to(ACC)
    return s


@triton.jit
def _factor(
    counts,
    target,
    target_n,
    weight,
    scale,
    scale_k,
    scale_n,
    by,
    samples,
    ignored,
    n,
    k,
    valid,
    wrong,
    MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr,
    SCALE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BY: tl.constexpr,
    ACC: tl.constexpr,
):
    """What a sample's loss is multiplied by, `(samples, members, 1)`; and 0, or NaN where no sample counts.

    COUNT 0: 1; 1: 1 over the sum of blocks' counts; 2: over what is counted here; 3: over the number of samples.
    """
    one, nothing = tl.full((), 1.0, ACC), 0.0
    if COUNT == 3:
        one = one / samples
    elif COUNT:
        if COUNT == 1:
            block = tl.arange(0, COUNTS)
            total = tl.sum(tl.load(counts + block, mask=block < tl.cdiv(samples, BLOCK), other=0.0), 0)
        else:
            total = _counted(target, target_n, weight, 0, samples, CLASSES, ignored, WEIGHTED, COUNTS)
        total = total.to(ACC)
        one, nothing = one / total, 0.0 / total
    factor = tl.where(valid & (k < MEMBERS), one + wrong, 0.0).to(ACC)
    if SCALE:
        factor *= tl.load(scale + n * scale_n + k * scale_k, mask=valid & (k < MEMBERS), other=0.0)
    if BY:
        factor *= tl.load(by)
    return factor, nothing


@triton.jit
def _base(top):
    """What is subtracted from logits: the largest, unless there is none."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _finished(t, q, log_total, wp, s, a, factor, mean, lam, place, here, WRITE: tl.constexpr):
    """Writes the gradient of some samples, members and classes; returns their part of the loss."""
    b = lam * s * mean - wp  # (samples, 1, classes)
    if WRITE:
        g = tl.where(factor == 0, 0.0, factor * (s * (1 - lam) * q + b))
        tl.store(place, g.to(place.dtype.element_ty), mask=here)
    # A class that nobody believes in adds nothing, nor does a sample that does not count, even at -inf.
    sums = tl.sum(tl.where(factor == 0, 0.0, factor * t), 1, keep_dims=True)  # (samples, 1, classes)
    logs = tl.sum(tl.where(factor == 0, 0.0, factor * log_total), 1, keep_dims=True)  # (samples, 1, 1)
    value = tl.sum(tl.where(b == 0, 0.0, b * sums), 2, keep_dims=True) - tl.sum(b, 2, keep_dims=True) * logs
    own = tl.sum(tl.where(q == 0, 0.0, q * (t - log_total)), 2, keep_dims=True)  # (samples, members, 1)
    value -= lam * s * tl.sum(tl.where(factor == 0, 0.0, factor * a * own), 1, keep_dims=True)
    value = tl.where(tl.sum(tl.where(factor == 0, 0, 1), 1, keep_dims=True) == 0, 0.0, value)
    return tl.sum(tl.reshape(value, (value.shape[0],)), 0)


@triton.jit
def _whole(
    logits,
    gradient,
    values,
    target,
    weight,
    mean_weight,
    alpha,
    mixture,
    scale,
    counts,
    by,
    diversity,
    logits_k,
    logits_n,
    logits_c,
    gradient_k,
    gradient_n,
    gradient_c,
    target_n,
    target_c,
    mixture_n,
    mixture_c,
    scale_k,
    scale_n,
    smoothing,
    ignored,
    samples,
    MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr,
    ALIGN: tl.constexpr,
    WRITE: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UNIFORM: tl.constexpr,
    MIXTURE: tl.constexpr,
    SCALE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    ACC: tl.constexpr,
    SOME: tl.constexpr,
    SOME_MEMBERS: tl.constexpr,
    SOME_CLASSES: tl.constexpr,
):
    """Some samples with all their logits at once, `(samples, members, classes)`."""
    n = (tl.program_id(0) * SOME + tl.arange(0, SOME).to(tl.int64))[:, None, None]
    k = tl.arange(0, SOME_MEMBERS).to(tl.int64)[None, :, None]
    c = tl.arange(0, SOME_CLASSES)[None, None, :]
    real, inside = n < samples, c < CLASSES
    here = real & (k < MEMBERS) & inside
    z = tl.load(logits + (n * logits_n + k * logits_k) * ALIGN + c * logits_c, mask=here, other=-float("inf")).to(ACC)
    t = tl.where(here, z - _base(tl.max(z, 2, keep_dims=True)), 0.0)
    q = tl.where(here, tl.exp(t), 0.0)
    total = tl.where(real & (k < MEMBERS), tl.sum(q, 2, keep_dims=True), 1.0)
    q = q / total

    lam = tl.load(diversity) if ON_DEVICE else diversity
    a = tl.full((1, 1, 1), 1.0 / MEMBERS, ACC) if UNIFORM else tl.load(alpha + k, mask=k < MEMBERS, other=0.0)
    label, valid, wrong = _labels(target, target_n, ignored, n, real, CLASSES, PROBABILITIES)
    wp = _aims(target, target_n, target_c, weight, smoothing, label, n, c, real, CLASSES, PROBABILITIES, WEIGHTED, ACC)
    if PROBABILITIES:
        s = tl.sum(wp, 2, keep_dims=True)
    else:
        s = _label_weight(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
    if MIXTURE:
        mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=real & inside, other=0.0).to(ACC)
    else:
        mean = tl.sum(a * q, 1, keep_dims=True)
    factor, nothing = _factor(
        counts, target, target_n, weight, scale, scale_k, scale_n, by, samples, ignored, n, k, valid, wrong,
        MEMBERS, CLASSES, SCALE, COUNT, COUNTS, BLOCK, WEIGHTED, BY, ACC,
    )  # fmt: skip
    place = gradient + (n * gradient_n + k * gradient_k) * ALIGN + c * gradient_c
    value = _finished(t, q, tl.log(total), wp, s, a, factor, mean, lam, place, here, WRITE)
    tl.store(values + tl.program_id(0), value + nothing)


@triton.jit
def _in_blocks(
    logits,
    gradient,
    values,
    target,
    weight,
    mean_weight,
    alpha,
    mixture,
    scale,
    counts,
    by,
    diversity,
    logits_k,
    logits_n,
    logits_c,
    gradient_k,
    gradient_n,
    gradient_c,
    target_n,
    target_c,
    mixture_n,
    mixture_c,
    scale_k,
    scale_n,
    smoothing,
    ignored,
    samples,
    MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr,
    ALIGN: tl.constexpr,
    WRITE: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UNIFORM: tl.constexpr,
    MIXTURE: tl.constexpr,
    SCALE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    ACC: tl.constexpr,
    SOME_MEMBERS: tl.constexpr,
    SOME_CLASSES: tl.constexpr,
    statistics,
    STAGE: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    SOME_SPANS: tl.constexpr,
):
    """One sample, a span of its classes block by block: first what the softmax needs, then the rest.

    STAGE 0: both, for all classes. 1: the first, into `statistics`, `(samples, spans, 3, members)`: the largest logit,
    the sum of exponentials, and the sum of w∘p. 2: the second, from there.
    """
    sample, span = tl.program_id(0), tl.program_id(1)
    n = tl.full((1, 1, 1), 0, tl.int64) + sample
    k = tl.arange(0, SOME_MEMBERS).to(tl.int64)[None, :, None]
    some = tl.arange(0, SOME_CLASSES)[None, None, :]
    real = n < samples
    row = logits + (n * logits_n + k * logits_k) * ALIGN
    label, valid, wrong = _labels(target, target_n, ignored, n, real, CLASSES, PROBABILITIES)
    if STAGE < 2:
        top = tl.full((1, SOME_MEMBERS, 1), -float("inf"), ACC)
        total = tl.zeros((1, SOME_MEMBERS, 1), ACC)
        s = tl.zeros((1, 1, 1), ACC)
        for start in range(0, SPAN, SOME_CLASSES):
            c = span * SPAN + start + some
            z = tl.load(row + c * logits_c, mask=(k < MEMBERS) & (c < CLASSES), other=-float("inf")).to(ACC)
            larger = tl.maximum(top, tl.max(z, 2, keep_dims=True))
            base = _base(larger)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 2, keep_dims=True)
            top = larger
            if PROBABILITIES:
                wp = _aims(
                    target, target_n, target_c, weight, smoothing, label, n, c, real, CLASSES, PROBABILITIES, WEIGHTED,
                    ACC,
                )  # fmt: skip
                s += tl.sum(wp, 2, keep_dims=True)
        if STAGE == 1:
            own = statistics + (n * SPANS + span) * 3 * MEMBERS + k
            tl.store(own, top, mask=k < MEMBERS)
            tl.store(own + MEMBERS, total, mask=k < MEMBERS)
            tl.store(own + 2 * MEMBERS, tl.broadcast_to(s, (1, SOME_MEMBERS, 1)), mask=k < MEMBERS)
    else:
        each = tl.arange(0, SOME_SPANS)[None, None, :]
        parts = statistics + (n * SPANS + each) * 3 * MEMBERS
        there = (k < MEMBERS) & (each < SPANS)
        tops = tl.load(parts + k, mask=there, other=-float("inf"))
        top = tl.max(tops, 2, keep_dims=True)
        totals = tl.load(parts + MEMBERS + k, mask=there, other=0.0)
        total = tl.sum(tl.where(totals == 0, 0.0, totals * tl.exp(tops - _base(top))), 2, keep_dims=True)
        s = tl.sum(tl.load(parts + 2 * MEMBERS, mask=each < SPANS, other=0.0), 2, keep_dims=True)
    if STAGE != 1:
        top = tl.where(k < MEMBERS, _base(top), 0.0)
        total = tl.where(k < MEMBERS, total, 1.0)
        log_total = tl.log(total)
        lam = tl.load(diversity) if ON_DEVICE else diversity
        a = tl.full((1, 1, 1), 1.0 / MEMBERS, ACC) if UNIFORM else tl.load(alpha + k, mask=k < MEMBERS, other=0.0)
        if not PROBABILITIES:
            s = _label_weight(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
        factor, nothing = _factor(
            counts, target, target_n, weight, scale, scale_k, scale_n, by, samples, ignored, n, k, valid, wrong,
            MEMBERS, CLASSES, SCALE, COUNT, COUNTS, BLOCK, WEIGHTED, BY, ACC,
        )  # fmt: skip
        value = tl.zeros((), ACC)
        for start in range(0, SPAN, SOME_CLASSES):
            c = span * SPAN + start + some
            inside = c < CLASSES
            here = (k < MEMBERS) & inside
            wp = _aims(
                target, target_n, target_c, weight, smoothing, label, n, c, real, CLASSES, PROBABILITIES, WEIGHTED, ACC
            )
            t = tl.where(here, tl.load(row + c * logits_c, mask=here, other=0.0).to(ACC) - top, 0.0)
            q = tl.where(here, tl.exp(t) / total, 0.0)
            if MIXTURE:
                mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=inside, other=0.0).to(ACC)
            else:
                mean = tl.sum(a * q, 1, keep_dims=True)
            place = gradient + (n * gradient_n + k * gradient_k) * ALIGN + c * gradient_c
            value += _finished(t, q, log_total, wp, s, a, factor, mean, lam, place, here, WRITE)
        tl.store(values + sample * SPANS + span, value + nothing)


@triton.jit
def _multiplied(gradient, by, size, BLOCK: tl.constexpr):
    """In place; a factor of 1 costs no more than looking at it."""
    factor = tl.load(by)
    if factor != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(gradient + place, mask=place < size)
        tl.store(gradient + place, (value * factor).to(value.dtype), mask=place < size)


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
