"""Members on several ranks compute the same as one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchace as ace
from tests.support.processes import counting, team
from torchace.models import mlp
from torchace.nn import Ensemble, MemberParallelEnsemble, StackedEnsemble
from torchace.nn.base import split_range

FEATURES, CLASSES, BATCH, STEPS = 6, 4, 10, 20
EXACT = 1e-12  # float64: sums over members in another order
LOSSES: dict[str, Callable[..., Tensor]] = {
    "softmax": ace.amended_cross_entropy,
    "sigmoid": ace.binary_amended_cross_entropy,
    "identity": ace.negative_correlation,
}
WEIGHTS = {
    3: [0.5, 0.2, 0.3],
    4: [0.1, 0.4, 0.2, 0.3],
    5: [0.3, 0.1, 0.25, 0.15, 0.2],
    7: [1 / 28 * k for k in range(1, 8)],
}


def member(k: int) -> nn.Module:
    """Every member has a width and weights of its own: one in another's place would show."""
    with torch.random.fork_rng():
        torch.manual_seed(k)
        return mlp(FEATURES, 3 + k, CLASSES).double()


def batch(step: int, link: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    if link == "softmax":
        return x, torch.randint(CLASSES, (BATCH,), generator=generator)
    y = torch.rand(BATCH, CLASSES, generator=generator, dtype=torch.float64)
    return x, y.round() if link == "sigmoid" else y


def train_spread(count: int, weights: list[float] | None, link: str) -> dict[str, Any]:
    """This rank's part of a training: the loss of every step, the gradients of the last, the weights after it."""
    ensemble = MemberParallelEnsemble(member, count, link=link)
    ensemble.set_member_weights(weights)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, link)
        logits = ensemble(x)
        assert len(logits) == len(ensemble.local_members)
        loss = LOSSES[link](logits, y, 0.6, mixture=ensemble.mixture(logits), member_weights=ensemble.local_weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **run_ranks(ensemble)}


def train_whole(count: int, weights: list[float] | None, link: str) -> dict[str, Any]:
    """The same in one process."""
    ensemble = Ensemble([member(k) for k in range(count)], link=link)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, link)
        loss = LOSSES[link](ensemble(x), y, 0.6, member_weights=weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **run_ranks(ensemble)}


def run_ranks(ensemble: nn.Module) -> dict[str, Any]:
    return {
        "gradients": {name: p.grad.clone() for name, p in ensemble.named_parameters() if p.grad is not None},
        "weights": {n: value.clone() for n, value in ensemble.state_dict().items() if n != "member_weights"},
    }


def assert_equal(parts: list[dict[str, Tensor]], whole: dict[str, Tensor], within: float = EXACT) -> None:
    """Every tensor is on one rank, and is the one it is in one process."""
    assert sorted(name for part in parts for name in part) == sorted(whole)
    for name, value in {name: value for part in parts for name, value in part.items()}.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.extended
@pytest.mark.parametrize(("size", "count"), [(2, 5), (4, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_training_equals_one_process(size: int, count: int, weighted: bool) -> None:
    weights = WEIGHTS[count] if weighted else None
    parts = team().run(size, train_spread, count, weights, "softmax")
    whole = train_whole(count, weights, "softmax")
    # the loss of one process is the sum over members
    sums = [sum(of_step) for of_step in zip(*(part["losses"] for part in parts), strict=True)]
    assert sums == pytest.approx(whole["losses"], abs=EXACT)
    assert_equal([part["gradients"] for part in parts], whole["gradients"])
    assert_equal([part["weights"] for part in parts], whole["weights"])


@pytest.mark.extended
@pytest.mark.parametrize("link", ["sigmoid", "identity"])
def test_training_with_other_losses_equals_one_process(link: str) -> None:
    parts = team().run(2, train_spread, 3, WEIGHTS[3], link)
    whole = train_whole(3, WEIGHTS[3], link)
    assert_equal([part["weights"] for part in parts], whole["weights"])


def train_without_mixture(count: int) -> dict[str, Any]:
    """Members that ignore each other's predictions."""
    ensemble = MemberParallelEnsemble(member, count)
    x, y = batch(0, "softmax")
    ace.amended_cross_entropy(ensemble(x), y, 0.6).backward()
    return run_ranks(ensemble)["gradients"]


@pytest.mark.extended
def test_without_the_mixture_gradients_differ() -> None:
    """The comparison above can fail: without the others' predictions the gradients differ."""
    parts = team().run(2, train_without_mixture, 4)
    ensemble = Ensemble([member(k) for k in range(4)])
    x, y = batch(0, "softmax")
    ace.amended_cross_entropy(ensemble(x), y, 0.6).backward()
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(parts, run_ranks(ensemble)["gradients"])


def train_on_mesh(count: int) -> dict[str, Any]:
    """Members over two ranks, the batch over two: each column has half of the samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("members", "data"))
    ensemble = MemberParallelEnsemble(member, count, mesh=mesh)
    replicated = DistributedDataParallel(ensemble, process_group=mesh.get_group("data"))
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.02)
    for step in range(STEPS):
        x, y = batch(step, "softmax")
        half = slice(0, BATCH // 2) if mesh.get_local_rank("data") == 0 else slice(BATCH // 2, BATCH)
        logits = replicated(x[half])
        mixture, weights = ensemble.mixture(logits), ensemble.local_weights
        optimizer.zero_grad()
        ace.amended_cross_entropy(logits, y[half], 0.6, mixture=mixture, member_weights=weights).backward()
        optimizer.step()
    gather = ensemble.gather()
    return {**run_ranks(ensemble), "gathered": None if gather is None else gather.state_dict()}


@pytest.mark.extended
def test_training_on_a_mesh_equals_one_process_with_the_whole_batch() -> None:
    parts = team().run(4, train_on_mesh, 3)
    whole = train_whole(3, None, "softmax")
    for column in (parts[0::2], parts[1::2]):  # ranks 0, 2 and 1, 3 share the members
        assert_equal([part["weights"] for part in column], whole["weights"])
    assert_equal([parts[0]["gathered"]], whole["weights"])
    assert [part["gathered"] is None for part in parts] == [False, False, True, True]


# -- communication ----------------------------------------------------------------------------------------------------


def step_sizes(width: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the communication of a rank in a training step and in predictions."""
    ensemble = MemberParallelEnsemble(lambda k: mlp(FEATURES, width, CLASSES).double(), 4)
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    x, y = batch(0, "softmax")
    with counting() as in_a_step:
        logits = ensemble(x)
        mixture, weights = ensemble.mixture(logits), ensemble.local_weights
        ace.amended_cross_entropy(logits, y, 0.5, mixture=mixture, member_weights=weights).backward()
        optimizer.step()
    with counting() as for_probs:
        ensemble.predict_proba(x)
    with counting() as for_log_probs:
        ensemble.predict_log_proba(x)
    return in_a_step, for_probs, for_log_probs


@pytest.mark.extended
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [2, 200])
def test_a_step_sends_only_the_mixture(size: int, width: int) -> None:
    one = ("allreduce", BATCH * CLASSES * 8)  # float64
    for in_a_step, for_probs, for_log_probs in team().run(size, step_sizes, width, backend="counting"):
        assert in_a_step == [one]
        assert for_probs == [one]
        assert for_log_probs == [one, one]


# -- predictions ------------------------------------------------------------------------------------------------------


def predictions(count: int, weights: list[float] | None, link: str, scale: float) -> list[Tensor]:
    ensemble = MemberParallelEnsemble(member, count, link=link)
    return _predictions(ensemble, weights, link, scale)


def _predictions(ensemble: Any, weights: list[float] | None, link: str, scale: float) -> list[Tensor]:
    ensemble.set_member_weights(weights)
    x = scale * batch(0, link)[0]
    if link == "identity":
        return [ensemble.predict(x)]
    given = torch.eye(ensemble.num_members, dtype=torch.float64)[-1]  # the last member alone
    found = [ensemble.predict_log_proba(x), ensemble.predict_proba(x), ensemble.predict(x)]
    return [*found, ensemble.predict_log_proba(x, member_weights=given), ensemble.predict(x, member_weights=given)]


@pytest.mark.extended
@pytest.mark.parametrize("scale", [1.0, 1e5])  # 1e5: probabilities far below what float64 holds
@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
def test_every_rank_predicts_like_one_process(link: str, scale: float) -> None:
    whole = _predictions(Ensemble([member(k) for k in range(3)], link=link), WEIGHTS[3], link, scale)
    if scale > 1 and link == "softmax":
        assert bool((whole[0] < -1000).any())
        assert bool(torch.isfinite(whole[0]).all())
    for part in team().run(2, predictions, 3, WEIGHTS[3], link, scale):
        for ours, theirs in zip(part, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def predict_impossible_class() -> Tensor:
    ensemble = MemberParallelEnsemble([_Fixed([0.0, -torch.inf]), _Fixed([1.0, -torch.inf])])
    return ensemble.predict_log_proba(torch.zeros(1, 1))


class _Fixed(nn.Module):
    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


@pytest.mark.extended
def test_a_class_of_probability_zero() -> None:
    for found in team().run(2, predict_impossible_class):
        assert found.tolist() == [[0.0, -torch.inf]]


# -- gathering and saving ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tied weights, a frozen one, a buffer that is saved and one that is not."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first = nn.Linear(CLASSES, CLASSES)
        self.second = nn.Linear(CLASSES, CLASSES)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(CLASSES)
        self.register_buffer("shift", torch.full((CLASSES,), float(k)), persistent=False)
        with torch.no_grad():
            self.first.weight.fill_(k + 1)
            self.norm.running_mean.fill_(10 * k)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x))) + self.shift


def gather(by_function: bool, everywhere: bool) -> dict[str, Any] | None:
    before = torch.random.get_rng_state()
    members = Tied if by_function else [Tied(k) for k in range(3)]
    torch.random.set_rng_state(before)
    # converted after it was made: what the others look like must follow
    ensemble = MemberParallelEnsemble(members, 3).double().eval()
    ensemble.set_member_weights(WEIGHTS[3])
    state = torch.random.get_rng_state()
    whole = ensemble.gather(everywhere=everywhere)
    assert torch.equal(torch.random.get_rng_state(), state)
    if whole is None:
        return None
    assert not whole.training
    assert [m.second.weight is m.first.weight for m in whole] == [True] * 3
    assert [m.second.bias.requires_grad for m in whole] == [False] * 3
    assert [m.first.weight.requires_grad for m in whole] == [True] * 3
    return {"state": whole.state_dict(), "shifts": [m.shift for m in whole], "weights": whole.member_weights}


@pytest.mark.extended
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("by_function", [False, True])
def test_gather_gives_all_members(by_function: bool, everywhere: bool) -> None:
    first, second = team().run(2, gather, by_function, everywhere)
    assert (second is not None) == everywhere
    for found in filter(None, [first, second]):
        for k in range(3):
            weight = found["state"][f"members.{k}.first.weight"]
            assert weight.dtype == torch.float64
            assert weight.unique().tolist() == [k + 1]
            assert found["state"][f"members.{k}.norm.running_mean"].unique().tolist() == [10 * k]
            assert found["shifts"][k].unique().tolist() == [k]
        assert found["weights"].tolist() == pytest.approx(WEIGHTS[3])


def save(folder: str) -> str:
    ensemble = MemberParallelEnsemble(member, 5)
    ensemble.set_member_weights(WEIGHTS[5])
    ace.save_model(f"{folder}/model", ensemble, diversity=0.5, class_names=list("abcd"), extra={"seed": 3})
    assert Path(folder, "model", "manifest.json").exists()  # on return, on every rank
    again = MemberParallelEnsemble(ace.load_model(f"{folder}/model"))
    assert torch.equal(again(torch.ones(2, FEATURES).double()), ensemble(torch.ones(2, FEATURES).double()))
    try:
        ace.save_model(f"{folder}/file/model", ensemble)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.extended
def test_save_model_writes_one_model_of_all_members(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    problems = team().run(4, save, str(tmp_path))
    loaded = ace.load_model(tmp_path / "model")
    whole = Ensemble([member(k) for k in range(5)])
    whole.set_member_weights(WEIGHTS[5])
    assert type(loaded) is Ensemble
    assert loaded.manifest["extra"] == {"seed": 3}
    assert loaded.manifest["class_names"] == list("abcd")
    x = batch(0, "softmax")[0]
    assert torch.equal(loaded.predict_log_proba(x), whole.predict_log_proba(x))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]
    # a failure on the first rank is one on all ranks
    assert problems[0].startswith("ModelFileError")
    assert set(problems[1:]) == {"RuntimeError: The first rank failed; see its error message."}


# -- one process, errors ----------------------------------------------------------------------------------------------


def test_one_process_has_all_members() -> None:
    ensemble = MemberParallelEnsemble(StackedEnsemble([mlp(FEATURES, 3, CLASSES) for _ in range(3)]))
    whole = Ensemble(list(ensemble))
    x = torch.randn(5, FEATURES)
    assert torch.equal(ensemble(x), whole(x))
    torch.testing.assert_close(ensemble.predict_proba(x), whole.predict_proba(x))
    assert ensemble.state_dict().keys() == whole.state_dict().keys()
    assert ensemble.gather()(x).shape == (3, 5, CLASSES)
    assert len(ensemble) == 3
    assert "local_members=0..2" in repr(ensemble)


@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("parts", [1, 3, 5])
def test_ranges_cover_all_members_and_differ_by_one_at_most(count: int, parts: int) -> None:
    shares = [split_range(count, parts, index) for index in range(parts)]
    assert [k for share in shares for k in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MemberParallelEnsemble(member), ValueError, "Expected `num_members` with a function of members"),
        (
            lambda: MemberParallelEnsemble(linears(2), 3),
            ValueError,
            "Expected `num_members` of 2, the members given, but",
        ),
        (lambda: MemberParallelEnsemble([]), ValueError, "at least one member"),
        (lambda: MemberParallelEnsemble(nn.Linear(2, 2)), TypeError, r"Write \[member\]"),
        (lambda: MemberParallelEnsemble([nn.Linear(2, 2), 3]), TypeError, "member 1 is int"),
        (lambda: MemberParallelEnsemble(lambda k: k, 2), TypeError, "member 0 is int"),
        (
            lambda: MemberParallelEnsemble(Ensemble(linears(2), trunk=nn.Linear(3, 2))),
            TypeError,
            "Expected members without a shared trunk, but got Ensemble with one",
        ),
        (
            lambda: MemberParallelEnsemble(ace.SMOC(mlp(4, 8, None), 8, 2, num_members=5)),
            TypeError,
            "Expected members without a shared trunk, but got SMOC with one. Split the batch over ranks",
        ),
        (
            lambda: MemberParallelEnsemble(linears(2), group=object(), mesh=object()),  # type: ignore[arg-type]
            ValueError,
            "Expected `group` or `mesh`, but got both",
        ),
        (
            lambda: MemberParallelEnsemble(linears(2), link="identity").predict_proba(torch.zeros(1, 2)),
            ValueError,
            "has no probabilities",
        ),
    ],
)
def test_wrong_use(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def refused_on_ranks() -> list[str]:
    found = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    subgroup = dist.new_group([0])
    for options in ({"num_members": 1}, {"num_members": 4, "mesh": mesh}, {"num_members": 4, "group": subgroup}):
        try:
            MemberParallelEnsemble(member, **options)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


@pytest.mark.extended
def test_wrong_use_on_ranks() -> None:
    first, second = team().run(2, refused_on_ranks)
    assert first[0] == second[0]
    assert first[0] == (
        "Expected at most one rank for each of 1 members, but got 2 ranks. Use fewer, or a mesh of members x data."
    )
    assert first[1] == "Expected a mesh with a dimension 'members', but it has ['data']."
    assert (first[2], second[2]) == ("", "Expected a `group` that contains this process, but it does not.")
