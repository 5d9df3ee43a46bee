"""Stacked members with BatchNorm updates, checkpointing and weight norm."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

from tests.nn.test_stacked import assert_same_gradients, assert_same_state
from tests.support.processes import team
from torchace.functional import amended_cross_entropy
from torchace.nn import Ensemble, MemberParallelEnsemble, StackedEnsemble, adapt
from torchace.nn import stacked as stacked_module
from torchace.nn.stacked_state import named_tensors
from torchace.nn.stacking import MemberRNG, run_stacked_in_graph

K, N, CLASSES = 3, 8, 4
EXACT = {"rtol": 0, "atol": 1e-12}  # float64; batched products add in another order


def convolutional() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), norm, nn.Flatten(), nn.Linear(64, CLASSES)).double()


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.LayerNorm(5), nn.Linear(5, CLASSES)).double()


@pytest.mark.parametrize(("make", "shape"), [(convolutional, (N, 1, 6, 6)), (with_norm, (N, 6))])
def test_update_bn(make, shape):
    torch.manual_seed(0)
    members = [make() for _ in range(K)]
    one, stacked = Ensemble(copy.deepcopy(members)), StackedEnsemble(members).eval()
    loader = [(torch.randn(shape).double(), 0) for _ in range(3)]
    for ensemble in (one, stacked):
        update_bn(loader, ensemble)
    assert_same_state(one, stacked, **EXACT)
    norm = stacked.stacked[1]
    assert (norm.momentum, stacked.training, len(norm._forward_pre_hooks)) == (0.1, False, 0)
    norm.num_batches_tracked[0] += 1
    norm.momentum = None
    other = Ensemble(list(stacked))
    for ensemble in (other, stacked):  # members with other numbers of batches run one by one
        ensemble.train()(loader[0][0])
    assert_same_state(other, stacked, **EXACT)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body, self.fc, self.use_reentrant = nn.Linear(6, 8), nn.Linear(8, CLASSES), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(checkpoint(self.body, x, use_reentrant=self.use_reentrant))


def test_dropout_inside_checkpointing_has_the_same_masks_in_the_recomputation():
    torch.manual_seed(0)
    member = Checkpointed(False)
    member.body = nn.Sequential(nn.Linear(6, CLASSES).double(), nn.Dropout(0.5))
    member.fc = nn.Identity()
    stacked = StackedEnsemble([member, copy.deepcopy(member)])
    for rng in (None, MemberRNG(torch.tensor([7]), torch.arange(2), torch.tensor(0))):
        logits = stacked.compute([torch.ones(N, 6).double()], {}, own=False, rng=rng)
        for _ in range(2):  # the second backward through a retained graph recomputes again
            gradient = torch.autograd.grad(logits.sum(), stacked.stacked.body[0].bias, retain_graph=True)[0]
            expected = 2.0 * (logits != 0).double().sum(1)  # 2: a mask is 0 or 1 / (1 - p)
            torch.testing.assert_close(gradient, expected, **EXACT)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_inside_a_member_is_refused():
    stacked = StackedEnsemble([nn.Sequential(Checkpointed(True)) for _ in range(K)])
    with pytest.raises(ValueError, match=r"without reentrant activation checkpointing.*use_reentrant=False"):
        stacked(torch.zeros(N, 6))
    with torch.autograd.graph.save_on_cpu():
        StackedEnsemble([with_norm()])(torch.randn(N, 6).double()).sum().backward()


@pytest.mark.parametrize("adapted", [True, False])
def test_checkpointing_inside_a_member(adapted):
    torch.manual_seed(0)
    calls = []
    members = [nn.Sequential(nn.Linear(6, 6), Checkpointed(False)).double() for _ in range(K)]
    stacked = adapt(members[0], K) if adapted else StackedEnsemble(members)
    x, y = torch.randn(N, 6).double(), torch.randint(CLASSES, (N,))
    stacked(x)  # the decision
    stacked.stacked[1].body.register_forward_pre_hook(lambda *_: calls.append(1))
    amended_cross_entropy(stacked(x), y, 0.5).backward()
    assert len(calls) == 2  # computed again in the backward
    separate = [copy.deepcopy(stacked[k]) for k in range(K)]
    for member in separate:
        member[1].forward = lambda x, member=member: member[1].fc(member[1].body(x))
    ensemble = Ensemble(separate)
    amended_cross_entropy(ensemble(x), y, 0.5).backward()
    for name, parameter in stacked.stacked.named_parameters():
        gradients = torch.stack([member.get_parameter(name).grad for member in separate])
        expected = gradients.mean(0) if parameter.ndim < gradients.ndim else gradients
        torch.testing.assert_close(parameter.grad, expected, **EXACT)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", [with_norm, lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, CLASSES)).double()])
def test_checkpointing_a_stacked_ensemble(make, use_reentrant):
    torch.manual_seed(0)
    stacked = StackedEnsemble([make() for _ in range(K)])
    x, y = torch.randn(N, 6).double().requires_grad_(), torch.randint(CLASSES, (N,))
    plain = torch.autograd.grad(amended_cross_entropy(stacked(x), y, 0.5), list(stacked.parameters()))
    amended_cross_entropy(checkpoint(stacked, x, use_reentrant=use_reentrant), y, 0.5).backward()
    for parameter, expected in zip(stacked.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected, **EXACT)


def new_weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_weight_norm():
    torch.manual_seed(0)
    members = [new_weight_norm().double() for _ in range(K)]
    one, stacked = Ensemble(members), StackedEnsemble(members)
    optimizers = [torch.optim.SGD(ensemble.parameters(), lr=0.1, momentum=0.9) for ensemble in (one, stacked)]
    x, y = torch.randn(N, 6).double(), torch.randint(CLASSES, (N,))
    for _ in range(3):
        for ensemble, optimizer in zip((one, stacked), optimizers, strict=True):
            optimizer.zero_grad()
            logits = ensemble(x)
            amended_cross_entropy(logits, y, 0.5).backward()
            optimizer.step()
        assert_same_gradients(one, stacked)
    assert_same_state(one, stacked, **EXACT)
    for k, member in enumerate(stacked.unstack()):
        torch.testing.assert_close(member(x), one[k](x), **EXACT)
        for layer in member:
            if isinstance(layer, nn.Linear):
                assert layer.weight.shape == (layer.out_features, layer.in_features)  # before a forward too
    torch.testing.assert_close(copy.deepcopy(stacked)(x), stacked(x))
    parallel = MemberParallelEnsemble(stacked)
    torch.testing.assert_close(parallel.gather()(x), stacked(x), **EXACT)


def test_the_first_call_keeps_no_autograd_graph() -> None:
    """A graph that is alive keeps activations, and breaks the capture of CUDA graphs."""
    trunk = nn.Linear(3, 3)
    ensemble = StackedEnsemble(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2))
    ensemble(trunk(torch.randn(4, 3))).sum().backward()

    def accumulator() -> Any:
        return trunk.weight.view_as(trunk.weight).grad_fn.next_functions[0][0]

    accumulator().metadata["seen"] = True  # lost with the node, unless a graph keeps it
    assert "seen" not in accumulator().metadata


def _call_in_threads(function: Callable[[], Any], count: int) -> list[Any]:
    """Return the results, or errors, of calls in three threads that interrupt one another often."""
    results: list[Any] = []

    def call() -> None:
        for _ in range(count):
            try:
                results.append(function())
            except Exception as error:
                results.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return results


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["in parts", "adapted"])
def test_threads_that_call_one_ensemble(monkeypatch: pytest.MonkeyPatch, name: str, checkpointed: bool) -> None:
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False) if checkpointed else super().forward(x)

    torch.manual_seed(0)
    monkeypatch.setattr(stacked_module, "CACHED", 100)  # one member at a time
    network = Block(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))
    stacked = StackedEnsemble([copy.deepcopy(network) for _ in range(K)]) if name == "in parts" else adapt(network, K)
    x, own = torch.randn(N, 1, 6, 6), torch.randn(1, N, 1, 6, 6)

    before = dict(stacked.named_parameters())

    def call() -> list[Tensor]:
        logits = stacked(x)
        together = stacked(own, batches="grouped").detach() if name == "in parts" else logits  # all at once
        return [logits, together, *torch.autograd.grad(logits.square().sum(), list(before.values()))]

    expected = call()
    for found in _call_in_threads(call, 50):
        torch.testing.assert_close(found, expected)
    assert all(parameter is before[name] for name, parameter in stacked.named_parameters())


def test_threads_that_train_ensembles_with_checkpointing() -> None:
    class Member(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.reentrant = nn.Linear(6, CLASSES), False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def train() -> bool:
        stacked = StackedEnsemble([Member(), Member()])
        x = torch.randn(N, 6)
        logits = stacked(x)
        logits.square().sum().backward()
        gradient = stacked.stacked.body.weight.grad
        return torch.allclose(gradient, 2 * logits.detach().mT @ x, atol=1e-5)  # float32

    assert _call_in_threads(train, 20) == [True] * 60
    plain = Member()
    plain.reentrant = True  # refused in ensembles alone
    plain(torch.randn(N, 6, requires_grad=True)).sum().backward()


class _Centered(torch.autograd.Function):
    """A function whose backward PyTorch does not show to a mode: of several members at once, it is another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class _WithFunction(nn.Module):
    """Reads a weight without a call of its layer, and applies a function."""

    def __init__(self, read: Callable[[Tensor], Tensor] = Tensor.sin) -> None:
        super().__init__()
        self.read = read
        self.body, self.norm, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(self.read(x), self.body.weight, self.body.bias)
        return self.head(_Centered.apply(self.norm(h)))  # type: ignore[no-untyped-call]


FIRST_CALLS: dict[str, Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]] = {
    "compile": lambda ensemble, _, x: torch.compile(ensemble, backend="aot_eager", fullgraph=True)(x),
    "dynamic": lambda ensemble, _, x: torch.compile(ensemble, backend="aot_eager", dynamic=True)(x),
    "func": lambda ensemble, state, x: torch.func.functional_call(ensemble, state, (x,)),
}


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_a_first_call_that_is_transformed_equals_an_eager_one(name: str, adapted: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    members = [_WithFunction().double() for _ in range(K)]
    eager = adapt(members[0], K) if adapted else StackedEnsemble(members)
    first = copy.deepcopy(eager)
    x = torch.randn(N, 6).double()
    eager(x).square().sum().backward()
    assert not eager.explain().call_by_call
    state = dict(first.named_parameters())
    if name == "func":
        gradients = torch.func.grad(lambda state: FIRST_CALLS[name](first, state, x).square().sum())(state)
    else:
        FIRST_CALLS[name](first, state, x).square().sum().backward()
        gradients = {key: parameter.grad for key, parameter in state.items()}
    for key, parameter in eager.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, **EXACT)


def test_a_node_of_a_graph_compares_members_with_values() -> None:
    """As torch before 2.13 runs it: `torch.compiler.is_compiling()` is False there."""
    stacked = StackedEnsemble([_WithFunction() for _ in range(K)])
    with FakeTensorMode() as mode:
        state = {name: mode.from_tensor(tensor) for name, tensor in named_tensors(stacked.stacked).items()}
        x = mode.from_tensor(torch.zeros(N, 6))
        modes = tuple(layer.training for layer in stacked.stacked.modules())
        assert run_stacked_in_graph(stacked._token, modes, False, [x], {}, state, None).shape == (K, N, CLASSES)
    assert not stacked.explain().call_by_call


NEEDY = {  # inputs for which random numbers may be no input at all
    "log": (torch.log, torch.rand(N, 6) + 0.1),
    "acosh": (torch.acosh, torch.rand(N, 6) + 1.1),
    "embedding": (lambda x: nn.functional.embedding(x, torch.ones(1, 6)).sum(1), torch.zeros(N, 4).long()),
}


@pytest.mark.parametrize("name", NEEDY)
def test_after_a_first_call_in_a_graph_real_inputs_are_compared(name: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    read, x = NEEDY[name]
    stacked = StackedEnsemble([_WithFunction(read) for _ in range(K)])
    eager = copy.deepcopy(stacked)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* first called while it is exported, compiled")
        compiled = torch.compile(stacked, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, eager(x))
    eager(x).square().sum().backward()
    stacked(x).square().sum().backward()
    for ours, theirs in zip(stacked.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert not stacked.explain().call_by_call


class _Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def test_warnings_of_compilation_and_export() -> None:
    x = torch.randn(N, 6)
    with pytest.warns(UserWarning, match="changes 'calls', but a compiled graph"):
        torch.compile(StackedEnsemble([_Counting(6, 3), _Counting(6, 3)]), backend="aot_eager")(x)
    with pytest.warns(UserWarning, match="first called while it is exported, .* Call it once before"):
        torch.export.export(StackedEnsemble([_WithFunction(), _WithFunction()]), (x,))


class FSDPLinear(nn.Linear):
    """Only its name is that of a sharded layer."""


def test_the_name_of_a_layer_does_not_shard_it() -> None:
    assert StackedEnsemble([FSDPLinear(6, 3) for _ in range(K)])(torch.randn(N, 6)).shape == (K, N, 3)


def shard_and_train() -> tuple[list[Tensor], list[str]]:
    """Return the gradients of a sharded ensemble, and the errors with one sharded layer."""
    torch.manual_seed(0)
    stacked = StackedEnsemble([with_norm() for _ in range(K)])
    x, mesh, errors = torch.randn(N, 6).double(), init_device_mesh("cpu", (2,)), []
    for called in (True, False):
        other = copy.deepcopy(stacked)
        if called:
            other(x)
        fully_shard(other.stacked[0], mesh=mesh)
        with pytest.raises(ValueError, match="FSDPLinear") as error:
            other(x)
        errors.append(str(error.value))
    fully_shard(stacked, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch: a change of logits in place would lose a hook
        stacked(x).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in stacked.parameters()], errors


@pytest.mark.extended
def test_fully_sharded_ensembles() -> None:
    torch.manual_seed(0)
    stacked = StackedEnsemble([with_norm() for _ in range(K)])
    stacked(torch.randn(N, 6).double()).square().sum().backward()
    for gradients, errors in team().run(2, shard_and_train):
        for ours, theirs in zip(gradients, stacked.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, **EXACT)
        assert len(errors) == 2
        assert all("sharded as one module, but got one with FSDPLinear inside. Use fully_shard" in e for e in errors)
