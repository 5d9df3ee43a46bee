"""Scores of an ensemble and its members for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
from torchace.functional.scores import brier_scores, calibration_bins

RANDOM_HALVES = 10  # draws of a random half of the members, each with its complement


class Measures:
    """Scores of K members and their ensemble on N samples, float64 numpy arrays, from logits `(K, N, C)`."""

    @torch.no_grad()
    def __init__(self, logits: Tensor, target: Tensor, member_weights: Any = None, name: str = "logits") -> None:
        logits, target = _check_inputs(logits, target, name)
        self.num_members, self.samples, self.num_classes = logits.shape
        alpha = _checks.as_member_weights(member_weights, self.num_members, like=logits)
        log_probs = ensemble_log_probs(logits, member_weights=alpha)
        probs = log_probs.exp()
        one = torch.ones(1, dtype=logits.dtype)

        self.target, self.member_weights = target.numpy(), alpha.numpy()  # (N,), (K,)
        self.chance = float(np.bincount(self.target).max()) / self.samples  # accuracy of the most frequent class
        self.choices = logits.argmax(2).numpy()  # class predicted by each member, (K, N)
        self.pair_disagreement = np.array(
            [[(one != other).mean() for other in self.choices] for one in self.choices]
        )  # share of samples, (K, K)
        self.choice = log_probs.argmax(1).numpy()  # by the ensemble, (N,)
        self.member_correct = np.asarray(self.choices == self.target)  # (K, N)
        self.correct = np.asarray(self.choice == self.target)  # (N,)
        self.confidence = probs.amax(1).numpy()  # of the ensemble, (N,)
        self.member_cross_entropy = torch.stack(
            [mixture_cross_entropy(member[None], target, one, reduction="none") for member in logits]
        ).numpy()  # (K, N)
        self.cross_entropy = mixture_cross_entropy(logits, target, alpha, reduction="none").numpy()  # (N,)
        self.brier = brier_scores(probs, target).numpy()  # (N,)
        self.entropy = mixture_cross_entropy(log_probs[None], probs, one, reduction="none").numpy()  # H(q̄), (N,)
        self.disagreement = disagreement(logits, reduction="none").numpy()  # (N,)
        self.mutual_information = mutual_information(logits, member_weights=alpha, reduction="none").numpy()  # (N,)
        self.ambiguity = ambiguity(logits, target, member_weights=alpha, reduction="none").numpy()  # (N,)
        pairs = pairwise_cross_entropy(logits)
        self.divergence = (pairs - pairs.diagonal()[:, None]).clamp(min=0).numpy()  # mean KL(q^j || q^k), (K, K)
        # calibration bins: samples, sum of confidence, number correct
        self.bins = torch.stack(calibration_bins(probs, target)).numpy()  # (3, B)
        self.member_bins = torch.stack(
            [torch.stack(calibration_bins(member.softmax(1), target)) for member in logits]
        ).numpy()  # (K, 3, B)
        # whether the ensemble without member k is correct, (K, N); share of random halves that are correct, (N,)
        self.without = self.half = np.empty((0, self.samples))
        if self.num_members > 1:
            self.without, self.half = _score_subsets(logits, target, alpha)


def _check_inputs(logits: Tensor, target: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return valid logits `(K, N, C)` in float64 and class indices, on the CPU."""
    _checks.check_logits(logits, name)
    if logits.ndim != 3:
        raise ValueError(
            f"Expected `{name}` of shape (K, N, C), but got {tuple(logits.shape)}. For dense outputs, take independent "
            "samples of them."
        )
    logits, target = logits.detach().cpu().double(), target.detach().cpu() if isinstance(target, Tensor) else target
    _checks.check_class_indices(target, logits, ignore_index=None)
    if logits.shape[1] == 0:
        raise ValueError(f"Expected at least one sample in `{name}`, but got none.")
    _checks.check_finite(logits, name)
    return logits, target.long()


def _score_subsets(logits: Tensor, target: Tensor, alpha: Tensor) -> tuple[Any, Any]:
    """Return whether the ensemble is correct without each member `(K, N)`, and the mean over random halves `(N,)`."""

    def correct(members: Tensor) -> Tensor:
        weights = alpha[members]
        if not bool(weights.sum() > 0):
            weights = torch.ones_like(weights)
        probs = ensemble_probs(logits[members], member_weights=weights / weights.sum())
        return probs.argmax(1) == target

    num_members = len(logits)
    indices = torch.arange(num_members)
    without = torch.stack([correct(indices[indices != k]) for k in indices])
    generator = torch.Generator().manual_seed(0)  # the same halves in every call
    orders = [torch.randperm(num_members, generator=generator) for _ in range(RANDOM_HALVES)]
    size = num_members // 2
    halves = [correct(part) for order in orders for part in (order[:size], order[-size:])]
    return without.numpy(), torch.stack(halves).double().mean(0).numpy()
