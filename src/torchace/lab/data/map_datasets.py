"""Map-style Datasets: loaded into tensors, or read while training, with seeded random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from torchace._files import error_reason
from torchace.lab.data.batches import Batches
from torchace.lab.data.errors import DataError
from torchace.lab.data.rng import generator_states, hashed_key, preserve_generators, seed_generators
from torchace.lab.data.splits import Inputs, as_targets, check_classes, convert_inputs, input_tensors, map_inputs

TARGET_KEYS = ("labels", "label", "target", "targets", "y")  # of items that are dicts
PROBED = 16  # items read twice, to detect random ones
READ_AT_ONCE = 512

Place = tuple[int, int]  # index and key of the random numbers of an item
Read = tuple[Inputs, Tensor, list[int]]  # inputs, targets and indices of items


class Items(TorchDataset[Any]):
    """Items of a map-style Dataset as (index, inputs, target); the random numbers of an item depend on its key."""

    def __init__(self, dataset: Any, part: str, target: str | None = None) -> None:
        self.dataset, self.part, self.target = dataset, part, target

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> tuple[int, Inputs, Tensor]:
        index, key = place
        seed_generators(key)
        try:
            item = self.dataset[index]
        except Exception as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error_reason(error)}"
            raise DataError(f"Item {index} of the {self.part} Dataset cannot be read ({reason}).") from error
        x, y = self._split_item(item, index)
        return index, convert_inputs(self._as_tensor, x), self._as_tensor(y)

    def _split_item(self, item: Any, index: int) -> tuple[Any, Any]:
        """Return inputs and target of an item."""
        if isinstance(item, Mapping):
            names = TARGET_KEYS if self.target is None else (self.target,)
            key = next((name for name in names if name in item), None)
            if key is None:
                raise DataError(
                    f"Item {index} of the {self.part} Dataset has {', '.join(map(repr, item))}, but none of "
                    f"{', '.join(map(repr, names))}; name its target with `target`."
                )
            return {name: value for name, value in item.items() if name != key}, item[key]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(
                f"Item {index} of the {self.part} Dataset is {type(item).__name__}; return a pair of inputs and target."
            )
        return item[0] if len(item) == 2 else tuple(item[:-1]), item[-1]

    def _as_tensor(self, value: Any) -> Tensor:
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"The {self.part} Dataset returns {type(value).__name__}; return tensors, arrays or numbers, for "
                "example with torchvision's transforms.ToTensor()."
            ) from None

    def read(self, places: Sequence[Place]) -> Read:
        """Read items in this process, without changing its random state."""
        with preserve_generators():
            return _stack([self[place] for place in places])


def _stack(items: list[tuple[int, Inputs, Tensor]]) -> Read:
    """Stack items; also the DataLoader's `collate_fn`."""
    first = items[0]
    for item in items:
        shapes = [[tuple(t.shape) for t in (*input_tensors(x), y)] for _, x, y in (first, item)]
        if shapes[0] != shapes[1]:
            raise DataError(
                f"Item {item[0]} has tensors of shape {shapes[1]}, but item {first[0]} has {shapes[0]}; resize or pad "
                "them to one shape."
            )
    indices, inputs, targets = zip(*items, strict=True)
    return map_inputs(lambda *values: torch.stack(values), *inputs), torch.stack(targets), list(indices)


def is_random(items: Items) -> bool:
    """Whether items draw random numbers from torch's, NumPy's or Python's global generators."""
    indices = sorted({round(i * (len(items) - 1) / (PROBED - 1)) for i in range(PROBED)})
    with preserve_generators():
        moved, reads = False, []
        for key in (1, 2):
            values = []
            for index in indices:
                _, x, y = items[index, key]
                values += [*input_tensors(x), y]
                after = generator_states()
                seed_generators(key)
                moved |= after != generator_states()
            reads.append(values)
    if moved:
        return True
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*reads, strict=True)):
        raise DataError(
            f"The {items.part} Dataset returns different values each time, from its own generator; draw from torch's, "
            "NumPy's or Python's global generator, which is seeded for every item."
        )
    return False


def read_all(items: Items, num_workers: int = 0) -> tuple[Inputs, Tensor]:
    """Read all items into tensors; random numbers depend on the index alone."""
    parts = list(_read_batches(items, _batches_in_order(range(len(items)), READ_AT_ONCE), num_workers))
    inputs, targets, _ = zip(*parts, strict=True)
    return map_inputs(lambda *values: torch.cat(values), *inputs), torch.cat(targets)


def _batches_in_order(indices: Sequence[int], size: int) -> Iterator[list[Place]]:
    for start in range(0, len(indices), size):
        yield [(index, hashed_key(0, "item", 0, index)) for index in indices[start : start + size]]


def _read_batches(items: Items, batches: Iterator[list[Place]], num_workers: int) -> Iterator[Read]:
    """Read batches of items, in this process or ahead of time by the workers of a DataLoader."""
    if not num_workers:
        yield from map(items.read, batches)
        return
    with preserve_generators():  # DataLoader draws a seed for its workers
        loaded = iter(DataLoader(items, batch_sampler=batches, num_workers=num_workers, collate_fn=_stack))
    try:
        yield from loaded
    except DataError as error:  # without the worker's traceback
        raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None


@dataclass(frozen=True, eq=False)
class StreamedSplit:
    """Samples of a Dataset that are read when they are needed; batches go to `device`."""

    items: Items
    indices: Tensor  # (N,)
    device: torch.device
    task: str
    num_classes: int | None = None
    num_workers: int = 0
    y: Tensor | None = None  # class indices (N,), if known without reading the samples
    weight: Tensor | None = None  # none

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Tensor | slice) -> StreamedSplit:
        """Return the samples at these indices, in this order."""
        return replace(self, indices=self.indices[indices], y=None if self.y is None else self.y[indices])

    def to(self, device: torch.device | str) -> StreamedSplit:
        """Return the split with batches on a device."""
        return replace(self, device=torch.device(device))

    def chunks(self, size: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Iterate over samples and targets in order, at most `size` at a time."""
        batches = _batches_in_order(self.indices.tolist(), size)
        for read in _read_batches(self.items, batches, self.num_workers):
            yield self.check(read)

    def check(self, read: Read) -> tuple[Inputs, Tensor]:
        """Check items and move them to the device."""
        part, (x, y, indices) = self.items.part, read
        check_finite_inputs(x, part, indices)
        y = as_targets(y, self.task, part)
        if self.num_classes is not None:
            check_classes(y, self.num_classes, part, indices)
        if self.device.type == "cpu":
            return x, y
        return tree_map(lambda values: values.pin_memory().to(self.device, non_blocking=True), (x, y))

    @cached_property
    def x(self) -> Inputs:
        """Inputs of the first sample, `(1, ...)`."""
        return next(self.take(slice(1)).chunks(1))[0]


def check_finite_inputs(x: Inputs, part: str, indices: Sequence[int] | None = None) -> None:
    """Refuse NaN and Inf in floating-point inputs; `indices` number the samples in errors."""
    for values in input_tensors(x):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = (~torch.isfinite(values)).flatten(1).any(1) if values.ndim > 1 else ~torch.isfinite(values)
            first = int(bad.nonzero()[0])
            sample = indices[first] if indices else first
            raise DataError(
                f"The {part} data has NaN or Inf in sample {sample}; replace such values, or leave the sample out."
            )


class StreamedBatches(Batches):
    """`Batches` of a `StreamedSplit`, in the same order; an item is seeded by (seed, epoch, index, stream)."""

    split: StreamedSplit  # type: ignore[assignment]

    def __init__(self, split: StreamedSplit, batch_size: int, **options: Any) -> None:
        if options.get("augment") is not None:
            raise DataError("A Dataset that is read while training cannot use `augment`; augment in its __getitem__.")
        super().__init__(split, batch_size, **options)  # type: ignore[arg-type]
        self._next: tuple[Any, int, int] | None = None  # what `_iterator` returns next
        self._iterator: Iterator[Read] = iter(())

    def _batches(self, pairs: tuple[tuple[int, int], ...], epoch: int, step: int) -> tuple[Inputs, Tensor]:
        """Batches before the transform, read ahead by the workers."""
        if self._next != (pairs, epoch, step):
            order = self._epoch_draws(pairs, epoch, step)[0].order
            places = self._places(order, pairs, epoch, step)
            self._iterator = _read_batches(self.split.items, places, self.split.num_workers)
        x, y = self.split.check(next(self._iterator))
        self._next = (pairs, epoch, step + 1)
        shape = (len(pairs), -1)
        x = map_inputs(lambda t: t.unflatten(0, shape), self._format(x))
        return x, self._format_targets(y).unflatten(0, shape)

    def _places(self, order: Tensor, pairs: Sequence[tuple[int, int]], epoch: int, step: int) -> Iterator[list[Place]]:
        """Iterate over the items of this step and of the rest of the epoch."""
        indices = self.split.indices[order.cpu()]  # (S, N)
        for start in range(step * self.batch_size, self.steps_per_epoch * self.batch_size, self.batch_size):
            rows = indices[:, start : start + self.batch_size].tolist()
            yield [
                (index, hashed_key(seed, "item", epoch, index, stream))
                for (seed, stream), row in zip(pairs, rows, strict=True)
                for index in row
            ]

    def _is_small(self, count: int) -> bool:
        return False  # nothing is gathered at the start of an epoch
