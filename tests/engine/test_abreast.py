"""Trunks of several runs as one network: with plain PyTorch in the kernels' place, and on a GPU as they are."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchace.kernels
from tests.engine.cases import assert_same, weights
from tests.reference import residual
from torchace.data import Batches, Split
from torchace.engine import abreast
from torchace.engine.abreast import Abreast
from torchace.engine.checkpoint import Checkpoints, weights_digest
from torchace.engine.fit import Interrupted, Saving, fit
from torchace.engine.network import Network, SideBySide
from torchace.engine.recipe import Recipe, make_optimizer
from torchace.engine.step import StepResult, train_step
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble

CLASSES, BATCH, SIDE = 4, 5, 8
DIVERSITIES = [0.0, 0.5, 0.9]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in float64 on the CPU goes through the same code, with plain PyTorch in the kernels' place."""
    monkeypatch.setitem(sys.modules, "torchace.kernels.residual_gpu", residual)
    monkeypatch.setattr(torchace.kernels, "residual_gpu", residual, raising=False)
    monkeypatch.setattr(abreast, "_computed_in", lambda x: torch.float64)


def smocs(runs: int = 3, members: int = 3, rank: int | None = None, depth: int = 8) -> list[SMOC]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [SMOC(cifar_resnet(depth, None), 64, CLASSES, members, rank).double() for _ in range(runs)]


def batch(step: int, *lead: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(*lead, BATCH, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (*lead, BATCH), generator=generator)


def recipe(kind: str = "shared", optimizer: str = "sgd") -> Recipe:
    return Recipe(
        steps=9, batches=kind, optimizer=optimizer, learning_rate=0.05, weight_decay=1e-3, precision="float64"
    )


def trained(
    network: Network, how: Recipe, steps: int = 4, runs: slice = slice(None), of: int = 3
) -> tuple[Network, StepResult]:
    """Some steps of the first runs of three, on the batches these have."""
    network.train()
    optimizer = make_optimizer(how, list(network.parameters()))
    lam = torch.tensor(DIVERSITIES, dtype=torch.float64)[runs] if how.batches != "separate" else torch.zeros(of)[runs]
    lead = (of,) if how.batches == "shared" else (of, network.num_members)
    for step in range(steps):
        x, y = (part[runs] for part in batch(step, *lead))
        active = torch.ones(network.num_runs, dtype=torch.bool)
        result = train_step(network, optimizer, x, y, None, lam, active, how)
    return network, result


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("kind", "optimizer", "members", "rank"),
    [
        ("shared", "sgd", 3, None),
        ("shared", "adamw", 1, None),
        ("shared", "sgd", 3, 2),
        ("separate", "sgd", 2, None),
        ("exchanged", "sgd", 2, None),
    ],
)
def test_in_company_as_alone(kind: str, optimizer: str, members: int, rank: int | None) -> None:
    together, result = trained(Abreast(smocs(3, members, rank)), recipe(kind, optimizer))
    for run, ensemble in enumerate(smocs(3, members, rank)):
        own = slice(run, run + 1)
        alone, expected = trained(SideBySide([ensemble]), recipe(kind, optimizer), runs=own)
        # 1e-9: float64 with sums in another order, over four steps; AdamW divides by what may be small
        assert_same(weights(together, run), weights(alone, 0), within=1e-9)
        torch.testing.assert_close(result.losses[own], expected.losses, rtol=0, atol=1e-9)
        torch.testing.assert_close(result.score[own], expected.score, rtol=0, atol=1e-9)
    counts = [value for name, value in together.state_dict().items() if name.endswith("num_batches_tracked")]
    assert {int(value) for value in counts} == {4}


@pytest.mark.usefixtures("plain")
def test_the_trunk_is_computed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    real = residual.block
    monkeypatch.setattr(residual, "block", lambda x, *args: calls.append(x.shape) or real(x, *args))
    network = Abreast(smocs()).train()
    network(batch(0, 3)[0])
    assert [shape[0] for shape in calls] == [3, 3, 3]  # a ResNet-8 has one block in a stage
    network.eval()
    network(batch(0, 3)[0])
    network.predict(batch(0)[0])
    assert len(calls) == 3


def test_without_bf16_on_a_gpu_runs_go_one_by_one() -> None:
    x = batch(0, 3)[0]
    ours, theirs = (kind(smocs()).train()(x) for kind in (Abreast, SideBySide))
    assert torch.equal(ours, theirs)
    assert abreast._computed_in(x) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert abreast._computed_in(x) is None


@pytest.mark.usefixtures("plain")
def test_parameters_keep_names_places_and_strides() -> None:
    ensembles = smocs()
    network = Abreast(ensembles).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    names, parameters = list(network.state_dict()), list(network.parameters())
    strides = [parameter.stride() for parameter in parameters]
    trained(network, recipe(), steps=1)
    assert names == list(network.state_dict()) == list(SideBySide(smocs()).state_dict())
    assert all(ours is theirs for ours, theirs in zip(network.parameters(), parameters, strict=True))
    assert [parameter.stride() for parameter in parameters] == strides
    assert [parameter.grad.stride() for parameter in parameters if parameter.grad is not None] == strides
    assert network.ensemble(1) is ensembles[1]


@pytest.mark.usefixtures("plain")
def test_gradients_add_up_until_they_are_cleared() -> None:
    once, twice = (Abreast(smocs()).train() for _ in range(2))
    x = batch(0, 3)[0]
    once(x).square().sum().backward()
    for _ in range(2):
        twice(x).square().sum().backward()  # batch statistics: the same gradient again
    for ours, theirs in zip(twice.parameters(), once.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, 2 * theirs.grad)


@pytest.mark.usefixtures("plain")
def test_a_network_that_was_moved_is_joined_anew() -> None:
    moved = trained(Abreast(smocs()), recipe(), steps=1)[0]
    kept = copy.deepcopy(moved.state_dict())
    moved.float().double()
    moved.load_state_dict(kept)
    other = SideBySide(smocs()).double()
    other.load_state_dict(kept)
    trained(moved, recipe(), steps=2)
    trained(other, recipe(), steps=2)
    for run in range(3):
        assert_same(weights(moved, run), weights(other, run), within=1e-9)


@pytest.mark.usefixtures("plain")
def test_a_fault_names_its_run_and_leaves_the_others_as_they_are() -> None:
    healthy = trained(Abreast(smocs()), recipe())[0]
    spoilt = Abreast(smocs())
    with torch.no_grad():
        spoilt.ensembles[1].trunk.stage2[0].conv2.weight[3, 2, 1, 1] = torch.inf
    result = trained(spoilt, recipe())[1]
    assert result.faults.tolist()[0] == result.faults.tolist()[2] == -1
    assert result.faults[1] >= 0
    for run in (0, 2):
        assert_same(weights(spoilt, run), weights(healthy, run), within=0)


@pytest.mark.usefixtures("plain")
def test_interrupted_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = _fitted(Abreast(smocs()), None, interrupted=99)
    saving = Saving(Checkpoints(tmp_path / "checkpoint"), every_seconds=None)
    with pytest.raises(Interrupted):
        _fitted(Abreast(smocs()), saving, interrupted=4)
    resumed = _fitted(Abreast(smocs()), saving, interrupted=99)
    assert [weights_digest(whole, run) for run in range(3)] == [weights_digest(resumed, run) for run in range(3)]
    # a checkpoint of one kind of network is one of the other
    with pytest.raises(Interrupted):
        _fitted(Abreast(smocs()), Saving(Checkpoints(tmp_path / "other"), every_seconds=None), interrupted=4)
    one_by_one = _fitted(SideBySide(smocs()), Saving(Checkpoints(tmp_path / "other")), interrupted=99)
    for run in range(3):
        assert_same(weights(one_by_one, run), weights(whole, run), within=1e-9)


def _fitted(network: Network, saving: Saving | None, interrupted: int, how: Recipe | None = None) -> Network:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (40, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.randint(CLASSES, (40,), generator=generator)).to(next(network.parameters()).device)
    how = how or recipe()
    calls: Iterator[int] = iter(range(1000))
    fit(
        network,
        Batches(split, BATCH, normalize=([128.0], [64.0]), dtype=how.dtype),
        how,
        diversities=DIVERSITIES,
        seeds=[0, 1, 2],
        saving=saving,
        stop=lambda: next(calls) >= interrupted,
    )
    return network


def test_what_it_takes() -> None:
    assert Abreast.takes(smocs())
    assert Abreast.takes(smocs(rank=2))
    assert not Abreast.takes([*smocs(), *smocs(1, depth=14)])
    assert not Abreast.takes([SMOC(mlp(6, 64, None), 64, CLASSES, 2)])
    assert not Abreast.takes([SMOC(cifar_resnet(8, None, width=8), 32, CLASSES, 2)])
    assert not Abreast.takes([SMOC(cifar_resnet(8, None, in_channels=17), 64, CLASSES, 2)])
    assert not Abreast.takes([Ensemble([cifar_resnet(8, CLASSES)])])
    frozen = smocs()
    frozen[1].trunk.conv1.weight.requires_grad_(False)  # type: ignore[union-attr]
    assert not Abreast.takes(frozen)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

BF16 = Recipe(steps=24, optimizer="sgd", learning_rate=0.05, weight_decay=1e-4, precision="bf16")


def on_gpu(kind: type[SideBySide]) -> Network:
    network = kind(smocs(depth=20)).to(device="cuda", dtype=torch.float32)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@needs_gpu
def test_a_gpu_repeats_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    whole, again = (_fitted(on_gpu(Abreast), None, interrupted=99, how=BF16) for _ in range(2))
    saving = Saving(Checkpoints(tmp_path / "checkpoint"), every_seconds=None)
    with pytest.raises(Interrupted):
        _fitted(on_gpu(Abreast), saving, interrupted=13, how=BF16)  # after the graph was captured
    resumed = _fitted(on_gpu(Abreast), saving, interrupted=99, how=BF16)
    for run in range(3):
        assert weights_digest(whole, run) == weights_digest(again, run) == weights_digest(resumed, run)


@needs_gpu
def test_a_gpu_agrees_with_runs_in_streams() -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 128, 3, 32, 32, generator=generator).cuda()  # many pixels: a number near 0 does not show
    y = torch.randint(CLASSES, (3, 128), generator=generator).cuda()
    gradients = []
    for kind, bf16 in ((Abreast, True), (SideBySide, True), (SideBySide, False)):
        network = on_gpu(kind).train()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            logits = network(x).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), y[:, None].expand(logits.shape[:3]).flatten())
        loss.backward()
        assert isinstance(network, SideBySide)
        last = network.ensembles[1].trunk.stage3[-1]
        gradients.append([loss.item(), last.conv2.weight.grad, last.bn1.bias.grad])
    ours, streams, exact = gradients
    assert ours[0] == pytest.approx(exact[0], rel=0.02)  # bf16 keeps 8 bits
    for a, b, c in zip(ours[1:], streams[1:], exact[1:], strict=True):
        # no further from float32 than twice what bf16 costs anyway
        assert (a - c).norm() < 2 * (b - c).norm()
