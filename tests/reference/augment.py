"""Crop and flip one pixel at a time: slow and simple."""

from __future__ import annotations

import torch
from torch import Tensor


def crop(x: Tensor, padding: int, offsets: list[tuple[int, int]]) -> Tensor:
    """Images `(N, C, H, W)`, each padded with zeros and cut at its own (row, column)."""
    out = torch.zeros_like(x)
    n, c, height, width = x.shape
    for i in range(n):
        top, left = offsets[i]
        for k in range(c):
            for row in range(height):
                for column in range(width):
                    source_row, source_column = row + top - padding, column + left - padding
                    if 0 <= source_row < height and 0 <= source_column < width:
                        out[i, k, row, column] = x[i, k, source_row, source_column]
    return out


def flip(x: Tensor, flips: list[bool]) -> Tensor:
    """Images `(N, C, H, W)`, mirrored left to right where asked."""
    out = x.clone()
    width = x.shape[3]
    for i, mirrored in enumerate(flips):
        if mirrored:
            for column in range(width):
                out[i, :, :, column] = x[i, :, :, width - 1 - column]
    return out
