"""Availability of the Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
OLDEST = (8, 0)  # least compute capability


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and supports this NVIDIA GPU, which `torch.compile` cannot query."""
    return device.type == "cuda" and TRITON and (torch.compiler.is_compiling() or _is_new(device))


@cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST
