"""Members with their own learning rates train as they do alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, RAdam, RMSprop

from torchace import set_member_rates
from torchace.nn import SMOC, Ensemble, StackedEnsemble

RATES = [0.05, 0.002, 0.0007, 0.01]
DECAYS = [0.0, 0.3, 0.1, 1.0]
STEPS = 20
# rounding of float64 over 20 steps; weights are of order 1
TOLERANCE = 1e-12

OPTIMIZERS = {
    "SGD": lambda p, **o: SGD(p, **o),
    "momentum": lambda p, **o: SGD(p, momentum=0.9, dampening=0.1, **o),
    "Nesterov": lambda p, **o: SGD(p, momentum=0.9, nesterov=True, **o),
    "SGD, maximize": lambda p, **o: SGD(p, momentum=0.9, maximize=True, **o),
    "fused SGD": lambda p, **o: SGD(p, momentum=0.9, fused=True, **o),
    "Adam": lambda p, **o: Adam(p, **o),
    "Adam, decoupled": lambda p, **o: Adam(p, decoupled_weight_decay=True, **o),
    "Adam, tensor rate": lambda p, lr, **o: Adam(p, lr=torch.tensor(lr, dtype=torch.float64), **o),
    "fused Adam": lambda p, **o: Adam(p, fused=True, **o),
    "AMSGrad": lambda p, **o: Adam(p, amsgrad=True, **o),
    "AdamW": lambda p, **o: AdamW(p, **o),
    "foreach AdamW": lambda p, **o: AdamW(p, foreach=True, amsgrad=True, **o),
    "AdamW, maximize": lambda p, **o: AdamW(p, maximize=True, **o),
    "NAdam": lambda p, **o: NAdam(p, **o),
    "NAdam, decoupled": lambda p, **o: NAdam(p, decoupled_weight_decay=True, **o),
    "RAdam": lambda p, **o: RAdam(p, **o),
    "RAdam, decoupled": lambda p, **o: RAdam(p, decoupled_weight_decay=True, **o),
    "RMSprop": lambda p, **o: RMSprop(p, momentum=0.9, centered=True, **o),
}


def make_members() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(len(RATES))
    ]


def batches(count: int = STEPS, seed: int = 1) -> list[Tensor]:
    return list(torch.randn(count, 8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def train(network: nn.Module, optimizer, inputs: list[Tensor], scheduler=None) -> None:
    for x in inputs:
        optimizer.zero_grad()
        output = network(x)
        loss = (output - x.sum(1, keepdim=True).sin()).square().mean((-2, -1)).sum()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_equal(stacked: StackedEnsemble, members: list[nn.Module], starts: list[nn.Module]) -> None:
    for one, other, start in zip(stacked, members, starts, strict=True):
        for a, b, c in zip(one.parameters(), other.parameters(), start.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE * (1 + b.abs().max().item()))
            assert not torch.equal(a, c)


@pytest.mark.parametrize("given", ["both", "learning_rate", "weight_decay"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_members_move_as_they_do_alone(name, given):
    make, members = OPTIMIZERS[name], make_members()
    starts = copy.deepcopy(members)
    ensemble = StackedEnsemble(members)
    optimizer = make(ensemble.parameters(), lr=0.003, weight_decay=0.2)
    rates = None if given == "weight_decay" else RATES
    decays = None if given == "learning_rate" else DECAYS
    set_member_rates(optimizer, ensemble, learning_rate=rates, weight_decay=decays)
    train(ensemble, optimizer, batches())
    for k, member in enumerate(members):
        own = {"lr": rates[k] if rates else 0.003, "weight_decay": decays[k] if decays else 0.2}
        train(member, make(member.parameters(), **own), batches())
    assert_equal(ensemble, members, starts)
    assert float(optimizer.param_groups[0]["lr"]) == 0.003
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


SCHEDULERS = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
    "warm-up from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 5)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
}


@pytest.mark.parametrize("first", ["scheduler", "rates"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_follow_a_scheduler(name, first):
    members = make_members()
    starts = copy.deepcopy(members)
    ensemble = StackedEnsemble(members)
    optimizer = AdamW(ensemble.parameters(), lr=0.001)
    if first == "rates":
        set_member_rates(optimizer, ensemble, learning_rate=RATES, weight_decay=DECAYS)
    scheduler = SCHEDULERS[name](optimizer)
    if first == "scheduler":
        set_member_rates(optimizer, ensemble, learning_rate=RATES, weight_decay=DECAYS)
    train(ensemble, optimizer, batches(), scheduler)
    for member, rate, decay in zip(members, RATES, DECAYS, strict=True):
        alone = AdamW(member.parameters(), lr=rate, weight_decay=decay)
        train(member, alone, batches(), SCHEDULERS[name](alone))
    assert_equal(ensemble, members, starts)


def test_training_continues_from_a_state_dict():
    expected = StackedEnsemble(make_members())
    ensemble = copy.deepcopy(expected)
    results = []
    for network, interrupted in ((expected, False), (ensemble, True)):
        optimizer = Adam(network.parameter_groups(0.1), lr=0.003)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        set_member_rates(optimizer, network, learning_rate=RATES, weight_decay=DECAYS)
        train(network, optimizer, batches(10), scheduler)
        if interrupted:
            saved, steps = copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()
            optimizer = Adam(network.parameter_groups(0.1), lr=0.003)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
            optimizer.load_state_dict(saved)
            scheduler.load_state_dict(steps)
            set_member_rates(optimizer, network, learning_rate=RATES, weight_decay=DECAYS)
        train(network, optimizer, batches(10, seed=2), scheduler)
        results.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_groups_without_decay_stay_without_it_unless_all_are(weight_decay):
    members = make_members()
    starts = copy.deepcopy(members)
    ensemble = StackedEnsemble(members)
    optimizer = SGD(ensemble.parameter_groups(weight_decay), lr=0.01, momentum=0.9)
    set_member_rates(optimizer, ensemble, learning_rate=RATES, weight_decay=DECAYS)
    train(ensemble, optimizer, batches())
    for member, rate, decay in zip(members, RATES, DECAYS, strict=True):
        groups = [
            {"params": [p for p in member.parameters() if p.ndim == 2], "weight_decay": decay},
            {"params": [p for p in member.parameters() if p.ndim == 1], "weight_decay": 0.0 if weight_decay else decay},
        ]
        train(member, SGD(groups, lr=rate, momentum=0.9), batches())
    assert_equal(ensemble, members, starts)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("factor", [1.0, 0.01])  # the group's rate may be the largest of all
def test_shared_values_are_those_of_the_group(kind, rank, factor):
    torch.manual_seed(0)
    smoc = SMOC(nn.Linear(5, 6), 6, num_classes=3, num_members=len(RATES), rank=rank).double()
    stacked = [p for p in smoc.head.parameters() if p.shape[0] == len(RATES)]
    shared = [p for p in smoc.parameters() if p.shape[0] != len(RATES)]
    assert len(stacked) == 2
    own_rates = [rate * factor for rate in RATES]
    groups = [
        ([nn.Parameter(p.detach()[k].clone()) for p in stacked], {"lr": rate, "weight_decay": decay})
        for k, (rate, decay) in enumerate(zip(own_rates, DECAYS, strict=True))
    ]
    groups.append(([nn.Parameter(p.detach().clone()) for p in shared], {"lr": 0.004, "weight_decay": 0.1}))
    optimizer = kind(smoc.parameters(), lr=0.004, weight_decay=0.1)
    set_member_rates(optimizer, smoc, learning_rate=own_rates, weight_decay=DECAYS)
    optimizers = [optimizer, *(kind(parameters, **options) for parameters, options in groups)]
    for step in range(STEPS):
        for one in optimizers:
            for p in one.param_groups[0]["params"]:
                p.grad = torch.sin(p.detach() * 3 + step)
            one.step()
    for k, (parameters, _) in enumerate(groups[:-1]):
        for p, alone in zip(stacked, parameters, strict=True):
            torch.testing.assert_close(p[k], alone, rtol=0, atol=TOLERANCE)
    for p, alone in zip(shared, groups[-1][0], strict=True):
        torch.testing.assert_close(p, alone, rtol=0, atol=TOLERANCE)


def test_a_closure_computes_the_gradients_that_are_used():
    results = []
    for with_closure in (False, True):
        ensemble = StackedEnsemble(make_members())
        optimizer = Adam(ensemble.parameters(), lr=0.01)
        set_member_rates(optimizer, ensemble, learning_rate=RATES, weight_decay=DECAYS)
        for x in batches(3):

            def closure(x=x, ensemble=ensemble, optimizer=optimizer):
                optimizer.zero_grad()
                loss = ensemble(x).square().sum()
                loss.backward()
                return loss

            if with_closure:
                assert optimizer.step(closure).item() > 0
            else:
                closure()
                optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in ensemble.parameters()]))
    assert torch.equal(*results)


def test_gradients_and_members_with_the_largest_rate_are_exactly_as_without():
    ensemble = StackedEnsemble(make_members())
    plain = copy.deepcopy(ensemble)
    optimizers = [SGD(network.parameters(), lr=0.1, momentum=0.9) for network in (ensemble, plain)]
    set_member_rates(optimizers[0], ensemble, learning_rate=[0.1, 0.0, 0.1, 0.01], weight_decay=[0.0, 1.0, 0.0, 0.0])
    frozen = ensemble.stacked[0].weight[1].detach().clone()
    for network, optimizer in zip((ensemble, plain), optimizers, strict=True):
        train(network, optimizer, batches(3))
    for a, b in zip(ensemble.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a[::2], b[::2])
        assert torch.equal(a.grad[::2], b.grad[::2])
    assert torch.equal(ensemble.stacked[0].weight[1], frozen)
    assert not torch.equal(plain.stacked[0].weight[1], frozen)


def test_values_are_replaced_and_removed():
    ensemble = StackedEnsemble(make_members())
    plain = copy.deepcopy(ensemble)
    optimizers = [Adam(network.parameters(), lr=0.1) for network in (ensemble, plain)]
    set_member_rates(optimizers[0], ensemble, learning_rate=RATES)
    set_member_rates(optimizers[0], ensemble, learning_rate=[0.1] * 4)
    for network, optimizer in zip((ensemble, plain), optimizers, strict=True):
        train(network, optimizer, batches(3))
    assert torch.equal(ensemble.stacked[0].weight, plain.stacked[0].weight)
    set_member_rates(optimizers[0], ensemble, weight_decay=DECAYS)
    set_member_rates(optimizers[0], ensemble)
    for network, optimizer in zip((ensemble, plain), optimizers, strict=True):
        train(network, optimizer, batches(3))
    assert torch.equal(ensemble.stacked[0].weight, plain.stacked[0].weight)


def test_a_step_that_fails_leaves_the_groups_usable():
    ensemble = StackedEnsemble(make_members())
    optimizer = SGD(ensemble.parameters(), lr=0.1, weight_decay=0.5)
    set_member_rates(optimizer, ensemble, learning_rate=RATES, weight_decay=DECAYS)
    weight = ensemble.stacked[0].weight
    ensemble(batches(1)[0]).sum().backward()
    good = weight.grad
    weight.grad = good.to_sparse()
    with pytest.raises((RuntimeError, TypeError)):
        optimizer.step()
    weight.grad = good
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert weight.grad is good


def test_bfloat16_keeps_the_rates():
    ensemble = StackedEnsemble(make_members()).bfloat16()
    optimizer = SGD(ensemble.parameters(), lr=1.0)
    set_member_rates(optimizer, ensemble, learning_rate=[1.0, 0.5, 0.25, 0.0], weight_decay=[0.0] * 4)
    weight = ensemble.stacked[0].weight
    weight.data.zero_()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight[:, 0, 0].tolist() == [-1.0, -0.5, -0.25, 0.0]


BAD = {
    "ASGD": (
        lambda e: torch.optim.ASGD(e.parameters()),
        {},
        TypeError,
        "but got ASGD, whose steps may not be proportional",
    ),
    "subclass": (lambda e: type("Mine", (SGD,), {})(e.parameters()), {}, TypeError, "but got Mine"),
    "others": (lambda e: SGD([nn.Parameter(torch.ones(3))]), {}, ValueError, "holds none of StackedEnsemble"),
    "three": (
        None,
        {"learning_rate": [0.1] * 3},
        ValueError,
        "Expected 4 finite values of at least 0 in `learning_rate`",
    ),
    "number": (None, {"weight_decay": 0.1}, ValueError, "Expected 4 finite values .* in `weight_decay`, but got 0.1"),
    "negative": (None, {"weight_decay": [0.1, 0, 0, -1]}, ValueError, "finite values of at least 0 in `weight_decay`"),
    "nan": (None, {"learning_rate": [0.1, 0, 0, float("nan")]}, ValueError, "finite values of at least 0"),
    "zeros": (None, {"learning_rate": [0.0] * 4}, ValueError, "above 0 for at least one member"),
    "no rate": (lambda e: SGD(e.parameters(), lr=0.0), {}, ValueError, "one learning rate above 0 in all"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name):
    make, values, error, message = BAD[name]
    ensemble = StackedEnsemble(make_members())
    optimizer = SGD(ensemble.parameters(), lr=0.1) if make is None else make(ensemble)
    with pytest.raises(error, match=message):
        set_member_rates(optimizer, ensemble, **(values or {"learning_rate": RATES}))


def test_ensembles_and_groups_that_cannot_have_rates_are_refused():
    plain = Ensemble(make_members())
    with pytest.raises(ValueError, match=r"none of Ensemble.*one group per member"):
        set_member_rates(SGD(plain.parameters()), plain, learning_rate=RATES)
    ensemble, other = StackedEnsemble(make_members()), StackedEnsemble(make_members())
    first, *rest = ensemble.parameters()
    optimizer = SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.1)
    with pytest.raises(ValueError, match=r"one learning rate above 0 in all .* but got \[0.2, 0.1\]"):
        set_member_rates(optimizer, ensemble, learning_rate=RATES)
    optimizer = SGD([*ensemble.parameters(), *other.parameters()])
    set_member_rates(optimizer, ensemble, learning_rate=RATES)
    with pytest.raises(ValueError, match="another ensemble"):
        set_member_rates(optimizer, other, learning_rate=RATES)
    ensemble(batches(1)[0]).sum().backward()
    optimizer.found_inf = torch.zeros(())  # what GradScaler gives a fused optimizer
    with pytest.raises(ValueError, match="without GradScaler"):
        optimizer.step()
