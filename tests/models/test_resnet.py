"""The CIFAR ResNets: the paper's parameter counts, shortcuts, order of children, initial weights."""

import math

import pytest
import torch
from torch import nn

from torchace.models import cifar_resnet
from torchace.models.resnet import BasicBlock
from torchace.nn import SMOC

CHILDREN = ["conv1", "bn1", "relu", "stage1", "stage2", "stage3", "pool", "flatten", "fc"]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_papers_counts() -> None:
    assert count(cifar_resnet(110)) == 1_731_002
    assert count(SMOC(cifar_resnet(110, num_classes=None), 64, 10, 10)) == 1_736_852


@pytest.mark.parametrize("depth", [20, 110])
def test_layers_and_shortcuts(depth: int) -> None:
    network = cifar_resnet(depth)
    n = (depth - 2) // 6
    for channels, stage, stride in ((16, network.stage1, 1), (32, network.stage2, 2), (64, network.stage3, 2)):
        assert len(stage) == n
        for i, block in enumerate(stage):
            assert isinstance(block, BasicBlock)
            if i > 0:
                assert isinstance(block.shortcut, nn.Identity)
                continue
            conv, norm = block.shortcut
            assert conv.kernel_size == (1, 1)
            assert conv.stride == (stride, stride)
            assert conv.bias is None
            assert isinstance(norm, nn.BatchNorm2d)
            assert conv.out_channels == norm.num_features == channels
    convs = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert all(conv.bias is None for conv in convs)
    assert sum(conv.kernel_size == (3, 3) for conv in convs) + 1 == depth  # the classifier is the one more


def test_children_run_in_order() -> None:
    network = cifar_resnet(8).eval()
    assert [name for name, _ in network.named_children()] == CHILDREN
    x = torch.randn(2, 3, 32, 32)
    out = x
    for child in network.children():
        out = child(out)
    assert torch.equal(out, network(x))


def test_sizes_through_the_stages() -> None:
    network = cifar_resnet(8).eval()
    x = network.stage1(network.relu(network.bn1(network.conv1(torch.randn(2, 3, 32, 32)))))
    assert x.shape == (2, 16, 32, 32)
    x = network.stage2(x)
    assert x.shape == (2, 32, 16, 16)
    assert network.stage3(x).shape == (2, 64, 8, 8)


def test_block_equals_he_et_al() -> None:
    block = BasicBlock(4, 8, stride=2, project=True).eval()
    x = torch.randn(3, 4, 8, 8)
    residual = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    projected = block.shortcut[1](block.shortcut[0](x))
    assert torch.equal(block(x), torch.relu(residual + projected))
    plain = BasicBlock(4, 4, stride=1, project=False).eval()
    residual = plain.bn2(plain.conv2(torch.relu(plain.bn1(plain.conv1(x)))))
    assert torch.equal(plain(x), torch.relu(residual + x))


def test_features_and_head() -> None:
    network = cifar_resnet(8, width=8).eval()
    x = torch.randn(2, 3, 32, 32)
    features = network.forward_features(x)
    assert features.shape == (2, 32)
    assert network.num_features == 32
    assert torch.equal(network.forward_head(features), network(x))


def test_trunk() -> None:
    network, trunk = cifar_resnet(8).eval(), cifar_resnet(8, num_classes=None).eval()
    trunk.load_state_dict({name: t for name, t in network.state_dict().items() if not name.startswith("fc.")})
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(trunk(x), network.forward_features(x))
    assert [name for name, _ in trunk.named_children()] == CHILDREN
    assert count(network) - count(trunk) == 650


def test_he_initialization() -> None:
    torch.manual_seed(0)
    for conv in (m for m in cifar_resnet(20).modules() if isinstance(m, nn.Conv2d)):
        fan_in = conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1]
        deviation = math.sqrt(2 / fan_in)
        # five standard errors of a standard deviation estimated from n normal numbers, deviation / √(2n)
        slack = 5 / math.sqrt(2 * conv.weight.numel())
        assert abs(conv.weight.std().item() / deviation - 1) < slack
    head = cifar_resnet(20).fc
    assert head.weight.abs().max() <= 1 / math.sqrt(64)  # nn.Linear's own range, as SMOC's heads


def test_other_image_sizes_channels_and_widths() -> None:
    network = cifar_resnet(8, 5, width=4, in_channels=1)
    assert network(torch.randn(2, 1, 28, 28)).shape == (2, 5)
    first = 9 * 4 + 8 + 2 * (9 * 4 * 4 + 8) + 4 * 4 + 8  # convolutions without bias, batch norms of 2 numbers a channel
    second = 9 * 4 * 8 + 16 + 9 * 8 * 8 + 16 + 4 * 8 + 16
    third = 9 * 8 * 16 + 32 + 9 * 16 * 16 + 32 + 8 * 16 + 32
    assert count(network) == first + second + third + 16 * 5 + 5


@pytest.mark.parametrize("depth", [0, 2, 21])
def test_refuses_depth(depth: int) -> None:
    with pytest.raises(ValueError, match=r"`depth` to be"):
        cifar_resnet(depth)


@pytest.mark.parametrize("options", [{"num_classes": 0}, {"width": 0}, {"in_channels": 0}])
def test_refuses_sizes(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="to be at least 1"):
        cifar_resnet(20, **options)  # type: ignore[arg-type]


def test_refuses_types() -> None:
    with pytest.raises(TypeError, match="`depth` to be an int"):
        cifar_resnet("20")  # type: ignore[arg-type]


def test_on_meta_it_has_no_values() -> None:
    with torch.device("meta"):
        network = cifar_resnet(20)
    assert all(p.is_meta for p in network.parameters())
