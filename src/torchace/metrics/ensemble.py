"""All scores of an ensemble in one metric, and scores for every link as scalars for a logger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from torchace import _checks
from torchace._figures import LIGHT, draw_on, set_member_axis
from torchace.functional import ensemble_probs
from torchace.functional.sums import (
    MEMBER_SCORES,
    SCORES,
    NoSamplesError,
    ScoreSums,
    mean_scores,
    score_sums,
    scores_from_sums,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class MemberMetric(Metric):
    """Base class of metrics of K members; states are float64 sums over samples, `sums` and `member_sums` by name."""

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    scores: ClassVar[tuple[str, ...]]
    member_scores: ClassVar[tuple[str, ...]]  # the first is also returned as `members`
    samples: Tensor
    sums: Tensor
    member_sums: Tensor

    def __init__(self, num_members: int, shapes: dict[str, tuple[int, ...]] | None = None, **kwargs: Any) -> None:
        _checks.check_count(num_members, "num_members")
        super().__init__(**kwargs)
        self.num_members = num_members
        sums = {"samples": (), "sums": (len(self.scores),), "member_sums": (len(self.member_scores), num_members)}
        for name, shape in {**sums, **(shapes or {})}.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all samples, float32 scalars and `members` `(K,)`."""
        return mean_scores(self.samples, self.scores, self.sums, self.member_scores, self.member_sums)

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the axis of `members` for K = 1, which torchmetrics would squeeze."""
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(wrapped)
        def with_member_axis() -> dict[str, Tensor]:
            scores = wrapped()
            return {**scores, "members": scores["members"].reshape(self.num_members)}

        return with_member_axis


class EnsembleMetrics(MemberMetric):
    """Scores of an ensemble and its members, accumulated over batches.

    `compute()` returns a dict:

    - `accuracy`, `cross_entropy`, `brier`, `calibration_error`: of the ensemble
    - `member_accuracy`, `member_cross_entropy`, `member_brier`, `member_calibration_error`: means over members
    - `disagreement`, `mutual_information`, `ambiguity`: how much the members differ
    - `members`: the accuracy of each member, `(K,)`

    Non-finite logits raise an error: in `update` on the CPU, in `compute` on other devices.

    Args:
        num_members: K.
        num_classes: C.
        num_bins: Bins of the calibration error.
        ignore_index: Class index to ignore.
        **kwargs: Options of `torchmetrics.Metric`.

    Example:
        >>> metrics = EnsembleMetrics(num_members=2, num_classes=2)
        >>> metrics.update(torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([0]))
        >>> scores = metrics.compute()
        >>> scores["accuracy"], scores["members"], scores["disagreement"]
        (tensor(1.), tensor([1., 0.]), tensor(1.))
    """

    scores, member_scores = SCORES, MEMBER_SCORES

    def __init__(
        self, num_members: int, num_classes: int, *, num_bins: int = 15, ignore_index: int = -100, **kwargs: Any
    ) -> None:
        for name, count in {"num_classes": num_classes, "num_bins": num_bins}.items():
            _checks.check_count(count, name)
        super().__init__(num_members, {"bins": (1 + num_members, 3, num_bins), "nonfinite": (num_members,)}, **kwargs)
        self.num_classes, self.num_bins, self.ignore_index = num_classes, num_bins, ignore_index

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"num_members={self.num_members}, num_classes={self.num_classes}"

    @torch.no_grad()
    def update(self, logits: Tensor, target: Tensor, *, member_weights: Tensor | Sequence[float] | None = None) -> None:
        """Add a batch.

        Args:
            logits: Members' logits, `(K, N, C, ...)`.
            target: Class indices, `(N, ...)`.
            member_weights: The paper's α, `(K,)`; uniform if None.
        """
        _checks.check_logits(logits)
        if (logits.shape[0], logits.shape[2]) != (self.num_members, self.num_classes):
            raise ValueError(
                f"Expected `logits` of {self.num_members} members and {self.num_classes} classes, "
                f"but got shape {tuple(logits.shape)}."
            )
        sums = score_sums(
            logits, target, num_bins=self.num_bins, ignore_index=self.ignore_index, member_weights=member_weights
        )
        for name, value in sums._asdict().items():
            getattr(self, name).add_(value)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all samples, float32 scalars and `members` `(K,)`."""
        return scores_from_sums(ScoreSums(*(getattr(self, name) for name in ScoreSums._fields)))

    def plot(
        self,
        val: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
        ax: Axes | None = None,
        *,
        score: str = "accuracy",
    ) -> tuple[Figure, Axes]:
        """Plot each member's accuracy and the ensemble's, or a score over several results, such as one per epoch.

        Args:
            val: A result of `compute()` or of calling the metric, or a list of them; `compute()` by default.
            ax: The matplotlib axes; those of a new figure by default.
            score: Key of the score. Members are shown one by one for the accuracy of one result, else as their mean.

        Returns:
            The figure and its axes.

        Example:
            >>> metrics = EnsembleMetrics(num_members=2, num_classes=2)
            >>> batches = torch.randn(3, 2, 8, 2)
            >>> history = [metrics(logits, torch.zeros(8, dtype=torch.long)) for logits in batches]
            >>> figure, ax = metrics.plot(history, score="cross_entropy")
            >>> [line.get_label() for line in ax.get_lines()]
            ['ensemble', 'mean of members']
        """
        val = self.compute() if val is None else val
        series = [val] if isinstance(val, Mapping) else list(val)
        scores = [key for key in (*self.scores, "calibration_error") if all(key in value for value in series)]
        _checks.check_choice(score, "score", scores)
        blue, orange = LIGHT.palette[:2]
        with draw_on(ax) as ax:
            if isinstance(val, Mapping) and score == "accuracy":
                ax.plot(range(self.num_members), val["members"].tolist(), "o", color=blue, label="member")
                ax.axhline(float(val["accuracy"]), color=orange, label="ensemble")
                set_member_axis(ax, self.num_members)
            else:
                named = {score: ("ensemble", orange, "o-"), f"member_{score}": ("mean of members", blue, "o--")}
                for key, (label, color, style) in named.items():
                    if key in series[0]:
                        ax.plot([float(value[key]) for value in series], style, color=color, label=label)
                ax.set_xlabel("result")
            ax.set_ylabel(score.replace("_", " "))
            ax.legend()
        return ax.figure, ax  # type: ignore[return-value]  # a subfigure has no other type here


class RegressionMetrics(MemberMetric):
    """`mean_squared_error`, `member_mean_squared_error`, `ambiguity` and `members` `(K,)` of regressors."""

    scores = ("mean_squared_error", "ambiguity")
    member_scores = ("mean_squared_error",)

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
        members, name = scores.pop("members"), f"member_{self.metrics.member_scores[0]}"
        return scores | {f"{name}_{k}": value for k, value in enumerate(members)}

    def reset(self) -> None:
        """Discard all samples."""
        if self.metrics is not None:
            self.metrics.reset()
