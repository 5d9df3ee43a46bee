"""Which loss goes with which link, and λ set from outside."""

import pytest
import torch
from torch import nn

from torchace.nn import AmendedCrossEntropyLoss, Ensemble, NegativeCorrelationLoss
from torchace.nn.loss_registry import LOSSES, check_pair, set_diversity, share_member_weights


@pytest.mark.parametrize("link", LOSSES)
@pytest.mark.parametrize("other", LOSSES)
def test_a_loss_belongs_to_its_link(link, other):
    ensemble = Ensemble([nn.Linear(2, 3)], link=link)
    if link == other:
        check_pair(ensemble, LOSSES[other](0.5))
        return
    with pytest.raises(ValueError, match=rf"Expected an ensemble with link='{other}' for .* but got link='{link}'"):
        check_pair(ensemble, LOSSES[other](0.5))


def test_diversity_is_set_where_it_is():
    held = torch.tensor(0.2)
    loss = AmendedCrossEntropyLoss(held)
    set_diversity(loss, 0.75)
    assert loss.diversity is held
    assert held == 0.75
    loss = NegativeCorrelationLoss(0.2)
    set_diversity(loss, 0.75)
    assert loss.diversity == 0.75
    with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\]"):
        set_diversity(loss, -0.1)
    assert loss.diversity == 0.75


def test_the_mixture_that_is_trained_is_the_one_that_predicts():
    ensemble = Ensemble([nn.Linear(2, 3), nn.Linear(2, 3)])
    share_member_weights(ensemble, AmendedCrossEntropyLoss(0.5))
    assert ensemble.member_weights is None
    share_member_weights(ensemble, AmendedCrossEntropyLoss(0.5, member_weights=[0.25, 0.75]))
    assert ensemble.member_weights.tolist() == [0.25, 0.75]
    share_member_weights(ensemble, AmendedCrossEntropyLoss(0.5, member_weights=[1.0, 0.0]))
    assert ensemble.member_weights.tolist() == [0.25, 0.75]  # it has its own
