"""Whether a device can run this package's Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
OLDEST = (8, 0)  # compute capability that Triton is made for


def runs_kernels(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU that Triton knows, and Triton is installed.

    Whoever compiles for a GPU has asked that before, and could not trace the question.
    """
    return device.type == "cuda" and TRITON and (torch.compiler.is_compiling() or _is_new(device))


@cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST
