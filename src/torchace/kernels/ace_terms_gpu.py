"""Device functions shared by the two Triton kernels of the amended cross entropy: value and closed-form gradient.

With w∘p the weighted target, s = Σ_c w_c p_c, t^k = z^k - max z^k, L^k = log Σ exp t^k, b = λ s q̄ - w∘p, which all
members share, and u^k = b - λ s α^k q^k,

    e^k = <u^k, t^k> - L^k Σ_c u^k_c        ∂e^k/∂z^k = s (1-λ) q^k + b

Factors of a member, not its q^k, are divided by the softmax total. Members are padded to two powers of two (BLOCK_K and
REST_K; names of the second end in `_r`). A thread holds a vector of classes of all members:

    Σ_k <u^k, t^k> = <b, Σ_k t^k> - λ s Σ_k α^k <q^k, t^k>

Logits that do not fit on chip (`ace_once_gpu`) are read twice (`ace_twice_gpu`): for t and L, then for the rest. Sums
do not depend on the order of programs: results are deterministic.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NO_CLASS = tl.constexpr(-(2.0**123))  # logit of padding: finite, so that 0 times it is 0; the same in bf16
LOWEST = tl.constexpr(-(2.0**124))


# fmt: off
@triton.jit
def _count_samples(
    target, stride, weight, counts, samples, classes, ignore_index, parts, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Partial denominators of the mean."""
    first = tl.program_id(0) * parts
    total = tl.full((), 0.0, counts.dtype.element_ty)
    for part in range(parts):
        total += _count(target, stride, weight, (first + part) * BLOCK, samples, classes, ignore_index, WEIGHTED, BLOCK)
    tl.store(counts + tl.program_id(0), total)


@triton.jit
def _count(target, stride, weight, start, samples, classes, ignore_index, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    sample = start + tl.arange(0, BLOCK)
    there = sample < samples
    label = tl.load(target + sample * stride, mask=there, other=0).to(tl.int64)
    there = there & (label != ignore_index)
    if WEIGHTED:
        counted = tl.load(weight + label, mask=there & (label >= 0) & (label < classes), other=0.0)
    else:
        counted = tl.where(there, 1, 0)
    return tl.sum(counted, 0)


@triton.jit
def _load_labels(target, target_n, ignore_index, n, real, CLASSES: tl.constexpr, PROBABILITIES: tl.constexpr):
    """Labels, whether each counts, and NaN where a label is out of range, else 0."""
    label = tl.zeros(n.shape, tl.int32)
    valid = real
    invalid = tl.zeros(n.shape, tl.float32)
    if not PROBABILITIES:
        label_64 = tl.load(target + n * target_n, mask=real, other=0).to(tl.int64)
        valid = real & (label_64 != ignore_index)
        in_range = valid & (label_64 >= 0) & (label_64 < CLASSES)
        invalid = tl.where(valid & ~in_range, float("nan"), 0.0)
        label = tl.where(in_range, label_64, 0).to(tl.int32)
    return label, valid, invalid


# fmt: off
@triton.jit
def _weighted_target(
    target, target_n, target_c, weight, smoothing, label, n, c, samples, CLASSES: tl.constexpr,
    PROBABILITIES: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """Weighted target w∘p; 0 for padding."""
    if PROBABILITIES:
        p = tl.load(target + n * target_n + c * target_c, mask=(n < samples) & (c < CLASSES), other=0.0).to(ACC)
    else:
        p = tl.where(c == label, tl.full((), 1.0, ACC), 0.0)
    if SMOOTHED:
        spread = (tl.full((), 0.0, ACC) + smoothing) / CLASSES
        p = tl.where(c < CLASSES, p * (1 - smoothing) + spread, 0.0)
    if WEIGHTED:
        p *= tl.load(weight + c, mask=c < CLASSES, other=0.0)
    return p


@triton.jit
def _sum_of_weighted_target(label, weight, mean_weight, smoothing, WEIGHTED: tl.constexpr, ACC: tl.constexpr):
    """Sum s of the weighted target, for class indices."""
    s = tl.full(label.shape, 1.0, ACC)
    if WEIGHTED:
        s = ((1 - smoothing) * tl.load(weight + label) + smoothing * tl.load(mean_weight)).to(ACC)
    return s


# fmt: off
@triton.jit
def _mean_factor(
    counts, target, target_n, weight, upstream, samples, ignore_index, CLASSES: tl.constexpr, COUNT: tl.constexpr,
    COUNTS: tl.constexpr, WEIGHTED: tl.constexpr, UPSTREAM: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """Factor of every sample's loss; and 0, or NaN where no sample counts.

    The factor is 1 (COUNT 0), or 1 over the sum of `counts` (1), a count made here (2), the number of samples (3), or
    the sum of `counts` in a loop (4), uniform over threads, which saves registers.
    """
    factor, empty = tl.full((), 1.0, ACC), tl.full((), 0.0, ACC)
    if COUNT == 3:
        factor = factor / samples
    elif COUNT:
        if COUNT == 1:
            total = tl.sum(tl.load(counts + tl.arange(0, COUNTS)), 0).to(ACC)
        elif COUNT == 4:
            total = tl.full((), 0.0, ACC)
            for part in tl.static_range(COUNTS):
                total += tl.load(counts + part)
        else:
            total = _count(target, target_n, weight, 0, samples, CLASSES, ignore_index, WEIGHTED, COUNTS).to(ACC)
        factor, empty = factor / total, empty / total
    if UPSTREAM:
        factor *= tl.load(upstream)
    return factor, empty


@triton.jit
def _exp(x, FAST: tl.constexpr):
    """Exponential. FAST, here and below: one instruction, which flushes numbers below 1e-38 to 0."""
    if FAST:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2_E], tl.float32, True, 1)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def _log(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) * LN_2
    else:
        y = tl.log(x)
    return y


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = 1 / x
    return y


@triton.jit
def _load_alpha(alpha, k, MEMBERS: tl.constexpr, UNIFORM: tl.constexpr, ACC: tl.constexpr):
    """Member weights α; 0 for padding."""
    if not UNIFORM:
        a = tl.load(alpha + k, mask=k < MEMBERS, other=0.0).to(ACC)
    else:
        a = tl.where(k < MEMBERS, tl.full((), 1.0 / MEMBERS, ACC), 0.0)
    return a


@triton.jit
def _sums_of_t(t, e, factor, SCALE: tl.constexpr, AXIS_K: tl.constexpr):
    """Sum over members of `factor` t for a vector's classes, and <e, t> of every member."""
    if SCALE:  # may be 0 for one member
        sum_t = tl.sum(tl.where(factor == 0, 0.0, factor * t), AXIS_K, keep_dims=True)
    else:
        sum_t = factor * tl.sum(t, AXIS_K, keep_dims=True)
    return sum_t, tl.sum(e * t, 3, keep_dims=True)


@triton.jit
def _b_dot_t(b, sum_t, c, CLASSES: tl.constexpr):
    """Σ_k <b, t>; NaN where t is -inf, see `_u_times_t`."""
    return tl.sum(tl.where(c < CLASSES, b * sum_t, 0.0), 3, keep_dims=True)


@triton.jit
def _lam_q_dot_t(lam_s_alpha, e_dot_t, factor, SCALE: tl.constexpr, AXIS_K: tl.constexpr):
    """Σ_k <b - u, t>, from `lam_s_alpha` = λ s α / total times `factor`."""
    product = lam_s_alpha * e_dot_t
    if SCALE:
        product = tl.where(factor == 0, 0.0, product)
    return tl.sum(product, AXIS_K, keep_dims=True)


@triton.jit
def _u_times_t(t, e, lam_s_alpha, b, factor, c, CLASSES: tl.constexpr, SCALE: tl.constexpr):
    """Product u·t times `factor`; 0 for a class of weight 0, even at -inf."""
    u = tl.where(c < CLASSES, factor * b - lam_s_alpha * e, 0.0)
    product = tl.where(u == 0, 0.0, u * t)
    if SCALE:
        product = tl.where(factor == 0, 0.0, product)
    return product


@triton.jit
def _u_dot_t(t, e, lam_s_alpha, b, factor, c, CLASSES: tl.constexpr, SCALE: tl.constexpr, AXIS_K: tl.constexpr):
    """Σ_k <u, t> of a vector's classes, finite wherever possible."""
    product = _u_times_t(t, e, lam_s_alpha, b, factor, c, CLASSES, SCALE)
    return tl.sum(tl.sum(product, AXIS_K, keep_dims=True), 3, keep_dims=True)


@triton.jit
def _logit_gradient(e, s_own, b, factor, SCALE: tl.constexpr):
    """Gradient, from `s_own` = s (1-λ) / total and `b`, both times `factor`."""
    g = s_own * e + b
    if SCALE:
        g = tl.where(factor == 0, 0.0, g)
    return g


@triton.jit
def _store(place, mask, g):
    tl.store(place, g.to(place.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _log_total_dot_u(total, factor, sum_mixture, a, s, lam, share, k, MEMBERS: tl.constexpr, FAST: tl.constexpr):
    """Product L Σ_c u_c, where Σ_c q̄_c is `sum_mixture` and Σ_c q_c is `share`."""
    logs = factor * s * (lam * (sum_mixture - share * a) - share) * _log(total, FAST)
    return tl.where((k < MEMBERS) & (factor != 0), logs, 0.0)


@triton.jit
def _scale(gradient, upstream, size, BLOCK: tl.constexpr):
    """Multiply in place; a factor of 1 skips the gradient."""
    factor = tl.load(upstream)
    if factor != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            place = tl.full((BLOCK,), block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(gradient + place, mask=place < size)
            tl.store(gradient + place, (value * factor).to(value.dtype), mask=place < size)
