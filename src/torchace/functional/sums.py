"""Scores of an ensemble of classifiers from sums over samples, which add up over batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace import _checks
from torchace.functional.prediction import ensemble_log_probs
from torchace.functional.scores import (
    CalibrationBins,
    ambiguity,
    bins_error,
    brier_scores,
    calibration_bins,
    disagreement,
    mutual_information,
)

SCORES = ("accuracy", "cross_entropy", "brier", "disagreement", "mutual_information", "ambiguity")
MEMBER_SCORES = ("accuracy", "cross_entropy", "brier")


class NoSamplesError(ValueError):
    """Scores were requested, but no sample counts."""

    def __init__(self) -> None:
        super().__init__("Expected at least one sample before compute(), but none was added.")


class ScoreSums(NamedTuple):
    """Sums over samples of B calibration bins, in float64."""

    samples: Tensor  # ()
    sums: Tensor  # (6,), of `SCORES`
    member_sums: Tensor  # (3, K), of `MEMBER_SCORES`
    bins: Tensor  # (1 + K, 3, B), of the ensemble, then of each member
    nonfinite: Tensor  # (K,), batches with logits that are not finite


@torch.no_grad()
def score_sums(
    logits: Tensor,
    target: Tensor,
    *,
    num_bins: int = 15,
    ignore_index: int = -100,
    member_weights: Tensor | Sequence[float] | None = None,
) -> ScoreSums:
    """Return the sums of a batch with logits `(K, N, C, ...)` and class indices `(N, ...)`."""
    _checks.check_logits(logits)
    _checks.check_class_indices(target, logits, ignore_index=ignore_index)
    # dense outputs as rows, (K, M, C) and (M,); ignored samples are zeros
    num_members, _, num_classes = logits.shape[:3]
    target = target.reshape(-1).long()
    valid = target != ignore_index
    target = target.masked_fill(~valid, 0)
    logits = logits.movedim(2, -1).reshape(num_members, -1, num_classes)
    logits = torch.where(valid[:, None], logits, 0)
    _checks.check_finite(logits)

    log_q = F.log_softmax(logits, 2, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    q = log_q.exp()
    log_mixture = ensemble_log_probs(logits, member_weights=member_weights)
    mixture = log_mixture.exp()
    scores = [
        log_mixture.argmax(1) == target,
        F.nll_loss(log_mixture, target, reduction="none"),
        brier_scores(mixture, target),
        disagreement(logits, reduction="none"),
        mutual_information(logits, member_weights=member_weights, reduction="none"),
        ambiguity(logits, target, member_weights=member_weights, reduction="none"),
    ]
    members = [
        logits.argmax(2) == target,
        -log_q.gather(2, target.expand(num_members, -1)[..., None]).squeeze(2),
        torch.stack([brier_scores(member, target) for member in q]),
    ]
    bins = [torch.stack(calibration_bins(p, target, num_bins, counted=valid)) for p in (mixture, *q)]
    return ScoreSums(
        valid.sum(dtype=torch.float64),
        torch.stack([(score * valid).sum(dtype=torch.float64) for score in scores]),
        torch.stack([(score * valid).sum(1, dtype=torch.float64) for score in members]),
        torch.stack(bins),
        (~torch.isfinite(logits)).flatten(1).any(1).double(),
    )


def scores_from_sums(sums: ScoreSums) -> dict[str, Tensor]:
    """Return the scores as `EnsembleMetrics.compute` does."""
    bad = sums.nonfinite.nonzero().flatten().tolist()
    if bad:
        raise ValueError(_checks.nonfinite_message(bad))
    ensemble, *members = (bins_error(CalibrationBins(*bins)).float() for bins in sums.bins)
    return {
        **mean_scores(sums.samples, SCORES, sums.sums, MEMBER_SCORES, sums.member_sums),
        "calibration_error": ensemble,
        "member_calibration_error": torch.stack(members).mean(),
    }


def mean_scores(
    samples: Tensor, names: Sequence[str], sums: Tensor, member_names: Sequence[str], member_sums: Tensor
) -> dict[str, Tensor]:
    """Return the means over samples, float32 scalars; `members` `(K,)` is the first score of the members."""
    if samples == 0:
        raise NoSamplesError
    members = member_sums / samples
    scores = dict(zip(names, sums / samples, strict=True))
    scores |= {f"member_{name}": mean for name, mean in zip(member_names, members.mean(1), strict=True)}
    return {name: score.float() for name, score in {**scores, "members": members[0]}.items()}
