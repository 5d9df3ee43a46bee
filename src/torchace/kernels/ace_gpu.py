"""The kernels of the amended cross entropy, launched: which of them, with which tiles, for what is at hand."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchace.kernels.ace_blocks import _in_blocks
from torchace.kernels.ace_pieces import _counts, _multiplied
from torchace.kernels.ace_whole import _whole

# Measured on an H200 (docs/results/speed.md).
HELD, MOST_WARPS = 96, 4  # numbers of a thread, and warps, where a sample's logits are read once
HELD_OF_BLOCK, MOST_HELD = 40, 64  # logits of a thread where they are read block by block; of many members' it has some
WARPS, FOR_WARPS = 4, 1 << 15  # of a program that reads in blocks, and logits of a sample from which on it has more
FEW_MEMBERS, VERY_FEW = 4, 3
# Registers of a thread that holds no more numbers than this: in blocks; all at once, of few members and of many.
OF_BLOCK, OF_FEW, OF_MANY = ((16, 64), (24, 80), (32, 96), (48, 128)), ((64, 128), (96, 168)), ((56, 128), (90, 168))
OF_SPREAD_FIRST, OF_SPREAD, ALL_REGISTERS = ((64, 64),), ((40, 96),), 1 << 16
ONE_PROGRAM = 1 << 15  # so few logits in all are left to one program
READ_TWICE = 1 << 17  # logits of a sample that one program reads twice: the second time they are still in the cache
SPAN = 1 << 15  # logits that a program reads where several share a sample
LEFT_BEHIND = 1 << 12  # numbers, of all spans and members
COUNTED = 2048  # so many targets may be counted by every program for itself; others by
COUNTERS, COUNTERS_OF_BLOCKS = (256, 1024), (16, 8192)  # at most so many programs of their own, so many at once
STAGES, STAGED = 3, 48 << 10  # how many rounds of loads are under way, unless they need more bytes than this
FEW = 1 << 20  # numbers that torch multiplies faster than a kernel here starts


class Options(NamedTuple):
    """Everything but the logits; None of it receives a gradient."""

    target: Tensor  # (N,) or probabilities (N, C)
    diversity: Tensor | None  # λ on the device, else
    number: float  # λ as a number
    alpha: Tensor | None  # (K,); uniform unless given
    weight: Tensor | None  # (C,)
    mixture: Tensor | None  # (N, C)
    scale: Tensor | None  # what a sample's loss is multiplied by, (N,) or (K, N)
    label_smoothing: float
    ignore_index: int
    mean: bool  # over the samples that count, by the weights of their classes; with a scale, this is all in it


def value_and_gradient(
    logits: Tensor, options: Options, *, want_gradient: bool, by: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The loss summed over members, a scalar, and its gradient in the logits, `(K, N, C)`; the latter times `by`."""
    with torch.cuda.device_of(logits):  # Triton launches on the current device, whatever tensors it is given
        return _launched(reachable(logits), _readable(options), want_gradient, by)


def _launched(logits: Tensor, options: Options, want_gradient: bool, by: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gradient = torch.empty_like(logits) if want_gradient else logits
    # The compiler gives a thread what it reads at once of every member, then other samples or classes to other threads.
    vector = min(_alignment(logits, gradient), 16 // logits.element_size(), _power(logits.shape[2]))
    task = Task(logits, gradient, options, by, want_gradient)
    values = _read_once(task, vector)
    if values is None:
        values = _read_twice(task, vector)
    return values.sum() if values.numel() > 1 else values.view(()), gradient if want_gradient else None


class Task(NamedTuple):
    """What kernels are given."""

    logits: Tensor
    gradient: Tensor
    options: Options
    by: Tensor | None
    want_gradient: bool

    @property
    def acc(self) -> torch.dtype:
        """What is computed in."""
        return torch.promote_types(self.logits.dtype, torch.float32)


def _counted(task: Task, *, in_blocks: bool) -> tuple[Tensor, int, int]:
    """What the samples count in the mean, in parts; how that becomes a number (see `_share`); and how many parts."""
    logits, options = task.logits, task.options
    target, (_, samples, classes) = options.target, logits.shape
    if not options.mean or options.scale is not None:
        return logits, 0, 1
    if target.is_floating_point():
        return logits, 3, 1
    if samples <= COUNTED and not in_blocks:
        return logits, 2, _power(samples)
    most, size = COUNTERS_OF_BLOCKS if in_blocks else COUNTERS
    parts = min(most, _power(_parts(samples, size)))
    counts = torch.empty(parts, dtype=task.acc, device=logits.device)
    weighted = options.weight is not None
    _counts[(parts,)](
        target,
        target.stride(0),
        options.weight if weighted else counts,
        counts,
        samples,
        classes,
        options.ignore_index,
        _parts(samples, size * parts),
        WEIGHTED=weighted,
        BLOCK=size,
        num_warps=max(1, size // 512),
    )
    return counts, 4 if in_blocks else 1, parts


def _read_once(task: Task, vector: int) -> Tensor | None:
    """Values of some samples each, which add up to the loss; None if a sample has too many logits for this."""
    logits = task.logits
    members, samples, classes = logits.shape
    some_classes, padded = _power(classes), sum(_powers(members))
    threads = some_classes // vector  # that a sample has work for
    numbers = padded * some_classes + some_classes // 2  # exponentials; what all members share is there half the time
    warps = _power(_parts(numbers, 32 * HELD))
    if warps > MOST_WARPS or 32 * warps > max(32, threads) or padded * vector > HELD:
        return None
    some = min(_power(samples), max(1, 32 * warps // threads))
    few = members <= FEW_MEMBERS
    held = numbers * some // (32 * warps)
    registers = _limit(OF_FEW, held) if few else _limit(OF_MANY, held + 2 * members)
    staged = not few and 2 * some * padded * some_classes * logits.element_size() <= STAGED
    if _power(samples) * padded * some_classes <= ONE_PROGRAM:
        some, warps, registers, staged = _power(samples), 16, None, False
    # As many as there is room for. They take other samples later, whose logits come while they compute.
    room = max(1, ALL_REGISTERS // (32 * warps * (registers or (128 if warps == 1 else 255))))
    programs = min(_parts(samples, some), room * _multiprocessors(logits.device))
    values = torch.empty(programs, dtype=task.acc, device=logits.device)
    arguments, flags = _arguments(task, values, vector, _counted(task, in_blocks=False))
    _whole[(programs,)](
        *arguments, **flags, SOME=some, SOME_CLASSES=some_classes, STAGES=STAGES if staged else 1, num_warps=warps,
        maxnreg=registers,
    )  # fmt: skip
    return values


def _read_twice(task: Task, vector: int) -> Tensor:
    """Values of samples, or of spans of their classes, which add up to the loss."""
    logits = task.logits
    members, samples, classes = logits.shape
    spread = members * classes > READ_TWICE
    warps = WARPS * _power(_parts(members * classes, FOR_WARPS))
    warps = WARPS if spread else max(warps, 2 * WARPS) if members <= VERY_FEW else warps
    counted = _counted(task, in_blocks=True)
    if not spread:
        vector = _narrow(vector if members <= FEW_MEMBERS else min(vector, 4), members, HELD_OF_BLOCK)
        block = _block(members, classes, vector, warps, _limit(OF_BLOCK, members * vector))
        span = _parts(classes, block["SOME_CLASSES"]) * block["SOME_CLASSES"]
        values = torch.empty(samples, dtype=task.acc, device=logits.device)
        arguments, flags = _arguments(task, values, vector, counted)
        _in_blocks[(samples, 1)](
            *arguments, **flags, **block, statistics=values, STAGE=0, SPAN=span, SPANS=1, SOME_SPANS=1
        )
        return values
    wide, vector = _narrow(vector, members, MOST_HELD), _narrow(min(vector, 4), members, HELD_OF_BLOCK)
    blocks = (
        _block(members, classes, wide, warps, _limit(OF_SPREAD_FIRST, members * wide)),
        _block(members, classes, vector, warps, _limit(OF_SPREAD, members * vector)),
    )
    # not so many spans that what they leave behind would fill a program that reads it all
    some = max(SPAN // members, _parts(classes * _powers(members)[0], LEFT_BEHIND))
    size = max(block["SOME_CLASSES"] for block in blocks)
    span = _parts(min(classes, some), size) * size
    spans = _parts(classes, span)
    values = torch.empty(samples * spans, dtype=task.acc, device=logits.device)
    statistics = values.new_empty((samples, spans, 3, members))
    for stage, block, width in zip((1, 2), blocks, (wide, vector), strict=True):
        arguments, flags = _arguments(task, values, width, counted)
        _in_blocks[(samples, spans)](
            *arguments, **flags, **block, statistics=statistics, STAGE=stage, SPAN=span, SPANS=spans,
            SOME_SPANS=_power(spans),
        )  # fmt: skip
    return values


def _narrow(vector: int, members: int, held: int) -> int:
    """Half of it, as often as a thread would hold more logits than that; not below 2."""
    while vector > 2 and members * vector > held:
        vector //= 2
    return vector


def _block(members: int, classes: int, vector: int, warps: int, registers: int | None) -> dict[str, Any]:
    shares = _power(_parts(members * vector, MOST_HELD))  # threads that have the same classes, of other members
    some_classes = min(_power(classes), max(1, 32 * warps // shares) * vector)
    warps = max(1, min(warps, shares * some_classes // (32 * vector)))
    return {"SOME_CLASSES": some_classes, "num_warps": warps, "maxnreg": registers}


def _readable(options: Options) -> Options:
    """Options that kernels can read: weights lie together, classes of a sample not too far apart."""
    alpha, weight, mixture = options.alpha, options.weight, options.mixture
    return options._replace(
        target=reachable(options.target),
        alpha=None if alpha is None else alpha.contiguous(),
        weight=None if weight is None else weight.contiguous(),
        mixture=None if mixture is None else reachable(mixture),
    )


def reachable(values: Tensor) -> Tensor:
    """Values whose last axis can be walked along with 32 bits; a copy where its steps are too long for that."""
    return values.contiguous() if values.shape[-1] * values.stride(-1) >= 1 << 31 else values


def multiplied(gradient: Tensor, by: Tensor) -> Tensor:
    """A gradient as `value_and_gradient` makes it, dense, times a number on the device, in place."""
    if gradient.numel() < FEW:
        return gradient.mul_(by)
    block, most = 4096, 8 * _multiprocessors(gradient.device)
    with torch.cuda.device_of(gradient):
        _multiplied[(min(most, _parts(gradient.numel(), block)),)](gradient, by, gradient.numel(), BLOCK=block)
    return gradient


def _power(count: int) -> int:
    """The next power of two. Triton's own function takes 4 µs, for what kernels may do with it."""
    return 1 << (count - 1).bit_length()


def _limit(limits: tuple[tuple[int, int], ...], held: int) -> int | None:
    """How many registers a thread gets that holds so many numbers; None: the compiler decides."""
    return next((registers for most, registers in limits if held <= most), None)


def _parts(count: int, size: int) -> int:
    return -(-count // size)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _powers(members: int) -> tuple[int, int]:
    """Two powers of two, or one and 0, that have room for all members and for few besides."""
    most = 1 << (members.bit_length() - 1)
    return most, 0 if members == most else _power(members - most)


def _alignment(*tensors: Tensor) -> int:
    """What all places of rows are multiples of: told to the compiler, it reads as many numbers at once."""
    align = 8
    for tensor in tensors:
        for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True):
            while size > 1 and stride % align:
                align //= 2
    return align


def _arguments(
    task: Task, values: Tensor, vector: int, counted: tuple[Tensor, int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both kernels take; the logits stand in for tensors that are not there."""
    logits, gradient, options = task.logits, task.gradient, task.options
    target, weight, mixture, scale = options.target, options.weight, options.mixture, options.scale
    probabilities = target.is_floating_point()
    smoothing = options.label_smoothing
    mean_weight = weight.mean() if weight is not None and smoothing and not probabilities else weight
    most, rest = _powers(logits.shape[0])
    counts, how, parts = counted
    arguments = (
        logits,
        gradient,
        values,
        target,
        logits if weight is None else weight,
        logits if mean_weight is None else mean_weight,
        logits if options.alpha is None else options.alpha,
        logits if mixture is None else mixture,
        logits if scale is None else scale,
        counts,
        logits if task.by is None else task.by,
        options.number if options.diversity is None else options.diversity,
        logits.stride(0) // vector,
        logits.stride(1) // vector,
        logits.stride(2),
        gradient.stride(0) // vector,
        gradient.stride(1) // vector,
        gradient.stride(2),
        target.stride(0),
        target.stride(1) if probabilities else 0,
        0 if mixture is None else mixture.stride(0),
        0 if mixture is None else mixture.stride(1),
        0 if scale is None or scale.ndim == 1 else scale.stride(0),
        0 if scale is None else scale.stride(-1),
        smoothing,
        options.ignore_index,
        logits.shape[1],
    )
    flags = {
        "MEMBERS": logits.shape[0],
        "CLASSES": logits.shape[2],
        "VECTOR": vector,
        "WRITE": task.want_gradient,
        "PROBABILITIES": probabilities,
        "WEIGHTED": weight is not None,
        "UNIFORM": options.alpha is None,
        "MIXTURE": mixture is not None,
        "SCALE": scale is not None,
        "COUNT": how,
        "COUNTS": parts,
        "BY": task.by is not None,
        "ON_DEVICE": options.diversity is not None,
        "ACC": tl.float64 if task.acc == torch.float64 else tl.float32,
        "SMOOTHED": smoothing != 0,
        "FAST": task.acc == torch.float32 and not triton.knobs.runtime.interpret,
        "MOST": most,
        "REST": rest,
    }
    return arguments, flags
