"""Versions and hardware, for result files."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torchace

PACKAGES = ("torch", "numpy", "safetensors", "torchmetrics", "scikit-learn")


@cache
def versions() -> dict[str, str]:
    """Return the versions of torchace, Python and `PACKAGES`."""
    installed = {"torchace": torchace.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def hardware(device: str) -> dict[str, Any]:
    """Return the device, the processor and the number of threads."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return {"device": name, "cpu": processor(), "threads": torch.get_num_threads()}


def processor() -> str:
    """Return the processor's name, or its architecture if unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
