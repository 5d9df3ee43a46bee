"""Predictions of the ensemble, and the members' weights in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace import _checks
from torchace.functional._options import along_members, compute_dtype, log_mixture, reduce_samples


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
        raise ValueError("Predictions with link='identity' have no log-probabilities. Use ensemble_probs.")
    if link == "sigmoid":
        _checks.check_members_first(logits, "logits")
        log_q = F.logsigmoid(logits.to(compute_dtype(logits)))
    else:
        _checks.check_logits(logits)
        log_q = F.log_softmax(logits, 2, dtype=compute_dtype(logits))
    alpha = _checks.as_member_weights(member_weights, len(log_q), like=log_q)
    return log_mixture(log_q + along_members(alpha.log(), log_q))


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


def fit_member_weights(
    log_probs: Tensor, target: Tensor, *, ignore_index: int = -100, max_steps: int = 10_000, tolerance: float = 1e-9
) -> Tensor:
    r"""The member weights α that minimize the mixture's cross entropy on validation data, by EM.

    $$\alpha = \arg\min_\alpha -\sum_n \log \sum_k \alpha^k q^k_{n, y_n}$$

    The problem is convex. Use data that the members were not trained on.

    Args:
        log_probs: Members' log-probabilities, `(K, N, C, ...)`: `logits.log_softmax(2)`.
        target: Class indices, `(N, ...)`.
        ignore_index: Target class to ignore.
        max_steps: Maximum number of EM steps.
        tolerance: Upper bound on the distance to the least mean cross entropy at which to stop.

    Returns:
        α, `(K,)`, non-negative, with sum 1.

    Example:
        >>> good, bad = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log(), torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
        >>> fit_member_weights(torch.stack([good, bad]), torch.tensor([0, 1])).round(decimals=6)
        tensor([1., 0.])
    """
    _checks.check_logits(log_probs, "log_probs")
    _checks.check_int(ignore_index, "ignore_index")
    _checks.check_class_indices(target, log_probs, ignore_index=ignore_index)
    _checks.check_count(max_steps, "max_steps")
    index = target.long().flatten()
    counted = index != ignore_index
    log_q = log_probs.detach().movedim(2, -1).flatten(1, -2)[:, counted]  # (K, N, C)
    if _checks.can_read(log_q) and bool((log_q.isnan() | (log_q > 1e-4)).any()):
        raise ValueError(
            "Expected log-probabilities, at most 0, in `log_probs`, but got larger values or NaN. "
            "For logits, use logits.log_softmax(2)."
        )
    if log_q.shape[1] == 0:
        ignored = "" if target.numel() == 0 else f": all have the ignore_index={ignore_index}"
        raise ValueError(f"Expected at least one sample to fit member weights on, but got none{ignored}.")
    index = index[counted].expand(len(log_q), -1).unsqueeze(2)
    scores = log_q.double().gather(2, index).squeeze(2)  # (K, N): log q^k of the true class
    best = scores.amax(0)
    # A sample's scale cancels; a sample that has probability 0 for all members does not affect the weights.
    likelihood = torch.where(best == -torch.inf, 1.0, (scores - best).exp())
    alpha = torch.full_like(likelihood[:, 0], 1 / likelihood.shape[0])
    for _ in range(max_steps):
        mixture = (along_members(alpha, likelihood) * likelihood).sum(0)
        # EM factor. By duality, the cross entropy at α exceeds the least one by at most max_k log(factor^k).
        factor = (likelihood / mixture).mean(1)
        alpha = alpha * factor
        alpha = alpha / alpha.sum()
        if factor.max() <= 1 + tolerance:
            break
    return alpha.to(torch.float64 if log_probs.dtype == torch.float64 else torch.float32)


def mixture_cross_entropy(
    logits: Tensor, target: Tensor, member_weights: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    r"""The cross entropy of the ensemble as a function of the member weights alone.

    $$H(p, \bar q) = -\sum_c p_c \log \sum_k \alpha^k q^k_c$$

    Every $q^k$ is constant: only α receives a gradient.

    Args:
        logits: Members' logits, `(K, N, C, ...)`.
        target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`.
        member_weights: α, `(K,)`, for example `MemberWeights(K)()`.
        ignore_index: Target class to ignore. If all samples are ignored, the loss and its gradient are 0.
        reduction: `"mean"` or `"sum"` over samples, `"none"` for one value per sample, `(N, ...)`.

    Returns:
        A scalar, or `(N, ...)`, in nats.

    Example:
        >>> alpha = torch.tensor([0.5, 0.5], requires_grad=True)
        >>> logits = torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]]).log()
        >>> mixture_cross_entropy(logits, torch.tensor([0]), alpha).backward()
        >>> alpha.grad
        tensor([-0.7143, -1.2857])
    """
    _checks.check_logits(logits)
    _checks.check_reduction(reduction)
    _checks.check_int(ignore_index, "ignore_index")
    probabilities = _checks.check_target(target, logits, ignore_index=ignore_index)
    log_q = F.log_softmax(logits.detach(), 2, dtype=compute_dtype(logits))
    _checks.as_member_weights(member_weights, logits.shape[0], like=log_q)
    alpha = member_weights.to(log_q)
    # clamped: log(0) would turn the finite gradient of a weight of 0 into NaN
    alpha = alpha + (alpha.clamp(min=torch.finfo(alpha.dtype).tiny) - alpha).detach()
    log_alpha = along_members(alpha.log(), log_q)
    if not probabilities:
        target = target.long()
        ignored = target == ignore_index
        target = target.masked_fill(ignored, 0)
        log_q = log_q.masked_fill(ignored.unsqueeze(1), 0.0)  # NaN too
    mixed = log_mixture(log_alpha + log_q)  # (N, C, ...)
    if probabilities:
        # where, not a product alone: a class of probability 0 may have an infinite logarithm
        return reduce_samples(-(target.to(log_q) * torch.where(target == 0, 0.0, mixed)).sum(1), reduction)
    losses = -mixed.gather(1, target.unsqueeze(1)).squeeze(1).masked_fill(ignored, 0.0)
    if reduction == "mean" and target.numel():
        return losses.sum() / (~ignored).sum().clamp_min(1)
    return reduce_samples(losses, reduction)
