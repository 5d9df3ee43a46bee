"""All scores of an ensemble in one metric."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from torchace import _checks
from torchace.functional import ambiguity, disagreement, ensemble_log_probs, mutual_information
from torchace.functional.calibration import CalibrationBins, bins_error, brier_scores, calibration_bins

# What is summed over samples, one number each
SUMS = ("accuracy", "cross_entropy", "brier", "disagreement", "mutual_information", "ambiguity")
# What is summed over samples, one number a member
MEMBER_SUMS = ("accuracy", "cross_entropy", "brier")


class NoSamples(ValueError):
    """Nothing was added, or nothing that counts."""

    def __init__(self) -> None:
        super().__init__("Expected at least one sample before compute(), but none was added.")


class EnsembleMetrics(Metric):
    """Scores of an ensemble and its members, accumulated over batches.

    `compute()` returns a dict:

    - `accuracy`, `cross_entropy`, `brier`, `calibration_error`: of the ensemble
    - `member_accuracy`, `member_cross_entropy`, `member_brier`, `member_calibration_error`: means over members
    - `disagreement`, `mutual_information`, `ambiguity`: how much the members differ
    - `members`: the accuracy of each member, `(K,)`

    Non-finite logits are an error that names the member: at once on the CPU, in `compute()` on other devices, where
    `update` reads nothing back.

    Args:
        num_members: K.
        num_classes: C.
        num_bins: Bins of the calibration error.
        ignore_index: Class index that does not count.

    Example:
        >>> metrics = EnsembleMetrics(num_members=2, num_classes=2)
        >>> metrics.update(torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([0]))
        >>> scores = metrics.compute()
        >>> scores["accuracy"], scores["members"], scores["disagreement"]
        (tensor(1.), tensor([1., 0.]), tensor(1.))
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    samples: Tensor
    sums: Tensor
    member_sums: Tensor
    bins: Tensor
    member_bins: Tensor
    nonfinite: Tensor

    def __init__(
        self, num_members: int, num_classes: int, *, num_bins: int = 15, ignore_index: int = -100, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        _checks.check_count(num_members, "num_members")
        _checks.check_count(num_classes, "num_classes")
        _checks.check_count(num_bins, "num_bins")
        self.num_members, self.num_classes = num_members, num_classes
        self.num_bins, self.ignore_index = num_bins, ignore_index
        # float64: a sum over many samples keeps the digits of its terms
        shapes = {
            "samples": (),
            "sums": (len(SUMS),),
            "member_sums": (len(MEMBER_SUMS), num_members),
            "bins": (3, num_bins),
            "member_bins": (num_members, 3, num_bins),
            "nonfinite": (num_members,),
        }
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, logits: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Members' logits, `(K, N, C, ...)`.
            target: Class indices, `(N, ...)`.
            member_weights: The paper's α, `(K,)`; uniform unless given.
        """
        _checks.check_logits(logits)
        if (logits.shape[0], logits.shape[2]) != (self.num_members, self.num_classes):
            raise ValueError(
                f"Expected `logits` of {self.num_members} members and {self.num_classes} classes, "
                f"but got shape {tuple(logits.shape)}."
            )
        if _checks.check_target(target, logits, ignore_index=self.ignore_index):
            raise TypeError("Expected class indices in `target`, but got class probabilities. Use target.argmax(1).")
        logits, target, valid = self._samples(logits, target)
        _checks.check_finite(logits)
        self.nonfinite += (~torch.isfinite(logits)).flatten(1).any(1)

        log_q = F.log_softmax(logits, 2, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
        q = log_q.exp()
        log_mixture = ensemble_log_probs(logits, member_weights=member_weights)
        mixture = log_mixture.exp()
        own = target.expand(self.num_members, -1)
        scores = [
            log_mixture.argmax(1) == target,
            -log_mixture.gather(1, target[:, None]).squeeze(1),
            brier_scores(mixture, target),
            disagreement(logits, reduction="none"),
            mutual_information(logits, member_weights=member_weights, reduction="none"),
            ambiguity(logits, target, member_weights=member_weights, reduction="none"),
        ]
        members = [
            logits.argmax(2) == own,
            -log_q.gather(2, own[..., None]).squeeze(2),
            torch.stack([brier_scores(member, target) for member in q]),
        ]
        self.samples += valid.sum()
        self.sums += torch.stack([(score * valid).sum(dtype=torch.float64) for score in scores])
        self.member_sums += torch.stack([(score * valid).sum(1, dtype=torch.float64) for score in members])
        self.bins += torch.stack(calibration_bins(mixture, target, self.num_bins, counted=valid))
        bins = [torch.stack(calibration_bins(member, target, self.num_bins, counted=valid)) for member in q]
        self.member_bins += torch.stack(bins)

    def compute(self) -> dict[str, Tensor]:
        """The scores of everything added so far, float32 scalars and `members` `(K,)`."""
        bad = self.nonfinite.nonzero().flatten().tolist()
        if bad:
            raise ValueError(_checks.nonfinite_message(bad))
        if self.samples == 0:
            raise NoSamples
        scores = dict(zip(SUMS, self.sums / self.samples, strict=True))
        means = self.member_sums / self.samples  # (3, K)
        scores["calibration_error"] = bins_error(CalibrationBins(*self.bins))
        scores |= {f"member_{name}": mean for name, mean in zip(MEMBER_SUMS, means.mean(1), strict=True)}
        errors = [bins_error(CalibrationBins(*bins)) for bins in self.member_bins]
        scores["member_calibration_error"] = torch.stack(errors).mean()
        scores["members"] = means[MEMBER_SUMS.index("accuracy")]
        return {name: score.float() for name, score in scores.items()}

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """As torchmetrics does, but `members` keeps its axis where it is one number, which torchmetrics squeezes."""
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(wrapped)
        def with_member_axis() -> dict[str, Tensor]:
            scores = wrapped()
            return {**scores, "members": scores["members"].reshape(self.num_members)}

        return with_member_axis

    def _samples(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dense outputs as rows, `(K, M, C)` and `(M,)`, and which of them count; those that do not are zeros."""
        logits = logits.movedim(2, -1).reshape(self.num_members, -1, self.num_classes)
        target = target.reshape(-1).long()
        valid = target != self.ignore_index
        return torch.where(valid[:, None], logits, 0), target.masked_fill(~valid, 0), valid
