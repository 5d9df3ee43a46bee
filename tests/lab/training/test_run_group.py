"""Run groups against their ensembles one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lab.training.small_trainings import (
    CLASSES,
    FEATURES,
    MEMBERS,
    assert_same,
    batches,
    make_group,
    members,
    run_group,
    train_config,
)
from torchace.functional import amended_cross_entropy
from torchace.lab.data import Batches, Split
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.loop import fit
from torchace.lab.training.run_group import RunGroup
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble, StackedEnsemble, adapt
from torchace.nn import stacked as stacked_module
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.saving import load_model, save_model

SEEDS, LAMBDAS = [3, 4], [0.3, 0.8]
# float64: sums in another order, through a few layers and ten steps
WITHIN = 1e-11


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


class Doubled(nn.Module):
    """No chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.rand(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 * self.scale)


def resnet() -> nn.Module:
    return cifar_resnet(8, CLASSES, width=4)


MAKE = {
    "separate": lambda: Ensemble([mlp(FEATURES, 5, CLASSES) for _ in range(MEMBERS)]),
    "no chain": lambda: Ensemble([Doubled() for _ in range(MEMBERS)]),
    "convolutional": lambda: Ensemble([convolutional() for _ in range(MEMBERS)]),
    "smoc": lambda: SMOC(mlp(FEATURES, 5, None), 5, CLASSES, MEMBERS),
    "smoc, low rank": lambda: SMOC(mlp(FEATURES, 5, None), 5, CLASSES, MEMBERS, rank=2),
    "smoc, resnet": lambda: SMOC(cifar_resnet(8, None, width=4), 16, CLASSES, MEMBERS),
    "branched mlp": lambda: branch(
        mlp(FEATURES, (5, 4), CLASSES), MEMBERS, at="linear2", reinitialize=lambda: mlp(FEATURES, (5, 4), CLASSES)
    ),
    "adapted": lambda: adapt(mlp(FEATURES, (5, 4), CLASSES), MEMBERS),
    "adapted, low rank, resnet": lambda: adapt(resnet(), MEMBERS, adapter="low_rank", rank=2),
    "branched resnet": lambda: branch(resnet(), MEMBERS, at="stage3", reinitialize=resnet),
}


def make_ensembles(kind: str, seeds: Sequence[int] = SEEDS) -> list[EnsembleModule]:
    found = []
    for seed in seeds:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            found.append(MAKE[kind]().double())
    return found


def input_shape(kind: str) -> tuple[int, ...]:
    return (3, 8, 8) if "resnet" in kind or kind == "convolutional" else (FEATURES,)


def arm_data(kind: str) -> Batches:
    """20 samples in batches of 5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, *input_shape(kind), generator=generator, dtype=torch.float64)
    return Batches(Split(x, torch.randint(CLASSES, (20,), generator=generator)), 5, dtype=torch.float64)


def as_plain(ensemble: EnsembleModule) -> EnsembleModule:
    """The same ensemble with the names of an `Ensemble` or a `SMOC`."""
    return Ensemble(ensemble.unstack()) if type(ensemble) is StackedEnsemble else ensemble


def run_state(ensemble: EnsembleModule) -> dict[str, Tensor]:
    return as_plain(ensemble).state_dict()


def run_gradients(network: RunGroup, run: int) -> dict[str, Tensor]:
    """The gradients of one run by the same names: a copy of the group that holds them as weights."""
    holder = copy.deepcopy(network)
    with torch.no_grad():
        for copied, parameter in zip(holder.parameters(), network.parameters(), strict=True):
            assert parameter.grad is not None
            copied.copy_(parameter.grad)
    return {name: p.detach() for name, p in as_plain(holder.ensemble(run)).named_parameters()}


# -- logits and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("kind", MAKE)
def test_logits_and_gradients_are_those_of_the_ensembles_one_by_one(kind: str, own: bool) -> None:
    ensembles = make_ensembles(kind)
    network = RunGroup(ensembles)
    lead = (2, MEMBERS, 4) if own else (2, 4)
    x = torch.randn(*lead, *input_shape(kind), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = network(x, own=own)
    expected = torch.stack(
        [e(part, batches="separate" if own else "shared") for e, part in zip(ensembles, x, strict=True)]
    )
    assert logits.shape == (2, MEMBERS, 4, CLASSES)
    torch.testing.assert_close(logits, expected, rtol=0, atol=WITHIN)

    weight = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    for run, ensemble in enumerate(ensembles):
        theirs = {name: p.grad for name, p in ensemble.named_parameters() if p.grad is not None}
        assert_same(run_gradients(network, run), theirs, within=WITHIN)
        assert_same(run_state(network.ensemble(run)), run_state(ensemble), within=WITHIN)  # statistics of batches


@pytest.mark.parametrize("kind", MAKE)
def test_all_runs_predict_one_input(kind: str) -> None:
    ensembles = [e.eval() for e in make_ensembles(kind)]
    network = RunGroup(ensembles).eval()
    x = torch.randn(4, *input_shape(kind), dtype=torch.float64)
    expected = torch.stack([e(x) for e in ensembles])
    torch.testing.assert_close(network.predict(x), expected, rtol=0, atol=WITHIN)
    for run in range(2):
        torch.testing.assert_close(network.ensemble(run)(x), expected[run], rtol=0, atol=WITHIN)


def test_images_are_taken_as_they_are() -> None:
    network = run_group([[mlp(64, 4, CLASSES) for _ in range(2)] for _ in range(3)])
    assert network(torch.zeros(3, 5, 1, 8, 8)).shape == (3, 2, 5, CLASSES)
    assert network(torch.zeros(3, 2, 5, 1, 8, 8), own=True).shape == (3, 2, 5, CLASSES)


# -- training ---------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train_alone(ensemble: EnsembleModule, data: Batches, config: TrainConfig, lam: float, seed: int) -> None:
    """One ensemble, the loss by its function, a plain loop with an optimizer of torch."""
    sgd = {"momentum": config.momentum, "nesterov": config.nesterov} if config.optimizer == "sgd" else {}
    kind: Any = OPTIMIZERS[config.optimizer]  # type: ignore[index]
    optimizer = kind(ensemble.parameters(), weight_decay=config.weight_decay, **sgd)
    count, shared, smoothing = ensemble.num_members, config.batches == "shared", config.label_smoothing
    share = torch.full((1,), 1 / count, dtype=torch.float64)
    for step in range(config.steps):
        streams, diversity = [0] if shared else list(range(count)), lam * config.diversity_share_at(step)
        x, y = data.batch_many([seed] * len(streams), *data.locate(step), streams=streams)
        q = torch.zeros(())
        if config.batches == "exchanged":
            with torch.no_grad():
                q = ensemble.eval()(x.flatten(0, 1)).softmax(2).unflatten(1, x.shape[:2])  # (K, K, B, C)
            ensemble.train()
        logits = ensemble(x[0]) if shared else ensemble(x, batches="separate")
        if shared:
            options = {"label_smoothing": smoothing, "detach_others": config.detach_others}
            loss = amended_cross_entropy(logits, y[0], diversity, **options)
        else:
            loss = torch.zeros(())
            for k in range(count):
                options = {"label_smoothing": smoothing}
                if config.batches == "exchanged":
                    others = sum(q[j, k] for j in range(count) if j != k)
                    options |= {"mixture": (others + logits[k].detach().softmax(1)) / count, "member_weights": share}
                loss = loss + amended_cross_entropy(logits[k : k + 1], y[k], diversity, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = config.learning_rate_at(step)
        optimizer.step()


@pytest.mark.parametrize("batching", ["shared", "separate", "exchanged"])
@pytest.mark.parametrize("kind", MAKE)
def test_ten_steps_are_those_of_the_ensembles_one_by_one(kind: str, batching: str) -> None:
    lambdas = [0.0, 0.0] if batching == "separate" else LAMBDAS
    data, settings = arm_data(kind), train_config(batching, 10, optimizer="sgd", momentum=0.9, weight_decay=1e-3)
    ensembles = make_ensembles(kind)
    network = RunGroup(ensembles)
    fit(network, data, settings, diversities=lambdas, seeds=SEEDS)
    for run, ensemble in enumerate(ensembles):
        before = run_state(copy.deepcopy(ensemble))
        train_alone(ensemble, data, settings, lambdas[run], SEEDS[run])
        assert_same(run_state(network.ensemble(run)), run_state(ensemble), within=WITHIN)
        assert any((value - before[name]).abs().max() > 1e-3 for name, value in run_state(ensemble).items())


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "sgd", "momentum": 0.8, "nesterov": True},
        {"optimizer": "adam", "weight_decay": 0.01},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("batching", "lambdas", "detach_others"),
    [("shared", (0.0, 0.5, 1.0), True), ("exchanged", (0.0, 0.3, 0.9), True), ("separate", (0.0,), True)]
    + [("shared", (0.5,), False)],
)
def test_optimizers_and_schedules_are_those_of_torch(
    batching: str, lambdas: tuple[float, ...], detach_others: bool, optimizer: dict[str, Any]
) -> None:
    schedules = {"schedule": "cosine", "warmup_steps": 3, "diversity_warmup_steps": 7, "label_smoothing": 0.1}
    settings = train_config(batching, 20, detach_others=detach_others, **schedules, **optimizer)
    data, runs = batches(), [(lam, seed) for lam in lambdas for seed in SEEDS]
    network = make_group([seed for _, seed in runs])
    fit(network, data, settings, diversities=[lam for lam, _ in runs], seeds=[seed for _, seed in runs])
    for r, (lam, seed) in enumerate(runs):
        alone = Ensemble(members(seed))
        train_alone(alone, data, settings, lam, seed)
        # 20 steps in float64: sums in another order differ by some 1e-15 of the weights a step
        assert_same(run_state(network.ensemble(r)), alone.state_dict(), within=1e-10)


# -- single runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKE)
def test_a_run_by_itself_is_a_copy_with_the_modes_and_flags_of_the_group(kind: str) -> None:
    ensembles = make_ensembles(kind)
    for ensemble in ensembles:
        ensemble.link = "sigmoid"
        next(ensemble.parameters()).requires_grad_(False)
        for module in ensemble.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    if isinstance(ensembles[0], Ensemble) and ensembles[0].trunk is None:  # flags are those of all members
        for ensemble in ensembles:
            for member in ensemble:  # type: ignore[attr-defined]
                next(member.parameters()).requires_grad_(False)
    network = RunGroup(ensembles)
    for run, ensemble in enumerate(ensembles):
        alone = network.ensemble(run)
        assert (alone.link, alone.num_members, alone.training) == ("sigmoid", MEMBERS, True)
        assert_same(run_state(alone), run_state(ensemble), within=0)
        plain = as_plain(alone)
        ours = {name: p.requires_grad for name, p in plain.named_parameters()}
        assert ours == {name: p.requires_grad for name, p in ensemble.named_parameters()}
        assert False in ours.values()
        modes = {name: module.training for name, module in plain.named_modules()}
        assert modes == {name: module.training for name, module in ensemble.named_modules()}
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.zero_()
        assert_same(run_state(network.ensemble(run)), run_state(ensemble), within=0)  # still what it was
    assert not network.eval().ensemble(1).training


def test_a_branched_run_can_be_saved(tmp_path: Path) -> None:
    network = RunGroup([MAKE["branched mlp"]() for _ in range(2)])
    ensemble, x = network.ensemble(1).eval(), torch.randn(5, FEATURES)
    save_model(tmp_path / "model", ensemble)
    assert torch.equal(load_model(tmp_path / "model")(x), ensemble(x))


def test_state_names_show_the_stacked_parameters() -> None:
    shapes = {name: tuple(value.shape) for name, value in RunGroup(make_ensembles("smoc")).state_dict().items()}
    assert shapes == {
        "trunk.stacked.linear1.weight": (2, 5, FEATURES),
        "trunk.stacked.linear1.bias": (2, 5),
        "members.stacked.weight": (2, MEMBERS, CLASSES, 5),
        "members.stacked.bias": (2, MEMBERS, CLASSES),
    }
    shapes = {name: tuple(value.shape) for name, value in make_group(SEEDS).state_dict().items()}
    assert shapes["members.stacked.fc.weight"] == (2 * MEMBERS, CLASSES, 5)


@pytest.mark.parametrize("kind", ["convolutional", "branched resnet"])
def test_a_group_moves_to_a_dtype_and_a_memory_format(kind: str) -> None:
    network = RunGroup(make_ensembles(kind)).to(torch.float32, memory_format=torch.channels_last)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    kernels = [p for p in network.parameters() if p.ndim == 5 and p.shape[-1] > 1 and p.shape[2] > 1]
    assert kernels
    assert all(p[0].is_contiguous(memory_format=torch.channels_last) for p in kernels)
    x = torch.randn(2, 4, 3, 8, 8)
    plain = RunGroup(make_ensembles(kind)).to(torch.float32)
    torch.testing.assert_close(network(x), plain(x))
    assert network.seeds.dtype == network.step.dtype == torch.int64


# -- random numbers ---------------------------------------------------------------------------------------------------

RATE, DRAWN = 0.3, 20_000


class Masks(nn.Module):
    """Returns the masks of two layers of dropout, and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Dropout(RATE), nn.Dropout(RATE)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x[:, :DRAWN]) * self.weight
        return torch.cat([x, self.one(ones), self.two(ones)], 1)


def masks(seeds: Sequence[int], step: int, *, count: int = MEMBERS, trunk: bool = False) -> Tensor:
    """Return the dropout masks of each run's members, `(R, K, layers, DRAWN)`; a trunk's layers first."""
    shared = [Masks() if trunk else None for _ in seeds]
    network = RunGroup([Ensemble([Masks() for _ in range(count)], own) for own in shared])
    network.set_seeds(seeds)
    network.step.fill_(step)
    kept = network(torch.ones(len(seeds), 1, DRAWN))[:, :, 0].unflatten(2, (-1, DRAWN))
    return kept[:, :, 1:].detach() > 0


def test_dropout_keeps_the_requested_share() -> None:
    kept = masks([5, 6], 7, trunk=True).double().mean(-1)  # (R, K, layers)
    error = (RATE * (1 - RATE) / DRAWN) ** 0.5
    assert (kept - (1 - RATE)).abs().max() < 4 * error


def test_masks_are_independent() -> None:
    drawn = torch.stack([masks([5, 6], step, trunk=True) for step in (0, 1, 2)])  # (steps, R, K, layers, DRAWN)
    of_trunk, own = drawn[:, :, 0, :2], drawn[:, :, :, 2:]
    assert drawn[:, :, 1:, :2].equal(of_trunk.unsqueeze(2).expand(-1, -1, MEMBERS - 1, -1, -1))  # computed once
    rows = torch.cat([of_trunk.reshape(-1, DRAWN), own.reshape(-1, DRAWN)]).double()
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert len(rows) == 3 * 2 * (2 + 2 * MEMBERS)
    # of independent masks about 1 of 16,000 pairs is beyond 4 standard errors; there are 1,128
    assert correlation.abs().max() < 4 / DRAWN**0.5
    # nor neighbors within a mask
    shifted = torch.stack([torch.corrcoef(torch.stack([row[1:], row[:-1]]))[0, 1] for row in rows])
    assert shifted.abs().max() < 4 / DRAWN**0.5


@pytest.mark.parametrize("trunk", [False, True])
def test_a_run_draws_the_same_masks_alone_in_company_and_for_every_diversity(trunk: bool) -> None:
    together = masks([5, 7, 5], 3, trunk=trunk)
    assert together[0].equal(together[2])  # the λ of one seed
    for run, seed in enumerate([5, 7]):
        assert together[run].equal(masks([seed], 3, trunk=trunk)[0])
    assert together[0, :, :, :].equal(masks([5], 3, count=MEMBERS + 2, trunk=trunk)[0, :MEMBERS])


def test_masks_do_not_depend_on_how_many_members_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def member() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Dropout(0.4), nn.Linear(144, 3))

    def trained() -> RunGroup:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = run_group([[member(), member()] for _ in SEEDS]).double()
        settings = train_config(
            "separate", 3, optimizer="sgd"
        )  # its batches are each member's own, so that members can part
        fit(network, arm_data("convolutional"), settings, diversities=[0.0, 0.0], seeds=SEEDS)
        return network

    whole = trained()
    monkeypatch.setattr(stacked_module, "CACHED", 1)  # one member after another
    assert_same(trained().state_dict(), whole.state_dict(), within=WITHIN)


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_every_kind_of_dropout_gives_the_values_that_torch_gives(layer: type[nn.Module]) -> None:
    member = nn.Sequential(nn.Conv2d(1, 2000, 1), layer(RATE)).double()  # type: ignore[call-arg]
    nn.init.zeros_(member[0].weight)
    nn.init.constant_(member[0].bias, 0.5)
    network = run_group([[member, copy.deepcopy(member)]])
    x = torch.zeros(2, 1, 3, 3, dtype=torch.float64)
    found, counts = network(x[None])[0].detach().unique(return_counts=True)
    torch.testing.assert_close(found, member(x).detach().unique(), rtol=1e-12, atol=0)
    by_channel = layer in (nn.Dropout2d, nn.FeatureAlphaDropout)
    drawn = 2 * 2 * 2000 * (1 if by_channel else 9)
    share = float(counts[1] / counts.sum())  # the larger value is kept
    assert abs(share - (1 - RATE)) < 4 * (RATE * (1 - RATE) / drawn) ** 0.5
    assert StackedEnsemble([member, copy.deepcopy(member)])(x).unique().numel() == 2


def with_dropout(kind: str, seed: int) -> EnsembleModule:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "separate":
            return Ensemble([mlp(FEATURES, 5, CLASSES, dropout=0.4) for _ in range(MEMBERS)]).double()
        trunk = mlp(FEATURES, 5, None, dropout=0.4)
        if kind == "smoc":
            return SMOC(trunk, 5, CLASSES, MEMBERS).double()
        return Ensemble([mlp(5, 5, CLASSES, dropout=0.4) for _ in range(MEMBERS)], trunk).double()


@pytest.mark.parametrize("batching", ["shared", "exchanged"])
@pytest.mark.parametrize("kind", ["separate", "smoc", "trunk"])
def test_with_dropout_a_run_trains_as_it_does_alone(kind: str, batching: str) -> None:
    def trained(runs: list[int]) -> RunGroup:
        network = RunGroup([with_dropout(kind, SEEDS[r]) for r in runs])
        chosen = {"diversities": [LAMBDAS[r] for r in runs], "seeds": [SEEDS[r] for r in runs]}
        fit(network, batches(), train_config(batching, 10), **chosen)
        return network

    together = trained([0, 1])
    for run in range(2):
        assert_same(run_state(together.ensemble(run)), run_state(trained([run]).ensemble(0)), within=WITHIN)


def test_members_are_those_that_were_given() -> None:
    network = make_group(SEEDS)
    for run, seed in enumerate(SEEDS):
        for ours, theirs in zip(network.ensemble(run).unstack(), members(seed), strict=True):  # type: ignore[operator]
            assert_same(ours.state_dict(), theirs.state_dict(), within=0)
