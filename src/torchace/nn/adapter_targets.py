"""Weights that can have adapters, the head, and tensors of which each member has its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import register_parametrization

from torchace.nn.adapter_layers import ADAPTER, Adapter, LayerShape, layer_shape
from torchace.nn.conversion import check_head, find_head
from torchace.nn.stacked_state import SHARED


class Target(NamedTuple):
    """A weight that can have an adapter."""

    layer: nn.Module
    shape: LayerShape
    weight: str = "weight"
    bias: str = "bias"
    called: bool = True  # False: another module uses the weight itself, as nn.MultiheadAttention does


def find_targets(host: nn.Module) -> dict[str, Target]:
    """Return all weights that can have an adapter, by the names of their layers."""
    targets: dict[str, Target] = {}
    used_by_attention = set()
    for name, layer in host.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            used_by_attention.add(layer.out_proj)
            for field in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                weight = layer._parameters.get(field)
                if weight is not None:
                    path = f"{name}.{field.removesuffix('_weight')}".lstrip(".")
                    sizes = LayerShape(weight.shape[1], weight.shape[0])
                    targets[path] = Target(layer, sizes, field, "in_proj_bias", called=False)
        shape = layer_shape(layer)
        if shape is not None and isinstance(layer._parameters.get("weight"), nn.Parameter):
            targets[name] = Target(layer, shape, called=layer not in used_by_attention)
    return targets


def choose_targets(host: nn.Module, layers: str | Sequence[str] | None, excluded: list[str]) -> dict[str, Target]:
    """Return the weights that receive an adapter."""
    targets = {name: target for name, target in find_targets(host).items() if name not in excluded}
    if not targets:
        kind = type(host).__name__
        raise ValueError(f"Expected a model with a linear or convolutional layer before its head, but {kind} has none.")
    for name, target in targets.items():
        if isinstance(target.layer._parameters[target.weight], UninitializedParameter):
            raise ValueError(f"The layer {name!r} has no shape yet. Run the model once on an example first.")
    if layers is None:
        return targets
    if layers == "first":
        name = next(iter(targets))
        return {name: targets[name]}
    wanted = [layers] if isinstance(layers, str) else list(layers)
    chosen: dict[str, Target] = {}
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise TypeError(f"Expected `layers` to be names of layers, but got {type(pattern).__name__}.")
        found = {name: target for name, target in targets.items() if _matches(name, pattern)}
        if pattern in targets:
            found = {pattern: targets[pattern]}
        if not found:
            names = ", ".join(repr(name) for name in list(targets)[:10]) + (", ..." if len(targets) > 10 else "")
            raise ValueError(
                f"Expected `layers` to name linear or convolutional layers of the model, but none matches {pattern!r}. "
                f"It has {names}."
            )
        chosen |= found
    if not chosen:
        raise ValueError("Expected at least one name in `layers`, but got none. Use None for all layers.")
    return {name: target for name, target in targets.items() if name in chosen}


def _matches(name: str, pattern: str) -> bool:
    inside = name.startswith(f"{pattern}.") or f".{pattern}." in name
    return name == pattern or inside or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def attach_adapter(target: Target, adapter: Adapter) -> None:
    """Add an adapter to the forward of its layer, or to the weight that another module uses."""
    if target.called:
        adapter.attach(target.layer)
    else:  # unsafe: no check of the weight's shape, which has no member axis yet
        register_parametrization(target.layer, target.weight, adapter, unsafe=True)


def layer_name(adapter_name: str) -> str:
    """Return the name of an adapter's layer."""
    owner, _, last = adapter_name.rpartition(".")
    if last == ADAPTER or not adapter_name.count("parametrizations."):
        return owner
    path, _, weight = owner.rpartition("parametrizations.")
    name = weight.removesuffix(".0").removesuffix("_weight") if weight != "weight" else ""
    return f"{path}{name}".rstrip(".")


def find_adapted_head(host: nn.Module, head: str | None) -> tuple[list[str], str | None]:
    """Return all names of the head, and the first; none if it is shared and cannot be found."""
    if head is not None and not isinstance(head, str):
        raise TypeError(f"Expected `head` to be the name of a layer, but got {type(head).__name__}.")
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


class OwnTensors:
    """Tensors of which each member has its own: `(K, ...)` from copies."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.names: dict[nn.Module, set[str]] = {}

    def add(self, layer: nn.Module, name: str) -> None:
        """Give each member its own copy of a parameter or buffer."""
        names = self.names.setdefault(layer, set())
        held: dict[str, Any] = layer._parameters if name in layer._parameters else layer._buffers
        tensor = held[name]
        if tensor is None or name in names:
            return
        names.add(name)
        copies = tensor.detach().repeat(self.num_members, *[1] * tensor.ndim)
        held[name] = nn.Parameter(copies, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copies

    def add_copies(self, module: nn.Module, *, redraw: bool) -> None:
        """Give each member its own copy of a module, with new weights if `redraw`."""
        drawn = [copy.deepcopy(module) for _ in range(self.num_members)] if redraw else []
        for member in drawn:
            for layer in reversed(list(member.modules())):
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        for layer in module.modules():
            for name in (*layer._parameters, *layer._buffers):
                self.add(layer, name)
        for k, member in enumerate(drawn):
            for mine, new in zip(module.parameters(), member.parameters(), strict=True):
                mine.data[k] = new.data

    def mark_shared(self, host: nn.Module) -> None:
        """Record in each layer the names of the tensors that members share."""
        for layer in host.modules():
            own = self.names.get(layer, set())
            names = () if isinstance(layer, Adapter) else (*layer._parameters, *layer._buffers)
            vars(layer)[SHARED] = tuple(name for name in names if name not in own)
