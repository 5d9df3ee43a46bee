"""A user's transform of a batch of inputs, on the device, with random numbers that depend on seed and step alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchace.lab.data.errors import DataError
from torchace.lab.data.inputs import Inputs, input_tensors
from torchace.lab.data.rng import generator_states, hashed_key, use_seed


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
