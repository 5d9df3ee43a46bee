"""Diagnosis of an ensemble from its predictions, and advice about λ."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchace.diagnosis.advice import DiversityAdvice, advise_diversity
    from torchace.diagnosis.api import diagnose, diagnose_file
    from torchace.diagnosis.diagnosis import Diagnosis, Finding
    from torchace.diagnosis.plots import plot_members, plot_reliability

__all__ = [
    "Diagnosis",
    "DiversityAdvice",
    "Finding",
    "advise_diversity",
    "diagnose",
    "diagnose_file",
    "plot_members",
    "plot_reliability",
]

_MODULES = ("advice", "api", "diagnosis", "plots")  # lazy: reports use the advice without torch


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (import_module(f"torchace.diagnosis.{module}") for module in _MODULES)
        return next(vars(module)[name] for module in modules if name in vars(module))
    raise AttributeError(f"module 'torchace.diagnosis' has no attribute {name!r}")
