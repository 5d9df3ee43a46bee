"""Optional packages: one sentence says which one is missing and how to install it."""

from __future__ import annotations

import functools
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any


def import_extra(module: str, purpose: str, extra: str = "tool") -> ModuleType:
    """Import a module of an optional package; `purpose` and the package's name begin the error."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing_extra(f"{purpose} {package_name(module)}", extra) from error


def missing_extra(need: str, extra: str = "tool") -> ImportError:
    """Return the error for a missing extra; `need` is the first half of its sentence."""
    return ImportError(f"{need}: {install_command(extra)}.")


def install_command(extra: str) -> str:
    """Return the command that installs an extra beside the torchace that is running.

    pip knows the extras of an installed torchace, from an index or not; a checkout that was never installed is named by
    its path.
    """
    return f"pip install '{_requirement()}[{extra}]'"


def package_name(module: str | None) -> str:
    """Return the name under which pip knows a module."""
    name = (module or "an optional package").partition(".")[0]
    return {"sklearn": "scikit-learn", "PIL": "pillow"}.get(name, name)


def placeholder(name: str, message: str) -> type:
    """Return a class that cannot be instantiated, so that `hasattr`, `help` and `import *` work without an extra."""

    def missing(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(message)

    return type(name, (), {"__new__": missing, "__doc__": message, "__module__": "torchace"})


@functools.cache
def _requirement() -> str:
    checkout = Path(__file__).parents[2]
    try:
        metadata.distribution("torchace")
    except metadata.PackageNotFoundError:
        return str(checkout) if (checkout / "pyproject.toml").is_file() else "torchace"
    return "torchace"
