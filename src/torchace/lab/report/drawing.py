"""Axes, labels and colours that the report's figures share; rendering is in `torchace._figures`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torchace._figures import Theme
from torchace.lab.report import formats
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import best_diversity
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
DASHED = (0, (4, 3))
SEED_STYLE: dict[str, Any] = {"lw": 0.7, "alpha": 0.5, "marker": ".", "ms": 5}


def short_label(text: str, width: int = 30) -> str:
    """Return a label short enough for a legend."""
    return textwrap.shorten(text, width, placeholder="…") or text[: width - 1] + "…"


def color_of(results: Results, arm: ArmSummary, theme: Theme) -> str:
    """Return an arm's colour, the same in every figure."""
    return theme.palette[results.arms.index(arm) % len(theme.palette)]


def marker_of(results: Results, arm: ArmSummary) -> str:
    """Return an arm's marker, the same in every figure."""
    return MARKERS[results.arms.index(arm) % len(MARKERS)]


def arms_with_figures(results: Results) -> list[ArmSummary]:
    """Return the arms with several members; baselines only where there is nothing else."""
    several = [arm for arm in results.arms if arm.num_members > 1 and results.diversities(arm)]
    return [arm for arm in several if not arm.baseline] or several


def figure_title(results: Results, title: str, arm: ArmSummary) -> str:
    """Return a figure's title, with the arm's label where several arms have this figure."""
    return title if len(arms_with_figures(results)) == 1 else f"{title}: {short_label(arm.label)}"


def two_diversities(results: Results, arm: ArmSummary) -> list[float]:
    """Return the smallest λ, and that of the lowest loss or else the largest."""
    diversities, best = results.diversities(arm), best_diversity(results, arm)
    if not diversities or best is None:
        return []
    return sorted({diversities[0], best if best != diversities[0] else diversities[-1]})


def lambda_positions(values: Iterable[float]) -> tuple[dict[float, float], bool]:
    """Return an x position for each λ, and whether they are to scale: values that are too close are evenly spaced.

    Example:
        >>> lambda_positions([0, 0.5, 1])
        ({0: 0, 0.5: 0.5, 1: 1}, True)
        >>> lambda_positions([0, 0.001, 0.5])
        ({0: 0.0, 0.001: 1.0, 0.5: 2.0}, False)
    """
    ordered = sorted(set(values))
    gaps = [b - a for a, b in pairwise(ordered)]
    if not gaps or min(gaps) >= 0.09 * (ordered[-1] - ordered[0]):
        return {value: value for value in ordered}, True
    return {value: float(i) for i, value in enumerate(ordered)}, False


@dataclass(frozen=True)
class LambdaPlot:
    """Axes with λ on the x axis; values are multiplied by `scale`, shifts are in steps between two λ."""

    axes: Axes
    positions: Mapping[float, float]
    scale: float

    @classmethod
    def create(cls, figure: Figure, values: Iterable[float], label: str, scale: float) -> LambdaPlot:
        """Add axes with ticks at the values of λ, thinned where there are many."""
        axes = figure.add_subplot()
        positions, to_scale = lambda_positions(values)
        ticks = list(positions)[:: -(-len(positions) // 12) or 1]
        axes.set_xticks([positions[value] for value in ticks], [formats.diversity(value) for value in ticks])
        axes.set_xlabel("diversity λ" if to_scale else "diversity λ (evenly spaced)")
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
        return cls(axes, positions, scale)

    def x(self, diversity: float, shift: float = 0.0) -> float:
        """Return the x position of a λ."""
        step = min((b - a for a, b in pairwise(self.positions.values())), default=1.0)
        return self.positions[diversity] + shift * step

    def line(self, values: Mapping[float, float], *, shift: float = 0.0, **style: Any) -> Any:
        """Draw values by λ."""
        x = [self.x(diversity, shift) for diversity in values]
        return self.axes.plot(x, [self.scale * value for value in values.values()], **style)[0]

    def bars(
        self,
        intervals: Mapping[float, tuple[float, float] | None],
        *,
        shift: float = 0.0,
        cap: float = 0.0,
        **style: Any,
    ) -> None:
        """Draw intervals by λ as vertical bars, with caps of `cap` points."""
        for diversity, ends in intervals.items():
            if ends:
                x, y = [self.x(diversity, shift)] * 2, [self.scale * end for end in ends]
                self.axes.plot(x, y, **style)
                if cap:
                    self.axes.plot(x, y, ls="", marker="_", ms=2 * cap, color=style.get("color"))
