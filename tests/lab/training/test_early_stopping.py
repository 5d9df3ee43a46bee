"""Early stopping: a run keeps the weights of its best epoch, alone or in a group, interrupted or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lab.training.small_trainings import (
    CLASSES,
    FEATURES,
    assert_same,
    batches,
    make_group,
    train_config,
    weights,
)
from torchace.lab.data import Split
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.evaluate import ValidationSet, validation_scores
from torchace.lab.training.loop import CheckpointPolicy, FitResult, Interrupted, fit
from torchace.lab.training.run_group import RunGroup
from torchace.models import mlp
from torchace.nn import SMOC, Ensemble

SEEDS, DIVERSITIES = [5, 6, 7], [0.0, 0.3, 0.9]
EPOCHS = 12


def held_out(patience: int) -> ValidationSet:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(15, FEATURES, generator=generator, dtype=torch.float64)
    return ValidationSet(Split(x, torch.randint(CLASSES, (15,), generator=generator)), patience)


def train(network: RunGroup, patience: int, runs: list[int], **options: object) -> FitResult:
    settings = train_config(steps=5 * EPOCHS, learning_rate=0.03)  # random labels: it overfits at once
    return fit(
        network,
        batches(),
        settings,
        diversities=[DIVERSITIES[r] for r in runs],
        seeds=[SEEDS[r] for r in runs],
        validation=held_out(patience),
        **options,  # type: ignore[arg-type]
    )


def group(kind: str, runs: list[int]) -> RunGroup:
    if kind == "separate":
        return make_group([SEEDS[r] for r in runs])
    ensembles = []
    for r in runs:
        with torch.random.fork_rng():
            torch.manual_seed(SEEDS[r])
            trunk = mlp(FEATURES, 5, None).double()
            ensembles.append(
                SMOC(trunk, 5, CLASSES, 3).double()
                if kind == "smoc"
                else Ensemble([mlp(5, 4, CLASSES).double() for _ in range(3)], trunk)
            )
    return RunGroup(ensembles)


def by_hand(kind: str, run: int, patience: int) -> tuple[dict[str, Tensor], int, list[float]]:
    """The run trained separately for every number of epochs: its best one before patience runs out."""
    scores: list[float] = []
    best: dict[str, Tensor] = {}
    for epoch in range(1, EPOCHS + 1):
        network = group(kind, [run])
        settings = train_config(steps=5 * epoch, learning_rate=0.03)
        fit(network, batches(), settings, diversities=[DIVERSITIES[run]], seeds=[SEEDS[run]])
        logits = network.predict(held_out(1).split.x)[0].detach()
        q, y = logits.softmax(2).mean(0), held_out(1).split.y
        scores.append(float(-q[torch.arange(len(y)), y].log().mean()))
        if scores[-1] == min(scores):
            best = weights(network, 0)
        if epoch - 1 - scores.index(min(scores)) >= patience:
            break
    return best, scores.index(min(scores)) + 1, scores


@pytest.mark.parametrize(
    ("kind", "patience"), [("separate", 1), ("smoc", 3), pytest.param("trunk", 100, marks=pytest.mark.extended)]
)
def test_every_run_keeps_its_best_epoch(kind: str, patience: int) -> None:
    network = group(kind, [0, 1, 2])
    fitted = train(network, patience, [0, 1, 2])
    assert fitted.best_epochs is not None
    for run in range(3):
        best, epoch, scores = by_hand(kind, run, patience)
        assert fitted.best_epochs[run] == epoch
        mine = [entry["held_out"][run] for entry in fitted.history]
        assert mine[: len(scores)] == pytest.approx(scores, abs=1e-9)
        assert all(value is None for value in mine[len(scores) :])  # not scored once it stopped
        assert_same(weights(network, run), best, within=1e-9)  # rounding, through 60 steps
    assert len(fitted.history) == max(len(by_hand(kind, run, patience)[2]) for run in range(3))
    expected = [min(entry["held_out"][r] or 9 for entry in fitted.history) for r in range(3)]
    assert validation_scores(network, held_out(1).split, train_config()).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("at", [3, 11, 19, 24])
def test_an_interrupted_training_ends_bit_for_bit_the_same(at: int, tmp_path: Path) -> None:
    whole = make_group(SEEDS)
    expected = train(whole, 3, [0, 1, 2])
    checkpoint_policy, calls = CheckpointPolicy(Checkpoints(tmp_path), None, None), iter(range(1000))
    with pytest.raises(Interrupted):
        train(make_group(SEEDS), 3, [0, 1, 2], checkpoint_policy=checkpoint_policy, stop=lambda: next(calls) == at)
    resumed = make_group(SEEDS)
    fitted = train(resumed, 3, [0, 1, 2], checkpoint_policy=checkpoint_policy)
    assert dataclasses.replace(fitted, seconds=0) == dataclasses.replace(expected, seconds=0)
    for run in range(3):
        assert_same(weights(resumed, run), weights(whole, run), within=0)


def test_held_out_weights_count() -> None:
    network, split = make_group([5]), held_out(1).split
    weight = torch.arange(15.0, dtype=torch.float64)
    expected = torch.tensor(
        [float(validation_scores(network, split.take(torch.tensor([i])), train_config())) for i in range(15)]
    )
    score = validation_scores(network, Split(split.x, split.y, weight), train_config())
    assert float(score) == pytest.approx(float((expected.double() * weight).sum() / weight.sum()), abs=1e-6)
