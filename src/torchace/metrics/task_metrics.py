"""Scores for every link of an ensemble, as flat numbers that a logger takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from torchace import _checks
from torchace.functional import ensemble_probs
from torchace.functional._members import along_members
from torchace.metrics.ensemble import EnsembleMetrics, NoSamples


class RegressionMetrics(Metric):
    r"""Scores of an ensemble of regressors, accumulated over batches.

    `compute()` returns a dict: `mean_squared_error` of the ensemble, `member_mean_squared_error` (the mean over
    members), `ambiguity` (the members' mean squared distance from the ensemble, $\sum_k \alpha^k (F^k - \bar F)^2$) and
    `members`, the mean squared error of each, `(K,)`.

    Args:
        num_members: K.

    Example:
        >>> metrics = RegressionMetrics(num_members=2)
        >>> metrics.update(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0]))
        >>> metrics.compute()["mean_squared_error"], metrics.compute()["ambiguity"]
        (tensor(1.), tensor(1.))
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    elements: Tensor
    sums: Tensor
    member_sums: Tensor

    def __init__(self, num_members: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _checks.check_count(num_members, "num_members")
        self.num_members = num_members
        # float64: a sum over many samples keeps the digits of its terms
        for name, shape in {"elements": (), "sums": (2,), "member_sums": (num_members,)}.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(
        self, predictions: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None
    ) -> None:
        """Adds a batch.

        Args:
            predictions: Members' predictions, `(K, N, ...)`.
            target: `(N, ...)`.
            member_weights: The weights α of the members' mean, `(K,)`; uniform unless given.
        """
        _checks.check_members_first(predictions, "predictions")
        _checks.check_same_shape(target, predictions, "predictions")
        _checks.check_finite(predictions, "predictions")
        values = predictions.double()
        mean = ensemble_probs(values, member_weights=member_weights, link="identity")
        alpha = _checks.as_member_weights(member_weights, self.num_members, like=values)
        spread = (along_members(alpha, values) * (values - mean).square()).sum()
        self.elements += target.numel()
        self.sums += torch.stack([(mean - target).square().sum(), spread])
        self.member_sums += (values - target).square().flatten(1).sum(1)

    def compute(self) -> dict[str, Tensor]:
        """The scores of everything added so far, float32 scalars and `members` `(K,)`."""
        if self.elements == 0:
            raise NoSamples
        error, spread = self.sums / self.elements
        members = self.member_sums / self.elements
        scores = {
            "mean_squared_error": error,
            "member_mean_squared_error": members.mean(),
            "ambiguity": spread,
            "members": members,
        }
        return {name: score.float() for name, score in scores.items()}


class TaskMetrics(nn.Module):
    """The scores that suit an ensemble's link, under names that a logger takes; sizes come from the first batch.

    - `"softmax"`: those of `EnsembleMetrics`. A target of class probabilities is scored by its most likely class.
    - `"sigmoid"`: the same, each output a choice between no and yes; a target above 0.5 is a yes.
    - `"identity"`: those of `RegressionMetrics`.

    `members` becomes one number a member: `member_accuracy_0`, ..., or `member_mean_squared_error_0`, ...

    Args:
        num_members: K.
        link: The ensemble's link.
        ignore_index: Class index that does not count.

    Example:
        >>> metrics = TaskMetrics(num_members=2, link="sigmoid")
        >>> metrics.update(torch.tensor([[-1.0, 2.0], [-2.0, -1.0]]), torch.tensor([0.0, 1.0]))
        >>> metrics.compute()["member_accuracy_0"], metrics.compute()["disagreement"]
        (tensor(1.), tensor(0.5000))
    """

    def __init__(self, num_members: int, link: str = "softmax", *, ignore_index: int = -100) -> None:
        super().__init__()
        _checks.check_choice(link, "link", _checks.LINKS)
        self.num_members, self.link, self.ignore_index = num_members, link, ignore_index
        self.metrics: Metric | None = None

    @torch.no_grad()
    def update(
        self, outputs: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None
    ) -> None:
        """Adds a batch: the members' outputs `(K, N, ...)`, their target, and the weights of the members."""
        outputs = outputs.detach()
        if self.link == "sigmoid":
            # softmax over (0, z) is sigmoid(z): two classes for each output, (K, N, 2, ...)
            outputs = torch.stack([torch.zeros_like(outputs), outputs], 2)
            target = (target > 0.5).long()
        elif self.link == "softmax" and target.is_floating_point() and target.shape == outputs.shape[1:]:
            target = target.argmax(1)
        if self.metrics is None:
            self.metrics = self._sized(outputs)
        self.metrics = self.metrics.to(outputs.device)  # which may change between training and prediction
        self.metrics.update(outputs, target, member_weights=member_weights)

    def compute(self) -> dict[str, Tensor]:
        """The scores of everything added since the last reset, one scalar each; none where nothing counted."""
        if self.metrics is None or not self.metrics.update_called:
            return {}
        try:
            scores: dict[str, Tensor] = self.metrics.compute()
        except NoSamples:  # all of them are ignored, here and on all other ranks
            return {}
        name = "member_mean_squared_error" if self.link == "identity" else "member_accuracy"
        each = {f"{name}_{k}": value for k, value in enumerate(scores["members"].reshape(-1))}
        return {**{key: value for key, value in scores.items() if key != "members"}, **each}

    def reset(self) -> None:
        """Forgets everything added."""
        if self.metrics is not None:
            self.metrics.reset()

    def _sized(self, outputs: Tensor) -> Metric:
        if self.link == "identity":
            return RegressionMetrics(self.num_members)
        return EnsembleMetrics(self.num_members, outputs.shape[2], ignore_index=self.ignore_index)
