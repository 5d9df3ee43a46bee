"""Many networks as one fast module, trained jointly with one knob for how much they may differ.

Losses, such as `AmendedCrossEntropyLoss`, take logits `(K, N, C)`, members first. Ensembles, such as `StackedEnsemble`,
return them. Scores, such as `mutual_information`, tell what an ensemble knows. `ACEClassifier`, `NCLRegressor` and
`sweep` train for you; they need the extra `tool`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchace import functional, nn
from torchace._extras import placeholder
from torchace.functional import *  # noqa: F403
from torchace.nn import *  # noqa: F403

if TYPE_CHECKING:
    from torchace import lab, metrics, models, saving
    from torchace.diagnosis import Diagnosis, diagnose, plot_members, plot_reliability
    from torchace.lab import SweepResult, plot_diversity, sweep
    from torchace.metrics import EnsembleMetrics
    from torchace.models import cifar_resnet, mlp  # type: ignore[no-redef]  # mypy takes it for the submodule
    from torchace.saving import ModelFileError, load_model, load_weights, save_model
    from torchace.sklearn import ACEClassifier, NCLRegressor

__version__ = "0.2.0"

# Imported lazily: torchmetrics takes seconds, and scikit-learn is optional.
_LAZY = {
    name: module
    for module, names in {
        "diagnosis": ("Diagnosis", "diagnose", "plot_members", "plot_reliability"),
        "lab": ("lab", "SweepResult", "plot_diversity", "sweep"),
        "metrics": ("metrics", "EnsembleMetrics"),
        "models": ("models", "cifar_resnet", "mlp"),
        "saving": ("saving", "ModelFileError", "load_model", "load_weights", "save_model"),
        "sklearn": ("ACEClassifier", "NCLRegressor"),
    }.items()
    for name in names
}

__all__ = [
    "ACEClassifier",
    "Diagnosis",
    "EnsembleMetrics",
    "ModelFileError",
    "NCLRegressor",
    "SweepResult",
    "cifar_resnet",
    "diagnose",
    "functional",
    "lab",
    "load_model",
    "load_weights",
    "metrics",
    "mlp",
    "models",
    "nn",
    "plot_diversity",
    "plot_members",
    "plot_reliability",
    "save_model",
    "saving",
    "sweep",
    *functional.__all__,
    *nn.__all__,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchace' has no attribute {name!r}")
    try:
        module = import_module(f"torchace.{_LAZY[name]}")
        return module if name == _LAZY[name] else getattr(module, name)
    except ImportError as error:
        return placeholder(name, str(error))


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | set(__all__))
