"""Samples and their labels, and how a part of them is taken with every class in proportion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchace._checks import check_tensor, shape_of
from torchace.lab.data.rng import permutation


@dataclass(frozen=True, eq=False)
class Split:
    """Samples `x`, `(N, ...)`, and their labels `y`, `(N,)` of int64 (or targets of a floating-point type).

    Images are `(N, C, H, W)` of uint8. `weight`, `(N,)`, says how much a sample counts; all the same unless given.

    Example:
        >>> split = Split(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1]))
        >>> len(split), split.take(torch.tensor([2])).y
        (3, tensor([1]))
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor(self.x, "x")
        check_tensor(self.y, "y")
        if self.x.ndim == 0 or self.y.ndim == 0 or self.x.shape[0] != self.y.shape[0]:
            raise ValueError(
                "Expected `x` and `y` with one entry for each sample, "
                f"but got shapes {shape_of(self.x)} and {shape_of(self.y)}."
            )
        if self.y.dtype != torch.int64 and not self.y.is_floating_point():
            raise TypeError(f"Expected `y` of type int64, but got {self.y.dtype}. Convert it: y.long().")
        if self.x.device != self.y.device:
            raise ValueError(
                f"Expected `x` and `y` on one device, but got {self.x.device} and {self.y.device}. Move both."
            )
        if self.weight is not None and (self.weight.shape != self.x.shape[:1] or self.weight.device != self.x.device):
            raise ValueError(
                f"Expected `weight` of shape ({self.x.shape[0]},) on {self.x.device}, "
                f"but got {shape_of(self.weight)} on {self.weight.device}."
            )

    def __len__(self) -> int:
        return self.x.shape[0]

    def take(self, indices: Tensor) -> Split:
        """The samples at these positions, in this order."""
        return Split(self.x[indices], self.y[indices], None if self.weight is None else self.weight[indices])

    def to(self, device: torch.device | str) -> Split:
        """This split on a device; itself, not a copy, if it is there already."""
        if self.x.device == torch.empty(0, device=device).device:  # "cuda" and "cuda:0" may be one device
            return self
        return Split(self.x.to(device), self.y.to(device), None if self.weight is None else self.weight.to(device))


def stratified_split(split: Split, size: int | float, *, seed: int) -> tuple[Split, Split]:
    """Take a part of the samples, every class in proportion, at random: a function of labels, size and seed alone.

    Class c gives n_c · size / N samples, rounded so that they add up (largest remainders first, then lower classes).
    Both parts keep the order of the samples.

    Args:
        split: Samples with class indices.
        size: How many to take: an int counts samples, a float is a fraction.
        seed: Chooses which.

    Returns:
        The rest, and what was taken.

    Example:
        >>> split = Split(torch.arange(10), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1]))
        >>> rest, taken = stratified_split(split, 0.5, seed=0)
        >>> rest.y, taken.y
        (tensor([0, 0, 0, 1, 1]), tensor([0, 0, 0, 1, 1]))
    """
    count = checked_size(size, len(split))
    labels = split.y.cpu()
    if labels.dtype != torch.int64 or labels.ndim != 1 or int(labels.min()) < 0:
        raise ValueError(
            f"Expected class indices `y` of shape ({len(split)},), but got {labels.dtype} of shape {shape_of(labels)}. "
            "Only samples with classes can be taken in proportion."
        )
    taken = torch.zeros(len(split), dtype=torch.bool)
    for label, quota in enumerate(_quotas(torch.bincount(labels).tolist(), count)):
        places = (labels == label).nonzero().flatten()
        taken[places[permutation(seed, "stratify", label, count=len(places))[:quota]]] = True
    taken = taken.to(split.x.device)
    return split.take(~taken), split.take(taken)


def checked_size(size: int | float, available: int) -> int:
    """A number of samples or a fraction of them, as a number that leaves at least one."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"Expected `size` to be a number of samples or a fraction, but got {type(size).__name__}.")
    if isinstance(size, float) and not 0.0 < size < 1.0:
        raise ValueError(f"Expected a fraction `size` between 0 and 1, but got {size}. Use an int to count samples.")
    count = size if isinstance(size, int) else round(size * available)
    if not 0 < count < available:
        raise ValueError(
            f"Expected `size` to take between 1 and {available - 1} of {available} samples, but got {size}."
        )
    return count


def _quotas(counts: list[int], total: int) -> list[int]:
    """`total` shared out in proportion to `counts`, in whole numbers."""
    available = sum(counts)
    quotas = [count * total // available for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda label: (-(counts[label] * total % available), label))
    for label in by_remainder[: total - sum(quotas)]:
        quotas[label] += 1
    return quotas
