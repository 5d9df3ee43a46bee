"""pandas and pyarrow, imported when a table is first touched."""

from __future__ import annotations

from typing import Any

from torchace.lab.data.errors import require_extra


def pandas() -> Any:
    return require_extra("pandas", "pandas", "A table")


def arrow(module: str = "pyarrow") -> Any:
    """pyarrow, or one of its modules by its whole name."""
    return require_extra(module, "pyarrow", "A table")
