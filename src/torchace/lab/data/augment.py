"""Random crop and horizontal flip of a whole batch at once, on the device of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchace._checks import check_count, check_tensor, shape_of


@dataclass(frozen=True)
class CropFlip:
    """The usual augmentation of CIFAR-10: pad, crop at a random place, flip with probability 1/2.

    The padding is black (zeros before normalising), as in most published code.

    Args:
        padding: Pixels added on each side; 0 crops nothing.
        flip: Whether to flip images horizontally.

    Example:
        >>> x = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
        >>> place = torch.tensor([1])  # row and column 1 of the padded image: the original place
        >>> CropFlip(padding=1)(x, place, place, torch.tensor([True])).flatten()
        tensor([1, 0, 3, 2], dtype=torch.uint8)
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_count(self.padding, "padding", least=0)

    def __call__(self, x: Tensor, rows: Tensor, columns: Tensor, flips: Tensor) -> Tensor:
        """Crop images `(N, C, H, W)` at `rows` and `columns`, `(N,)` each; flip where `flips`, `(N,)`, is true."""
        check_tensor(x, "x")
        if x.ndim != 4:
            raise ValueError(
                f"Expected images `x` of shape (N, C, H, W), but got {shape_of(x)}. Add the channel axis: x[:, None]."
            )
        n, c, height, width = x.shape
        across = torch.arange(width, device=x.device).expand(n, width)
        if self.flip:
            across = torch.where(flips[:, None], width - 1 - across, across)
        row = rows[:, None] + torch.arange(height, device=x.device)  # (N, H)
        column = columns[:, None] + across  # (N, W)
        # one gather from the flat padded images does both
        index = row[:, :, None] * (width + 2 * self.padding) + column[:, None, :]  # (N, H, W)
        padded = pad(x, (self.padding,) * 4).flatten(2)
        return padded.gather(2, index.view(n, 1, -1).expand(n, c, height * width)).view(x.shape)
