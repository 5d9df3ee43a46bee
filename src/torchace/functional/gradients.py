"""Gradient averaging where members share parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchace import _checks


def average_gradients(x: Tensor, num_members: int) -> Tensor:
    r"""The identity, whose gradient is divided by the number of members.

    Placed between a shared trunk and K members, it gives the trunk the *mean* of the members' gradients while each
    member keeps its own, undivided (the paper's Algorithm 2):

    $$g(\theta_\text{trunk}) = \frac{1}{K} \sum_k \nabla_{\theta_\text{trunk}} e^k$$

    Args:
        x: What the members share, any shape.
        num_members: K.

    Returns:
        `x`, bit for bit.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> average_gradients(x, 4).sum().backward()
        >>> x.grad
        tensor([0.2500, 0.2500])
    """
    _checks.check_tensor(x, "x")
    _checks.check_count(num_members, "num_members")
    if num_members == 1:
        return x
    if torch.compiler.is_compiling():
        # Compiled torch.func transforms differentiate a custom function's forward and ignore its backward, so there
        # the plain composite says the same. It is exact but for an infinite x, which it turns into NaN.
        constant = x.detach()
        return constant + (x - constant) / num_members
    return _AverageGradients.apply(x, num_members)  # type: ignore[no-untyped-call]


class _AverageGradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, num_members: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.num_members = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.num_members, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0] / ctx.num_members
