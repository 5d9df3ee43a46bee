"""Which run became NaN or Inf, and through which member. Nothing is read back from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchace.lab.training.run_group import RunGroup


def all_finite(values: Sequence[Tensor | None]) -> bool:
    """Whether CPU tensors hold no NaN or Inf. False may also mean an overflowing sum, or tensors on another device."""
    found = [value for value in values if value is not None]
    return found[0].device.type == "cpu" and all(math.isfinite(norm) for norm in torch._foreach_norm(found))


@torch.no_grad()
def first_nonfinite(network: RunGroup, logits: Tensor, losses: Tensor) -> Tensor:
    """The first member of each run with a NaN or Inf, as a code `(R,)`; -1: none. See `nonfinite_member`.

    Coupled members pass a NaN on to each other's losses within one step, also across ranks. So codes are smallest for
    a member's own logits, larger for its loss, and largest for its gradient: the smallest code is the origin.

    Args:
        network: The runs, with their gradients.
        logits: `(R, K, B, C)`.
        losses: `(R, K)`.
    """
    others = [torch.nn.functional.pad(sums, (0, 1)) for sums in (logits.sum((2, 3)).to(losses), losses)]
    sums = torch.stack([*others, _gradient_sums(network).to(losses)])  # a sum keeps NaN and Inf
    bad = (sums - sums) != 0  # (3, R, K + 1); fewer kernels than isfinite
    seen, member = bad.any(2), bad.int().argmax(2)  # (3, R)
    total = network.total_members
    member = torch.where(member == network.num_members, total, member + network.local_members.start)
    found = torch.full_like(member[0], -1)
    for source in (2, 1, 0):
        found = torch.where(seen[source], member[source] + source * (total + 1), found)
    return found


def nonfinite_member(code: int, num_members: int) -> int | None:
    """The member of a code of `first_nonfinite`; None for parts that members share."""
    member = code % (num_members + 1)
    return member if member < num_members else None


def _gradient_sums(network: RunGroup) -> Tensor:
    """Sums of the gradients of each member's own parameters, and of shared ones, `(R, K + 1)`."""
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
