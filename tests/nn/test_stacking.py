"""Stacked forward passes, against the same members one after another."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchace.nn import Ensemble, StackedEnsemble
from torchace.nn import stacked as stacked_module
from torchace.nn.stacking import MemberRNG

ARCHITECTURES = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, groups=2, stride=2),
        nn.BatchNorm2d(6, affine=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2, bias=False), nn.GELU()),
        nn.Sequential(nn.ZeroPad2d(1), nn.AvgPool2d(2)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(36, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
    ),
    "batch norm first": lambda: nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4 * 36, 3)
    ),
    "groups first": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, padding="same"),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(4 * 64, 3),
    ),
    "images out": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 3, 1)),
    "pool first": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3)),
    "vectors": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.ReLU(), nn.Linear(4, 3)),
}
INPUTS = {"shared": (5, 2, 8, 8), "separate": (6, 5, 2, 8, 8), "grouped": (3, 5, 2, 8, 8), "one group": (1, 5, 2, 8, 8)}


@pytest.mark.parametrize("cached", [stacked_module.CACHED, 1, 5 * 4 * 64 * 4])  # all members at once, one, four and two
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_followed_members_equal_members_one_after_another(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, cached: int
) -> None:
    monkeypatch.setattr(stacked_module, "CACHED", cached)
    torch.manual_seed(0)
    members = [ARCHITECTURES[name]().double() for _ in range(6)]
    stacked, loop = StackedEnsemble(members), Ensemble(copy.deepcopy(members))
    x = torch.randn(INPUTS[kind], dtype=torch.float64)
    for training in (True, False):  # evaluation uses the statistics that training left
        stacked.train(training)
        loop.train(training)
        if kind == "shared":
            ours, theirs = stacked(x), loop(x)
        else:
            ours = stacked(x, batches="separate" if kind == "separate" else "grouped")
            theirs = loop(x.repeat_interleave(6 // len(x), 0), batches="separate")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert set(stacked.explain().counts()) <= {"batched", "once"}
        (ours * ours.cos()).sum().backward()
        (theirs * theirs.cos()).sum().backward()
    for k, (mine, other) in enumerate(zip(stacked.unstack(), loop, strict=True)):
        for key, value in other.state_dict().items():
            torch.testing.assert_close(
                mine.state_dict()[key], value, rtol=0, atol=1e-12, msg=lambda m, key=key: key + m
            )
        for key, parameter in other.named_parameters():
            gradient = stacked.stacked.get_parameter(key).grad
            assert gradient is not None
            torch.testing.assert_close(gradient[k], parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "member",
    [
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(6, 3)),  # acts on the last axis of an image
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(256, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        nn.Sequential(nn.Flatten(2), nn.Linear(64, 3)),
    ],
)
def test_other_structures(member: nn.Module) -> None:
    members = [copy.deepcopy(member), member]
    stacked = StackedEnsemble(members)
    x = torch.randn(5, 2, 8, 8)
    torch.testing.assert_close(stacked(x), Ensemble(members)(x))


def test_dropout_masks_differ_between_members() -> None:
    members = [nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(64, 1, 1, bias=False)) for _ in range(2)]
    for member in members:
        nn.init.ones_(member[1].weight)
    out = StackedEnsemble(members)(torch.ones(8, 64, 1, 1))
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_dropout_is_computed_for_all_members_at_once(need_weights: bool) -> None:
    class Attention(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, x, x, need_weights=need_weights)[0]

    member = Attention(8, 2, dropout=0.5, batch_first=True)
    stacked = StackedEnsemble([member, copy.deepcopy(member)])
    out = stacked(torch.randn(4, 5, 8))
    assert stacked.explain().call_by_call, stacked.explain()
    assert not torch.equal(out[0], out[1])  # equal weights, other masks


@pytest.mark.parametrize("draw", [torch.rand_like, lambda h, **kw: torch.zeros_like(h).bernoulli_(**kw)])
def test_random_numbers_of_a_members_own_generator(draw: Callable[..., torch.Tensor]) -> None:
    class Fixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            return h + draw(h, generator=torch.Generator().manual_seed(0))

    members, x = [Fixed(4, 3) for _ in range(3)], torch.randn(5, 4)
    stacked = StackedEnsemble(members)
    torch.testing.assert_close(stacked(x), Ensemble(members)(x))
    assert "draws random numbers" in stacked.explain().reason


def test_in_place_change_of_a_shared_input_is_refused() -> None:
    members = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)) for _ in range(3)]
    with pytest.raises(ValueError, match="changed their input in place"):
        StackedEnsemble(members)(torch.randn(5, 4))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 4)), (1, 6, 6)),
        (lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 4)), (5, 4)),
    ],
)
def test_empty_batch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    members = [make() for _ in range(2)]
    stacked = StackedEnsemble(members)
    for count in (2, 0):
        x = torch.rand(count, *shape)
        assert stacked(x).shape == (2, *members[0](x).shape)
    assert StackedEnsemble(members)(x).shape == (2, *members[0](x).shape)


def test_a_forward_that_first_depends_on_data_at_a_later_call_or_under_a_transform() -> None:
    class Flagged(nn.Linear):
        def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
            h = super().forward(x)
            return 2 * h if flag and h.sum() > 0 else h

    members, x = [Flagged(4, 3) for _ in range(3)], torch.randn(5, 4)
    stacked = StackedEnsemble(members)
    stacked(x)
    match = (
        r"Expected a forward .* data-dependent, .* Use Ensemble\(members\), or call the ensemble before torch\.compile"
    )
    with pytest.raises(ValueError, match=match):
        stacked(x, flag=True)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):  # as a member alone
        torch.func.vmap(lambda x: StackedEnsemble(members)(x, flag=True))(torch.randn(2, 5, 4))
    with pytest.raises(RuntimeError, match=match):
        torch.compile(StackedEnsemble(members), backend="aot_eager")(x, flag=True)


class _Noisy(nn.Module):
    """Draws numbers in a way that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, torch.randperm(4)])


def test_random_numbers_of_members_that_run_one_by_one_depend_on_seed_step_and_member() -> None:
    torch.manual_seed(0)
    stacked = StackedEnsemble([_Noisy(), _Noisy()])
    x, members, step = torch.randn(2, 5, 4), torch.tensor([0]), torch.tensor(3)
    both = stacked.compute([x], {}, own=True, rng=MemberRNG(torch.tensor([7, 8]), members, step))
    again = stacked.compute([x], {}, own=True, rng=MemberRNG(torch.tensor([9, 8]), members, step))
    assert not stacked.explain().call_by_call
    assert torch.equal(both[1], again[1])
    assert not torch.equal(both[0], again[0])


class _InPlace(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.change, self.bias, self.linear = change, nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2  # shared by all members, or by those of a group
        self.change(h, self.bias)
        return self.linear(h)


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "operator": lambda h, bias: h.__iadd__(bias),
    "method": lambda h, bias: h.add_(bias),
    "without rule": lambda h, bias: h.expm1_(),
    "index": lambda h, bias: h.index_fill_(1, torch.tensor([0]), 2.0),
    "item": lambda h, bias: h.__setitem__((slice(None), 0), bias[0]),
}


@pytest.mark.parametrize("batches", ["shared", "separate", "grouped"])
@pytest.mark.parametrize("change", CHANGES)
def test_in_place_change_of_a_shared_activation(change: str, batches: str) -> None:
    members = [_InPlace(CHANGES[change]) for _ in range(6)]
    x = torch.randn({"shared": (5, 4), "separate": (6, 5, 4), "grouped": (3, 5, 4)}[batches])
    own = x if batches == "shared" else x.repeat_interleave(6 // len(x), 0)
    expected = Ensemble(members)(own, batches=batches.replace("grouped", "separate"))
    torch.testing.assert_close(StackedEnsemble(members)(x, batches=batches), expected)


class _Scaled(nn.Module):
    """A number of another type than the activations, as a learned temperature under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU()), nn.Parameter(torch.tensor(2.0).double())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.body(x) * self.scale).sum(1)) * self.scale


def test_type_promotion_of_a_number_of_each_member() -> None:
    members = [_Scaled() for _ in range(3)]
    x = torch.randn(5, 2, 8)
    out = StackedEnsemble(members)(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, Ensemble(members)(x))


class _DropPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(4, 3), nn.Parameter(torch.tensor([0.5, 0.6, 0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h * torch.empty_like(h).bernoulli_(self.keep.detach())


def test_random_masks_with_learned_probabilities_depend_on_seed_and_step_alone() -> None:
    stacked = StackedEnsemble([_DropPath(), _DropPath()])
    x = torch.randn(2, 50, 4)
    seeds, members = torch.tensor([7, 8]), torch.tensor([0])
    one, two, other = (
        stacked.compute([x], {}, own=True, rng=MemberRNG(seeds, members, torch.tensor(step))) for step in (3, 3, 4)
    )
    assert stacked.explain().call_by_call
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_random_numbers_of_a_run_do_not_depend_on_other_runs():
    step, members, cpu = torch.tensor(3), torch.tensor([0, 1]), torch.device("cpu")
    both = MemberRNG(torch.tensor([5, 7]), members, step).uniform((4, 3), torch.float32, cpu)
    alone = MemberRNG(torch.tensor([7]), members, step).uniform((2, 3), torch.float32, cpu)
    assert torch.equal(both[2:], alone)


class _Masked(nn.Module):
    """Selects values by a member's own data; for an input of zeros, all members select as many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.ones_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h + h[h > 0].mean() + h.masked_select(h > 0.5).sum() + nn.functional.one_hot((h > 0).sum(1))[:, -1:]


class _ReadsMean(nn.Module):
    """Reads a running mean as a number: equal in all members at the first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) - float(self.mean)
        self.mean.lerp_(h.detach().mean(), 0.5)
        return h


@pytest.mark.parametrize("make", [_Masked, _ReadsMean])
def test_values_that_differ_between_members_at_a_later_call_only(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    members = [make() for _ in range(4)]
    stacked, one = StackedEnsemble(members), Ensemble(members)
    for x in (torch.zeros(5, 4), torch.randn(5, 4), torch.randn(6, 4)):
        torch.testing.assert_close(stacked(x), one(x))
    assert "data" in stacked.explain().reason
