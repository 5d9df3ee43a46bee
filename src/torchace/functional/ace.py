"""Amended Cross Entropy: a member's cross entropy with the label, minus λ times its cross entropy with the others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchace.functional._options import flatten_samples, given_tensors, resolve_options
from torchace.kernels import composite, total_loss


def amended_cross_entropy(
    logits: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    sample_weight: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mixture: Tensor | None = None,
    detach_others: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""The Amended Cross Entropy of K members, summed over members.

    $$e^k = H(p, q^k) - \lambda \sum_{j \ne k} \alpha^j H(q^j, q^k), \qquad
    \frac{\partial e^k}{\partial z^k} = (1 - \lambda)(q^k - p) + \lambda(\bar q - p)$$

    No gradient flows into the other members $q^j$. With λ=0 or K=1 it equals `torch.nn.functional.cross_entropy`,
    summed over members. The value is unbounded below: monitor the ensemble's cross entropy instead.

    Args:
        logits: Members' logits, `(K, N, C)` or `(K, N, C, d1, ...)`.
        target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`.
        diversity: λ in [0, 1], a number, or a 0-dimensional tensor to change it without recompilation.
        member_weights: The paper's α, `(K,)`; uniform by default.
        sample_weight: Factors of the samples' losses, `(N, ...)` for all members or `(K, N, ...)`. The mean divides by
            each member's sum of weights; a member whose weights sum to 0 adds nothing.
        weight: Class weights, `(C,)`; they scale a sample's diversity term too.
        ignore_index: Target class to ignore.
        label_smoothing: Amount of label smoothing, in [0, 1].
        mixture: $\sum_j \alpha^j q^j$ computed elsewhere, `(N, C, ...)`; `member_weights` then belong to the local
            members and need not sum to 1.
        detach_others: False lets gradients flow into the other members; for ablations only: training fails.
        reduction: `"mean"` or `"sum"` over samples, then summed over members; `"none"` returns `(K, N, ...)`.

    Returns:
        A scalar, or `(K, N, ...)`; in float32 for half-precision logits.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]], requires_grad=True)
        >>> loss = amended_cross_entropy(logits, torch.tensor([0]), 0.5)
        >>> loss
        tensor(0.3651, grad_fn=<AmendedCrossEntropyBackward>)
        >>> loss.backward()
        >>> logits.grad
        tensor([[[-0.2144,  0.2144]],
        <BLANKLINE>
                [[-0.4048,  0.4048]]])
    """
    options = resolve_options(
        logits,
        target,
        diversity,
        member_weights=member_weights,
        sample_weight=sample_weight,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        mixture=mixture,
        detach_others=detach_others,
        reduction=reduction,
    )
    rows = flatten_samples(logits, 2)  # (K, N, C)
    if reduction == "none":
        losses = composite.member_losses(rows.unsqueeze(0), options)
        return losses.view(logits.shape[0], logits.shape[1], *logits.shape[3:])
    return total_loss(rows, options, given_tensors(target, member_weights, sample_weight, weight, mixture))
