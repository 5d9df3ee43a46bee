"""Training written out: K plain modules, every loss a double loop over members, every update a formula. Slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


def one_hot(y: Tensor, num_classes: int, smoothing: float) -> Tensor:
    p = torch.zeros(len(y), num_classes, dtype=torch.float64)
    p[torch.arange(len(y)), y] = 1.0
    return (1 - smoothing) * p + smoothing / num_classes


def cross_entropy(a: Tensor, log_b: Tensor) -> Tensor:
    """H(a, b) of each sample."""
    return -(a * log_b).sum(1)


def log_q(logits: Tensor) -> Tensor:
    return logits - torch.logsumexp(logits, 1, keepdim=True)


def losses_on_one_batch(
    logits: Sequence[Tensor], y: Tensor, lam: float, *, smoothing: float = 0.0, detach: bool = True
) -> list[Tensor]:
    """e^k = H(p, q^k) - λ/K Σ_{j≠k} H(q^j, q^k), the mean over one batch that all members see."""
    p = one_hot(y, logits[0].shape[1], smoothing)
    losses = []
    for k in range(len(logits)):
        loss = cross_entropy(p, log_q(logits[k]))
        for j in range(len(logits)):
            if j != k:
                other = log_q(logits[j]).exp()
                loss = loss - lam / len(logits) * cross_entropy(other.detach() if detach else other, log_q(logits[k]))
        losses.append(loss.mean())
    return losses


def losses_on_own_batches(
    predict: Sequence[Callable[[Tensor], Tensor]],
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    lam: float,
    *,
    smoothing: float = 0.0,
) -> list[Tensor]:
    """The same, member k on batch k; the others predict that batch without gradient."""
    losses = []
    for k in range(len(predict)):
        mine = log_q(predict[k](x[k]))
        loss = cross_entropy(one_hot(y[k], mine.shape[1], smoothing), mine)
        for j in range(len(predict)):
            if j != k and lam:
                with torch.no_grad():
                    other = log_q(predict[j](x[k])).exp()
                loss = loss - lam / len(predict) * cross_entropy(other, mine)
        losses.append(loss.mean())
    return losses


@dataclass
class Update:
    """SGD with momentum, Adam (decay in the gradient) or AdamW (decay beside it), a formula for each number."""

    kind: str
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    moments: dict[int, list[Tensor]] = field(default_factory=dict)
    steps: int = 0

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], rate: float) -> None:
        self.steps += 1
        for i, (w, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            g = gradient if self.kind == "adamw" else gradient + self.weight_decay * w
            if self.kind == "sgd":
                before = self.moments.get(i, [torch.zeros_like(w)])[0]
                v = self.momentum * before + g
                self.moments[i] = [v]
                w -= rate * (g + self.momentum * v if self.nesterov else v)
                continue
            if self.kind == "adamw":
                w *= 1 - rate * self.weight_decay
            m, v = self.moments.get(i, [torch.zeros_like(w), torch.zeros_like(w)])
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            self.moments[i] = [m, v]
            w -= rate * (m / (1 - 0.9**self.steps)) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)


def train_members(
    members: Sequence[nn.Module],
    batch: Callable[[int, int], tuple[Tensor, Tensor]],
    rates: Sequence[float],
    lams: Sequence[float],
    update: Callable[[], Update],
    *,
    own_batches: bool,
    smoothing: float = 0.0,
    detach: bool = True,
) -> None:
    """Trains K modules; each has an optimizer of its own. `batch(step, stream)` gives samples and labels."""
    updates = [update() for _ in members]
    for step, (rate, lam) in enumerate(zip(rates, lams, strict=True)):
        if own_batches:
            x, y = zip(*(batch(step, k) for k in range(len(members))), strict=True)
            losses = losses_on_own_batches(members, x, y, lam, smoothing=smoothing)
        else:
            x0, y0 = batch(step, 0)
            losses = losses_on_one_batch([m(x0) for m in members], y0, lam, smoothing=smoothing, detach=detach)
        parameters = [list(member.parameters()) for member in members]
        gradients = [torch.autograd.grad(sum(losses), mine, retain_graph=True) for mine in parameters]
        for k in range(len(members)):
            updates[k](parameters[k], gradients[k], rate)


def train_smoc(
    trunk: nn.Module,
    heads: Sequence[nn.Linear],
    batch: Callable[[int, int], tuple[Tensor, Tensor]],
    rates: Sequence[float],
    lam: float,
    update: Callable[[], Update],
    *,
    own_batches: bool,
) -> None:
    """The paper's Algorithm 2: every head its own gradient, the trunk the mean of what the members' losses give it."""
    shared, own = update(), [update() for _ in heads]
    for step, rate in enumerate(rates):
        predict = [lambda x, head=head: head(trunk(x)) for head in heads]
        if own_batches:
            x, y = zip(*(batch(step, k) for k in range(len(heads))), strict=True)
            losses = losses_on_own_batches(predict, x, y, lam)
        else:
            x0, y0 = batch(step, 0)
            losses = losses_on_one_batch([p(x0) for p in predict], y0, lam)
        trunk_parameters = list(trunk.parameters())
        of_members = [torch.autograd.grad(loss, trunk_parameters, retain_graph=True) for loss in losses]
        mean = [torch.stack(parts).mean(0) for parts in zip(*of_members, strict=True)]
        of_heads = [
            torch.autograd.grad(loss, list(head.parameters()), retain_graph=True)
            for loss, head in zip(losses, heads, strict=True)
        ]
        shared(trunk_parameters, mean, rate)
        for head, mine, gradients in zip(heads, own, of_heads, strict=True):
            mine(list(head.parameters()), gradients, rate)
