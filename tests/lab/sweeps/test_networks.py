"""From a configuration to networks and train configs."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.lab.sweeps.small_sweeps import small
from tests.support.weights import weights_digest
from torchace.lab.data import load
from torchace.lab.schema.experiment import Arm, TrainSection
from torchace.lab.sweeps.networks import (
    build_network,
    default_group_size,
    describe_network,
    is_compiled,
    make_train_config,
)
from torchace.lab.training.config import TrainConfig
from torchace.nn import SMOC, Ensemble, StackedEnsemble

DIGITS = load("digits")

MODELS: dict[str, dict[str, Any]] = {
    "separate": {},
    "dropout": {"dropout": 0.2},
    "smoc": {"kind": "smoc"},
    "low rank": {"kind": "smoc", "rank": 2},
    "branch": {"kind": "branch", "at": "fc"},
    "resnet": {"network": "resnet", "depth": 8, "width": 2},
    "resnet smoc": {"kind": "smoc", "network": "resnet", "depth": 8, "width": 2},
    "resnet branch": {"kind": "branch", "network": "resnet", "depth": 8, "width": 2},
}


def arm(model: str, **train: Any) -> Arm:
    return small(model={"num_members": 3, **MODELS[model]}, train=train).complete_arms()[0]


@pytest.mark.parametrize("model", MODELS)
def test_weights_depend_on_the_seed_alone(model: str) -> None:
    torch.manual_seed(1)
    network = build_network(arm(model), DIGITS, [7, 8, 7], "cpu")
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = build_network(arm(model), DIGITS, [8], "cpu")
    assert torch.get_rng_state().equal(state)
    digests = [weights_digest(network, r) for r in range(3)]
    assert digests[0] == digests[2] != digests[1] == weights_digest(other, 0)


@pytest.mark.parametrize("model", MODELS)
def test_members_start_apart(model: str) -> None:
    network = build_network(arm(model), DIGITS, [7], "cpu").eval()
    logits = network.predict(torch.randn(4, 1, 8, 8))[0]
    assert logits.shape == (3, 4, 10)
    assert not torch.allclose(logits[0], logits[1])
    assert not torch.allclose(logits[1], logits[2])


def test_kinds() -> None:
    ensembles = {name: build_network(arm(name), DIGITS, [7], "cpu").ensemble(0) for name in MODELS}
    kinds = {name: type(ensemble) for name, ensemble in ensembles.items()}
    assert kinds == {
        **dict.fromkeys(("separate", "dropout", "resnet"), StackedEnsemble),
        **dict.fromkeys(("smoc", "low rank", "resnet smoc"), SMOC),
        **dict.fromkeys(("branch", "resnet branch"), Ensemble),
    }
    assert all(ensembles[name].trunk is not None for name, kind in kinds.items() if kind is Ensemble)


def test_group_sizes_by_network_and_device() -> None:
    names = ("separate", "dropout", "smoc", "branch")
    assert {default_group_size(arm(name).model, 1000, "cpu") for name in names} == {64}
    sizes = [default_group_size(arm("resnet smoc").model, 1000, device) for device in ("cpu", "cuda", "cuda:1")]
    assert sizes == [1, 8, 8]


def test_members_and_a_stack_have_the_same_weights() -> None:
    stacked = build_network(arm("separate"), DIGITS, [7], "cpu").ensemble(0)
    apart = build_network(arm("dropout"), DIGITS, [7], "cpu").ensemble(0)
    for k in range(3):
        ours, theirs = stacked[k].state_dict(), apart[k].state_dict()  # type: ignore[index]
        assert all(value.equal(theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("kind", ["separate", "smoc"])
def test_a_head_can_start_smaller(kind: str) -> None:
    def head(scale: float) -> torch.Tensor:
        model = {"kind": kind, "head_scale": scale, "num_members": 3}
        network = build_network(small(model=model).complete_arms()[0], DIGITS, [7], "cpu")
        ensemble = network.ensemble(0)
        return ensemble.head.weight if kind == "smoc" else ensemble.stacked.fc.weight  # type: ignore[union-attr, return-value]

    torch.testing.assert_close(head(0.25), head(1.0) * 0.25)


def test_float64_on_request() -> None:
    network = build_network(arm("separate", precision="float64"), DIGITS, [7], "cpu")
    assert {p.dtype for p in network.parameters()} == {torch.float64}


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_compiled_networks_compute_the_same() -> None:
    network = build_network(arm("separate"), DIGITS, [7, 8], "cpu")
    network.compile()
    plain = build_network(arm("separate"), DIGITS, [7, 8], "cpu")
    assert network._compiled_call_impl is not None
    x = torch.randn(2, 5, 1, 8, 8)
    ours, theirs = network(x), plain(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for mine, other in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert network.state_dict().keys() == plain.state_dict().keys()


def test_a_train_config_takes_all_settings_of_its_section() -> None:
    values: dict[str, Any] = {
        "steps": 7,
        "batches": "exchanged",
        "optimizer": "sgd",
        "learning_rate": 0.3,
        "momentum": 0.7,
        "nesterov": True,
        "weight_decay": 0.02,
        "schedule": "step",
        "milestones": [2, 4],
        "decay": 0.3,
        "warmup_steps": 1,
        "warmup_learning_rate": 0.05,
        "label_smoothing": 0.1,
        "precision": "bf16",
    }
    train_config = make_train_config(TrainSection(**values, diversity_warmup_epochs=0.5), 10)
    taken = {field.name: getattr(train_config, field.name) for field in fields(TrainConfig)}
    assert taken == {
        **values,
        "milestones": (2, 4),
        "diversity_warmup_steps": 5,
        "detach_others": True,
        "task": "classification",
        "optimizer_arguments": {},
    }
    assert not make_train_config(TrainSection(steps=1, detach_others=False), 10).detach_others


def test_long_trainings_are_compiled_on_a_gpu() -> None:
    cases = [("auto", 64_000, "cuda"), ("auto", 4_680, "cuda"), ("auto", 64_000, "cpu"), (True, 1, "cpu")]
    found = [is_compiled(TrainSection(steps=steps, compile=asked), steps, device) for asked, steps, device in cases]
    assert found == [True, False, False, True]
    assert not is_compiled(TrainSection(steps=64_000, compile=False), 64_000, "cuda")


def test_epochs_are_steps() -> None:
    assert make_train_config(TrainSection(epochs=3), 10).steps == 30
    assert make_train_config(TrainSection(steps=3), 10).steps == 3


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("separate", "MLP 64-4-10"),
        ("smoc", "MLP 64-4-10, kind smoc"),
        ("low rank", "MLP 64-4-10, kind smoc, rank 2"),
        ("branch", "MLP 64-4-10, kind branch, at fc"),
        ("resnet", "ResNet-8 (2 channels)"),
    ],
)
def test_descriptions_of_networks(model: str, words: str) -> None:
    assert describe_network(arm(model).model, DIGITS) == words


def test_networks_that_do_not_fit_into_memory_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchace.lab.training.run_group.available_memory", lambda: 1 << 34)
    (arm,) = small(model={"num_members": 10_000, "hidden": [20_000]}).complete_arms()
    with pytest.raises(ValueError, match=r"16 GiB of available memory, but \d+,\d+,\d+,\d+ parameters take"):
        build_network(arm, load("digits"), [0], "cpu")
