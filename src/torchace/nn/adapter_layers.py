"""Adapters of single layers: a few numbers for each member around a weight that all members share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torchace import _checks

ADAPTER = "adapter"  # the name of the adapter in its layer


class LayerShape(NamedTuple):
    """Sizes of a linear or convolutional layer, or of a weight in `nn.MultiheadAttention`."""

    inputs: int
    outputs: int
    kernel: tuple[int, ...] = ()  # empty for linear layers
    groups: int = 1
    transposed: bool = False  # the weight is (inputs, outputs, ...)

    @property
    def has_low_rank(self) -> bool:
        """Whether the layer can have a low-rank adapter: grouped and transposed convolutions cannot."""
        return self.groups == 1 and not (self.transposed and self.kernel)

    @property
    def rank(self) -> int:
        """The largest rank of a change of the weight."""
        return min(self.outputs, self.inputs * math.prod(self.kernel))


def layer_shape(layer: nn.Module) -> LayerShape | None:
    """Return the sizes of a layer that can have an adapter, else None."""
    if isinstance(layer, nn.Linear):
        return LayerShape(layer.in_features, layer.out_features)
    if isinstance(layer, _ConvNd):
        transposed = isinstance(layer, _ConvTransposeNd)
        return LayerShape(layer.in_channels, layer.out_channels, layer.kernel_size, layer.groups, transposed)
    if is_conv1d(layer):
        inputs, outputs = layer.weight.shape  # type: ignore[misc]
        return LayerShape(inputs, outputs, transposed=True)
    return None


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is the linear layer of transformers with a weight `(inputs, outputs)`."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


class Adapter(nn.Module):
    """Base class of adapters; `forward` returns a member's weight from the shared one.

    Parameters are `(K, ...)` in an ensemble. `before` and `after` are hooks of the layer, which compute the same
    without a weight for each member.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def attach(self, layer: nn.Module) -> None:
        """Make the adapter part of a layer and of its forward."""
        layer.add_module(ADAPTER, self)
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.after)

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the layer's input."""
        return args

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the layer's output; `args` as `before` returned them."""
        return output


class MultiplicativeAdapter(Adapter):
    """A factor for each input and each output of a layer: `((x ∘ r) W) ∘ s + b`.

    Attributes:
        r: `(K, inputs)`.
        s: `(K, outputs)`, or None for factors of the inputs alone.
        bias: `(K, outputs)`, or None.
    """

    def __init__(
        self, shape: LayerShape, num_members: int, bias: Tensor | None, *, inputs_only: bool, **kind: Any
    ) -> None:
        super().__init__(shape)
        self.r = nn.Parameter(torch.ones(num_members, shape.inputs, **kind))
        self.s = None if inputs_only else nn.Parameter(torch.ones(num_members, shape.outputs, **kind))
        self.bias = None if bias is None else nn.Parameter(bias.detach().repeat(num_members, 1))

    def attach(self, layer: nn.Module) -> None:
        """Make the adapter part of a layer; an own bias replaces that of the layer."""
        super().attach(layer)
        if self.bias is not None:
            zeros = torch.zeros_like(self.bias[0]) if is_conv1d(layer) else None  # which always adds its bias
            del layer.bias
            layer.register_buffer("bias", zeros, persistent=False)

    @torch.no_grad()
    def draw(self, start: str) -> None:
        """Draw new factors: random `"signs"` of the inputs, or `"normal"` ones, N(1, 0.1²)."""
        if start == "signs":
            self.r.bernoulli_().mul_(2).sub_(1)
        else:
            for factors in (self.r, self.s):
                if factors is not None:
                    factors.normal_(1.0, 0.1)

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Multiply the input."""
        return (args[0] * self._channels(self.r, args[0]), *args[1:])

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Multiply the output and add the bias."""
        if self.s is None:
            return output
        s = self._channels(self.s, output)
        return output * s if self.bias is None else torch.addcmul(self._channels(self.bias, output), output, s)

    def _channels(self, values: Tensor, like: Tensor) -> Tensor:
        """Return a number for each channel in a shape and type that fit `like`."""
        values = values.to(like.dtype)  # under autocast, a product in float32 would double the memory
        return values.view(-1, *[1] * len(self.shape.kernel)) if self.shape.kernel else values

    def forward(self, weight: Tensor) -> Tensor:
        """Return a member's weight."""
        ends = [1] * len(self.shape.kernel)
        r, s, groups = self.r, self.s, self.shape.groups
        if self.shape.transposed:
            weight = weight * r.view(-1, 1, *ends)
            if s is None:
                return weight
            parts = weight.unflatten(0, (groups, -1)) * s.view(groups, 1, -1, *ends)
            return parts.flatten(0, 1)
        weight = (weight.unflatten(0, (groups, -1)) * r.view(groups, 1, -1, *ends)).flatten(0, 1)
        return weight if s is None else weight * s.view(-1, 1, *ends)


class LowRankAdapter(Adapter):
    """A change of low rank: `W + (alpha / rank) B A`, as LoRA in peft.

    Attributes:
        A: `(K, rank, inputs)`, for convolutions `(K, rank, inputs, *kernel)`; drawn as the weight of `nn.Linear`.
        B: `(K, outputs, rank)`; zero at the start.
    """

    def __init__(self, shape: LayerShape, num_members: int, rank: int, alpha: float, **kind: Any) -> None:
        super().__init__(shape)
        self.rank, self.alpha = rank, alpha
        self.A = nn.Parameter(torch.empty(num_members, rank, shape.inputs, *shape.kernel, **kind))
        self.B = nn.Parameter(torch.zeros(num_members, shape.outputs, rank, **kind))
        if not self.A.is_meta:
            for own in self.A:
                nn.init.kaiming_uniform_(own, a=math.sqrt(5))

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Add the change to the output."""
        x, scale = args[0], self.alpha / self.rank
        if isinstance(layer, _ConvNd):
            inner = layer._conv_forward(x, self.A, None) * scale
            outer = self.B.view(*self.B.shape, *[1] * len(self.shape.kernel))
            conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(self.shape.kernel)]
            return output + conv(inner, outer)
        inner = F.linear(x, self.A) * scale
        rows = output.reshape(-1, self.shape.outputs)
        return torch.addmm(rows, inner.reshape(-1, self.rank), self.B.t()).view(output.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """Return a member's weight."""
        change = (self.B @ self.A.flatten(1) if self.shape.kernel else self.B @ self.A) * (self.alpha / self.rank)
        if self.shape.transposed:
            change = change.t()
        return weight + change.view(weight.shape)

    def extra_repr(self) -> str:
        """Return rank and alpha."""
        return f"rank={self.rank}, alpha={self.alpha}"


def check_rank(name: str, shape: LayerShape, rank: int) -> None:
    """Refuse a rank above the layer's size, and layers without an adapter of low rank."""
    _checks.check_count(rank, "rank")
    if not shape.has_low_rank:
        raise ValueError(
            f"Expected linear layers and convolutions with groups=1 for low-rank adapters, but {name!r} is a grouped "
            "or transposed convolution. Leave it out of `layers`, or use adapter='multiplicative'."
        )
    if rank > shape.rank:
        raise ValueError(
            f"Expected `rank` of at most {shape.rank}, the size of the layer {name!r}, but got {rank}. Use a smaller "
            "rank, or leave the layer out of `layers`."
        )
