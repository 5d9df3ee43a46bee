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

import triton
import triton.language as tl


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
