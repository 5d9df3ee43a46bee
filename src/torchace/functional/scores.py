"""Scores of probabilities, measures of diversity, and the bias-variance-covariance decomposition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace import _checks
from torchace.functional._options import along_members, compute_dtype, reduce_samples


def brier_score(probs: Tensor, target: Tensor) -> Tensor:
    r"""The Brier score: squared distance from the target, summed over classes, averaged over samples.

    $$\frac{1}{N} \sum_n \sum_c (q_{nc} - p_{nc})^2$$

    Args:
        probs: Probabilities, `(N, C, ...)`, of an ensemble or a member.
        target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`.

    Returns:
        A scalar in [0, 2].

    Example:
        >>> brier_score(torch.tensor([[0.7, 0.3]]), torch.tensor([0]))
        tensor(0.1800)
    """
    _checks.check_probs(probs)
    return brier_scores(probs, target).mean()


def brier_scores(probs: Tensor, target: Tensor) -> Tensor:
    """Brier score of each sample, `(N, ...)`; without checking the values of `probs`."""
    q = probs.to(compute_dtype(probs))
    if _checks.check_target(target, probs[None], ignore_index=None):
        return (q - target.to(q)).square().sum(1)
    index = target.long().unsqueeze(1)
    return (q - torch.zeros_like(q).scatter(1, index, 1.0)).square().sum(1)


def calibration_error(probs: Tensor, target: Tensor, num_bins: int = 15) -> Tensor:
    r"""The expected calibration error of the predicted class: L1, bins of equal width.

    $$\sum_b \frac{n_b}{N} \left| \text{accuracy}_b - \text{confidence}_b \right|$$

    Args:
        probs: Probabilities, `(N, C, ...)`, of an ensemble or a member.
        target: Class indices, `(N, ...)`.
        num_bins: Number of bins in [0, 1].

    Returns:
        A scalar in [0, 1].

    Example:
        >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2]])
        >>> calibration_error(probs, torch.tensor([0, 1]))
        tensor(0.3000)
    """
    _checks.check_probs(probs)
    return bins_error(calibration_bins(probs, target, num_bins)).to(compute_dtype(probs))


class CalibrationBins(NamedTuple):
    """Sums over the samples of each bin, `(num_bins,)`; additive over batches."""

    samples: Tensor
    confidence: Tensor
    correct: Tensor


def calibration_bins(
    probs: Tensor, target: Tensor, num_bins: int = 15, *, counted: Tensor | None = None
) -> CalibrationBins:
    """Bin samples by confidence, without checking the values of `probs`.

    Shapes: probs `(N, C, ...)`, target `(N, ...)`, counted (mask of the samples to include) `(N, ...)`.
    """
    _checks.check_count(num_bins, "num_bins")
    _checks.check_class_indices(target, probs[None], ignore_index=None)
    confidence, choice = probs.to(compute_dtype(probs)).max(1)
    confidence, correct = confidence.flatten(), (choice == target).flatten()
    # bin b holds [b, b + 1) / num_bins; a confidence of 1 belongs to the last
    index = (confidence * num_bins).long().clamp(0, num_bins - 1)
    sums = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence.dtype)]).double()
    if counted is not None:
        sums = sums * counted.flatten()
    return CalibrationBins(*sums.new_zeros(3, num_bins).index_add(1, index, sums))


def bins_error(bins: CalibrationBins) -> Tensor:
    """Calibration error of accumulated bins, in float64."""
    return (bins.correct - bins.confidence).abs().sum() / bins.samples.sum()


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
    return reduce_samples(-(log_mixture.exp() * log_mixture.clamp(max=0)).sum(1), reduction)  # rounding exceeds 0


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
    logits: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None, reduction: str = "mean"
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
    if _checks.check_target(target, logits, ignore_index=None):
        return reduce_samples((target.to(gain) * gain).sum(1), reduction)
    return reduce_samples(gain.gather(1, target.long().unsqueeze(1)).squeeze(1), reduction)


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


class BiasVarianceCovariance(NamedTuple):
    """The three terms of an ensemble's mean squared error; they add up to it."""

    bias: Tensor
    """Squared bias of the ensemble: (mean over members of the bias)²."""
    variance: Tensor
    """Sum of the members' variances over trainings, divided by K²."""
    covariance: Tensor
    """Sum of the members' pairwise covariances over trainings, divided by K²."""

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
