"""Members in separate processes: the cost of exchanging predictions. CPU with gloo; a projection to GPUs.

    python benchmarks/bench_parallel.py --out docs/results/bench_parallel.json

Every rank trains one member of a million parameters on batches of 128: `silent` without communication, `members` with
an all-reduce of the mixture (128, 10), `gradients` with an all-reduce of as many numbers as a member has parameters, as
in data parallelism. A timing starts with all ranks ready and ends with the slowest. Target: `members` below 1.10 of
`silent` at two ranks. `--bound` gives every rank a core and real-time scheduling (requires the permission). The
projection is computed from the bandwidths below, not measured.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch import Tensor

from torchace.functional import amended_cross_entropy
from torchace.models import mlp
from torchace.nn import MemberParallelEnsemble

BATCH, INPUTS, HIDDEN, CLASSES = 128, 784, (850, 390), 10  # 1.0 M parameters
RANKS = (1, 2, 4)
STEPS = 5  # of one timing
TARGET = 1.10

# Assumptions of the projection: bytes per second in one direction, and seconds for a message to arrive.
NVLINK = {"bandwidth": 450e9, "latency": 3e-6}  # of each H100 or H200, eight to a machine
BETWEEN = {  # machines
    "InfiniBand": {"bandwidth": 8 * 50e9, "latency": 6e-6},  # 400 Gbit/s for each of eight GPUs
    "Ethernet": {"bandwidth": 25e9 / 8, "latency": 30e-6},  # 25 Gbit/s for all of them
}
LAUNCH = 10e-6  # to start a collective
PER_MACHINE = 8
RESNET_110 = {"step": 11.23e-3, "members": 4 * 128 * 10, "data": 4 * 1_731_002}  # measured on one H200; bytes
PROJECTED = (8, 16, 32, 64)


def exchange_seconds(size: float, gpus: int, between: str) -> float:
    """Seconds of an all-reduce of `size` bytes: over NVLink within a machine, then between machines."""
    here, machines = min(gpus, PER_MACHINE), math.ceil(gpus / PER_MACHINE)
    return LAUNCH + _all_reduce(size, here, **NVLINK) + _all_reduce(size, machines, **BETWEEN[between])


def _all_reduce(size: float, peers: int, *, bandwidth: float, latency: float) -> float:
    """Seconds of the faster of a ring (for large messages) and a tree (for small ones)."""
    if peers == 1:
        return 0.0
    ring = 2 * (peers - 1) * latency + 2 * (peers - 1) / peers * size / bandwidth
    tree = 2 * math.ceil(math.log2(peers)) * latency + 2 * size / bandwidth
    return min(ring, tree)


def make_steps(count: int) -> dict[str, Callable[[], None]]:
    """Return a training step for each contender, with its own member and optimizer."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, INPUTS, generator=generator)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    found = {}
    for name in ("silent", "members", "gradients"):
        ensemble = MemberParallelEnsemble(lambda k: mlp(INPUTS, HIDDEN, CLASSES), count)
        optimizer = torch.optim.Adam(ensemble.parameters(), fused=True)

        def step(name: str = name, ensemble: Any = ensemble, optimizer: Any = optimizer) -> None:
            logits: Tensor = ensemble(x)
            mixture = ensemble.mixture(logits) if name == "members" else logits.detach().softmax(2).mean(0) / count
            weights = ensemble.local_weights
            loss = amended_cross_entropy(logits, y, 0.5, mixture=mixture, member_weights=weights)
            optimizer.zero_grad()
            loss.backward()
            if name == "gradients":
                gradients = torch.cat([p.grad.flatten() for p in ensemble.parameters()])
                dist.all_reduce(gradients)
            optimizer.step()

        found[name] = step
    return found


def run_rank(rank: int, count: int, store: str, rounds: int, results: Any, bound: bool) -> None:
    """Time all contenders in turn on one rank."""
    torch.set_num_threads(1)
    if bound:  # before gloo starts its threads, which inherit it
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    steps = make_steps(count)
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, rounds):  # two to warm up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            taken = torch.tensor((time.perf_counter() - start) / STEPS, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if turn >= 0:
                seconds[name].append(taken.item())
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()


def time_steps(count: int, rounds: int, bound: bool) -> dict[str, list[float]]:
    """Seconds per step of each contender on `count` ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=run_rank, args=(r, count, store, rounds, results, bound)) for r in range(count)]
        for process in ranks:
            process.start()
        seconds: dict[str, list[float]] = results.get(timeout=600)
        for process in ranks:
            process.join()
    return seconds


def main() -> None:
    parser = measure.make_parser(__doc__.split("\n")[0])
    parser.add_argument(
        "--bound",
        action="store_true",
        help="a core and real-time scheduling for every rank: a thread that is woken runs at once",
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    started, rounds = time.perf_counter(), options.rounds or (2 if options.quick else 100)
    parameters = sum(p.numel() for p in mlp(INPUTS, HIDDEN, CLASSES).parameters())
    results: dict[str, Any] = {"environment": measure.environment(), "parameters": parameters, "ranks": {}}
    results["bound"] = options.bound
    results["environment"]["threads"] = 1  # of a rank
    rows = []
    sent = {"silent": 0, "members": 4 * BATCH * CLASSES, "gradients": 4 * parameters}
    for count in RANKS:
        compared = measure.compare(time_steps(count, rounds, options.bound), to="silent")
        results["ranks"][str(count)] = compared
        for name, found in compared.items():
            target = ""
            if (count, name) == (2, "members"):
                met = found["times_silent"]["median"] < TARGET
                target = f"below {TARGET:.2f}: {'met' if met else 'missed'}"
            size = f"{sent[name] / 1000:,.0f} KB" if count > 1 else ""
            times = measure.milliseconds(found["seconds"])
            rows.append([str(count), name, size, times, measure.factor(found["times_silent"]), target])
    header = ["ranks", "contender", "exchanged", "ms per step", "times silent", "target"]
    print(measure.table(header, rows))

    step = RESNET_110["step"]
    columns = [(kind, link) for link in BETWEEN for kind in ("members", "data")]
    results["projection"] = {
        "assumed": {"nvlink": NVLINK, "between": BETWEEN, "launch": LAUNCH, "step": step, "bytes": RESNET_110},
        "seconds": {
            str(n): {f"{kind}, {link}": exchange_seconds(RESNET_110[kind], n, link) for kind, link in columns}
            for n in PROJECTED
        },
    }
    rows = [
        [n, *(f"{value * 1e6:,.0f} µs, {100 * value / step:.2g} %" for value in times.values())]
        for n, times in results["projection"]["seconds"].items()
    ]
    print(
        "\nA projection from stated bandwidths, not a measurement. ResNet-110, batch 128: an exchange, and its share of"
    )
    print("a step of one GPU (members 5 KB, data 6.9 MB; Ethernet or InfiniBand between machines of eight)")
    print(measure.table(["GPUs", *(f"{kind}, {link}" for kind, link in columns)], rows))
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
