"""The training loop: groups, paired runs, schedules, failures, interruptions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.training.small_trainings import (
    BATCH,
    CLASSES,
    FEATURES,
    MEMBERS,
    assert_same,
    batches,
    make_group,
    run_group,
    train_config,
    weights,
)
from tests.support.weights import weights_digest
from torchace.lab.data import Batches
from torchace.lab.training import loop
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.loop import CheckpointPolicy, Interrupted, Progress, fit
from torchace.lab.training.run_group import RunGroup
from torchace.models import mlp
from torchace.nn import SMOC

KINDS = {"shared": (0.0, 0.4, 1.0), "exchanged": (0.0, 0.4, 1.0), "separate": (0.0,)}
SEEDS = (5, 6)
WITHIN = 1e-9  # the bound for 20 steps in float64


def make_runs(kind: str) -> list[tuple[float, int]]:
    return list(itertools.product(KINDS[kind], SEEDS))


def train(kind: str, runs: list[tuple[float, int]], **options: Any) -> RunGroup:
    network = make_group([seed for _, seed in runs])
    lambdas, seeds = zip(*runs, strict=True)
    fit(network, batches(), train_config(kind, **options), diversities=lambdas, seeds=seeds)
    return network


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_alone_equals_the_run_in_a_group(kind: str, optimizer: str) -> None:
    runs = make_runs(kind)
    together = train(kind, runs, optimizer=optimizer)
    for r, run in enumerate(runs):
        assert_same(weights(together, r), weights(train(kind, [run], optimizer=optimizer), 0), within=WITHIN)


@pytest.mark.parametrize("kind", ["shared", "exchanged"])
def test_every_diversity_of_a_seed_sees_the_same_batches(kind: str) -> None:
    data, seeds = batches(), [6, 5, 6]
    x, y, _ = loop.BatchFeed(data, seeds, MEMBERS, train_config(kind))(1, 2)
    assert x[0].equal(x[2])
    assert y[0].equal(y[2])
    assert not x[0].equal(x[1])
    for r, seed in enumerate(seeds):
        for k in range(MEMBERS if kind == "exchanged" else 1):
            alone, labels = data.batch_many([seed], 1, 2, streams=k)
            assert (x[r, k] if kind == "exchanged" else x[r]).equal(alone[0])
            assert (y[r, k] if kind == "exchanged" else y[r]).equal(labels[0])
    if kind == "exchanged":
        assert not x[0, 0].equal(x[0, 1])  # members have their own


def test_diversity_warm_up_starts_like_no_diversity() -> None:
    def after(steps: int, lam: float, **options: Any) -> str:
        network = make_group([5])
        fit(network, batches(), train_config("shared", steps, **options), diversities=[lam], seeds=[5])
        return weights_digest(network, 0)

    assert after(1, 0.9, diversity_warmup_steps=10) == after(1, 0.0)
    assert after(3, 0.9, diversity_warmup_steps=10) not in (after(3, 0.0), after(3, 0.9))


def test_the_schedule_is_what_the_optimizer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = train_config(
        "shared", 12, schedule="step", milestones=(5, 9), warmup_steps=2, warmup_learning_rate=0.001
    )
    seen = []

    class Watched(loop.TrainStep):
        def __call__(self, *args: Any) -> Any:
            seen.append((self.optimizer.param_groups[0]["lr"], float(args[3][0])))
            return super().__call__(*args)

    monkeypatch.setattr(loop, "TrainStep", Watched)
    fit(make_group([5]), batches(), settings, diversities=[0.5], seeds=[5])
    assert seen == [(settings.learning_rate_at(step), 0.5) for step in range(12)]


def test_history_has_one_entry_an_epoch() -> None:
    fitted = fit(make_group([5, 6]), batches(), train_config("shared", 12), diversities=[0.5, 0.5], seeds=[5, 6])
    assert [(e["epoch"], e["step"]) for e in fitted.history] == [(1, 5), (2, 10), (3, 12)]
    assert all(len(e["score"]) == 2 for e in fitted.history)
    scores = [e["score"][0] for e in fitted.history]
    assert scores[-1] < scores[0]
    assert fitted.seconds > 0
    assert fitted.failures == {}


def test_the_callback_receives_the_last_step() -> None:
    events: list[Progress] = []
    fit(make_group([5]), batches(), train_config("shared", 12), diversities=[0.5], seeds=[5], on_progress=events.append)
    assert (events[-1].step, events[-1].steps) == (12, 12)
    assert len(events) < 12  # at most ten times a second
    assert all(isinstance(value, float) for value in events[-1].score)


# -- failures ---------------------------------------------------------------------------------------------------------


def poison(network: RunGroup, run: int, member: int, layer: str = "fc.weight", value: float = math.inf) -> RunGroup:
    parameter = network.members.stacked.get_parameter(layer)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        parameter[run * network.num_members + member] = value
    return network


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize("kind", ["shared", "exchanged"])
def test_a_run_that_fails_leaves_the_others_bit_identical(kind: str, value: float) -> None:
    runs = make_runs(kind)
    healthy = train(kind, runs)
    network = poison(make_group([seed for _, seed in runs]), 3, 2, value=value)
    fitted = fit(
        network, batches(), train_config(kind), diversities=[lam for lam, _ in runs], seeds=[seed for _, seed in runs]
    )
    # member 2 of a coupled run, though the NaN is in every member's loss
    assert {r: (f.member, f.step) for r, f in fitted.failures.items()} == {3: (2, 0)}
    for r in range(len(runs)):
        if r != 3:
            assert weights_digest(network, r) == weights_digest(healthy, r)
    assert fitted.history[0]["score"][3] is None
    assert all(isinstance(v, float) for r, v in enumerate(fitted.history[0]["score"]) if r != 3)


def test_a_failure_during_training_has_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoiler(loop.TrainStep):
        steps = 0

        def __call__(self, *args: Any) -> Any:
            if self.steps == 7:
                poison(self.network, 1, 1, "linear1.bias", math.nan)
            self.steps += 1
            return super().__call__(*args)

    monkeypatch.setattr(loop, "TrainStep", Spoiler)
    fitted = fit(make_group([5, 6]), batches(), train_config(), diversities=[0.5, 0.5], seeds=[5, 6])
    assert {r: (f.member, f.step) for r, f in fitted.failures.items()} == {1: (1, 7)}


def test_training_ends_where_all_runs_have_failed() -> None:
    network = poison(poison(make_group([5, 6]), 0, 0), 1, 1)
    events: list[Progress] = []
    fitted = fit(network, batches(), train_config(), diversities=[0, 0.5], seeds=[5, 6], on_progress=events.append)
    assert {r: f.member for r, f in fitted.failures.items()} == {0: 0, 1: 1}
    assert events == []


def test_a_rate_that_is_too_high_is_a_failure() -> None:
    network = make_group([5], torch.float32)
    settings = train_config(optimizer="sgd", learning_rate=1e30, precision="float32")
    fitted = fit(network, batches(torch.float32), settings, diversities=[0.5], seeds=[5])
    assert fitted.failures[0].step > 0
    assert "NaN or Inf" in fitted.failures[0].message


# -- interruptions ----------------------------------------------------------------------------------------------------


def after(steps: int) -> Callable[[], bool]:
    """Lets so many steps be made, then says stop."""
    asked = itertools.count()
    return lambda: next(asked) >= steps


SGD = {"optimizer": "sgd", "schedule": "cosine"}


def networks(name: str) -> RunGroup:
    torch.manual_seed(1)
    if name == "separate":
        return make_group([5, 6])
    if name == "smoc":
        return RunGroup([SMOC(mlp(FEATURES, 5, None), 5, CLASSES, MEMBERS).double() for _ in range(2)])
    return run_group([[mlp(FEATURES, 5, CLASSES, dropout=0.5).double() for _ in range(MEMBERS)] for _ in range(2)])


def results(network: RunGroup, *arguments: Any, **options: Any) -> Any:
    fitted = fit(network, *arguments, **options)
    return [weights_digest(network, r) for r in range(network.num_runs)], fitted.history, fitted.failures


def resume_after_every_step(make: Callable[[], RunGroup], folder: Path, *arguments: Any, **options: Any) -> Any:
    """The results of a training that is interrupted before each of its eight steps."""
    options["checkpoint_policy"] = CheckpointPolicy(Checkpoints(folder), every_seconds=None)
    for step in range(8):
        with pytest.raises(Interrupted):
            fit(make(), *arguments, **options, stop=after(min(step, 1)))
    network = make()
    torch.rand(3)  # whatever torch's own state is
    return results(network, *arguments, **options)


@pytest.mark.parametrize("name", ["separate", "smoc", "dropout"])
@pytest.mark.parametrize("options", [{}, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("kind", ["shared", "exchanged", "weighted"])
def test_interrupted_at_every_step(kind: str, options: dict[str, Any], name: str, tmp_path: Path) -> None:
    settings = train_config("shared" if kind == "weighted" else kind, 8, **options)
    data = batches()
    if kind == "weighted":
        data = Batches(replace(data.split, weight=torch.arange(40.0).double()), BATCH, dtype=torch.float64)
    arguments: dict[str, Any] = {"diversities": [0.5, 0.3], "seeds": [5, 6]}
    expected = results(networks(name), data, settings, **arguments)
    assert resume_after_every_step(lambda: networks(name), tmp_path, data, settings, **arguments) == expected


def test_dropout_leaves_torchs_state_alone() -> None:
    network = networks("dropout")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    fit(network, batches(), train_config(steps=3), diversities=[0.5, 0.5], seeds=[5, 6])
    assert torch.get_rng_state().equal(before)


def test_dropout_masks_are_those_of_the_seed() -> None:
    def digest(seed: int) -> str:
        network = networks("dropout")
        data = batches()
        data.batch_many = lambda seeds, *a, **k: type(data).batch_many(data, [5] * len(seeds), *a, **k)  # type: ignore[method-assign]
        fit(network, data, train_config(steps=3), diversities=[0.5, 0.5], seeds=[seed, 9])
        return weights_digest(network, 0)

    assert digest(5) == digest(5) != digest(6)


def test_a_failure_is_the_same_after_an_interruption(tmp_path: Path) -> None:
    def corrupted_network() -> RunGroup:
        return poison(make_group([5, 6]), 1, 2, "linear1.weight", 1e200)  # overflows after a step or two

    arguments: dict[str, Any] = {"diversities": [0.5, 0.5], "seeds": [5, 6]}
    settings = train_config("shared", 8, optimizer="sgd", learning_rate=1e10)
    expected = results(corrupted_network(), batches(), settings, **arguments)
    assert 1 in expected[2]
    found = resume_after_every_step(corrupted_network, tmp_path, batches(), settings, **arguments)
    assert (found[0][0], *found[1:]) == (expected[0][0], *expected[1:])


def test_seconds_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(clock)))
    checkpoint_policy = CheckpointPolicy(Checkpoints(tmp_path), every_seconds=None)
    arguments: dict[str, Any] = {"diversities": [0.5], "seeds": [5], "checkpoint_policy": checkpoint_policy}
    with pytest.raises(Interrupted):
        fit(make_group([5]), batches(), train_config(steps=8), **arguments, stop=after(4))
    first = next(clock)
    fitted = fit(make_group([5]), batches(), train_config(steps=8), **arguments)
    second = next(clock) - first
    assert fitted.seconds > second - 4  # a call of the clock or two lie outside
    assert fitted.seconds > first / 2


def test_checkpoints_come_by_steps_and_by_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(checkpoint_policy: CheckpointPolicy) -> list[int]:
        steps: list[int] = []
        monkeypatch.setattr(Checkpoints, "save", lambda self, n, o, progress, stopping: steps.append(progress["step"]))
        options: dict[str, Any] = {"diversities": [0.5], "seeds": [5], "checkpoint_policy": checkpoint_policy}
        fit(make_group([5]), batches(), train_config(steps=9), **options)
        return steps

    assert saved(CheckpointPolicy(Checkpoints(tmp_path), every_steps=4, every_seconds=None)) == [4, 8]
    assert saved(CheckpointPolicy(Checkpoints(tmp_path), every_steps=None, every_seconds=1e-9)) == list(range(1, 9))
    assert saved(CheckpointPolicy(Checkpoints(tmp_path), every_steps=None, every_seconds=1e9)) == []
