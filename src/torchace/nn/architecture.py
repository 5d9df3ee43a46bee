"""Checks that members can be stacked: one architecture, differing in parameters and buffers only."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from torchace.nn.base import check_modules

# compared separately, or (the last) not copied
REGISTERED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
RNN_COPIES = ("_flat_weights", "_flat_weight_refs")  # duplicates of an RNN's parameters
COMPUTED_WEIGHTS = (BasePruningMethod, SpectralNorm, WeightNorm)
PLAIN = (type(None), bool, int, float, complex, str, bytes)
IMMUTABLE = (re.Pattern, types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
HOOKS = {name for name in vars(nn.Module()) if "_hooks" in name}
# attributes of a class that do not change its behavior
CLASS_NAMES = {"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__slotnames__", "_abc_impl"}
ADVICE = "Use Ensemble(members) for members that differ"


def check_layers(members: list[nn.Module]) -> None:
    """Refuse layers that are known to fail when computed for all members at once."""
    check_modules(dict(enumerate(members)))
    for member in members:
        for name, parameter in member.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                why = f"the hooks of its parameter {name!r} would never be called"
                raise not_stackable(member, name.rpartition(".")[0], why)
    member = members[0]
    for name, layer in member.named_modules():
        if isinstance(layer, nn.Embedding) and layer.sparse:
            raise not_stackable(member, name, "sparse gradients have no batched form")
        if any(isinstance(hook, COMPUTED_WEIGHTS) for hook in layer._forward_pre_hooks.values()):
            why = "a hook computes its weights; use torch.nn.utils.parametrizations, or call prune.remove"
            raise not_stackable(member, name, why)
        if any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters(recurse=False)):
            raise not_stackable(member, name, "its parameters are not initialized yet; run it once before")


def not_stackable(root: nn.Module, name: str, why: str) -> ValueError:
    """Return the error for a layer that cannot be computed for all members at once."""
    layer = root.get_submodule(name)
    where = f"layer {name!r} ({type(layer).__name__})" if name else f"the member ({type(layer).__name__})"
    return ValueError(
        f"Expected members that can be computed at once, but {where} cannot: {why}. "
        "Use Ensemble(members), which computes members one after another."
    )


def check_one_architecture(members: list[nn.Module]) -> None:
    """Refuse members that differ in anything but the values of parameters and buffers."""
    first = dict(members[0].named_modules())
    for k, member in enumerate(members[1:] or members, min(1, len(members) - 1)):  # one member: with itself
        layers = dict(member.named_modules())
        if list(layers) != list(first):
            raise _different(f"member {k} has other layers than member 0. {ADVICE}")
        comparison = Comparison(member, members[0])
        for name, layer in layers.items():
            _check_layer(k, f"layer {name!r}" if name else "the whole", layer, first[name], comparison)
        ours, theirs = _describe_tensors(member), _describe_tensors(members[0])
        for name in {**ours, **theirs}:
            here, there = ours.get(name, "missing"), theirs.get(name, "missing")
            if here != there:
                raise _different(f"{name!r} is {here} in member {k} and {there} in member 0. {ADVICE}")


def check_no_own_attributes(once: nn.Module, twice: nn.Module, reason: str) -> None:
    """Refuse members whose unregistered attributes differ after one call of the one and two calls of the other."""
    comparison, others = Comparison(twice, once), dict(once.named_modules())
    for name, layer in twice.named_modules():
        state, other = _plain_state(layer), _plain_state(others[name])
        for attribute, value in state.items():
            try:
                same = attribute in other and comparison.equal(value, other[attribute])
            except Exception:  # an object may refuse a comparison with any error
                same = False
            if not same:
                why = f"its forward sets {attribute!r}, which members that run one by one would share ({reason})"
                raise not_stackable(twice, name, why)


def _different(how: str) -> ValueError:
    return ValueError(f"Expected members of one architecture, but {how}.")


def _describe_tensors(member: nn.Module) -> dict[str, str]:
    tensors: list[tuple[str, Tensor]] = [*member.named_parameters(), *member.named_buffers()]
    frozen = {name for name, parameter in member.named_parameters() if not parameter.requires_grad}
    return {
        name: f"{tuple(t.shape)} {t.dtype} on {t.device}{', frozen' if name in frozen else ''}" for name, t in tensors
    }


def _check_layer(k: int, place: str, layer: nn.Module, first: nn.Module, comparison: Comparison) -> None:
    """Refuse a layer of member `k` whose class, settings or hooks differ from those in member 0."""
    ours, theirs = (f"{type(one).__name__}({one.extra_repr()})" for one in (layer, first))
    if ours != theirs:
        raise _different(f"{place} is {ours} in member {k} and {theirs} in member 0. {ADVICE}")
    state, first_state = _plain_state(layer), _plain_state(first)
    for attribute in {**state, **first_state}:
        both = attribute in state and attribute in first_state
        try:
            if both and comparison.equal(state[attribute], first_state[attribute]):
                continue
        except Exception as error:  # an object may refuse a comparison with any error
            reason = error if isinstance(error, NotSharedError) else "a value that cannot be compared"
            raise _different(
                f"{attribute!r} of {place} in member {k} holds {reason}. Use Ensemble(members), which does not copy "
                "members"
            ) from error
        ours, theirs = (_quote(one, attribute) for one in (state, first_state))
        advice = ADVICE
        if isinstance(state.get(attribute), (Tensor, np.ndarray, list, tuple)):
            advice += f", or register the numbers that differ as a buffer: register_buffer({attribute!r}, tensor)"
        raise _different(f"{attribute!r} of {place} is {ours} in member {k} and {theirs} in member 0. {advice}")


def _plain_state(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's class and unregistered attributes; hooks by position, not by number."""
    state: dict[str, Any] = {"__class__": type(layer)}
    for name, value in vars(layer).items():
        if name in REGISTERED or (isinstance(layer, nn.RNNBase) and name in RNN_COPIES):
            continue
        if name in HOOKS and isinstance(value, dict):
            numbers = list(vars(layer)[f"{name.partition('_hooks')[0]}_hooks"])
            value = [(numbers.index(number), hook) for number, hook in value.items()]
        state[name] = value
    return state


def _quote(state: dict[str, Any], attribute: str) -> str:
    text = " ".join(repr(state[attribute]).split()) if attribute in state else "missing"
    return text if len(text) <= 80 else f"{text[:77]}..."


class NotSharedError(Exception):
    """A value that a copy of the first member cannot hold for all members; the message describes it."""


class Comparison:
    """Comparison of values of two members: registered layers and tensors by name, functions by code."""

    def __init__(self, ours: nn.Module, theirs: nn.Module) -> None:
        self.names = _registered_names(ours), _registered_names(theirs)
        self.seen: dict[tuple[int, int, bool], Any] = {}  # pairs compared before, kept alive

    def equal(self, a: Any, b: Any, copied: bool = True) -> bool:
        """Whether two values are equal; `copied`: whether a deep copy of the member copies them."""
        if type(a) is not type(b) and not (isinstance(a, type) and isinstance(b, type)):
            return False
        if isinstance(a, PLAIN):
            return a is b or repr(a) == repr(b)
        if (id(a), id(b), copied) in self.seen:
            return True
        self.seen[id(a), id(b), copied] = a, b
        name = self.names[0].get(id(a))
        if name is not None and isinstance(a, (Tensor, nn.Module)):
            if not copied:
                raise NotSharedError(
                    "a function that holds a layer of the member itself, which a copy does not replace"
                )
            return name == self.names[1].get(id(b))
        if type(a) in (list, tuple):
            return len(a) == len(b) and all(self.equal(x, y, copied) for x, y in zip(a, b, strict=True))
        if type(a) is dict:
            return list(a) == list(b) and self.equal(list(a.values()), list(b.values()), copied)
        if isinstance(a, (set, frozenset)):
            return a == b
        return self._equal_objects(a, b, copied)

    def _equal_objects(self, a: Any, b: Any, copied: bool) -> bool:
        if isinstance(a, Tensor):
            if a.requires_grad:
                raise NotSharedError("a trained tensor that is not a registered parameter (register or detach it)")
            same = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
            return same and (a.is_meta or bool(((a == b) | ((a != a) & (b != b))).all()))  # NaN equals NaN
        if isinstance(a, types.FunctionType):
            return a.__code__ == b.__code__ and self.equal(_held_values(a), _held_values(b), copied=False)
        if isinstance(a, types.MethodType):
            return self.equal(a.__func__, b.__func__) and self.equal(a.__self__, b.__self__, copied)
        if isinstance(a, type):  # a local class, or that of a traced module
            return a is b or self.equal(_describe_class(a), _describe_class(b), copied=False)
        if isinstance(a, fx.Graph):
            return str(a) == str(b)
        if isinstance(a, IMMUTABLE):
            return bool(a == b)
        ours, theirs = _copied_state(a), _copied_state(b)
        return a is b if isinstance(ours, str) else self.equal(ours, theirs, copied)


def _registered_names(member: nn.Module) -> dict[int, str]:
    named = [*member.named_modules(), *member.named_parameters(), *member.named_buffers()]
    return {id(value): name for name, value in named}


def _describe_class(kind: type) -> tuple[Any, ...]:
    own = {name: _held_functions(value) for name, value in vars(kind).items() if name not in CLASS_NAMES}
    return kind.__module__, kind.__qualname__, kind.__bases__, own


def _held_functions(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.func if isinstance(value, functools.cached_property) else value


def _copied_state(value: Any) -> Any:
    """Return what a copy of an object is made from; a string for a global."""
    state = value.__reduce_ex__(4)
    return state if isinstance(state, str) else [*state[:3], *(list(items or ()) for items in state[3:5])]


def _held_values(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__defaults__, function.__kwdefaults__, vars(function), enclosed_values(function)


def enclosed_values(function: types.FunctionType) -> list[Any]:
    """Return the values of a function's closure; None for unset ones."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    if function.__module__ == "torch.nn.utils.parametrize":  # holds the layer, but uses only its id
        return [value for value in values if not isinstance(value, nn.Module)]
    return values
