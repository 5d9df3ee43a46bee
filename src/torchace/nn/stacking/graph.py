"""Followed forwards as one node of a graph that `torch.compile` makes."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from torchace.nn.stacking.compute import follow, swapped
from torchace.nn.stacking.follow import Follower
from torchace.nn.stacking.random import KeyedDraws

_ensembles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_tokens = itertools.count()
_allowed = False


def register(ensemble: nn.Module) -> int:
    """Return a number by which graphs find this ensemble, and by which its marks are known."""
    global _allowed
    if not _allowed:
        torch.compiler.allow_in_graph(follow_in_graph)
        _allowed = True
    token = next(_tokens)
    _ensembles[token] = ensemble
    return token


def follow_in_graph(
    token: int,
    modes: tuple[bool, ...],
    own: bool,
    args: list[Any],
    kwargs: dict[str, Any],
    state: dict[str, Tensor],
    key: tuple[Tensor, Tensor, Tensor] | None,
) -> Any:
    """`follow` for `torch.compile`, which does not look inside but runs it while it traces what is computed.

    Args:
        token: Of the ensemble.
        modes: Each layer's mode: a change of any compiles anew.
        own: See `follow`.
        args: See `follow`.
        kwargs: See `follow`.
        state: The ensemble's parameters and buffers by name: what the graph gets gradients of and writes to.
        key: What `KeyedDraws` are made from, where random numbers are not PyTorch's.
    """
    ensemble = _ensembles[token]
    draws = None if key is None else KeyedDraws(*key)
    with swapped(ensemble.stacked, state):
        return follow(ensemble.stacked, Follower(ensemble.num_members, token, draws), args, kwargs, own=own)
