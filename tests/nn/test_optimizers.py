"""Known elementwise optimizers train stacked members; others are refused before their first update."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torchace.nn import SMOC, Ensemble, StackedEnsemble, allow_optimizer, branch, stack_classifiers
from torchace.nn.optimizers import check_elementwise


@pytest.fixture(autouse=True)
def held():
    """Ensembles of which a test holds the parameters alone: modules are watched as long as they live."""
    HELD.clear()


HELD: list[StackedEnsemble] = []


def make_stacked() -> StackedEnsemble:
    ensemble = StackedEnsemble([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
    ensemble(torch.randn(5, 4)).square().sum().backward()
    HELD.append(ensemble)
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
def test_elementwise_optimizers_pass(name):
    ensemble = make_stacked()
    before = [p.detach().clone() for p in ensemble.parameters()]
    optimizer = ELEMENTWISE[name](ensemble.parameters())
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, ensemble.parameters(), strict=True))


MUON = ["Muon"] if hasattr(torch.optim, "Muon") else []  # since torch 2.9


class Lamb(Optimizer):
    """Scales a step by the norm of a whole parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


class ClippedAdam(torch.optim.Adam):
    """Clips the norm of all gradients before it steps."""

    @torch.no_grad()
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


def assert_refused(optimizer) -> None:
    """The optimizer is refused, each time, before it moves anything."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    for _ in range(2):
        with pytest.raises(ValueError, match=r".*mix the members.*Ensemble\(members\).*allow_optimizer"):
            optimizer.step(lambda: torch.zeros(()))
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Lamb", *MUON, "ClippedAdam"])
def test_mixing_optimizers_are_refused_before_their_first_step(name):
    parameters = list(make_stacked().parameters())
    if name == "Muon":  # refuses three axes itself; stacked biases look like matrices to it
        parameters = [p for p in parameters if p.ndim == 2]
    kinds = {"Lamb": Lamb, "ClippedAdam": ClippedAdam}
    assert_refused((kinds.get(name) or getattr(torch.optim, name))(parameters))


MIXING = (
    "muon adamuon nmuon lamb lambc lookahead_lamb cadamw clion larc lars csgdp cmars novograd kron adafactorbv sgdp"
)
SEPARATE = "adamwlegacy lion nadamw adan adopt laprop madgrad sgdw rmsproptf lookahead_adam"


@pytest.mark.extended
@pytest.mark.parametrize("name", MIXING.split())
def test_optimizers_of_timm_that_mix_members_are_refused(name):
    timm_optim = pytest.importorskip("timm.optim")
    with pytest.warns(UserWarning, match="opt_einsum") if name == "kron" else contextlib.nullcontext():
        optimizer = timm_optim.create_optimizer_v2(make_stacked().parameters(), name, lr=0.01, weight_decay=0.05)
    assert_refused(optimizer)


@pytest.mark.extended
@pytest.mark.parametrize("name", SEPARATE.split())
def test_optimizers_of_timm_that_are_elementwise_pass(name):
    timm_optim = pytest.importorskip("timm.optim")
    ensemble = make_stacked()
    before = copy.deepcopy(ensemble.state_dict())
    optimizer = timm_optim.create_optimizer_v2(ensemble.parameters(), name, lr=0.01, weight_decay=0.05)
    check_elementwise(optimizer)
    for _ in range(2):  # Adopt's first step moves nothing
        optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in ensemble.state_dict().items())


@pytest.mark.extended
def test_options_are_read_from_the_groups():
    timm_optim = pytest.importorskip("timm.optim")
    matrices = [p for p in make_stacked().parameters() if p.ndim == 3]
    biases = [p for p in make_stacked().parameters() if p.ndim == 2]
    assert_refused(timm_optim.Lion([{"params": matrices}, {"params": biases, "caution": True}]))


class SignSGD(torch.optim.SGD):
    """Elementwise, but unknown."""


def test_unknown_optimizers_need_allow_optimizer():
    optimizer = SignSGD(make_stacked().parameters(), 0.1)
    assert_refused(optimizer)
    with pytest.raises(TypeError, match=r"allow_optimizer\(type\(optimizer\)\)"):
        allow_optimizer(optimizer)
    allow_optimizer(SignSGD)
    optimizer.step()
    assert_refused(type("MoreSignSGD", (SignSGD,), {})(make_stacked().parameters(), 0.1))


def heads():
    trunk = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    smoc = SMOC(trunk, 4, num_classes=4, num_members=3)
    low_rank = SMOC(trunk, 4, num_classes=4, num_members=3, rank=2)
    host = stack_classifiers(nn.Sequential(trunk, nn.Linear(4, 4)), 3)
    nested = branch(nn.Sequential(trunk, StackedLinearSum()), 2, at="1")
    return {"smoc": smoc, "low rank": low_rank, "host": host, "copy": copy.deepcopy(smoc), "branched": nested}


class StackedLinearSum(nn.Module):
    """A member that holds stacked parameters itself."""

    def __init__(self):
        super().__init__()
        self.head = SMOC(nn.Identity(), 4, num_classes=4, num_members=3)

    def forward(self, x):
        return self.head(x).sum(0)


@pytest.mark.parametrize("name", ["smoc", "low rank", "host", "copy", "branched"])
def test_heads_are_checked_and_shared_parameters_are_not(name):
    ensemble = heads()[name]
    ensemble(torch.randn(5, 4)).square().sum().backward()
    assert_refused(torch.optim.Adafactor(ensemble.parameters()))
    axis = [p for p in ensemble.parameters() if p.ndim == 3 or p.shape == (3, 4)]
    shared = [p for p in ensemble.parameters() if not any(p is other for other in axis)]
    assert len(axis) >= 2
    assert len(shared) >= 2
    assert_refused(torch.optim.Adafactor(axis[:1]))
    torch.optim.Adafactor(shared).step()


def test_plain_members_may_use_any_optimizer():
    make_stacked()  # the watch is on
    ensemble = Ensemble([nn.Linear(4, 4) for _ in range(2)])
    ensemble(torch.randn(5, 4)).square().sum().backward()
    torch.optim.Adafactor(ensemble.parameters()).step()
    for name in MUON:
        getattr(torch.optim, name)([p for p in ensemble.parameters() if p.ndim == 2]).step()


def test_parameters_added_later_are_checked():
    ensemble = make_stacked()
    plain = nn.Parameter(torch.ones(3, 3))
    plain.grad = torch.ones(3, 3)
    optimizer = torch.optim.Adafactor([plain])
    optimizer.step()
    optimizer.add_param_group({"params": list(ensemble.parameters())})
    assert_refused(optimizer)
