"""The losses as modules call their functions with the options they hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy, negative_correlation
from torchace.nn import (
    AmendedCrossEntropyLoss,
    BinaryAmendedCrossEntropyLoss,
    Ensemble,
    MemberWeights,
    NegativeCorrelationLoss,
)
from torchace.nn.losses import DEFAULT_LOSSES, attach_loss

K, N, C = 3, 6, 4
ALPHA = [0.2, 0.3, 0.5]  # not representable: float32 weights would show in float64


def classes() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(K, N, C, dtype=torch.float64), torch.randint(C, (N,))


def elements() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(K, N, 2, dtype=torch.float64), torch.rand(N, 2, dtype=torch.float64)


CASES = [
    (AmendedCrossEntropyLoss, amended_cross_entropy, classes, {}),
    (
        AmendedCrossEntropyLoss,
        amended_cross_entropy,
        classes,
        {
            "member_weights": ALPHA,
            "weight": torch.tensor([0.5, 1.0, 2.0, 1.5]).double(),
            "ignore_index": 1,
            "label_smoothing": 0.1,
            "reduction": "sum",
        },
    ),
    (AmendedCrossEntropyLoss, amended_cross_entropy, classes, {"detach_others": False, "reduction": "none"}),
    (BinaryAmendedCrossEntropyLoss, binary_amended_cross_entropy, elements, {}),
    (
        BinaryAmendedCrossEntropyLoss,
        binary_amended_cross_entropy,
        elements,
        {"member_weights": ALPHA, "pos_weight": torch.tensor([0.5, 3.0]).double(), "reduction": "none"},
    ),
    (NegativeCorrelationLoss, negative_correlation, elements, {}),
    (NegativeCorrelationLoss, negative_correlation, elements, {"member_weights": ALPHA, "reduction": "sum"}),
]


@pytest.mark.parametrize("diversity", [0.7, torch.tensor(0.7, dtype=torch.float64)])
@pytest.mark.parametrize(("module", "function", "make", "options"), CASES)
def test_modules_equal_functions(module, function, make, options, diversity):
    torch.manual_seed(0)
    outputs, target = make()
    loss = module(diversity, **options)
    assert torch.equal(loss(outputs, target), function(outputs, target, diversity, **options))
    samples = torch.rand(N, dtype=torch.float64)
    expected = function(outputs, target, diversity, sample_weight=samples, **options)
    assert torch.equal(loss(outputs, target, sample_weight=samples), expected)
    other = {**options, "member_weights": torch.tensor([1.0, 0.0, 0.0])}  # a call's own weights win
    expected = function(outputs, target, diversity, **other)
    assert torch.equal(loss(outputs, target, member_weights=other["member_weights"]), expected)
    if options.get("detach_others", True):
        mixture = torch.rand_like(outputs[0])
        expected = function(outputs, target, diversity, mixture=mixture, **options)
        assert torch.equal(loss(outputs, target, mixture=mixture), expected)
    assert not list(loss.parameters())


@pytest.mark.parametrize("module", [AmendedCrossEntropyLoss, BinaryAmendedCrossEntropyLoss, NegativeCorrelationLoss])
def test_diversity_may_change(module):
    loss = module(0.5)
    assert loss.diversity == 0.5
    assert "diversity=0.5" in repr(loss)
    loss.diversity = 0.25
    assert loss.diversity == 0.25
    loss.diversity = torch.tensor(0.75)
    assert loss.diversity.item() == 0.75
    loss.diversity = torch.tensor(0.5)
    assert loss.diversity.item() == 0.5
    assert "diversity=0.5" in repr(loss)
    assert not loss.state_dict()  # a setting, not a state
    loss.diversity = 1
    assert loss.diversity == 1
    for bad in (-0.1, 1.5, float("nan"), torch.tensor(2.0)):
        with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\]"):
            loss.diversity = bad
    assert loss.diversity == 1  # what was there stays


def test_a_changed_diversity_acts():
    outputs, target = classes()
    loss = AmendedCrossEntropyLoss(torch.tensor(0.2))
    loss.diversity.fill_(0.9)
    assert torch.equal(loss(outputs, target), amended_cross_entropy(outputs, target, torch.tensor(0.9)))
    loss.diversity = 0.4
    assert torch.equal(loss(outputs, target), amended_cross_entropy(outputs, target, 0.4))


def test_options_travel_with_the_module():
    outputs, target = classes()
    options = {"member_weights": ALPHA, "weight": torch.tensor([0.5, 1.0, 2.0, 1.5]).double()}
    loss = AmendedCrossEntropyLoss(torch.tensor(0.7, dtype=torch.float64), **options)
    other = AmendedCrossEntropyLoss(0.7, member_weights=[0.0, 0.0, 1.0], weight=torch.ones(C).double())
    other.load_state_dict(loss.state_dict())
    expected = loss(outputs, target)
    torch.testing.assert_close(other(outputs, target), expected, rtol=1e-14, atol=0)
    assert torch.equal(copy.deepcopy(loss)(outputs, target), expected)
    moved = copy.deepcopy(loss).to("meta")
    assert {tensor.device.type for tensor in (moved.diversity, moved.weight, moved.member_weights)} == {"meta"}


@pytest.mark.parametrize("module", [AmendedCrossEntropyLoss, BinaryAmendedCrossEntropyLoss, NegativeCorrelationLoss])
def test_errors_come_when_the_module_is_made(module):
    with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\].*diversity_from_gamma"):
        module(1.4)
    with pytest.raises(TypeError, match="`diversity` to be a number"):
        module("0.5")
    with pytest.raises(ValueError, match="`reduction` to be one of"):
        module(0.5, reduction="avg")
    with pytest.raises(ValueError, match="sum to 1"):
        module(0.5, member_weights=[0.5, 0.4])
    with pytest.raises(TypeError):
        module(0.5, [0.5, 0.5])  # options are named
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        module(0.5, member_weights=[0.5, 0.5])(*(classes() if module is AmendedCrossEntropyLoss else elements()))


def test_label_smoothing_is_checked():
    with pytest.raises(ValueError, match="`label_smoothing`"):
        AmendedCrossEntropyLoss(0.5, label_smoothing=1.5)


def test_half_precision_modules_do_not_round_weights_and_diversity() -> None:
    loss = AmendedCrossEntropyLoss(torch.tensor(0.7), member_weights=[0.2, 0.3, 0.5]).to(torch.bfloat16)
    assert float(loss.diversity) == float(torch.tensor(0.7))
    assert loss.member_weights.tolist() == [0.2, 0.3, 0.5]
    ensemble = Ensemble([nn.Linear(2, 2) for _ in range(3)])
    ensemble.set_member_weights([0.1, 0.2, 0.7])
    assert torch.equal(ensemble.bfloat16().member_weights, torch.tensor([0.1, 0.2, 0.7]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: AmendedCrossEntropyLoss(0.5, member_weights="abc"),
        lambda: AmendedCrossEntropyLoss(0.5, member_weights=[0.5, "x"]),
        lambda: AmendedCrossEntropyLoss(0.5, weight=[1.0, 2.0]),
        lambda: AmendedCrossEntropyLoss(0.5, ignore_index=1.5)(torch.zeros(1, 2, 3), torch.tensor([0, 1])),
        lambda: Ensemble(nn.Linear(2, 2)),
    ],
)
def test_wrong_types(call) -> None:
    with pytest.raises(TypeError, match=r"^Expected"):
        call()


@pytest.mark.parametrize("kind", [AmendedCrossEntropyLoss, BinaryAmendedCrossEntropyLoss, NegativeCorrelationLoss])
def test_whole_numbers_in_tensors(kind):
    loss = kind(torch.tensor(0), member_weights=torch.tensor([1, 0])).to("cpu")
    loss.set_diversity(0.5)
    assert loss.diversity == 0.5
    assert loss.member_weights.tolist() == [1.0, 0.0]


def test_weights_that_were_learned_come_without_their_history():
    loss = AmendedCrossEntropyLoss(0.5, member_weights=MemberWeights(2)())
    assert not copy.deepcopy(loss).member_weights.requires_grad


def test_repr_shows_options():
    loss = AmendedCrossEntropyLoss(0.5, member_weights=[0.25, 0.75], label_smoothing=0.1, reduction="sum")
    expected = "diversity=0.5, member_weights=[0.25, 0.75], label_smoothing=0.1, reduction='sum'"
    assert repr(loss) == f"AmendedCrossEntropyLoss({expected})"
    assert repr(NegativeCorrelationLoss(0.5)) == "NegativeCorrelationLoss(diversity=0.5)"


def test_set_diversity_keeps_a_tensor():
    held = torch.tensor(0.2)
    loss = AmendedCrossEntropyLoss(held)
    loss.set_diversity(0.75)
    assert loss.diversity is held
    assert held == 0.75
    loss = NegativeCorrelationLoss(0.2)
    loss.set_diversity(0.75)
    assert loss.diversity == 0.75
    with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\]"):
        loss.set_diversity(-0.1)
    assert loss.diversity == 0.75


@pytest.mark.parametrize("link", DEFAULT_LOSSES)
@pytest.mark.parametrize("other", DEFAULT_LOSSES)
def test_a_loss_trains_ensembles_of_its_link(link, other):
    ensemble = Ensemble([nn.Linear(2, 3)], link=link)
    if link == other:
        attach_loss(ensemble, DEFAULT_LOSSES[other](0.5))
        return
    with pytest.raises(ValueError, match=rf"Expected an ensemble with link='{other}' for .* but got link='{link}'"):
        attach_loss(ensemble, DEFAULT_LOSSES[other](0.5))


def test_member_weights_of_a_loss_become_the_ensembles():
    ensemble = Ensemble([nn.Linear(2, 3), nn.Linear(2, 3)])
    attach_loss(ensemble, AmendedCrossEntropyLoss(0.5))
    assert ensemble.member_weights is None
    attach_loss(ensemble, AmendedCrossEntropyLoss(0.5, member_weights=[0.25, 0.75]))
    assert ensemble.member_weights.tolist() == [0.25, 0.75]
    attach_loss(ensemble, AmendedCrossEntropyLoss(0.5, member_weights=[1.0, 0.0]))
    assert ensemble.member_weights.tolist() == [0.25, 0.75]  # it has its own
