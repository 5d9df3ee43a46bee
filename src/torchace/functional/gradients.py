"""Gradient averaging where members share parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchace import _checks


def average_gradients(x: Tensor, num_members: int) -> Tensor:
    r"""The identity, with its gradient divided by the number of members.

    Between a shared trunk and K members, it gives the trunk the *mean* of the members' gradients and each member its
    own, undivided (the paper's Algorithm 2):

    $$g(\theta_\text{trunk}) = \frac{1}{K} \sum_k \nabla_{\theta_\text{trunk}} e^k$$

    Args:
        x: Input that the members share, any shape.
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
    if _checks.is_compiling():
        # Compiled torch.func transforms ignore a custom function's backward. This form is exact for finite x; an
        # infinite x becomes NaN.
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
