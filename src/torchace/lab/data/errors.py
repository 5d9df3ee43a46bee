"""Errors of data, and imports of the extra `tool` at first use."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DataError(ValueError):
    """Data that cannot be read or used; the message is one sentence with the reason and the remedy."""

    def __init__(self, message: str) -> None:
        # a file name may hold a line break
        super().__init__(message.replace("\r", " ").replace("\n", " "))


class MissingTargetError(DataError):
    """A row without a target."""

    def __init__(self, problem: str, remedy: str = "for example with DataFrame.dropna") -> None:
        super().__init__(f"{problem}; fill in or remove such rows, {remedy}.")
        self.problem = problem


def damaged(path: Path | str, reason: str) -> DataError:
    """Error for a data set file that is not the official one."""
    return DataError(f"{path} {reason}; replace it with the original file, or delete it to download it again.")


def check_labels(labels: NDArray[Any], path: Path | str, num_classes: int) -> None:
    """Check that labels read from a file, `(N,)`, are class indices."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise damaged(path, f"has label {labels[wrong[0]]} at image {wrong[0]}, outside 0 to {num_classes - 1}")


def require_extra(module: str, package: str, purpose: str) -> ModuleType:
    """Import a module of the extra `tool`; the error names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{purpose} needs {package}, which is not installed: pip install torchace[tool].") from None


def pandas() -> Any:
    """Import pandas."""
    return require_extra("pandas", "pandas", "A table")


def arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow, or one of its modules by full name."""
    return require_extra(module, "pyarrow", "A table")
