"""Computes members of one architecture at once, by following the forward of one."""

from torchace.nn.stacking import layers, rules
from torchace.nn.stacking.follow import CannotFollow, Follower, Node
from torchace.nn.stacking.random import Draws, Half, KeyedDraws

__all__ = ["CannotFollow", "Draws", "Follower", "Half", "KeyedDraws", "Node", "layers", "rules"]
