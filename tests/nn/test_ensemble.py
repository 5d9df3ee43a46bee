"""Any members, with and without a shared trunk; predictions of every ensemble module."""

from __future__ import annotations

import copy
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchace.functional import amended_cross_entropy, ensemble_log_probs, ensemble_probs
from torchace.nn import SMOC, Ensemble, MemberParallelEnsemble, StackedEnsemble
from torchace.nn.base import average_shared_gradients

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, a few hundred operations on numbers of order 1


def net(inputs: int = 6, classes: int = 3, width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes))


class CountedBackward(torch.autograd.Function):
    """The identity, which counts how often a gradient passes."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        CountedBackward.count += 1
        return grad


class Counted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CountedBackward.apply(x)


def test_members_are_the_given_modules():
    members = [net(), net(), nn.Linear(6, 3)]
    ensemble = Ensemble(members)
    x = torch.randn(4, 6)
    assert torch.equal(ensemble(x), torch.stack([member(x) for member in members]))
    assert len(ensemble) == ensemble.num_members == 3
    assert list(ensemble) == members
    assert ensemble[2] is members[2]
    assert ensemble[-1] is members[2]
    assert list(ensemble[:2]) == members[:2]


def test_members_receive_all_arguments():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.linear(x + y) * scale

    ensemble = Ensemble([Sum(), Sum()])
    x, y = torch.randn(2, 5, 2)
    assert torch.equal(ensemble(x, y, scale=2.0)[1], ensemble[1](x, y, scale=2.0))


def test_separate_batches():
    ensemble = Ensemble([net(), net(width=9)])
    x = torch.randn(2, 4, 6)
    expected = torch.stack([member(own) for member, own in zip(ensemble, x, strict=True)])
    assert torch.equal(ensemble(x, batches="separate"), expected)


def test_separate_batches_with_a_trunk_compute_it_once():
    calls = []
    trunk = nn.Linear(6, 5)
    trunk.register_forward_hook(lambda *_: calls.append(1))
    ensemble = Ensemble([nn.Linear(5, 3), nn.Linear(5, 3)], trunk)
    x = torch.randn(2, 4, 6)
    out = ensemble(x, batches="separate")
    assert len(calls) == 1
    for k in range(2):
        torch.testing.assert_close(out[k], ensemble[k](trunk(x[k])))


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs: dict[str, Any], y: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs["x"] * inputs["more"][0] - y)


@pytest.mark.parametrize(
    "make",
    [
        Ensemble,
        StackedEnsemble,
        lambda members: Ensemble([nn.Identity(), nn.Identity()], trunk=members[0]),
        lambda members: SMOC(members[0], 3, num_classes=4, num_members=2),
    ],
)
def test_separate_batches_of_several_and_nested_inputs(make):
    ensemble = make([FromDict(), FromDict()])
    x, w, y = torch.randn(3, 2, 4, 6)
    out = ensemble({"x": x, "more": [w]}, y, batches="separate")
    for k in range(2):
        alone = ensemble({"x": x[k], "more": [w[k]]}, y[k])
        torch.testing.assert_close(out[k], alone[k])
    with pytest.raises(ValueError, match=r"shape \(2, N, ...\) with one batch per member.*got \(3, 6\)"):
        ensemble({"x": x, "more": [w]}, torch.zeros(3, 6), batches="separate")


@pytest.mark.parametrize("batches", ["shared", "separate"])
def test_trunk_receives_the_mean_of_the_members_gradients(batches):
    """Against K networks, each with a copy of the trunk, whose gradients are then averaged."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    heads = [nn.Linear(5, 3).double(), net(5).double(), net(5, width=2).double()]
    naive = [(copy.deepcopy(trunk), copy.deepcopy(head)) for head in heads]
    ensemble = Ensemble(heads, trunk)
    x, y = torch.randn(3, 7, 6).double(), torch.randint(3, (7,))
    shared = batches == "shared"
    logits = ensemble(x[0] if shared else x, batches=batches)
    amended_cross_entropy(logits, y, 0.7).backward()
    outputs = torch.stack([head(own(x[0] if shared else x[k])) for k, (own, head) in enumerate(naive)])
    amended_cross_entropy(outputs, y, 0.7).backward()

    torch.testing.assert_close(logits, outputs, **EXACT)
    for head, (_, alone) in zip(heads, naive, strict=True):
        for ours, theirs in zip(head.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    for i, ours in enumerate(trunk.parameters()):
        mean = torch.stack([list(own.parameters())[i].grad for own, _ in naive]).mean(0)
        torch.testing.assert_close(ours.grad, mean, **EXACT)


@pytest.mark.parametrize("num_members", [1, 3])
@pytest.mark.parametrize("kind", ["ensemble", "smoc", "low rank"])
def test_trunk_runs_once_forward_and_backward(kind, num_members):
    passes = []
    trunk = nn.Sequential(nn.Linear(6, 5), Counted(), nn.ReLU())
    trunk[0].register_forward_hook(lambda *_: passes.append(1))
    if kind == "ensemble":
        ensemble = Ensemble([nn.Linear(5, 3) for _ in range(num_members)], trunk)
    else:
        ensemble = SMOC(trunk, 5, 3, num_members, rank=2 if kind == "low rank" else None)
    CountedBackward.count = 0
    amended_cross_entropy(ensemble(torch.randn(4, 6)), torch.zeros(4, dtype=torch.long), 0.5).backward()
    assert CountedBackward.count == 1
    assert len(passes) == 1


class Mapping(dict):
    """As transformers' outputs are: a dict whose values are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


@pytest.mark.parametrize("container", ["tuple", "named", "list", "dict", "nested", "mapping"])
def test_gradients_are_averaged_in_every_container(container):
    pair = namedtuple("pair", "left right")
    make = {
        "tuple": lambda a, b: (a, b),
        "named": pair,
        "list": lambda a, b: [a, b],
        "dict": lambda a, b: {"left": a, "right": b},
        "nested": lambda a, b: {"left": (a, [b])},
        "mapping": lambda a, b: Mapping(left=a, right=b),
    }[container]
    a, b = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    values = make(a, b)
    shared = average_shared_gradients(values, 4)
    assert type(shared) is type(values)

    def leaves(value):
        if isinstance(value, Tensor):
            return [value]
        if isinstance(value, Mapping):
            return [value.left, value.right]
        inner = value.values() if isinstance(value, dict) else value
        return [leaf for item in inner for leaf in leaves(item)]

    sum(leaf.sum() for leaf in leaves(shared)).backward()
    assert torch.equal(a.grad, torch.full((2,), 0.25))
    assert torch.equal(b.grad, torch.full((2,), 0.25))


def test_other_values_pass_a_trunk_unchanged():
    mask = torch.tensor([True, False])
    shared = average_shared_gradients({"mask": mask, "name": "a", "none": None}, 3)
    assert shared["mask"] is mask
    assert shared["name"] == "a"
    assert shared["none"] is None


def test_a_trunk_whose_output_is_unknown_is_refused():
    class Packed:
        def __init__(self, features):
            self.features = features

    class Trunk(nn.Module):
        def __init__(self, pack):
            super().__init__()
            self.linear, self.pack = nn.Linear(6, 6), pack

        def forward(self, x):
            return self.pack(self.linear(x))

    class Unpack(nn.Module):
        def forward(self, packed):
            return packed.features

    for pack in (Packed, lambda x: {"deep": [Packed(x)]}, lambda x: (x, {1: SimpleNamespace(x=x)}), lambda x: {x}):
        ensemble = Ensemble([Unpack(), Unpack()], trunk=Trunk(pack))
        with pytest.raises(TypeError, match=r"tuple, list or dict of tensors.* got (Packed|SimpleNamespace|set)"):
            ensemble(torch.zeros(4, 6))
    constant = {"n": 3, "flag": True, "rate": 0.5, "none": None, "array": np.ones(2), "dtype": torch.float32}
    assert list(average_shared_gradients(constant, 3).values())[:4] == [3, True, 0.5, None]


# What members share


def with_shared_layer(layer: nn.Module, count: int = 4) -> list[nn.Module]:
    return [nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 3)) for _ in range(count)]


@pytest.mark.parametrize("make", [Ensemble, StackedEnsemble, MemberParallelEnsemble])
def test_shared_trained_parameters_are_refused(make):
    layer = nn.Linear(8, 8)
    other = nn.Linear(8, 8)
    other.weight = nn.Parameter(layer.weight.data)  # another parameter in the same memory
    one = nn.Linear(8, 3)
    for members in (with_shared_layer(layer), [nn.Sequential(layer), nn.Sequential(other)], [one, one]):
        with pytest.raises(ValueError, match=r"weight' of member 1, the same tensor in member 0.*trunk=.*branch"):
            make(members)


def test_a_trunk_that_shares_with_a_member_is_refused():
    trunk, head = nn.Linear(8, 8), nn.Linear(8, 8)
    head.weight = trunk.weight
    with pytest.raises(ValueError, match="'weight' of member 1, the same tensor in the trunk"):
        Ensemble([nn.Linear(8, 8), head], trunk=trunk)


@pytest.mark.parametrize("make", [Ensemble, StackedEnsemble])
def test_frozen_layers_may_be_shared(make):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False).eval()
    members = with_shared_layer(layer)
    ensemble, x = make(members), torch.randn(5, 8)
    expected = torch.stack([copy.deepcopy(member)(x) for member in members])
    torch.testing.assert_close(ensemble(x), expected)
    ensemble(x).square().sum().backward()
    assert sum(p.grad is not None for p in ensemble.parameters()) == (8 if make is Ensemble else 2)


def test_shared_tensors_must_stay_constant():
    """Unfrozen later, or statistics that every member would update."""
    ensemble, x = Ensemble(with_shared_layer(nn.BatchNorm1d(8).requires_grad_(False))), torch.randn(5, 8)
    with pytest.raises(ValueError, match=r"of member 1.* changed in the forward.*layer.eval\(\)"):
        ensemble(x)
    ensemble.eval()
    assert torch.equal(copy.deepcopy(ensemble)(x), ensemble(x))
    ensemble.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0.weight' of member 1, the same tensor in member 0"):
        ensemble(x)


def test_deepcopy_and_state_dict():
    ensemble = Ensemble([net(), nn.Linear(6, 3)], trunk=nn.Linear(6, 6))
    x = torch.randn(4, 6)
    other = copy.deepcopy(ensemble)
    assert torch.equal(other(x), ensemble(x))
    with torch.no_grad():
        next(other.parameters()).add_(1)
    assert not torch.equal(other(x), ensemble(x))
    other.load_state_dict(ensemble.state_dict())
    assert torch.equal(other(x), ensemble(x))


def test_errors():
    with pytest.raises(ValueError, match="at least one member"):
        Ensemble([])
    with pytest.raises(TypeError, match=r"got one Sequential. Write \[member\]"):
        Ensemble(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))  # its layers are no members
    with pytest.raises(TypeError, match="member 1 is function"):
        Ensemble([net(), lambda x: x])
    with pytest.raises(ValueError, match="`link` to be one of"):
        Ensemble([net()], link="logit")
    with pytest.raises(ValueError, match=r"Member 1 returned shape \(4, 2\), but member 0 returned \(4, 3\)"):
        Ensemble([net(), net(classes=2)])(torch.zeros(4, 6))
    with pytest.raises(ValueError, match="`batches` to be one of"):
        Ensemble([net()])(torch.zeros(4, 6), batches="own")
    with pytest.raises(ValueError, match=r"\(2, N, ...\) with one batch per member .* got \(3, 4, 6\)"):
        Ensemble([net(), net()])(torch.zeros(3, 4, 6), batches="separate")

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="Member 0 returned tuple"):
        Ensemble([Pair()])(torch.zeros(4, 6))
    with pytest.raises(TypeError, match="trunk to return one tensor"):
        Ensemble([net()], trunk=Pair())(torch.zeros(1, 4, 6), batches="separate")


# Predictions, for every kind of ensemble


def with_dropout_and_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def ensembles(link: str) -> dict[str, nn.Module]:
    members = [with_dropout_and_norm() for _ in range(3)]
    return {
        "ensemble": Ensemble(copy.deepcopy(members), link=link),
        "trunk": Ensemble([net(8) for _ in range(3)], trunk=with_dropout_and_norm()[:-1], link=link),
        "stacked": StackedEnsemble(members, link=link),
        "smoc": SMOC(with_dropout_and_norm()[:-1], 8, 3, num_members=3, link=link),
        "low rank": SMOC(with_dropout_and_norm()[:-1], 8, 3, num_members=3, rank=1, link=link),
    }


KINDS = ["ensemble", "trunk", "stacked", "smoc", "low rank"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
def test_predictions(kind, link):
    torch.manual_seed(0)
    ensemble = ensembles(link)[kind]
    x = torch.randn(9, 6)
    ensemble(x)  # statistics of a batch, so that evaluation differs from the start
    alpha = torch.tensor([0.2, 0.0, 0.8])
    before = {name: value.clone() for name, value in ensemble.state_dict().items()}
    ensemble.train()
    layer = next(module for module in ensemble.modules() if isinstance(module, nn.Dropout))
    layer.eval()  # a mode of its own
    modes = [module.training for module in ensemble.modules()]
    logits = copy.deepcopy(ensemble).eval()(x).detach()

    for weights in (None, alpha):
        if link == "identity":
            predicted = ensemble.predict(x, member_weights=weights)
            assert torch.equal(predicted, ensemble_probs(logits, member_weights=weights, link="identity"))
            for method in (ensemble.predict_proba, ensemble.predict_log_proba):
                with pytest.raises(ValueError, match=r"no probabilities .* use predict"):
                    method(x)
        else:
            log_probs = ensemble.predict_log_proba(x, member_weights=weights)
            probs = ensemble.predict_proba(x, member_weights=weights)
            predicted = ensemble.predict(x, member_weights=weights)
            assert torch.equal(log_probs, ensemble_log_probs(logits, member_weights=weights, link=link))
            torch.testing.assert_close(probs, ensemble_probs(logits, member_weights=weights, link=link))
            assert torch.equal(predicted, probs.argmax(1) if link == "softmax" else (probs > 0.5).long())
            assert predicted.dtype is torch.int64
        assert not predicted.requires_grad
        assert predicted.grad_fn is None

    assert [module.training for module in ensemble.modules()] == modes
    for name, value in ensemble.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_mode_is_restored_after_an_error():
    ensemble = Ensemble([with_dropout_and_norm()])
    with pytest.raises(RuntimeError):
        ensemble.predict(torch.zeros(2, 5))
    assert all(module.training for module in ensemble.modules())
    assert torch.is_grad_enabled()


def test_predictions_pass_arguments_on():
    ensemble = StackedEnsemble([net(), net()])
    x = torch.randn(2, 4, 6)
    logits = torch.stack([member(own) for member, own in zip(ensemble, x, strict=True)])
    torch.testing.assert_close(ensemble.predict_log_proba(x, batches="separate"), ensemble_log_probs(logits).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_set_member_weights(kind):
    ensemble = ensembles("softmax")[kind].eval()
    x = torch.randn(5, 6)
    uniform = ensemble.predict_proba(x)
    ensemble.set_member_weights([0.0, 0.0, 1.0])
    torch.testing.assert_close(ensemble.predict_proba(x), ensemble(x)[2].softmax(1).detach())
    # a call's own weights win over those set
    torch.testing.assert_close(ensemble.predict_proba(x, member_weights=torch.full((3,), 1 / 3)), uniform)
    assert torch.equal(copy.deepcopy(ensemble).predict_proba(x), ensemble.predict_proba(x))
    doubled = copy.deepcopy(ensemble).double()
    assert doubled.member_weights.dtype is torch.float64
    torch.testing.assert_close(doubled.predict_proba(x.double()).float(), ensemble.predict_proba(x))
    ensemble.set_member_weights(None)
    assert torch.equal(ensemble.predict_proba(x), uniform)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_keeps_member_weights(kind):
    weighted, uniform = ensembles("softmax")[kind].eval(), ensembles("softmax")[kind].eval()
    plain = uniform.state_dict()
    weighted.set_member_weights([0.2, 0.3, 0.5])
    saved = weighted.state_dict()
    assert saved["member_weights"].tolist() == pytest.approx([0.2, 0.3, 0.5])
    uniform.load_state_dict(saved)
    x = torch.randn(5, 6)
    assert torch.equal(uniform.predict_proba(x), weighted.predict_proba(x))
    uniform.load_state_dict(plain)
    assert uniform.member_weights is None
    with pytest.raises(RuntimeError, match="member_weights"):
        uniform.load_state_dict({**plain, "member_weights": torch.ones(2) / 2})


def test_set_member_weights_detaches_and_checks():
    ensemble = Ensemble([net(), net()])
    free = torch.zeros(2, requires_grad=True)
    ensemble.set_member_weights(free.softmax(0))
    assert not ensemble.member_weights.requires_grad
    with pytest.raises(ValueError, match="sum to 1"):
        ensemble.set_member_weights([0.5, 0.6])
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        ensemble.set_member_weights(torch.ones(3) / 3)
    with pytest.raises(ValueError, match="non-negative"):
        ensemble.set_member_weights([1.5, -0.5])


def test_dense_predictions():
    ensemble = Ensemble([nn.Conv2d(1, 3, 1) for _ in range(2)])
    x = torch.randn(4, 1, 5, 6)
    assert ensemble(x).shape == (2, 4, 3, 5, 6)
    assert ensemble.predict_proba(x).shape == (4, 3, 5, 6)
    assert ensemble.predict(x).shape == (4, 5, 6)
    torch.testing.assert_close(ensemble.predict_proba(x).sum(1), torch.ones(4, 5, 6))
