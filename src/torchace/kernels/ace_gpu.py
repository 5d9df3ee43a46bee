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
HELD, HELD_OF_BLOCK = 96, 48  # logits of a thread where a sample's are read once, and where block by block
MOST_HELD = 64  # of many members' a thread has but some
FEWEST_WARPS, MOST_THREADS, MOST_WHOLE = 4, 128, 24  # for a sample that is read once, and its members
FEW_MEMBERS = 4
BY_FEW, BY_MANY = (8, 64), (4, 128)  # warps of a program that reads in blocks and registers of its threads, by members
ONE_PROGRAM = 1 << 15  # so few logits in all are left to one program
READ_TWICE = 1 << 17  # logits of a sample that one program reads twice: the second time they are still in the cache
SPAN = 1 << 15  # logits that a program reads where several share a sample
LEFT_BEHIND = 1 << 12  # numbers, of all spans and members
COUNTED = 2048  # so many targets are counted by every program for itself; more by
COUNTERS, COUNTED_AT_ONCE = 256, 1024  # programs of their own, so many at once
PROGRAMS = 6  # on a multiprocessor, where a sample's logits are read once; the others' samples come after theirs
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
    members, samples, classes = logits.shape
    target, acc = options.target, torch.float64 if logits.dtype == torch.float64 else torch.float32
    gradient = torch.empty_like(logits) if want_gradient else logits
    most, rest = _powers(members)
    some_classes = _power(classes)
    tile = (most + rest) * some_classes
    counts, count, programs = logits, 0, 1
    if not options.mean or options.scale is not None:
        pass
    elif target.is_floating_point():
        count = 3
    elif samples <= COUNTED:
        count, programs = 2, _power(samples)
    else:
        count, programs = 1, min(COUNTERS, _power(_parts(samples, COUNTED_AT_ONCE)))
        counts = torch.empty(programs, dtype=acc, device=logits.device)
        weighted = options.weight is not None
        _counts[(programs,)](
            target,
            target.stride(0),
            options.weight if weighted else counts,
            counts,
            samples,
            classes,
            options.ignore_index,
            _parts(samples, COUNTED_AT_ONCE * programs),
            WEIGHTED=weighted,
            BLOCK=COUNTED_AT_ONCE,
        )
    align = _alignment(logits, gradient)
    common = _arguments(logits, gradient, options, counts, by, align)
    flags: dict[str, Any] = {
        "MEMBERS": members,
        "CLASSES": classes,
        "ALIGN": align,
        "WRITE": want_gradient,
        "PROBABILITIES": target.is_floating_point(),
        "WEIGHTED": options.weight is not None,
        "UNIFORM": options.alpha is None,
        "MIXTURE": options.mixture is not None,
        "SCALE": options.scale is not None,
        "COUNT": count,
        "COUNTS": programs,
        "BY": by is not None,
        "ON_DEVICE": options.diversity is not None,
        "ACC": tl.float64 if acc == torch.float64 else tl.float32,
        "SMOOTHED": options.label_smoothing != 0,
        "FAST": acc == torch.float32 and not triton.knobs.runtime.interpret,
        "MOST": most,
        "REST": rest,
    }
    # The compiler gives a thread what it reads at once of every member, then other samples or classes to other threads.
    vector = min(align, 16 // logits.element_size(), some_classes)
    threads = _parts(some_classes, vector)  # for a sample
    if members <= MOST_WHOLE and members * vector <= HELD and threads <= MOST_THREADS:
        warps = max(FEWEST_WARPS, threads // 32)
        some = min(_power(samples), max(1, 32 * warps // threads))
        alone = _power(samples) * tile <= ONE_PROGRAM
        if alone:
            some, warps = _power(samples), 16
        values = torch.empty(() if alone else samples, dtype=acc, device=logits.device)
        staged = 2 * some * tile * logits.element_size() <= STAGED and not alone
        _whole[(min(_parts(samples, some), PROGRAMS * _multiprocessors(logits.device)),)](
            logits, gradient, values, *common, **flags, SOME=some, SOME_CLASSES=some_classes, ALONE=alone,
            STAGES=STAGES if staged else 1, num_warps=warps,
        )  # fmt: skip
        return (values if alone else values.sum()), (gradient if want_gradient else None)
    spread = members * classes > READ_TWICE
    vector = min(vector, 4) if spread else vector
    while vector > 2 and members * vector > HELD_OF_BLOCK:
        vector //= 2
    warps, registers = BY_FEW if members <= FEW_MEMBERS and not spread else BY_MANY
    shares = _power(_parts(members * vector, MOST_HELD))  # threads that have the same classes, of other members
    some_classes = min(some_classes, max(1, 32 * warps // shares) * vector)
    flags |= {"SOME_CLASSES": some_classes, "num_warps": max(1, min(warps, shares * some_classes // (32 * vector)))}
    if members * vector <= HELD_OF_BLOCK:
        flags["maxnreg"] = registers
    # not so many spans that what they leave behind would fill a program that reads it all
    some = max(SPAN // members, _parts(classes * most, LEFT_BEHIND)) if spread else classes
    span = _parts(min(classes, some), some_classes) * some_classes
    spans = _parts(classes, span)
    values = torch.empty(samples * spans, dtype=acc, device=logits.device)
    statistics = values if spans == 1 else torch.empty((samples, spans, 3, members), dtype=acc, device=logits.device)
    flags |= {"SPAN": span, "SPANS": spans, "SOME_SPANS": _power(spans), "VECTOR": vector, "STAGES": 1}
    for stage in (0,) if spans == 1 else (1, 2):
        _in_blocks[(samples, spans)](
            logits, gradient, values, *common, **flags, statistics=statistics, STAGE=stage
        )  # fmt: skip
    return values.sum(), (gradient if want_gradient else None)


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
    logits: Tensor, gradient: Tensor, options: Options, counts: Tensor, by: Tensor | None, align: int
) -> tuple[Any, ...]:
    """What both kernels take after logits, gradient and values; the logits stand in for what is not there."""
    target, weight, mixture, scale = options.target, options.weight, options.mixture, options.scale
    probabilities = target.is_floating_point()
    smoothing = options.label_smoothing
    mean_weight = weight.mean() if weight is not None and smoothing and not probabilities else weight
    return (
        target,
        logits if weight is None else weight,
        logits if mean_weight is None else mean_weight,
        logits if options.alpha is None else options.alpha,
        logits if mixture is None else mixture,
        logits if scale is None else scale,
        counts,
        logits if by is None else by,
        options.number if options.diversity is None else options.diversity,
        logits.stride(0) // align,
        logits.stride(1) // align,
        logits.stride(2),
        gradient.stride(0) // align,
        gradient.stride(1) // align,
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
