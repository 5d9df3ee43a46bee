"""The lines of a figure, for tests that compare numbers instead of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from torchace._figures import LIGHT, FigureSpec


def draw(spec: FigureSpec) -> Figure:
    """The figure, drawn without a canvas."""
    figure = Figure(layout="constrained")
    spec.draw(figure, LIGHT)
    return figure


def lines(figure: Figure, axes: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """The x and y of every line and marker that is not empty."""
    found: list[Any] = [line.get_data() for line in figure.axes[axes].lines]
    return [(np.asarray(x, dtype=float), np.asarray(y, dtype=float)) for x, y in found if len(x)]


def holds(figure: Figure, x: Any, y: Any, axes: int = 0) -> bool:
    """Whether one of the lines goes through exactly these points."""
    x, y = np.atleast_1d(np.asarray(x, dtype=float)), np.atleast_1d(np.asarray(y, dtype=float))
    return any(
        a.shape == x.shape and np.allclose(a, x, rtol=1e-12) and np.allclose(b, y, rtol=1e-12)
        for a, b in lines(figure, axes)
    )
