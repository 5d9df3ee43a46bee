"""Scaling learnt from samples and weights, and folded back into the members."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchace.lab.data import Split
from torchace.lab.training.scaling import Scaler, SplitScaler, assemble_ensemble
from torchace.models import mlp
from torchace.nn import StackedEnsemble


def test_moments_with_weights_are_those_of_repeated_samples() -> None:
    values = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([1, 0, 4, 2, 2, 1])
    weighted, repeated = Scaler.fit(values, times.double() * 0.3), Scaler.fit(values.repeat_interleave(times, 0), None)
    torch.testing.assert_close(weighted.mean, repeated.mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        weighted.std, values.repeat_interleave(times, 0).std(0, correction=0), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e8, 1e-200, 1.0])
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_a_constant_column_becomes_zero(constant: float, count: int) -> None:
    values = torch.full((count, 1), constant, dtype=torch.float64)
    weight = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for moments in (Scaler.fit(values, None), Scaler.fit(values, weight)):
        assert float(moments.std) == 1.0
        assert float(moments.transform(values).abs().max()) <= 1e-6 * max(1.0, abs(constant) * 1e-7)


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e160, 1e300])
@pytest.mark.parametrize("weighted", [False, True])
def test_numbers_whose_squares_do_not_exist(size: float, weighted: bool) -> None:
    values = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(50, generator=torch.Generator().manual_seed(1)) if weighted else None
    plain, sized = (
        Scaler.fit(values, weight),
        Scaler.fit(values * torch.tensor([size, 1.0], dtype=torch.float64), weight),
    )
    for name in ("mean", "std"):
        expected = getattr(plain, name) * torch.tensor([size, 1.0], dtype=torch.float64)
        torch.testing.assert_close(getattr(sized, name), expected, rtol=1e-12, atol=0)


def test_large_numbers_that_differ_little_are_told_apart() -> None:
    values = 1.7e9 + torch.arange(100.0, dtype=torch.float64)[:, None]  # seconds since 1970
    scaled = Scaler.fit(values, None).transform(values)
    assert float(scaled.std(0, correction=0)) == pytest.approx(1.0, abs=1e-6)


def test_a_finished_regressor_answers_in_the_targets_units() -> None:
    generator = torch.Generator().manual_seed(2)
    x = 50 + 7 * torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = 1e6 + 2e3 * torch.randn(20, 2, generator=generator, dtype=torch.float64)
    scaling = SplitScaler.fit(Split(x, y))
    stacked = StackedEnsemble([mlp(3, 5, 2).double() for _ in range(4)], link="identity")
    inside = scaling.transform(Split(x, y), torch.float64)

    class Encoder(nn.Module):
        def forward(self, raw: torch.Tensor) -> torch.Tensor:
            return scaling.inputs.transform(raw)

    ensemble = assemble_ensemble(Encoder(), stacked, scaling.targets)
    assert scaling.targets is not None
    expected = stacked(inside.x).detach() * scaling.targets.std + scaling.targets.mean
    torch.testing.assert_close(ensemble(x), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ensemble.predict(x), expected.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(inside.y * scaling.targets.std + scaling.targets.mean, y, rtol=1e-14, atol=0)
    assert not any(parameter.requires_grad for parameter in ensemble.parameters())


def test_classes_are_not_scaled() -> None:
    split = Split(torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 1]))
    scaling = SplitScaler.fit(split)
    assert scaling.targets is None
    assert scaling.transform(split, torch.float32).y.tolist() == [0, 1, 0, 1, 1]
