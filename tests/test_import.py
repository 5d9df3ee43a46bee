"""What `import torchace` brings, and what it leaves out."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import torchace

# DESIGN, "Public names": where each is defined
PUBLIC = {
    "torchace.functional": [
        "amended_cross_entropy",
        "binary_amended_cross_entropy",
        "negative_correlation",
        "linear_amended_cross_entropy",
        "average_gradients",
        "diversity_from_gamma",
        "gamma_from_diversity",
        "fit_member_weights",
        "ensemble_log_probs",
        "ensemble_probs",
        "disagreement",
        "mutual_information",
        "ambiguity",
        "pairwise_cross_entropy",
        "brier_score",
        "calibration_error",
        "bias_variance_covariance",
    ],
    "torchace.nn": [
        "AmendedCrossEntropyLoss",
        "BinaryAmendedCrossEntropyLoss",
        "NegativeCorrelationLoss",
        "Ensemble",
        "StackedEnsemble",
        "StackedLinear",
        "LowRankStackedLinear",
        "SMOC",
        "stack_classifiers",
        "branch",
        "MemberWeights",
        "MemberParallelEnsemble",
        "allow_optimizer",
        "set_member_rates",
    ],
    "torchace.metrics": ["EnsembleMetrics"],
    "torchace.models": ["mlp", "cifar_resnet"],
    "torchace.saving": ["save_model", "load_model", "load_weights"],
    "torchace.sklearn": ["ACEClassifier", "NCLRegressor"],
    "torchace.diagnosis": ["diagnose"],
}
# Those that no issue has built yet. Remove a name here when it comes.
TO_COME: set[str] = set()
HEAVY = ("matplotlib", "sklearn", "optuna", "typer", "pandas")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_is_light():
    code = (
        "import sys, torchace\n"
        "light = [name for name in torchace.__all__ if name not in torchace._LAZY]\n"
        "assert all(hasattr(torchace, name) for name in light)\n"  # nor does using what is there bring them
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(code) == "[]"


def test_lazy_names_work_in_a_fresh_process():
    code = "import torchace; print(torchace.metrics.__name__); from torchace import *; print(EnsembleMetrics.__name__)"
    assert run(code) == "torchace.metrics\nEnsembleMetrics"


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PUBLIC.items() for name in names])
def test_public_names_are_reachable(module, name):
    if name in TO_COME:
        # it is not there, or this list is out of date
        assert importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), name)
        return
    assert getattr(torchace, name) is getattr(importlib.import_module(module), name)
    assert name in torchace.__all__
    assert name in dir(torchace)


def test_all_is_consistent():
    assert len(set(torchace.__all__)) == len(torchace.__all__)
    for name in torchace.__all__:
        assert hasattr(torchace, name), name
        assert name in dir(torchace)
    for module in (torchace.functional, torchace.nn):
        for name in module.__all__:
            assert getattr(torchace, name) is getattr(module, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        torchace.nonsense  # noqa: B018


def test_version():
    assert torchace.__version__.count(".") == 2


def test_package_is_typed():
    assert (importlib.resources.files("torchace") / "py.typed").is_file()
