"""Random crop and horizontal flip of a whole batch at once, on the device where it lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchace._checks import check_count, check_fraction, check_tensor, shape_of


def random_crop(
    x: Tensor, padding: int, *, offsets: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Each image padded with zeros on all sides and cut back to its size at a random place.

    Args:
        x: Images of any type, `(N, C, H, W)`.
        padding: Pixels added on each side.
        offsets: Where to cut in the padded image, `(N, 2)`: row and column in [0, 2 · padding]. Drawn if not given.
        generator: Draws the offsets; torch's own if not given. On the device of `x`.

    Returns:
        `(N, C, H, W)`.

    Example:
        >>> x = torch.arange(4).view(1, 1, 2, 2)
        >>> random_crop(x, 1, offsets=torch.tensor([[0, 1]]))
        tensor([[[[0, 0],
                  [0, 1]]]])
    """
    _check_images(x)
    check_count(padding, "padding", least=0)
    if offsets is None:
        offsets = torch.randint(2 * padding + 1, (x.shape[0], 2), generator=generator, device=x.device)
    elif shape_of(offsets) != (x.shape[0], 2):
        raise ValueError(f"Expected `offsets` of shape {(x.shape[0], 2)}, but got {shape_of(offsets)}.")
    return _resampled(x, padding, offsets[:, 0], offsets[:, 1], None)


def random_flip(
    x: Tensor, *, probability: float = 0.5, flips: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Each image mirrored left to right, or not.

    Args:
        x: Images of any type, `(N, C, H, W)`.
        probability: Of mirroring an image.
        flips: Which images to mirror, `(N,)` of bool. Drawn if not given.
        generator: Draws the flips; torch's own if not given. On the device of `x`.

    Example:
        >>> x = torch.tensor([1, 2, 3, 4]).view(2, 1, 1, 2)
        >>> random_flip(x, flips=torch.tensor([True, False])).flatten(1)
        tensor([[2, 1],
                [3, 4]])
    """
    _check_images(x)
    check_fraction(probability, "probability")
    if flips is None:
        flips = torch.rand(x.shape[0], generator=generator, device=x.device) < probability
    elif shape_of(flips) != (x.shape[0],):
        raise ValueError(f"Expected `flips` of shape {(x.shape[0],)}, but got {shape_of(flips)}.")
    return torch.where(flips[:, None, None, None], x.flip(3), x)


@dataclass(frozen=True)
class CropFlip:
    """The usual augmentation of CIFAR-10: pad, crop at random, mirror every other image.

    The padding is black (zeros before normalising), as in most published code.

    Args:
        padding: Pixels added on each side; 0 crops nothing.
        flip: Whether to mirror images, each with probability 1/2.

    Example:
        >>> x = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
        >>> zero = torch.tensor([1])  # row and column 1 of the padded image: where it was
        >>> CropFlip(padding=1)(x, zero, zero, torch.tensor([True])).flatten()
        tensor([1, 0, 3, 2], dtype=torch.uint8)
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_count(self.padding, "padding", least=0)

    def __call__(self, x: Tensor, rows: Tensor, columns: Tensor, flips: Tensor) -> Tensor:
        """Crop images `(N, C, H, W)` at `rows` and `columns`, `(N,)` each, and mirror where `flips`, `(N,)`, says."""
        _check_images(x)
        return _resampled(x, self.padding, rows, columns, flips if self.flip else None)


def _resampled(x: Tensor, padding: int, rows: Tensor, columns: Tensor, flips: Tensor | None) -> Tensor:
    """Crop and mirror in one gather over the padded images."""
    n, c, height, width = x.shape
    down = torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device).expand(n, width)
    if flips is not None:
        across = torch.where(flips[:, None], width - 1 - across, across)
    row = rows[:, None] + down  # (N, H)
    column = columns[:, None] + across  # (N, W)
    index = row[:, :, None] * (width + 2 * padding) + column[:, None, :]  # (N, H, W) into the flat padded image
    padded = pad(x, (padding, padding, padding, padding)).flatten(2)
    return padded.gather(2, index.view(n, 1, height * width).expand(n, c, height * width)).view(n, c, height, width)


def _check_images(x: Tensor) -> None:
    check_tensor(x, "x")
    if x.ndim != 4:
        raise ValueError(
            f"Expected images `x` of shape (N, C, H, W), but got {shape_of(x)}. Add the channel axis: x[:, None]."
        )
