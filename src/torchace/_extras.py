"""Optional packages: one sentence says which one is missing and how to install it."""

from __future__ import annotations

from importlib import import_module
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
    return ImportError(f"{need}: pip install 'torchace[{extra}]'.")


def package_name(module: str | None) -> str:
    """Return the name under which pip knows a module."""
    name = (module or "an optional package").partition(".")[0]
    return {"sklearn": "scikit-learn", "PIL": "pillow"}.get(name, name)


def placeholder(name: str, message: str) -> type:
    """Return a class that cannot be instantiated, so that `hasattr`, `help` and `import *` work without an extra."""

    def missing(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(message)

    return type(name, (), {"__new__": missing, "__doc__": message, "__module__": "torchace"})
