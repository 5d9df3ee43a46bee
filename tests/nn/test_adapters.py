"""Adapted ensembles against K separate networks whose weights contain the adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tests.nn.networks import SMALL
from torchace import adapt, load_model, load_weights, save_model
from torchace.models import mlp
from torchace.nn.stacked_state import all_shared_names

K = 3


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, whose attention reads the weights of its layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.tokens(tokens)).mean(1))


NETWORKS = {
    **{name: SMALL[name] for name in ("mlp", "cifar_resnet", "conv1d", "attention")},
    "encoder": (Encoder, lambda: torch.randint(0, 11, (4, 7))),
}


def randomize(ensemble: nn.Module) -> None:
    """Move all trained parameters, so that low-rank adapters are not zero."""
    with torch.no_grad():
        for parameter in ensemble.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("adapter", ["multiplicative", "low_rank"])
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_gradients_and_statistics_equal_separate_members(name, adapter, freeze, training):
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    ensemble = adapt(make().double(), K, adapter=adapter, rank=2, freeze=freeze).train(training)
    randomize(ensemble)
    members = [ensemble[k] for k in range(K)]
    expected = torch.stack([member(x) for member in members])
    logits = ensemble(x)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)

    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    shared = set(all_shared_names(ensemble.stacked))
    for name, parameter in ensemble.stacked.named_parameters():
        layer = ensemble.stacked.get_submodule(name.rpartition(".")[0])
        assert parameter.requires_grad == (not freeze or (name not in shared and not isinstance(layer, _NormBase)))
        if parameter.requires_grad:
            own = torch.stack([member.get_parameter(name).grad for member in members])
            own = own.mean(0) if name in shared else own
            torch.testing.assert_close(parameter.grad, own, rtol=1e-8, atol=1e-9, msg=name)
    for name, buffer in ensemble.stacked.named_buffers():
        own = torch.stack([member.get_buffer(name) for member in members])
        torch.testing.assert_close(buffer.expand_as(own), own)


@pytest.mark.parametrize("options", [{}, {"adapter": "low_rank", "rank": 2, "freeze": True}, {"layers": "first"}])
def test_saving_loading_copies_and_parts(tmp_path, options):
    ensemble = adapt(mlp(12, (8, 6), 3), K, **options)
    randomize(ensemble)
    x = torch.randn(5, 12)
    expected = ensemble(x)
    save_model(tmp_path / "model", ensemble)
    assert torch.equal(load_model(tmp_path / "model")(x), expected)
    fresh = adapt(mlp(12, (8, 6), 3), K, **options)
    load_weights(fresh, tmp_path / "model")
    assert torch.equal(fresh(x), expected)
    assert torch.equal(copy.deepcopy(ensemble)(x), expected)
    torch.testing.assert_close(ensemble.take(slice(1, 3))(x), expected[1:])
    assert ensemble.predict_proba(x).shape == (5, 3)
    assert "adapter='low_rank'" in repr(ensemble) or "adapter='multiplicative'" in repr(ensemble)
