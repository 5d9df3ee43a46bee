"""`import torchace`: public names, lazy imports and missing extras."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import torchace
from torchace import _extras

# DESIGN, "Public names", and the types that they return
PUBLIC = {
    "functional": "amended_cross_entropy binary_amended_cross_entropy negative_correlation "
    "linear_amended_cross_entropy average_gradients diversity_from_gamma gamma_from_diversity fit_member_weights "
    "ensemble_log_probs ensemble_probs disagreement mutual_information ambiguity pairwise_cross_entropy brier_score "
    "calibration_error bias_variance_covariance BiasVarianceCovariance",
    "nn": "AmendedCrossEntropyLoss BinaryAmendedCrossEntropyLoss NegativeCorrelationLoss MemberLoss Ensemble "
    "StackedEnsemble EnsembleModule StackedLinear LowRankStackedLinear SMOC stack_classifiers StackedClassifiers "
    "branch adapt load_adapters AdaptedEnsemble MemberWeights MemberParallelEnsemble allow_optimizer set_member_rates "
    "Decision",
    "metrics": "EnsembleMetrics",
    "models": "mlp cifar_resnet",
    "saving": "save_model load_model load_weights ModelFileError",
    "sklearn": "ACEClassifier NCLRegressor",
    "diagnosis": "diagnose Diagnosis plot_members plot_reliability",
    "lab": "plot_diversity sweep SweepResult",
}
HEAVY = ("matplotlib", "sklearn", "optuna", "typer", "pandas")
# not matplotlib and scipy: torchmetrics imports them if they are installed
EXTRAS = ("sklearn", "optuna", "typer", "pandas", "pyarrow", "pydantic", "rich", "pooch", "lightning", "onnx")
ROOT = Path(__file__).parents[1]


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


def test_a_sweep_does_not_import_torchmetrics():
    """It would import transformers, torchvision and matplotlib, which takes seconds."""
    code = (
        "import sys, torch, torchace\n"
        "data = torch.randn(20, 4), torch.arange(20) % 2\n"
        "torchace.sweep(lambda: torch.nn.Linear(4, 2), data, data, diversities=[0.0], seeds=1, epochs=1)\n"
        "print('torchmetrics' in sys.modules)"
    )
    assert run(code) == "False"


WITHOUT_EXTRAS = f"""
import pydoc, rlcompleter, sys
for name in {EXTRAS!r}:
    sys.modules[name] = None
import torchace
from torchace import *
"""


def test_names_exist_without_extras():
    code = WITHOUT_EXTRAS + (
        "print(hasattr(torchace, 'ACEClassifier'), 'ACEClassifier' in dir(torchace), EnsembleMetrics.__module__)\n"
        "completer, texts = rlcompleter.Completer({'torchace': torchace}), []\n"
        "while (text := completer.complete('torchace.', len(texts))) is not None:\n"
        "    texts.append(text.removeprefix('torchace.').rstrip('()'))\n"
        "print(sorted(set(torchace.__all__) ^ set(texts)))\n"
        "page = pydoc.plain(pydoc.render_doc(torchace))\n"
        "print(all(name in page for name in torchace.__all__))\n"
    )
    assert run(code).splitlines() == ["True True torchace.metrics.ensemble", "[]", "True"]


def test_a_missing_extra_is_one_sentence():
    uses = {
        "ACEClassifier()": "The estimators need scikit-learn: pip install 'torchace[tool]'.",
        "from torchace.sklearn import NCLRegressor": "The estimators need scikit-learn: pip install 'torchace[tool]'.",
        "sweep()": "torchace.sweep needs pydantic: pip install 'torchace[tool]'.",
        "from torchace.lab import sweep": "torchace.sweep needs pydantic: pip install 'torchace[tool]'.",
        "import torchace.lab.tables.model": "torchace.lab.tables needs pydantic: pip install 'torchace[tool]'.",
        "import torchace.lightning": "torchace.lightning needs Lightning: pip install 'torchace[lightning]'.",
        "import torchace.lab.cli.app": "The command line needs typer: pip install 'torchace[tool]'.",
    }
    tries = "".join(f"try:\n    {use}\nexcept (ImportError, SystemExit) as error:\n    print(error)\n" for use in uses)
    assert run(WITHOUT_EXTRAS + tries).splitlines() == list(uses.values())


def test_plots_without_matplotlib_are_one_sentence():
    code = (
        "import sys, torch, torchace\n"
        "logits, target = torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.long)\n"
        "metrics = torchace.EnsembleMetrics(2, 4)\n"
        "metrics.update(logits, target)\n"
        "sys.modules['matplotlib.pyplot'] = None\n"  # torchmetrics has imported it
        "import pandas as pd\n"
        "frame = pd.DataFrame({'diversity': [0.0], 'seed': [0], 'mse': [1.0]})\n"
        "for plot, given in ((torchace.plot_members, (logits, target)), (metrics.plot, ()),\n"
        "                    (torchace.plot_reliability, (logits[0].softmax(1), target)),\n"
        "                    (torchace.plot_diversity, (frame,))):\n"
        "    try:\n"
        "        plot(*given)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    assert run(code).splitlines() == ["Drawing figures needs matplotlib: pip install 'torchace[tool]'."] * 4


def test_a_checkout_that_is_not_installed_is_named_by_its_path(monkeypatch, tmp_path):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    _extras._requirement.cache_clear()
    try:
        assert _extras.install_command("onnx") == f"pip install '{ROOT}[onnx]'"
        monkeypatch.setattr(_extras, "__file__", str(tmp_path / "site-packages" / "torchace" / "_extras.py"))
        _extras._requirement.cache_clear()
        assert _extras.install_command("onnx") == "pip install 'torchace[onnx]'"
    finally:
        _extras._requirement.cache_clear()


def test_public_names_are_reachable():
    for module, names in PUBLIC.items():
        for name in names.split():
            assert getattr(torchace, name) is getattr(importlib.import_module(f"torchace.{module}"), name)
            assert name in torchace.__all__
            assert name in dir(torchace)


def test_public_names_are_consistent():
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
