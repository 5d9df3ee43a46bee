"""Runs of one group with their own learning rate, weight decay and label smoothing."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.training.small_trainings import (
    CLASSES,
    FEATURES,
    MEMBERS,
    assert_same,
    batches,
    make_group,
    train_config,
    weights,
)
from tests.support.weights import weights_digest
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.loop import CheckpointPolicy, FitResult, Interrupted, fit
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.tasks import TASKS
from torchace.models import mlp
from torchace.nn import SMOC

SETTINGS = [
    {"learning_rate": 0.02, "weight_decay": 0.0},
    {"learning_rate": 0.02, "weight_decay": 0.0},
    {"learning_rate": 0.05, "weight_decay": 0.3},
    {"learning_rate": 0.02, "weight_decay": 0.3},
]
SEEDS = [5, 6, 5, 6]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "schedule": "cosine"},
    "adamw": {"optimizer": "adamw", "warmup_steps": 4},
    "sgd": {"optimizer": "sgd", "nesterov": True, "warmup_steps": 4, "warmup_learning_rate": 0.01},
}


def run_group(kind: str, seeds: list[int]) -> RunGroup:
    if kind == "separate":
        return make_group(seeds)
    torch.manual_seed(1)
    smoc = {seed: SMOC(mlp(FEATURES, 5, None), 5, CLASSES, MEMBERS).double() for seed in (5, 6)}
    return RunGroup([smoc[seed] for seed in seeds])


def train(config: Any, settings: Any, kind: str = "separate", seeds: list[int] = SEEDS) -> RunGroup:
    network = run_group(kind, seeds)
    fit(network, batches(), config, diversities=[0.4] * len(seeds), seeds=seeds, settings=settings)
    return network


@pytest.mark.parametrize("kind", ["separate", "smoc"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rates_and_decays_of_each_run_are_those_of_the_run_alone(optimizer: str, kind: str) -> None:
    config = train_config(**OPTIMIZERS[optimizer])
    together = train(config, SETTINGS, kind)
    for r, own in enumerate(SETTINGS):  # the same network and batches, with one setting for all runs
        alike = train(replace(config, **own), None, kind)
        assert_same(
            weights(together, r), weights(alike, r), within=1e-12
        )  # a fused step rounds a tensor's last elements differently
    name = next(iter(weights(together, 0)))
    assert not torch.equal(weights(together, 0)[name], weights(together, 2)[name])


@pytest.mark.parametrize(("batch", "detach_others"), [("shared", True), ("shared", False), ("exchanged", True)])
def test_label_smoothing_of_each_run(batch: str, detach_others: bool) -> None:
    config = train_config(batch, detach_others=detach_others)
    settings = [{"label_smoothing": 0.0}, {"label_smoothing": 0.1}, {"label_smoothing": 0.3}, {"label_smoothing": 0.1}]
    together = train(config, settings)
    for r, own in enumerate(settings):
        alone = train(replace(config, **own), None, seeds=[SEEDS[r]])
        assert_same(weights(together, r), weights(alone, 0), within=1e-9)  # the bound of runs alone and in a group


@pytest.mark.parametrize("task", ["classification", "multilabel"])
@pytest.mark.parametrize("samples", [4, 45_000])  # at once, and in pieces
def test_losses_and_gradients_with_smoothing_of_each_run(task: str, samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 3, samples, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (2, samples), generator=generator)
    if task == "multilabel":
        y = torch.randint(2, (2, samples, 4), generator=generator).double()
    lam, scale = torch.tensor([0.3, 0.6], dtype=torch.float64), torch.rand(2, samples, dtype=torch.float64)
    smoothing = torch.tensor([0.1, 0.25], dtype=torch.float64)
    loss = TASKS[task]
    found = loss.closed_form(z, y, lam, scale, None, None, smoothing)
    for r in range(2):
        own = (one[r : r + 1] for one in (z, y, lam, scale))
        alone = loss.closed_form(*own, None, None, float(smoothing[r]))
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours[r], theirs[0], rtol=1e-12, atol=1e-12)


def test_interrupted_at_every_step(tmp_path: Path) -> None:
    config = train_config(steps=6, **OPTIMIZERS["adam"])
    settings = [{**own, "label_smoothing": 0.1 * r} for r, own in enumerate(SETTINGS)]
    options: dict[str, Any] = {"diversities": [0.4] * 4, "seeds": SEEDS, "settings": settings}

    def results(network: RunGroup, fitted: FitResult) -> Any:
        return [weights_digest(network, r) for r in range(4)], fitted.history

    network = make_group(SEEDS)
    expected = results(network, fit(network, batches(), config, **options))
    options["checkpoint_policy"] = CheckpointPolicy(Checkpoints(tmp_path), every_seconds=None)
    for step in range(6):
        asked = itertools.count(1 - min(step, 1))
        with pytest.raises(Interrupted):
            fit(make_group(SEEDS), batches(), config, **options, stop=lambda asked=asked: next(asked) >= 1)  # type: ignore[misc]
    network = make_group(SEEDS)
    assert results(network, fit(network, batches(), config, **options)) == expected
