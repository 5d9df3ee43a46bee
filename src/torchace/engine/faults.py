"""Which run became NaN or Inf, and through which of its members. Nothing is read back from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from torchace.engine.network import Cohort, Network, SideBySide
from torchace.nn import Ensemble


def all_well(values: Sequence[Tensor | None]) -> bool:
    """Whether there is no NaN or Inf in some tensors. False may also mean that a sum overflowed, or nobody may look."""
    found = [value for value in values if value is not None]
    return found[0].device.type == "cpu" and all(math.isfinite(norm) for norm in torch._foreach_norm(found))


@torch.no_grad()
def faults(network: Network, logits: Tensor, losses: Tensor) -> Tensor:
    """The first member of each run with a NaN or Inf, `(R,)`; -1: none; K: in what the members share.

    Coupled members pass a NaN on to each other's losses within one step. So the member whose own logits hold one is
    named before those whose loss does, and these before those whose gradient does.

    Args:
        network: The runs, with their gradients.
        logits: `(R, K, B, C)`.
        losses: `(R, K)`.
    """
    found = _first(_in_gradients(network))
    for bad in (~torch.isfinite(losses), ~torch.isfinite(logits.sum((2, 3)))):  # a sum keeps NaN and Inf
        found = torch.where(bad.any(1), _first(bad), found)
    return found


def _first(bad: Tensor) -> Tensor:
    return torch.where(bad.any(1), bad.int().argmax(1), -1)


def _in_gradients(network: Network) -> Tensor:
    """`(R, K + 1)`: in the gradients of each member's own parameters, and of those that members share."""
    if isinstance(network, Cohort):
        sums = [p.grad.reshape(p.shape[0], -1).sum(1) for p in network.parameters() if p.grad is not None]
        own = ~torch.isfinite(torch.stack(sums)).all(0).view(network.num_runs, network.num_members)
        return torch.cat([own, torch.zeros_like(own[:, :1])], 1)
    if isinstance(network, SideBySide):
        return torch.stack([_of_ensemble(ensemble, network.num_members) for ensemble in network.ensembles])
    raise TypeError(f"{type(network).__name__} does not say whose its gradients are.")


def _of_ensemble(ensemble: nn.Module, num_members: int) -> Tensor:
    members = list(ensemble) if isinstance(ensemble, Ensemble) else []
    own = [[p.grad for p in member.parameters() if p.grad is not None] for member in members]
    known = {id(grad) for grads in own for grad in grads}
    shared = [p.grad for p in ensemble.parameters() if p.grad is not None and id(p.grad) not in known]
    bad = torch.zeros(num_members + 1, dtype=torch.bool, device=next(ensemble.parameters()).device)
    for place, grads in (*enumerate(own), (num_members, shared)):
        if grads:
            bad[place] = ~torch.isfinite(get_total_norm(grads, norm_type=math.inf))
    return bad
