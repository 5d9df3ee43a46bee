import pytest
import torch

from tests.engine.cases import CLASSES, FEATURES, MEMBERS, cohort, members
from torchace.engine.network import Cohort, Network, SideBySide
from torchace.models import mlp
from torchace.nn import SMOC, Ensemble

SEEDS = [3, 4]


def networks() -> dict[str, Network]:
    return {"cohort": cohort(SEEDS), "side by side": SideBySide([Ensemble(members(seed)) for seed in SEEDS])}


@pytest.mark.parametrize("kind", ["cohort", "side by side"])
def test_runs_see_their_own_batches(kind: str) -> None:
    network = networks()[kind]
    x = torch.randn(2, 7, FEATURES, dtype=torch.float64)
    expected = torch.stack([torch.stack([m(x[r]) for m in members(seed)]) for r, seed in enumerate(SEEDS)])
    assert network(x).shape == (2, MEMBERS, 7, CLASSES)
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["cohort", "side by side"])
def test_members_see_their_own_batches(kind: str) -> None:
    x = torch.randn(2, MEMBERS, 7, FEATURES, dtype=torch.float64)
    expected = torch.stack(
        [torch.stack([m(x[r, k]) for k, m in enumerate(members(seed))]) for r, seed in enumerate(SEEDS)]
    )
    torch.testing.assert_close(networks()[kind](x, own=True), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["cohort", "side by side"])
def test_all_runs_predict_one_input(kind: str) -> None:
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    expected = torch.stack([torch.stack([m(x) for m in members(seed)]) for seed in SEEDS])
    torch.testing.assert_close(networks()[kind].predict(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["cohort", "side by side"])
def test_one_run_by_itself(kind: str) -> None:
    network = networks()[kind]
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    for r in range(2):
        torch.testing.assert_close(network.ensemble(r)(x), network.predict(x)[r], rtol=0, atol=1e-14)


def test_a_run_by_itself_is_a_copy() -> None:
    network = Cohort([[torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)) for _ in range(2)]] * 2)
    network.stack.stacked[0].bias.requires_grad_(False)
    network(torch.randn(2, 4, 1, 5, 5))  # moves the statistics
    alone = network.ensemble(1)
    assert alone.num_members == 2
    assert [p.requires_grad for p in alone.parameters()] == [p.requires_grad for p in network.parameters()]
    for (name, part), whole in zip(alone.state_dict().items(), network.stack.state_dict().values(), strict=True):
        assert torch.equal(part, whole[2:]), name
        assert part.data_ptr() != whole[2:].data_ptr()
    x = torch.randn(3, 1, 5, 5)
    network.eval(), alone.eval()
    torch.testing.assert_close(alone(x), network.predict(x)[1])


def test_members_without_a_chain_go_through_the_stack() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 2

    runs = [[Doubled() for _ in range(MEMBERS)] for _ in SEEDS]
    x = torch.randn(2, MEMBERS, 7, FEATURES)
    network = Cohort(runs)
    expected = torch.stack([torch.stack([m(x[r, 0]) for m in run]) for r, run in enumerate(runs)])
    torch.testing.assert_close(network(x[:, 0]), expected)
    expected = torch.stack([torch.stack([m(x[r, k]) for k, m in enumerate(run)]) for r, run in enumerate(runs)])
    torch.testing.assert_close(network(x, own=True), expected)


def test_images_are_taken_as_they_are() -> None:
    network = Cohort([[mlp(64, 4, CLASSES) for _ in range(2)] for _ in range(3)])
    assert network(torch.zeros(3, 5, 1, 8, 8)).shape == (3, 2, 5, CLASSES)
    assert network(torch.zeros(3, 2, 5, 1, 8, 8), own=True).shape == (3, 2, 5, CLASSES)


def test_heads_on_a_trunk_are_side_by_side() -> None:
    ensembles = [SMOC(mlp(FEATURES, 5, None), 5, CLASSES, MEMBERS) for _ in range(2)]
    network = SideBySide(ensembles)
    x = torch.randn(2, 4, FEATURES)
    torch.testing.assert_close(network(x), torch.stack([e(part) for e, part in zip(ensembles, x, strict=True)]))
    assert network.num_members == MEMBERS


def test_a_network_must_say_how_it_computes() -> None:
    for call in (lambda n: n(torch.zeros(1)), lambda n: n.predict(torch.zeros(1)), lambda n: n.ensemble(0)):
        with pytest.raises(TypeError, match="Network does not"):
            call(Network(1, 1))
