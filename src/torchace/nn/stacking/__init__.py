"""Computes members of one architecture at once, by following the forward of one."""

from torchace.nn.stacking import layers as layers  # registers its rules, and those of `rules`
from torchace.nn.stacking.compute import Decision, decide, follow, keep_apart, swapped, take_members
from torchace.nn.stacking.explain import Explanation
from torchace.nn.stacking.follow import Follower
from torchace.nn.stacking.graph import follow_in_graph, register
from torchace.nn.stacking.random import KeyedDraws
from torchace.nn.stacking.whole import slots, vectorise

__all__ = [
    "Decision",
    "Explanation",
    "Follower",
    "KeyedDraws",
    "decide",
    "follow",
    "follow_in_graph",
    "keep_apart",
    "register",
    "slots",
    "swapped",
    "take_members",
    "vectorise",
]
