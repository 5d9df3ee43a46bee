"""Which loss goes with which link, and λ set from outside: what trainers of other libraries need."""

from __future__ import annotations

import torch
from torch import Tensor

from torchace import _checks
from torchace.nn.base import EnsembleModule
from torchace.nn.losses import AmendedCrossEntropyLoss, BinaryAmendedCrossEntropyLoss, NegativeCorrelationLoss

MemberLoss = AmendedCrossEntropyLoss | BinaryAmendedCrossEntropyLoss | NegativeCorrelationLoss
LOSSES: dict[str, type[MemberLoss]] = {
    "softmax": AmendedCrossEntropyLoss,
    "sigmoid": BinaryAmendedCrossEntropyLoss,
    "identity": NegativeCorrelationLoss,
}


def check_pair(ensemble: object, loss: object) -> None:
    """Refuse what is not an ensemble and a loss of the library that belong together."""
    if not isinstance(ensemble, EnsembleModule):
        raise TypeError(
            f"Expected an ensemble module, but got {type(ensemble).__name__}. "
            "Wrap models in Ensemble([...]), or one model in stack_classifiers(model, num_members)."
        )
    if not isinstance(loss, MemberLoss):
        names = ", ".join(kind.__name__ for kind in LOSSES.values())
        raise TypeError(f"Expected `loss` to be one of {names}, but got {type(loss).__name__}.")
    if loss.reduction == "none":
        raise ValueError("Expected a loss with reduction='mean' or 'sum', but got 'none'.")
    link = next(link for link, kind in LOSSES.items() if isinstance(loss, kind))
    if ensemble.link != link:
        raise ValueError(
            f"Expected an ensemble with link={link!r} for {type(loss).__name__}, but got link={ensemble.link!r}. "
            f"Build the ensemble with link={link!r}."
        )


def share_member_weights(ensemble: EnsembleModule, loss: MemberLoss) -> None:
    """The mixture that is trained is the one that predicts: a loss's α becomes the ensemble's, if that has none."""
    if loss.member_weights is not None and ensemble.member_weights is None:
        ensemble.set_member_weights(loss.member_weights)


def set_diversity(loss: MemberLoss, value: float) -> None:
    """Sets λ of a loss; one held as a tensor keeps its device, and a compiled step stays compiled.

    Example:
        >>> loss = AmendedCrossEntropyLoss(torch.tensor(0.0))
        >>> set_diversity(loss, 0.5)
        >>> loss.diversity
        tensor(0.5000)
    """
    _checks.check_diversity(value)
    if isinstance(loss.diversity, Tensor):
        with torch.no_grad():
            loss.diversity.fill_(value)
    else:
        loss.diversity = value
