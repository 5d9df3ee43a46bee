"""Selection of the Triton kernel and its tiles, and launches, for the amended cross entropy."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.ace_once_gpu import _read_once
from torchace.kernels.ace_terms_gpu import _count_samples, _scale
from torchace.kernels.ace_twice_gpu import _read_twice
from torchace.kernels.closed_form import LossResult
from torchace.kernels.options import LossOptions

# Measured on an H200 (docs/results/speed.md).
HELD, MAX_WARPS = 96, 4  # numbers of a thread, and warps, where a sample's logits are read once
HELD_OF_BLOCK, MAX_HELD = 40, 64  # logits of a thread where they are read block by block; of many members it has some
WARPS, LOGITS_OF_WARPS = 4, 1 << 15  # of a program that reads in blocks; logits of a sample from which on it has more
FEW_MEMBERS, VERY_FEW_MEMBERS = 4, 3
# Registers of a thread that holds at most so many numbers: in blocks; all at once, of few members and of many.
BLOCK_REGISTERS = ((16, 64), (24, 80), (32, 96), (48, 128))
FEW_REGISTERS, MANY_REGISTERS = ((64, 128), (96, 168)), ((56, 128), (90, 168))
FIRST_SPAN_REGISTERS, SPAN_REGISTERS, ALL_REGISTERS = ((64, 64),), ((40, 96),), 1 << 16
ONE_PROGRAM = 1 << 15  # so few logits of a run are left to one program
READ_TWICE = 1 << 17  # logits of a sample that one program reads twice: the second time they are still in the cache
SPAN = 1 << 15  # logits that a program reads where several share a sample
STATISTICS = 1 << 12  # numbers that all spans of a sample store, of all members
COUNTED = 2048  # so many targets are counted by every program for itself; more of them by a kernel of
COUNTERS, COUNTERS_OF_BLOCKS = (256, 1024), (16, 8192)  # at most so many programs, each so many at once
STAGES, STAGED = 3, 48 << 10  # rounds of loads under way, unless they need more bytes than this
FEW = 1 << 20  # numbers that torch multiplies faster than a Triton kernel starts
NO_IGNORE_INDEX = -(1 << 31)
INTERPRETED = triton.knobs.runtime.interpret  # as it was when the kernels were made


def is_gradient_kept(logits: Tensor) -> bool:
    """Whether the forward computes the gradient: not in float16, which underflows before a loss scale is applied."""
    return logits.dtype != torch.float16


def value_and_gradient(
    logits: Tensor, options: LossOptions, *, want_gradient: bool, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Loss summed over members, a scalar, and its gradient in logits `(K, N, C)` times `upstream`."""
    with torch.cuda.device_of(logits):  # Triton launches on the current device, not on that of its arguments
        launch = _prepare(logits, options, want_gradient, upstream)
        tiles = _once_tiles(launch.logits, launch.vector)
        values = _read_twice_values(launch) if tiles is None else _read_once_values(launch, tiles)
    value = values.sum() if values.numel() > 1 else values.view(())
    return value, launch.gradient if want_gradient else None


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
        _scale[(programs,)](gradient, factor, gradient.numel(), BLOCK=block)
    return gradient


def fits_member_terms(logits: Tensor) -> bool:
    """Whether the logits of one sample of one run, of `(R, K, N, C)`, fit on chip."""
    return _once_tiles(logits, _vector(logits, logits)) is not None


def member_terms(logits: Tensor, options: LossOptions) -> LossResult:
    """Losses `(R, K)`, scores `(R, N)` and the gradient in logits `(R, K, N, C)`, in one launch.

    Requires `fits_member_terms` and options with a sum over samples and class indices.
    """
    num_runs, num_members, num_samples, _ = logits.shape
    if options.target.data_ptr() % 16:  # else Triton would compile again for another alignment, perhaps in a CUDA graph
        options = options.replace(target=options.target.clone())
    with torch.cuda.device_of(logits):
        launch = _prepare(logits, options, want_gradient=True, upstream=None)
        tiles = _once_tiles(launch.logits, launch.vector)
        assert tiles is not None
        scores = torch.empty(num_runs, num_samples, dtype=launch.dtype, device=logits.device)
        values = _read_once_values(launch, tiles, scores).view(num_runs, -1, num_members)
    losses = values.sum(1) if values.shape[1] > 1 else values.squeeze(1)
    return LossResult(losses, scores, launch.gradient)


class Launch(NamedTuple):
    """Arguments of the kernels."""

    logits: Tensor  # (R, K, N, C), or (K, N, C) of one run
    gradient: Tensor  # the logits, where none is wanted
    options: LossOptions
    target: Tensor  # from here on, options as kernels read them: weights contiguous, classes not too far apart
    alpha: Tensor | None
    weight: Tensor | None
    mixture: Tensor | None
    scale: Tensor | None  # (R, N) or (R, K, N)
    upstream: Tensor | None
    want_gradient: bool
    vector: int  # classes that a thread reads at once
    dtype: torch.dtype


def _prepare(logits: Tensor, options: LossOptions, want_gradient: bool, upstream: Tensor | None) -> Launch:
    """Make weights contiguous and class strides small enough for the kernels."""
    logits = reachable(logits)
    gradient = torch.empty_like(logits) if want_gradient else logits
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    alpha, weight, mixture, scale = options.alpha, options.weight, options.mixture, options.scale
    if isinstance(scale, Tensor) or scale != 1:
        if not isinstance(scale, Tensor):
            scale = torch.full((1, 1), scale, dtype=dtype, device=logits.device)
        num_runs = logits.shape[0] if logits.ndim == 4 else 1
        scale = scale.expand(num_runs, *scale.shape[1:-1], logits.shape[-2])
    return Launch(
        logits,
        gradient,
        options,
        reachable(options.target),
        None if alpha is None else alpha.contiguous(),
        None if weight is None else weight.contiguous(),
        None if mixture is None else reachable(mixture),
        scale if isinstance(scale, Tensor) else None,
        upstream,
        want_gradient,
        _vector(logits, gradient),
        dtype,
    )


def _vector(logits: Tensor, gradient: Tensor) -> int:
    """Number of classes that a thread reads at once of every member."""
    align = _alignment(logits) if gradient.stride() == logits.stride() else _alignment(logits, gradient)
    return min(align, 16 // logits.element_size(), _next_power(logits.shape[-1]))


def _once_tiles(logits: Tensor, vector: int) -> tuple[int, int, int, int, int | None] | None:
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
    launch: Launch, tiles: tuple[int, int, int, int, int | None], scores: Tensor | None = None
) -> Tensor:
    """Partial sums of the loss, one per program and run, with `scores` also per member."""
    logits, per_member = launch.logits, scores is not None
    members, samples = logits.shape[-3:-1]
    num_runs = logits.shape[0] if logits.ndim == 4 else 1
    block_c, block_n, stages, warps, registers = tiles
    if per_member:
        registers = None  # more numbers are held
    # As many programs as there is room for. They take other samples later, whose logits come while they compute.
    room = max(1, ALL_REGISTERS // (32 * warps * (registers or (128 if warps == 1 else 255))))
    room = max(1, room * _multiprocessors(logits.device) // num_runs)
    programs = min(_ceil_div(samples, block_n), room)
    size = num_runs * programs * (members if per_member else 1)
    values = torch.empty(size, dtype=launch.dtype, device=logits.device)
    _read_once[(programs, num_runs)](
        *_arguments(launch, values, launch.vector, block_c, _count(launch, in_blocks=False)),
        logits if scores is None else scores,
        *_run_strides(launch),
        block_n,
        stages,
        num_runs > 1,
        per_member,
        num_warps=warps,
        maxnreg=registers,
    )
    return values


def _read_twice_values(launch: Launch) -> Tensor:
    """Partial sums of the loss of one run, per sample or per span of its classes."""
    logits, vector = launch.logits, launch.vector
    members, samples, classes = logits.shape[-3:]
    several = members * classes > READ_TWICE  # programs share a sample
    warps = WARPS * _next_power(_ceil_div(members * classes, LOGITS_OF_WARPS))
    warps = WARPS if several else max(warps, 2 * WARPS) if members <= VERY_FEW_MEMBERS else warps
    counts = _count(launch, in_blocks=True)
    if not several:
        vector = _narrow(vector if members <= FEW_MEMBERS else min(vector, 4), members, HELD_OF_BLOCK)
        block = _block(members, classes, vector, warps, _registers(BLOCK_REGISTERS, members * vector))
        block_c, warps, registers = block
        span = _ceil_div(classes, block_c) * block_c
        values = torch.empty(samples, dtype=launch.dtype, device=logits.device)
        _read_twice[(samples, 1)](
            *_arguments(launch, values, vector, block_c, counts), values, 0, span, 1, 1, num_warps=warps,
            maxnreg=registers,
        )  # fmt: skip
        return values
    wide, vector = _narrow(vector, members, MAX_HELD), _narrow(min(vector, 4), members, HELD_OF_BLOCK)
    blocks = (
        _block(members, classes, wide, warps, _registers(FIRST_SPAN_REGISTERS, members * wide)),
        _block(members, classes, vector, warps, _registers(SPAN_REGISTERS, members * vector)),
    )
    # not so many spans that their statistics would fill a program that reads them all
    size = max(SPAN // members, _ceil_div(classes * _two_powers(members)[0], STATISTICS))
    block_c = max(block[0] for block in blocks)
    span = _ceil_div(min(classes, size), block_c) * block_c
    spans = _ceil_div(classes, span)
    values = torch.empty(samples * spans, dtype=launch.dtype, device=logits.device)
    statistics = values.new_empty((samples, spans, 3, members))
    for stage, (block_c, warps, registers), width in zip((1, 2), blocks, (wide, vector), strict=True):
        _read_twice[(samples, spans)](
            *_arguments(launch, values, width, block_c, counts), statistics, stage, span, spans, _next_power(spans),
            num_warps=warps, maxnreg=registers,
        )  # fmt: skip
    return values


def _count(launch: Launch, *, in_blocks: bool) -> tuple[Tensor, int, int]:
    """Partial denominators of the mean, the mode to combine them (see `_mean_factor`) and their number."""
    logits, options, target, weight = launch.logits, launch.options, launch.target, launch.weight
    samples, classes = logits.shape[-2:]
    if options.reduction != "mean" or launch.scale is not None:
        return logits, 0, 1
    if target.is_floating_point():
        return logits, 3, 1
    if samples <= COUNTED and not in_blocks:
        return logits, 2, _next_power(samples)
    most, size = COUNTERS_OF_BLOCKS if in_blocks else COUNTERS
    parts = min(most, _next_power(_ceil_div(samples, size)))
    counts = torch.empty(parts, dtype=launch.dtype, device=logits.device)
    _count_samples[(parts,)](
        target,
        target.stride(1),
        counts if weight is None else weight,
        counts,
        samples,
        classes,
        NO_IGNORE_INDEX if options.ignore_index is None else options.ignore_index,
        _ceil_div(samples, size * parts),
        WEIGHTED=weight is not None,
        BLOCK=size,
        num_warps=max(1, size // 512),
    )
    return counts, 4 if in_blocks else 1, parts


def _arguments(
    launch: Launch, values: Tensor, vector: int, block_c: int, counted: tuple[Tensor, int, int]
) -> tuple[Any, ...]:
    """Arguments of both kernels, in order; the logits are the placeholder for missing tensors."""
    logits, gradient, options, target, alpha, weight, mixture, scale, upstream, want_gradient, _, dtype = launch
    members, samples, classes = logits.shape[-3:]
    logits_k, logits_n, logits_c = logits.stride()[-3:]
    gradient_k, gradient_n, gradient_c = gradient.stride()[-3:]
    lam, smoothing, ignore_index = options.diversity, options.label_smoothing, options.ignore_index
    probabilities = target.is_floating_point()
    mean_weight = weight.mean() if weight is not None and smoothing and not probabilities else weight
    counts, count, parts = counted
    return (
        logits,
        gradient,
        values,
        target,
        logits if weight is None else weight,
        logits if mean_weight is None else mean_weight,
        logits if alpha is None else alpha,
        logits if mixture is None else mixture,
        logits if scale is None else scale,
        counts,
        logits if upstream is None else upstream,
        lam,
        logits_k // vector,
        logits_n // vector,
        logits_c,
        gradient_k // vector,
        gradient_n // vector,
        gradient_c,
        target.stride(1),
        target.stride(2) if probabilities else 0,
        0 if mixture is None else mixture.stride(1),
        0 if mixture is None else mixture.stride(2),
        0 if scale is None or scale.ndim == 2 else scale.stride(1),
        0 if scale is None else scale.stride(-1),
        smoothing,
        NO_IGNORE_INDEX if ignore_index is None else ignore_index,
        samples,
        members,
        classes,
        vector,
        *_two_powers(members),
        block_c,
        want_gradient,
        probabilities,
        weight is not None,
        alpha is None,
        mixture is not None,
        scale is not None,
        count,
        parts,
        upstream is not None,
        isinstance(lam, Tensor),
        smoothing != 0,
        tl.float64 if dtype == torch.float64 else tl.float32,
        dtype == torch.float32 and not INTERPRETED,
    )


def _run_strides(launch: Launch) -> tuple[int, int, int, int, int]:
    """Strides of the run axis of logits, gradient, target, mixture and scale."""
    logits, mixture, scale, vector = launch.logits, launch.mixture, launch.scale, launch.vector
    if logits.ndim == 3:
        return 0, 0, 0, 0, 0
    return (
        logits.stride(0) // vector,
        launch.gradient.stride(0) // vector,
        launch.target.stride(0),
        0 if mixture is None else mixture.stride(0),
        0 if scale is None else scale.stride(0),
    )


def reachable(values: Tensor) -> Tensor:
    """Return values whose last axis can be indexed with 32 bits; a copy where strides are too large."""
    return values.contiguous() if values.shape[-1] * values.stride(-1) >= 1 << 31 else values


def _narrow(vector: int, members: int, held: int) -> int:
    """Halve the vector, not below 2, until a thread holds at most `held` logits."""
    while vector > 2 and members * vector > held:
        vector //= 2
    return vector


def _block(members: int, classes: int, vector: int, warps: int, registers: int | None) -> tuple[int, int, int | None]:
    """BLOCK_C, warps and registers of the kernel that reads logits twice."""
    shares = _next_power(_ceil_div(members * vector, MAX_HELD))  # threads that have the same classes, of other members
    block_c = min(_next_power(classes), max(1, 32 * warps // shares) * vector)
    warps = max(1, min(warps, shares * block_c // (32 * vector)))
    return block_c, warps, registers


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


def _alignment(*tensors: Tensor) -> int:
    """Common divisor of all rows' offsets, which limits vectorized loads."""
    align = 8
    for tensor in tensors:
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            while size > 1 and stride % align:
                align //= 2
    return align
