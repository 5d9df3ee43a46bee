"""Amended cross entropy for sigmoid outputs: binary and multi-label classification."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace import _checks
from torchace.functional._options import along_members, compute_dtype, member_mean, resolve_coupling
from torchace.kernels.closed_form import LossResult


def binary_amended_cross_entropy(
    logits: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    sample_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    mixture: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""The Amended Cross Entropy of K members with sigmoid outputs, summed over members.

    With $H$ the cross entropy of two Bernoulli distributions, for each output,

    $$e^k = H(p, q^k) - \lambda \sum_{j \ne k} \alpha^j H(q^j, q^k), \qquad
    \frac{\partial e^k}{\partial z^k} = (1 - \lambda)(q^k - p) + \lambda(\bar q - p)$$

    With λ=0 or K=1 it equals `torch.nn.functional.binary_cross_entropy_with_logits`, summed over members.

    Args:
        logits: Members' logits, `(K, N, ...)`: one per sample, or one per label of a sample.
        target: Probabilities of the positive class, `(N, ...)`; 0 and 1 for hard labels.
        diversity: λ in [0, 1], a number or a 0-dimensional tensor.
        member_weights: The paper's α, `(K,)`; uniform by default.
        sample_weight: `(N, ...)` for all members or `(K, N, ...)`; missing trailing axes are broadcast. The mean
            divides by the weights' sum over a member's elements.
        pos_weight: Weight of the positive class, broadcast against the target, for example one per label.
        mixture: $\sum_j \alpha^j q^j$ computed elsewhere, `(N, ...)`; `member_weights` then belong to the local members
            and need not sum to 1.
        reduction: `"mean"` or `"sum"` over elements, then summed over members; `"none"` returns `(K, N, ...)`.

    Returns:
        A scalar, or `(K, N, ...)`; in float32 for half-precision logits.

    Example:
        >>> logits = torch.tensor([[2.0], [0.0]], requires_grad=True)
        >>> binary_amended_cross_entropy(logits, torch.tensor([1.0]), 0.5).backward()
        >>> logits.grad
        tensor([[-0.2144],
                [-0.4048]])
    """
    _checks.check_members_first(logits, "logits")
    _checks.check_reduction(reduction)
    _checks.check_same_shape(target, logits, "logits")
    _checks.check_binary_target(target)
    lam, alpha, mixture = resolve_coupling(logits, diversity, member_weights, mixture)
    z = logits.to(compute_dtype(logits))
    p = target.to(z)
    if pos_weight is not None:
        _checks.check_broadcasts(pos_weight, "pos_weight", p)
        _checks.check_finite_weights(pos_weight, "pos_weight")
        pos_weight = pos_weight.detach().to(z)
    alpha = along_members(alpha, z)
    vp = p if pos_weight is None else pos_weight * p
    s = vp + (1 - p)
    q = z.detach().sigmoid()  # detached: the others are constants in the paper's derivation
    if mixture is None:
        mixture = (alpha * q).sum(0)
    others = mixture - alpha * q  # Σ_{j≠k} α^j q^j; their weights sum to 1 - α^k
    a = vp - lam * s * others
    b = 1 - p - lam * s * (1 - alpha - others)
    # two logsigmoids, not log(1-q) = log q - z: a confident, correct output keeps its small gradient
    losses = -(a * F.logsigmoid(z) + b * F.logsigmoid(-z))
    return member_mean(losses, sample_weight, reduction)


def closed_form(
    logits: Tensor,
    target: Tensor,
    diversity: Tensor,
    scale: Tensor,
    alpha: float | None = None,
    mixture: Tensor | None = None,
    label_smoothing: float | Tensor = 0.0,
) -> LossResult:
    """Losses, cross entropies of the ensemble and the gradient of R runs, without autograd.

    Shapes: logits `(R, K, N, L)`, target and mixture `(R, N, L)`, diversity `(R,)`, scale (factor of a sample's loss)
    `(R, N)` or `(R, K, N)`. A sample's loss is the mean over its L labels; `alpha` is every member's weight, by default
    1/K.
    """
    z = logits.to(compute_dtype(logits))
    alpha = 1 / z.shape[1] if alpha is None else alpha
    q, r = z.sigmoid(), (-z).sigmoid()  # 1 - q would lose small probabilities
    mean_q, mean_r = (q.mean(1), r.mean(1)) if mixture is None else (mixture, 1 - mixture)
    mean_q, mean_r = mean_q.unsqueeze(1), mean_r.unsqueeze(1)
    p = (target * (1 - label_smoothing) + label_smoothing / 2).unsqueeze(1)
    lam, scale = diversity.view(-1, 1, 1, 1), scale if scale.ndim == 3 else scale.unsqueeze(1)
    a = p - lam * (mean_q - alpha * q)
    b = 1 - p - lam * (mean_r - alpha * r)
    losses = (-(a * F.logsigmoid(z) + b * F.logsigmoid(-z)).mean(-1) * scale).sum(2)
    gradient = (1 - p) * torch.lerp(q, mean_q, lam) - p * torch.lerp(r, mean_r, lam)
    gradient = gradient * (scale / z.shape[3]).unsqueeze(3)
    return LossResult(losses, ensemble_cross_entropy(z, target), gradient.to(logits.dtype))


def ensemble_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the members' mean, the mean over labels, `(R, N)`.

    Shapes: logits `(R, K, N, L)`, target `(N, L)` or `(R, N, L)`.
    """
    count = math.log(logits.shape[1])
    log_q, log_r = F.logsigmoid(logits).logsumexp(1) - count, F.logsigmoid(-logits).logsumexp(1) - count
    return -(target * log_q + (1 - target) * log_r).mean(-1)
