"""One training step by the formulas of the design, and which member is first NaN or Inf."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.lab.training.small_trainings import (
    BATCH,
    CLASSES,
    FEATURES,
    MEMBERS,
    assert_same,
    make_group,
    members,
    run_group,
    train_config,
    weights,
)
from torchace.functional import amended_cross_entropy
from torchace.lab.training import step as step_module
from torchace.lab.training.config import TrainConfig, make_optimizer
from torchace.lab.training.run_group import RunGroup, all_finite, first_nonfinite, nonfinite_member
from torchace.lab.training.step import StepResult, TrainStep
from torchace.models import mlp
from torchace.nn import SMOC, Ensemble


def one_step(kind: str, diversity: float, network: RunGroup, **options: object) -> StepResult:
    """One step of SGD with rate 1 and nothing else: the weights move by the gradient."""
    settings = train_config(kind, 1, optimizer="sgd", momentum=0.0, learning_rate=1.0, **options)
    optimizer = make_optimizer(settings, list(network.parameters()))
    x, y = own_batch()
    if kind == "shared":
        x, y = x[:, 0], y[:, 0]
    lam = torch.full((network.num_runs,), diversity, dtype=torch.float64)
    return TrainStep(network, optimizer, settings)(x, y, None, lam, torch.ones(network.num_runs, dtype=torch.bool))


def own_batch(runs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(runs, MEMBERS, BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (runs, MEMBERS, BATCH), generator=generator)


@pytest.mark.parametrize("diversity", [0.0, 0.3, 1.0])
def test_exchanged_batches_are_sample_weights_on_a_common_batch(diversity: float) -> None:
    network = make_group([5])
    ensemble = network.ensemble(0)
    x, y = own_batch()
    weight = torch.zeros(MEMBERS, MEMBERS, BATCH, dtype=torch.float64)
    for k in range(MEMBERS):
        weight[k, k] = 1.0
    loss = amended_cross_entropy(
        ensemble(x[0].flatten(0, 1)), y[0].flatten(), diversity, sample_weight=weight.flatten(1)
    )
    loss.backward()
    before = weights(network, 0)
    result = one_step("exchanged", diversity, network)
    torch.testing.assert_close(result.losses.sum(), loss.detach(), rtol=0, atol=1e-12)
    moved = weights(network, 0)
    for name, parameter in ensemble.named_parameters():
        torch.testing.assert_close(before[name] - moved[name], parameter.grad, rtol=0, atol=1e-12)


def test_losses_equal_the_training_losses() -> None:
    network = make_group([5])
    x, y = own_batch()
    logits = network.predict(x[0, 0])[0].detach()
    result = one_step("shared", 0.4, network)
    expected = amended_cross_entropy(logits, y[0, 0], 0.4, reduction="none").mean(1)
    torch.testing.assert_close(result.losses[0], expected, rtol=0, atol=1e-12)
    mixture = logits.softmax(2).mean(0)
    score = -mixture[torch.arange(BATCH), y[0, 0]].log().mean()
    assert float(result.score[0]) == pytest.approx(float(score), abs=1e-6)  # scored in float32


def test_with_own_batches_the_score_is_the_members_mean() -> None:
    network = make_group([5])
    x, y = own_batch()
    logits = network(x, own=True)[0].detach()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y[0].flatten())
    assert float(one_step("exchanged", 0.4, network).score[0]) == pytest.approx(float(expected), abs=1e-6)


def test_a_stopped_run_keeps_its_weights_and_the_others_train() -> None:
    network = make_group([5, 6])
    settings = train_config("shared", 1, optimizer="sgd", momentum=0.0)
    optimizer = make_optimizer(settings, list(network.parameters()))
    x, y = own_batch(2)
    before = [weights(network, r) for r in range(2)]
    active = torch.tensor([False, True])
    TrainStep(network, optimizer, settings)(x[:, 0], y[:, 0], None, torch.tensor([0.5, 0.5]).double(), active)
    assert_same(weights(network, 0), before[0], within=0)
    assert any(not value.equal(before[1][name]) for name, value in weights(network, 1).items())


@pytest.mark.parametrize("kind", ["shared", "exchanged", "separate"])
def test_bf16_keeps_weights_and_losses_in_float32(kind: str) -> None:
    diversity = 0.0 if kind == "separate" else 0.5
    results = {}
    for precision in ("float32", "bf16"):
        network = make_group([5], torch.float32)
        settings = TrainConfig(
            steps=1, batches=kind, precision=precision, optimizer="sgd", momentum=0.0, learning_rate=1.0
        )
        optimizer = make_optimizer(settings, list(network.parameters()))
        x, y = own_batch()
        x, y = (x[:, 0], y[:, 0]) if kind == "shared" else (x, y)
        lam = torch.tensor([diversity])
        result = TrainStep(network, optimizer, settings)(x.float(), y, None, lam, torch.ones(1, dtype=torch.bool))
        assert result.losses.dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in network.parameters())
        results[precision] = result.losses, weights(network, 0)
    # bf16 has 8 bits: the products are rounded to 2^-9 of numbers of about 1
    torch.testing.assert_close(results["bf16"][0], results["float32"][0], rtol=0, atol=0.02)
    assert not results["bf16"][0].equal(results["float32"][0])
    assert_same(results["bf16"][1], results["float32"][1], within=0.02)


class TestFaults:
    """Which member is first NaN or Inf."""

    def setup_method(self) -> None:
        self.network = make_group([5, 6, 7])
        self.logits = torch.zeros(3, MEMBERS, BATCH, CLASSES)
        self.losses = torch.zeros(3, MEMBERS)
        for parameter in self.network.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def find_nonfinite(self) -> list[int]:
        codes = first_nonfinite(self.network, self.logits, self.losses).tolist()
        members = [nonfinite_member(code, MEMBERS) for code in codes]
        return [-1 if code < 0 else MEMBERS if k is None else k for code, k in zip(codes, members, strict=True)]

    def test_no_member_is_nonfinite(self) -> None:
        assert self.find_nonfinite() == [-1, -1, -1]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_loss(self, bad: float) -> None:
        self.losses[1, 2] = bad
        assert self.find_nonfinite() == [-1, 2, -1]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_own_logits_are_blamed_before_other_members(self, bad: float) -> None:
        self.losses[1] = math.nan  # a coupled loss is NaN for all members
        self.logits[1, 1, 3, 0] = bad
        assert self.find_nonfinite() == [-1, 1, -1]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_gradient_of_one_member(self, bad: float) -> None:
        for parameter in self.network.parameters():
            gradient = torch.zeros_like(parameter)
            gradient.view(3 * MEMBERS, -1)[2 * MEMBERS + 1, 0] = bad
            parameter.grad = gradient
            assert self.find_nonfinite() == [-1, -1, 1]
            parameter.grad = torch.zeros_like(parameter)

    def test_opposite_infinities_do_not_cancel(self) -> None:
        next(self.network.parameters()).grad.view(3 * MEMBERS, -1)[0, :2] = torch.tensor([math.inf, -math.inf])
        assert self.find_nonfinite() == [0, -1, -1]

    def test_a_nonfinite_trunk_is_no_members_failure(self) -> None:
        self.network = RunGroup([SMOC(mlp(FEATURES, 5, None), 5, CLASSES, MEMBERS) for _ in range(3)])
        for parameter in self.network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert self.find_nonfinite() == [-1, -1, -1]
        self.network.get_parameter("trunk.stacked.linear1.weight").grad[2, 0, 0] = math.nan  # type: ignore[index]
        assert self.find_nonfinite() == [-1, -1, MEMBERS]

    def test_members_behind_a_trunk(self) -> None:
        self.network = RunGroup([Ensemble(members(seed), mlp(4, FEATURES, None).double()) for seed in (5, 6, 7)])
        for parameter in self.network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.network.get_parameter("members.stacked.fc.bias").grad[2, 1] = math.inf  # type: ignore[index]
        assert self.find_nonfinite() == [2, -1, -1]
        self.network.get_parameter("trunk.stacked.linear1.bias").grad[1, 1] = math.inf  # type: ignore[index]
        assert self.find_nonfinite() == [2, MEMBERS, -1]

    def test_before_the_first_backward_there_are_no_gradients(self) -> None:
        self.network.zero_grad()
        assert self.find_nonfinite() == [-1, -1, -1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_is_seen(bad: float) -> None:
    values = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64), None, torch.zeros(5, 1)]
    assert all_finite(values)
    for place in (0, 1, 3):
        corrupted = [None if value is None else value.clone() for value in values]
        corrupted[place].view(-1)[-1] = bad  # type: ignore[union-attr]
        assert not all_finite(corrupted)


def test_large_finite_values_are_not_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.tensor([3e38, 3e38])
    assert not all_finite([large])  # its norm overflows: a closer look is needed, and finds nothing
    monkeypatch.setattr(step_module, "all_finite", lambda values: False)
    assert one_step("shared", 0.5, make_group([5])).nonfinite.tolist() == [-1]  # type: ignore[union-attr]


def test_finite_gradients_need_no_search_for_nonfinite_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(step_module, "first_nonfinite")
    assert one_step("shared", 0.5, make_group([5])).nonfinite is None


def with_layer(kind: str, seed: int) -> nn.Module:
    """A member whose training mode predicts something else than its evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.BatchNorm1d(16) if kind == "norm" else nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(FEATURES, 16), layer, nn.ReLU(), nn.Linear(16, CLASSES)).double()


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("layer", ["norm", "dropout"])
def test_exchanged_batches_take_a_members_own_share_from_its_training_mode(layer: str, task: str) -> None:
    """Line 2 of the design, (1-λ)(q^k - p) + λ(q̄ - p), with q^k the prediction that is differentiated, also in q̄."""
    lam, count = 0.8, 2
    plain = [with_layer(layer, k) for k in range(count)]
    copies = copy.deepcopy(plain)
    network = run_group([copies])
    settings = train_config("exchanged", 1, optimizer="sgd", momentum=0.0, learning_rate=1.0, task=task)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, count, BATCH, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (1, count, BATCH), generator=generator)
    p = torch.nn.functional.one_hot(y, CLASSES).double()

    seen: list[Tensor] = []  # logits in training mode, with the masks of dropout, and their gradient

    def look(module: nn.Module, _: object, z: Tensor) -> None:
        if module.training:
            seen.append(z.detach()[0])
            z.register_hook(lambda gradient: seen.append(gradient[0]))

    network.register_forward_hook(look)
    optimizer = make_optimizer(settings, list(network.parameters()))
    lam_of_run, active = torch.tensor([lam], dtype=torch.float64), torch.tensor([True])
    losses = TrainStep(network, optimizer, settings)(
        x, y if task == "classification" else p, None, lam_of_run, active
    ).losses
    z, gradient = seen  # (K, B, C)
    for k, other in enumerate(reversed(plain)):
        with torch.no_grad():
            theirs = other.eval()(x[0, k])
        if task == "classification":
            own, theirs, log_q = z[k].softmax(-1), theirs.softmax(-1), z[k].log_softmax(-1)
            value = -((p[0, k] - lam / count * theirs) * log_q).sum(-1).mean()
        else:
            own = z[k]
            value = (0.5 * (own - p[0, k]) ** 2 - lam * (own - (own + theirs) / count) ** 2).mean()  # 2(1 - 1/K) = 1
        expected = (1 - lam) * (own - p[0, k]) + lam * ((own + theirs) / count - p[0, k])
        # float64, numbers of about 1
        torch.testing.assert_close(losses[0, k], value, rtol=0, atol=1e-13)
        size = BATCH if task == "classification" else BATCH * CLASSES
        torch.testing.assert_close(gradient[k], expected / size, rtol=0, atol=1e-13)
