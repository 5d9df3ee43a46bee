"""Amended cross entropy on a GPU where a sample has more logits than fit on chip: they are read twice."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from torchace.kernels.ace_pieces import (
    LOWEST,
    NOWHERE,
    _aims,
    _alpha,
    _careful,
    _depths,
    _exp,
    _heats,
    _label_weight,
    _labels,
    _logs,
    _pulls,
    _reciprocal,
    _share,
    _slope,
    _write,
)


@triton.jit
def _some_classes(SOME_CLASSES: tl.constexpr, VECTOR: tl.constexpr):
    """The classes of a block, `(vectors, 1, members, classes of a vector)`: see `_whole`."""
    vector = (tl.arange(0, SOME_CLASSES // VECTOR) * VECTOR)[:, None, None, None]
    return vector + tl.arange(0, VECTOR)[None, None, None, :]


@triton.jit
def _read(place, here, ACC: tl.constexpr, POLICY: tl.constexpr):
    """Logits; NOWHERE for what is none."""
    if place.dtype.element_ty == tl.float16:  # NOWHERE would be -inf
        z = tl.where(here, tl.load(place, mask=here, other=0.0, eviction_policy=POLICY).to(ACC), NOWHERE)
    else:
        z = tl.load(place, mask=here, other=NOWHERE, eviction_policy=POLICY).to(ACC)
    return z


@triton.jit
def _sums(
    row,
    logits_c,
    first,
    member,
    CLASSES: tl.constexpr,
    SPAN: tl.constexpr,
    SOME_CLASSES: tl.constexpr,
    VECTOR: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Of some members' logits in a span: the largest, and the sum of exponentials below it."""
    tops = tl.full((SOME_CLASSES // VECTOR, 1, row.shape[2], 1), LOWEST, ACC)
    totals = tl.zeros((SOME_CLASSES // VECTOR, 1, row.shape[2], 1), ACC)
    for start in tl.range(0, SPAN, SOME_CLASSES, num_stages=1):
        c = first + start + _some_classes(SOME_CLASSES, VECTOR)
        z = _read(row + c * logits_c, member & (c < CLASSES), ACC, POLICY)
        larger = tl.maximum(tops, tl.max(z, 3, keep_dims=True))
        totals = totals * _exp(tops - larger, FAST) + tl.sum(_exp(z - larger, FAST), 3, keep_dims=True)
        tops = larger
    return _joined(tops, totals)


@triton.jit
def _joined(tops, totals):
    """Sums of exponentials below several tops, `(parts, 1, members, 1)`, as those below the highest."""
    top = tl.max(tops, 0, keep_dims=True)
    return top, tl.sum(totals * tl.exp(tops - top), 0, keep_dims=True)


@triton.jit
def _kept(statistics, top, total, k, n, span, MEMBERS: tl.constexpr, SPANS: tl.constexpr):
    place = statistics + (n * SPANS + span) * 3 * MEMBERS + k
    tl.store(place, top, mask=k < MEMBERS)
    tl.store(place + MEMBERS, total, mask=k < MEMBERS)


@triton.jit
def _found(statistics, k, n, MEMBERS: tl.constexpr, SPANS: tl.constexpr, SOME_SPANS: tl.constexpr):
    each = tl.arange(0, SOME_SPANS)[:, None, None, None]
    place = statistics + (n * SPANS + each) * 3 * MEMBERS + k
    there = (k < MEMBERS) & (each < SPANS)
    top, total = tl.where(k < MEMBERS, LOWEST, NOWHERE), tl.where(k < MEMBERS, 0.0, 1.0)  # of nobody: as in `_sums`
    return _joined(tl.load(place, mask=there, other=top), tl.load(place + MEMBERS, mask=there, other=total))


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
    VECTOR: tl.constexpr,
    WRITE: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UNIFORM: tl.constexpr,
    MIXTURE: tl.constexpr,
    SCALE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNTS: tl.constexpr,
    BY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    ACC: tl.constexpr,
    SMOOTHED: tl.constexpr,
    FAST: tl.constexpr,
    MOST: tl.constexpr,
    REST: tl.constexpr,
    SOME_CLASSES: tl.constexpr,
    statistics,
    STAGE: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    SOME_SPANS: tl.constexpr,
):
    """One sample, a span of its classes block by block: first what the softmax needs, then the rest.

    STAGE 0: both, for all classes. 1: the first, into `statistics`, `(samples, spans, 3, members)`: the largest
    logit, the sum of exponentials, and the sum of w∘p. 2: the second, from there.
    """
    n, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if STAGE == 2:
        n = samples - 1 - n  # what was read last is still in the cache
    k = tl.arange(0, MOST).to(tl.int64)[None, None, :, None]
    r = (MOST + tl.arange(0, REST if REST else 1)).to(tl.int64)[None, None, :, None]
    some = _some_classes(SOME_CLASSES, VECTOR)
    row, row_r = logits + (n * logits_n + k * logits_k) * VECTOR, logits + (n * logits_n + r * logits_k) * VECTOR
    label, valid, wrong = _labels(target, target_n, ignored, n, n < samples, CLASSES, PROBABILITIES)
    if STAGE < 2:
        first = span * SPAN
        POLICY: tl.constexpr = "" if STAGE else "evict_last"
        top, total = _sums(row, logits_c, first, k < MEMBERS, CLASSES, SPAN, SOME_CLASSES, VECTOR, FAST, ACC, POLICY)
        if REST:
            top_r, total_r = _sums(
                row_r, logits_c, first, r < MEMBERS, CLASSES, SPAN, SOME_CLASSES, VECTOR, FAST, ACC, POLICY
            )
        s = tl.zeros((), ACC)
        if PROBABILITIES:
            for start in range(0, SPAN, SOME_CLASSES):
                wp = _aims(
                    target, target_n, target_c, weight, smoothing, label, n, first + start + some, samples,
                    CLASSES, PROBABILITIES, WEIGHTED, SMOOTHED, ACC,
                )  # fmt: skip
                s += tl.sum(wp)
        if STAGE == 1:
            _kept(statistics, top, total, k, n, span, MEMBERS, SPANS)
            if REST:
                _kept(statistics, top_r, total_r, r, n, span, MEMBERS, SPANS)
            tl.store(statistics + (n * SPANS + span) * 3 * MEMBERS + 2 * MEMBERS, s)
    else:
        top, total = _found(statistics, k, n, MEMBERS, SPANS, SOME_SPANS)
        if REST:
            top_r, total_r = _found(statistics, r, n, MEMBERS, SPANS, SOME_SPANS)
        spans = tl.arange(0, SOME_SPANS)
        s = tl.sum(tl.load(statistics + (n * SPANS + spans) * 3 * MEMBERS + 2 * MEMBERS, mask=spans < SPANS, other=0.0))
    if STAGE != 1:
        lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if ON_DEVICE else diversity)
        if not PROBABILITIES:
            s = _label_weight(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
        one, nothing = _share(
            counts, target, target_n, weight, by, samples, ignored, CLASSES, COUNT, COUNTS, WEIGHTED, BY, ACC
        )
        value = nothing
        if valid:
            a = _alpha(alpha, k, MEMBERS, MOST, UNIFORM, ACC)
            factor = tl.full((1, 1, 1, 1), 0.0, ACC) + one + wrong
            factor_r = factor
            if SCALE:
                factor = factor * tl.load(scale + n * scale_n + k * scale_k)
            inverse = _reciprocal(total, FAST)
            own, mine, share = factor * lam * s * a * inverse, factor * s * (1 - lam) * inverse, a * inverse
            if REST:
                a_r = _alpha(alpha, r, MEMBERS, MOST + REST, UNIFORM, ACC)
                if SCALE:
                    factor_r = factor_r * tl.load(scale + n * scale_n + r * scale_k, mask=r < MEMBERS, other=0.0)
                inverse = _reciprocal(total_r, FAST)
                own_r, mine_r = factor_r * lam * s * a_r * inverse, factor_r * s * (1 - lam) * inverse
                share_r = a_r * inverse
            pulls, believed = tl.zeros((), ACC), tl.zeros((), ACC)
            for careful in range(2):
                if (careful == 0) | (pulls != pulls):  # a second time if it was 0 times -inf, perhaps
                    found = tl.zeros((SOME_CLASSES // VECTOR, 1, 1, 1), ACC)
                    means = tl.zeros((SOME_CLASSES // VECTOR, 1, 1, 1), ACC)
                    for past in tl.range(0, SPAN, SOME_CLASSES, num_stages=1):
                        # backward: what was read last is still in the cache
                        c = span * SPAN + (SPAN - SOME_CLASSES - past) + some
                        here, here_r = (c < CLASSES) & (k < MEMBERS), (c < CLASSES) & (r < MEMBERS)
                        t = _read(row + c * logits_c, here, ACC, "evict_first") - top
                        e = _exp(t, FAST)
                        if REST:
                            t_r = _read(row_r + c * logits_c, here_r, ACC, "evict_first") - top_r
                            e_r = _exp(t_r, FAST)
                        wp = _aims(
                            target, target_n, target_c, weight, smoothing, label, n, c, samples, CLASSES,
                            PROBABILITIES, WEIGHTED, SMOOTHED, ACC,
                        )  # fmt: skip
                        if MIXTURE:
                            mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=c < CLASSES, other=0.0).to(ACC)
                            means += tl.sum(mean, 3, keep_dims=True)
                        else:
                            mean = tl.sum(share * e, 2, keep_dims=True)
                            if REST:
                                mean += tl.sum(share_r * e_r, 2, keep_dims=True)
                        b = lam * s * mean - wp  # (vectors, 1, 1, classes)
                        if WRITE:
                            place = (n * gradient_n + k * gradient_k) * VECTOR + c * gradient_c
                            _write(gradient + place, here, _slope(e, mine, factor * b, factor, SCALE))
                            if REST:
                                place = (n * gradient_n + r * gradient_k) * VECTOR + c * gradient_c
                                _write(gradient + place, here_r, _slope(e_r, mine_r, factor_r * b, factor_r, SCALE))
                        if careful:
                            found += _careful(t, e, own, b, factor, c, CLASSES, SCALE, 2)
                            if REST:
                                found += _careful(t_r, e_r, own_r, b, factor_r, c, CLASSES, SCALE, 2)
                        else:
                            depth, heat = _depths(t, e, factor, SCALE, 2)
                            found -= _heats(own, heat, factor, SCALE, 2)
                            if REST:
                                depth_r, heat_r = _depths(t_r, e_r, factor_r, SCALE, 2)
                                depth += depth_r
                                found -= _heats(own_r, heat_r, factor_r, SCALE, 2)
                            found += _pulls(b, depth, c, CLASSES)
                    pulls, believed = tl.sum(found), tl.sum(means)
            # a span's share of L Σ u: of a mixture what it saw of it, of all else the first has it all
            whole = tl.where(span == 0, 1.0, 0.0)
            sums = believed if MIXTURE else whole
            if not UNIFORM and not MIXTURE:
                sums = (tl.sum(a) + (tl.sum(a_r) if REST else 0.0)) * whole
            logs = tl.sum(_logs(total, factor, sums, a, s, lam, whole, k, MEMBERS, FAST))
            if REST:
                logs += tl.sum(_logs(total_r, factor_r, sums, a_r, s, lam, whole, r, MEMBERS, FAST))
            value += pulls - logs
        elif WRITE:
            for start in range(0, SPAN, SOME_CLASSES):
                c = span * SPAN + start + some
                zero = tl.zeros((1, 1, 1, 1), gradient.dtype.element_ty)
                place = gradient + (n * gradient_n + k * gradient_k) * VECTOR + c * gradient_c
                tl.store(place, zero, mask=(c < CLASSES) & (k < MEMBERS))
                if REST:
                    place = gradient + (n * gradient_n + r * gradient_k) * VECTOR + c * gradient_c
                    tl.store(place, zero, mask=(c < CLASSES) & (r < MEMBERS))
        tl.store(values + n * SPANS + span, value)
