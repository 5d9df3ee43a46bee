"""Whether a device can run this package's Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

OLDEST = (8, 0)  # compute capability that Triton compiles for


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # nothing for torch.compile to trace
def runs_kernels(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU that Triton knows, and Triton is installed."""
    return device.type == "cuda" and _known(device)


@cache
def _known(device: torch.device) -> bool:
    return (
        importlib.util.find_spec("triton") is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= OLDEST
    )
