"""Runs whose trunks are residual networks of one shape, computed as one on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from torchace.engine.network import SideBySide
from torchace.kernels.layers import Layer, Norm
from torchace.models.resnet import BasicBlock, CifarResNet
from torchace.nn import SMOC
from torchace.nn.base import EnsembleModule, average_shared

CHANNELS = (16, 32, 64)  # of the stages that the kernels are for


class Abreast(SideBySide):
    """SMOC on residual networks: in bf16 training the trunks of all runs are one network with a run axis.

    A run by itself is too small for a GPU, in streams of its own too: cuDNN's kernels for a few channels wait more than
    they compute. Here a layer of all runs is one kernel (`kernels.residual_gpu`). The runs' own modules keep their
    parameters and statistics, which from the first step on lie together in one tensor for each layer. Whatever is not
    bf16 training on a GPU goes run by run.
    """

    def __init__(self, ensembles: Sequence[EnsembleModule]) -> None:
        super().__init__(ensembles)
        self._trunks: Trunks | None = None

    @staticmethod
    def takes(ensembles: Sequence[nn.Module]) -> bool:
        """Whether runs can be computed like this: SMOC on networks of one shape that the kernels are for."""
        trunks = [ensemble.trunk for ensemble in ensembles if isinstance(ensemble, SMOC)]
        return len(trunks) == len(ensembles) and all(
            type(trunk) is CifarResNet
            and trunk.architecture == trunks[0].architecture
            and (trunk.conv1.out_channels, trunk.num_features) == (CHANNELS[0], CHANNELS[-1])
            and trunk.conv1.in_channels <= CHANNELS[0]
            and all(parameter.requires_grad for parameter in trunk.parameters())
            for trunk in trunks
        )

    def forward(self, x: Tensor, *, own: bool = False) -> Tensor:
        dtype = _computed_in(x)
        if not self.training or dtype is None:
            return super().forward(x, own=own)
        if self._trunks is None or not self._trunks.together():
            self._trunks = Trunks([cast(CifarResNet, ensemble.trunk) for ensemble in self.ensembles])
        with torch.cuda.device_of(x):  # where Triton launches
            features = self._trunks(x.flatten(1, 2) if own else x, dtype)  # (R, B, D), or (R, K·B, D)
        if own:
            features = features.unflatten(1, x.shape[1:3])
        batches = "separate" if own else "shared"
        logits = []
        for ensemble, of_run in zip(self.ensembles, features, strict=True):
            smoc = cast(SMOC, ensemble)
            logits.append(smoc.head(average_shared(of_run, smoc.num_members), batches=batches))
        return torch.stack(logits)


class Trunks:
    """The trunks of R runs, `(R, B, C, H, W)` to features `(R, B, D)`, in training mode.

    Args:
        networks: They keep their parameters and buffers, which become parts of tensors `(R, ...)`.
    """

    def __init__(self, networks: Sequence[CifarResNet]) -> None:
        self._anchors: list[tuple[Tensor, Tensor]] = []
        norms = [m for network in networks for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
        self.seen = self._joined([cast(Tensor, norm.num_batches_tracked) for norm in norms])
        self.stem = self._layer([n.conv1 for n in networks], [n.bn1 for n in networks])
        self.blocks = []
        for stage in ("stage1", "stage2", "stage3"):
            for blocks in zip(*(network.get_submodule(stage) for network in networks), strict=True):
                self.blocks.append(self._block(blocks))

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        from torchace.kernels import residual_gpu as gpu

        self.seen += 1
        runs, batch, channels, height, width = x.shape
        h = x.new_zeros(runs, batch, height, width, CHANNELS[0], dtype=dtype)
        h[..., :channels] = x.permute(0, 1, 3, 4, 2)
        h = gpu.stem(h, self.stem)
        for first, second, projection, stride in self.blocks:
            h = gpu.block(h, first, second, projection, stride)
        return h.mean((2, 3))

    def together(self) -> bool:
        """Whether the networks' tensors are still those that were joined: `.to(...)` gives them others."""
        return all(part.data_ptr() == whole.data_ptr() for part, whole in self._anchors)

    def _block(self, blocks: Sequence[BasicBlock]) -> tuple[Layer, Layer, Layer | None, int]:
        first = self._layer([b.conv1 for b in blocks], [b.bn1 for b in blocks])
        second = self._layer([b.conv2 for b in blocks], [b.bn2 for b in blocks])
        projection = None
        if isinstance(blocks[0].shortcut, nn.Sequential):
            pairs = [cast(nn.Sequential, b.shortcut) for b in blocks]
            projection = self._layer(
                [cast(nn.Conv2d, p[0]) for p in pairs], [cast(nn.BatchNorm2d, p[1]) for p in pairs]
            )
        return first, second, projection, blocks[0].conv1.stride[0]

    def _layer(self, convolutions: Sequence[nn.Conv2d], norms: Sequence[nn.BatchNorm2d]) -> Layer:
        return Layer(
            self._trained([c.weight for c in convolutions]),
            Norm(
                self._trained([n.weight for n in norms]),
                self._trained([n.bias for n in norms]),
                self._joined([cast(Tensor, n.running_mean) for n in norms]),
                self._joined([cast(Tensor, n.running_var) for n in norms]),
                cast(float, norms[0].momentum),
                norms[0].eps,
            ),
        )

    def _trained(self, parameters: Sequence[Tensor]) -> Tensor:
        """The parameters as one; its gradient is handed to them in parts."""
        whole = self._joined(parameters).requires_grad_()

        def hand_over(whole: Tensor) -> None:
            assert whole.grad is not None
            for parameter, part in zip(parameters, whole.grad, strict=True):
                # autograd cares for the strides but those of axes of length 1, which fused optimizers compare too
                gradient = part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            whole.grad = None

        whole.register_post_accumulate_grad_hook(hand_over)
        return whole

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor `(R, ...)` whose parts are these tensors from now on, with their values and strides."""
        first = parts[0]
        memory = first.detach().new_empty(len(parts), first.numel())
        whole = memory.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
        for part, place in zip(parts, whole, strict=True):
            place.copy_(part.detach())
            part.data = place
        self._anchors.append((first, whole))
        return whole


def _computed_in(x: Tensor) -> torch.dtype | None:
    """The type that the kernels are to compute in; None where they have nothing to do."""
    kind = x.device.type
    if kind != "cuda" or not torch.is_autocast_enabled(kind):
        return None
    return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else None
