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

# by module: reports use the advice without torch
_LAZY = {
    "Diagnosis": "diagnosis",
    "DiversityAdvice": "advice",
    "Finding": "diagnosis",
    "advise_diversity": "advice",
    "diagnose": "api",
    "diagnose_file": "api",
    "plot_members": "plots",
    "plot_reliability": "plots",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchace.diagnosis' has no attribute {name!r}")
    return getattr(import_module(f"torchace.diagnosis.{_LAZY[name]}"), name)
