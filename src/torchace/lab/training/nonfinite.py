"""Detection of NaN and Inf by run and member, without transfers from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchace.lab.training.run_group import RunGroup


def all_finite(values: Sequence[Tensor | None]) -> bool:
    """Whether CPU tensors are finite; False also for overflowing sums and for other devices."""
    tensors = [value for value in values if value is not None]
    return tensors[0].device.type == "cpu" and all(math.isfinite(norm) for norm in torch._foreach_norm(tensors))


@torch.no_grad()
def first_nonfinite(
    network: RunGroup,
    logits: Tensor,  # (R, K, B, C)
    losses: Tensor,  # (R, K)
) -> Tensor:
    """Code of the first nonfinite member of each run, `(R,)`, for `nonfinite_member`; -1 if all are finite.

    Coupled members spread a NaN within one step. Codes are smallest for logits, larger for losses, largest for
    gradients: the smallest code is the origin.
    """
    others = [torch.nn.functional.pad(sums, (0, 1)) for sums in (logits.sum((2, 3)).to(losses), losses)]
    sums = torch.stack([*others, _gradient_sums(network).to(losses)])  # sums keep NaN and Inf
    bad = (sums - sums) != 0  # (3, R, K + 1); fewer kernels than isfinite
    seen, member = bad.any(2), bad.int().argmax(2)  # (3, R)
    total = network.total_members
    member = torch.where(member == network.num_members, total, member + network.local_members.start)
    codes = torch.full_like(member[0], -1)
    for source in (2, 1, 0):
        codes = torch.where(seen[source], member[source] + source * (total + 1), codes)
    return codes


def nonfinite_member(code: int, num_members: int) -> int | None:
    """Member of a code of `first_nonfinite`; None for shared parts."""
    member = code % (num_members + 1)
    return member if member < num_members else None


def _gradient_sums(network: RunGroup) -> Tensor:
    """Sums of the gradients of each member's own parameters, and of shared ones, `(R, K + 1)`."""
    own: list[Tensor] = []  # (R, K) each
    shared: list[Tensor] = []  # (R, 1) each
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            is_shared = network.is_shared(name)
            entries = parameter.grad.reshape(parameter.shape[0], -1).sum(1).view(network.num_runs, -1)
            (shared if is_shared else own).append(entries)
    like = next(network.parameters())
    columns = [
        torch.stack(entries).sum(0) if entries else like.new_zeros(network.num_runs, width)
        for entries, width in ((own, network.num_members), (shared, 1))
    ]
    return torch.cat(columns, 1)
