"""Residual networks of He et al. for CIFAR."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchace import _checks


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the identity, or a projection (1x1 convolution and batch norm)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(residual + self.shortcut(x))


def make_stage(in_channels: int, out_channels: int, num_blocks: int, stride: int) -> nn.Sequential:
    """Return blocks, the first with a projection and the stride."""
    first = BasicBlock(in_channels, out_channels, stride, project=True)
    rest = (BasicBlock(out_channels, out_channels, 1, project=False) for _ in range(num_blocks - 1))
    return nn.Sequential(first, *rest)


class CifarResNet(nn.Module):
    """The network of `cifar_resnet`; its children run in order, and `fc` has `num_features` inputs."""

    def __init__(self, depth: int, num_classes: int | None, width: int, in_channels: int) -> None:
        super().__init__()
        num_blocks = (depth - 2) // 6
        self.num_features = 4 * width
        self.architecture: dict[str, Any] = {
            "name": "cifar_resnet",
            "depth": depth,
            "num_classes": num_classes,
            "width": width,
            "in_channels": in_channels,
        }
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.stage1 = make_stage(width, width, num_blocks, stride=1)
        self.stage2 = make_stage(width, 2 * width, num_blocks, stride=2)
        self.stage3 = make_stage(2 * width, 4 * width, num_blocks, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc: nn.Module = nn.Identity() if num_classes is None else nn.Linear(self.num_features, num_classes)
        for module in self.modules():
            # on meta, drawing normal numbers imports torch's compiler (3 s)
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # variance 2 / fan-in, He et al. 2015

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features before the classifier, `(N, num_features)`."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.flatten(self.pool(x))

    def forward_head(self, features: Tensor) -> Tensor:
        """Return the classifier's logits, `(N, C)`."""
        return self.fc(features)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(N, C)` of images `(N, channels, H, W)`."""
        return self.forward_head(self.forward_features(x))


def cifar_resnet(depth: int, num_classes: int | None = 10, *, width: int = 16, in_channels: int = 3) -> CifarResNet:
    """Return a residual network of 6n+2 layers for images of about 32x32 pixels (He et al. 2016).

    Three stages of n basic blocks, each starting with a projection shortcut, as the paper's 1,731,002 parameters of
    ResNet-110 imply. Convolutions have no bias and He et al.'s initialization. The children run in order: `conv1`,
    `bn1`, `relu`, `stage1`, `stage2`, `stage3`, `pool`, `flatten`, `fc`.

    Args:
        depth: 20, 32, 44, 56, 110 or any other 6n+2.
        num_classes: C; None for a trunk that returns the features (its `fc` is the identity).
        width: Channels of the first stage; doubled in each of the next two.
        in_channels: Channels of the images.

    Returns:
        A module that maps images `(N, in_channels, H, W)` to logits `(N, C)`.

    Example:
        >>> network = cifar_resnet(20)
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> trunk = cifar_resnet(20, num_classes=None)
        >>> trunk(torch.zeros(2, 3, 32, 32)).shape, trunk.num_features
        (torch.Size([2, 64]), 64)
    """
    _checks.check_count(depth, "depth")
    if depth < 8 or depth % 6 != 2:
        raise ValueError(
            f"Expected `depth` to be 6n+2 with n at least 1, but got {depth}. "
            "The usual depths are 20, 32, 44, 56 and 110."
        )
    if num_classes is not None:
        _checks.check_count(num_classes, "num_classes")
    _checks.check_count(width, "width")
    _checks.check_count(in_channels, "in_channels")
    return CifarResNet(depth, num_classes, width, in_channels)
