"""`import torchace`: public names, lazy imports and missing extras."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import torchace

# DESIGN, "Public names", and the types that they return
PUBLIC = {
    "functional": "amended_cross_entropy binary_amended_cross_entropy negative_correlation "
    "linear_amended_cross_entropy average_gradients diversity_from_gamma gamma_from_diversity fit_member_weights "
    "ensemble_log_probs ensemble_probs disagreement mutual_information ambiguity pairwise_cross_entropy brier_score "
    "calibration_error bias_variance_covariance BiasVarianceCovariance",
    "nn": "AmendedCrossEntropyLoss BinaryAmendedCrossEntropyLoss NegativeCorrelationLoss MemberLoss Ensemble "
    "StackedEnsemble EnsembleModule StackedLinear LowRankStackedLinear SMOC stack_classifiers StackedClassifiers "
    "branch adapt load_adapters AdaptedEnsemble MemberWeights MemberParallelEnsemble allow_optimizer set_member_rates",
    "metrics": "EnsembleMetrics",
    "models": "mlp cifar_resnet",
    "saving": "save_model load_model load_weights ModelFileError",
    "sklearn": "ACEClassifier NCLRegressor",
    "diagnosis": "diagnose Diagnosis",
}
HEAVY = ("matplotlib", "sklearn", "optuna", "typer", "pandas")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_is_light():
    code = (
        "import sys, torchace\n"
        "light = [name for name in torchace.__all__ if torchace._LAZY.get(name) in (None, 'models', 'saving')]\n"
        "assert all(hasattr(torchace, name) for name in light)\n"  # using these imports no heavy package either
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(code) == "[]"


def test_import_without_extras():
    code = (
        "import sys\n"
        "sys.modules['sklearn'] = None\n"
        "import torchace\n"
        "from torchace import *\n"
        "print(hasattr(torchace, 'ACEClassifier'), 'ACEClassifier' in dir(torchace), EnsembleMetrics.__name__)\n"
        "try:\n"
        "    ACEClassifier()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    lines = run(code).splitlines()
    assert lines == ["True True EnsembleMetrics", "The estimators need scikit-learn: pip install 'torchace[tool]'."]


def test_public_names_are_reachable():
    for module, names in PUBLIC.items():
        for name in names.split():
            assert getattr(torchace, name) is getattr(importlib.import_module(f"torchace.{module}"), name)
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
