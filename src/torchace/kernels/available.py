"""Whether a device can run this package's Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
OLDEST = (8, 0)  # compute capability that Triton is made for


def runs_kernels(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU that Triton supports, and Triton is installed.

    Under `torch.compile` the GPU is not queried: the query cannot be traced.
    """
    return device.type == "cuda" and TRITON and (torch.compiler.is_compiling() or _is_new(device))


@cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST
