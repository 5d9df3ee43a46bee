"""Shard of a run group on one rank, and its state in that of the whole group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchace.lab.training.distributed import Ranks, State
from torchace.lab.training.run_group import RunGroup
from torchace.nn import Ensemble


def shard_network(network: RunGroup, ranks: Ranks) -> RunGroup:
    """Members of a run group that this rank trains; `network` has all members, the same on every rank."""
    if ranks.size == 1:
        return network
    if ranks.members > network.num_members:
        raise ValueError(
            f"Expected at most one rank for each of {network.num_members} members, but got {ranks.members} ranks. "
            f"Use --parallel {network.num_members}xD, the batch over D ranks, or fewer ranks."
        )
    ensembles = [network.ensemble(run) for run in range(network.num_runs)]
    if ranks.members > 1:
        if any(network.is_shared(name) for name in network.state_dict()):
            raise ValueError(
                "Expected members without shared weights for --parallel members, but they share some. "
                "Use --parallel data, which splits the batch."
            )
        local = range(network.num_members)[ranks.local_members(network.num_members)]
        ensembles = [Ensemble([ensemble[k] for k in local], link=ensemble.link) for ensemble in ensembles]  # type: ignore[index]
    return RunGroup(ensembles, ranks=ranks, total_members=network.num_members)


def shard_state(network: RunGroup, whole: Mapping[str, Tensor]) -> State:
    """This rank's shard of tensors of the whole group, or of some of its runs, whose first axis is `(R·K)`."""
    if network.ranks.members == 1:
        return dict(whole)
    return {
        name: value.unflatten(0, (-1, network.total_members))[:, network.local_members].flatten(0, 1)
        if value.ndim
        else value
        for name, value in whole.items()
    }


def gather_state(network: RunGroup, state: State) -> State | None:
    """Tensors of the whole group on the first rank, None on the others. Called by all ranks."""
    parts = network.ranks.gather_tensors(state)
    if parts is None or len(parts) == 1:
        return None if parts is None else parts[0]
    whole = {}
    for name, value in parts[0].items():
        if value.ndim:
            runs = len(value) // network.num_members
            value = torch.cat([part[name].unflatten(0, (runs, -1)) for part in parts], 1).flatten(0, 1)
        whole[name] = value  # without axes: one number for all members, such as a step count
    return whole


def gather_network(network: RunGroup) -> RunGroup | None:
    """Runs with all members on the first rank, None on the others. Called by all ranks."""
    if network.ranks.members == 1:
        return network if network.ranks.is_first else None
    state = gather_state(network, network.state_dict())
    if state is None:
        return None
    members = range(network.total_members)
    whole = RunGroup(
        [Ensemble([network.members[0] for _ in members], link=network.link) for _ in range(network.num_runs)]
    )
    whole.load_state_dict(state)
    return whole.train(network.training)
