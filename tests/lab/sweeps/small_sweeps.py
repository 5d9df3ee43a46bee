"""A small sweep on digits, and its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torchace.lab.data import Batches, Split
from torchace.lab.data.rng import hashed_key, use_seed
from torchace.lab.schema.experiment import Experiment
from torchace.lab.schema.results import Failure, RunKey
from torchace.lab.sweeps import executor
from torchace.lab.sweeps.config import parse_experiment
from torchace.lab.sweeps.networks import build_network
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.run_group import RunGroup

PYTHONPATH = os.pathsep.join(str(Path(__file__).parents[3] / folder) for folder in ("src", ""))
PATIENCE = 300.0  # seconds until a process that does not do what it should is given up
TIMES = {"seconds", "started", "sha256"}  # and what depends on them


def small(**sections: Any) -> Experiment:
    """2 λ x 2 seeds x 2 members, 12 steps; `train={"steps": 3}` changes a section."""
    content: dict[str, Any] = {
        "name": "small",
        "data": {"limit": 200},
        "model": {"hidden": [4], "num_members": 2},
        "train": {"steps": 12, "batch_size": 50, "learning_rate": 0.01},
        "sweep": {"diversities": [0.0, 0.5], "seeds": [0, 1]},
    }
    for name, value in sections.items():
        content[name] = {**content[name], **value} if isinstance(content.get(name), dict) else value
    return parse_experiment(content)


def run(directory: Path, stop: Callable[[], bool] = lambda: False, **sections: Any) -> dict[RunKey, Failure]:
    return Sweep(small(**sections), directory).run(stop=stop)


def stored_files(directory: Path) -> dict[str, Any]:
    """Everything a sweep wrote but its times."""
    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.json")) + sorted(directory.glob("runs/*.json")):
        content = json.loads(file.read_text(), parse_constant=_no_nan)
        found[str(file.relative_to(directory))] = {key: v for key, v in content.items() if key not in TIMES}
    for file in sorted(directory.glob("runs/*.safetensors")):
        load_file(file)
        found[file.name] = file.read_bytes()
    return found


def _no_nan(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def leftovers(directory: Path) -> list[str]:
    """Return temporary files that a finished sweep must not leave."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if "partial" in path.name) + sorted(
        str(path.relative_to(directory)) for path in directory.glob("checkpoints*")
    )


def poison(monkeypatch: Any, diversity: float, seed: int, member: int) -> None:
    """From now on that member of that run starts with Inf."""
    train_group, group = executor.train_group, None

    def build_failing_network(arm: Any, data: Any, seeds: list[int], device: str, **options: Any) -> RunGroup:
        network = build_network(arm, data, seeds, device, **options)
        for r, run in enumerate(() if group is None else group.runs):
            if (run.diversity, run.seed) == (diversity, seed):
                with torch.no_grad():
                    network.members.stacked.fc.weight[r * network.num_members + member] = torch.inf  # type: ignore[union-attr]
        return network

    def noted(plan: Any, current: Any, *args: Any) -> None:
        nonlocal group
        group = current
        train_group(plan, current, *args)

    monkeypatch.setattr(executor, "build_network", build_failing_network)
    monkeypatch.setattr(executor, "train_group", noted)


def command(*arguments: str, module: str = "torchace", **options: Any) -> subprocess.Popen[str]:
    """`python -m torchace ...` as a process of its own, with one thread; or another module in torchace's place."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def wait_until(condition: Callable[[], object], process: subprocess.Popen[Any], describe: Callable[[], Any]) -> None:
    """Looks again and again until the condition is true, while the process lives."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "the process does not get there"
        try:
            code = process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the process ended with {code}: {describe()}")


def train_alone(
    make_member: Callable[[], nn.Module], x: Tensor, y: Tensor, loss: Callable[..., Tensor], diversity: float,
    seed: int, steps: int, batch_size: int, make_optimizer: Callable[..., torch.optim.Optimizer],
) -> list[nn.Module]:  # fmt: skip
    """Plain PyTorch: two members, one optimizer each, in float64."""
    members: list[nn.Module] = []
    for k in range(2):
        with use_seed(hashed_key(seed, "member", k)):
            members.append(make_member().double())
    optimizers = [make_optimizer(member.parameters()) for member in members]
    batches = Batches(Split(x, y if y.dtype == torch.int64 else y.double()), batch_size, seed=seed, dtype=torch.float64)
    for step in range(steps):
        inputs, target = batches.batch(*batches.locate(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(torch.stack([member(inputs) for member in members]), target, diversity).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [member.eval() for member in members]
