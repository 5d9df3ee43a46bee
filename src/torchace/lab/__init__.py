"""The tool on top of the library: data, training, sweeps, tuning, tables, reports and the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchace._extras import missing_extra, package_name

if TYPE_CHECKING:
    from torchace.lab.sweeps.api import sweep
    from torchace.lab.sweeps.callbacks import Callback
    from torchace.lab.sweeps.plots import plot_diversity
    from torchace.lab.sweeps.result import SweepResult

__all__ = ["Callback", "SweepResult", "plot_diversity", "sweep"]

# modules of `sweeps`
_LAZY = {"Callback": "callbacks", "SweepResult": "result", "plot_diversity": "plots", "sweep": "api"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchace.lab' has no attribute {name!r}")
    try:
        return getattr(import_module(f"torchace.lab.sweeps.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        raise missing_extra(f"torchace.{name} needs {package_name(error.name)}") from error
