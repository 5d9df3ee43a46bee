"""Figures of the diagnosis and the report: sizes, colors for light and dark pages, rendering to SVG and PNG."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from xml.etree import ElementTree

import numpy as np

from torchace._extras import import_extra, missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.2, 3.7  # inches: small, so that 10 pt is readable on a phone
DPI = 200
SVG = "{http://www.w3.org/2000/svg}"
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Theme:
    """Colors; `palette` is Okabe and Ito's, safe for the color-blind, lightened for dark pages."""

    name: str
    paper: str
    ink: str
    quiet: str
    grid: str
    palette: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """Colors by the name of their CSS variable."""
        named = {"--paper": self.paper, "--ink": self.ink, "--quiet": self.quiet, "--grid": self.grid}
        return named | {f"--color{i}": color for i, color in enumerate(self.palette)}


LIGHT = Theme(
    "light",
    "#ffffff",
    "#1f2328",
    "#5c6470",
    "#d8dbe0",
    ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#c98900", "#3b9bd6"),
)
DARK = Theme(
    "dark",
    "#1e2129",
    "#e2e4e9",
    "#a3abb5",
    "#4a4f5a",
    ("#56b4e9", "#ff8c4b", "#2dc79a", "#e59bc6", "#eab54a", "#9ad0f5"),
)
# stand for the CSS variables of the page
PAGE = Theme(
    "page", "#010101", "#010102", "#010103", "#010104", tuple(f"#0102{i:02x}" for i in range(len(LIGHT.palette)))
)
STYLE = "".join(
    f"{start}:root {{ {'; '.join(f'{name}: {color}' for name, color in theme.variables.items())} }}{end}\n"
    for start, theme, end in (("", LIGHT, ""), ("@media (prefers-color-scheme: dark) { ", DARK, " }"))
)
_TOOLTIPS: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


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


def add_tooltips(artist: Any, texts: Sequence[str]) -> None:
    """Show a text when the pointer is over a marker of a line, or over a patch."""
    _TOOLTIPS[artist] = list(texts)


def render(spec: FigureSpec, theme: Theme) -> bytes:
    """Draw a figure and return it as a PNG file."""
    buffer = io.BytesIO()
    with _draw(spec, theme) as figure:
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def render_svg(spec: FigureSpec) -> str:
    """Draw a figure and return it as an SVG element in the colors of the CSS variables in `STYLE`."""
    buffer, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _draw(spec, PAGE) as figure:
        texts = {}
        for i, artist in enumerate(figure.findobj(lambda artist: artist in _TOOLTIPS)):
            artist.set_gid(f"tooltip{i}")
            texts[f"tooltip{i}"] = _TOOLTIPS[artist]
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = NOT_XML.sub("", buffer.getvalue()).replace("'DejaVu Sans'", "var(--sans, sans-serif)")
    for name, color in PAGE.variables.items():
        text = text.replace(color, f"var({name})")
    root = ElementTree.fromstring(text)
    for group in root.iter(f"{SVG}g"):
        found = texts.get(group.attrib.pop("id", ""), [])
        marks = list(group.iter(f"{SVG}use")) or [group]
        for mark, tooltip in zip(marks, found, strict=False) if len(marks) == len(found) else ():
            ElementTree.SubElement(mark, f"{SVG}title").text = NOT_XML.sub("", tooltip)
    root.attrib |= {"role": "img", "aria-label": NOT_XML.sub("", spec.alt), "style": "stroke-linejoin: round"}
    del root.attrib["width"], root.attrib["height"]
    for defs in [element for element in root if element.find(f"{SVG}style") is not None]:
        root.remove(defs)  # would style the whole page
    ElementTree.register_namespace("", SVG[1:-1])
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")


@contextmanager
def _draw(spec: FigureSpec, theme: Theme) -> Iterator[Figure]:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise missing_extra("Drawing figures needs matplotlib") from error

    with matplotlib.rc_context(_settings(theme, spec.name)), warnings.catch_warnings():
        # the font lacks some characters of class names
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
        figure = Figure(figsize=(WIDTH, spec.height), dpi=DPI, layout=layout)
        FigureCanvasAgg(figure)
        figure.suptitle(textwrap.fill(spec.title, 50), x=0.02, ha="left", fontsize=11.5, fontweight="bold")
        spec.draw(figure, theme)
        yield figure


@contextmanager
def draw_on(ax: Axes | None) -> Iterator[Axes]:
    """Yield `ax`, or the axes of a new pyplot figure in light colors."""
    plt = import_extra("matplotlib.pyplot", "Drawing figures needs")
    if ax is not None:
        yield ax
        return
    # before the context, which would undo the interactive mode that a notebook's first figure starts
    figure = plt.figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    with plt.rc_context(_settings(LIGHT, "axes") | {"axes.prop_cycle": plt.cycler(color=LIGHT.palette)}):
        yield figure.add_subplot()


def _settings(theme: Theme, name: str) -> dict[Any, Any]:
    paper = "none" if theme is PAGE else theme.paper
    return {
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.facecolor": paper,
        "axes.edgecolor": theme.quiet,
        "axes.labelcolor": theme.ink,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
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
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # equal figures have equal files
    }


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend below the figure, where it covers no data; none for a single entry."""
    if len(handles) > 1:
        longest = max(map(len, labels))
        columns = 1 if longest > 28 else 2 if longest > 14 else 3
        labels = [textwrap.fill(label, 48) for label in labels]
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4, handlelength=2.8)


def set_member_axis(axes: Axes, num_members: int) -> None:
    """Make the x axis one of members, with at most 12 ticks."""
    step = -(-num_members // 12)
    axes.set_xticks(range(0, num_members, step))
    axes.set_xlim(-0.5, num_members - 0.5)
    axes.set_xlabel("member")
    axes.grid(axis="x", visible=False)


def draw_cells(axes: Axes, values: Any, color: Callable[[float], tuple[str, float]], texts: Any, tooltips: Any) -> None:
    """Draw a heat map of `values` `(rows, columns)`; `color` gives a color and its opacity, NaN stays empty."""
    from matplotlib.patches import Rectangle

    axes.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            face, opacity = color(float(value))
            cell = axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=face, alpha=opacity, edgecolor="none")
            )
            add_tooltips(cell, [tooltips(row, column)])
            axes.text(column, row, texts(row, column), ha="center", va="center", fontsize=8)
