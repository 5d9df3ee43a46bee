"""Triton kernel of the amended cross entropy for logits that fit on chip: it reads them once."""

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
    _log,
    _log_total_dot_u,
    _logit_gradient,
    _mean_factor,
    _reciprocal,
    _store,
    _sum_of_weighted_target,
    _sums_of_t,
    _u_dot_t,
    _u_times_t,
    _weighted_target,
)


# fmt: off
@triton.jit
def _read_once(
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
    # up to here as in `_read_twice`; runs, samples
    scores, logits_r, gradient_r, target_r, mixture_r, scale_r, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    RUNS: tl.constexpr, PER_MEMBER: tl.constexpr,
):
    # fmt: on
    """Process some samples of a run with all their logits, then the program's next samples.

    PER_MEMBER: write a value per member, and each sample's cross entropy of the members' mean to `scores`.
    """
    if RUNS:
        run = tl.program_id(1).to(tl.int64)
        logits += run * logits_r * VECTOR
        gradient += run * gradient_r * VECTOR
        target += run * target_r
        mixture += run * mixture_r
        scale += run * scale_r
        scores += run * samples
        values += run * tl.num_programs(0) * (MEMBERS if PER_MEMBER else 1)
        if DIVERSITY_ON_DEVICE:
            diversity += run
    vector = (tl.arange(0, BLOCK_C // VECTOR) * VECTOR)[None, None, :, None]  # the first class of each
    c = vector + tl.arange(0, VECTOR)[None, None, None, :]
    k = tl.arange(0, BLOCK_K)[None, :, None, None]
    k_r = BLOCK_K + tl.arange(0, REST_K if REST_K else 1)[None, :, None, None]
    lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if DIVERSITY_ON_DEVICE else diversity)
    a, a_r = _load_alpha(alpha, k, MEMBERS, UNIFORM, ACC), _load_alpha(alpha, k_r, MEMBERS, UNIFORM, ACC)
    sum_alpha = tl.full((), 1.0, ACC)
    if not UNIFORM:
        sum_alpha = tl.sum(a) + (tl.sum(a_r) if REST_K else 0.0)
    mean_factor, empty = _mean_factor(
        counts, target, target_n, weight, upstream, samples, ignore_index, CLASSES, COUNT, COUNTS, WEIGHTED, UPSTREAM,
        ACC,
    )  # fmt: skip
    total_value = tl.zeros((BLOCK_N,), ACC)
    member_values = tl.zeros((1, BLOCK_K, 1, 1), ACC)
    member_values_r = tl.zeros((1, REST_K if REST_K else 1, 1, 1), ACC)
    for group in tl.range(tl.program_id(0), tl.cdiv(samples, BLOCK_N), tl.num_programs(0), num_stages=STAGES):
        sample = group * BLOCK_N + tl.arange(0, BLOCK_N)
        total_value, member_values, member_values_r = _process_samples(
            logits, gradient, target, weight, mean_weight, mixture, scale, scores, (logits_k, logits_n, logits_c),
            (gradient_k, gradient_n, gradient_c), target_n, target_c, mixture_n, mixture_c, scale_k, scale_n, smoothing,
            ignore_index, sample, samples, vector, c, k, k_r, lam, a, a_r, sum_alpha, mean_factor, total_value,
            member_values, member_values_r, MEMBERS, CLASSES, VECTOR, BLOCK_K, REST_K, BLOCK_C, BLOCK_N, WITH_GRADIENT,
            PROBABILITIES, WEIGHTED, MIXTURE, SCALE, SMOOTHED, ACC, FAST, PER_MEMBER,
        )  # fmt: skip
    if PER_MEMBER:
        values += tl.program_id(0) * MEMBERS
        tl.store(values + k, member_values, mask=k < MEMBERS)
        if REST_K:
            tl.store(values + k_r, member_values_r, mask=k_r < MEMBERS)
    else:
        tl.store(values + tl.program_id(0), tl.sum(total_value) + empty)


# fmt: off
@triton.jit
def _process_samples(
    logits, gradient, target, weight, mean_weight, mixture, scale, scores, logits_strides, gradient_strides, target_n,
    target_c, mixture_n, mixture_c, scale_k, scale_n, smoothing, ignore_index, sample, samples, vector, c, k, k_r, lam,
    a, a_r, sum_alpha, mean_factor, total_value, member_values, member_values_r, MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, WITH_GRADIENT: tl.constexpr, PROBABILITIES: tl.constexpr, WEIGHTED: tl.constexpr,
    MIXTURE: tl.constexpr, SCALE: tl.constexpr, SMOOTHED: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
    PER_MEMBER: tl.constexpr,
):
    # fmt: on
    """Write gradient and scores of some samples, and add their values to the sums given."""
    n = sample.to(tl.int64)[:, None, None, None]
    z, place, mask = _load_members(
        logits, logits_strides, sample, samples, c, 0, BLOCK_K, MEMBERS, CLASSES, VECTOR, BLOCK_C, ACC
    )
    z_r, place_r, mask_r = z, place, mask
    if REST_K:
        z_r, place_r, mask_r = _load_members(
            logits, logits_strides, sample, samples, c, BLOCK_K, REST_K, MEMBERS, CLASSES, VECTOR, BLOCK_C, ACC
        )
    label, valid, invalid = _load_labels(target, target_n, ignore_index, n, n < samples, CLASSES, PROBABILITIES)
    if tl.max(tl.where(valid, 0, 1)) > 0:  # ignored samples may have any logits
        z = tl.where(valid, z, 0.0)
        if REST_K:
            z_r = tl.where(valid, z_r, 0.0)
    factor = tl.where(valid, mean_factor + invalid, 0.0).to(ACC)
    factor_r = factor
    if SCALE:
        factor = factor * tl.load(scale + n * scale_n + k * scale_k, mask=valid, other=0.0)
        if REST_K:
            scale_place = scale + n * scale_n + k_r * scale_k
            factor_r = factor_r * tl.load(scale_place, mask=valid & (k_r < MEMBERS), other=0.0)
    own = _softmax_terms(z, factor, None, vector, CLASSES, SCALE, FAST)
    rest = own
    if REST_K:
        rest = _softmax_terms(z_r, factor_r, own[2], vector, CLASSES, SCALE, FAST)
    s, b, sum_mixture = _shared_terms(
        own, rest, a, a_r, lam, sum_alpha, target, target_n, target_c, weight, mean_weight, mixture, mixture_n,
        mixture_c, smoothing, label, valid, n, c, samples, CLASSES, REST_K, PROBABILITIES, WEIGHTED, MIXTURE, SMOOTHED,
        ACC,
    )  # fmt: skip
    lam_s_alpha, logs = _store_gradient(
        gradient, gradient_strides, sample, samples, mask, own, factor, lam, s, a, b, sum_mixture, k, 0, BLOCK_K,
        MEMBERS, CLASSES, VECTOR, BLOCK_C, WITH_GRADIENT, SCALE, FAST,
    )  # fmt: skip
    lam_s_alpha_r, logs_r = lam_s_alpha, logs
    if REST_K:
        lam_s_alpha_r, logs_r = _store_gradient(
            gradient, gradient_strides, sample, samples, mask_r, rest, factor_r, lam, s, a_r, b, sum_mixture, k_r,
            BLOCK_K, REST_K, MEMBERS, CLASSES, VECTOR, BLOCK_C, WITH_GRADIENT, SCALE, FAST,
        )  # fmt: skip
    if PER_MEMBER:
        member_values, log_q, largest = _add_member_values(
            member_values, own, lam_s_alpha, logs, b, factor, label, c, k, MEMBERS, CLASSES, SCALE, FAST
        )
        if REST_K:
            member_values_r, log_q_r, largest_r = _add_member_values(
                member_values_r, rest, lam_s_alpha_r, logs_r, b, factor_r, label, c, k_r, MEMBERS, CLASSES, SCALE, FAST
            )
            largest = tl.maximum(largest, largest_r)
        ratio = tl.sum(tl.exp(log_q - largest), 1, keep_dims=True)
        if REST_K:
            ratio += tl.sum(tl.exp(log_q_r - largest), 1, keep_dims=True)
        score = -(largest + tl.log(ratio / MEMBERS))
        tl.store(scores + sample, tl.reshape(score, (BLOCK_N,)), mask=sample < samples)
    else:
        total_value += _value(
            own, rest, lam_s_alpha, lam_s_alpha_r, logs, logs_r, b, factor, factor_r, logits + place, logits + place_r,
            mask, mask_r, valid, vector, c, CLASSES, VECTOR, REST_K, BLOCK_N, SCALE, ACC, FAST,
        )  # fmt: skip
    return total_value, member_values, member_values_r


@triton.jit
def _softmax_terms(z, factor, others, vector, CLASSES: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr):
    """t, exp t, Σ_k factor t with that of `others`, <exp t, t>, the sum of exp t and its reciprocal."""
    t = _subtract_max(z, vector, CLASSES)
    e = _exp(t, FAST)
    sum_t, e_dot_t = _sums_of_t(t, e, factor, SCALE, 1)  # t is unused after this, unless PER_MEMBER
    if others is not None:
        sum_t = others + sum_t
    total = _sum_over_classes(e)
    return t, e, sum_t, e_dot_t, total, _reciprocal(total, FAST)


# fmt: off
@triton.jit
def _shared_terms(
    own, rest, a, a_r, lam, sum_alpha, target, target_n, target_c, weight, mean_weight, mixture, mixture_n, mixture_c,
    smoothing, label, valid, n, c, samples, CLASSES: tl.constexpr, REST_K: tl.constexpr, PROBABILITIES: tl.constexpr,
    WEIGHTED: tl.constexpr, MIXTURE: tl.constexpr, SMOOTHED: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """s, b, and the sum of q̄ over classes."""
    wp = _weighted_target(
        target, target_n, target_c, weight, smoothing, label, n, c, samples, CLASSES, PROBABILITIES, WEIGHTED,
        SMOOTHED, ACC,
    )  # fmt: skip
    if PROBABILITIES:
        s = _sum_over_classes(wp)
    else:
        s = _sum_of_weighted_target(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
    if MIXTURE:
        mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=(c < CLASSES) & valid, other=0.0).to(ACC)
        sum_mixture = _sum_over_classes(mean)
    else:
        mean, sum_mixture = tl.sum((a * own[5]) * own[1], 1, keep_dims=True), sum_alpha
        if REST_K:
            mean += tl.sum((a_r * rest[5]) * rest[1], 1, keep_dims=True)
    return s, lam * s * mean - wp, sum_mixture  # b: (samples, 1, vectors, classes)


# fmt: off
@triton.jit
def _store_gradient(
    gradient, strides, sample, samples, mask, own, factor, lam, s, a, b, sum_mixture, k, FIRST: tl.constexpr,
    COUNT: tl.constexpr, MEMBERS: tl.constexpr, CLASSES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_C: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Write the gradient of some members; return factor λ s α / total, and L Σ_c u_c."""
    _, e, _, _, total, inverse = own
    lam_s_alpha, s_own = factor * lam * s * a * inverse, factor * s * (1 - lam) * inverse
    if WITH_GRADIENT:
        place, _ = _offsets(strides, sample, samples, FIRST, COUNT, MEMBERS, CLASSES, VECTOR, BLOCK_C)
        _store(gradient + place, mask, _join_vectors(_logit_gradient(e, s_own, factor * b, factor, SCALE)))
    return lam_s_alpha, _log_total_dot_u(total, factor, sum_mixture, a, s, lam, 1.0, k, MEMBERS, FAST)


# fmt: off
@triton.jit
def _add_member_values(
    values, own, lam_s_alpha, logs, b, factor, label, c, k, MEMBERS: tl.constexpr, CLASSES: tl.constexpr,
    SCALE: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Add members' values to `values`; also return the label's log-probabilities, and the largest of the members'."""
    t, e, _, _, total, _ = own
    u_times_t = _u_times_t(t, e, lam_s_alpha, b, factor, c, CLASSES, SCALE)
    values += tl.sum(_sum_over_classes(u_times_t) - logs, 0, keep_dims=True)
    log_q = _label_log_prob(t, total, label, c, k, MEMBERS, FAST)
    return values, log_q, tl.max(log_q, 1, keep_dims=True)


# fmt: off
@triton.jit
def _value(
    own, rest, lam_s_alpha, lam_s_alpha_r, log_terms, log_terms_r, b, factor, factor_r, place, place_r, mask, mask_r,
    valid, vector, c, CLASSES: tl.constexpr, VECTOR: tl.constexpr, REST_K: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Value of each sample, summed over members, `(samples,)`."""
    logs = tl.sum(log_terms, 1, keep_dims=True)
    dots = _b_dot_t(b, rest[2], c, CLASSES) - _lam_q_dot_t(lam_s_alpha, own[3], factor, SCALE, 1)
    if REST_K:
        logs += tl.sum(log_terms_r, 1, keep_dims=True)
        dots -= _lam_q_dot_t(lam_s_alpha_r, rest[3], factor_r, SCALE, 1)
    # in the first vector only: otherwise the compiler recomputes all of it in another layout
    logs = tl.where(vector == 0, logs, 0.0)
    value = tl.reshape(tl.sum(dots - logs, 2), (BLOCK_N,))
    if tl.sum(value * 0.0) != 0.0:  # perhaps 0 times -inf
        again = tl.where(valid, _load_logits(place, mask, c, CLASSES, VECTOR, ACC), 0.0)
        again = _subtract_max(again, vector, CLASSES)
        dots = _u_dot_t(again, _exp(again, FAST), lam_s_alpha, b, factor, c, CLASSES, SCALE, 1)
        if REST_K:
            again_r = tl.where(valid, _load_logits(place_r, mask_r, c, CLASSES, VECTOR, ACC), 0.0)
            again_r = _subtract_max(again_r, vector, CLASSES)
            dots += _u_dot_t(again_r, _exp(again_r, FAST), lam_s_alpha_r, b, factor_r, c, CLASSES, SCALE, 1)
        value = tl.reshape(tl.sum(dots - logs, 2), (BLOCK_N,))
    return value


@triton.jit
def _label_log_prob(t, total, label, c, k, MEMBERS: tl.constexpr, FAST: tl.constexpr):
    """Log-probability of the label, `(samples, members, 1, 1)`: finite or NaN; LOWEST for padding."""
    log_q = _sum_over_classes(tl.where(c == label, t, 0.0)) - _log(total, FAST)
    return tl.where((k >= MEMBERS) | (log_q < LOWEST), LOWEST, log_q)


# fmt: off
@triton.jit
def _offsets(
    strides, sample, samples, FIRST: tl.constexpr, COUNT: tl.constexpr, MEMBERS: tl.constexpr, CLASSES: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # fmt: on
    """Offsets `(samples, members, classes)` and their mask."""
    n = sample.to(tl.int64)[:, None, None]
    k = FIRST + tl.arange(0, COUNT).to(tl.int64)[None, :, None]
    c = tl.arange(0, BLOCK_C)[None, None, :]
    place = (n * strides[1] + k * strides[0]) * VECTOR + c * strides[2]
    return place, (n < samples) & (k < MEMBERS) & (c < CLASSES)


# fmt: off
@triton.jit
def _load_members(
    logits, strides, sample, samples, c, FIRST: tl.constexpr, COUNT: tl.constexpr, MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """Logits of some members, their offsets and the mask of these."""
    place, mask = _offsets(strides, sample, samples, FIRST, COUNT, MEMBERS, CLASSES, VECTOR, BLOCK_C)
    return _load_logits(logits + place, mask, c, CLASSES, VECTOR, ACC), place, mask


@triton.jit
def _split_vectors(x, VECTOR: tl.constexpr):
    """Reshape to `(samples, members, vectors, classes of a vector)`: one thread holds a vector of all members."""
    return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // VECTOR, VECTOR))


@triton.jit
def _join_vectors(x):
    """Inverse of `_split_vectors`."""
    return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] * x.shape[3]))


@triton.jit
def _sum_over_classes(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _load_logits(place, mask, c, CLASSES: tl.constexpr, VECTOR: tl.constexpr, ACC: tl.constexpr):
    """Logits in vectors; 0 for vectors of padding, NO_CLASS for padding inside a vector."""
    z = _split_vectors(tl.load(place, mask=mask, other=0.0), VECTOR).to(ACC)
    if CLASSES % VECTOR:
        z = tl.where(c < CLASSES, z, NO_CLASS)
    return z


@triton.jit
def _subtract_max(z, vector, CLASSES: tl.constexpr):
    top = tl.where(vector < CLASSES, tl.max(z, 3, keep_dims=True), LOWEST)
    return z - tl.where(vector < CLASSES, tl.max(top, 2, keep_dims=True), -LOWEST)
