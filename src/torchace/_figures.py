"""Figures of the diagnosis and the report: sizes, colors for light and dark pages, rendering to PNG."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace._extras import missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.2, 3.7  # inches: small, so that 10 pt is readable on a phone
DPI = 200


@dataclass(frozen=True)
class Theme:
    """Colors; `palette` is Okabe and Ito's, safe for the color-blind, lightened for dark pages."""

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
class FigureSpec:
    """A figure to draw: its section, title, caption, alternative text and drawing function."""

    name: str
    group: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Figure, Theme], None]
    height: float = HEIGHT
    photographs: bool = False


def render(spec: FigureSpec, theme: Theme) -> bytes:
    """Draw a figure and return it as a PNG file."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from PIL import Image
    except ImportError as error:
        raise missing_extra("Drawing figures needs matplotlib") from error

    with matplotlib.rc_context(_settings(theme)), warnings.catch_warnings():
        # the font lacks some characters of class names
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
        figure = Figure(figsize=(WIDTH, spec.height), dpi=DPI, layout=layout)
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(textwrap.fill(spec.title, 50), x=0.02, ha="left", fontsize=11.5, fontweight="bold")
        spec.draw(figure, theme)
        canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    image = Image.fromarray(pixels).convert("RGB")
    if not spec.photographs:  # few colors: a palette halves the file
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
        "text.parse_math": False,  # names may contain dollar signs
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


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend below the figure, where it covers no data; none for a single entry."""
    if len(handles) > 1:
        longest = max(map(len, labels))
        columns = 1 if longest > 28 else 2 if longest > 14 else 3
        labels = [textwrap.fill(label, 48) for label in labels]
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4, handlelength=2.8)
