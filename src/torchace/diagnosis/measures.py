"""What is measured of an ensemble's predictions, sample by sample; every number comes from `functional`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchace import _checks
from torchace.functional import (
    ambiguity,
    disagreement,
    ensemble_log_probs,
    ensemble_probs,
    mixture_cross_entropy,
    mutual_information,
    pairwise_cross_entropy,
)
from torchace.functional.calibration import brier_scores, calibration_bins

Values = NDArray[Any]

DRAWS = 10  # of a random half of the members, and the other half


@dataclass(frozen=True)
class Measures:
    """Scores of K members and their ensemble on N samples.

    Attributes:
        target: `(N,)`.
        member_weights: α, `(K,)`.
        choices: The class each member predicts, `(K, N)`.
        choice: The ensemble's, `(N,)`.
        confidence: The probability it gives to it, `(N,)`.
        member_cross_entropy: `(K, N)`.
        cross_entropy: The ensemble's, `(N,)`.
        brier: The ensemble's, `(N,)`.
        entropy: Of the ensemble's probabilities, `(N,)`.
        disagreement: `(N,)`; likewise `mutual_information` and `ambiguity`.
        divergence: Mean over samples of KL(q^j || q^k), `(K, K)`.
        without: Whether the ensemble without member k is right, `(K, N)`; for K=1 empty.
        half: The share of random halves of the members that are right, `(N,)`; for K=1 empty.
        bins: The ensemble's calibration bins: samples, sum of confidence, sum of right answers, `(3, B)`.
        member_bins: `(K, 3, B)`.
    """

    num_classes: int
    target: Values
    member_weights: Values
    choices: Values
    choice: Values
    confidence: Values
    member_cross_entropy: Values
    cross_entropy: Values
    brier: Values
    entropy: Values
    disagreement: Values
    mutual_information: Values
    ambiguity: Values
    divergence: Values
    without: Values
    half: Values
    bins: Values
    member_bins: Values

    @property
    def samples(self) -> int:
        """N."""
        return len(self.target)

    @property
    def num_members(self) -> int:
        """K."""
        return len(self.choices)

    @property
    def member_correct(self) -> Values:
        """Whether each member is right, `(K, N)`."""
        return np.asarray(self.choices == self.target)

    @property
    def correct(self) -> Values:
        """Whether the ensemble is right, `(N,)`."""
        return np.asarray(self.choice == self.target)

    @property
    def chance(self) -> float:
        """The accuracy of always answering the most frequent class."""
        return float(np.bincount(self.target).max()) / self.samples


@torch.no_grad()
def measure(logits: Tensor, target: Tensor, member_weights: Any = None, name: str = "logits") -> Measures:
    """Measures logits `(K, N, C)` against class indices `(N,)`, in float64.

    Args:
        logits: Members' logits.
        target: Class indices.
        member_weights: α, `(K,)`; uniform unless given.
        name: What the logits are called in an error.
    """
    _checks.check_logits(logits, name)
    if logits.ndim != 3:
        raise ValueError(
            f"Expected `{name}` of shape (K, N, C), but got {tuple(logits.shape)}. For dense outputs, take samples of "
            "them that do not depend on each other."
        )
    logits, target = logits.detach().cpu().double(), target.detach().cpu() if isinstance(target, Tensor) else target
    if _checks.check_target(target, logits, ignore_index=None):
        raise TypeError("Expected class indices in `target`, but got class probabilities. Use target.argmax(1).")
    if logits.shape[1] == 0:
        raise ValueError(f"Expected at least one sample in `{name}`, but got none.")
    _checks.check_finite(logits, name)
    target = target.long()
    alpha = _checks.as_member_weights(member_weights, logits.shape[0], like=logits)
    log_probs = ensemble_log_probs(logits, member_weights=alpha)
    probs = log_probs.exp()
    one = torch.ones(1, dtype=logits.dtype)
    cross_entropy = pairwise_cross_entropy(logits)
    without, half = _subsets(logits, target, alpha)
    found: dict[str, Tensor] = {
        "target": target,
        "member_weights": alpha,
        "choices": logits.argmax(2),
        "choice": log_probs.argmax(1),
        "confidence": probs.amax(1),
        "member_cross_entropy": torch.stack(
            [mixture_cross_entropy(member[None], target, one, reduction="none") for member in logits]
        ),
        "cross_entropy": mixture_cross_entropy(logits, target, alpha, reduction="none"),
        "brier": brier_scores(probs, target),
        "entropy": mixture_cross_entropy(log_probs[None], probs, one, reduction="none"),  # H(q̄, q̄)
        "disagreement": disagreement(logits, reduction="none"),
        "mutual_information": mutual_information(logits, member_weights=alpha, reduction="none"),
        "ambiguity": ambiguity(logits, target, member_weights=alpha, reduction="none"),
        "divergence": (cross_entropy - cross_entropy.diagonal()[:, None]).clamp(min=0),
        "without": without,
        "half": half,
        "bins": torch.stack(calibration_bins(probs, target)),
        "member_bins": torch.stack([torch.stack(calibration_bins(q.softmax(1), target)) for q in logits]),
    }
    return Measures(logits.shape[2], **{name: value.numpy() for name, value in found.items()})


def _subsets(logits: Tensor, target: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Whether ensembles of fewer members are right: without each one `(K, N)`, and random halves on average `(N,)`."""
    num_members = len(logits)
    if num_members == 1:
        return torch.empty(0, len(target)), torch.empty(0)
    everybody = torch.arange(num_members)
    without = torch.stack([_right(logits, target, alpha, everybody[everybody != k]) for k in everybody])
    generator = torch.Generator().manual_seed(0)  # the same halves, whenever it is asked
    size = num_members // 2
    halves = []
    for _ in range(DRAWS):
        order = torch.randperm(num_members, generator=generator)
        halves += [_right(logits, target, alpha, part) for part in (order[:size], order[-size:])]
    return without, torch.stack(halves).double().mean(0)


def _right(logits: Tensor, target: Tensor, alpha: Tensor, members: Tensor) -> Tensor:
    weights = alpha[members]
    if not bool(weights.sum() > 0):  # members without any weight are equals
        weights = torch.ones_like(weights)
    weights = weights / weights.sum()
    return ensemble_probs(logits[members], member_weights=weights).argmax(1) == target
