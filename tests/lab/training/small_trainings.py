"""Small trainings for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchace.lab.data import Batches, Split
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.run_group import RunGroup
from torchace.models import mlp
from torchace.nn import Ensemble

FEATURES, CLASSES, MEMBERS, BATCH = 6, 3, 3, 8


def batches(dtype: torch.dtype = torch.float64, samples: int = 40) -> Batches:
    """40 samples in batches of 8, five steps an epoch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return Batches(Split(x, torch.randint(CLASSES, (samples,), generator=generator)), BATCH, dtype=dtype)


def members(seed: int, dtype: torch.dtype = torch.float64, count: int = MEMBERS) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [mlp(FEATURES, 5, CLASSES).to(dtype) for _ in range(count)]


def run_group(runs: Sequence[Sequence[nn.Module]]) -> RunGroup:
    """A run group of the members of each run."""
    return RunGroup([Ensemble(of_run) for of_run in runs])


def make_group(seeds: Sequence[int], dtype: torch.dtype = torch.float64, count: int = MEMBERS) -> RunGroup:
    """A run group with one run for each seed."""
    return run_group([members(seed, dtype, count) for seed in seeds])


def weights(network: RunGroup, run: int) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.ensemble(run).state_dict().items()}


def train_config(kind: str = "shared", steps: int = 20, **options: object) -> TrainConfig:
    settings = {"learning_rate": 0.02, "precision": "float64", **options}
    return TrainConfig(steps=steps, batches=kind, **settings)  # type: ignore[arg-type]


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, within: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")
