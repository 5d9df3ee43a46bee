"""The losses as modules: they hold options and call `functional`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy, negative_correlation
from torchace.nn.base import apply_keeping_dtype


class _MemberLoss(nn.Module):
    """What the three losses hold in common: λ, α and the reduction."""

    member_weights: Tensor | None

    def __init__(
        self, diversity: float | Tensor, member_weights: Tensor | Sequence[float] | None, reduction: str
    ) -> None:
        super().__init__()
        _checks.check_reduction(reduction)
        self.diversity = diversity
        self.reduction = reduction
        if member_weights is not None:
            member_weights = _checks._weights_tensor(member_weights)
            member_weights = _checks.as_member_weights(member_weights, member_weights.numel(), like=member_weights)
        self.register_buffer("member_weights", member_weights)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        names = ("member_weights", "_diversity_tensor")
        moved = super()._apply
        return apply_keeping_dtype(self, names, lambda: moved(fn, recurse))  # type: ignore[no-untyped-call]

    @property
    def diversity(self) -> float | Tensor:
        """λ; may be set between steps. A tensor does not make `torch.compile` compile again."""
        return self._diversity_tensor if self._diversity_tensor is not None else self._diversity_number

    @diversity.setter
    def diversity(self, value: float | Tensor) -> None:
        _checks.check_diversity(value)
        if isinstance(value, Tensor):
            if not value.is_floating_point():  # it may be 0 now and 0.5 later
                value = value.to(torch.get_default_dtype())
            self.register_buffer("_diversity_tensor", value, persistent=False)
            self._diversity_number = float("nan")
        else:
            self.register_buffer("_diversity_tensor", None, persistent=False)
            self._diversity_number = value

    _diversity_tensor: Tensor | None
    _diversity_number: float

    def _weights(self, member_weights: Tensor | Sequence[float] | None) -> Tensor | Sequence[float] | None:
        return self.member_weights if member_weights is None else member_weights

    def extra_repr(self) -> str:
        return f"diversity={float(self.diversity):g}, reduction={self.reduction!r}"


class AmendedCrossEntropyLoss(_MemberLoss):
    """`functional.amended_cross_entropy` with its options held.

    Args:
        diversity: λ in [0, 1], a number or a 0-dimensional tensor. The attribute may be changed between steps.
        member_weights: The paper's α, `(K,)`; uniform unless given here or in a call.
        weight: Class weights, `(C,)`.
        ignore_index: Class index that does not count.
        label_smoothing: Share of the target that is spread evenly over the classes.
        detach_others: False lets gradients flow into the other members; for ablation alone.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Example:
        >>> loss = AmendedCrossEntropyLoss(0.5, label_smoothing=0.1)
        >>> loss(torch.zeros(3, 4, 2), torch.tensor([0, 1, 0, 1]))
        tensor(1.3863)
    """

    weight: Tensor | None

    def __init__(
        self,
        diversity: float | Tensor,
        *,
        member_weights: Tensor | Sequence[float] | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        detach_others: bool = True,
        reduction: str = "mean",
    ) -> None:
        super().__init__(diversity, member_weights, reduction)
        _checks.check_fraction(label_smoothing, "label_smoothing")
        if weight is not None:
            _checks.check_tensor(weight, "weight")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.detach_others = detach_others

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        sample_weight: Tensor | None = None,
        member_weights: Tensor | Sequence[float] | None = None,
        mixture: Tensor | None = None,
    ) -> Tensor:
        """The loss of logits `(K, N, C, ...)`; see `functional.amended_cross_entropy`."""
        return amended_cross_entropy(
            logits,
            target,
            self.diversity,
            member_weights=self._weights(member_weights),
            sample_weight=sample_weight,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            mixture=mixture,
            detach_others=self.detach_others,
            reduction=self.reduction,
        )


class BinaryAmendedCrossEntropyLoss(_MemberLoss):
    """`functional.binary_amended_cross_entropy` with its options held.

    Args:
        diversity: λ in [0, 1], a number or a 0-dimensional tensor. The attribute may be changed between steps.
        member_weights: The paper's α, `(K,)`; uniform unless given here or in a call.
        pos_weight: Weight of the positive class, broadcast against the target.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Example:
        >>> BinaryAmendedCrossEntropyLoss(0.0)(torch.zeros(3, 4), torch.tensor([0.0, 1.0, 0.0, 1.0]))
        tensor(2.0794)
    """

    pos_weight: Tensor | None

    def __init__(
        self,
        diversity: float | Tensor,
        *,
        member_weights: Tensor | Sequence[float] | None = None,
        pos_weight: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(diversity, member_weights, reduction)
        if pos_weight is not None:
            _checks.check_tensor(pos_weight, "pos_weight")
        self.register_buffer("pos_weight", pos_weight)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        sample_weight: Tensor | None = None,
        member_weights: Tensor | Sequence[float] | None = None,
        mixture: Tensor | None = None,
    ) -> Tensor:
        """The loss of logits `(K, N, ...)`; see `functional.binary_amended_cross_entropy`."""
        return binary_amended_cross_entropy(
            logits,
            target,
            self.diversity,
            member_weights=self._weights(member_weights),
            sample_weight=sample_weight,
            pos_weight=self.pos_weight,
            mixture=mixture,
            reduction=self.reduction,
        )


class NegativeCorrelationLoss(_MemberLoss):
    """`functional.negative_correlation` with its options held.

    Args:
        diversity: λ in [0, 1], a number or a 0-dimensional tensor. The attribute may be changed between steps.
        member_weights: The weights α of the members' mean, `(K,)`; uniform unless given here or in a call.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Example:
        >>> NegativeCorrelationLoss(0.0)(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0]))
        tensor(5.)
    """

    def __init__(
        self,
        diversity: float | Tensor,
        *,
        member_weights: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(diversity, member_weights, reduction)

    def forward(
        self,
        predictions: Tensor,
        target: Tensor,
        *,
        sample_weight: Tensor | None = None,
        member_weights: Tensor | Sequence[float] | None = None,
        mixture: Tensor | None = None,
    ) -> Tensor:
        """The loss of predictions `(K, N, ...)`; see `functional.negative_correlation`."""
        return negative_correlation(
            predictions,
            target,
            self.diversity,
            member_weights=self._weights(member_weights),
            sample_weight=sample_weight,
            mixture=mixture,
            reduction=self.reduction,
        )
