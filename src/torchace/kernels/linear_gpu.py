"""Amended cross entropy of linear heads on a GPU, in Triton, in chunks of classes.

A chunk holds logits `(K, N, c)`. The first pass computes softmax statistics, the second replaces logits by gradients,
in reverse order to reuse the last chunk: 8·N·K·C·D operations, less 2 for one chunk. Results are deterministic.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.options import LossOptions, compute_dtype

LOGITS = 3 << 28  # bytes of a chunk, for products at full rate
LEAST_CLASSES = 256  # of a chunk
ALIGNED = 64  # rows of a chunk start at multiples of this
TILE = 4096  # logits that a program holds at once: members x classes
STEPS = 8  # maximum per program

LOWEST = tl.constexpr(-3.4e38)  # below every logit, but finite: a difference of two is 0, not NaN


# fmt: off
@triton.jit
def _load_logits(
    logits, bias, rows, member, is_member, column, start, width, classes, BIASED: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """Logits with their bias, `(K, columns)`, -inf for padding; and their mask."""
    mask = is_member[:, None] & (column < width)[None, :]
    z = tl.load(logits + rows[:, None] + column[None, :], mask=mask, other=-float("inf")).to(ACC)
    if BIASED:
        place = member.to(tl.int64)[:, None] * classes + (start + column)[None, :]
        z += tl.load(bias + place, mask=mask, other=0.0).to(ACC)
    return z, mask


# fmt: off
@triton.jit
def _softmax_sums(
    logits, bias, maxima, sums, samples, pitch, start, width, classes, MEMBERS: tl.constexpr, BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr, ACC: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Each member's maximum and sum of exponentials relative to it, for one sample and part of a chunk."""
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    member = tl.arange(0, BLOCK_K)
    is_member = member < MEMBERS
    rows = (member.to(tl.int64) * samples + sample) * pitch
    highest = tl.full((BLOCK_K, BLOCK), LOWEST, ACC)
    total = tl.zeros((BLOCK_K, BLOCK), ACC)
    for step in range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        z, _ = _load_logits(logits, bias, rows, member, is_member, column, start, width, classes, BIASED, ACC)
        above = z - highest
        ratio = tl.exp(-tl.abs(above))
        total = tl.where(above > 0, total * ratio + 1, total + ratio)
        highest = tl.maximum(highest, z)
    top = tl.max(highest, 1)
    place = (part * MEMBERS + member) * samples + sample
    tl.store(maxima + place, top, mask=is_member)
    tl.store(sums + place, tl.sum(total * tl.exp(highest - top[:, None]), 1), mask=is_member)


# fmt: off
@triton.jit
def _value_and_gradient(
    # pointers
    logits, bias, target, weight, s_of_samples, diversity, alpha, scale, scale_k, scale_n, maxima, log_totals, values,
    # sizes
    samples, pitch, start, width, classes, MEMBERS: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    # options; ONE_HOT and SPREAD: target of the label and of every class
    ONE_HOT: tl.constexpr, SPREAD: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, COUPLED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """Write a part's share of one sample's loss and replace its logits by their gradient."""
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    member = tl.arange(0, BLOCK_K)
    is_member = member < MEMBERS
    rows = (member.to(tl.int64) * samples + sample) * pitch
    of_member = member * samples + sample
    top = tl.load(maxima + of_member, mask=is_member, other=0.0)[:, None]
    log_total = tl.load(log_totals + of_member, mask=is_member, other=0.0)[:, None]
    a = tl.load(alpha + member, mask=is_member, other=0.0)[:, None]
    factor = tl.load(scale + member * scale_k + sample * scale_n, mask=is_member, other=0.0)[:, None]
    label = tl.load(target + sample)
    lam = tl.load(diversity)
    s = 1.0
    if WEIGHTED:
        s = tl.load(s_of_samples + sample)
    loss = tl.zeros((BLOCK_K, BLOCK), ACC)
    for step in range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        z, mask = _load_logits(logits, bias, rows, member, is_member, column, start, width, classes, BIASED, ACC)
        log_q = z - top - log_total
        q = tl.exp(log_q)
        wp = tl.where(start + column == label, tl.full((BLOCK,), ONE_HOT, ACC), 0.0) + tl.full((BLOCK,), SPREAD, ACC)
        if WEIGHTED:
            wp *= tl.load(weight + start + column, mask=column < width, other=0.0)
        u = tl.broadcast_to(wp[None, :], (BLOCK_K, BLOCK))
        mixed = q
        if COUPLED:
            mixture = tl.sum(a * q, 0)[None, :]
            u -= lam * s * (mixture - a * q)
            mixed += lam * (mixture - q)
        # a class of weight 0 adds nothing, even where its log-probability is -inf
        loss -= u * tl.where(mask & (u != 0), log_q, 0.0)
        if WITH_GRADIENT:
            gradient = tl.where(factor == 0, 0.0, factor * (s * mixed - wp[None, :]))
            tl.store(logits + rows[:, None] + column[None, :], gradient.to(logits.dtype.element_ty), mask=mask)
    # where, not a product: a sample of weight 0 may have an infinite loss
    value = tl.where(factor == 0, 0.0, factor * tl.sum(loss, 1)[:, None])
    tl.store(values + (part * MEMBERS + member[:, None]) * samples + sample, value, mask=is_member[:, None])


class Chunk(NamedTuple):
    """Logits of all members and samples for some classes."""

    start: int
    logits: Tensor  # (K, N, c), with aligned rows

    @property
    def classes(self) -> slice:
        """Classes of the chunk."""
        return slice(self.start, self.start + self.logits.shape[2])


class Heads(NamedTuple):
    """Linear heads and their input; products have the features' dtype."""

    features: Tensor  # (N, D)
    weight: Tensor  # (K, C, D)
    bias: Tensor | None  # (K, C)

    def chunk_weight(self, member: int, chunk: Chunk) -> Tensor:
        """Return a member's weights for a chunk, `(c, D)`."""
        return self.weight[member, chunk.classes].to(self.features.dtype)

    def fill(self, chunk: Chunk) -> None:
        """Compute a chunk's logits."""
        for member, logits in enumerate(chunk.logits):
            torch.mm(self.features, self.chunk_weight(member, chunk).T, out=logits)


def value_and_gradients(
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    options: LossOptions,
    wanted: Sequence[bool],
    *,
    loss_scale: float,
) -> tuple[Tensor, list[Tensor | None]]:
    """Loss summed over samples and members, and its `wanted` gradients in features, weights and bias.

    Shapes: features `(N, D)` in the products' dtype, head_weight `(K, C, D)`, head_bias `(K, C)`. The options: one run,
    class indices, a sum over samples, no mixture, scale multiplied by `loss_scale`, by which gradients are divided.
    The weights' gradient has their dtype, the others float32 for half precision.
    """
    heads = Heads(features, head_weight, None if head_bias is None else head_bias.contiguous())
    dtype = compute_dtype(features)
    features_grad = torch.zeros_like(features, dtype=dtype) if wanted[0] else None
    weight_grad = torch.empty_like(head_weight, memory_format=torch.contiguous_format) if wanted[1] else None
    bias_grad = head_weight.new_empty(head_weight.shape[:2], dtype=dtype) if wanted[2] else None
    with torch.cuda.device_of(features), torch.autocast(features.device.type, enabled=False):
        chunks = _chunks(heads)
        parts: list[tuple[Tensor, Tensor]] = []
        for chunk in chunks:
            heads.fill(chunk)
            parts = [_combine([*parts, _launch_sums(chunk, heads, dtype)])]
        maxima, log_totals = parts[0][0], parts[0][1].log()
        arguments = _option_arguments(options, heads, dtype)
        values = []
        for chunk in reversed(chunks):
            if chunk is not chunks[-1]:  # its logits are still in the buffer
                heads.fill(chunk)
            values.append(_launch_gradient(chunk, heads, arguments, maxima, log_totals, any(wanted)).sum())
            for member, gradient in enumerate(chunk.logits):
                if features_grad is not None:
                    _product(features_grad, gradient, heads.chunk_weight(member, chunk), add=True, alpha=1 / loss_scale)
                if weight_grad is not None:
                    _product(
                        weight_grad[member, chunk.classes], gradient.T, features, add=False, alpha=1 / loss_scale
                    )
            if bias_grad is not None:
                torch.sum(chunk.logits, 1, dtype=dtype, out=bias_grad[:, chunk.classes]).div_(loss_scale)
        return torch.stack(values).sum(), [features_grad, weight_grad, bias_grad]


def _option_arguments(options: LossOptions, heads: Heads, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `_value_and_gradient` from the options."""
    (num_members, num_classes, _), num_samples = heads.weight.shape, len(heads.features)
    like = torch.empty((), dtype=dtype, device=heads.features.device)
    smoothing, weight, lam, target = options.label_smoothing, options.weight, options.diversity, options.target[0]
    if not isinstance(lam, Tensor) or lam.device != like.device:
        lam = torch.full_like(like, float(lam))  # filled on the device, without a sync
    # labels are not checked on a device: one out of range gives NaN
    outside = (target < 0) | (target >= num_classes)
    target = target.masked_fill(outside, 0)
    scale = options.scale if isinstance(options.scale, Tensor) else torch.full_like(like, options.scale).view(1, 1)
    scale = scale[0].expand(num_members, num_samples).masked_fill(outside, torch.nan)
    s = None if weight is None else weight[target] * (1 - smoothing) + weight.mean() * smoothing
    uniform = like.new_full((num_members,), 1 / num_members)
    return {
        "target": target,
        "weight": None if weight is None else weight.contiguous(),
        "s_of_samples": s,
        "diversity": lam.to(dtype),
        "alpha": uniform if options.alpha is None else options.alpha.contiguous(),
        "scale": scale,
        "scale_k": scale.stride(0),
        "scale_n": scale.stride(1),
        "ONE_HOT": 1 - smoothing,
        "SPREAD": smoothing / num_classes,
        "WEIGHTED": weight is not None,
        "COUPLED": num_members > 1 and not options.diversity_is_zero,
    }


def _chunks(heads: Heads) -> list[Chunk]:
    """Split the classes into chunks that share one buffer; the first holds the remainder."""
    (num_members, num_classes, _), num_samples = heads.weight.shape, len(heads.features)
    rows = num_members * num_samples
    most = max(LEAST_CLASSES, LOGITS // (rows * heads.features.element_size()))
    most = min(_align(num_classes), most // ALIGNED * ALIGNED)
    memory = heads.features.new_empty(rows * most)
    starts = [0, *range(num_classes % most or most, num_classes, most)]
    chunks = []
    for start, end in zip(starts, [*starts[1:], num_classes], strict=True):
        pitch = _align(end - start)
        logits = memory[: rows * pitch].view(num_members, num_samples, pitch)
        chunks.append(Chunk(start, logits[:, :, : end - start]))
    return chunks


def _align(count: int) -> int:
    return triton.cdiv(count, ALIGNED) * ALIGNED


def _tiles(chunk: Chunk, heads: Heads, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Number of parts of a chunk, one per program of a sample, and the arguments of both kernels."""
    num_members, num_samples, width = chunk.logits.shape
    block_k = triton.next_power_of_2(num_members)
    block = max(1, TILE // block_k)
    steps = min(STEPS, triton.next_power_of_2(triton.cdiv(width, block)))  # few distinct values: each is compiled
    return triton.cdiv(width, steps * block), {
        "logits": chunk.logits,
        "bias": heads.bias,
        "samples": num_samples,
        "pitch": chunk.logits.stride(1),
        "start": chunk.start,
        "width": width,
        "classes": heads.weight.shape[1],
        "MEMBERS": num_members,
        "BLOCK_K": block_k,
        "STEPS": steps,
        "BLOCK": block,
        "BIASED": heads.bias is not None,
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
    }


def _launch_sums(chunk: Chunk, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Maxima and sums of exponentials of a chunk's parts, both `(parts, K, N)`."""
    parts, tiles = _tiles(chunk, heads, dtype)
    num_members, num_samples, _ = chunk.logits.shape
    maxima, sums = torch.empty(2, parts, num_members, num_samples, dtype=dtype, device=chunk.logits.device)
    _softmax_sums[(num_samples, parts)](maxima=maxima, sums=sums, **tiles)
    return maxima, sums


def _combine(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Maximum over all parts, and the sum of exponentials relative to it, both `(1, K, N)`."""
    maxima, sums = (torch.cat(values) for values in zip(*parts, strict=True))
    highest = maxima.amax(0, keepdim=True)
    return highest, (sums * (maxima - highest).exp()).sum(0, keepdim=True)


def _launch_gradient(
    chunk: Chunk, heads: Heads, arguments: dict[str, Any], maxima: Tensor, log_totals: Tensor, want_gradient: bool
) -> Tensor:
    """Return the loss's parts, `(parts, K, N)`; replace the chunk by the gradient where wanted."""
    parts, tiles = _tiles(chunk, heads, maxima.dtype)
    num_members, num_samples, _ = chunk.logits.shape
    values = maxima.new_empty(parts, num_members, num_samples)
    _value_and_gradient[(num_samples, parts)](
        maxima=maxima, log_totals=log_totals, values=values, WITH_GRADIENT=want_gradient, **tiles, **arguments
    )
    return values


def _product(out: Tensor, a: Tensor, b: Tensor, *, add: bool, alpha: float) -> None:
    """Write `alpha * a @ b` to `out`, or add it; `out` has their dtype or float32."""
    beta = 1 if add else 0
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
