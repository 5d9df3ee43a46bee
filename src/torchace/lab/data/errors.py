"""What goes wrong with data, in one sentence each."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DataError(ValueError):
    """A data set that cannot be had: one sentence with the file, where it was looked for and what to do."""

    def __init__(self, message: str) -> None:
        # A file name may hold a line break; the sentence may not.
        super().__init__(message.replace("\r", " ").replace("\n", " "))


def damaged(path: Path | str, reason: str) -> DataError:
    """A file that is there but is not what it should be."""
    return DataError(f"{path} {reason}; replace it with the original file, or delete it to have it downloaded again.")


def check_labels(labels: NDArray[Any], path: Path | str, num_classes: int) -> None:
    """Labels that were read from a file, `(N,)`, are classes."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise damaged(path, f"has label {labels[wrong[0]]} at image {wrong[0]}, outside 0 to {num_classes - 1}")


def require_extra(module: str, package: str, purpose: str) -> ModuleType:
    """Import a module of the extra `tool`, or say in one sentence what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{purpose} needs {package}, which is not installed: pip install torchace[tool].") from None
