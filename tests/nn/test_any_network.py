"""`StackedEnsemble` of common networks, against the same members one after another, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.networks import LARGE, SMALL, Attention, Text, timm, torchvision
from torchace.nn import Ensemble, StackedEnsemble

OWN = ("mlp", "cifar_resnet", "conv1d", "unet", "attention", "wild")  # networks that need no other package


def with_marks(names: Iterable[str], *, first_tier: Iterable[str] = OWN) -> list[Any]:
    """Mark networks of other packages as extended."""
    return [name if name in first_tier else pytest.param(name, marks=pytest.mark.extended) for name in names]


# Calls that no rule computes: their nodes run under vmap, or member by member.
WITHOUT_RULE = {"wild": {"bilinear", "einsum", "prelu"}, "unet": {"conv_transpose2d"}}
# Float64 keeps 16 digits; a network of a hundred layers in training mode (batch statistics of two samples) loses
# a few, and a bias before BatchNorm has a gradient that is rounding alone, so both are in proportion to the largest.
DIGITS = 1e-7


def pair(make: Callable[[], nn.Module], count: int = 2) -> tuple[Ensemble, StackedEnsemble]:
    torch.manual_seed(0)
    members = [make().double() for _ in range(count)]
    return Ensemble(copy.deepcopy(members)), StackedEnsemble(members)


def assert_equal(ours: Tensor, theirs: Tensor, what: str, size: float = 0.0) -> None:
    difference = float((ours - theirs).detach().abs().max())
    assert difference <= DIGITS * max(size, float(theirs.detach().abs().max())), f"{what}: {difference}"


def assert_same_gradients(loop: Ensemble, stacked: StackedEnsemble) -> None:
    largest = max(float(p.grad.abs().max()) for p in loop.parameters() if p.grad is not None)
    for name, parameter in stacked.stacked.named_parameters():
        alone = [member.get_parameter(name).grad for member in loop]
        if parameter.grad is None:
            assert all(gradient is None or not gradient.any() for gradient in alone), name
        else:
            assert_equal(parameter.grad, torch.stack([g for g in alone if g is not None]), name, largest)


@pytest.mark.parametrize("name", with_marks([*SMALL, *LARGE]))
def test_outputs_gradients_and_statistics(name: str) -> None:
    make, inputs = {**SMALL, **LARGE}[name]
    loop, stacked = pair(make)
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    for training in (True, False):  # evaluation uses the statistics that training left
        loop.train(training), stacked.train(training)
        loop.zero_grad(), stacked.zero_grad()
        ours, theirs = stacked(x), loop(x)
        assert_equal(ours, theirs, "logits")
        ours.cos().sum().backward()
        theirs.cos().sum().backward()
        assert_same_gradients(loop, stacked)
        how = stacked.explain()
        assert how.call_by_call, how.reason
        others = {node.function for node in how if node.how in ("vmap", "loop")}
        assert others <= WITHOUT_RULE.get(name, set()), how
    for k, member in enumerate(loop):
        for key, buffer in member.named_buffers():
            assert_equal(stacked.stacked.get_buffer(key)[k].double(), buffer.double(), key)


@pytest.mark.parametrize("name", with_marks(["cifar_resnet", "attention", "bert", "unet"], first_tier=("attention",)))
def test_compiled_and_exported(name: str) -> None:
    make, inputs = SMALL[name]
    _, stacked = pair(make)
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    for training in (True, False):
        stacked.train(training)
        torch.compiler.reset()
        stacked.zero_grad()
        before = copy.deepcopy(stacked.state_dict())
        expected = stacked(x)
        expected.cos().sum().backward()
        gradients = [p.grad for p in stacked.parameters()]
        after = copy.deepcopy(stacked.state_dict())
        stacked.load_state_dict(before)
        stacked.zero_grad()
        compiled = torch.compile(stacked, fullgraph=True, backend="aot_eager")
        logits = compiled(x)
        logits.cos().sum().backward()
        assert_equal(logits, expected, "logits")
        for ours, theirs in zip(stacked.parameters(), gradients, strict=True):
            if theirs is not None:
                assert_equal(ours.grad, theirs, "gradient", 1.0)
        for key, value in stacked.state_dict().items():
            assert_equal(value.double(), after[key].double(), key, 1.0)
    exported = torch.export.export(stacked, (x,))
    assert_equal(exported.module()(x), stacked(x), "exported")


def test_each_layers_own_mode_counts() -> None:
    """A frozen BatchNorm in a network that is trained."""
    loop, stacked = pair(SMALL["cifar_resnet"][0])
    x = torch.randn(3, 3, 12, 12).double()
    for ensemble in (loop, stacked):
        ensemble(x)
        for module in ensemble.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    assert_equal(stacked(x), loop(x), "logits")
    assert torch.equal(stacked.stacked.bn1.num_batches_tracked, torch.ones(2))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (torchvision("convnext_tiny", depth=True, stochastic_depth_prob=0.5), torch.randn(64, 3, 32, 32)),
        (
            timm("vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.5, drop_rate=0.2),
            torch.randn(8, 3, 32, 32),
        ),
        (lambda: Text("bert", dropout=0.3), torch.randint(1, 50, (4, 8))),
    ],
    ids=["convnext", "vit", "bert"],
)
def test_random_layers_draw_for_each_member(make: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    member = make()
    stacked = StackedEnsemble([member, copy.deepcopy(member)])
    with torch.no_grad():
        logits = stacked(x)
        assert stacked.explain().call_by_call
        assert not torch.equal(logits[0], logits[1])  # equal weights, other masks
        stacked.eval()
        logits = stacked(x)
        torch.testing.assert_close(logits[0], logits[1])


def test_keep_rate_and_independence_of_dropout() -> None:
    stacked = StackedEnsemble([nn.Sequential(nn.Linear(50, 400), nn.Dropout(0.3)) for _ in range(2)])
    with torch.no_grad():
        for parameter in stacked.parameters():
            parameter.fill_(1.0)
    kept = (stacked(torch.ones(100, 50)) != 0).double()  # (2, 100, 400)
    assert abs(float(kept.mean()) - 0.7) < 4 * (0.3 * 0.7 / kept.numel()) ** 0.5
    correlation = torch.corrcoef(kept.flatten(1))[0, 1]
    assert abs(float(correlation)) < 4 / kept[0].numel() ** 0.5


def test_autocast() -> None:
    members = [Attention() for _ in range(3)]
    loop, stacked = Ensemble(copy.deepcopy(members)), StackedEnsemble(members)
    x = torch.randn(4, 5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = stacked(x), loop(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)  # bfloat16 keeps 8 bits
    assert stacked.explain().call_by_call
