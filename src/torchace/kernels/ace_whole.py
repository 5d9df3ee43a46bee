"""Amended cross entropy on a GPU where a sample's logits fit on chip: they are read once."""

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
    SOME: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some samples with all their logits at once; then the next that are this one's."""
    vector = (tl.arange(0, SOME_CLASSES // VECTOR) * VECTOR)[None, None, :, None]  # the first class of each
    c = vector + tl.arange(0, VECTOR)[None, None, None, :]
    k = tl.arange(0, MOST)[None, :, None, None]
    r = MOST + tl.arange(0, REST if REST else 1)[None, :, None, None]
    lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if ON_DEVICE else diversity)
    a, a_r = _alpha(alpha, k, MEMBERS, MOST, UNIFORM, ACC), _alpha(alpha, r, MEMBERS, MOST + REST, UNIFORM, ACC)
    everybody = tl.full((), 1.0, ACC)
    if not UNIFORM:
        everybody = tl.sum(a) + (tl.sum(a_r) if REST else 0.0)
    one, nothing = _share(
        counts, target, target_n, weight, by, samples, ignored, CLASSES, COUNT, COUNTS, WEIGHTED, BY, ACC
    )
    in_all = tl.zeros((SOME,), ACC)
    for group in tl.range(tl.program_id(0), tl.cdiv(samples, SOME), tl.num_programs(0), num_stages=STAGES):
        each = group * SOME + tl.arange(0, SOME)
        n = each.to(tl.int64)[:, None, None, None]
        place, here = _places(
            logits_k, logits_n, logits_c, each, samples, 0, MOST, MEMBERS, CLASSES, VECTOR, SOME_CLASSES
        )
        z = _logits(logits + place, here, c, CLASSES, VECTOR, ACC)
        if REST:
            place_r, here_r = _places(
                logits_k, logits_n, logits_c, each, samples, MOST, REST, MEMBERS, CLASSES, VECTOR, SOME_CLASSES
            )
            z_r = _logits(logits + place_r, here_r, c, CLASSES, VECTOR, ACC)
        label, valid, wrong = _labels(target, target_n, ignored, n, n < samples, CLASSES, PROBABILITIES)
        if tl.max(tl.where(valid, 0, 1)) > 0:  # some sample does not count, whatever its logits are
            z = tl.where(valid, z, 0.0)
            if REST:
                z_r = tl.where(valid, z_r, 0.0)
        factor = tl.where(valid, one + wrong, 0.0).to(ACC)
        factor_r = factor
        if SCALE:
            factor = factor * tl.load(scale + n * scale_n + k * scale_k, mask=valid, other=0.0)
            if REST:
                factor_r = factor_r * tl.load(scale + n * scale_n + r * scale_k, mask=valid & (r < MEMBERS), other=0.0)
        t = _below(z, vector, CLASSES)
        e = _exp(t, FAST)
        depth, heat = _depths(t, e, factor, SCALE, 1)  # after which t is needed no more
        total = _over_classes(e)
        inverse = _reciprocal(total, FAST)
        if REST:
            t_r = _below(z_r, vector, CLASSES)
            e_r = _exp(t_r, FAST)
            depth_r, heat_r = _depths(t_r, e_r, factor_r, SCALE, 1)
            depth += depth_r
            total_r = _over_classes(e_r)
            inverse_r = _reciprocal(total_r, FAST)
        wp = _aims(
            target, target_n, target_c, weight, smoothing, label, n, c, samples, CLASSES, PROBABILITIES, WEIGHTED,
            SMOOTHED, ACC,
        )  # fmt: skip
        if PROBABILITIES:
            s = _over_classes(wp)
        else:
            s = _label_weight(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
        if MIXTURE:
            mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=(c < CLASSES) & valid, other=0.0).to(ACC)
            believed = _over_classes(mean)
        else:
            mean, believed = tl.sum((a * inverse) * e, 1, keep_dims=True), everybody
            if REST:
                mean += tl.sum((a_r * inverse_r) * e_r, 1, keep_dims=True)
        b = lam * s * mean - wp  # (samples, 1, vectors, classes)
        own, mine = factor * lam * s * a * inverse, factor * s * (1 - lam) * inverse
        if WRITE:
            there, _ = _places(
                gradient_k, gradient_n, gradient_c, each, samples, 0, MOST, MEMBERS, CLASSES, VECTOR, SOME_CLASSES
            )
            _write(gradient + there, here, _classes(_slope(e, mine, factor * b, factor, SCALE)))
        logs = tl.sum(_logs(total, factor, believed, a, s, lam, 1.0, k, MEMBERS, FAST), 1, keep_dims=True)
        found = _pulls(b, depth, c, CLASSES) - _heats(own, heat, factor, SCALE, 1)
        if REST:
            own_r, mine = factor_r * lam * s * a_r * inverse_r, factor_r * s * (1 - lam) * inverse_r
            if WRITE:
                there, _ = _places(
                    gradient_k,
                    gradient_n,
                    gradient_c,
                    each,
                    samples,
                    MOST,
                    REST,
                    MEMBERS,
                    CLASSES,
                    VECTOR,
                    SOME_CLASSES,
                )
                _write(gradient + there, here_r, _classes(_slope(e_r, mine, factor_r * b, factor_r, SCALE)))
            logs += tl.sum(_logs(total_r, factor_r, believed, a_r, s, lam, 1.0, r, MEMBERS, FAST), 1, keep_dims=True)
            found -= _heats(own_r, heat_r, factor_r, SCALE, 1)
        # left to the first vector: else the compiler would compute all of it again, in another distribution
        logs = tl.where(vector == 0, logs, 0.0)
        value = tl.reshape(tl.sum(found - logs, 2), (SOME,))
        if tl.sum(value * 0.0) != 0.0:  # 0 times -inf, perhaps
            again = tl.where(valid, _logits(logits + place, here, c, CLASSES, VECTOR, ACC), 0.0)
            again = _below(again, vector, CLASSES)
            found = _careful(again, _exp(again, FAST), own, b, factor, c, CLASSES, SCALE, 1)
            if REST:
                again_r = tl.where(valid, _logits(logits + place_r, here_r, c, CLASSES, VECTOR, ACC), 0.0)
                again_r = _below(again_r, vector, CLASSES)
                found += _careful(again_r, _exp(again_r, FAST), own_r, b, factor_r, c, CLASSES, SCALE, 1)
            value = tl.reshape(tl.sum(found - logs, 2), (SOME,))
        in_all += value
    tl.store(values + tl.program_id(0), tl.sum(in_all) + nothing)


@triton.jit
def _places(
    stride_k,
    stride_n,
    stride_c,
    each,
    samples,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    MEMBERS: tl.constexpr,
    CLASSES: tl.constexpr,
    VECTOR: tl.constexpr,
    SOME_CLASSES: tl.constexpr,
):
    """Where some members' numbers of some samples lie, `(samples, members, classes)`, and which there are."""
    n = each.to(tl.int64)[:, None, None]
    k = FIRST + tl.arange(0, COUNT).to(tl.int64)[None, :, None]
    c = tl.arange(0, SOME_CLASSES)[None, None, :]
    return (n * stride_n + k * stride_k) * VECTOR + c * stride_c, (n < samples) & (k < MEMBERS) & (c < CLASSES)


@triton.jit
def _vectors(x, VECTOR: tl.constexpr):
    """`(samples, members, classes)` as `(samples, members, vectors, classes of a vector)`.

    The compiler gives a vector of all members to one thread: sums over members or the last axis need no exchange.
    """
    return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // VECTOR, VECTOR))


@triton.jit
def _classes(x):
    """The other way round."""
    return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] * x.shape[3]))


@triton.jit
def _over_classes(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _logits(place, here, c, CLASSES: tl.constexpr, VECTOR: tl.constexpr, ACC: tl.constexpr):
    """0 for vectors that are none of a sample's, NOWHERE for what is no class in the others."""
    z = _vectors(tl.load(place, mask=here, other=0.0), VECTOR).to(ACC)
    if CLASSES % VECTOR:
        z = tl.where(c < CLASSES, z, NOWHERE)
    return z


@triton.jit
def _below(z, vector, CLASSES: tl.constexpr):
    """Logits less the largest of them."""
    top = tl.where(vector < CLASSES, tl.max(z, 3, keep_dims=True), LOWEST)
    return z - tl.where(vector < CLASSES, tl.max(top, 2, keep_dims=True), -LOWEST)
