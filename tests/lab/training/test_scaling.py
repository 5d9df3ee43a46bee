"""Scales of targets and inputs, temperatures, and their place in the members' weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from torchace.lab.training.scaling import (
    COUPLED_INPUT_RATE,
    INPUT_RATE,
    ScaledLinear,
    Scaler,
    assemble_ensemble,
    fit_temperature,
    scale_inputs,
)
from torchace.models import mlp
from torchace.nn import StackedEnsemble


def test_weights_count_as_repeated_samples() -> None:
    values = np.random.default_rng(0).normal(size=(6, 3))
    times = np.array([1, 0, 4, 2, 2, 1])
    weighted, repeated = Scaler.fit(values, 0.3 * times), Scaler.fit(values.repeat(times, 0))
    torch.testing.assert_close(weighted.mean, repeated.mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(weighted.std, repeated.std, rtol=0, atol=1e-14)
    assert Scaler.fit(np.full((3, 1), 0.1)).std.tolist() == [1.0]


@pytest.mark.parametrize(("diversity", "rate"), [(0.0, INPUT_RATE), (0.3, COUPLED_INPUT_RATE)])
def test_learned_scales_of_inputs_start_at_one_and_learn_faster(diversity: float, rate: float) -> None:
    torch.manual_seed(0)
    plain = mlp(4, 8, 3).double()
    scaled = scale_inputs(copy.deepcopy(plain), diversity)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    torch.testing.assert_close(scaled(x), plain(x), rtol=0, atol=1e-14)
    layer = scaled.get_submodule("linear1")
    assert isinstance(layer, ScaledLinear)
    optimizer = torch.optim.Adam(scaled.parameters(), lr=1e-3)
    nn.functional.cross_entropy(scaled(x), y).backward()
    optimizer.step()  # the first step of Adam is lr for each parameter
    torch.testing.assert_close(
        (rate * layer.scale - 1).abs(), torch.full((4,), rate * 1e-3, dtype=torch.float64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("link", ["softmax", "identity"])
def test_an_assembled_ensemble_predicts_in_the_targets_units(link: str) -> None:
    """Scales, temperature and encoder in the weights alone, against each applied by hand."""
    torch.manual_seed(0)
    members = [scale_inputs(mlp(3, (5, 4), 2)).double() for _ in range(4)]
    for member in members:
        nn.init.uniform_(member.get_submodule("linear1").scale, -1, 1)
    stacked = StackedEnsemble(members, link=link)
    encoder = nn.Linear(6, 3).double()
    x = torch.randn(20, 6, dtype=torch.float64)
    if link == "identity":
        scaler = Scaler(torch.tensor([1e6, -3.0]).double(), torch.tensor([2e3, 0.1]).double())
        ensemble = assemble_ensemble(encoder, stacked, scaler)
        expected = stacked(encoder(x)) * scaler.std + scaler.mean
        torch.testing.assert_close(scaler.inverse_transform(scaler.transform(expected[0])), expected[0])
    else:
        ensemble = assemble_ensemble(encoder, stacked, None, 2.5)
        expected = stacked(encoder(x)) / 2.5
    torch.testing.assert_close(ensemble(x), expected.detach(), rtol=1e-12, atol=1e-12)
    assert all(type(layer) is not ScaledLinear for layer in ensemble.modules())
    assert not any(parameter.requires_grad for parameter in ensemble.parameters())


def test_the_temperature_minimizes_the_cross_entropy_of_the_members_that_predict() -> None:
    """Against a grid; logits three times too large need a temperature of about 3."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4000, 4, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits[0].softmax(1), 1, generator=generator).squeeze(1)
    alone = 3 * logits[:1].repeat(3, 1, 1)
    alone[1, :2000], alone[2, 1000:] = torch.nan, torch.nan
    weight = torch.rand(4000, generator=generator, dtype=torch.float64)
    found = fit_temperature(alone, target, weight)

    def loss(temperature: float) -> float:
        log_q = (alone[0] / temperature).log_softmax(1)[torch.arange(4000), target]
        return -float((weight * log_q).sum() / weight.sum())

    best = min(np.linspace(1, 5, 401), key=loss)
    assert found == pytest.approx(best, abs=0.01)
    assert found == pytest.approx(3, abs=0.3)
