"""Triton kernel of the amended cross entropy for logits that do not fit on chip: it reads them twice."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from torchace.kernels import ace_terms_gpu as terms


# fmt: off
@triton.jit
def read_twice(
    # pointers
    logits, gradient, values, target, weight, mean_weight, alpha, scale, counts, upstream, diversity,
    # strides; those of logits and gradient, but for the classes', are divided by VECTOR
    logits_k, logits_n, logits_c, gradient_k, gradient_n, gradient_c, target_n, scale_k, scale_n,
    smoothing, ignore_index, samples,
    # sizes
    MEMBERS: tl.constexpr, CLASSES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    # options
    WITH_GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, UNIFORM: tl.constexpr, SCALE: tl.constexpr,
    COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, UPSTREAM: tl.constexpr, DIVERSITY_ON_DEVICE: tl.constexpr,
    SMOOTHED: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Process one sample's classes block by block: softmax statistics, then value and gradient."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)[None, None, :, None]
    k_r = (BLOCK_K + tl.arange(0, REST_K if REST_K else 1)).to(tl.int64)[None, None, :, None]
    row, row_r = logits + (n * logits_n + k * logits_k) * VECTOR, logits + (n * logits_n + k_r * logits_k) * VECTOR
    out, out_r = (n * gradient_n + k * gradient_k) * VECTOR, (n * gradient_n + k_r * gradient_k) * VECTOR
    out, out_r = gradient + out, gradient + out_r
    label, valid, invalid = terms.load_labels(target, target_n, ignore_index, n, n < samples, CLASSES)
    mean_factor, value = terms.mean_factor(
        counts, target, target_n, weight, upstream, samples, ignore_index, CLASSES, COUNT, COUNT_BLOCK, WEIGHTED,
        UPSTREAM, ACC,
    )  # fmt: skip
    if valid:
        lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if DIVERSITY_ON_DEVICE else diversity)
        s = terms.sum_of_weighted_target(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
        factor = tl.full((1, 1, 1, 1), 0.0, ACC) + mean_factor + invalid
        scale += n * scale_n
        first = _member_terms(
            row, logits_c, alpha, scale, scale_k, k, factor, lam, s, MEMBERS, CLASSES, BLOCK_C, VECTOR, UNIFORM, SCALE,
            FAST, ACC,
        )  # fmt: skip
        rest = first
        if REST_K:
            rest = _member_terms(
                row_r, logits_c, alpha, scale, scale_k, k_r, factor, lam, s, MEMBERS, CLASSES, BLOCK_C, VECTOR,
                UNIFORM, SCALE, FAST, ACC,
            )  # fmt: skip
        dots = _read_again(
            row, row_r, logits_c, out, out_r, gradient_c, k, k_r, first, rest, weight, smoothing, label, lam, s,
            MEMBERS, CLASSES, VECTOR, REST_K, BLOCK_C, WITH_GRADIENT, False, WEIGHTED, SCALE, SMOOTHED, ACC, FAST,
        )  # fmt: skip
        if dots != dots:  # perhaps 0 times -inf
            dots = _read_again(
                row, row_r, logits_c, out, out_r, gradient_c, k, k_r, first, rest, weight, smoothing, label, lam, s,
                MEMBERS, CLASSES, VECTOR, REST_K, BLOCK_C, False, True, WEIGHTED, SCALE, SMOOTHED, ACC, FAST,
            )  # fmt: skip
        sum_alpha = tl.full((), 1.0, ACC)
        if not UNIFORM:
            sum_alpha = tl.sum(first[2]) + (tl.sum(rest[2]) if REST_K else 0.0)
        logs = _log_terms(first, sum_alpha, s, lam, k, MEMBERS, FAST)
        if REST_K:
            logs += _log_terms(rest, sum_alpha, s, lam, k_r, MEMBERS, FAST)
        value += dots - logs
    elif WITH_GRADIENT:
        for start in range(0, CLASSES, BLOCK_C):
            c = start + _block_classes(BLOCK_C, VECTOR)
            zero = tl.zeros((1, 1, 1, 1), gradient.dtype.element_ty)
            tl.store(out + c * gradient_c, zero, mask=(c < CLASSES) & (k < MEMBERS))
            if REST_K:
                tl.store(out_r + c * gradient_c, zero, mask=(c < CLASSES) & (k_r < MEMBERS))
    tl.store(values + n, value)


# fmt: off
@triton.jit
def _member_terms(
    row, logits_c, alpha, scale, scale_k, k, factor, lam, s, MEMBERS: tl.constexpr, CLASSES: tl.constexpr,
    BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, UNIFORM: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    # fmt: on
    """Maximum, Σ exp, α, factor, and factors of e in λ s α q, s (1-λ) q and α q, of some members."""
    tops = tl.full((BLOCK_C // VECTOR, 1, row.shape[2], 1), terms.LOWEST, ACC)
    totals = tl.zeros((BLOCK_C // VECTOR, 1, row.shape[2], 1), ACC)
    for start in tl.range(0, CLASSES, BLOCK_C, num_stages=1):
        c = start + _block_classes(BLOCK_C, VECTOR)
        z = _load_logits(row + c * logits_c, (k < MEMBERS) & (c < CLASSES), ACC, "evict_last")
        larger = tl.maximum(tops, tl.max(z, 3, keep_dims=True))
        totals = totals * terms.exp(tops - larger, FAST) + tl.sum(terms.exp(z - larger, FAST), 3, keep_dims=True)
        tops = larger
    top = tl.max(tops, 0, keep_dims=True)
    total = tl.sum(totals * tl.exp(tops - top), 0, keep_dims=True)
    a = terms.load_alpha(alpha, k, MEMBERS, UNIFORM, ACC)
    if SCALE:
        factor = factor * tl.load(scale + k * scale_k, mask=k < MEMBERS, other=0.0)
    inverse = terms.reciprocal(total, FAST)
    return top, total, a, factor, factor * lam * s * a * inverse, factor * s * (1 - lam) * inverse, a * inverse


# fmt: off
@triton.jit
def _read_again(
    row, row_r, logits_c, out, out_r, gradient_c, k, k_r, first, rest, weight, smoothing, label, lam, s,
    MEMBERS: tl.constexpr, CLASSES: tl.constexpr, VECTOR: tl.constexpr, REST_K: tl.constexpr, BLOCK_C: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, CAREFUL: tl.constexpr, WEIGHTED: tl.constexpr, SCALE: tl.constexpr,
    SMOOTHED: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Return Σ_k <u, t> and write the gradient. CAREFUL: finite wherever possible."""
    top, _, _, factor, lam_s_alpha, s_own, share = first
    top_r, _, _, factor_r, lam_s_alpha_r, s_own_r, share_r = rest
    dots = tl.zeros((BLOCK_C // VECTOR, 1, 1, 1), ACC)
    for past in tl.range(0, tl.cdiv(CLASSES, BLOCK_C) * BLOCK_C, BLOCK_C, num_stages=1):
        # backward: the logits read last are still in the cache
        c = (tl.cdiv(CLASSES, BLOCK_C) - 1) * BLOCK_C - past + _block_classes(BLOCK_C, VECTOR)
        mask, mask_r = (c < CLASSES) & (k < MEMBERS), (c < CLASSES) & (k_r < MEMBERS)
        t = _load_logits(row + c * logits_c, mask, ACC, "evict_first") - top
        e = terms.exp(t, FAST)
        mean = tl.sum(share * e, 2, keep_dims=True)
        if REST_K:
            t_r = _load_logits(row_r + c * logits_c, mask_r, ACC, "evict_first") - top_r
            e_r = terms.exp(t_r, FAST)
            mean += tl.sum(share_r * e_r, 2, keep_dims=True)
        wp = terms.weighted_target(weight, smoothing, label, c, CLASSES, WEIGHTED, SMOOTHED, ACC)
        b = lam * s * mean - wp  # (vectors, 1, 1, classes)
        if WITH_GRADIENT:
            terms.store(out + c * gradient_c, mask, terms.logit_gradient(e, s_own, factor * b, factor, SCALE))
            if REST_K:
                own = terms.logit_gradient(e_r, s_own_r, factor_r * b, factor_r, SCALE)
                terms.store(out_r + c * gradient_c, mask_r, own)
        if CAREFUL:
            dots += terms.u_dot_t(t, e, lam_s_alpha, b, factor, c, CLASSES, SCALE, 2)
            if REST_K:
                dots += terms.u_dot_t(t_r, e_r, lam_s_alpha_r, b, factor_r, c, CLASSES, SCALE, 2)
        else:
            sum_t, e_dot_t = terms.sums_of_t(t, e, factor, SCALE, 2)
            dots -= terms.lam_q_dot_t(lam_s_alpha, e_dot_t, factor, SCALE, 2)
            if REST_K:
                sum_t_r, e_dot_t_r = terms.sums_of_t(t_r, e_r, factor_r, SCALE, 2)
                sum_t += sum_t_r
                dots -= terms.lam_q_dot_t(lam_s_alpha_r, e_dot_t_r, factor_r, SCALE, 2)
            dots += terms.b_dot_t(b, sum_t, c, CLASSES)
    return tl.sum(dots)


@triton.jit
def _log_terms(members, sum_alpha, s, lam, k, MEMBERS: tl.constexpr, FAST: tl.constexpr):
    _, total, a, factor, _, _, _ = members
    return tl.sum(terms.log_total_dot_u(total, factor, sum_alpha, a, s, lam, k, MEMBERS, FAST))


@triton.jit
def _block_classes(BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):
    """Classes of a block, `(vectors, 1, 1, classes of a vector)`."""
    vector = (tl.arange(0, BLOCK_C // VECTOR) * VECTOR)[:, None, None, None]
    return vector + tl.arange(0, VECTOR)[None, None, None, :]


@triton.jit
def _load_logits(place, mask, ACC: tl.constexpr, POLICY: tl.constexpr):
    """Logits; NO_CLASS for padding."""
    if place.dtype.element_ty == tl.float16:  # NO_CLASS would be -inf
        z = tl.where(mask, tl.load(place, mask=mask, other=0.0, eviction_policy=POLICY).to(ACC), terms.NO_CLASS)
    else:
        z = tl.load(place, mask=mask, other=terms.NO_CLASS, eviction_policy=POLICY).to(ACC)
    return z
