"""The amended cross entropy of linear heads on a GPU, in Triton: some classes at a time.

A chunk holds the logits of all samples and members for some classes, `(K, N, c)`, in the type of the features. A first
pass over the chunks leaves for every member and sample the maximum and the sum of exponentials, a second one turns the
logits in place into the loss's gradient in them. The chunk's part of the weights' gradient is then one product over all
samples, written where it stays: nothing of the weights' size is accumulated. The second pass goes backward, so that the
last chunk of the first is still there: 8·N·K·C·D operations, less 2 for what fits one chunk.

Sums are written down part by part and added up in a fixed order: the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.terms import Terms

LOGITS = 3 << 28  # bytes of a chunk: products at full rate, and as much for one member as for many
LEAST_CLASSES = 256  # of a chunk, however many samples there are
ALIGNED = 64  # a row of a chunk starts at a multiple of so many numbers
TILE = 4096  # logits that a program holds at once: members x classes
STEPS = 8  # a program makes at most
LARGEST_LIFT = 1 << 14

LOWEST = tl.constexpr(-3.4e38)  # below every logit, yet a number: differences of two of them are 0, not NaN


@triton.jit
def _seen(logits, bias, rows, member, there, column, start, width, classes, BIASED: tl.constexpr, TYPE: tl.constexpr):
    """Logits with their bias, `(K, columns)`; -inf outside."""
    inside = there[:, None] & (column < width)[None, :]
    z = tl.load(logits + rows[:, None] + column[None, :], mask=inside, other=-float("inf")).to(TYPE)
    if BIASED:
        place = member.to(tl.int64)[:, None] * classes + (start + column)[None, :]
        z += tl.load(bias + place, mask=inside, other=0.0).to(TYPE)
    return z, inside


@triton.jit
def _summed(
    logits,
    bias,
    maxima,
    sums,
    samples,
    pitch,
    start,
    width,
    classes,
    MEMBERS: tl.constexpr,
    PADDED: tl.constexpr,
    BIASED: tl.constexpr,
    TYPE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every member's maximum, and sum of exponentials below it, for one sample and a part of a chunk's classes."""
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    member = tl.arange(0, PADDED)
    there = member < MEMBERS
    rows = (member.to(tl.int64) * samples + sample) * pitch
    highest = tl.full((PADDED, BLOCK), LOWEST, TYPE)
    total = tl.zeros((PADDED, BLOCK), TYPE)
    for step in range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        z, _ = _seen(logits, bias, rows, member, there, column, start, width, classes, BIASED, TYPE)
        above = z - highest
        ratio = tl.exp(-tl.abs(above))  # of the smaller one to the larger one
        total = tl.where(above > 0, total * ratio + 1, total + ratio)
        highest = tl.maximum(highest, z)
    top = tl.max(highest, 1)
    place = (part * MEMBERS + member) * samples + sample
    tl.store(maxima + place, top, mask=there)
    tl.store(sums + place, tl.sum(total * tl.exp(highest - top[:, None]), 1), mask=there)


@triton.jit
def _pulled(
    logits,
    bias,
    target,
    weight,
    weighed,
    diversity,
    alpha,
    scale,
    along_members,
    along_samples,
    highest,
    log_total,
    values,
    samples,
    pitch,
    start,
    width,
    classes,
    SURE: tl.constexpr,
    EVEN: tl.constexpr,
    LIFT: tl.constexpr,
    MEMBERS: tl.constexpr,
    PADDED: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COUPLED: tl.constexpr,
    GRADIENT: tl.constexpr,
    TYPE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part's share of the loss and, in place of its logits, LIFT times the gradient in them, for one sample."""
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    member = tl.arange(0, PADDED)
    there = member < MEMBERS
    rows = (member.to(tl.int64) * samples + sample) * pitch
    of_member = member * samples + sample
    top = tl.load(highest + of_member, mask=there, other=0.0)[:, None]
    log_sum = tl.load(log_total + of_member, mask=there, other=0.0)[:, None]
    a = tl.load(alpha + member, mask=there, other=0.0)[:, None]
    counts = tl.load(scale + member * along_members + sample * along_samples, mask=there, other=0.0)[:, None]
    own = tl.load(target + sample)
    lam = tl.load(diversity)
    s = 1.0
    if WEIGHTED:
        s = tl.load(weighed + sample)
    loss = tl.zeros((PADDED, BLOCK), TYPE)
    for step in range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        z, inside = _seen(logits, bias, rows, member, there, column, start, width, classes, BIASED, TYPE)
        log_q = z - top - log_sum
        q = tl.exp(log_q)
        wp = tl.where(start + column == own, tl.full((BLOCK,), SURE, TYPE), 0.0) + tl.full((BLOCK,), EVEN, TYPE)
        if WEIGHTED:
            wp *= tl.load(weight + start + column, mask=column < width, other=0.0)
        pull = tl.broadcast_to(wp[None, :], (PADDED, BLOCK))
        mixed = q
        if COUPLED:
            mixture = tl.sum(a * q, 0)[None, :]
            pull -= lam * s * (mixture - a * q)
            mixed += lam * (mixture - q)
        # a class that nobody believes in adds nothing, even where its log-probability is -inf
        loss -= pull * tl.where(inside & (pull != 0), log_q, 0.0)
        if GRADIENT:
            gradient = tl.where(counts == 0, 0.0, counts * LIFT * (s * mixed - wp[None, :]))
            tl.store(logits + rows[:, None] + column[None, :], gradient.to(logits.dtype.element_ty), mask=inside)
    # where, not a product: a sample that does not count may have an infinite loss
    value = tl.where(counts == 0, 0.0, counts * tl.sum(loss, 1)[:, None])
    tl.store(values + (part * MEMBERS + member[:, None]) * samples + sample, value, mask=there[:, None])


@triton.jit
def _scaled(values, factor, count, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1:
        for step in range(STEPS):
            place = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(values + place, mask=place < count).to(by.dtype) * by
            tl.store(values + place, value.to(values.dtype.element_ty), mask=place < count)


class Chunk(NamedTuple):
    """Some classes, and the logits of all members and samples for them."""

    start: int
    logits: Tensor  # (K, N, c), rows longer than c where that aligns them

    @property
    def classes(self) -> slice:
        return slice(self.start, self.start + self.logits.shape[2])


class Heads(NamedTuple):
    """What logits are made of; products are of the features' type."""

    features: Tensor  # (N, D)
    weight: Tensor  # (K, C, D)
    bias: Tensor | None  # (K, C)

    def of(self, member: int, chunk: Chunk) -> Tensor:
        """A member's weights for a chunk, `(c, D)`."""
        return self.weight[member, chunk.classes].to(self.features.dtype)

    def fill(self, chunk: Chunk) -> None:
        for member, logits in enumerate(chunk.logits):
            torch.mm(self.features, self.of(member, chunk).T, out=logits)


def value_and_gradients(
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    terms: Terms,
    wanted: Sequence[bool],
    *,
    averaged: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss summed over samples and members, and its gradients in features, weights and bias where wanted.

    Args:
        features: `(N, D)`, of the type that products are computed in.
        head_weight: `(K, C, D)`.
        head_bias: `(K, C)`, or None.
        terms: Class indices; `scale` is a tensor `(N,)` or `(K, N)`; no mixture.
        wanted: Which gradients.
        averaged: Whether the scale of all samples sums to about 1.

    Returns:
        A scalar and gradients: that in the weights in their type, the other two in float32 for half precision.
    """
    heads = Heads(features, head_weight, head_bias)
    sums_type = terms.alpha.dtype
    lift = _lift(features) if averaged else 1.0
    features_grad = torch.zeros_like(features, dtype=sums_type) if wanted[0] else None
    weight_grad = torch.empty(head_weight.shape, dtype=head_weight.dtype, device=features.device) if wanted[1] else None
    bias_grad = head_weight.new_empty(head_weight.shape[:2], dtype=sums_type) if wanted[2] else None
    with torch.cuda.device_of(features), torch.autocast(features.device.type, enabled=False):
        chunks = _chunks(heads)
        seen: list[tuple[Tensor, Tensor]] = []
        for chunk in chunks:
            heads.fill(chunk)
            seen = [_folded([*seen, _sums(chunk, heads, sums_type)])]
        highest, log_total = seen[0][0], seen[0][1].log()
        resolved = _Resolved.of(terms, head_weight.shape[1])
        values = []
        for chunk in reversed(chunks):
            if chunk is not chunks[-1]:  # whose logits are still there
                heads.fill(chunk)
            values.append(_pull(chunk, heads, resolved, highest, log_total, lift if any(wanted) else None).sum())
            for member, pull in enumerate(chunk.logits):
                if features_grad is not None:
                    _product(features_grad, pull, heads.of(member, chunk), add=True, alpha=1 / lift)
                if weight_grad is not None:
                    _product(weight_grad[member, chunk.classes], pull.T, features, add=False, alpha=1 / lift)
            if bias_grad is not None:
                torch.sum(chunk.logits, 1, dtype=sums_type, out=bias_grad[:, chunk.classes]).div_(lift)
        return torch.stack(values).sum(), [features_grad, weight_grad, bias_grad]


def scale_(values: Tensor, by: Tensor) -> Tensor:
    """Values that lie together times a scalar on their device, in place; where it is 1, they are not even read."""
    count = values.numel()
    programs = triton.cdiv(count, STEPS * TILE)
    if programs:
        with torch.cuda.device_of(values):
            _scaled[(programs,)](values, by, count, STEPS, TILE)
    return values


class _Resolved(NamedTuple):
    """Everything that `_pulled` reads beside logits."""

    target: Tensor  # (N,)
    weight: Tensor | None  # (C,)
    weighed: Tensor | None  # (N,), a sample's Σ_c w_c p_c
    diversity: Tensor  # ()
    alpha: Tensor  # (K,)
    scale: Tensor  # (K, N)
    label_smoothing: float
    coupled: bool

    @classmethod
    def of(cls, terms: Terms, num_classes: int) -> _Resolved:
        assert isinstance(terms.scale, Tensor)
        num_members, smoothing = len(terms.alpha), terms.label_smoothing
        diversity = terms.diversity
        if not isinstance(diversity, Tensor) or diversity.device != terms.alpha.device:
            diversity = torch.full_like(terms.alpha[0], float(diversity))  # filled there: nothing waits for a copy
        weighed = None
        if terms.weight is not None:
            weighed = terms.weight[terms.target] * (1 - smoothing) + terms.weight.mean() * smoothing
        scale = terms.scale.expand(num_members, -1)
        coupled = num_members > 1 and not terms.diversity_is_zero
        weight = None if terms.weight is None else terms.weight.contiguous()
        return cls(
            terms.target.contiguous(),
            weight,
            weighed,
            diversity.to(terms.alpha.dtype),
            terms.alpha.contiguous(),
            scale,
            smoothing,
            coupled,
        )


def _chunks(heads: Heads) -> list[Chunk]:
    """All classes in chunks that take turns in one memory; the first is what is left over, the others are full."""
    (num_members, num_classes, _), num_samples = heads.weight.shape, len(heads.features)
    rows = num_members * num_samples
    most = max(LEAST_CLASSES, LOGITS // (rows * heads.features.element_size()))
    most = min(_aligned(num_classes), most // ALIGNED * ALIGNED)
    memory = heads.features.new_empty(rows * most)
    starts = [0, *range(num_classes % most or most, num_classes, most)]
    chunks = []
    for start, end in zip(starts, [*starts[1:], num_classes], strict=True):
        pitch = _aligned(end - start)
        logits = memory[: rows * pitch].view(num_members, num_samples, pitch)
        chunks.append(Chunk(start, logits[:, :, : end - start]))
    return chunks


def _aligned(count: int) -> int:
    return triton.cdiv(count, ALIGNED) * ALIGNED


def _sums(chunk: Chunk, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Maxima and sums of exponentials of a chunk's parts, both `(parts, K, N)`."""
    parts, sizes, padded, steps, block = _launch(chunk, heads)
    num_members, num_samples, _ = chunk.logits.shape
    maxima, sums = torch.empty(2, parts, num_members, num_samples, dtype=dtype, device=chunk.logits.device)
    _summed[(num_samples, parts)](
        chunk.logits,
        _together(heads.bias),
        maxima,
        sums,
        *sizes,
        num_members,
        padded,
        heads.bias is not None,
        _type(dtype),
        steps,
        block,
    )
    return maxima, sums


def _folded(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The maximum of all parts, and the sum of exponentials below it, both `(1, K, N)`."""
    maxima, sums = (torch.cat(values) for values in zip(*parts, strict=True))
    highest = maxima.amax(0, keepdim=True)
    return highest, (sums * (maxima - highest).exp()).sum(0, keepdim=True)


def _pull(
    chunk: Chunk, heads: Heads, resolved: _Resolved, highest: Tensor, log_total: Tensor, lift: float | None
) -> Tensor:
    """The loss's parts, `(parts, K, N)`; with a lift, the chunk holds the gradient afterwards."""
    parts, sizes, padded, steps, block = _launch(chunk, heads)
    num_members, num_samples, _ = chunk.logits.shape
    values = highest.new_empty(parts, num_members, num_samples)
    _pulled[(num_samples, parts)](
        chunk.logits,
        _together(heads.bias),
        resolved.target,
        resolved.weight,
        resolved.weighed,
        resolved.diversity,
        resolved.alpha,
        resolved.scale,
        *resolved.scale.stride(),
        highest,
        log_total,
        values,
        *sizes,
        1 - resolved.label_smoothing,
        resolved.label_smoothing / heads.weight.shape[1],
        1.0 if lift is None else lift,
        num_members,
        padded,
        heads.bias is not None,
        resolved.weight is not None,
        resolved.coupled,
        lift is not None,
        _type(highest.dtype),
        steps,
        block,
    )
    return values


def _launch(chunk: Chunk, heads: Heads) -> tuple[int, tuple[int, ...], int, int, int]:
    """Parts; samples, pitch, start, width and classes; members padded, steps and classes at once of a program."""
    num_members, num_samples, width = chunk.logits.shape
    padded = triton.next_power_of_2(num_members)
    block = max(1, TILE // padded)
    steps = min(STEPS, triton.next_power_of_2(triton.cdiv(width, block)))  # few values: each is compiled
    sizes = num_samples, chunk.logits.stride(1), chunk.start, width, heads.weight.shape[1]
    return triton.cdiv(width, steps * block), sizes, padded, steps, block


def _product(out: Tensor, a: Tensor, b: Tensor, *, add: bool, alpha: float) -> None:
    """alpha·a @ b into `out`, or added to it, accumulated in float32; `out` is of their type or float32."""
    beta = 1 if add else 0
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)


def _lift(features: Tensor) -> float:
    """What a mean's gradients in logits are multiplied by until they are summed: they would be lost in float16."""
    if features.dtype != torch.float16:
        return 1.0
    return float(min(LARGEST_LIFT, triton.next_power_of_2(len(features))))


def _together(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _type(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
