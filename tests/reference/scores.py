"""The scores of DESIGN, slow and simple: float64, loops over members and samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor


def _vectors(values: Tensor) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """The samples of `(N, C, ...)`: each index `(n, ...)` with its C values."""
    shape = (values.shape[0], *values.shape[2:])
    for i in itertools.product(*[range(size) for size in shape]):
        yield i, values[(i[0], slice(None), *i[1:])].double().tolist()


def _softmax(z: list[float]) -> list[float]:
    top = max(z)
    e = [math.exp(value - top) for value in z]
    return [value / math.fsum(e) for value in e]


def _log_softmax(z: list[float]) -> list[float]:
    top = max(z)
    norm = top + math.log(math.fsum(math.exp(value - top) for value in z))
    return [value - norm for value in z]


def _alpha(member_weights: Tensor | None, num_members: int) -> list[float]:
    return [1 / num_members] * num_members if member_weights is None else member_weights.double().tolist()


def _sample_scores(logits: Tensor) -> Tensor:
    return torch.zeros(logits.shape[1], *logits.shape[3:], dtype=torch.float64)


def reduce(scores: Tensor, reduction: str) -> Tensor:
    return {"mean": scores.mean(), "sum": scores.sum(), "none": scores}[reduction]


def ensemble_probs(logits: Tensor, member_weights: Tensor | None = None) -> Tensor:
    """q̄ = Σ_k α^k softmax(z^k), `(N, C, ...)`."""
    alpha = _alpha(member_weights, logits.shape[0])
    probs = torch.zeros(logits.shape[1:], dtype=torch.float64)
    for k in range(logits.shape[0]):
        for i, z in _vectors(logits[k]):
            for c, q in enumerate(_softmax(z)):
                probs[(i[0], c, *i[1:])] += alpha[k] * q
    return probs


def disagreement(logits: Tensor, reduction: str = "mean") -> Tensor:
    """The mean over pairs of members of whether they predict different classes."""
    scores = _sample_scores(logits)
    num_members = logits.shape[0]
    choices = [{i: z.index(max(z)) for i, z in _vectors(member)} for member in logits]
    pairs = list(itertools.combinations(range(num_members), 2))
    for i in choices[0]:
        for j, k in pairs:
            scores[i] += (choices[j][i] != choices[k][i]) / len(pairs)
    return reduce(scores, reduction)


def mutual_information(logits: Tensor, member_weights: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """H(q̄) - Σ_k α^k H(q^k)."""

    def entropy(q: list[float]) -> float:
        return -math.fsum(value * math.log(value) for value in q if value > 0)

    scores = _sample_scores(logits)
    alpha = _alpha(member_weights, logits.shape[0])
    for i, mean in _vectors(ensemble_probs(logits, member_weights)):
        scores[i] = entropy(mean)
    for k in range(logits.shape[0]):
        for i, z in _vectors(logits[k]):
            scores[i] -= alpha[k] * entropy(_softmax(z))
    return reduce(scores, reduction)


def ambiguity(logits: Tensor, target: Tensor, member_weights: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Σ_k α^k H(p, q^k) - H(p, q̄)."""
    scores = _sample_scores(logits)
    alpha = _alpha(member_weights, logits.shape[0])

    def p(i: tuple[int, ...]) -> list[float]:
        if target.is_floating_point():
            return target[(i[0], slice(None), *i[1:])].double().tolist()
        return [float(c == int(target[i])) for c in range(logits.shape[2])]

    for k in range(logits.shape[0]):
        for i, z in _vectors(logits[k]):
            scores[i] += alpha[k] * -math.fsum(a * b for a, b in zip(p(i), _log_softmax(z), strict=True))
    for i, mean in _vectors(ensemble_probs(logits, member_weights)):
        scores[i] += math.fsum(a * math.log(b) for a, b in zip(p(i), mean, strict=True))
    return reduce(scores, reduction)


def pairwise_cross_entropy(logits: Tensor) -> Tensor:
    """`[j, k]`: the mean over samples of H(q^j, q^k)."""
    num_members = logits.shape[0]
    matrix = torch.zeros(num_members, num_members, dtype=torch.float64)
    for j in range(num_members):
        for k in range(num_members):
            values = [
                -math.fsum(a * b for a, b in zip(_softmax(zj), _log_softmax(zk), strict=True))
                for (_, zj), (_, zk) in zip(_vectors(logits[j]), _vectors(logits[k]), strict=True)
            ]
            matrix[j, k] = math.fsum(values) / len(values)
    return matrix


def brier_score(probs: Tensor, target: Tensor) -> float:
    """Σ_c (q_c - p_c)², mean over samples."""
    values = []
    for i, q in _vectors(probs):
        if target.is_floating_point():
            p = target[(i[0], slice(None), *i[1:])].double().tolist()
        else:
            p = [float(c == int(target[i])) for c in range(len(q))]
        values.append(math.fsum((a - b) ** 2 for a, b in zip(q, p, strict=True)))
    return math.fsum(values) / len(values)


def calibration_error(probs: Tensor, target: Tensor, num_bins: int) -> float:
    """Σ_b n_b/N |accuracy_b - confidence_b| over bins of equal width, the last closed on both sides."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    count = 0
    for i, q in _vectors(probs):
        confidence = max(q)
        bins[min(int(confidence * num_bins), num_bins - 1)].append((confidence, q.index(confidence) == int(target[i])))
        count += 1
    total = 0.0
    for members in bins:
        if members:
            accuracy = sum(right for _, right in members) / len(members)
            confidence = math.fsum(value for value, _ in members) / len(members)
            total += len(members) / count * abs(accuracy - confidence)
    return total


def bias_variance_covariance(predictions: Tensor, target: Tensor) -> tuple[float, float, float]:
    """DESIGN, line 12: (mean over members of the bias)², Σ_k var / K², Σ_k Σ_{j≠k} cov / K²; means over samples."""
    num_trainings, num_members = predictions.shape[:2]
    flat = predictions.double().reshape(num_trainings, num_members, -1).tolist()
    y = target.double().flatten().tolist()
    biases, variances, covariances = [], [], []
    for n in range(len(y)):
        means = [math.fsum(flat[t][k][n] for t in range(num_trainings)) / num_trainings for k in range(num_members)]

        def cov(j: int, k: int, n: int = n, means: list[float] = means) -> float:
            products = [(flat[t][j][n] - means[j]) * (flat[t][k][n] - means[k]) for t in range(num_trainings)]
            return math.fsum(products) / num_trainings

        biases.append((math.fsum(mean - y[n] for mean in means) / num_members) ** 2)
        variances.append(math.fsum(cov(k, k) for k in range(num_members)) / num_members**2)
        pairs = itertools.permutations(range(num_members), 2)
        covariances.append(math.fsum(cov(j, k) for j, k in pairs) / num_members**2)
    return tuple(math.fsum(terms) / len(terms) for terms in (biases, variances, covariances))  # type: ignore[return-value]
