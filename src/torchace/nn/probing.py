"""Trying a module out: changed outputs of one layer, and a state that stays as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class HeadOutput:
    """Remembers what a layer returned last, while entered."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.output: Tensor | None = None
        self.version = -1

    def __enter__(self) -> HeadOutput:
        self.hook = self.layer.register_forward_hook(self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def _remember(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.output = output
        self.version = -1 if output.is_inference() else output._version

    def is_returned_as(self, result: Tensor) -> bool:
        """Whether a result is the layer's output itself, not changed in place since."""
        return result is self.output and not result.is_inference() and result._version == self.version


@contextmanager
def changed_output(head: nn.Module, members: list[int]) -> Iterator[None]:
    """Changes what a flat head, `(..., K·C)`, gives for some members: every second class up, the others down."""
    num_members: int = head.num_members  # type: ignore[assignment]

    def change(head: nn.Module, args: Any, output: Tensor) -> Tensor:
        logits = output.unflatten(-1, (num_members, -1)).clone()  # (..., K, C)
        signs = 1 - 2 * (torch.arange(logits.shape[-1], device=logits.device) % 2).to(logits.dtype)
        # enough to change the order of all classes
        logits[..., members, :] += signs * (1 + 2 * torch.nan_to_num(output).abs().max())
        return logits.flatten(-2)

    hook = head.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers, attributes and random numbers are as before, and what was saved for a backward is intact."""
    before = {layer: dict(vars(layer)) for layer in module.modules()}
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(sorted(devices)):
        for layer, attributes in before.items():
            copies = {name: None if b is None else b.clone() for name, b in attributes["_buffers"].items()}
            vars(layer)["_buffers"] = copies
        try:
            yield
        finally:
            for layer, attributes in before.items():
                vars(layer).clear()
                vars(layer).update(attributes)
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
