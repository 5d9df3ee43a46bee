"""Amended cross entropy on a GPU where a sample's logits fit on chip: they are read once."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from torchace.kernels.ace_pieces import (
    _aims,
    _alpha,
    _label_weight,
    _labels,
    _logs,
    _pulls,
    _read,
    _reciprocal,
    _share,
    _softmax,
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
    ALIGN: tl.constexpr,
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
    ALONE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some samples with all their logits at once, `(samples, members, classes)`; then the next that are this one's."""
    k = tl.arange(0, MOST).to(tl.int64)[None, :, None]
    r = (MOST + tl.arange(0, REST if REST else 1)).to(tl.int64)[None, :, None]
    c = tl.arange(0, SOME_CLASSES)[None, None, :]
    lam = tl.full((), 0.0, ACC) + (tl.load(diversity) if ON_DEVICE else diversity)
    a, a_r = _alpha(alpha, k, MEMBERS, MOST, UNIFORM, ACC), _alpha(alpha, r, MEMBERS, MOST + REST, UNIFORM, ACC)
    everybody = tl.full((1, 1, 1), 1.0, ACC)
    if not UNIFORM:
        everybody = tl.sum(a, 1, keep_dims=True)
        if REST:
            everybody += tl.sum(a_r, 1, keep_dims=True)
    one, nothing = _share(
        counts, target, target_n, weight, by, samples, ignored, CLASSES, COUNT, COUNTS, WEIGHTED, BY, ACC
    )
    for group in tl.range(tl.program_id(0), tl.cdiv(samples, SOME), tl.num_programs(0), num_stages=STAGES):
        n = (group * SOME + tl.arange(0, SOME).to(tl.int64))[:, None, None]
        real = n < samples
        here, here_r = real & (c < CLASSES), real & (c < CLASSES) & (r < MEMBERS)
        place = (n * logits_n + k * logits_k) * ALIGN + c * logits_c
        z = _read(logits + place, here, ACC, "")
        if REST:
            place = (n * logits_n + r * logits_k) * ALIGN + c * logits_c
            z_r = _read(logits + place, here_r, ACC, "")
        label, valid, wrong = _labels(target, target_n, ignored, n, real, CLASSES, PROBABILITIES)
        if tl.max(tl.where(valid, 0, 1)) > 0:  # some sample does not count, whatever its logits are
            z = tl.where(valid, z, 0.0)
            if REST:
                z_r = tl.where(valid, z_r, 0.0)
        top, e, total = _softmax(z, FAST)
        inverse = _reciprocal(total, FAST)
        if REST:
            top_r, e_r, total_r = _softmax(z_r, FAST)
            inverse_r = _reciprocal(total_r, FAST)
        wp = _aims(
            target, target_n, target_c, weight, smoothing, label, n, c, real, CLASSES, PROBABILITIES, WEIGHTED,
            SMOOTHED, ACC,
        )  # fmt: skip
        if PROBABILITIES:
            s = tl.sum(wp, 2, keep_dims=True)
        else:
            s = _label_weight(label, weight, mean_weight, smoothing, WEIGHTED, ACC)
        if MIXTURE:
            mean = tl.load(mixture + n * mixture_n + c * mixture_c, mask=here & valid, other=0.0).to(ACC)
            believed = tl.sum(mean, 2, keep_dims=True)
        else:
            mean, believed = tl.sum((a * inverse) * e, 1, keep_dims=True), everybody
            if REST:
                mean += tl.sum((a_r * inverse_r) * e_r, 1, keep_dims=True)
        b = lam * s * mean - wp  # (samples, 1, classes)
        factor = tl.where(valid, one + wrong, 0.0).to(ACC)  # (samples, 1, 1)
        factor_r = factor
        if SCALE:  # (samples, members, 1)
            factor = factor * tl.load(scale + n * scale_n + k * scale_k, mask=valid, other=0.0)
        own, mine, b_k = factor * lam * s * a * inverse, factor * s * (1 - lam) * inverse, factor * b
        if WRITE:
            place = (n * gradient_n + k * gradient_k) * ALIGN + c * gradient_c
            _write(gradient + place, here, e, mine, b_k, factor, SCALE)
        logs = tl.sum(_logs(total, factor, believed, a, s, lam, 1.0, k, MEMBERS, FAST), 1, keep_dims=True)
        found = tl.sum(_pulls(z, e, top, own, b_k, factor, False, SCALE), 1, keep_dims=True)
        if REST:
            if SCALE:
                factor_r = factor_r * tl.load(scale + n * scale_n + r * scale_k, mask=valid & (r < MEMBERS), other=0.0)
            own_r, mine, b_r = factor_r * lam * s * a_r * inverse_r, factor_r * s * (1 - lam) * inverse_r, factor_r * b
            if MOST + REST > MEMBERS:
                b_r = tl.where(r < MEMBERS, b_r, 0.0)
            if WRITE:
                place = (n * gradient_n + r * gradient_k) * ALIGN + c * gradient_c
                _write(gradient + place, here_r, e_r, mine, b_r, factor_r, SCALE)
            logs += tl.sum(_logs(total_r, factor_r, believed, a_r, s, lam, 1.0, r, MEMBERS, FAST), 1, keep_dims=True)
            found += tl.sum(_pulls(z_r, e_r, top_r, own_r, b_r, factor_r, False, SCALE), 1, keep_dims=True)
        value = tl.sum(found, 2, keep_dims=True)
        if tl.max(tl.where(value == value, 0, 1)) > 0:  # 0 times -inf, perhaps
            found = tl.sum(_pulls(z, e, top, own, b_k, factor, True, SCALE), 1, keep_dims=True)
            if REST:
                found += tl.sum(_pulls(z_r, e_r, top_r, own_r, b_r, factor_r, True, SCALE), 1, keep_dims=True)
            value = tl.sum(found, 2, keep_dims=True)
        value = value - logs + nothing
        if ALONE:
            tl.store(values, tl.sum(value))
        else:
            tl.store(values + n, value, mask=real)
