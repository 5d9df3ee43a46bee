"""Plots of an ensemble's predictions on matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchace import _checks
from torchace._figures import LIGHT, draw_on
from torchace._statistics import Values, proportion_interval
from torchace.diagnosis.measures import Measures
from torchace.functional.scores import bins_error, calibration_bins

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


def plot_reliability(
    probs: Tensor | NDArray[Any],
    target: Tensor | NDArray[Any],
    *,
    num_bins: int = 15,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot accuracy against confidence, with the calibration error in the legend.

    Points below the diagonal are overconfident. The area of a point grows with the number of samples in its bin.

    Args:
        probs: Probabilities of an ensemble or a member, `(N, C)`.
        target: Class indices, `(N,)`.
        num_bins: Number of bins in [0, 1], as in `calibration_error`.
        label: A name in the legend, to compare several calls with the same `ax`.
        ax: The matplotlib axes; those of a new figure by default.

    Returns:
        The axes.

    Example:
        >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
        >>> ax = plot_reliability(probs, torch.tensor([0, 1, 1]), label="ensemble")
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['ensemble, calibration error 0.333']
    """
    probs, target = torch.as_tensor(probs).detach().cpu(), torch.as_tensor(target).detach().cpu()
    _checks.check_probs(probs)
    bins = calibration_bins(probs, target, num_bins)
    text = f"calibration error {float(bins_error(bins)):.3f}"
    with draw_on(ax) as ax:
        ax.plot([0, 1], [0, 1], color=LIGHT.quiet, lw=1, ls=(0, (4, 3)), label="_diagonal")
        draw_reliability(ax, torch.stack(bins).numpy(), label=f"{label}, {text}" if label else text)
        ax.legend()
    return ax


def draw_reliability(axes: Axes, bins: Values, **style: Any) -> float:
    """Draw accuracy against confidence of bins `(3, B)`, and return the lowest confidence."""
    count, confidence, correct = bins[:, bins[0] > 0]
    x, y = confidence / count, correct / count
    [line] = axes.plot(x, y, **style)
    axes.scatter(x, y, 12 + 120 * np.sqrt(count / count.sum()), color=line.get_color())  # area: samples in a bin
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    return float(x.min())


def plot_members(
    logits: Tensor,
    target: Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot each member's accuracy against its disagreement with the others, and the ensemble's accuracy as a line.

    A good ensemble has accurate members far to the right, and its line above them. Members at 0 % are copies. Bars are
    99 % intervals over samples.

    Args:
        logits: Members' logits, `(K, N, C)`.
        target: Class indices, `(N,)`.
        member_weights: The paper's α, `(K,)`; uniform by default.
        label: A name in the legend, to compare several calls with the same `ax`.
        ax: The matplotlib axes; those of a new figure by default.

    Returns:
        The axes.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
        >>> ax = plot_members(logits, torch.tensor([0, 1]))
        >>> ax.containers[0][0].get_xydata()  # disagreement in percent, accuracy
        array([[50. ,  1. ],
               [50. ,  0.5]])
    """
    m = Measures(logits, target, member_weights)
    disagreement = 100 * m.pair_disagreement.sum(1) / max(m.num_members - 1, 1)
    intervals = [proportion_interval(int(count), m.samples) for count in m.member_correct.sum(1)]
    accuracy, low, high = np.array(intervals).T
    with draw_on(ax) as ax:
        name = f"{label}: " if label else ""
        points = ax.errorbar(
            disagreement, accuracy, [accuracy - low, high - accuracy], fmt="o", elinewidth=1, label=f"{name}member"
        )
        color = points[0].get_color()
        ax.axhline(float(m.correct.mean()), color=color, ls="--", label=f"{name}ensemble")
        for k, place in enumerate(zip(disagreement, accuracy, strict=True) if m.num_members <= 12 else ()):
            ax.annotate(str(k), place, (5, 3), textcoords="offset points", fontsize=8, color=color)
        ax.set_xlabel("disagreement with the other members, %")
        ax.set_ylabel("accuracy")
        ax.legend()
    return ax
