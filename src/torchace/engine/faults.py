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
    gradients = _in_gradients(network)
    others = [torch.nn.functional.pad(sums, (0, 1)) for sums in (losses, logits.sum((2, 3)).to(losses))]
    sums = torch.stack([gradients.to(losses), *others])  # a sum keeps NaN and Inf
    bad = (sums - sums) != 0  # (3, R, K + 1); fewer kernels than isfinite
    seen, first = bad.any(2), bad.int().argmax(2)
    found = torch.where(seen[0], first[0], -1)
    for source in (1, 2):
        found = torch.where(seen[source], first[source], found)
    return found


def _in_gradients(network: Network) -> Tensor:
    """`(R, K + 1)`, not finite where the gradients of a member's own parameters, or of what members share, are not."""
    if isinstance(network, Cohort):
        own = [p.grad.reshape(p.shape[0], -1).sum(1) for p in network.parameters() if p.grad is not None]
        total = torch.stack(own).sum(0).view(network.num_runs, network.num_members)
        return torch.nn.functional.pad(total, (0, 1))
    if isinstance(network, SideBySide):
        return torch.stack([_of_ensemble(ensemble, network.num_members) for ensemble in network.ensembles])
    raise TypeError(f"{type(network).__name__} does not say whose its gradients are.")


def _of_ensemble(ensemble: nn.Module, num_members: int) -> Tensor:
    members = list(ensemble) if isinstance(ensemble, Ensemble) else []
    own = [[p.grad for p in member.parameters() if p.grad is not None] for member in members]
    known = {id(grad) for grads in own for grad in grads}
    shared = [p.grad for p in ensemble.parameters() if p.grad is not None and id(p.grad) not in known]
    first = next(ensemble.parameters())
    largest = torch.zeros(num_members + 1, dtype=first.dtype, device=first.device)
    for place, grads in (*enumerate(own), (num_members, shared)):
        if grads:
            largest[place] = get_total_norm(grads, norm_type=math.inf)
    return largest
