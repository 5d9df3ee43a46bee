"""Predictions of an ensemble: the mean of the members' probabilities, in log space."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from torchace import _checks
from torchace.functional._options import along_members, compute_dtype, log_mixture


def ensemble_log_probs(
    logits: Tensor, *, member_weights: Tensor | Sequence[float] | None = None, link: str = "softmax"
) -> Tensor:
    r"""The logarithm of the ensemble's probabilities.

    $$\log \bar q = \operatorname{logsumexp}_k(\log \alpha^k + \log \operatorname{softmax}(z^k))$$

    Exact where every member's probability underflows.

    Args:
        logits: Members' logits, `(K, N, C, ...)`; `(K, N, ...)` for `link="sigmoid"`.
        member_weights: The paper's α, `(K,)`; uniform by default.
        link: `"softmax"`, or `"sigmoid"` for independent outputs (each output's log-probability).

    Returns:
        `(N, C, ...)`, in float32 for half-precision logits.

    Example:
        >>> logits = torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]]).log()
        >>> ensemble_log_probs(logits).exp()
        tensor([[0.7000, 0.3000]])
    """
    _checks.check_choice(link, "link", _checks.LINKS)
    if link == "identity":
        raise ValueError("Predictions with link='identity' have no log-probabilities; ensemble_probs averages them.")
    return _weighted_logsumexp(_log_probs(logits, link), member_weights)


def ensemble_probs(
    logits: Tensor, *, member_weights: Tensor | Sequence[float] | None = None, link: str = "softmax"
) -> Tensor:
    r"""The ensemble's probabilities: the weighted mean of the members'.

    $$\bar q = \sum_k \alpha^k q^k$$

    Args:
        logits: Members' logits, `(K, N, C, ...)`; `(K, N, ...)` for the links `"sigmoid"` and `"identity"`.
        member_weights: The paper's α, `(K,)`; uniform by default.
        link: `"softmax"`, `"sigmoid"`, or `"identity"` for regression: the weighted mean of the predictions.

    Returns:
        `(N, C, ...)`, in float32 for half-precision logits.

    Example:
        >>> ensemble_probs(torch.tensor([[[0.0, 0.0]], [[100.0, 0.0]]]))
        tensor([[0.7500, 0.2500]])
        >>> ensemble_probs(torch.tensor([[1.0], [2.0]]), link="identity", member_weights=[0.25, 0.75])
        tensor([1.7500])
    """
    _checks.check_choice(link, "link", _checks.LINKS)
    if link != "identity":
        return ensemble_log_probs(logits, member_weights=member_weights, link=link).exp()
    _checks.check_members_first(logits, "logits")
    values = logits.to(compute_dtype(logits))
    alpha = _checks.as_member_weights(member_weights, values.shape[0], like=values)
    return (along_members(alpha, values) * values).sum(0)


def _log_probs(logits: Tensor, link: str) -> Tensor:
    """Members' log-probabilities, in the shape of the logits."""
    if link == "sigmoid":
        _checks.check_members_first(logits, "logits")
        return F.logsigmoid(logits.to(compute_dtype(logits)))
    _checks.check_logits(logits)
    return F.log_softmax(logits, 2, dtype=compute_dtype(logits))


def _weighted_logsumexp(log_probs: Tensor, member_weights: Tensor | Sequence[float] | None) -> Tensor:
    alpha = _checks.as_member_weights(member_weights, log_probs.shape[0], like=log_probs)
    return log_mixture(log_probs + along_members(alpha.log(), log_probs))
