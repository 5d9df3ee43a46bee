"""A timm network as an ensemble, as in examples/timm_digits.py."""

from __future__ import annotations

import warnings

import pytest

# a no-op where the environment has installed it already
from tests.support import torchvision_shim as torchvision_shim
from tests.support.scripts import load_script

pytest.importorskip("timm")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.extended
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    example = load_script("examples/timm_digits.py")


def test_trains_digits_to_95_percent(capsys):
    """Four epochs, λ=0.5: heads and branches above 0.95 on images not seen."""
    found = example.main(epochs=4)
    for kind in ("heads", "branches"):
        assert found[kind]["accuracy"] > 0.95
        assert found[kind]["top5"] > 0.99
    assert "heads    accuracy 0.9" in capsys.readouterr().out
