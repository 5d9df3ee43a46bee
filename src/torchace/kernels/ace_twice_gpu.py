"""Triton kernel of the amended cross entropy for logits that do not fit on chip: it reads them twice."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from torchace.kernels.ace_terms_gpu import (
    LOWEST,
    NO_CLASS,
    _b_dot_t,
    _exp,
    _lam_q_dot_t,
    _load_alpha,
    _load_labels,
    _log_total_dot_u,
    _logit_gradient,
    _mean_factor,
    _reciprocal,
    _store,
    _sum_of_weighted_target,
    _sums_of_t,
    _u_dot_t,
    _weighted_target,
)


@triton.jit
def _block_classes(BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):
    """Classes of a block, `(vectors, 1, 1, classes of a vector)`."""
    vector = (tl.arange(0, BLOCK_C // VECTOR) * VECTOR)[:, None, None, None]
    return vector + tl.arange(0, VECTOR)[None, None, None, :]


@triton.jit
def _load_logits(place, mask, ACC: tl.constexpr, POLICY: tl.constexpr):
    """Logits; NO_CLASS for padding."""
    if place.dtype.element_ty == tl.float16:  # NO_CLASS would be -inf
        z = tl.where(mask, tl.load(place, mask=mask, other=0.0, eviction_policy=POLICY).to(ACC), NO_CLASS)
    else:
        z = tl.load(place, mask=mask, other=NO_CLASS, eviction_policy=POLICY).to(ACC)
    return z


# fmt: off
@triton.jit
def _softmax_sums(
    row, logits_c, first, member, CLASSES: tl.constexpr, SPAN: tl.constexpr, BLOCK_C: tl.constexpr,
    VECTOR: tl.constexpr, FAST: tl.constexpr, ACC: tl.constexpr, POLICY: tl.constexpr,
):
    # fmt: on
    """Each member's maximum over a span, and the sum of exponentials relative to it."""
    tops = tl.full((BLOCK_C // VECTOR, 1, row.shape[2], 1), LOWEST, ACC)
    totals = tl.zeros((BLOCK_C // VECTOR, 1, row.shape[2], 1), ACC)
    for start in tl.range(0, SPAN, BLOCK_C, num_stages=1):
        c = first + start + _block_classes(BLOCK_C, VECTOR)
        z = _load_logits(row + c * logits_c, member & (c < CLASSES), ACC, POLICY)
        larger = tl.maximum(tops, tl.max(z, 3, keep_dims=True))
        totals = totals * _exp(tops - larger, FAST) + tl.sum(_exp(z - larger, FAST), 3, keep_dims=True)
        tops = larger
    return _combine(tops, totals)


@triton.jit
def _combine(tops, totals):
    """Combine maxima and sums of exponentials of several parts, `(parts, 1, members, 1)`."""
    top = tl.max(tops, 0, keep_dims=True)
    return top, tl.sum(totals * tl.exp(tops - top), 0, keep_dims=True)


@triton.jit
def _store_statistics(statistics, top, total, k, n, span, MEMBERS: tl.constexpr, SPANS: tl.constexpr):
    place = statistics + (n * SPANS + span) * 3 * MEMBERS + k
    tl.store(place, top, mask=k < MEMBERS)
    tl.store(place + MEMBERS, total, mask=k < MEMBERS)


@triton.jit
def _load_statistics(statistics, k, n, MEMBERS: tl.constexpr, SPANS: tl.constexpr, BLOCK_SPANS: tl.constexpr):
    span = tl.arange(0, BLOCK_SPANS)[:, None, None, None]
    place = statistics + (n * SPANS + span) * 3 * MEMBERS + k
    there = (k < MEMBERS) & (span < SPANS)
    # padding as in `_softmax_sums`
    top, total = tl.where(k < MEMBERS, LOWEST, NO_CLASS), tl.where(k < MEMBERS, 0.0, 1.0)
    return _combine(tl.load(place, mask=there, other=top), tl.load(place + MEMBERS, mask=there, other=total))


# fmt: off
@triton.jit
def _read_twice(
    # pointers
    logits, gradient, values, target, weight, mean_weight, alpha, mixture, scale, counts, upstream, diversity,
    # strides; those of logits and gradient, but for the classes', are divided by VECTOR
    logits_k, logits_n, logits_c, gradient_k, gradient_n, gradient_c, target_n, target_c, mixture_n, mixture_c,
    scale_k, scale_n, smoothing, ignore_index, samples,
    # sizes
    MEMBERS: tl.constexpr, CLASSES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    # options
    WITH_GRADIENT: tl.constexpr, PROBABILITIES: tl.constexpr, WEIGHTED: tl.constexpr, UNIFORM: tl.constexpr,
    MIXTURE: tl.constexpr, SCALE: tl.constexpr, COUNT: tl.constexpr, COUNTS: tl.constexpr, UPSTREAM: tl.constexpr,
    DIVERSITY_ON_DEVICE: tl.constexpr, SMOOTHED: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
    # spans
    statistics, STAGE: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):
    # fmt: on
    """Process a span of one sample's classes block by block: softmax statistics, then value and gradient.

    STAGE 0: both, for all classes. 1: write `statistics`, `(samples, spans, 3, members)`: maximum, sum of exponentials
    and sum of w∘p. 2: value and gradient from them.
    """
    n, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if STAGE == 2:
        n = samples - 1 - n  # the logits read last are still in the cache
    k = tl.arange(0, BLOCK_K).to(tl.int64)[None, None, :, None]
    k_r = (BLOCK_K + tl.arange(0, REST_K if REST_K else 1)).to(tl.int64)[None, None, :, None]
    classes = _block_classes(BLOCK_C, VECTOR)
    row, row_r = logits + (n * logits_n + k * logits_k) * VECTOR, logits + (n * logits_n + k_r * logits_k) * VECTOR
    label, valid, invalid = _load_labels(target, target_n, ignore_index, n, n < samples, CLASSES, PROBABILITIES)
    if STAGE < 2:
        first = span * SPAN
        POLICY: tl.constexpr = "" if STAGE else "evict_last"
        top, total = _softmax_sums(row, logits_c, first, k < MEMBERS, CLASSES, SPAN, BLOCK_C, VECTOR, FAST, ACC, POLICY)
        top_r, total_r = top, total
        if REST_K:
            top_r, total_r = _softmax_sums(
                row_r, logits_c, first, k_r < MEMBERS, CLASSES, SPAN, BLOCK_C, VECTOR, FAST, ACC, POLICY
            )
        s = tl.zeros((), ACC)
        if PROBABILITIES:
            for start in range(0, SPAN, BLOCK_C):
                wp = _weighted_target(
                    target, target_n, target_c, weight, smoothing, label, n, first + start + classes, samples,
                    CLASSES, PROBABILITIES, WEIGHTED, SMOOTHED, ACC,
                )  # fmt: skip
                s += tl.sum(wp)
        if STAGE == 1:
            _store_statistics(statistics, top, total, k, n, span, MEMBERS, SPANS)
            if REST_K:
                _store_statistics(statistics, top_r, total_r, k_r, n, span, MEMBERS, SPANS)
            tl.store(statistics + (n * SPANS + span) * 3 * MEMBERS + 2 * MEMBERS, s)
    else:
        top, total = _load_statistics(statistics, k, n, MEMBERS, SPANS, BLOCK_SPANS)
        top_r, total_r = top, total
        if REST_K:
            top_r, total_r = _load_statistics(statistics, k_r, n, MEMBERS, SPANS, BLOCK_SPANS)
        spans = tl.arange(0, BLOCK_SPANS)
        s = tl.sum(tl.load(statistics + (n * SPANS + spans) * 3 * MEMBERS + 2 * MEMBERS, mask=spans < SPANS, other=0.0))
    if STAGE != 1:
        value = _span_value(
            gradient, target, weight, mean_weight, alpha, mixture, scale, counts, upstream, diversity, row, row_r,
            logits_c, (gradient_k, gradient_n, gradient_c), target_n, target_c, mixture_n, mixture_c, scale_k, scale_n,
            smoothing, ignore_index, samples, n, span, k, k_r, classes, label, valid, invalid, top, top_r, total,
            total_r, s, MEMBERS, CLASSES, VECTOR, REST_K, BLOCK_C, WITH_GRADIENT, PROBABILITIES, WEIGHTED, UNIFORM,
            MIXTURE, SCALE, COUNT, COUNTS, UPSTREAM, DIVERSITY_ON_DEVICE, SMOOTHED, ACC, FAST, SPAN,
        )  # fmt: skip
        tl.store(values + n * SPANS + span, value)


# fmt: off
@triton.jit
def _span_value(
    gradient, target, weight, mean_weight, alpha, mixture, scale, counts, upstream, diversity, row, row_r, logits_c,
    gradient_strides, target_n, target_c, mixture_n, mixture_c, scale_k, scale_n, smoothing, ignore_index, samples, n,
    span, k, k_r, classes, label, valid, invalid, top, top_r, total, total_r, s, MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr, VECTOR: tl.constexpr, REST_K: tl.constexpr, BLOCK_C: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, PROBABILITIES: tl.constexpr, WEIGHTED: tl.constexpr, UNIFORM: tl.constexpr,
    MIXTURE: tl.constexpr, SCALE: tl.constexpr, COUNT: tl.constexpr, COUNTS: tl.constexpr, UPSTREAM: tl.constexpr,
    DIVERSITY_ON_DEVICE: tl.constexpr, SMOOTHED: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
    SPAN: tl.constexpr,
):
    # fmt: on
    """Value of a span, from softmax statistics; writes its gradient."""
    lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if DIVERSITY_ON_DEVICE else diversity)
    if not PROBABILITIES:
        s = _sum_of_weighted_target(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
    mean_factor, empty = _mean_factor(
        counts, target, target_n, weight, upstream, samples, ignore_index, CLASSES, COUNT, COUNTS, WEIGHTED, UPSTREAM,
        ACC,
    )  # fmt: skip
    value = empty
    if valid:
        a = _load_alpha(alpha, k, MEMBERS, UNIFORM, ACC)
        factor = tl.full((1, 1, 1, 1), 0.0, ACC) + mean_factor + invalid
        factor_r = factor
        if SCALE:
            factor = factor * tl.load(scale + n * scale_n + k * scale_k)
        own = _member_terms(row, top, total, k, factor, lam, s, a, FAST)
        a_r, rest = a, own
        if REST_K:
            a_r = _load_alpha(alpha, k_r, MEMBERS, UNIFORM, ACC)
            if SCALE:
                factor_r = factor_r * tl.load(scale + n * scale_n + k_r * scale_k, mask=k_r < MEMBERS, other=0.0)
            rest = _member_terms(row_r, top_r, total_r, k_r, factor_r, lam, s, a_r, FAST)
        dots, sum_mixture = tl.zeros((), ACC), tl.zeros((), ACC)
        for retry in range(2):
            if (retry == 0) | (dots != dots):  # again for NaN, perhaps 0 times -inf
                block_dots = tl.zeros((BLOCK_C // VECTOR, 1, 1, 1), ACC)
                mixture_sums = tl.zeros((BLOCK_C // VECTOR, 1, 1, 1), ACC)
                for past in tl.range(0, SPAN, BLOCK_C, num_stages=1):
                    # backward: the logits read last are still in the cache
                    c = span * SPAN + (SPAN - BLOCK_C - past) + classes
                    block_dots, mixture_sums = _add_block(
                        block_dots, mixture_sums, retry, own, rest, gradient, gradient_strides, target, weight, mixture,
                        logits_c, target_n, target_c, mixture_n, mixture_c, smoothing, label, n, c, samples, lam, s,
                        MEMBERS, CLASSES, VECTOR, REST_K, WITH_GRADIENT, PROBABILITIES, WEIGHTED, MIXTURE, SCALE,
                        SMOOTHED, ACC, FAST,
                    )  # fmt: skip
                dots, sum_mixture = tl.sum(block_dots), tl.sum(mixture_sums)
        # a span's share of L Σ u: its part of a given mixture; other terms belong to the first span
        whole = tl.where(span == 0, 1.0, 0.0)
        sums = sum_mixture if MIXTURE else whole
        if not UNIFORM and not MIXTURE:
            sums = (tl.sum(a) + (tl.sum(a_r) if REST_K else 0.0)) * whole
        logs = tl.sum(_log_total_dot_u(total, factor, sums, a, s, lam, whole, k, MEMBERS, FAST))
        if REST_K:
            logs += tl.sum(_log_total_dot_u(total_r, factor_r, sums, a_r, s, lam, whole, k_r, MEMBERS, FAST))
        value += dots - logs
    elif WITH_GRADIENT:
        for start in range(0, SPAN, BLOCK_C):
            c = span * SPAN + start + classes
            _store_zero(gradient, gradient_strides, n, k, c, MEMBERS, CLASSES, VECTOR)
            if REST_K:
                _store_zero(gradient, gradient_strides, n, k_r, c, MEMBERS, CLASSES, VECTOR)
    return value


@triton.jit
def _member_terms(row, top, total, k, factor, lam, s, a, FAST: tl.constexpr):
    """Members' logits, maxima and numbers, factor, its products with λ s α / total and s (1-λ) / total; α / total."""
    inverse = _reciprocal(total, FAST)
    return row, top, k, factor, factor * lam * s * a * inverse, factor * s * (1 - lam) * inverse, a * inverse


# fmt: off
@triton.jit
def _add_block(
    block_dots, mixture_sums, retry, own, rest, gradient, gradient_strides, target, weight, mixture, logits_c, target_n,
    target_c, mixture_n, mixture_c, smoothing, label, n, c, samples, lam, s, MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr, VECTOR: tl.constexpr, REST_K: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    PROBABILITIES: tl.constexpr, WEIGHTED: tl.constexpr, MIXTURE: tl.constexpr, SCALE: tl.constexpr,
    SMOOTHED: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Write the gradient of a block of classes, and add its Σ_k <u, t> and Σ_c q̄_c to the sums given."""
    row, top, k, factor, lam_s_alpha, s_own, share = own
    row_r, top_r, k_r, factor_r, lam_s_alpha_r, s_own_r, share_r = rest
    mask, mask_r = (c < CLASSES) & (k < MEMBERS), (c < CLASSES) & (k_r < MEMBERS)
    t = _load_logits(row + c * logits_c, mask, ACC, "evict_first") - top
    e = _exp(t, FAST)
    if REST_K:
        t_r = _load_logits(row_r + c * logits_c, mask_r, ACC, "evict_first") - top_r
        e_r = _exp(t_r, FAST)
    wp = _weighted_target(
        target, target_n, target_c, weight, smoothing, label, n, c, samples, CLASSES, PROBABILITIES, WEIGHTED,
        SMOOTHED, ACC,
    )  # fmt: skip
    if MIXTURE:
        mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=c < CLASSES, other=0.0).to(ACC)
        mixture_sums += tl.sum(mean, 3, keep_dims=True)
    else:
        mean = tl.sum(share * e, 2, keep_dims=True)
        if REST_K:
            mean += tl.sum(share_r * e_r, 2, keep_dims=True)
    b = lam * s * mean - wp  # (vectors, 1, 1, classes)
    if WITH_GRADIENT:
        place = _gradient_place(gradient_strides, n, k, c, VECTOR)
        _store(gradient + place, mask, _logit_gradient(e, s_own, factor * b, factor, SCALE))
        if REST_K:
            place = _gradient_place(gradient_strides, n, k_r, c, VECTOR)
            _store(gradient + place, mask_r, _logit_gradient(e_r, s_own_r, factor_r * b, factor_r, SCALE))
    if retry:
        block_dots += _u_dot_t(t, e, lam_s_alpha, b, factor, c, CLASSES, SCALE, 2)
        if REST_K:
            block_dots += _u_dot_t(t_r, e_r, lam_s_alpha_r, b, factor_r, c, CLASSES, SCALE, 2)
    else:
        sum_t, e_dot_t = _sums_of_t(t, e, factor, SCALE, 2)
        block_dots -= _lam_q_dot_t(lam_s_alpha, e_dot_t, factor, SCALE, 2)
        if REST_K:
            sum_t_r, e_dot_t_r = _sums_of_t(t_r, e_r, factor_r, SCALE, 2)
            sum_t += sum_t_r
            block_dots -= _lam_q_dot_t(lam_s_alpha_r, e_dot_t_r, factor_r, SCALE, 2)
        block_dots += _b_dot_t(b, sum_t, c, CLASSES)
    return block_dots, mixture_sums


@triton.jit
def _gradient_place(strides, n, k, c, VECTOR: tl.constexpr):
    return (n * strides[1] + k * strides[0]) * VECTOR + c * strides[2]


@triton.jit
def _store_zero(gradient, strides, n, k, c, MEMBERS: tl.constexpr, CLASSES: tl.constexpr, VECTOR: tl.constexpr):
    zero = tl.zeros((1, 1, 1, 1), gradient.dtype.element_ty)
    tl.store(gradient + _gradient_place(strides, n, k, c, VECTOR), zero, mask=(c < CLASSES) & (k < MEMBERS))
