"""Losses, ensembles, heads and conversion as modules."""

from torchace.nn.adapters import AdaptedEnsemble, adapt, load_adapters
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import StackedClassifiers, stack_classifiers
from torchace.nn.ensemble import Ensemble
from torchace.nn.heads import SMOC, LowRankStackedLinear, StackedLinear
from torchace.nn.losses import (
    AmendedCrossEntropyLoss,
    BinaryAmendedCrossEntropyLoss,
    MemberLoss,
    MemberWeights,
    NegativeCorrelationLoss,
)
from torchace.nn.member_rates import set_member_rates
from torchace.nn.optimizers import allow_optimizer
from torchace.nn.parallel import MemberParallelEnsemble
from torchace.nn.stacked import StackedEnsemble
from torchace.nn.stacking import Decision

__all__ = [
    "SMOC",
    "AdaptedEnsemble",
    "AmendedCrossEntropyLoss",
    "BinaryAmendedCrossEntropyLoss",
    "Decision",
    "Ensemble",
    "EnsembleModule",
    "LowRankStackedLinear",
    "MemberLoss",
    "MemberParallelEnsemble",
    "MemberWeights",
    "NegativeCorrelationLoss",
    "StackedClassifiers",
    "StackedEnsemble",
    "StackedLinear",
    "adapt",
    "allow_optimizer",
    "branch",
    "load_adapters",
    "set_member_rates",
    "stack_classifiers",
]
