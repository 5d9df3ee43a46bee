"""Bias-variance-covariance decomposition of a regression ensemble's error."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchace import _checks
from torchace.functional._options import compute_dtype


class BiasVarianceCovariance(NamedTuple):
    """The three terms of an ensemble's mean squared error; they add up to it."""

    bias: Tensor
    """Squared bias of the ensemble: (mean over members of the bias)²."""
    variance: Tensor
    """Sum of the members' variances over trainings, divided by K²."""
    covariance: Tensor
    """Sum of the members' pairwise covariances over trainings, divided by K²."""

    @property
    def bias_squared(self) -> Tensor:
        """Alias of `bias`."""
        return self.bias

    @property
    def error(self) -> Tensor:
        """Mean squared error of the ensemble over trainings and samples."""
        return self.bias + self.variance + self.covariance


def bias_variance_covariance(predictions: Tensor, target: Tensor) -> BiasVarianceCovariance:
    r"""The bias-variance-covariance decomposition of a regression ensemble's squared error.

    $$E[(\bar F - Y)^2] = \Big(\frac{1}{K}\sum_k (E[F^k] - Y)\Big)^2 + \frac{1}{K^2}\sum_k \operatorname{var}(F^k)
    + \frac{1}{K^2} \sum_{k} \sum_{j \ne k} \operatorname{cov}(F^k, F^j)$$

    Expectations are means over trainings. The paper's first term, a mean of squares over K², is an error: with it the
    terms do not add up.

    Args:
        predictions: Predictions of T independent trainings of K members, `(T, K, N, ...)`.
        target: `(N, ...)`.

    Returns:
        The terms `bias` (squared), `variance` and `covariance`, each averaged over samples; `error` is their sum.

    Example:
        >>> predictions = torch.tensor([[[1.0], [3.0]], [[2.0], [4.0]]])
        >>> terms = bias_variance_covariance(predictions, torch.tensor([2.0]))
        >>> [term.item() for term in terms], terms.error.item()
        ([0.25, 0.125, 0.125], 0.5)
    """
    _checks.check_tensor(predictions, "predictions")
    if predictions.ndim < 3 or 0 in predictions.shape[:2]:
        raise ValueError(
            f"Expected `predictions` of shape (T, K, N, ...), trainings first, but got {tuple(predictions.shape)}."
        )
    _checks.check_floating(predictions, "predictions")
    _checks.check_same_shape(target, predictions[0], "predictions[0]")
    if _checks.can_read(predictions):
        for t, training in enumerate(predictions):
            _checks.check_finite(training, f"predictions[{t}]")
    f = predictions.to(compute_dtype(predictions))
    num_members = f.shape[1]
    bias = (f.mean((0, 1)) - target.to(f)).square().mean()
    # `correction=0`: means over the given trainings, so that the terms add up exactly
    variance = f.var(0, correction=0).sum(0).mean() / num_members**2
    covariance = f.mean(1).var(0, correction=0).mean() - variance
    return BiasVarianceCovariance(bias, variance, covariance)
