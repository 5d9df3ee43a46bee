"""Members that differ in more than parameters and buffers are refused; others are accepted."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import prune

from tests.nn.library_models import transformers_host
from torchace.models import cifar_resnet, mlp
from torchace.nn import Ensemble, StackedEnsemble

K = 3


class Member(nn.Module):
    """A layer with something beside it."""

    def __init__(self, state: Any = None, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.inner.state = state
        self._act = act

    def forward(self, x: Tensor) -> Tensor:
        return self._act(self.inner(x))


class Subspace(nn.Module):
    """Random subspaces: each member sees some columns."""

    def __init__(self, k: int, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        columns = torch.tensor([k, k + 1])
        if kind == "buffer":
            self.register_buffer("cols", columns)
        else:
            self.cols = {"list": columns.tolist(), "array": columns.numpy(), "tensor": columns}[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.cols])


@pytest.mark.parametrize("kind", ["list", "array", "tensor"])
def test_random_subspaces_are_refused_unless_registered(kind):
    with pytest.raises(ValueError, match=r"'cols' of the whole is .* in member 1 .*register_buffer\('cols'") as error:
        StackedEnsemble([Subspace(k, kind) for k in range(K)])
    assert "Use Ensemble(members)" in str(error.value)
    assert StackedEnsemble([Subspace(1, kind) for _ in range(K)])(torch.zeros(5, 6)).shape == (K, 5, 3)

    members = [Subspace(k, "buffer").double() for k in range(K)]
    stacked, x = StackedEnsemble(members), torch.randn(5, 6).double()
    expected = Ensemble(members)(x)
    torch.testing.assert_close(stacked(x), expected, rtol=0, atol=1e-12)  # float64, added in another order
    for k, member in enumerate(stacked.unstack()):
        assert torch.equal(member(x), expected[k])


def add_hook(register: str, *hooks: Any, **options: Any) -> nn.Module:
    member = Member()
    for hook in hooks:
        getattr(member.inner[0], register)(hook, **options)
    return member


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def patch_forward(factor: float) -> nn.Module:
    member = Member()
    member.inner.forward = lambda x: factor * x
    return member


def subclass(factor: float) -> nn.Module:
    class Own(Member):
        def forward(self, x: Tensor) -> Tensor:
            return factor * super().forward(x)

    return Own()


def lock_of_a_class() -> nn.Module:
    return type("Own", (Member,), {"lock": threading.Lock()})()


def own_hooks(value: int) -> nn.Module:
    member: Any = Member()
    member.own_hooks_of_layers = {"a": value}
    return member


def missing() -> nn.Module:
    member = Member()
    del member._act
    return member


def partial(slope: float) -> nn.Module:
    return Member(act=functools.partial(F.leaky_relu, negative_slope=slope))


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "dict": (lambda: Member({"a": 1}), lambda: Member({"a": 2}), "'state' of layer 'inner'"),
    "set": (lambda: Member({1}), lambda: Member({2}), "'state' of layer 'inner'"),
    "nested array": (lambda: Member([np.ones(2)]), lambda: Member([np.zeros(2)]), "'state' of layer 'inner'"),
    "generator": (
        lambda: Member(i for i in [1]),
        lambda: Member(i for i in [1]),
        "'state' of layer 'inner' in member 1 holds a value that cannot be compared",
    ),
    "lock": (lock_of_a_class, lock_of_a_class, "'__class__' of the whole in member 1 holds a value that cannot be"),
    "hooks of its own": (lambda: own_hooks(1), lambda: own_hooks(2), "'own_hooks_of_layers' of the whole"),
    "missing": (Member, missing, "'_act' of the whole is missing"),
    "function": (Member, lambda: Member(act=torch.tanh), "'_act' of the whole"),
    "lambda": (lambda: Member(act=lambda x: x + 1), lambda: Member(act=lambda x: x + 2), "'_act' of the whole"),
    "partial": (lambda: partial(0.1), lambda: partial(0.2), "'_act' of the whole"),
    "forward": (lambda: patch_forward(1.0), lambda: patch_forward(2.0), "'forward' of layer 'inner'"),
    "class": (lambda: subclass(1.0), lambda: subclass(2.0), "'__class__' of the whole is .*Own"),
    "forward hook": (Member, lambda: add_hook("register_forward_hook", double), r"'_forward_hooks' of layer 'inner.0'"),
    "hook's options": (
        lambda: add_hook("register_forward_hook", double),
        lambda: add_hook("register_forward_hook", double, always_call=True),
        "'_forward_hooks_always_called' of layer 'inner.0'",
    ),
    "pre-hook": (
        Member,
        lambda: add_hook("register_forward_pre_hook", lambda m, args: (args[0] + 1,)),
        "'_forward_pre_hooks' of layer 'inner.0'",
    ),
    "state hook": (Member, lambda: add_hook("register_state_dict_pre_hook", print), "'_state_dict_pre_hooks'"),
    "unregistered layers": (
        lambda: Member([nn.Linear(2, 2)]),
        lambda: Member([nn.Linear(2, 2)]),
        "'state' of layer 'inner' in member 1 holds a trained tensor that is not a registered parameter",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_state_is_refused(name):
    first, second, message = DIFFERENT[name]
    with pytest.raises(ValueError, match=message) as error:
        StackedEnsemble([first(), second()])
    assert "member 1" in str(error.value)
    assert "Use Ensemble(members)" in str(error.value)
    if name not in ("generator", "lock", "unregistered layers"):
        assert len(StackedEnsemble([second(), second()])) == 2


def test_function_that_holds_the_first_member_is_refused():
    def own() -> nn.Module:
        member = Member()
        member.forward = lambda x: member.inner(x)
        return member

    for members in ([own(), own()], [own()]):
        with pytest.raises(ValueError, match=r"'forward' of the whole .* a function that holds a layer of the member"):
            StackedEnsemble(members)


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
def test_weights_that_a_hook_computes_are_refused(wrap):
    with pytest.raises(
        ValueError, match=r"layer '0' \(Linear\).*computes its weights; use torch.nn.utils.parametrizations"
    ):
        StackedEnsemble(nn.Sequential(wrap(nn.Linear(4, 3))) for _ in range(2))


def test_hooks_on_parameters_are_refused():
    members = [Member(), Member()]
    members[1].inner[0].weight.register_hook(lambda grad: 0 * grad)
    with pytest.raises(ValueError, match=r"layer 'inner.0' \(Linear\).*hooks of its parameter 'inner.0.weight'"):
        StackedEnsemble(members)


def test_equal_state_is_accepted():
    """Layers that refer to themselves and to each other, with hooks, functions and settings made for each."""

    def make() -> nn.Module:
        member = Member(
            {"columns": [0, 1], "mask": torch.ones(3), "act": functools.partial(F.leaky_relu, inplace=False)}
        )
        member.order = [member.inner[0], member.inner]
        member.call = member.inner.forward
        member.inner.register_forward_hook(double)
        member.inner[0].register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
        return member.double()

    members, x = [make() for _ in range(K)], torch.randn(5, 4).double()
    stacked = StackedEnsemble(members)
    torch.testing.assert_close(stacked(x), Ensemble(members)(x), rtol=0, atol=1e-12)
    for member, back in zip(members, stacked.unstack(), strict=True):
        assert torch.equal(back(x), member(x))
        assert back.order[0] is back.inner[0]
        assert back.call.__self__ is back.inner


def trace() -> nn.Module:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=3)


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=3)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(4, [8], 3),
    "cifar_resnet": lambda: cifar_resnet(8, 3, width=4),
    "traced": trace,
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 8),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
}
EXTERNAL: dict[str, Callable[[], nn.Module]] = {
    **{n: functools.partial(torchvision_model, n) for n in ("mobilenet_v3_small", "shufflenet_v2_x0_5")},
    **{n: functools.partial(timm_model, n) for n in ("test_vit", "test_byobnet", "test_efficientnet", "test_convnext")},
    **{name: lambda name=name: transformers_host(name)[0] for name in ("bert", "gpt2")},
}


@pytest.mark.parametrize("name", [*NETWORKS, *(pytest.param(name, marks=pytest.mark.extended) for name in EXTERNAL)])
def test_networks_of_one_architecture_are_accepted(name):
    members = [{**NETWORKS, **EXTERNAL}[name]() for _ in range(2)]
    back = StackedEnsemble(members).unstack()
    for member, other in zip(members, back, strict=True):
        for one, two in zip(member.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(one, two)
    if name != "traced":  # a copy's class has another name
        assert len(StackedEnsemble([*members, copy.deepcopy(members[0])])) == 3
