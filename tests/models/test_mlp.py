"""The fully connected network, and networks from their descriptions."""

import json

import pytest
import torch
from torch import nn

from torchace.models import build, cifar_resnet, mlp
from torchace.nn import SMOC


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_is_a_plain_chain() -> None:
    network = mlp(64, (32, 16), 10, dropout=0.2)
    assert type(network) is nn.Sequential
    kinds = [(name, type(layer).__name__) for name, layer in network.named_children()]
    assert kinds == [
        ("flatten", "Flatten"),
        ("linear1", "Linear"),
        ("relu1", "ReLU"),
        ("dropout1", "Dropout"),
        ("linear2", "Linear"),
        ("relu2", "ReLU"),
        ("dropout2", "Dropout"),
        ("fc", "Linear"),
    ]
    assert network.dropout1.p == 0.2
    assert count(network) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10


def test_no_dropout_layer_by_default() -> None:
    assert not any(isinstance(layer, nn.Dropout) for layer in mlp(4, 8, 2))


@pytest.mark.parametrize("shape", [(5, 64), (5, 8, 8), (5, 1, 8, 8)])
def test_flattens_inputs(shape: tuple[int, ...]) -> None:
    network = mlp(64, 32, 10)
    x = torch.randn(shape)
    assert torch.equal(network(x), network(x.reshape(5, 64)))
    assert network(x).shape == (5, 10)


def test_is_relu_of_linear_layers() -> None:
    network = mlp(6, (5, 4), 3)
    x = torch.randn(7, 6)
    expected = network.fc(torch.relu(network.linear2(torch.relu(network.linear1(x)))))
    assert torch.equal(network(x), expected)


def test_trunk_and_linear_classifier() -> None:
    trunk = mlp(64, (32, 16), None)
    assert trunk(torch.randn(5, 64)).shape == (5, 16)
    assert trunk.num_features == 16
    assert "fc" not in dict(trunk.named_children())
    assert (trunk(torch.randn(5, 64)) >= 0).all()  # it ends in its ReLU
    assert SMOC(trunk, 16, 10, num_members=3)(torch.randn(5, 64)).shape == (3, 5, 10)
    assert count(mlp(64, (), 10)) == 650
    assert mlp(64, (), 10).num_features == 64


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 8, 2), ValueError, "`in_features` to be at least 1"),
        ((4, 0, 2), ValueError, r"`hidden` to be at least 1"),
        ((4, (8, -1), 2), ValueError, r"`hidden` to be at least 1"),
        ((4, 8, 0), ValueError, "`num_classes` to be at least 1"),
        ((4.0, 8, 2), TypeError, "`in_features` to be an int"),
        ((4, 8.0, 2), TypeError, "`hidden` to be an int, but got float"),
        ((4, "8", 2), TypeError, "`hidden` to be an int, but got str"),
        ((4, True, 2), TypeError, r"`hidden` to be an int"),
    ],
)
def test_refuses(arguments: tuple[object, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mlp(*arguments)  # type: ignore[arg-type]


def test_refuses_dropout_outside() -> None:
    with pytest.raises(ValueError, match="`dropout` in"):
        mlp(4, 8, 2, dropout=1.5)


@pytest.mark.parametrize(
    "network",
    [
        mlp(4, 8, 2),
        mlp(4, (8, 6), 2, dropout=0.5),
        mlp(4, (8, 6), None),
        mlp(4, (), 2),
        cifar_resnet(8),
        cifar_resnet(14, None, width=4, in_channels=1),
    ],
    ids=str,
)
def test_build_is_the_inverse_of_architecture(network: nn.Module) -> None:
    again = build(json.loads(json.dumps(network.architecture)))
    assert again.architecture == network.architecture
    assert str(again) == str(network)
    assert {n: p.shape for n, p in again.state_dict().items()} == {n: p.shape for n, p in network.state_dict().items()}


def test_build_takes_defaults() -> None:
    assert str(build({"name": "cifar_resnet", "depth": 8})) == str(cifar_resnet(8))


@pytest.mark.parametrize(
    ("architecture", "error", "words"),
    [
        ({"name": "vgg"}, ValueError, "one of 'mlp', 'cifar_resnet', 'table_encoder', but got 'vgg'"),
        ({"in_features": 4}, ValueError, "but got None"),
        ({"name": "mlp", "in_features": 4, "hidden": [8]}, TypeError, "num_classes"),
        ({"name": "mlp", "in_features": 4, "hidden": [8], "num_classes": 2, "bias": False}, TypeError, "bias"),
        ({"name": "mlp", "in_features": "4", "hidden": [8], "num_classes": 2}, TypeError, "`in_features`"),
    ],
)
def test_build_refuses(architecture: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(architecture)  # type: ignore[arg-type]
