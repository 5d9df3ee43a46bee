"""Random crop and horizontal flip of image batches on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchace._checks import check_count, check_tensor, shape_of


@dataclass(frozen=True)
class CropFlip:
    """Usual augmentation of CIFAR-10: pad with black, crop at random, flip with probability 1/2."""

    padding: int = 4  # pixels on each side
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
