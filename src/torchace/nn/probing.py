"""Trial runs of a module: perturb one layer's output, then restore the module's state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def record_outputs(layer: nn.Module) -> Iterator[list[tuple[Tensor, int]]]:
    """Record a layer's outputs and their versions (counts of in-place changes; -1 in inference mode)."""
    outputs: list[tuple[Tensor, int]] = []

    def record(layer: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append((output, -1 if output.is_inference() else output._version))

    hook = layer.register_forward_hook(record)
    try:
        yield outputs
    finally:
        hook.remove()


@contextmanager
def perturb_members(head: nn.Module, members: list[int]) -> Iterator[None]:
    """Change the output `(..., K·C)` of a flat head for some members: every second class up, the others down."""
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
def restore_state(module: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and random number generators; tensors saved for a backward stay intact."""
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
