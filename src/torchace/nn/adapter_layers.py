"""Adapters of single layers, the layers that can have them, and tensors of which each member has its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torchace.nn.conversion import check_head, find_head
from torchace.nn.stacked_state import SHARED, shared_names, take_members

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

    Parameters are `(K, ...)` in an ensemble. A convolution runs with that weight, since K small convolutions cost less
    than passes over the activations. A linear layer runs with the shared weight between the hooks `before` and `after`.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def attach(self, layer: nn.Module) -> None:
        """Make the adapter part of a layer and of its forward."""
        layer.add_module(ADAPTER, self)
        if self.shape.kernel:
            self.attach_weight(layer, layer)
        else:
            layer.register_forward_pre_hook(self.before)
            layer.register_forward_hook(self.after)

    def attach_weight(self, owner: nn.Module, layer: nn.Module, weight: str = "weight") -> None:
        """Let a layer have a member's weight while `owner` runs, the layer itself or a module that reads the weight."""
        owner.register_forward_pre_hook(partial(self.set_weight, layer, weight))
        owner.register_forward_hook(partial(self.remove_weight, layer, weight), always_call=True)

    def detach(self, module: nn.Module) -> bool:
        """Remove the adapter's hooks from a module; return whether it had any."""
        found = False
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(getattr(hook, "func", hook), "__self__", None) is self:
                    del hooks[key]
                    found = True
        return found

    def set_weight(self, layer: nn.Module, weight: str, *_: Any) -> None:
        """Hide the layer's weight behind a member's: attributes are found before parameters."""
        vars(layer)[weight] = self(layer._parameters[weight])  # not always an nn.Parameter

    def remove_weight(self, layer: nn.Module, weight: str, *_: Any) -> None:
        """Undo `set_weight`."""
        vars(layer).pop(weight, None)
        vars(layer).pop("bias", None)

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

    def set_weight(self, layer: nn.Module, weight: str, *_: Any) -> None:
        """Hide the layer's weight and bias behind a member's."""
        super().set_weight(layer, weight)
        if self.bias is not None:
            vars(layer)["bias"] = self.bias

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Multiply the input."""
        return (args[0] * self.r.to(args[0].dtype), *args[1:])  # in float32, autocast would need twice the memory

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Multiply the output and add the bias."""
        if self.s is None:
            return output
        s = self.s.to(output.dtype)
        return output * s if self.bias is None else torch.addcmul(self.bias.to(output.dtype), output, s)

    def forward(self, weight: Tensor) -> Tensor:
        """Return a member's weight."""
        groups = self.shape.groups
        factors = self.r.view(groups, 1, -1)
        if self.s is None:
            factors = factors.expand(groups, self.shape.outputs // groups, -1)
        else:
            factors = factors * self.s.view(groups, -1, 1)
        if self.shape.transposed:
            factors = factors.transpose(1, 2)
        return weight * factors.reshape(weight.shape[0], -1, *[1] * len(self.shape.kernel))


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
        inner = F.linear(args[0], self.A) * (self.alpha / self.rank)
        rows = output.reshape(-1, self.shape.outputs)
        return torch.addmm(rows, inner.reshape(-1, self.rank), self.B.t()).view(output.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """Return a member's weight."""
        change = (self.B * (self.alpha / self.rank)) @ self.A.flatten(1)
        if self.shape.transposed:
            change = change.t()
        return weight + change.view(weight.shape)  # in the memory format of the weight

    def extra_repr(self) -> str:
        """Return rank and alpha."""
        return f"rank={self.rank}, alpha={self.alpha}"


class Target(NamedTuple):
    """A weight that can have an adapter."""

    layer: nn.Module
    shape: LayerShape
    weight: str = "weight"
    bias: str = "bias"
    reader: nn.Module | None = None  # a module that uses the weight itself, as nn.MultiheadAttention does


def find_targets(host: nn.Module) -> dict[str, Target]:
    """Return all weights that can have an adapter, by the names of their layers."""
    targets: dict[str, Target] = {}
    readers: dict[nn.Module, nn.Module] = {}
    for name, layer in host.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            readers[layer.out_proj] = layer
            for field in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                weight = layer._parameters.get(field)
                if weight is not None:
                    path = f"{name}.{field.removesuffix('_weight')}".lstrip(".")
                    sizes = LayerShape(weight.shape[1], weight.shape[0])
                    targets[path] = Target(layer, sizes, field, "in_proj_bias", reader=layer)
        shape = layer_shape(layer)
        if shape is not None and isinstance(layer._parameters.get("weight"), nn.Parameter):
            targets[name] = Target(layer, shape, reader=readers.get(layer))
    return targets


def choose_targets(host: nn.Module, layers: str | Sequence[str] | None, excluded: list[str]) -> dict[str, Target]:
    """Return the weights that receive an adapter."""
    targets = {name: target for name, target in find_targets(host).items() if name not in excluded}
    if not targets:
        kind = type(host).__name__
        raise ValueError(f"Expected a model with a linear or convolutional layer before its head, but {kind} has none.")
    if layers is None:
        return targets
    if layers == "first":
        return dict(list(targets.items())[:1])
    chosen: set[str] = set()
    for pattern in [layers] if isinstance(layers, str) else layers:
        found = [pattern] if pattern in targets else [name for name in targets if _matches(name, pattern)]
        if not found:
            names = ", ".join(repr(name) for name in list(targets)[:10]) + (", ..." if len(targets) > 10 else "")
            raise ValueError(
                f"Expected `layers` to name linear or convolutional layers of the model, but none matches {pattern!r}. "
                f"It has {names}."
            )
        chosen.update(found)
    if not chosen:
        raise ValueError("Expected at least one name in `layers`, but got none. Use None for all layers.")
    return {name: target for name, target in targets.items() if name in chosen}


def _matches(name: str, pattern: str) -> bool:
    inside = name.startswith(f"{pattern}.") or f".{pattern}." in name
    return name == pattern or inside or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def attach_adapter(target: Target, adapter: Adapter) -> None:
    """Add an adapter to the forward of its layer, or to that of the module that reads the weight."""
    if target.reader is None:
        adapter.attach(target.layer)
    else:
        target.layer.add_module(target.weight.replace("weight", ADAPTER), adapter)
        adapter.attach_weight(target.reader, target.layer, target.weight)


def layer_name(adapter_name: str) -> str:
    """Return the name of an adapter's layer: `"a"` for `"a.adapter"`, `"a.in_proj"` for `"a.in_proj_adapter"`."""
    return adapter_name[: -len(ADAPTER) - 1]


def find_adapted_head(host: nn.Module, head: str | None) -> tuple[list[str], str | None]:
    """Return all names of the head, and the first; none if it is shared and cannot be found."""
    modules = dict(host.named_modules(remove_duplicate=False))
    try:
        name = find_head(host) if head in (None, "shared") else head
        if head != "shared" and not isinstance(modules.get(name), _ConvNd):
            check_head(host, name)
    except ValueError as error:
        if head == "shared":
            return [], None
        raise ValueError(f"{error} Members share all layers with adapt(..., head='shared').") from None
    return [path for path, module in modules.items() if module is modules[name]], name


def mark_shared(host: nn.Module) -> None:
    """Record in each layer that members share its tensors."""
    for layer in host.modules():
        vars(layer)[SHARED] = (*layer._parameters, *layer._buffers)


def set_own(layer: nn.Module, name: str, values: Tensor) -> None:
    """Replace a shared parameter or buffer by the members' own values, `(K, ...)`."""
    held: dict[str, Any] = layer._parameters if name in layer._parameters else layer._buffers
    old, values = held[name], values.detach().to(held[name])
    held[name] = nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
    vars(layer)[SHARED] = tuple(shared for shared in shared_names(layer) if shared != name)


def copy_for_members(module: nn.Module, num_members: int, *, redraw: bool = False) -> None:
    """Give each member its own copy of a module, with new weights if `redraw`."""
    members = [copy.deepcopy(module) for _ in range(num_members)]
    for layer in [layer for member in members for layer in reversed(list(member.modules()))] if redraw else ():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    for path, layer in module.named_modules():
        for name in (*layer._parameters, *layer._buffers):
            copies = [getattr(member.get_submodule(path), name) for member in members]
            if copies[0] is not None:
                set_own(layer, name, torch.stack(copies))


def merge_member(stacked: nn.Module, member: int) -> nn.Module:
    """Return one member as a plain module, with the adapters merged into its weights."""
    plain = take_members(stacked, member)
    for layer in list(plain.modules()):
        for name, adapter in list(layer._modules.items()):
            if not isinstance(adapter, Adapter):
                continue
            weight = name.replace(ADAPTER, "weight")
            layer._parameters[weight] = nn.Parameter(adapter(layer.get_parameter(weight).detach()).detach())
            if getattr(adapter, "bias", None) is not None:
                layer.bias = nn.Parameter(adapter.bias.detach())  # type: ignore[operator]
            del layer._modules[name]
            for module in plain.modules():
                adapter.detach(module)
    return plain.requires_grad_(True)
