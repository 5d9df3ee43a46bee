"""Learnable member weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import mixture_cross_entropy


class MemberWeights(nn.Module):
    r"""The paper's α as K free numbers, $\alpha = \operatorname{softmax}(a)$; uniform at the start.

    A call returns α `(K,)`. Add `loss`, the mixture's cross entropy as a function of α only, to the members' loss, in
    which α is constant.

    Args:
        num_members: K.

    Example:
        >>> weights = MemberWeights(3)
        >>> weights()
        tensor([0.3333, 0.3333, 0.3333], grad_fn=<SoftmaxBackward0>)
        >>> logits, target = torch.zeros(3, 5, 2, requires_grad=True), torch.zeros(5, dtype=torch.long)
        >>> loss = amended_cross_entropy(logits, target, 0.5, member_weights=weights()) + weights.loss(logits, target)
        >>> loss.backward()
    """

    def __init__(self, num_members: int) -> None:
        super().__init__()
        _checks.check_count(num_members, "num_members")
        self.num_members = num_members
        self.logits = nn.Parameter(torch.zeros(num_members))

    def forward(self) -> Tensor:
        """Return α, `(K,)`, differentiable in the free numbers."""
        return self.logits.softmax(0)

    def loss(self, logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Return the mixture's cross entropy, the mean over samples; only α receives a gradient.

        Args:
            logits: Members' logits, `(K, N, C, ...)`.
            target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`.
            ignore_index: Class index that does not count. If none counts, loss and gradient are 0.
        """
        return mixture_cross_entropy(logits, target, self(), ignore_index=ignore_index)

    def extra_repr(self) -> str:
        """Return the number of members."""
        return f"num_members={self.num_members}"
