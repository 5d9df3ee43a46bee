"""Negative Correlation Learning, the loss for regression ensembles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchace import _checks
from torchace.functional._options import along_members, compute_dtype, member_mean, resolve_coupling
from torchace.kernels.closed_form import LossResult


def negative_correlation(
    predictions: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    sample_weight: Tensor | None = None,
    mixture: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""The Negative Correlation Learning loss of K regressors, summed over members.

    $$e^k = \tfrac{1}{2}(F^k - Y)^2 - \frac{\lambda}{2(1 - \alpha^k)}(F^k - \bar F)^2, \qquad
    \frac{\partial e^k}{\partial F^k} = (F^k - Y) - \lambda(F^k - \bar F)$$

    No gradient flows into the other members; a member with $\alpha^k = 1$ has no second term. With λ=0 it is half the
    squared error, summed over members.

    Args:
        predictions: Members' predictions, `(K, N, ...)`.
        target: `(N, ...)`.
        diversity: λ in [0, 1], a number or a 0-dimensional tensor.
        member_weights: The weights α of $\bar F = \sum_k \alpha^k F^k$, `(K,)`; uniform by default.
        sample_weight: `(N, ...)` for all members or `(K, N, ...)`; missing trailing axes are broadcast. The mean
            divides by the weights' sum over a member's elements.
        mixture: $\bar F$ computed elsewhere, `(N, ...)`; `member_weights` then belong to the local members and need not
            sum to 1.
        reduction: `"mean"` or `"sum"` over elements, then summed over members; `"none"` returns `(K, N, ...)`.

    Returns:
        A scalar, or `(K, N, ...)`; in float32 for half-precision predictions.

    Example:
        >>> predictions = torch.tensor([[1.0], [3.0]], requires_grad=True)
        >>> negative_correlation(predictions, torch.tensor([0.0]), 0.5).backward()
        >>> predictions.grad
        tensor([[1.5000],
                [2.5000]])
    """
    _checks.check_members_first(predictions, "predictions")
    _checks.check_reduction(reduction)
    _checks.check_same_shape(target, predictions, "predictions")
    lam, alpha, mixture = resolve_coupling(predictions, diversity, member_weights, mixture)
    f = predictions.to(compute_dtype(predictions))
    alpha = along_members(alpha, f)
    constant = f.detach()  # the others are constants in the paper's derivation
    if mixture is None:
        mixture = (alpha * constant).sum(0)
    # F^k - F̄ moves by (1 - α^k) with F^k: (1 - α^k) F^k - Σ_{j≠k} α^j F^j
    gap = (1 - alpha) * f - (mixture - alpha * constant)
    alone = alpha == 1
    strength = torch.where(alone, 0.0, lam / (2 * torch.where(alone, 1.0, 1 - alpha)))
    losses = 0.5 * (f - target.to(f)).square() - strength * gap.square()
    return member_mean(losses, sample_weight, reduction)


def closed_form(
    predictions: Tensor,
    target: Tensor,
    diversity: Tensor,
    scale: Tensor,
    alpha: float | None = None,
    mixture: Tensor | None = None,
) -> LossResult:
    """Losses, squared errors of the ensemble and the gradient of R runs, without autograd.

    Shapes: predictions `(R, K, N, M)`, target and mixture `(R, N, M)`, diversity `(R,)`, scale (factor of a sample's
    loss) `(R, N)` or `(R, K, N)`. A sample's loss is the mean over its M outputs; `alpha` is every member's weight, by
    default 1/K.
    """
    f = predictions.to(compute_dtype(predictions))
    alpha = 1 / f.shape[1] if alpha is None else alpha
    mean = f.mean(1)
    scores = (mean - target).square().mean(-1)
    error = f - target.unsqueeze(1)
    gap = f - (mean if mixture is None else mixture).unsqueeze(1)
    lam = diversity.view(-1, 1, 1, 1)
    # alpha = 1: no second term
    strength, lam = (lam / (2 * (1 - alpha)), lam) if alpha < 1 else (0 * lam, 0 * lam)
    scale = scale if scale.ndim == 3 else scale.unsqueeze(1)
    losses = ((0.5 * error.square() - strength * gap.square()).mean(-1) * scale).sum(2)
    gradient = (error - lam * gap) * (scale / f.shape[3]).unsqueeze(3)
    return LossResult(losses, scores, gradient.to(predictions.dtype))
