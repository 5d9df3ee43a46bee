"""Members computed at once equal members computed one after another: outputs, gradients, training."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchace.functional import amended_cross_entropy
from torchace.nn import Ensemble, StackedEnsemble
from torchace.nn.stacking import Decision

K, N, CLASSES = 3, 8, 4
# Float64; batched products add in another order. Ten steps of Adam divide rounding by √v + 1e-8.
EXACT = {"rtol": 0, "atol": 1e-12}
TRAINED = {"rtol": 1e-9, "atol": 1e-10}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def flat_mlp() -> nn.Module:
    inner = nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Identity())
    return nn.Sequential(nn.Flatten(), inner, nn.Linear(8, CLASSES))


def normed_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, CLASSES))


def conv() -> nn.Module:
    # no bias before BatchNorm: its gradient is zero, and Adam would amplify its rounding
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, CLASSES),
    )


def dropout() -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    return layers.eval()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.norm = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.norm(self.layer(self.embed(tokens)).mean(1)))


def rows(*lead: int) -> Tensor:
    return torch.randn(*lead, N, 6).double()


def images(*lead: int) -> Tensor:
    return torch.randn(*lead, N, 1, 8, 8).double()


def tokens(*lead: int) -> Tensor:
    return torch.randint(11, (*lead, N, 5))


Make = Callable[[], nn.Module]
CASES: dict[str, tuple[Make, Callable[..., Tensor]]] = {
    "mlp": (mlp, rows),
    "flat mlp": (flat_mlp, rows),
    "dropout chain in eval": (lambda: nn.Sequential(nn.Dropout(0.9), mlp(), nn.Dropout()).eval(), rows),
    "one layer": (lambda: nn.Linear(6, CLASSES), rows),
    "normed mlp": (normed_mlp, rows),
    "conv with batch norm": (conv, images),
    "dropout in eval": (dropout, rows),
    "attention": (Attention, tokens),
}


def pair(make: Make, num_members: int = K) -> tuple[Ensemble, StackedEnsemble]:
    """The same members twice, in float64."""
    members = [make().double() for _ in range(num_members)]
    for member in members:  # a buffer of each member's own
        for buffer in member.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return Ensemble(copy.deepcopy(members)), StackedEnsemble(members)


def assert_same_state(one: Ensemble, stacked: StackedEnsemble, **tolerance: float) -> None:
    for member, other in zip(one, stacked, strict=True):
        ours, theirs = other.state_dict(), member.state_dict()
        assert list(ours) == list(theirs)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], **tolerance)


def assert_same_gradients(one: Ensemble, stacked: StackedEnsemble) -> None:
    together = dict(stacked.stacked.named_parameters())
    for name, parameter in together.items():
        alone = [dict(member.named_parameters())[name].grad for member in one]
        if parameter.grad is None:
            assert all(grad is None for grad in alone), name
        else:
            torch.testing.assert_close(parameter.grad, torch.stack(alone), **EXACT)


@pytest.mark.parametrize("batches", ["shared", "separate"])
@pytest.mark.parametrize("path", ["at once", "one by one"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, path, batches, monkeypatch):
    torch.manual_seed(0)
    make, inputs = CASES[case]
    if path == "one by one":
        monkeypatch.setattr("torchace.nn.stacked.decide", lambda *_, **__: Decision(False, "asked for", (), 0))
    one, stacked = pair(make)
    x = inputs(K) if batches == "separate" else inputs()
    y = torch.randint(CLASSES, (N,))
    for ensemble in (one, stacked):
        logits = ensemble(x, batches=batches)
        amended_cross_entropy(logits, y, 0.7).backward()
    torch.testing.assert_close(logits, one(x, batches=batches), **EXACT)
    assert stacked.explain().call_by_call == (path == "at once")
    without_rule = {node.function for node in stacked.explain() if node.how not in ("batched", "once")}
    assert without_rule <= ({"prelu"} if case == "normed mlp" else set())
    assert_same_gradients(one, stacked)
    for a, b in zip(one, stacked, strict=True):  # BatchNorm's statistics: `one` has seen the batch twice
        for (name, twice), (_, once) in zip(a.named_buffers(), b.named_buffers(), strict=True):
            assert torch.equal(twice, once) != a.training, name


@pytest.mark.parametrize("batches", ["shared", "separate"])
@pytest.mark.parametrize("case", ["flat mlp", "conv with batch norm"])
def test_gradient_of_the_input(case, batches):
    make, inputs = CASES[case]
    one, stacked = pair(make)
    x = (inputs(K) if batches == "separate" else inputs()).requires_grad_()
    ours = torch.autograd.grad(stacked(x, batches=batches).square().sum(), x)[0]
    theirs = torch.autograd.grad(one(x, batches=batches).square().sum(), x)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def decay_groups(one: Ensemble) -> list[dict[str, Any]]:
    """Return parameter groups as a user would for plain members: weight decay for two or more axes."""
    matrices = [p for p in one.parameters() if p.ndim >= 2]
    return [{"params": matrices}, {"params": [p for p in one.parameters() if p.ndim < 2], "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("mlp", "at once"),
        ("mlp", "one by one"),
        ("normed mlp", "at once"),
        ("conv with batch norm", "at once"),
        ("conv with batch norm", "one by one"),
        ("dropout in eval", "at once"),
    ],
)
def test_ten_steps(case, path, optimizer, monkeypatch):
    torch.manual_seed(0)
    make, inputs = CASES[case]
    if path == "one by one":
        monkeypatch.setattr("torchace.nn.stacked.decide", lambda *_, **__: Decision(False, "asked for", (), 0))
    one, stacked = pair(make)
    build = OPTIMIZERS[optimizer]
    grouped = optimizer == "AdamW"
    optimizers = [
        build(decay_groups(one) if grouped else one.parameters()),
        build(stacked.parameter_groups(0.3) if grouped else stacked.parameters()),
    ]
    start = copy.deepcopy(one)
    for _ in range(10):
        x, y = inputs(), torch.randint(CLASSES, (N,))
        for ensemble, step in zip((one, stacked), optimizers, strict=True):
            step.zero_grad()
            amended_cross_entropy(ensemble(x), y, 0.5).backward()
            step.step()
    assert_same_state(one, stacked, **TRAINED)
    assert not torch.allclose(next(one.parameters()), next(start.parameters()), atol=1e-3)


def test_parameter_groups():
    stacked = StackedEnsemble([conv() for _ in range(K)])
    groups = stacked.parameter_groups(0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert sorted(p.ndim - 1 for p in groups[0]["params"]) == [2, 4, 4]
    assert all(p.ndim - 1 == 1 for p in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(stacked.parameters()))
    stacked.stacked[0].weight.requires_grad_(False)
    assert len(stacked.parameter_groups(0.1)[0]["params"]) == 2
    only_vectors = StackedEnsemble([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    assert [group["weight_decay"] for group in only_vectors.parameter_groups(0.1)] == [0.0]


class Scaled(nn.Module):
    """A parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("make", [mlp, conv, Scaled])
def test_clipping_member_by_member(make):
    torch.manual_seed(0)
    one, stacked = pair(make)
    x = images() if make is conv else rows()
    size = torch.tensor([1e-4, 1.0, 100.0]).double()[:, None, None]  # one is below the bound, the others above
    for ensemble in (one, stacked):
        (ensemble(x) * size).square().sum().backward()
    norms = torch.stack([torch.nn.utils.clip_grad_norm_(member.parameters(), 0.5) for member in one])
    torch.testing.assert_close(stacked.clip_grad_norm_(0.5), norms, rtol=1e-12, atol=0)
    assert norms[0] < 0.5 < norms[1]
    assert_same_gradients(one, stacked)


def test_clipping_without_gradients():
    assert torch.equal(StackedEnsemble([mlp(), mlp()]).clip_grad_norm_(1.0), torch.zeros(2))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("path", "inplace"), [("at once", False), ("at once", True), ("one by one", False)])
def test_dropout_masks_differ_between_members(path, inplace, first, monkeypatch):
    if path == "one by one":
        monkeypatch.setattr("torchace.nn.stacked.decide", lambda *_, **__: Decision(False, "asked for", (), 0))
    mask = nn.Dropout(0.5, inplace=inplace)
    last = nn.Linear(6, 6, bias=False)
    with torch.no_grad():
        last.weight.copy_(torch.eye(6))
    member = nn.Sequential(mask, last) if first else nn.Sequential(last, mask)
    stacked = StackedEnsemble([copy.deepcopy(member) for _ in range(K)])
    x = torch.ones(50, 6)
    torch.manual_seed(0)
    out = stacked(x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    for j in range(K):
        for k in range(j):
            assert 0.3 < (out[j] != out[k]).float().mean() < 0.7
    assert torch.equal(x, torch.ones(50, 6))
    assert torch.equal(stacked.eval()(x), torch.ones(K, 50, 6))


def test_dropout_masks_of_own_batches():
    stacked = StackedEnsemble([nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6)) for _ in range(K)])
    assert stacked(torch.ones(K, N, 6), batches="separate").shape == (K, N, 6)
    x = torch.ones(K, N, 6)
    stacked(x, batches="separate")
    assert torch.equal(x, torch.ones(K, N, 6))


def test_grouped_batches_must_divide():
    stacked = StackedEnsemble([mlp() for _ in range(6)])
    for groups in (4, 0, 12):
        with pytest.raises(ValueError, match="G divides 6"):
            stacked(torch.zeros(groups, N, 6), batches="grouped")


@pytest.mark.parametrize("case", CASES)
def test_unstack_returns_equal_members(case):
    members = [CASES[case][0]().double() for _ in range(K)]
    before = [copy.deepcopy(member.state_dict()) for member in members]
    back = StackedEnsemble(members).unstack()
    for member, other, state in zip(members, back, before, strict=True):
        assert repr(other) == repr(member)
        assert [m.training for m in other.modules()] == [m.training for m in member.modules()]
        for name, value in other.state_dict().items():
            assert torch.equal(value, state[name])
            assert torch.equal(member.state_dict()[name], state[name])  # those given were left alone
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in other.parameters())


def test_members_are_copies():
    stacked = StackedEnsemble([mlp(), mlp()])
    x = torch.randn(N, 6)
    before = stacked(x)
    with torch.no_grad():
        for parameter in stacked[1].parameters():
            parameter.zero_()
    assert torch.equal(stacked(x), before)
    assert len(stacked) == 2
    assert len(list(stacked)) == 2
    torch.testing.assert_close(stacked[-1](x), before[1])
    with pytest.raises(IndexError):
        stacked[2]
    with pytest.raises(TypeError, match="slice"):
        stacked[0:1]


def one_layer_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, CLASSES))


def one_layer_twice_and_norm() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(norm, *one_layer_twice()[:3], norm, nn.Linear(6, CLASSES))


def one_weight_twice() -> nn.Module:
    member = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    member[2].weight = member[0].weight
    return member


@pytest.mark.parametrize("make", [one_layer_twice, one_layer_twice_and_norm, one_weight_twice])
def test_tied_parameters_stay_tied(make):
    torch.manual_seed(0)
    one, stacked = pair(make)
    names = [name for name, _ in stacked.named_parameters()]
    assert len(names) == len(list(one[0].parameters()))
    optimizers = [torch.optim.SGD(ensemble.parameters(), lr=0.1) for ensemble in (one, stacked)]
    for _ in range(3):
        x = rows()
        for ensemble, step in zip((one, stacked), optimizers, strict=True):
            step.zero_grad()
            ensemble(x).square().mean().backward()
            step.step()
        assert_same_gradients(one, stacked)
    assert_same_state(one, stacked, **EXACT)
    # torch's functional_call can leave its own tensors in a module that holds one layer twice
    assert [name for name, _ in stacked.named_parameters()] == names
    for copied in (stacked[1], copy.deepcopy(stacked).stacked):
        first, second = (layer for layer in copied if type(layer) is nn.Linear and layer.out_features == 6)
        assert first.weight is second.weight


@pytest.mark.parametrize("make", [mlp, normed_mlp])
def test_frozen_parameters(make):
    def frozen() -> nn.Module:
        member = make()
        member[0].weight.requires_grad_(False)
        return member

    one, stacked = pair(frozen)
    assert not stacked.stacked[0].weight.requires_grad
    assert not stacked[0][0].weight.requires_grad
    assert stacked[0][0].bias.requires_grad
    optimizers = [torch.optim.SGD(ensemble.parameters(), lr=0.1) for ensemble in (one, stacked)]
    x, start = rows(), stacked.stacked[0].weight.clone()
    for ensemble, step in zip((one, stacked), optimizers, strict=True):
        ensemble(x).square().mean().backward()
        step.step()
    assert_same_gradients(one, stacked)
    assert_same_state(one, stacked, **EXACT)
    assert torch.equal(stacked.stacked[0].weight, start)


def test_buffers_are_each_members_own():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)
            self.register_buffer("shift", torch.randn(CLASSES))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("table", torch.randn(2), persistent=False)
            self.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.linear(x) + self.shift * self.table[0]

    one, stacked = pair(Shifted)
    x = rows()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    assert_same_state(one, stacked, **EXACT)
    assert torch.equal(stacked.stacked.calls, torch.ones(K, dtype=torch.long))
    assert "stacked.table" not in stacked.state_dict()


def test_modes_of_layers_are_kept():
    def make() -> nn.Module:
        member = conv()
        member[1].eval()  # a frozen BatchNorm
        return member

    one, stacked = pair(make)
    assert stacked.training
    assert not stacked.stacked[1].training
    assert stacked.stacked[5].training
    x = images()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    assert_same_state(one, stacked, **EXACT)


@pytest.mark.parametrize("case", ["mlp", "normed mlp"])
def test_bfloat16(case):
    torch.manual_seed(0)
    members = [CASES[case][0]().bfloat16() for _ in range(K)]
    x = torch.randn(N, 6).bfloat16()
    out = StackedEnsemble(members)(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, Ensemble(members)(x), rtol=2**-6, atol=2**-6)  # a few roundings to 8 bits


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(copied):
    stacked = StackedEnsemble([mlp() for _ in range(K)], link="sigmoid")
    x = torch.randn(N, 6)
    other = copied(stacked)
    assert torch.equal(other(x), stacked(x))
    assert other.link == "sigmoid"
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = stacked(x)
    other(x).sum().backward()
    optimizer.step()
    assert torch.equal(stacked(x), before)
    assert not torch.equal(other(x), before)
    with pytest.raises(ValueError, match="Adafactor"):  # the copy is watched as well
        torch.optim.Adafactor(other.parameters()).step()


def test_state_dict_round_trip():
    make, inputs = CASES["conv with batch norm"]
    _, stacked = pair(make)
    _, other = pair(make)
    x = inputs()
    stacked(x)
    assert not torch.equal(other(x), stacked(x))
    result = other.load_state_dict(stacked.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(other.eval()(x), stacked.eval()(x))


@pytest.mark.parametrize("lead", [(), (5, 2), (0,)])
def test_other_numbers_of_axes(lead):
    one, stacked = pair(mlp)
    x = torch.randn(*lead, 6).double()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    own = torch.randn(K, 4, *lead, 6).double()
    torch.testing.assert_close(stacked(own, batches="separate"), one(own, batches="separate"), **EXACT)


def test_chains_with_other_behavior():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Reversed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self):
                x = layer(x)
            return x

    def parametrized() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES)))

    def patched() -> nn.Module:
        member = nn.Sequential(nn.Linear(6, CLASSES))
        member[0].forward = lambda x: x[:, :CLASSES]
        return member

    makers: list[Make] = [
        lambda: nn.Sequential(Doubled(6, CLASSES)),
        lambda: Reversed(nn.Linear(6, CLASSES), nn.Linear(6, 6)),
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Softmax(1), nn.Linear(8, CLASSES)),
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.Linear(4, CLASSES)),
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, CLASSES)),
        lambda: nn.Sequential(nn.Flatten(0), nn.Linear(6 * N, CLASSES)),
        parametrized,
        patched,
    ]
    for make in makers:
        one, stacked = pair(make)
        x = rows()
        torch.testing.assert_close(stacked(x), one(x), **EXACT)


def test_forward_hooks_run():
    one, stacked = pair(mlp)
    x = rows()
    plain = stacked(x)
    seen: list[int] = []
    handles = [
        stacked.stacked[1].register_forward_hook(lambda module, args, output: 2 * output),
        stacked.stacked[4].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        stacked.register_forward_hook(lambda *_: seen.append(1)),
    ]
    for member in one:
        member[1].register_forward_hook(lambda module, args, output: 2 * output)
        member[4].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    assert not torch.allclose(stacked(x), plain)
    assert len(seen) == 2
    for handle in handles:
        handle.remove()
    assert torch.equal(stacked(x), plain)


@pytest.mark.parametrize("make", [mlp, normed_mlp])
def test_backward_hooks_are_refused(make):
    stacked = StackedEnsemble([make() for _ in range(K)])
    handle = stacked.stacked[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\).*backward hooks.*Use Ensemble"):
        stacked(torch.randn(N, 6))
    with torch.no_grad():  # no backward, no harm
        stacked(torch.randn(N, 6))
    handle.remove()
    stacked(torch.randn(N, 6)).sum().backward()


def test_keywords_and_several_inputs():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
            out = self.linear(x - y) * scale
            return out if shift is None else out + shift

    one, stacked = pair(Sum)
    x, y, shift = rows(), rows(), torch.randn(CLASSES).double()
    ours, theirs = stacked(x, y, scale=3.0, shift=shift), one(x, y, scale=3.0, shift=shift)
    torch.testing.assert_close(ours, theirs, **EXACT)
    ours = stacked(rows(K) * 0 + x, rows(K) * 0 + y, batches="separate")
    torch.testing.assert_close(ours, one(x, y), **EXACT)


class Attributes(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("path", ["at once", "one by one"])
@pytest.mark.parametrize("pack", [SimpleNamespace, Attributes, namedtuple("Pack", ["logits", "features"])])
def test_objects_with_logits(pack, path, monkeypatch):
    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return pack(logits=super().forward(x), features=x)

    if path == "one by one":
        monkeypatch.setattr("torchace.nn.stacked.decide", lambda *_, **__: Decision(False, "asked for", (), 0))
    one, stacked = pair(lambda: Packed(6, N))  # as many classes as samples: a transpose has the same shape
    x = rows()
    for ensemble in (one, stacked):
        ensemble(x).square().sum().backward()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    assert_same_gradients(one, stacked)


@pytest.mark.parametrize("make", [mlp, normed_mlp])
def test_under_compile(make):
    torch.manual_seed(0)
    one, stacked = pair(make)
    x, y = rows(), torch.randint(CLASSES, (N,))
    amended_cross_entropy(one(x), y, 0.5).backward()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return amended_cross_entropy(stacked(x), y, 0.5)

    loss(x, y).backward()
    assert_same_gradients(one, stacked)


# What cannot be stacked


def differing() -> dict[str, tuple[nn.Module, nn.Module, str]]:
    class Power(nn.Module):
        def __init__(self, power: float) -> None:
            super().__init__()
            self.power = power
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) ** self.power

    frozen, tied, trained = mlp(), mlp(), mlp()
    frozen[0].weight.requires_grad_(False)
    tied[2] = nn.Linear(8, 8)
    tied[2].weight = nn.Parameter(torch.zeros(7, 8))
    trained[2].eval()
    layer = nn.Linear(6, 6)
    return {
        "width": (nn.Linear(6, 3), nn.Linear(6, 4), "the whole"),
        "layers": (mlp(), nn.Sequential(*mlp(), nn.ReLU()), "other layers"),
        "kind": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), r"'0' is Tanh\(\) in member 1 and ReLU"),
        "dropout": (nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.2)), r"p=0.2.*p=0.1"),
        "a custom layer's number": (Power(1.0), Power(2.0), "'power' of the whole is 2.0 in member 1 and 1.0"),
        "type": (mlp(), mlp().double(), r"'0.weight' is \(8, 6\) torch.float64"),
        "frozen": (mlp(), frozen, "frozen in member 1"),
        "mode": (mlp(), trained, "'training' of layer '2' is False"),
        "bias": (nn.Linear(6, 3), nn.Linear(6, 3, bias=False), "bias=False"),
        "tied": (
            nn.Sequential(layer, nn.Linear(6, 6)),
            nn.Sequential(nn.ModuleList([layer, layer])[0], nn.ModuleList([layer])[0]),
            "other layers|parameters",
        ),
        "shape alone": (mlp(), tied, "layer '2'|'2.weight'"),
    }


@pytest.mark.parametrize("name", differing())
def test_members_of_different_architectures_are_refused(name):
    first, second, message = differing()[name]
    with pytest.raises(ValueError, match=message) as error:
        StackedEnsemble([first, second])
    assert "Use Ensemble(members)" in str(error.value)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.encoder = kind(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.encoder(x)
        return (out[0] if isinstance(out, tuple) else out)[:, -1]


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h if h.sum() > 0 else -h


class Remembering(Undecided):
    """Sets an attribute: a mask made once, a count of the calls, or the last output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mask, self.calls, self.last = kind, None, 0, None

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.kind == "mask":
            self.mask = torch.ones(len(x), 1) if self.mask is None else self.mask
            return h * self.mask
        if self.kind == "calls":
            self.calls += 1
            return h * self.calls
        h = h if self.last is None else h + self.last
        self.last = h.detach()
        return h


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(x)


def within(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ModuleDict({"body": layer})["body"])


NOT_STACKABLE: dict[str, tuple[Make, str]] = {
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True)), r"layer '0' \(Embedding\)"),
    "lazy layer": (lambda: nn.Sequential(nn.LazyLinear(CLASSES)), r"layer '0' \(LazyLinear\).*run it once"),
}


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_run_member_by_member(kind):
    torch.manual_seed(0)
    one, stacked = pair(lambda: Recurrent(kind))
    x = torch.randn(N, 6).double()
    for ensemble in (one, stacked):
        ensemble(x).square().sum().backward()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    assert_same_gradients(one, stacked)
    assert {node.how for node in stacked.explain() if node.layer == "encoder"} >= {"loop"}
    assert stacked.explain().counts()["batched"] > 0


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor([0, 2, 4]))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.columns]


@pytest.mark.parametrize("make", [Columns, lambda: Recurrent(nn.LSTMCell)])
def test_functions_without_a_rule_can_be_exported(make):
    stacked, x = StackedEnsemble([make().double() for _ in range(K)]), torch.randn(N, 6).double()
    expected = stacked(x)
    assert {node.how for node in stacked.explain()} & {"vmap", "loop"}
    torch.testing.assert_close(torch.export.export(stacked, (x,)).module()(x), expected, **EXACT)


@pytest.mark.parametrize("kind", ["mask", "calls", "last"])
def test_members_that_run_one_by_one_share_no_attributes(kind):
    torch.manual_seed(0)
    members, x = [Remembering(kind) for _ in range(K)], torch.randn(N, 6)
    if kind == "mask":
        torch.testing.assert_close(StackedEnsemble(members)(x), Ensemble(members)(x))
        return
    with pytest.raises(ValueError, match=rf"its forward sets '{kind}', which .* share .* Use Ensemble\(members\)"):
        StackedEnsemble(members)(x)


def test_replaced_buffer():
    stacked = StackedEnsemble([within(Counting()) for _ in range(K)])
    stacked(torch.randn(N, 6))
    stacked(torch.randn(N, 6))
    assert torch.equal(stacked.stacked[0].calls, torch.full((K,), 2.0))


UNUSUAL: dict[str, Make] = {
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, CLASSES))),
    "data-dependent": lambda: within(Undecided()),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_forwards_equal_members_one_by_one(name):
    torch.manual_seed(0)
    members = [UNUSUAL[name]().double() for _ in range(K)]
    stacked, one = StackedEnsemble(members), Ensemble(members)
    x = torch.randn(N, 6).double()
    for ensemble in (one, stacked):
        for _ in range(2):  # spectral norm's buffers change
            ensemble(x).square().sum().backward()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)
    assert_same_gradients(one, stacked)
    assert_same_state(one, stacked, **EXACT)
    assert name != "data-dependent" or str(stacked.explain()).startswith("Members run one by one: its control flow")


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", NOT_STACKABLE)
def test_layers_that_cannot_be_stacked_are_named(name):
    make, message = NOT_STACKABLE[name]
    with pytest.raises(ValueError, match=message) as error:
        StackedEnsemble([make() for _ in range(K)])(torch.randn(N, 6))
    assert "Use Ensemble(members)" in str(error.value)


@pytest.mark.parametrize("batches", ["shared", "separate"])
@pytest.mark.parametrize("make", [mlp, normed_mlp, conv])
def test_wrong_input_raises_the_members_error(make, batches):
    stacked = StackedEnsemble([make() for _ in range(K)])
    x = torch.randn(N, 2, 5, 5) if make is conv else torch.randn(N, 5)
    with pytest.raises(RuntimeError) as alone:
        stacked[0](x)
    with pytest.raises(RuntimeError) as together:
        stacked(x if batches == "shared" else x.expand(K, *x.shape), batches=batches)
    assert str(together.value) == str(alone.value)


def test_other_errors():
    with pytest.raises(ValueError, match="at least one member"):
        StackedEnsemble([])
    with pytest.raises(TypeError, match="member 1 is str"):
        StackedEnsemble([mlp(), "mlp"])
    stacked = StackedEnsemble([mlp(), mlp()])
    with pytest.raises(ValueError, match="`batches` to be one of"):
        stacked(torch.zeros(N, 6), batches="mine")
    with pytest.raises(ValueError, match="one batch per member"):
        stacked(torch.zeros(3, N, 6), batches="separate")
    for ensemble in (stacked, Ensemble([mlp(), mlp()])):
        with pytest.raises(ValueError, match=r"positional input of tensors.* but got SimpleNamespace\."):
            ensemble(SimpleNamespace(x=torch.zeros(2, N, 6)), batches="separate")
        with pytest.raises(ValueError, match=r"positional input of tensors.* but got none\."):
            ensemble(input=torch.zeros(2, N, 6), batches="separate")

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), x

    with pytest.raises(TypeError, match=r"A member returned tuple.*Wrap"):
        StackedEnsemble([Pair(), Pair()])(torch.zeros(N, 6))


def test_one_member():
    one, stacked = pair(mlp, num_members=1)
    x = rows()
    torch.testing.assert_close(stacked(x), one(x), **EXACT)


def test_ensembles_are_not_kept_alive():
    from torchace.nn import optimizers

    stacked = StackedEnsemble([mlp(), mlp()])
    torch.optim.SGD(stacked.parameters(), lr=0.1).step()
    watched = len(optimizers._watched)
    del stacked
    gc.collect()
    assert len(optimizers._watched) < watched


def test_members_in_channels_last_stay_in_channels_last() -> None:
    torch.manual_seed(0)
    members = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).double() for _ in range(3)]
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    expected = torch.stack([member(x) for member in members])
    plain = StackedEnsemble(members)
    ensemble = StackedEnsemble([member.to(memory_format=torch.channels_last) for member in members])
    assert plain.stacked[0].weight.is_contiguous()
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in ensemble.stacked[0].weight)
    torch.testing.assert_close(ensemble(x), expected)
