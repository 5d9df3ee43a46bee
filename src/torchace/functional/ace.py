"""The amended cross entropy, and the conversion of its λ from and to the paper's γ."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchace import _checks
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


LOSSES = ("ace", "ncl")


def diversity_from_gamma(gamma: float, num_members: int, loss: str = "ace") -> float:
    r"""The diversity λ that equals the paper's γ.

    $$\gamma_\text{ACE} = \lambda \frac{K-1}{K} \qquad \gamma_\text{NCL} = \frac{\lambda}{2(1 - 1/K)}$$

    Args:
        gamma: γ, such that λ lies in [0, 1].
        num_members: K, at least 2.
        loss: `"ace"` or `"ncl"`.

    Returns:
        λ.

    Example:
        >>> diversity_from_gamma(0.4, 5)
        0.5
    """
    largest = gamma_from_diversity(1.0, num_members, loss)
    _checks.check_gamma(gamma, largest, loss)
    return min(float(gamma) / largest, 1.0)


def gamma_from_diversity(diversity: float, num_members: int, loss: str = "ace") -> float:
    r"""The paper's γ that equals the diversity λ; the inverse of `diversity_from_gamma`.

    Args:
        diversity: λ in [0, 1].
        num_members: K, at least 2.
        loss: `"ace"` or `"ncl"`.

    Returns:
        γ.

    Example:
        >>> gamma_from_diversity(0.5, 5)
        0.4
    """
    _checks.check_diversity(diversity)
    _checks.check_count(num_members, "num_members", least=2)
    _checks.check_choice(loss, "loss", LOSSES)
    if loss == "ace":
        return float(diversity) * (num_members - 1) / num_members
    return float(diversity) * num_members / (2 * (num_members - 1))
