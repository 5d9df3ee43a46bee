"""Selection of the Triton kernel and its tiles, and launches, for the amended cross entropy."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.ace_once_gpu import read_once
from torchace.kernels.ace_terms_gpu import scale_in_place
from torchace.kernels.ace_twice_gpu import read_twice
from torchace.kernels.closed_form import LossResult
from torchace.kernels.options import LossOptions

# Measured on an H200 (docs/results/speed.md).
HELD, MAX_WARPS = 96, 4  # numbers of a thread, and warps, where a sample's logits are read once
HELD_OF_BLOCK, MAX_HELD = 40, 64  # logits of a thread where they are read block by block; of many members it has some
# Warps of a program that reads in blocks; logits of a sample from which on it has more, and at most so many.
WARPS, LOGITS_OF_WARPS, MAX_BLOCK_WARPS = 4, 1 << 15, 16
FEW_MEMBERS, VERY_FEW_MEMBERS = 4, 3
# Registers of a thread that holds at most so many numbers: in blocks; all at once, of few members and of many.
BLOCK_REGISTERS = ((16, 64), (24, 80), (32, 96), (48, 128))
FEW_REGISTERS, MANY_REGISTERS = ((64, 128), (96, 168)), ((56, 128), (90, 168))
ALL_REGISTERS = 1 << 16
ONE_PROGRAM = 1 << 15  # so few logits of a run are left to one program
COUNTED = 2048  # so many targets are counted by every program for itself
STAGES, STAGED = 3, 48 << 10  # rounds of loads under way, unless they need more bytes than this
FEW = 1 << 20  # numbers that torch multiplies faster than a Triton kernel starts
NO_IGNORE_INDEX = -(1 << 31)
INTERPRETED = triton.knobs.runtime.interpret  # as it was when the kernels were made

Tiles = tuple[int, int, int, int, int | None]


def value_and_gradient(
    logits: Tensor, options: LossOptions, *, want_gradient: bool, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Loss summed over members, a scalar, and its gradient in logits `(K, N, C)` times `upstream`."""
    with torch.cuda.device_of(logits):  # Triton launches on the current device, not on that of its arguments
        logits, gradient, options = _prepare(logits, options, want_gradient)
        tiles = _once_tiles(logits, _vector(logits, gradient))
        if tiles is None:
            values = _read_twice_values(logits, gradient, options, upstream)
        else:
            values = _read_once_values(logits, gradient, options, upstream, tiles)
    return values.sum() if values.numel() > 1 else values.view(()), gradient


def scaled_gradient(logits: Tensor, options: LossOptions, factor: Tensor) -> Tensor:
    """Gradient times a number on the device, rounded once."""
    _, gradient = value_and_gradient(logits, options, want_gradient=True, upstream=factor)
    assert gradient is not None
    return gradient


def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """Scale a dense gradient in place by a number on the device; a factor of 1 skips the gradient."""
    if gradient.numel() < FEW:
        return gradient.mul_(factor)
    block, most = 4096, 8 * _multiprocessors(gradient.device)
    with torch.cuda.device_of(gradient):
        programs = min(most, _ceil_div(gradient.numel(), block))
        scale_in_place[(programs,)](gradient, factor, gradient.numel(), BLOCK=block)
    return gradient


def fits_member_terms(logits: Tensor) -> bool:
    """Whether the logits of one sample of one run, of `(R, K, N, C)`, fit on chip."""
    return _once_tiles(logits, _vector(logits, None)) is not None


def member_terms(logits: Tensor, options: LossOptions) -> LossResult:
    """Losses `(R, K)`, scores `(R, N)` and the gradient in logits `(R, K, N, C)`, in one launch.

    Requires `fits_member_terms` and options with a sum over samples.
    """
    num_runs, num_members, num_samples, _ = logits.shape
    if options.target.data_ptr() % 16:  # else Triton would compile again for another alignment, perhaps in a CUDA graph
        options = options.replace(target=options.target.clone())
    with torch.cuda.device_of(logits):
        logits, gradient, options = _prepare(logits, options, want_gradient=True)
        tiles = _once_tiles(logits, _vector(logits, gradient))
        assert tiles is not None
        scores = torch.empty(num_runs, num_samples, dtype=_accumulator(logits), device=logits.device)
        values = _read_once_values(logits, gradient, options, None, tiles, scores).view(num_runs, -1, num_members)
    losses = values.sum(1) if values.shape[1] > 1 else values.squeeze(1)
    return LossResult(losses, scores, gradient)


def _prepare(logits: Tensor, options: LossOptions, want_gradient: bool) -> tuple[Tensor, Tensor | None, LossOptions]:
    """Logits, memory for their gradient, and options as the kernels read them: contiguous, `scale` a tensor or 1."""
    if logits.shape[-1] * logits.stride(-1) >= 1 << 31:  # classes are indexed with 32 bits
        logits = logits.contiguous()
    alpha, weight, scale = options.alpha, options.weight, options.scale
    if isinstance(scale, Tensor) or scale != 1:
        if not isinstance(scale, Tensor):
            scale = torch.full((1, 1), scale, dtype=_accumulator(logits), device=logits.device)
        num_runs = logits.shape[0] if logits.ndim == 4 else 1
        scale = scale.expand(num_runs, *scale.shape[1:-1], logits.shape[-2])
    alpha = None if alpha is None else alpha.contiguous()
    weight = None if weight is None else weight.contiguous()
    gradient = torch.empty_like(logits) if want_gradient else None
    return logits, gradient, options.replace(alpha=alpha, weight=weight, scale=scale)


def _accumulator(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _vector(logits: Tensor, gradient: Tensor | None) -> int:
    """Number of classes that a thread reads at once of every member: rows start at multiples of it."""
    align = 8
    for tensor in (logits,) if gradient is None or gradient.stride() == logits.stride() else (logits, gradient):
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            while size > 1 and stride % align:
                align //= 2
    return min(align, 16 // logits.element_size(), _next_power(logits.shape[-1]))


def _once_tiles(logits: Tensor, vector: int) -> Tiles | None:
    """BLOCK_C, BLOCK_N, STAGES, warps and registers where logits are read once; None if a sample has too many."""
    members, samples, classes = logits.shape[-3:]
    block_c, padded = _next_power(classes), sum(_two_powers(members))
    threads = block_c // vector  # that a sample has work for
    numbers = padded * block_c + block_c // 2  # exponentials; terms that all members share are live half the time
    warps = _next_power(_ceil_div(numbers, 32 * HELD))
    if warps > MAX_WARPS or 32 * warps > max(32, threads) or padded * vector > HELD:
        return None
    block_n = min(_next_power(samples), max(1, 32 * warps // threads))
    few = members <= FEW_MEMBERS
    held = numbers * block_n // (32 * warps)
    registers = _registers(FEW_REGISTERS, held) if few else _registers(MANY_REGISTERS, held + 2 * members)
    staged = not few and 2 * block_n * padded * block_c * logits.element_size() <= STAGED
    if _next_power(samples) * padded * block_c <= ONE_PROGRAM:
        block_n, warps, registers, staged = _next_power(samples), 16, None, False
    return block_c, block_n, STAGES if staged else 1, warps, registers


def _read_once_values(
    logits: Tensor,
    gradient: Tensor | None,
    options: LossOptions,
    upstream: Tensor | None,
    tiles: Tiles,
    scores: Tensor | None = None,
) -> Tensor:
    """Partial sums of the loss, one per program and run, with `scores` also per member."""
    members, samples = logits.shape[-3:-1]
    num_runs = logits.shape[0] if logits.ndim == 4 else 1
    block_c, block_n, stages, warps, registers = tiles
    if scores is not None:
        registers = None  # more numbers are held
    # As many programs as there is room for. They take other samples later, whose logits come while they compute.
    room = max(1, ALL_REGISTERS // (32 * warps * (registers or (128 if warps == 1 else 255))))
    room = max(1, room * _multiprocessors(logits.device) // num_runs)
    programs = min(_ceil_div(samples, block_n), room)
    size = num_runs * programs * (1 if scores is None else members)
    values = torch.empty(size, dtype=_accumulator(logits), device=logits.device)
    counted = _count(logits, options, in_blocks=False)
    vector, scale = _vector(logits, gradient), options.scale
    run_strides = (0, 0, 0, 0)  # of logits, gradient, target and scale
    if logits.ndim == 4:
        out = logits if gradient is None else gradient
        step = scale.stride(0) if isinstance(scale, Tensor) else 0
        run_strides = (logits.stride(0) // vector, out.stride(0) // vector, options.target.stride(0), step)
    read_once[(programs, num_runs)](
        *_arguments(logits, gradient, values, options, upstream, vector, block_c, counted),
        logits if scores is None else scores,
        *run_strides,
        block_n,
        stages,
        num_runs > 1,
        scores is not None,
        num_warps=warps,
        maxnreg=registers,
    )
    return values


def _read_twice_values(
    logits: Tensor, gradient: Tensor | None, options: LossOptions, upstream: Tensor | None
) -> Tensor:
    """Losses of the samples of one run."""
    members, samples, classes = logits.shape[-3:]
    warps = min(MAX_BLOCK_WARPS, WARPS * _next_power(_ceil_div(members * classes, LOGITS_OF_WARPS)))
    warps = max(warps, 2 * WARPS) if members <= VERY_FEW_MEMBERS else warps
    vector = _vector(logits, gradient)
    vector = vector if members <= FEW_MEMBERS else min(vector, 4)
    while vector > 2 and members * vector > HELD_OF_BLOCK:
        vector //= 2
    shares = _next_power(_ceil_div(members * vector, MAX_HELD))  # threads that have the same classes, of other members
    block_c = min(_next_power(classes), max(1, 32 * warps // shares) * vector)
    values = torch.empty(samples, dtype=_accumulator(logits), device=logits.device)
    counted = _count(logits, options, in_blocks=True)
    read_twice[(samples,)](
        *_arguments(logits, gradient, values, options, upstream, vector, block_c, counted),
        num_warps=max(1, min(warps, shares * block_c // (32 * vector))),
        maxnreg=_registers(BLOCK_REGISTERS, members * vector),
    )
    return values


def _count(logits: Tensor, options: LossOptions, *, in_blocks: bool) -> tuple[Tensor, int, int]:
    """The mean's denominator, how kernels find it (COUNT, see `mean_factor`), and the samples that they count."""
    samples, target, weight = logits.shape[-2], options.target, options.weight
    if options.reduction != "mean" or isinstance(options.scale, Tensor):
        return logits, 0, 1
    if samples <= COUNTED and not in_blocks:
        return logits, 2, _next_power(samples)
    target = target.long()  # before the comparison: -100 wraps around to 156 in uint8
    counted = target.ne(NO_IGNORE_INDEX if options.ignore_index is None else options.ignore_index)
    if weight is None:
        return counted.sum(dtype=_accumulator(logits)), 1, 1
    return (weight[target.clamp(0, len(weight) - 1)] * counted).sum(), 1, 1


def _arguments(
    logits: Tensor,
    gradient: Tensor | None,
    values: Tensor,
    options: LossOptions,
    upstream: Tensor | None,
    vector: int,
    block_c: int,
    counted: tuple[Tensor, int, int],
) -> tuple[Any, ...]:
    """Arguments of both kernels, in order; the logits are the placeholder for missing tensors."""
    members, samples, classes = logits.shape[-3:]
    out = logits if gradient is None else gradient
    logits_k, logits_n, logits_c = logits.stride()[-3:]
    gradient_k, gradient_n, gradient_c = out.stride()[-3:]
    target, alpha, weight = options.target, options.alpha, options.weight
    lam, smoothing, ignore_index = options.diversity, options.label_smoothing, options.ignore_index
    scale = options.scale if isinstance(options.scale, Tensor) else None
    mean_weight = weight.mean() if weight is not None and smoothing else weight
    counts, count, count_block = counted
    given = [logits if tensor is None else tensor for tensor in (weight, mean_weight, alpha, scale, upstream)]
    # fmt: off
    return (
        logits, out, values, target, *given[:4], counts, given[4], lam,
        logits_k // vector, logits_n // vector, logits_c, gradient_k // vector, gradient_n // vector, gradient_c,
        target.stride(1), 0 if scale is None or scale.ndim == 2 else scale.stride(1),
        0 if scale is None else scale.stride(-1),
        smoothing, NO_IGNORE_INDEX if ignore_index is None else ignore_index, samples,
        members, classes, vector, *_two_powers(members), block_c,
        gradient is not None, weight is not None, alpha is None, scale is not None, count, count_block,
        upstream is not None, isinstance(lam, Tensor), smoothing != 0,
        tl.float64 if values.dtype == torch.float64 else tl.float32, values.dtype == torch.float32 and not INTERPRETED,
    )
    # fmt: on


def _next_power(count: int) -> int:
    """Next power of two; Triton's function takes 4 µs."""
    return 1 << (count - 1).bit_length()


def _registers(limits: tuple[tuple[int, int], ...], held: int) -> int | None:
    """Registers of a thread that holds `held` numbers; None: the compiler decides."""
    return next((registers for most, registers in limits if held <= most), None)


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _two_powers(members: int) -> tuple[int, int]:
    """Two powers of two, or one and 0, that hold the members with little padding."""
    largest = 1 << (members.bit_length() - 1)
    return largest, 0 if members == largest else _next_power(members - largest)
