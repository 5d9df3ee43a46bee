"""Saving and loading: exact round trips of every kind, custom architectures, arguments."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.saved_models import KINDS, bits, one_sentence, save_example, small_resnet, state, train_model
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import stack_classifiers
from torchace.nn.stacked import StackedEnsemble
from torchace.saving import ModelFileError, load_model, load_weights, save_model
from torchace.saving.kinds import unstack


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, EnsembleModule]:
    return tmp_path / "model", save_example(tmp_path / "model")


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_round_trip(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, make, shape = KINDS[name]
    torch.manual_seed(1)
    ensemble = train_model(make(), shape).to(dtype)
    before = state(ensemble)
    save_model(tmp_path / "model", ensemble)
    assert state(ensemble) == before
    assert ensemble.training
    random_state = torch.get_rng_state()
    again = load_model(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert type(again) is type(ensemble)
    assert state(again) == before
    assert again.link == ensemble.link
    assert again.num_members == ensemble.num_members
    assert not any(module.training for module in again.modules())
    assert again.manifest["kind"] == kind
    assert again.member_weights is None
    x = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(again(x), ensemble.eval()(x))
    assert torch.equal(again.predict(x), ensemble.predict(x))
    save_model(tmp_path / "again", again)
    for file in ("manifest.json", "weights.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    for one in (ensemble, again):  # trains on
        torch.manual_seed(2)
        train_model(one, shape)
    assert state(again) == state(ensemble) != before


@pytest.mark.parametrize("name", KINDS)
def test_load_weights_into_the_same_kind(name: str, tmp_path: Path) -> None:
    _, make, shape = KINDS[name]
    ensemble = train_model(make(), shape)
    ensemble.set_member_weights([1.0] + [0.0] * (ensemble.num_members - 1))
    save_model(tmp_path / "model", ensemble)
    fresh = make()
    assert state(fresh) != state(ensemble)
    load_weights(fresh, tmp_path / "model")
    assert state(fresh) == state(ensemble)
    assert torch.equal(fresh.member_weights, ensemble.member_weights)
    assert fresh.training


def test_the_papers_network(tmp_path: Path) -> None:
    ensemble = SMOC(cifar_resnet(110, num_classes=None), 64, 10, num_members=10)
    save_model(tmp_path / "model", ensemble)
    again = load_model(tmp_path / "model")
    assert sum(p.numel() for p in again.parameters()) == 1_736_852
    assert state(again) == state(ensemble)


def test_manifest_describes_the_model(saved: tuple[Path, EnsembleModule]) -> None:
    path, ensemble = saved
    manifest = load_model(path).manifest
    assert manifest["format_version"] == 2
    assert manifest["diversity"] == 0.5
    assert manifest["class_names"] == ["a", "b"]
    assert manifest["extra"] == {"epochs": 3}
    assert manifest["num_members"] == 2
    assert manifest["link"] == "softmax"
    assert manifest["member_weights"] == [0.25, 0.75]
    assert manifest["architecture"]["members"] == [member.architecture for member in ensemble]
    assert sorted(os.listdir(path.parent)) == ["model"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_member_weights_of_the_ensemble_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    ensemble = Ensemble([mlp(4, 3, 2) for _ in range(3)])
    ensemble.set_member_weights([0.1, 0.2, 0.7])
    ensemble.to(dtype)
    save_model(tmp_path / "model", ensemble)
    again = load_model(tmp_path / "model")
    assert bits(again.member_weights) == bits(ensemble.member_weights)


@pytest.mark.parametrize("given", [[0.1, 0.9], (0.1, 0.9), torch.tensor([0.1, 0.9])], ids=str)
def test_member_weights_given_win(given: Any, tmp_path: Path) -> None:
    ensemble = Ensemble([mlp(4, 3, 2), mlp(4, 3, 2)])
    ensemble.set_member_weights([0.5, 0.5])
    save_model(tmp_path / "model", ensemble, member_weights=given)
    assert torch.equal(load_model(tmp_path / "model").member_weights, torch.tensor([0.1, 0.9]))
    assert ensemble.member_weights.tolist() == [0.5, 0.5]


def test_nonfinite_numbers_are_preserved(tmp_path: Path) -> None:
    ensemble = Ensemble([mlp(4, 3, 2)])
    with torch.no_grad():
        ensemble[0].fc.weight[0] = torch.tensor([float("nan"), float("inf"), -0.0])
        ensemble[0].fc.bias.view(torch.int32)[0] = 0x7FC12345  # a NaN with something in it
    save_model(tmp_path / "model", ensemble)
    assert state(load_model(tmp_path / "model")) == state(ensemble)


def test_memory_in_any_order(tmp_path: Path) -> None:
    ensemble = Ensemble([small_resnet(), mlp(768, 4, 5)]).to(memory_format=torch.channels_last)
    ensemble[1].fc.weight = nn.Parameter(torch.randn(4, 5).T)
    ensemble[1].fc.bias = nn.Parameter(torch.zeros(1).expand(5))
    assert not ensemble[1].fc.weight.is_contiguous()
    save_model(tmp_path / "model", ensemble)
    assert state(load_model(tmp_path / "model")) == state(ensemble)


def test_random_numbers_and_gradients_are_not_touched(tmp_path: Path) -> None:
    ensemble = Ensemble([mlp(4, 3, 2)])
    ensemble[0].fc.weight.requires_grad_(False)
    random_state = torch.get_rng_state()
    save_model(tmp_path / "model", ensemble)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.requires_grad and p.is_leaf and p.grad is None for p in load_model(tmp_path / "model").parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_saved_on_a_gpu_loads_on_the_cpu(tmp_path: Path) -> None:
    ensemble = StackedEnsemble([mlp(4, 3, 2), mlp(4, 3, 2)]).cuda()
    ensemble.set_member_weights([0.1, 0.9])
    save_model(tmp_path / "model", ensemble)
    again = load_model(tmp_path / "model")
    assert all(p.device.type == "cpu" for p in again.parameters())
    assert state(again) == state(ensemble)
    load_weights(ensemble, tmp_path / "model")
    assert ensemble.member_weights.is_cuda


# -- custom architectures ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class MyEnsemble(Ensemble):
    pass


def replaced_activation() -> EnsembleModule:
    network = mlp(4, 3, 2)
    network.relu1 = nn.Tanh()
    return Ensemble([network])


def replaced_layer() -> EnsembleModule:
    network = mlp(4, 3, 2)
    network.fc = nn.Linear(3, 7)
    return Ensemble([network])


def shared_member() -> EnsembleModule:
    network = mlp(4, 3, 2).requires_grad_(False)
    return Ensemble([network, network])


def wrong_description() -> EnsembleModule:
    network = mlp(4, 3, 2)
    network.architecture = {"name": "mlp", "in_features": 4, "hidden": object(), "num_classes": 2}
    return Ensemble([network])


OWN: dict[str, Callable[[], EnsembleModule]] = {
    "own members": lambda: Ensemble([nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))]),
    "own trunk": lambda: SMOC(nn.Linear(4, 3), 3, 2, num_members=2),
    "own stacked members": lambda: StackedEnsemble([nn.Linear(4, 2), nn.Linear(4, 2)]),
    "own trunk of members": lambda: Ensemble([mlp(4, 3, 2)], nn.Linear(4, 4)),
    "own host": lambda: stack_classifiers(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 3),
    "own branched model": lambda: branch(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 3, at="2"),
    "own class": lambda: MyEnsemble([mlp(4, 3, 2)]),
    "tied": lambda: Ensemble([Tied()]),
    "one member twice": shared_member,
    "replaced activation": replaced_activation,
    "replaced layer": replaced_layer,
    "wrong description": wrong_description,
}


@pytest.mark.parametrize("name", OWN)
def test_own_architectures_are_saved_as_weights(name: str, tmp_path: Path) -> None:
    ensemble, fresh = OWN[name](), OWN[name]()
    save_model(tmp_path / "model", ensemble, diversity=0.1)
    with pytest.raises(ModelFileError, match=r"build it and use load_weights\(module, path\)") as caught:
        load_model(tmp_path / "model")
    one_sentence(caught.value)
    assert state(fresh) != state(ensemble)
    manifest = load_weights(fresh, tmp_path / "model")
    assert state(fresh) == state(ensemble)
    assert manifest["diversity"] == 0.1
    assert manifest["architecture"] is None


def test_weights_of_stacked_members_fit_an_ensemble(tmp_path: Path) -> None:
    stacked = StackedEnsemble([mlp(4, 3, 2), mlp(4, 3, 2)])
    save_model(tmp_path / "stacked", stacked)
    looped = Ensemble([mlp(4, 3, 2), mlp(4, 3, 2)])
    load_weights(looped, tmp_path / "stacked")
    assert state(looped) == state(unstack(stacked))
    save_model(tmp_path / "looped", looped)
    fresh = StackedEnsemble([mlp(4, 3, 2), mlp(4, 3, 2)])
    load_weights(fresh, tmp_path / "looped")
    assert state(fresh) == state(stacked)


MISFITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "missing name": (lambda: Ensemble([mlp(4, 3, 2), mlp(4, 5, 2)]), "'members.1.fc.weight' is"),
    "name too many": (lambda: Ensemble([mlp(4, (3, 3), 2), mlp(4, (5, 3), 2)]), "it has no 'members.0.linear2"),
    "shape": (lambda: Ensemble([mlp(4, 6, 2), mlp(4, (5, 3), 2)]), r"and \(6, 4\) in the model"),
    "link": (lambda: Ensemble([mlp(4, 3, 2), mlp(4, (5, 3), 2)], link="sigmoid"), "link is 'softmax'"),
    "not an ensemble": (lambda: mlp(4, 3, 2), "does not fit"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_load_weights_refuses_other_shapes_and_names(name: str, saved: tuple[Path, EnsembleModule]) -> None:
    module, words = MISFITS[name][0](), MISFITS[name][1]
    before = state(module)
    with pytest.raises(ModelFileError, match=words) as caught:
        load_weights(module, saved[0])
    one_sentence(caught.value)
    assert state(module) == before


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"diversity": 1.5}, ValueError, r"`diversity` in \[0, 1\]"),
        ({"diversity": torch.tensor([0.5])}, ValueError, "0-dimensional"),
        ({"diversity": "0.5"}, TypeError, "`diversity` to be a number"),
        ({"member_weights": [0.5, 0.6]}, ValueError, "sum to 1"),
        ({"member_weights": [1.0]}, ValueError, r"shape \(2,\)"),
        ({"member_weights": torch.tensor([float("nan"), 1.0])}, ValueError, "non-negative"),
        ({"class_names": "ab"}, TypeError, "sequence of strings"),
        ({"class_names": [1, 2]}, TypeError, "sequence of strings"),
        ({"extra": {"x": float("nan")}}, ValueError, "`extra` of JSON types"),
        ({"extra": {"x": (1, 2)}}, ValueError, "tuples to lists"),
        ({"extra": {1: 2}}, ValueError, "`extra`"),
        ({"extra": {"x": torch.zeros(1)}}, ValueError, "`extra`"),
    ],
)
def test_save_refuses_arguments(options: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        save_model(tmp_path / "model", Ensemble([mlp(4, 3, 2), mlp(4, 3, 2)]), **options)
    assert not os.listdir(tmp_path)


def test_takes_a_tensor_as_diversity(tmp_path: Path) -> None:
    save_model(tmp_path / "model", Ensemble([mlp(4, 3, 2)]), diversity=torch.tensor(0.5))
    assert load_model(tmp_path / "model").manifest["diversity"] == 0.5


def test_refuses_other_objects(saved: tuple[Path, EnsembleModule], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Wrap models in Ensemble"):
        save_model(tmp_path / "other", mlp(4, 3, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`module` to be a module"):
        load_weights("model", saved[0])  # type: ignore[arg-type]
