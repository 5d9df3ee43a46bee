"""Diversity of the members and the gain from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace import _checks
from torchace.functional._options import along_members, compute_dtype, reduce_samples


def disagreement(logits: Tensor, *, reduction: str = "mean") -> Tensor:
    r"""Share of pairs of members that predict different classes.

    $$\frac{2}{K(K-1)} \sum_{j<k} \mathbf{1}[\arg\max z^j \ne \arg\max z^k]$$

    Zero for a single member.

    Args:
        logits: Members' logits, `(K, N, C, ...)`.
        reduction: `"mean"` or `"sum"` over samples, `"none"` for one value per sample, `(N, ...)`.

    Returns:
        A scalar, or `(N, ...)`.

    Example:
        >>> disagreement(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 2.0]]]))
        tensor(0.6667)
    """
    _checks.check_logits(logits)
    _checks.check_finite(logits)
    _checks.check_reduction(reduction)
    dtype = compute_dtype(logits)
    num_members = logits.shape[0]
    votes = torch.zeros(logits.shape[1:], dtype=dtype, device=logits.device)  # (N, C, ...): votes for each class
    choice = logits.argmax(2)  # (K, N, ...)
    votes = votes.scatter_add(1, choice.movedim(0, 1), torch.ones_like(choice, dtype=dtype).movedim(0, 1))
    pairs = max(num_members * (num_members - 1), 1)
    same = (votes * (votes - 1)).sum(1)  # ordered pairs that agree
    return reduce_samples((num_members * (num_members - 1) - same) / pairs, reduction)


def predictive_entropy(
    logits: Tensor, *, member_weights: Tensor | Sequence[float] | None = None, reduction: str = "mean"
) -> Tensor:
    r"""The ensemble's total uncertainty: the entropy of its probabilities.

    $$H(\bar q) = -\sum_c \bar q_c \log \bar q_c$$

    Args:
        logits: Members' logits, `(K, N, C, ...)`.
        member_weights: The paper's α, `(K,)`; uniform by default.
        reduction: `"mean"` or `"sum"` over samples, `"none"` for one value per sample, `(N, ...)`.

    Returns:
        A scalar, or `(N, ...)`, in nats.

    Example:
        >>> predictive_entropy(torch.tensor([[[100.0, 0.0]], [[0.0, 100.0]]]))
        tensor(0.6931)
    """
    _checks.check_reduction(reduction)
    _, _, log_mixture = _log_probs(logits, member_weights)
    return reduce_samples(-(log_mixture.exp() * log_mixture).sum(1), reduction)


def mutual_information(
    logits: Tensor, *, member_weights: Tensor | Sequence[float] | None = None, reduction: str = "mean"
) -> Tensor:
    r"""Epistemic uncertainty: the Jensen-Shannon divergence of the members.

    $$I = H(\bar q) - \sum_k \alpha^k H(q^k) \ge 0$$

    Args:
        logits: Members' logits, `(K, N, C, ...)`.
        member_weights: The paper's α, `(K,)`; uniform by default.
        reduction: `"mean"` or `"sum"` over samples, `"none"` for one value per sample, `(N, ...)`.

    Returns:
        A scalar, or `(N, ...)`, in nats.

    Example:
        >>> mutual_information(torch.tensor([[[100.0, 0.0]], [[0.0, 100.0]]]))
        tensor(0.6931)
    """
    _checks.check_reduction(reduction)
    log_q, alpha, log_mixture = _log_probs(logits, member_weights)
    # Σ_k α^k KL(q^k || q̄), which equals the difference of entropies and does not cancel
    terms = log_q.exp() * (log_q - log_mixture)
    return reduce_samples((along_members(alpha, log_q) * terms).sum(0).sum(1).clamp(min=0), reduction)


def ambiguity(
    logits: Tensor,
    target: Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""How much lower the ensemble's cross entropy is than its members' on average.

    $$A = \sum_k \alpha^k H(p, q^k) - H(p, \bar q) \ge 0$$

    Zero when all members agree on the target's probability.

    Args:
        logits: Members' logits, `(K, N, C, ...)`.
        target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`.
        member_weights: The paper's α, `(K,)`; uniform by default.
        reduction: `"mean"` or `"sum"` over samples, `"none"` for one value per sample, `(N, ...)`.

    Returns:
        A scalar, or `(N, ...)`, in nats.

    Example:
        >>> logits = torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]]).log()
        >>> ambiguity(logits, torch.tensor([0]))
        tensor(0.0426)
    """
    _checks.check_reduction(reduction)
    log_q, alpha, log_mixture = _log_probs(logits, member_weights)
    gain = log_mixture - (along_members(alpha, log_q) * log_q).sum(0)  # (N, C, ...), one for each possible label
    return reduce_samples(_expectation(gain, target, logits), reduction)


def pairwise_cross_entropy(logits: Tensor) -> Tensor:
    r"""The cross entropy of every member with every other, $H(q^j, q^k)$, averaged over samples.

    Args:
        logits: Members' logits, `(K, N, C, ...)`.

    Returns:
        `(K, K)`: entry `[j, k]` is the mean over samples of $H(q^j, q^k)$; the diagonal holds the entropies.

    Example:
        >>> pairwise_cross_entropy(torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]]).log())
        tensor([[0.6931, 1.2040],
                [0.6931, 0.3251]])
    """
    log_q, _, _ = _log_probs(logits, None)
    flat = log_q.flatten(1)
    samples = flat.shape[1] // log_q.shape[2]
    # sums, not a matrix product: autocast would round the product to half precision
    rows = [-(row.exp() * flat).sum(1) for row in flat]
    return torch.stack(rows) / samples


def _log_probs(logits: Tensor, member_weights: Tensor | Sequence[float] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log q^k `(K, N, C, ...)`, α `(K,)` and log q̄ `(N, C, ...)`."""
    _checks.check_logits(logits)
    _checks.check_finite(logits)
    log_q = F.log_softmax(logits, 2, dtype=compute_dtype(logits))
    alpha = _checks.as_member_weights(member_weights, logits.shape[0], like=log_q)
    return log_q, alpha, torch.logsumexp(log_q + along_members(alpha.log(), log_q), 0)


def _expectation(values: Tensor, target: Tensor, logits: Tensor) -> Tensor:
    """Σ_c p_c · values, `(N, ...)`, of values `(N, C, ...)`."""
    if _checks.check_target(target, logits, ignore_index=None):
        return (target.to(values) * values).sum(1)
    return values.gather(1, target.long().unsqueeze(1)).squeeze(1)
