"""Computation of members of one architecture at once, by following one member's forward."""

from torchace.nn.stacked_state import named_tensors, replace_tensors, stack_members, take_members
from torchace.nn.stacking import layers as layers  # registers its rules, and those of `rules` and `random_layers`
from torchace.nn.stacking.decision import Decision, decide
from torchace.nn.stacking.follower import Follower
from torchace.nn.stacking.forward import follow, follow_in_graph, register_ensemble, run_under_vmap
from torchace.nn.stacking.random import KeyedDraws

__all__ = [
    "Decision",
    "Follower",
    "KeyedDraws",
    "decide",
    "follow",
    "follow_in_graph",
    "named_tensors",
    "register_ensemble",
    "replace_tensors",
    "run_under_vmap",
    "stack_members",
    "take_members",
]
