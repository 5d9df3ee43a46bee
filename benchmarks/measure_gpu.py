"""Measure time and memory on a CUDA GPU, for all benchmarks.

As in `measure`, contenders take turns; CUDA events time them. A large buffer is written before each call, which empties
the cache and lets the host launch ahead. The ceilings, bandwidth of a copy and rate of a large product, are measured in
the same process.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import measure
import torch

Call = Callable[[], Any]
FLUSH = 1 << 32  # bytes written between calls: about 1 ms on an H200, more than a call takes to launch
SIDE = 8192  # of the matrices whose product is the ceiling of operations
COPIED = 1 << 32  # bytes copied for the ceiling of bandwidth


def timings(contenders: Mapping[str, Call], rounds: int, flush: bool = True) -> dict[str, list[float]]:
    """Seconds per call of each contender, one number per round.

    Args:
        contenders: Functions to call, by name; each must free what it allocates.
        rounds: Timings of each contender.
        flush: Whether to empty the cache before each call.
    """
    for call in contenders.values():
        for _ in range(2):  # the first compiles, the second reuses allocated memory
            call()
    buffer = torch.empty(FLUSH if flush else 0, dtype=torch.uint8, device="cuda")
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            start.record()
            contenders[name]()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def peak_bytes(call: Call) -> int:
    """Peak increase of the memory that torch has allocated, in one call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings(rounds: int = 20) -> dict[str, float]:
    """Bytes per second of a copy (read and write), operations per second of a bf16 matrix product."""
    source = torch.randint(256, (COPIED,), dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    copied = timings({"copy": lambda: copy.copy_(source)}, rounds, flush=False)["copy"]
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    in_a_row = 10  # the clock falls under load: one product alone would be too fast

    def products() -> None:
        for _ in range(in_a_row):
            torch.mm(a, b, out=product)

    multiplied = timings({"products": products}, rounds, flush=False)["products"]
    return {
        "copy_bytes_per_second": 2 * COPIED / statistics.median(copied),
        "bf16_operations_per_second": in_a_row * 2 * SIDE**3 / statistics.median(multiplied),
    }


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:  # not installed
        found = []
    driver, clock, power = (part.strip() for part in (found or ["?,?,?"])[0].split(","))
    return {
        "gpu": device.name,
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "cache_bytes": device.L2_cache_size,
        "driver": driver,
        "most_clock": clock,
        "power_limit": power,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
        "commit": measure.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
