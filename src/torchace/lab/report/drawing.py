"""Labels and axes of the report's figures; themes and rendering are in `torchace._figures`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import shorten
from typing import TYPE_CHECKING

from torchace._figures import DARK, DPI, HEIGHT, LIGHT, WIDTH, FigureSpec, Theme, legend, render
from torchace.lab.report import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "DARK",
    "DPI",
    "HEIGHT",
    "LIGHT",
    "MARKERS",
    "WIDTH",
    "Sketch",
    "Theme",
    "lambda_axis",
    "legend",
    "name",
    "places",
    "render",
]

Sketch = FigureSpec
MARKERS = ("o", "s", "^", "D", "v", "P")


def name(text: str, width: int = 30) -> str:
    """A label short enough for a legend."""
    return shorten(text, width, placeholder="…") or text[: width - 1] + "…"


def places(values: Sequence[float]) -> tuple[dict[float, float], bool]:
    """Where the values of λ stand on the axis.

    Args:
        values: All values of λ in the figure, ascending.

    Returns:
        A position for each, and whether they are to scale: values too close to be told apart stand evenly spaced.

    Example:
        >>> places([0, 0.5, 1])
        ({0: 0, 0.5: 0.5, 1: 1}, True)
        >>> places([0, 0.001, 0.5])
        ({0: 0.0, 0.001: 1.0, 0.5: 2.0}, False)
    """
    ordered = sorted(values)
    gaps = [b - a for a, b in pairwise(ordered)]
    if not gaps or min(gaps) >= 0.09 * (ordered[-1] - ordered[0]):
        return {value: value for value in ordered}, True
    return {value: float(i) for i, value in enumerate(ordered)}, False


def lambda_axis(axes: Axes, at: dict[float, float], to_scale: bool) -> None:
    """Ticks at the values of λ, thinned where there are many, and a label that says if they are not to scale."""
    step = -(-len(at) // 12)
    shown = list(at)[::step]
    axes.set_xticks([at[value] for value in shown], [formats.diversity(value) for value in shown])
    axes.set_xlabel("diversity λ" if to_scale else "diversity λ (evenly spaced)")
    axes.grid(axis="x", visible=False)
