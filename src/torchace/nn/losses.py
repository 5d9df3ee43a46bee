"""Losses as modules, and learnable member weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import (
    amended_cross_entropy,
    binary_amended_cross_entropy,
    mixture_cross_entropy,
    negative_correlation,
)
from torchace.nn.base import EnsembleModule, apply_keeping_dtype

Weights = Tensor | Sequence[float] | None


class MemberLoss(nn.Module):
    """Base class of the losses: λ, α, the reduction, and the options of one function.

    It trains ensembles with `link`. Compare models by `score`: the loss itself is unbounded below.
    """

    function: ClassVar[Callable[..., Tensor]]
    defaults: ClassVar[dict[str, Any]] = {}  # the function's further options; None for a tensor
    link: ClassVar[str]
    score: ClassVar[str] = "cross_entropy"

    member_weights: Tensor | None
    _diversity: float
    _diversity_tensor: Tensor | None

    def __init__(self, diversity: float | Tensor, member_weights: Weights, reduction: str, **options: Any) -> None:
        super().__init__()
        _checks.check_reduction(reduction)
        self.diversity = diversity
        self.reduction = reduction
        if member_weights is not None:
            member_weights = _checks.member_weights_tensor(member_weights)
            member_weights = _checks.as_member_weights(member_weights, member_weights.numel(), like=member_weights)
        self.register_buffer("member_weights", member_weights)
        for name, value in options.items():
            if self.defaults[name] is not None:
                setattr(self, name, value)
                continue
            if value is not None:
                _checks.check_tensor(value, name)
            self.register_buffer(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        apply = super()._apply
        names = ("member_weights", "_diversity_tensor")
        return apply_keeping_dtype(self, names, lambda: apply(fn, recurse))  # type: ignore[no-untyped-call]

    @property
    def diversity(self) -> float | Tensor:
        """λ; may be set between steps. With a tensor, `torch.compile` does not recompile."""
        return self._diversity if self._diversity_tensor is None else self._diversity_tensor

    @diversity.setter
    def diversity(self, value: float | Tensor) -> None:
        _checks.check_diversity(value)
        tensor = value if isinstance(value, Tensor) else None
        if tensor is not None and not tensor.is_floating_point():  # it may be 0 now and 0.5 later
            tensor = tensor.to(torch.get_default_dtype())
        self.register_buffer("_diversity_tensor", tensor, persistent=False)
        self._diversity = float("nan") if isinstance(value, Tensor) else value

    def set_diversity(self, value: float) -> None:
        """Set λ; change a tensor in place, so that a compiled step stays compiled."""
        _checks.check_diversity(value)
        if self._diversity_tensor is None:
            self.diversity = value
        else:
            with torch.no_grad():
                self._diversity_tensor.fill_(value)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        sample_weight: Tensor | None = None,
        member_weights: Weights = None,
        mixture: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the members' outputs `(K, N, ...)`; see the function in `torchace.functional`."""
        return type(self).function(
            logits,
            target,
            self.diversity,
            member_weights=self.member_weights if member_weights is None else member_weights,
            sample_weight=sample_weight,
            mixture=mixture,
            reduction=self.reduction,
            **{name: getattr(self, name) for name in self.defaults},
        )

    def extra_repr(self) -> str:
        """Return the options that differ from the defaults."""
        options = {"diversity": f"{float(self.diversity):g}"}
        for name, default in {"member_weights": None, **self.defaults, "reduction": "mean"}.items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                options[name] = str([round(number, 4) for number in value.flatten().tolist()])
            elif value != default:
                options[name] = repr(value)
        return ", ".join(f"{name}={value}" for name, value in options.items())


class AmendedCrossEntropyLoss(MemberLoss):
    """`functional.amended_cross_entropy` as a module.

    Args:
        diversity: λ in [0, 1], a number or a 0-dimensional tensor. The attribute may be changed between steps.
        member_weights: The paper's α, `(K,)`; uniform unless given here or in a call.
        weight: Class weights, `(C,)`.
        ignore_index: Class index to ignore.
        label_smoothing: Share of the target that is spread evenly over the classes.
        detach_others: False lets gradients flow into the other members; for ablation only.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Example:
        >>> loss = AmendedCrossEntropyLoss(0.5, label_smoothing=0.1)
        >>> loss
        AmendedCrossEntropyLoss(diversity=0.5, label_smoothing=0.1)
        >>> loss(torch.zeros(3, 4, 2), torch.tensor([0, 1, 0, 1]))
        tensor(1.3863)
    """

    function = staticmethod(amended_cross_entropy)
    defaults: ClassVar = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, "detach_others": True}
    link = "softmax"

    def __init__(
        self,
        diversity: float | Tensor,
        *,
        member_weights: Weights = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        detach_others: bool = True,
        reduction: str = "mean",
    ) -> None:
        _checks.check_fraction(label_smoothing, "label_smoothing")
        options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        super().__init__(diversity, member_weights, reduction, **options, detach_others=detach_others)


class BinaryAmendedCrossEntropyLoss(MemberLoss):
    """`functional.binary_amended_cross_entropy` as a module.

    Args:
        diversity: λ in [0, 1], a number or a 0-dimensional tensor. The attribute may be changed between steps.
        member_weights: The paper's α, `(K,)`; uniform unless given here or in a call.
        pos_weight: Weight of the positive class, broadcast against the target.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Example:
        >>> BinaryAmendedCrossEntropyLoss(0.0)(torch.zeros(3, 4), torch.tensor([0.0, 1.0, 0.0, 1.0]))
        tensor(2.0794)
    """

    function = staticmethod(binary_amended_cross_entropy)
    defaults: ClassVar = {"pos_weight": None}
    link = "sigmoid"

    def __init__(
        self,
        diversity: float | Tensor,
        *,
        member_weights: Weights = None,
        pos_weight: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(diversity, member_weights, reduction, pos_weight=pos_weight)


class NegativeCorrelationLoss(MemberLoss):
    """`functional.negative_correlation` as a module.

    Args:
        diversity: λ in [0, 1], a number or a 0-dimensional tensor. The attribute may be changed between steps.
        member_weights: The weights α of the members' mean, `(K,)`; uniform unless given here or in a call.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Example:
        >>> NegativeCorrelationLoss(0.0)(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0]))
        tensor(5.)
    """

    function = staticmethod(negative_correlation)
    link = "identity"
    score = "mean_squared_error"

    def __init__(self, diversity: float | Tensor, *, member_weights: Weights = None, reduction: str = "mean") -> None:
        super().__init__(diversity, member_weights, reduction)

    def forward(self, predictions: Tensor, target: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        """Return the loss of predictions `(K, N, ...)`; see `functional.negative_correlation`."""
        return super().forward(predictions, target, **options)


# of an ensemble's link, where a user gives λ instead of a loss; any other subclass of `MemberLoss` must be given
DEFAULT_LOSSES: dict[str, Callable[..., MemberLoss]] = {
    "softmax": AmendedCrossEntropyLoss,
    "sigmoid": BinaryAmendedCrossEntropyLoss,
    "identity": NegativeCorrelationLoss,
}


def attach_loss(ensemble: object, loss: object) -> None:
    """Check that a loss suits an ensemble, and give its member weights to one without."""
    if not isinstance(ensemble, EnsembleModule):
        raise TypeError(
            f"Expected an ensemble module, but got {type(ensemble).__name__}. "
            "Wrap models in Ensemble([...]), or one model in stack_classifiers(model, num_members)."
        )
    if not isinstance(loss, MemberLoss):
        names = ", ".join(kind.__name__ for kind in MemberLoss.__subclasses__())
        raise TypeError(f"Expected `loss` to be one of {names}, but got {type(loss).__name__}.")
    if loss.reduction == "none":
        raise ValueError("Expected a loss with reduction='mean' or 'sum', but got 'none'.")
    if ensemble.link != loss.link:
        raise ValueError(
            f"Expected an ensemble with link={loss.link!r} for {type(loss).__name__}, but got link={ensemble.link!r}. "
            f"Build the ensemble with link={loss.link!r}."
        )
    if loss.member_weights is not None and ensemble.member_weights is None:
        ensemble.set_member_weights(loss.member_weights)


class MemberWeights(nn.Module):
    r"""The paper's α as K free numbers, $\alpha = \operatorname{softmax}(a)$; uniform at the start.

    A call returns α `(K,)`. Add `loss`, the mixture's cross entropy as a function of α only, to the members' loss, in
    which α is constant.

    Args:
        num_members: K.

    Example:
        >>> weights = MemberWeights(3)
        >>> weights()
        tensor([0.3333, 0.3333, 0.3333], grad_fn=<SoftmaxBackward0>)
        >>> logits, target = torch.zeros(3, 5, 2, requires_grad=True), torch.zeros(5, dtype=torch.long)
        >>> loss = amended_cross_entropy(logits, target, 0.5, member_weights=weights()) + weights.loss(logits, target)
        >>> loss.backward()
    """

    def __init__(self, num_members: int) -> None:
        super().__init__()
        _checks.check_count(num_members, "num_members")
        self.num_members = num_members
        self.logits = nn.Parameter(torch.zeros(num_members))

    def forward(self) -> Tensor:
        """Return α, `(K,)`, differentiable in the free numbers."""
        return self.logits.softmax(0)

    def loss(self, logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Return the mixture's cross entropy, the mean over samples; only α receives a gradient.

        Args:
            logits: Members' logits, `(K, N, C, ...)`.
            target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`.
            ignore_index: Class index to ignore. If all samples are ignored, loss and gradient are 0.
        """
        return mixture_cross_entropy(logits, target, self(), ignore_index=ignore_index)

    def extra_repr(self) -> str:
        """Return the number of members."""
        return f"num_members={self.num_members}"
