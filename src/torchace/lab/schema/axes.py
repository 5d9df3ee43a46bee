"""Axes of a sweep beside λ and seed: settings that may be lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# with their abbreviation in file names
AXES = {"learning_rate": "lr", "weight_decay": "wd", "label_smoothing": "ls"}


def variant_name(name: str, settings: Mapping[str, float]) -> str:
    """Name with the values on the axes other than λ and seed.

    Example:
        >>> variant_name("main", {"learning_rate": 0.1})
        'main-lr0.1'
    """
    return name + "".join(f"-{AXES[axis]}{exact_text(value)}" for axis, value in settings.items())


def axis_values(run: Any) -> dict[str, float]:
    """Values of a run on the axes other than λ and seed."""
    return {name: value for name in AXES if (value := getattr(run, name)) is not None}


def exact_text(value: float) -> str:
    """Shortest text of a number; distinct numbers need distinct files."""
    return repr(value + 0.0).removesuffix(".0")  # + 0.0: no -0.0
