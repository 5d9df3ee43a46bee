"""Optimizers that treat every number alike train stacked members; others are refused before they move anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torchace.nn import Ensemble, StackedEnsemble
from torchace.nn.optimizers import check_elementwise


def stacked() -> StackedEnsemble:
    ensemble = StackedEnsemble([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
    ensemble(torch.randn(5, 4)).square().sum().backward()
    return ensemble


ELEMENTWISE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with everything": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
    ),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p),
    "AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW with a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name):
    ensemble = stacked()
    before = [p.detach().clone() for p in ensemble.parameters()]
    optimizer = ELEMENTWISE[name](ensemble.parameters())
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, ensemble.parameters(), strict=True))


class Lamb(Optimizer):
    """One of the kind that scales a step by the norm of a whole parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


class Unknown(Optimizer):
    """It asks for an argument that its defaults do not tell."""

    def __init__(self, params, horizon):
        super().__init__(params, {})
        self.horizon = horizon

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / self.horizon)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Lamb", "Muon"])
def test_others_are_refused_before_they_move_anything(name):
    ensemble = stacked()
    before = [p.detach().clone() for p in ensemble.parameters()]
    parameters = list(ensemble.parameters())
    if name == "Muon":  # refuses three axes itself; stacked biases look like matrices to it
        parameters = [p for p in parameters if p.ndim == 2]
    kind = Lamb if name == "Lamb" else getattr(torch.optim, name)
    optimizer = kind(parameters)
    for _ in range(2):  # not only the first time
        with pytest.raises(ValueError, match=rf"{name} .*mix the members.*Ensemble\(members\)"):
            optimizer.step(lambda: torch.zeros(()))
    assert all(torch.equal(a, b) for a, b in zip(before, ensemble.parameters(), strict=True))


def test_what_cannot_be_tried_is_let_through():
    ensemble = stacked()
    Unknown(ensemble.parameters(), horizon=10).step()


def test_plain_members_may_use_any_optimizer():
    stacked()  # the watch is on
    ensemble = Ensemble([nn.Linear(4, 4) for _ in range(2)])
    ensemble(torch.randn(5, 4)).square().sum().backward()
    torch.optim.Adafactor(ensemble.parameters()).step()
    torch.optim.Muon([p for p in ensemble.parameters() if p.ndim == 2]).step()


def test_parameters_added_later_are_checked():
    ensemble = stacked()
    plain = nn.Parameter(torch.ones(3, 3))
    plain.grad = torch.ones(3, 3)
    optimizer = torch.optim.Adafactor([plain])
    optimizer.step()
    optimizer.add_param_group({"params": list(ensemble.parameters())})
    with pytest.raises(ValueError, match="Adafactor"):
        optimizer.step()


def test_an_empty_group_is_no_obstacle():
    ensemble = stacked()
    torch.optim.SGD([{"params": []}, {"params": list(ensemble.parameters())}], lr=0.1).step()


def test_each_optimizer_is_tried_once(monkeypatch):
    from torchace.nn import optimizers

    tried = []
    monkeypatch.setattr(optimizers, "check_elementwise", tried.append)
    ensemble = stacked()
    optimizer = torch.optim.Adam(ensemble.parameters())
    for _ in range(3):
        optimizer.step()
    assert tried == [optimizer]


def test_the_check_changes_neither_random_numbers_nor_state():
    optimizer = torch.optim.Adam(stacked().parameters())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    check_elementwise(optimizer)
    assert torch.equal(torch.rand(3), expected)
    assert not optimizer.state
