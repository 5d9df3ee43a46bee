"""Random crops and flips, and a user's transform of a batch; random numbers depend on seed and step alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchace._checks import check_count, check_tensor, shape_of
from torchace.lab.data.errors import DataError
from torchace.lab.data.rng import generator_states, hashed_key, use_seed
from torchace.lab.data.splits import Inputs, input_tensors


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

    def train(self, x: Inputs, key: int) -> Inputs:
        """Transform a training batch with random numbers of a hashed key."""
        return self._call(x, key, training=True)

    def evaluate(self, x: Inputs) -> Inputs:
        """Transform a batch of validation or test samples."""
        return self._call(x, hashed_key(0, "transform"), training=False)

    def _call(self, x: Inputs, key: int, *, training: bool) -> Inputs:
        device = input_tensors(x)[0].device
        if isinstance(self.function, torch.nn.Module):
            self.function.train(training)
        options = {"training": training} if self.takes_training else {}
        with use_seed(key, device), torch.no_grad():
            before = () if training else self._states(device)
            result = self.function(x, **options)
            if not training and self._states(device) != before:
                raise DataError(
                    "The transform draws random numbers on test data; give it a parameter `training`, which is False "
                    "there, and augment only if it is True."
                )
        tensors, size = input_tensors(result), len(input_tensors(x)[0])
        if not all(isinstance(t, torch.Tensor) and t.ndim and len(t) == size for t in tensors):
            got = ", ".join(str(tuple(t.shape)) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors)
            raise DataError(f"Expected the transform to return one entry for each sample of a batch, but got {got}.")
        return result

    def _states(self, device: torch.device) -> tuple[bytes, ...]:
        if device.type != "cuda":
            return generator_states()
        return (*generator_states(), torch.cuda.get_rng_state(device).numpy().tobytes())
