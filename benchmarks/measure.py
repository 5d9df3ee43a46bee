"""Measure time and memory on a CPU, for all benchmarks.

After a warm-up, contenders take turns: each round times every contender once, in rotating order. Results are medians
with 20 % and 80 % quantiles over rounds, and ratios within rounds. Peak memory is the resident memory of one call in a
fresh process. The load of other processes is measured before and after.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
BUSY = 0.25  # cores that others may use before a timing is doubtful


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--quick", action="store_true", help="few shapes and rounds: a smoke test")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--rounds", type=int, help="rounds of a timing")
    parser.add_argument("--peak-of", nargs=2, metavar=("CASE", "CONTENDER"), help=argparse.SUPPRESS)
    return parser


def timings(contenders: Mapping[str, Call], *, rounds: int, least_seconds: float = 0.02) -> dict[str, list[float]]:
    """Seconds per call of each contender, one number per round.

    Args:
        contenders: Functions to call, by name.
        rounds: Timings of each contender.
        least_seconds: Minimum duration of a timing; short calls are repeated.
    """
    repeats = {}
    for name, call in contenders.items():  # warm-up, and how many calls make one timing
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, round(least_seconds / max(time.perf_counter() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call, times = contenders[name], repeats[name]
            start = time.perf_counter()
            for _ in range(times):
                call()
            seconds[name].append((time.perf_counter() - start) / times)
    return seconds


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 20 % and 80 % quantiles."""
    if len(values) < 2:
        return {"median": values[0], "q20": values[0], "q80": values[0]}
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "q20": cuts[0], "q80": cuts[3]}


def compare(seconds: Mapping[str, list[float]], to: str) -> dict[str, dict[str, Any]]:
    """Time of each contender, and its ratio to the time of `to`, round by round."""
    return {
        name: {
            "seconds": quantiles(values),
            f"times_{to}": quantiles([value / base for value, base in zip(values, seconds[to], strict=True)]),
            "rounds": len(values),
        }
        for name, values in seconds.items()
    }


def peak_bytes(call: Call, warm_up: Call) -> int:
    """Peak increase of the resident memory in one call; use a fresh process, since freed memory is reused.

    Args:
        call: Function to measure.
        warm_up: The same on a tiny input, to load libraries.
    """
    warm_up()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts again from here
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def peak_in_fresh_process(script: str, case: str, contender: str, threads: int) -> int | None:
    """`peak_bytes` in a new process, which runs the script with `--peak-of`; None if it fails."""
    command = [sys.executable, script, "--threads", str(threads), "--peak-of", case, contender]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"no peak memory of {contender} at {case}: {result.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return int(result.stdout.split()[-1])


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def busy_cores(seconds: float = 1.0) -> float | None:
    """Number of cores that other processes use."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return None
    busy, total = after[0] - before[0], after[1] - before[1]
    return round(busy / max(total, 1) * (os.cpu_count() or 1), 2)


def _cpu_times() -> tuple[int, int]:
    """Busy ticks and total ticks of all cores."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def commit() -> str | None:
    """The commit of this repository, if it is one."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and load."""
    cpu = platform.processor()
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":")[1].strip() if models else cpu
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "busy_cores_before": busy_cores(),
        "load_average": list(os.getloadavg()),
    }


def finish(results: dict[str, Any], out: Path | None, started: float) -> None:
    """Add the duration and the final load, print them, and write the results."""
    where = results["environment"]
    where["busy_cores_after"] = busy_cores()
    where["seconds_in_all"] = round(time.perf_counter() - started, 1)
    print(f"\n{where['cpu']}, {where['threads']} threads, torch {where['torch']}, {where['seconds_in_all']} s in total")
    busy = [where["busy_cores_before"], where["busy_cores_after"]]
    if any(value is None or value > BUSY for value in busy):
        print(
            f"NOT QUIET: other processes used {busy[0]} cores before and {busy[1]} after. Do not rely on these times."
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {out}")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    head = "| " + " | ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)) + " |"
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines])


def milliseconds(values: Mapping[str, float]) -> str:
    return f"{values['median'] * 1e3:.3g} ({values['q20'] * 1e3:.3g} to {values['q80'] * 1e3:.3g})"


def factor(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q20']:.2f} to {values['q80']:.2f})"


def mebibytes(value: int | None) -> str:
    return "?" if value is None else f"{value / 2**20:.1f}"
