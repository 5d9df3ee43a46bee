"""What all figures share: sizes, colours for light and dark pages, and how they become PNG files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace.lab.report import formats
from torchace.lab.report._fields import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.2, 3.7  # inches: small, so that 10 pt is still readable when a phone shrinks the figure
DPI = 200
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Theme:
    """Colours; `palette` is Okabe and Ito's, safe for the colour-blind, lightened for dark pages."""

    name: str
    paper: str
    ink: str
    quiet: str
    grid: str
    palette: tuple[str, ...]


LIGHT = Theme(
    "light",
    "#ffffff",
    "#1d2125",
    "#6b7280",
    "#e4e7eb",
    ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#c98900", "#3b9bd6"),
)
DARK = Theme(
    "dark",
    "#16191d",
    "#e6e8ea",
    "#9aa3ad",
    "#2d333a",
    ("#56b4e9", "#ff8c4b", "#2dc79a", "#e59bc6", "#eab54a", "#9ad0f5"),
)


@dataclass(frozen=True)
class Sketch:
    """A figure to draw: where it belongs, what it says to those who cannot see it, and how it is drawn."""

    name: str
    group: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Figure, Theme], None]
    height: float = HEIGHT
    photographs: bool = False


def render(sketch: Sketch, theme: Theme) -> bytes:
    """Draws a figure.

    Args:
        sketch: What to draw.
        theme: Its colours.

    Returns:
        A PNG file.
    """
    with extra("matplotlib"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from PIL import Image  # matplotlib depends on it

    with matplotlib.rc_context(_settings(theme)), warnings.catch_warnings():
        # a class name in a script the font lacks is drawn as boxes: no reason to warn, less to stop
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
        figure = Figure(figsize=(WIDTH, sketch.height), dpi=DPI, layout=layout)
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(sketch.title, x=0.02, ha="left", fontsize=11.5, fontweight="bold")
        sketch.draw(figure, theme)
        canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    image = Image.fromarray(pixels).convert("RGB")
    if not sketch.photographs:  # a drawing has few colours: with a palette the page is half as large
        image = image.quantize(256, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "png", dpi=(DPI, DPI))
    return buffer.getvalue()


def _settings(theme: Theme) -> dict[Any, Any]:
    return {
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.quiet,
        "axes.labelcolor": theme.ink,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "text.color": theme.ink,
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        "xtick.color": theme.quiet,
        "ytick.color": theme.quiet,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
        "axes.labelsize": 10.5,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5.5,
        "axes.formatter.useoffset": False,
    }


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


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend under the figure, where it never covers data; none where there is one thing to name."""
    if len(handles) > 1:
        columns = 2 if max(map(len, labels)) > 14 else 3
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4, handlelength=2.8)
