"""Batches as functions of (seed, epoch, step), with crops and flips and a user's transform on their device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchace._checks import check_count, shape_of
from torchace._files import error_reason
from torchace.lab.data.errors import DataError
from torchace.lab.data.rng import generator_states, hashed_key, permutations, random_integers, use_seed
from torchace.lab.data.splits import Inputs, Split, input_tensors, map_inputs

Statistics = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation, of all samples or each channel
GATHER_BYTES = 1 << 26  # epochs up to this size are gathered at once
KEPT_TYPES = (torch.int64, torch.int32, torch.bool)  # token ids and masks; other inputs become floating-point


@dataclass(frozen=True)
class CropFlip:
    """Usual augmentation of CIFAR-10: pad with black, crop at random, flip with probability 1/2."""

    padding: int = 4  # pixels on each side

    def __call__(self, x: Tensor, rows: Tensor, columns: Tensor, flips: Tensor) -> Tensor:
        """Crop images `(N, C, H, W)` at `rows` and `columns`, `(N,)` each; flip where `flips`, `(N,)`, is true."""
        n, c, height, width = x.shape
        across = torch.arange(width, device=x.device).expand(n, width)
        across = torch.where(flips[:, None], width - 1 - across, across)
        row = rows[:, None] + torch.arange(height, device=x.device)  # (N, H)
        column = columns[:, None] + across  # (N, W)
        # one gather from the flat padded images does both
        index = row[:, :, None] * (width + 2 * self.padding) + column[:, None, :]  # (N, H, W)
        padded = pad(x, (self.padding,) * 4).flatten(2)
        return padded.gather(2, index.view(n, 1, -1).expand(n, c, height * width)).view(x.shape)


class BatchTransform:
    """Call a function of a batch `(B, ...)`, in training and in evaluation.

    A parameter `training` of the function says which of the two; a module is switched to the mode. Random numbers of
    torch, NumPy and Python are seeded in training and refused in evaluation.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            self.takes_training = "training" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # some built-in functions have no signature
            self.takes_training = False

    def __call__(self, x: Inputs, key: int | None = None) -> Inputs:
        """Transform a training batch with random numbers of a hashed key, or without a key, other samples."""
        device, training = input_tensors(x)[0].device, key is not None
        if isinstance(self.function, torch.nn.Module):
            self.function.train(training)
        options = {"training": training} if self.takes_training else {}
        with use_seed(hashed_key(0, "transform") if key is None else key, device), torch.no_grad():
            before = () if training else generator_states(device)
            try:
                result = self.function(x, **options)
            except Exception as error:  # the user's code may raise anything
                reason = f"{type(error).__name__}: {error_reason(error)}"
                raise DataError(f"The transform failed with {reason}.") from error
            if not training and generator_states(device) != before:
                raise DataError(
                    "The transform draws random numbers on test data; give it a parameter `training`, which is False "
                    "there, and augment only if it is True."
                )
        tensors, size = input_tensors(result), len(input_tensors(x)[0])
        if not all(isinstance(t, torch.Tensor) and t.ndim and len(t) == size for t in tensors):
            got = ", ".join(str(tuple(t.shape)) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors)
            raise DataError(f"Expected the transform to return one entry for each sample of a batch, but got {got}.")
        return result


class _Epoch(NamedTuple):
    """Random draws of one epoch for S streams, each tensor `(S, N)`."""

    order: Tensor
    augment: tuple[Tensor, ...]  # crop rows, crop columns, flips; empty without augmentation
    gathered: tuple[Inputs, Tensor] | None  # samples and labels in this order; None if too large


class Batches:
    """Shuffled batches of a split, each a function of (seed, epoch, step, stream) alone.

    Stateless: any batch can be computed at any time and in any process, with the same bits. All work happens on the
    device. Batches of one size can be stacked and captured in a CUDA graph: the last samples of an epoch that do not
    fill one are left out. Mean and standard deviation in `normalize` are one number or one for each channel, in the
    units of `x`.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        normalize: Statistics | None = None,  # mean and standard deviation
        augment: CropFlip | None = None,
        transform: BatchTransform | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_count(batch_size, "batch_size")
        if len(split) < batch_size:
            raise ValueError(
                f"Expected `batch_size` of at most {len(split)}, the number of samples, but got {batch_size}."
            )
        if augment is not None and not (isinstance(split.x, Tensor) and split.x.ndim == 4):
            got = ", ".join(str(shape_of(x)) for x in input_tensors(split.x))
            raise ValueError(f"Expected images (N, C, H, W) for `augment`, but the samples have shape {got}.")
        self.split = split if device is None else split.to(device)
        self.batch_size = batch_size
        self.seed = seed
        self.augment = augment
        self.transform = transform
        self.steps_per_epoch = len(split) // batch_size
        self._format = _Format(self.split, normalize=normalize, dtype=dtype)
        self._epoch = -1
        self._draws: dict[tuple[tuple[int, int], ...], _Epoch] = {}  # of the last epoch

    @property
    def device(self) -> torch.device:
        """Device of the samples."""
        return self.split.device

    def locate(self, global_step: int) -> tuple[int, int]:
        """Epoch, and step within it, of a step counted from the start of training."""
        return divmod(global_step, self.steps_per_epoch)

    def batch(self, epoch: int, step: int, *, stream: int = 0) -> tuple[Inputs, Tensor]:
        """Samples `(B, ...)` of a floating-point type and labels `(B,)`; each stream has its own order."""
        x, y = self.batch_many([self.seed], epoch, step, streams=stream)
        return map_inputs(lambda values: values[0], x), y[0]

    def batch_many(
        self, seeds: Sequence[int], epoch: int, step: int, *, streams: int | Sequence[int] = 0
    ) -> tuple[Inputs, Tensor]:
        """Batches of several seeds at once, `(S, B, ...)` and `(S, B)`, bit for bit those of `batch`."""
        pairs = _pair(seeds, streams)
        x, y = self._batches(pairs, epoch, step)
        if self.transform is None:
            return x, y
        keys = [hashed_key(seed, "transform", epoch, step, stream) for seed, stream in pairs]
        parts = [self.transform(map_inputs(lambda t, i=i: t[i], x), key) for i, key in enumerate(keys)]
        return map_inputs(lambda *values: torch.stack(values), *parts), y

    def weights_many(
        self, seeds: Sequence[int], epoch: int, step: int, *, streams: int | Sequence[int] = 0
    ) -> Tensor | None:
        """Sample weights of `batch_many`, `(S, B)`, or `(S, K, B)` with members' own; None for a split without them."""
        if self.split.weight is None:
            return None
        draws, part = self._epoch_draws(_pair(seeds, streams), epoch, step)
        weight = self.split.weight[..., draws.order[:, part]]
        return weight if weight.ndim == 2 else weight.transpose(0, 1)

    def _batches(self, pairs: tuple[tuple[int, int], ...], epoch: int, step: int) -> tuple[Inputs, Tensor]:
        """Batches before the transform."""
        draws, part = self._epoch_draws(pairs, epoch, step)
        if draws.gathered is not None:
            x, y = draws.gathered
            return map_inputs(lambda t: t[:, part].clone(), x), y[:, part].clone()  # a network may change its input
        return self._gather(draws.order[:, part], tuple(draw[:, part].reshape(-1) for draw in draws.augment))

    def _epoch_draws(self, pairs: tuple[tuple[int, int], ...], epoch: int, step: int) -> tuple[_Epoch, slice]:
        """Random draws of an epoch for these seeds and streams, and the slice of the step."""
        if not 0 <= step < self.steps_per_epoch:
            raise ValueError(
                f"Expected `step` in [0, {self.steps_per_epoch - 1}], but got {step}. For a step counted from the "
                "start of training, use batches.locate(step)."
            )
        if epoch != self._epoch:
            self._epoch = epoch
            self._draws.clear()
        if pairs not in self._draws:
            self._draws[pairs] = self._draw(pairs, epoch)
        return self._draws[pairs], slice(step * self.batch_size, (step + 1) * self.batch_size)

    def _draw(self, pairs: Sequence[tuple[int, int]], epoch: int) -> _Epoch:
        count = len(self.split)

        def keys(purpose: str) -> list[int]:
            return [hashed_key(seed, purpose, epoch, stream) for seed, stream in pairs]

        order = permutations(keys("order"), count, device=self.device)
        if self.augment is None:
            return _Epoch(order, (), self._gather(order) if self._is_small(order.numel()) else None)
        places = 2 * self.augment.padding + 1
        rows, columns, flips = (
            random_integers(keys(purpose), count, high, device=self.device)
            for purpose, high in (("crop row", places), ("crop column", places), ("flip", 2))
        )
        return _Epoch(order, (rows, columns, flips == 1), None)

    def _format_targets(self, y: Tensor) -> Tensor:
        return y.to(self._format.dtype) if y.is_floating_point() else y

    def _is_small(self, count: int) -> bool:
        """Whether this many samples are gathered at once."""
        size = sum(x[0].numel() for x in input_tensors(self.split.x)) * self._format.dtype.itemsize
        return count * size <= GATHER_BYTES

    def _gather(self, indices: Tensor, augment: tuple[Tensor, ...] = ()) -> tuple[Inputs, Tensor]:
        """Samples in the network's format, and labels, at indices `(S, B)`."""
        flat = indices.reshape(-1)
        x = map_inputs(lambda t: t.index_select(0, flat), self.split.x)  # (S·B, ...)
        x = self._format(x if self.augment is None else self.augment(x, *augment))
        y = self._format_targets(self.split.y.index_select(0, flat))
        return map_inputs(lambda t: t.view(*indices.shape, *t.shape[1:]), x), y.view(*indices.shape, *y.shape[1:])


def _pair(seeds: Sequence[int], streams: int | Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Seed and stream of each batch."""
    return tuple(zip(seeds, [streams] * len(seeds) if isinstance(streams, int) else streams, strict=True))


class _Format:
    """Convert samples to a floating-point type and normalize them; whole numbers stay."""

    def __init__(self, split: Split, *, normalize: Statistics | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.compute_dtype = dtype if dtype == torch.float64 else torch.float32
        self.statistics = None if normalize is None else [self._column(values, split.x) for values in normalize]

    def __call__(self, x: Inputs) -> Inputs:
        if self.statistics is not None:
            mean, std = self.statistics
            x = x.to(self.compute_dtype, copy=True).sub_(mean).div_(std)  # `x` may be the split itself
        return map_inputs(lambda t: t if t.dtype in KEPT_TYPES else t.to(self.dtype), x)

    def _column(self, values: Sequence[float], x: Tensor) -> Tensor:
        """Numbers shaped to broadcast along axis 1 of `x`."""
        column = torch.tensor(values, dtype=self.compute_dtype, device=x.device)
        return column.view(-1, *[1] * (x.ndim - 2)) if x.ndim >= 2 else column


def chunks(
    split: Split,
    size: int,
    *,
    device: torch.device | str | None = None,
    normalize: Statistics | None = None,
    transform: BatchTransform | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Inputs, Tensor]]:
    """Iterate over all samples in order, for evaluation; options as in `Batches`."""
    split = split if device is None else split.to(device)
    format_inputs = _Format(split, normalize=normalize, dtype=dtype)
    formatted = ((format_inputs(x), y) for x, y in split.chunks(size))
    return formatted if transform is None else ((transform(x), y) for x, y in formatted)
