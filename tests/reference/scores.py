"""The scores of DESIGN, simple: float64, each by its definition."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.special import entr, xlogy


def _average(values: Tensor, member_weights: Tensor | None) -> Tensor:
    """Σ_k α^k v^k over the first axis."""
    if member_weights is None:
        return values.mean(0)
    return torch.tensordot(member_weights.double(), values, 1)


def _probs(target: Tensor, num_classes: int) -> Tensor:
    """Class probabilities `(N, C, ...)` of a target."""
    if target.is_floating_point():
        return target.double()
    return torch.nn.functional.one_hot(target.long(), num_classes).movedim(-1, 1).double()


def reduce(scores: Tensor, reduction: str) -> Tensor:
    return {"mean": scores.mean(), "sum": scores.sum(), "none": scores}[reduction]


def ensemble_probs(logits: Tensor, member_weights: Tensor | None = None) -> Tensor:
    """q̄ = Σ_k α^k softmax(z^k), `(N, C, ...)`."""
    return _average(logits.double().softmax(2), member_weights)


def disagreement(logits: Tensor, reduction: str = "mean") -> Tensor:
    """The mean over pairs of members of whether they predict different classes."""
    choices = torch.from_numpy(logits.double().numpy().argmax(2))
    pairs = [(choices[j] != choices[k]).double() for j, k in itertools.combinations(range(len(logits)), 2)]
    return reduce(torch.stack(pairs).mean(0) if pairs else torch.zeros_like(choices[0]).double(), reduction)


def mutual_information(logits: Tensor, member_weights: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """H(q̄) - Σ_k α^k H(q^k)."""
    members = entr(logits.double().softmax(2)).sum(2)
    return reduce(entr(ensemble_probs(logits, member_weights)).sum(1) - _average(members, member_weights), reduction)


def ambiguity(logits: Tensor, target: Tensor, member_weights: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Σ_k α^k H(p, q^k) - H(p, q̄)."""
    p = _probs(target, logits.shape[2])
    members = -xlogy(p, logits.double().softmax(2)).sum(2)
    mixture = -xlogy(p, ensemble_probs(logits, member_weights)).sum(1)
    return reduce(_average(members, member_weights) - mixture, reduction)


def pairwise_cross_entropy(logits: Tensor) -> Tensor:
    """`[j, k]`: the mean over samples of H(q^j, q^k)."""
    q = logits.double().softmax(2)
    return torch.stack([torch.stack([-xlogy(qj, qk).sum(1).mean() for qk in q]) for qj in q])


def brier_score(probs: Tensor, target: Tensor) -> float:
    """Σ_c (q_c - p_c)², mean over samples."""
    return float((probs.double() - _probs(target, probs.shape[1])).square().sum(1).mean())


def calibration_error(probs: Tensor, target: Tensor, num_bins: int) -> float:
    """Σ_b n_b/N |accuracy_b - confidence_b| over bins of equal width, the last closed on both sides."""
    confidence = probs.double().amax(1)
    right = (torch.from_numpy(probs.double().numpy().argmax(1)) == target).double()
    bins = (confidence * num_bins).long().clamp(max=num_bins - 1)
    gaps = [float((right - confidence)[bins == b].sum().abs()) for b in range(num_bins)]
    return sum(gaps) / confidence.numel()


def bias_variance_covariance(predictions: Tensor, target: Tensor) -> tuple[float, float, float]:
    """DESIGN, line 12: (mean over members of the bias)², Σ_k var / K², Σ_k Σ_{j≠k} cov / K²; means over samples."""
    predictions, num_members = predictions.double(), predictions.shape[1]
    bias = predictions.mean((0, 1)) - target.double()
    off = predictions - predictions.mean(0)
    variance = sum((off[:, k] ** 2).mean(0) for k in range(num_members))
    pairs = itertools.permutations(range(num_members), 2)
    covariance = sum(((off[:, j] * off[:, k]).mean(0) for j, k in pairs), torch.zeros_like(bias))
    terms = (bias**2, variance / num_members**2, covariance / num_members**2)
    return tuple(float(term.mean()) for term in terms)  # type: ignore[return-value]
