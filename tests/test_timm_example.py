"""A timm network as an ensemble, as in examples/timm_digits.py."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

# a no-op where the environment has installed it already
from tests.support import torchvision_shim as torchvision_shim
from tests.support.scripts import load_script
from torchace import branch, stack_classifiers

pytest.importorskip("timm")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.extended
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    example = load_script("examples/timm_digits.py")


@pytest.mark.parametrize("kind", ["heads", "branches"])
def test_first_gradients_are_line_two(kind, monkeypatch):
    monkeypatch.setattr(example, "DIVERSITY", 0.7)
    torch.manual_seed(0)
    if kind == "heads":
        ensemble = stack_classifiers(example.network(), 3)
    else:
        ensemble = branch(example.network(), at="layer4", num_members=3, reinitialize=example.network)
    ensemble.double()
    seen: list[Tensor] = []

    def keep(module: object, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    ensemble.register_forward_hook(keep)
    x, y = torch.randn(8, 1, 32, 32, dtype=torch.float64), torch.randint(10, (8,))
    example.train(ensemble, DataLoader(TensorDataset(x, y), batch_size=8), epochs=2)
    logits = seen[0]
    for n, label in enumerate(y.tolist()):
        rows = [[math.exp(v) for v in row] for row in logits[:, n].tolist()]
        q = [[v / math.fsum(row) for v in row] for row in rows]
        for k in range(3):
            for c in range(10):
                p, mean = float(c == label), math.fsum(row[c] for row in q) / 3
                expected = (0.3 * (q[k][c] - p) + 0.7 * (mean - p)) / 8
                # float64, a few operations on numbers of order 1
                assert float(logits.grad[k, n, c]) == pytest.approx(expected, abs=1e-13)


def test_trains_digits_to_95_percent(capsys):
    """Four epochs, λ=0.5: heads and branches above 0.95 on images not seen."""
    found = example.main(epochs=4)
    for kind in ("heads", "branches"):
        assert found[kind]["accuracy"] > 0.95
        assert found[kind]["top5"] > 0.99
    assert "heads    accuracy 0.9" in capsys.readouterr().out
