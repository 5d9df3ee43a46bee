"""The losses of DESIGN, "Mathematics", written slowly and simply.

Everything is float64. Members and samples are Python loops; only the classes of one sample form a vector. Every loss
comes three times: its value, its gradient by the closed form, and its gradient by autograd over one member's own loss
with all others held constant. The last two share no line of arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Loss:
    """A loss: one function for a member's sample, one for its gradient, one for what the sample counts."""

    outputs: Tensor  # (K, N, C, ...), or (K, N, ...) for binary logits and predictions
    class_axis: bool
    reduction: str
    # own(k, i, z) is member k's loss on sample i as a function of its own output z, everything else constant
    own: Callable[[int, tuple[int, ...], Tensor], Tensor]
    # slope(k, i) is its derivative in z by the closed form
    slope: Callable[[int, tuple[int, ...]], Tensor]
    # what sample i counts for member k in a sum, and in the denominator of a mean
    counts: Callable[[int, tuple[int, ...]], float]
    divides: Callable[[int, tuple[int, ...]], float]
    zero_is_zero: bool  # a member of total weight 0 adds 0 (sample weights given), not NaN (torch)
    mass: Callable[[tuple[int, ...]], float] | None = None  # s = Σ_c w_c p_c of a sample, for error bounds

    @property
    def num_members(self) -> int:
        return self.outputs.shape[0]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        shape = tuple(self.outputs.shape[1:])
        return (shape[0], *shape[2:]) if self.class_axis else shape

    def samples(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*[range(size) for size in self.sample_shape])

    def place(self, k: int, i: tuple[int, ...]) -> tuple[Any, ...]:
        """Index of sample i of member k in the outputs."""
        return (k, i[0], slice(None), *i[1:]) if self.class_axis else (k, *i)

    def scale(self, k: int, i: tuple[int, ...]) -> float:
        """Factor of the loss of member k on sample i."""
        counts = self.counts(k, i)
        if self.reduction != "mean":
            return counts
        total = self.total(k)
        return counts / total if total else 0.0

    @cache  # noqa: B019
    def total(self, k: int) -> float:
        """Denominator of member k's mean."""
        return math.fsum(self.divides(k, i) for i in self.samples())

    def empty(self, k: int) -> bool:
        """Whether member k's mean is the mean of nothing."""
        return self.reduction == "mean" and self.total(k) == 0

    def value(self) -> Tensor:
        """The scalar summed over members, or `(K, N, ...)`."""
        losses = torch.zeros(self.num_members, *self.sample_shape, dtype=torch.float64)
        for k in range(self.num_members):
            if self.empty(k) and not self.zero_is_zero:
                return torch.tensor(math.nan, dtype=torch.float64)
            for i in self.samples():
                scale = self.scale(k, i)
                if scale != 0:
                    losses[(k, *i)] = scale * self.own(k, i, self.outputs[self.place(k, i)])
        return losses if self.reduction == "none" else losses.sum()

    def gradient(self, upstream: Tensor | None = None) -> Tensor:
        """The closed form; `upstream`, `(K, N, ...)`, is what each loss of `reduction="none"` is multiplied by."""
        gradient = torch.zeros_like(self.outputs)
        for k in range(self.num_members):
            for i in self.samples():
                scale = self.scale(k, i)
                if scale != 0:
                    scale *= 1.0 if upstream is None else float(upstream[(k, *i)])
                    gradient[self.place(k, i)] = scale * self.slope(k, i)
        return gradient

    def autograd_gradient(self, upstream: Tensor | None = None) -> Tensor:
        """Autograd over one member's own loss at a time, the others held constant."""
        gradients = []
        for k in range(self.num_members):
            mine = self.outputs[k].clone().requires_grad_()
            total = (mine * 0.0).sum()
            for i in self.samples():
                scale = self.scale(k, i)
                if scale != 0:
                    scale *= 1.0 if upstream is None else float(upstream[(k, *i)])
                    total = total + scale * self.own(k, i, mine[self.place(k, i)[1:]])
            gradients.append(torch.autograd.grad(total, mine)[0])
        return torch.stack(gradients)


def log_softmax(z: Tensor) -> Tensor:
    z = z - z.detach().max()  # changes nothing but the size of the roundings
    return z - torch.logsumexp(z, 0)


def cross_entropy(a: Tensor, log_b: Tensor) -> Tensor:
    """H(a, b) = -Σ_c a_c log b_c; a class with a_c = 0 adds nothing."""
    total = torch.zeros((), dtype=torch.float64)
    for c in range(a.shape[0]):
        if float(a[c]) != 0:
            total = total - a[c] * log_b[c]
    return total


def _alpha(member_weights: Any, num_members: int) -> list[float]:
    if member_weights is None:
        return [1 / num_members] * num_members
    return torch.as_tensor(member_weights, dtype=torch.float64).tolist()


def _own_weight(sample_weight: Tensor | None, k: int, i: tuple[int, ...]) -> float:
    """The weight of sample i for member k, of weights `(N, ...)` or `(K, N, ...)` written out in full."""
    if sample_weight is None:
        return 1.0
    return float(sample_weight[i] if sample_weight.ndim == len(i) else sample_weight[(k, *i)])


Others = Callable[[int | None, tuple[int, ...]], Tensor]


def _others(
    q: Callable[[int, tuple[int, ...]], Tensor], alpha: list[float], given: Callable[[tuple[int, ...]], Tensor] | None
) -> Others:
    """Σ_{j≠k} α^j q^j of sample i, as a function of k and i; the mixture of all for k=None."""

    def others(k: int | None, i: tuple[int, ...]) -> Tensor:
        if given is not None:
            return given(i).double() - (0 if k is None else alpha[k] * q(k, i))
        total = torch.zeros_like(q(0, i))
        for j in range(len(alpha)):
            if j != k:
                total = total + alpha[j] * q(j, i)
        return total

    return others


def amended_cross_entropy(
    logits: Tensor,
    target: Tensor,
    diversity: float,
    *,
    member_weights: Any = None,
    sample_weight: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mixture: Tensor | None = None,
    reduction: str = "mean",
) -> Loss:
    """DESIGN, lines 1 to 4."""
    logits, lam = logits.detach().double(), float(diversity)
    num_members, _, num_classes = logits.shape[:3]
    w = torch.ones(num_classes, dtype=torch.float64) if weight is None else weight.double()
    hard = not target.is_floating_point()

    @cache
    def q(k: int, i: tuple[int, ...]) -> Tensor:
        return log_softmax(logits[(k, i[0], slice(None), *i[1:])]).exp()

    given = None if mixture is None else lambda i: mixture[(i[0], slice(None), *i[1:])]
    others = _others(q, _alpha(member_weights, num_members), given)

    @cache
    def p(i: tuple[int, ...]) -> Tensor:
        if hard:
            label = torch.zeros(num_classes, dtype=torch.float64)
            label[int(target[i])] = 1.0
        else:
            label = target[(i[0], slice(None), *i[1:])].double()
        return (1 - label_smoothing) * label + label_smoothing / num_classes

    @cache
    def s(i: tuple[int, ...]) -> float:
        return float((w * p(i)).sum())

    def own(k: int, i: tuple[int, ...], mine: Tensor) -> Tensor:
        log_q = log_softmax(mine)
        return cross_entropy(w * p(i), log_q) - lam * s(i) * cross_entropy(others(k, i), log_q)

    def slope(k: int, i: tuple[int, ...]) -> Tensor:
        return s(i) * ((1 - lam) * q(k, i) + lam * others(None, i)) - w * p(i)

    def counts(k: int, i: tuple[int, ...]) -> float:
        return 0.0 if hard and int(target[i]) == ignore_index else _own_weight(sample_weight, k, i)

    def divides(k: int, i: tuple[int, ...]) -> float:
        # torch's mean: the weights of the samples' own classes for indices, the number of samples for probabilities
        own_class = hard and int(target[i]) != ignore_index
        return counts(k, i) * (float(w[int(target[i])]) if own_class else 1.0)

    return Loss(logits, True, reduction, own, slope, counts, divides, sample_weight is not None, s)


def binary_amended_cross_entropy(
    logits: Tensor,
    target: Tensor,
    diversity: float,
    *,
    member_weights: Any = None,
    sample_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    mixture: Tensor | None = None,
    reduction: str = "mean",
) -> Loss:
    """DESIGN, line 5; a distribution is its probabilities of 1 and of 0."""
    logits, target, lam = logits.detach().double(), target.double(), float(diversity)
    v = torch.ones_like(target) if pos_weight is None else pos_weight.double().expand_as(target)

    def cross_entropy(a: Tensor, z: Tensor) -> Tensor:
        """-a_1 log q - a_0 log(1 - q) with q = σ(z)."""
        return a[0] * torch.log1p(torch.exp(-z)) + a[1] * torch.log1p(torch.exp(z))

    @cache
    def q(k: int, i: tuple[int, ...]) -> Tensor:
        ones = 1 / (1 + torch.exp(-logits[(k, *i)]))
        return torch.stack([ones, 1 - ones])

    given = None if mixture is None else lambda i: torch.stack([mixture[i].double(), 1 - mixture[i].double()])
    others = _others(q, _alpha(member_weights, len(logits)), given)

    @cache
    def s(i: tuple[int, ...]) -> float:
        return float(v[i] * target[i] + 1 - target[i])

    def own(k: int, i: tuple[int, ...], mine: Tensor) -> Tensor:
        label = torch.stack([v[i] * target[i], 1 - target[i]])
        return cross_entropy(label, mine) - lam * s(i) * cross_entropy(others(k, i), mine)

    def slope(k: int, i: tuple[int, ...]) -> Tensor:
        return s(i) * ((1 - lam) * q(k, i)[0] + lam * others(None, i)[0]) - v[i] * target[i]

    counts = partial(_own_weight, sample_weight)
    return Loss(logits, False, reduction, own, slope, counts, counts, sample_weight is not None, s)


def negative_correlation(
    predictions: Tensor,
    target: Tensor,
    diversity: float,
    *,
    member_weights: Any = None,
    sample_weight: Tensor | None = None,
    mixture: Tensor | None = None,
    reduction: str = "mean",
) -> Loss:
    """DESIGN, line 6."""
    predictions, target, lam = predictions.detach().double(), target.double(), float(diversity)
    alpha = _alpha(member_weights, len(predictions))
    others = _others(lambda k, i: predictions[(k, *i)], alpha, None if mixture is None else lambda i: mixture[i])

    def own(k: int, i: tuple[int, ...], mine: Tensor) -> Tensor:
        loss = 0.5 * (mine - target[i]) ** 2
        if alpha[k] == 1:
            return loss
        # F̄ moves with F^k by α^k; the others' part of it is constant
        return loss - lam / (2 * (1 - alpha[k])) * (mine - others(k, i) - alpha[k] * mine) ** 2

    def slope(k: int, i: tuple[int, ...]) -> Tensor:
        mine = predictions[(k, *i)]
        return (mine - target[i]) - (0 if alpha[k] == 1 else lam * (mine - others(None, i)))

    counts = partial(_own_weight, sample_weight)
    return Loss(predictions, False, reduction, own, slope, counts, counts, sample_weight is not None)


def rewritten(logits: Tensor, target: Tensor, diversity: float, member_weights: Any = None) -> Tensor:
    """The paper's other form, `H(p, q^k) - λ H(q̄, q^k) + λ α^k H(q^k)`, for `(K, N, C)` and indices; `(K, N)`."""
    logits = logits.detach().double()
    num_members, num_samples, num_classes = logits.shape
    alpha = _alpha(member_weights, num_members)
    losses = torch.zeros(num_members, num_samples, dtype=torch.float64)
    for n in range(num_samples):
        log_q = [log_softmax(logits[k, n]) for k in range(num_members)]
        mean = torch.zeros(num_classes, dtype=torch.float64)
        for k in range(num_members):
            mean = mean + alpha[k] * log_q[k].exp()
        for k in range(num_members):
            entropy = cross_entropy(log_q[k].exp(), log_q[k])
            losses[k, n] = (
                -log_q[k][int(target[n])] - diversity * cross_entropy(mean, log_q[k]) + diversity * alpha[k] * entropy
            )
    return losses


def gamma_form(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    """The paper's first form, `H(p, q^k) - γ/(K-1) Σ_{j≠k} H(q^j, q^k)`, for `(K, N, C)` and indices; `(K, N)`."""
    logits = logits.detach().double()
    num_members, num_samples, _ = logits.shape
    losses = torch.zeros(num_members, num_samples, dtype=torch.float64)
    for n in range(num_samples):
        log_q = [log_softmax(logits[k, n]) for k in range(num_members)]
        for k in range(num_members):
            losses[k, n] = -log_q[k][int(target[n])]
            for j in range(num_members):
                if j != k:
                    losses[k, n] -= gamma / (num_members - 1) * cross_entropy(log_q[j].exp(), log_q[k])
    return losses
