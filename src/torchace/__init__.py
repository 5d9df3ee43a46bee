"""torchace trains ensembles jointly, with one knob for how much the members may differ."""

from typing import TYPE_CHECKING, Any

from torchace import functional, models, nn, saving
from torchace.functional import *  # noqa: F403
from torchace.models import cifar_resnet, mlp
from torchace.nn import *  # noqa: F403
from torchace.saving import load_model, load_weights, save_model

if TYPE_CHECKING:
    from torchace.diagnosis import Diagnosis, diagnose
    from torchace.metrics import EnsembleMetrics
    from torchace.sklearn import ACEClassifier, NCLRegressor

__version__ = "0.1.0"

# Imported when first used: torchmetrics imports matplotlib and more, and scikit-learn need not be installed.
_LAZY = {
    "ACEClassifier": "torchace.sklearn",
    "Diagnosis": "torchace.diagnosis",
    "EnsembleMetrics": "torchace.metrics",
    "NCLRegressor": "torchace.sklearn",
    "diagnose": "torchace.diagnosis",
}

__all__ = [
    "ACEClassifier",
    "Diagnosis",
    "EnsembleMetrics",
    "NCLRegressor",
    "cifar_resnet",
    "diagnose",
    "functional",
    "load_model",
    "load_weights",
    "mlp",
    "models",
    "nn",
    "save_model",
    "saving",
    *functional.__all__,
    *nn.__all__,
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "metrics":
        return import_module("torchace.metrics")
    raise AttributeError(f"module 'torchace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
