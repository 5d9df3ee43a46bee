"""Scores of probabilities: Brier score and calibration error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchace import _checks
from torchace.functional._options import compute_dtype


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
