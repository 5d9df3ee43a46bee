"""Scores for ensembles of every link, as scalars for a logger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import ensemble_probs
from torchace.metrics.ensemble import EnsembleMetrics, MemberMetric, NoSamplesError


class RegressionMetrics(MemberMetric):
    """`mean_squared_error`, `member_mean_squared_error`, `ambiguity` and `members` `(K,)` of regressors."""

    member_score = "member_mean_squared_error"

    def __init__(self, num_members: int, **kwargs: Any) -> None:
        _checks.check_count(num_members, "num_members")
        super().__init__(num_members, {"sums": (2,), "member_sums": (num_members,)}, **kwargs)

    def extra_repr(self) -> str:
        """Return the number of members."""
        return f"num_members={self.num_members}"

    @torch.no_grad()
    def update(
        self, predictions: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None
    ) -> None:
        """Add predictions `(K, N, ...)`, their target `(N, ...)` and member weights `(K,)`."""
        _checks.check_members_first(predictions, "predictions")
        _checks.check_same_shape(target, predictions, "predictions")
        _checks.check_finite(predictions, "predictions")
        values = predictions.double()
        mean = ensemble_probs(values, member_weights=member_weights, link="identity")
        alpha = _checks.as_member_weights(member_weights, self.num_members, like=values)
        spread = (values - mean).square().flatten(1).sum(1)
        self.samples += target.numel()
        self.sums += torch.stack([(mean - target).square().sum(), alpha @ spread])
        self.member_sums += (values - target).square().flatten(1).sum(1)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all samples, float32 scalars and `members` `(K,)`."""
        if self.samples == 0:
            raise NoSamplesError
        error, spread = self.sums / self.samples
        members = self.member_sums / self.samples
        scores = {
            "mean_squared_error": error,
            "member_mean_squared_error": members.mean(),
            "ambiguity": spread,
            "members": members,
        }
        return {name: score.float() for name, score in scores.items()}


class TaskMetrics(nn.Module):
    """Scores for an ensemble's link, one scalar each; sizes come from the first batch.

    Softmax: `EnsembleMetrics`, with the most likely class of a target of probabilities. Sigmoid: the same, with each
    output as two classes, split at 0.5. Identity: `RegressionMetrics`. `members` becomes `member_accuracy_0`, ...
    """

    def __init__(self, num_members: int, link: str = "softmax", *, ignore_index: int = -100) -> None:
        super().__init__()
        _checks.check_choice(link, "link", _checks.LINKS)
        self.num_members, self.link, self.ignore_index = num_members, link, ignore_index
        self.metrics: MemberMetric | None = None

    @classmethod
    def of_loss(cls, ensemble: Any, loss: Any) -> TaskMetrics:
        """Return the metrics of an ensemble that a loss trains."""
        return cls(ensemble.num_members, ensemble.link, ignore_index=getattr(loss, "ignore_index", -100))

    @torch.no_grad()
    def update(
        self, outputs: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None
    ) -> None:
        """Add the members' outputs `(K, N, ...)` of a batch and their target."""
        outputs = outputs.detach()
        if self.link == "sigmoid":
            # softmax over (0, z) is sigmoid(z): two classes for each output, (K, N, 2, ...)
            outputs = torch.stack([torch.zeros_like(outputs), outputs], 2)
            target = (target > 0.5).long()
        elif self.link == "softmax" and target.is_floating_point() and target.shape == outputs.shape[1:]:
            target = target.argmax(1)
        if self.metrics is None:
            if self.link == "identity":
                self.metrics = RegressionMetrics(self.num_members)
            else:
                self.metrics = EnsembleMetrics(self.num_members, outputs.shape[2], ignore_index=self.ignore_index)
        self.metrics = self.metrics.to(outputs.device)  # which may change between training and prediction
        self.metrics.update(outputs, target, member_weights=member_weights)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores since the last reset; empty if no sample counts."""
        if self.metrics is None or not self.metrics.update_called:
            return {}
        try:
            scores: dict[str, Tensor] = self.metrics.compute()
        except NoSamplesError:
            return {}
        members = scores.pop("members")
        return scores | {f"{self.metrics.member_score}_{k}": value for k, value in enumerate(members)}

    def reset(self) -> None:
        """Discard all samples."""
        if self.metrics is not None:
            self.metrics.reset()
