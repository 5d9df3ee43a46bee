"""Computation of members of one architecture at once, by following one member's forward."""

from torchace.nn.stacking import layer_rules as layer_rules
from torchace.nn.stacking import random_rules as random_rules  # these register their rules
from torchace.nn.stacking.decision import Decision, decide
from torchace.nn.stacking.forward import register_ensemble, run_one_by_one, run_stacked, run_stacked_in_graph
from torchace.nn.stacking.mode import MemberRNG, StackingError, StackingMode

__all__ = [
    "Decision",
    "MemberRNG",
    "StackingError",
    "StackingMode",
    "decide",
    "register_ensemble",
    "run_one_by_one",
    "run_stacked",
    "run_stacked_in_graph",
]
