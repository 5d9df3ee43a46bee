"""What the two kernels of the amended cross entropy are made of, in Triton: value and closed-form gradient together.

With w∘p the weighted target, s = Σ_c w_c p_c, t^k = z^k - max z^k, L^k = log Σ exp t^k, b = λ s q̄ - w∘p, which all
members share, and u^k = b - λ s α^k q^k,

    e^k = <u^k, t^k> - L^k Σ_c u^k_c        ∂e^k/∂z^k = s (1-λ) q^k + b

Little is computed for each logit and little is kept: q^k is never divided by its total, a member's factors are; members
are two powers of two (MOST and REST), so that few lanes have nothing to do; a thread has the same classes, a vector, of
all members, and needs of t no more than Σ_k t^k of its classes and <exp t^k, t^k> of each member:

    Σ_k <u^k, t^k> = <b, Σ_k t^k> - λ s Σ_k α^k <q^k, t^k>

A program has all members' logits of some samples on chip (`ace_whole`). Where a sample's do not fit, they are read
twice (`ace_blocks`): once for t and L, once for the rest, by one program or by several. No sum is left to the order in
which programs come, so that a repeated step has the same bits. Nothing is read back from the device.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOWHERE = tl.constexpr(-(2.0**123))  # the logit of what is no class: finite, so that 0 times it is 0; the same in bf16
LOWEST = tl.constexpr(-(2.0**124))


@triton.jit
def _counts(
    target,
    stride,
    weight,
    counts,
    samples,
    classes,
    ignored,
    parts,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What some parts of the samples count in the mean."""
    first = tl.program_id(0) * parts
    total = tl.full((), 0.0, counts.dtype.element_ty)
    for part in range(parts):
        total += _counted(target, stride, weight, (first + part) * BLOCK, samples, classes, ignored, WEIGHTED, BLOCK)
    tl.store(counts + tl.program_id(0), total)


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
    label = tl.zeros(n.shape, tl.int32)
    valid = real
    wrong = tl.zeros(n.shape, tl.float32)
    if not PROBABILITIES:
        found = tl.load(target + n * target_n, mask=real, other=0).to(tl.int64)
        valid = real & (found != ignored)
        known = valid & (found >= 0) & (found < CLASSES)
        wrong = tl.where(valid & ~known, float("nan"), 0.0)
        label = tl.where(known, found, 0).to(tl.int32)
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
    samples,
    CLASSES: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ACC: tl.constexpr,
):
    """w∘p of some samples and classes; 0 for what is no class."""
    if PROBABILITIES:
        p = tl.load(target + n * target_n + c * target_c, mask=(n < samples) & (c < CLASSES), other=0.0).to(ACC)
    else:
        p = tl.where(c == label, tl.full((), 1.0, ACC), 0.0)
    if SMOOTHED:
        sure, even = 1 - smoothing, (tl.full((), 0.0, ACC) + smoothing) / CLASSES
        p = tl.where(c < CLASSES, p * sure + even, 0.0)
    if WEIGHTED:
        p *= tl.load(weight + c, mask=c < CLASSES, other=0.0)
    return p


@triton.jit
def _label_weight(label, weight, mean_weight, smoothing, WEIGHTED: tl.constexpr, ACC: tl.constexpr):
    """s of samples with class indices."""
    s = tl.full(label.shape, 1.0, ACC)
    if WEIGHTED:
        s = ((1 - smoothing) * tl.load(weight + label) + smoothing * tl.load(mean_weight)).to(ACC)
    return s


@triton.jit
def _share(
    counts,
    target,
    target_n,
    weight,
    by,
    samples,
    ignored,
    CLASSES: tl.constexpr,
    COUNT: tl.constexpr,
    COUNTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BY: tl.constexpr,
    ACC: tl.constexpr,
):
    """What every sample's loss is multiplied by; and 0, or NaN where no sample counts.

    COUNT 0: 1; 1: 1 over the sum of `counts`; 2: over what is counted here; 3: over the number of samples; 4: as 1, but
    one after the other, so that the compiler sees it to be the same for all threads, which saves their registers.
    """
    one, nothing = tl.full((), 1.0, ACC), tl.full((), 0.0, ACC)
    if COUNT == 3:
        one = one / samples
    elif COUNT:
        if COUNT == 1:
            total = tl.sum(tl.load(counts + tl.arange(0, COUNTS)), 0).to(ACC)
        elif COUNT == 4:
            total = tl.full((), 0.0, ACC)
            for part in tl.static_range(COUNTS):
                total += tl.load(counts + part)
        else:
            total = _counted(target, target_n, weight, 0, samples, CLASSES, ignored, WEIGHTED, COUNTS).to(ACC)
        one, nothing = one / total, nothing / total
    if BY:
        one *= tl.load(by)
    return one, nothing


@triton.jit
def _exp(x, FAST: tl.constexpr):
    """FAST, here and below: a GPU's own instruction, without those that keep numbers below 1e-38 apart from 0."""
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
def _alpha(alpha, k, MEMBERS: tl.constexpr, MOST: tl.constexpr, UNIFORM: tl.constexpr, ACC: tl.constexpr):
    """α of some members; 0 for what is none."""
    if not UNIFORM:
        a = tl.load(alpha + k, mask=k < MEMBERS, other=0.0).to(ACC)
    else:
        a = tl.where(k < MEMBERS, tl.full((), 1.0 / MEMBERS, ACC), 0.0)
    return a


@triton.jit
def _depths(t, e, factor, SCALE: tl.constexpr, OF_MEMBERS: tl.constexpr):
    """What Σ_k <u, t> of a vector's classes is made of: Σ_k t times `factor`, and <e, t> of every member."""
    if SCALE:  # which may be 0 for a member alone
        depth = tl.sum(tl.where(factor == 0, 0.0, factor * t), OF_MEMBERS, keep_dims=True)
    else:
        depth = factor * tl.sum(t, OF_MEMBERS, keep_dims=True)
    return depth, tl.sum(e * t, 3, keep_dims=True)


@triton.jit
def _pulls(b, depth, c, CLASSES: tl.constexpr):
    """Σ_k <b, t>. NaN where t is -inf: then comes `_careful`."""
    return tl.sum(tl.where(c < CLASSES, b * depth, 0.0), 3, keep_dims=True)


@triton.jit
def _heats(own, heat, factor, SCALE: tl.constexpr, OF_MEMBERS: tl.constexpr):
    """Σ_k <b - u, t>. With q = e / total, `own` is λ s α / total times `factor`."""
    heat = own * heat
    if SCALE:
        heat = tl.where(factor == 0, 0.0, heat)
    return tl.sum(heat, OF_MEMBERS, keep_dims=True)


@triton.jit
def _careful(t, e, own, b, factor, c, CLASSES: tl.constexpr, SCALE: tl.constexpr, OF_MEMBERS: tl.constexpr):
    """Σ_k <u, t> of a vector's classes where one that nobody believes in adds nothing, even at -inf."""
    u = tl.where(c < CLASSES, factor * b - own * e, 0.0)
    found = tl.where(u == 0, 0.0, u * t)
    if SCALE:
        found = tl.where(factor == 0, 0.0, found)
    return tl.sum(tl.sum(found, OF_MEMBERS, keep_dims=True), 3, keep_dims=True)


@triton.jit
def _slope(e, mine, b, factor, SCALE: tl.constexpr):
    """The gradient. With q = e / total, `mine` is s (1-λ) / total times `factor`, as `b` is too."""
    g = mine * e + b
    if SCALE:
        g = tl.where(factor == 0, 0.0, g)
    return g


@triton.jit
def _write(place, here, g):
    tl.store(place, g.to(place.dtype.element_ty), mask=here, eviction_policy="evict_first")


@triton.jit
def _logs(total, factor, believed, a, s, lam, share, k, MEMBERS: tl.constexpr, FAST: tl.constexpr):
    """L Σ_c u_c of some members, where Σ_c q̄_c is `believed` and Σ_c q_c is `share`."""
    logs = factor * s * (lam * (believed - share * a) - share) * _log(total, FAST)
    return tl.where((k < MEMBERS) & (factor != 0), logs, 0.0)


@triton.jit
def _multiplied(gradient, by, size, BLOCK: tl.constexpr):
    """In place; a factor of 1 costs no more than looking at it."""
    factor = tl.load(by)
    if factor != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            place = tl.full((BLOCK,), block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(gradient + place, mask=place < size)
            tl.store(gradient + place, (value * factor).to(value.dtype), mask=place < size)
