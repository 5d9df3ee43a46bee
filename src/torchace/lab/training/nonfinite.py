"""Which run became NaN or Inf, and through which of its members. Nothing is read back from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchace.lab.training.run_group import RunGroup


def all_finite(values: Sequence[Tensor | None]) -> bool:
    """Whether there is no NaN or Inf in some tensors. False may also mean that a sum overflowed, or nobody may look."""
    found = [value for value in values if value is not None]
    return found[0].device.type == "cpu" and all(math.isfinite(norm) for norm in torch._foreach_norm(found))


@torch.no_grad()
def first_nonfinite(network: RunGroup, logits: Tensor, losses: Tensor) -> Tensor:
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


def _in_gradients(network: RunGroup) -> Tensor:
    """`(R, K + 1)`, not finite where the gradients of a member's own parameters, or of what members share, are not."""
    own: list[Tensor] = []  # (R, K) each
    shared: list[Tensor] = []  # (R, 1) each
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            is_shared = network.heads or name.startswith("trunk.")
            entries = parameter.grad.reshape(parameter.shape[0], -1).sum(1).view(network.num_runs, -1)
            (shared if is_shared else own).append(entries)
    like = next(network.parameters())
    columns = [
        torch.stack(entries).sum(0) if entries else like.new_zeros(network.num_runs, width)
        for entries, width in ((own, network.num_members), (shared, 1))
    ]
    return torch.cat(columns, 1)
