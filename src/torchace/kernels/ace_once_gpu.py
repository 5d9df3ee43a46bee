"""Triton kernel of the amended cross entropy for logits that fit on chip: it reads them once."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from torchace.kernels import ace_terms_gpu as terms


# fmt: off
@triton.jit
def read_once(
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
    # up to here as in `read_twice`; runs, samples
    scores, logits_r, gradient_r, target_r, scale_r, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
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
        scale += run * scale_r
        scores += run * samples
        values += run * tl.num_programs(0) * (MEMBERS if PER_MEMBER else 1)
        if DIVERSITY_ON_DEVICE:
            diversity += run
    lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if DIVERSITY_ON_DEVICE else diversity)
    mean_factor, empty = terms.mean_factor(
        counts, target, target_n, weight, upstream, samples, ignore_index, CLASSES, COUNT, COUNT_BLOCK, WEIGHTED,
        UPSTREAM, ACC,
    )  # fmt: skip
    k = tl.arange(0, BLOCK_K)[None, :, None, None]
    k_r = BLOCK_K + tl.arange(0, REST_K if REST_K else 1)[None, :, None, None]
    a, a_r = terms.load_alpha(alpha, k, MEMBERS, UNIFORM, ACC), terms.load_alpha(alpha, k_r, MEMBERS, UNIFORM, ACC)
    sum_alpha = tl.full((), 1.0, ACC)
    if not UNIFORM:
        sum_alpha = tl.sum(a) + (tl.sum(a_r) if REST_K else 0.0)
    total, total_r = tl.zeros(k.shape if PER_MEMBER else (BLOCK_N,), ACC), tl.zeros(k_r.shape, ACC)
    for group in tl.range(tl.program_id(0), tl.cdiv(samples, BLOCK_N), tl.num_programs(0), num_stages=STAGES):
        value, value_r = _process_samples(
            (logits, logits_k, logits_n, logits_c), (gradient, gradient_k, gradient_n, gradient_c),
            (scale, scale_k, scale_n), target, target_n, weight, mean_weight, scores, lam, mean_factor, k, k_r, a, a_r,
            sum_alpha, smoothing, ignore_index, group * BLOCK_N + tl.arange(0, BLOCK_N), samples, MEMBERS, CLASSES,
            VECTOR, BLOCK_K, REST_K, BLOCK_C, WITH_GRADIENT, WEIGHTED, SCALE, SMOOTHED, ACC, FAST, PER_MEMBER,
        )  # fmt: skip
        total += value
        total_r += value_r
    if PER_MEMBER:
        values += tl.program_id(0) * MEMBERS
        tl.store(values + k, total, mask=k < MEMBERS)
        if REST_K:
            tl.store(values + k_r, total_r, mask=k_r < MEMBERS)
    else:
        tl.store(values + tl.program_id(0), tl.sum(total) + empty)


# fmt: off
@triton.jit
def _process_samples(
    logits, gradient, scale, target, target_n, weight, mean_weight, scores, lam, mean_factor, k, k_r, a, a_r,
    sum_alpha, smoothing, ignore_index, sample, samples, MEMBERS: tl.constexpr, CLASSES: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr, BLOCK_C: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, SCALE: tl.constexpr, SMOOTHED: tl.constexpr,
    ACC: tl.constexpr, FAST: tl.constexpr, PER_MEMBER: tl.constexpr,
):
    # fmt: on
    """Write gradient and scores of some samples; return their values, or those of the two groups of members.

    `logits` and `gradient` are a pointer and the strides of members, samples and classes; `scale` has no classes.
    """
    n = sample.to(tl.int64)[:, None, None, None]
    vector = (tl.arange(0, BLOCK_C // VECTOR) * VECTOR)[None, None, :, None]  # the first class of each
    c = vector + tl.arange(0, VECTOR)[None, None, None, :]
    place, mask = _offsets(logits, sample, samples, 0, BLOCK_K, MEMBERS, CLASSES, VECTOR, BLOCK_C)
    z = _load_logits(place, mask, c, CLASSES, VECTOR, ACC)
    if REST_K:
        place_r, mask_r = _offsets(logits, sample, samples, BLOCK_K, REST_K, MEMBERS, CLASSES, VECTOR, BLOCK_C)
        z_r = _load_logits(place_r, mask_r, c, CLASSES, VECTOR, ACC)
    label, valid, invalid = terms.load_labels(target, target_n, ignore_index, n, n < samples, CLASSES)
    if tl.max(tl.where(valid, 0, 1)) > 0:  # ignored samples may have any logits
        z = tl.where(valid, z, 0.0)
        if REST_K:
            z_r = tl.where(valid, z_r, 0.0)
    plain = tl.where(valid, mean_factor + invalid, 0.0).to(ACC)
    factor = _scale_factor(plain, scale, valid, n, k, MEMBERS, SCALE)
    t, e, sum_t, e_dot_t, total, inverse = _softmax(z, vector, factor, CLASSES, SCALE, FAST)
    mean = tl.sum((a * inverse) * e, 1, keep_dims=True)
    if REST_K:
        factor_r = _scale_factor(plain, scale, valid, n, k_r, MEMBERS, SCALE)
        t_r, e_r, sum_t_r, e_dot_t_r, total_r, inverse_r = _softmax(z_r, vector, factor_r, CLASSES, SCALE, FAST)
        mean += tl.sum((a_r * inverse_r) * e_r, 1, keep_dims=True)
        sum_t += sum_t_r
    s = terms.sum_of_weighted_target(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
    wp = terms.weighted_target(weight, smoothing, label, c, CLASSES, WEIGHTED, SMOOTHED, ACC)
    b = lam * s * mean - wp  # (samples, 1, vectors, classes)
    lam_s_alpha = factor * lam * s * a * inverse
    logs = terms.log_total_dot_u(total, factor, sum_alpha, a, s, lam, k, MEMBERS, FAST)
    if WITH_GRADIENT:
        place_g, _ = _offsets(gradient, sample, samples, 0, BLOCK_K, MEMBERS, CLASSES, VECTOR, BLOCK_C)
        _store_gradient(place_g, mask, e, b, factor, factor * s * (1 - lam) * inverse, SCALE)
    if REST_K:
        lam_s_alpha_r = factor_r * lam * s * a_r * inverse_r
        logs_r = terms.log_total_dot_u(total_r, factor_r, sum_alpha, a_r, s, lam, k_r, MEMBERS, FAST)
        if WITH_GRADIENT:
            place_g, _ = _offsets(gradient, sample, samples, BLOCK_K, REST_K, MEMBERS, CLASSES, VECTOR, BLOCK_C)
            _store_gradient(place_g, mask_r, e_r, b, factor_r, factor_r * s * (1 - lam) * inverse_r, SCALE)
    value_r = tl.zeros(k_r.shape, ACC)
    if PER_MEMBER:
        value = _member_values(t, e, lam_s_alpha, b, factor, logs, c, CLASSES, SCALE)
        log_q = _label_log_prob(t, total, label, c, k, MEMBERS, FAST)
        log_q_r = log_q
        if REST_K:
            value_r = _member_values(t_r, e_r, lam_s_alpha_r, b, factor_r, logs_r, c, CLASSES, SCALE)
            log_q_r = _label_log_prob(t_r, total_r, label, c, k_r, MEMBERS, FAST)
        score = _mixture_score(log_q, log_q_r, MEMBERS, REST_K)
        tl.store(scores + sample, tl.reshape(score, sample.shape), mask=sample < samples)
    else:
        logs = tl.sum(logs, 1, keep_dims=True)
        dots = terms.b_dot_t(b, sum_t, c, CLASSES) - terms.lam_q_dot_t(lam_s_alpha, e_dot_t, factor, SCALE, 1)
        if REST_K:
            logs += tl.sum(logs_r, 1, keep_dims=True)
            dots -= terms.lam_q_dot_t(lam_s_alpha_r, e_dot_t_r, factor_r, SCALE, 1)
        # in the first vector only: otherwise the compiler recomputes all of it in another layout
        logs = tl.where(vector == 0, logs, 0.0)
        value = tl.reshape(tl.sum(dots - logs, 2), sample.shape)
        if tl.sum(value * 0.0) != 0.0:  # perhaps 0 times -inf
            dots = _careful_dots(
                place, mask, valid, vector, lam_s_alpha, b, factor, c, CLASSES, VECTOR, SCALE, ACC, FAST
            )
            if REST_K:
                dots += _careful_dots(
                    place_r, mask_r, valid, vector, lam_s_alpha_r, b, factor_r, c, CLASSES, VECTOR, SCALE, ACC, FAST
                )
            value = tl.reshape(tl.sum(dots - logs, 2), sample.shape)
    return value, value_r


@triton.jit
def _scale_factor(factor, scale, valid, n, k, MEMBERS: tl.constexpr, SCALE: tl.constexpr):
    """Factor of each member's loss: that of the mean times the sample's own."""
    if SCALE:
        values, scale_k, scale_n = scale
        factor *= tl.load(values + n * scale_n + k * scale_k, mask=valid & (k < MEMBERS), other=0.0)
    return factor


@triton.jit
def _softmax(z, vector, factor, CLASSES: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr):
    """Differences t from the maximum, e = exp t, Σ_k t, <e, t>, Σ e and its inverse."""
    t = _subtract_max(z, vector, CLASSES)
    e = terms.exp(t, FAST)
    sum_t, e_dot_t = terms.sums_of_t(t, e, factor, SCALE, 1)
    total = _sum_over_classes(e)
    return t, e, sum_t, e_dot_t, total, terms.reciprocal(total, FAST)


@triton.jit
def _store_gradient(place, mask, e, b, factor, s_own, SCALE: tl.constexpr):
    g = terms.logit_gradient(e, s_own, factor * b, factor, SCALE)
    terms.store(place, mask, tl.reshape(g, (g.shape[0], g.shape[1], g.shape[2] * g.shape[3])))


@triton.jit
def _member_values(t, e, lam_s_alpha, b, factor, logs, c, CLASSES: tl.constexpr, SCALE: tl.constexpr):
    u_times_t = terms.u_times_t(t, e, lam_s_alpha, b, factor, c, CLASSES, SCALE)
    return tl.sum(_sum_over_classes(u_times_t) - logs, 0, keep_dims=True)


# fmt: off
@triton.jit
def _careful_dots(
    place, mask, valid, vector, lam_s_alpha, b, factor, c, CLASSES: tl.constexpr, VECTOR: tl.constexpr,
    SCALE: tl.constexpr, ACC: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Σ_k <u, t> of some members, finite wherever possible."""
    z = tl.where(valid, _load_logits(place, mask, c, CLASSES, VECTOR, ACC), 0.0)
    t = _subtract_max(z, vector, CLASSES)
    return terms.u_dot_t(t, terms.exp(t, FAST), lam_s_alpha, b, factor, c, CLASSES, SCALE, 1)


@triton.jit
def _label_log_prob(t, total, label, c, k, MEMBERS: tl.constexpr, FAST: tl.constexpr):
    """Log-probability of the label, `(samples, members, 1, 1)`: finite or NaN; LOWEST for padding."""
    log_q = _sum_over_classes(tl.where(c == label, t, 0.0)) - terms.log(total, FAST)
    return tl.where((k >= MEMBERS) | (log_q < terms.LOWEST), terms.LOWEST, log_q)


@triton.jit
def _mixture_score(log_q, log_q_r, MEMBERS: tl.constexpr, REST_K: tl.constexpr):
    """Cross entropy of the members' mean, from the labels' log-probabilities."""
    largest = tl.max(log_q, 1, keep_dims=True)
    if REST_K:
        largest = tl.maximum(largest, tl.max(log_q_r, 1, keep_dims=True))
    ratio = tl.sum(tl.exp(log_q - largest), 1, keep_dims=True)
    if REST_K:
        ratio += tl.sum(tl.exp(log_q_r - largest), 1, keep_dims=True)
    return -(largest + tl.log(ratio / MEMBERS))


# fmt: off
@triton.jit
def _offsets(
    tensor, sample, samples, FIRST: tl.constexpr, COUNT: tl.constexpr, MEMBERS: tl.constexpr, CLASSES: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # fmt: on
    """Pointers `(samples, members, classes)` and their mask."""
    pointer, stride_k, stride_n, stride_c = tensor
    n = sample.to(tl.int64)[:, None, None]
    k = FIRST + tl.arange(0, COUNT).to(tl.int64)[None, :, None]
    c = tl.arange(0, BLOCK_C)[None, None, :]
    mask = (n < samples) & (k < MEMBERS) & (c < CLASSES)
    return pointer + ((n * stride_n + k * stride_k) * VECTOR + c * stride_c), mask


@triton.jit
def _sum_over_classes(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _load_logits(place, mask, c, CLASSES: tl.constexpr, VECTOR: tl.constexpr, ACC: tl.constexpr):
    """Logits `(samples, members, vectors, classes of a vector)`: one thread holds a vector of all members.

    They are 0 for vectors of padding, NO_CLASS for padding inside a vector.
    """
    z = tl.load(place, mask=mask, other=0.0)
    z = tl.reshape(z, (z.shape[0], z.shape[1], z.shape[2] // VECTOR, VECTOR)).to(ACC)
    if CLASSES % VECTOR:
        z = tl.where(c < CLASSES, z, terms.NO_CLASS)
    return z


@triton.jit
def _subtract_max(z, vector, CLASSES: tl.constexpr):
    top = tl.where(vector < CLASSES, tl.max(z, 3, keep_dims=True), terms.LOWEST)
    return z - tl.where(vector < CLASSES, tl.max(top, 2, keep_dims=True), -terms.LOWEST)
