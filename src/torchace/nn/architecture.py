"""Checks that members can be stacked: one architecture, differing in parameters and buffers only."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from torchace.nn.base import check_modules
from torchace.nn.stacked_state import recomputed_names

CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount"),
    *("co_kwonlyargcount", "co_flags", "co_consts"),
)
DESCRIPTORS = {property: ("fget", "fset", "fdel"), functools.cached_property: ("func",)}
DESCRIPTORS |= dict.fromkeys((staticmethod, classmethod), ("__func__",))
# attributes of a class that do not change its behavior
CLASS_NAMES = {"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__slotnames__", "_abc_impl"}
HEAP_TYPE = 1 << 9  # flag of classes that Python code defines


class FingerprintError(Exception):
    """A value that cannot be compared or that members cannot share; the message describes it."""


def registered_names(member: nn.Module) -> dict[int, str]:
    """Return the names of a member's modules, parameters and buffers by id."""
    named = [*member.named_modules(), *member.named_parameters(), *member.named_buffers()]
    return {id(value): name for name, value in named}


def fingerprint(value: Any, names: dict[int, str]) -> bytes:
    """Return bytes that are equal for equal values of two members; what `names` has counts by name."""
    if type(value) in (type(None), bool, int, float, str) or (type(value) in (list, dict) and not value):
        return f"{type(value).__name__} {value!r}".encode()  # the most frequent values, faster
    try:
        return _Pickler(names, {}).encode(value)
    except RecursionError:
        raise FingerprintError(f"a {type(value).__name__} that is nested too deeply to be compared") from None


class _Pickler(pickle.Pickler):
    """Pickle registered values by name, functions and local classes by code; nothing is ever unpickled."""

    def __init__(self, names: dict[int, str], seen: dict[int, int], copied: bool = True) -> None:
        self.names, self.seen, self.copied = names, seen, copied  # `copied`: whether a deep copy reaches the values
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=5)

    def encode(self, value: Any) -> bytes:
        self.fast = True  # without memo: equal values, not only the same objects, give equal bytes
        try:
            self.dump(value)
        except Exception as error:  # an object may refuse to be pickled with any error
            if isinstance(error, FingerprintError | RecursionError):
                raise
            if "cyclic" in str(error):
                again = _Pickler(self.names, self.seen, self.copied)
                again.dump(value)
                return again.buffer.getvalue()
            raise FingerprintError(f"a {type(value).__name__}, which cannot be compared") from error
        return self.buffer.getvalue()

    def _encode_uncopied(self, value: Any) -> bytes:
        return _Pickler(self.names, self.seen, copied=False).encode(value)

    def persistent_id(self, value: Any) -> Any:
        """Return what to pickle instead of a value; None for the value itself."""
        if isinstance(value, (Tensor, nn.Module)) and id(value) in self.names:
            if not self.copied:
                raise FingerprintError(
                    "a function that holds a layer of the member itself, which a copy does not replace"
                )
            return "registered", self.names[id(value)]
        if isinstance(value, Tensor):
            return _describe_tensor(value)
        if isinstance(value, torch.Generator):
            return "generator", str(value.device), value.get_state()
        if isinstance(value, (set, frozenset)):
            return type(value).__name__, sorted(_Pickler(self.names, self.seen, self.copied).encode(v) for v in value)
        if isinstance(value, (type, types.FunctionType)):
            return None if _is_importable(value) else self._describe_code(value)
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)) and value.__self__ is not None:
            owner = value.__self__
            is_global = isinstance(owner, (types.ModuleType, type)) and not isinstance(value, types.MethodType)
            return "method", id(value) if is_global else (value.__name__, owner, getattr(value, "__func__", None))
        if isinstance(value, types.CodeType):
            return "code", [getattr(value, name) for name in CODE]
        if type(value) in DESCRIPTORS:
            parts = [getattr(value, name) for name in DESCRIPTORS[type(value)]]
            return type(value).__name__, self._encode_uncopied(parts)
        if isinstance(value, weakref.ref):
            return "weak reference", self._encode_uncopied(value())
        if isinstance(value, fx.Graph):  # of a traced module
            return "graph", str(value), [(node.name, node.op, node.target) for node in value.nodes]
        if isinstance(value, (types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return "global", str(value)
        if isinstance(value, Iterator):
            raise FingerprintError(f"a {type(value).__name__}, whose position cannot be compared")
        return None

    def _describe_code(self, value: Any) -> tuple[str, Any]:
        """Describe a local class by its attributes, a local function by its code and the values it holds."""
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        if isinstance(value, type):
            if not value.__flags__ & HEAP_TYPE:
                return "type", id(value)
            own = {name: held for name, held in vars(value).items() if name not in CLASS_NAMES}
            parts: list[Any] = [value.__module__, value.__qualname__, value.__bases__, own]
        else:
            module = sys.modules.get(value.__module__)
            is_traced = module is None or vars(module) is not value.__globals__  # then its globals are its own
            names = global_names(value.__code__) if is_traced else []
            parts = [value.__code__, value.__defaults__, value.__kwdefaults__, vars(value), enclosed_values(value)]
            parts.append([value.__globals__.get(name) for name in names])
        return "local", self._encode_uncopied(parts)


def _is_importable(value: Any) -> bool:
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _describe_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.requires_grad and tensor.is_leaf:
        raise FingerprintError("a trained tensor that is not a registered parameter (register it)")
    if tensor.requires_grad:
        raise FingerprintError("a tensor with gradients from an earlier forward (set it to None, or detach it)")
    try:
        data = b"" if tensor.is_meta else tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError):
        raise FingerprintError(f"a tensor of layout {tensor.layout} and type {tensor.dtype}, not comparable") from None
    return "tensor", str(tensor.dtype), tuple(tensor.shape), str(tensor.device), data


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


def global_names(code: types.CodeType) -> list[str]:
    """Return the global names in a function's code and in functions inside it."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in global_names(const)]
    return [*code.co_names, *inner]


# Kinds of hooks, with the attributes that hold their flags by hook number, which differs between layers.
HOOKS: dict[str, tuple[str, ...]] = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    **dict.fromkeys(("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"), ()),
    **dict.fromkeys(("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"), ()),
}
# compared separately, or (the last) not copied
REGISTERED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
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
    names = registered_names(members[0])
    first = {name: _Layer(layer, _plain_state(layer), names, {}) for name, layer in members[0].named_modules()}
    for k, member in enumerate(members[1:] or members, min(1, len(members) - 1)):  # one member: with itself
        layers = dict(member.named_modules())
        if list(layers) != list(first):
            raise _different(f"member {k} has other layers than member 0. {ADVICE}")
        names = registered_names(member)
        for name, layer in layers.items():
            place = f"layer {name!r}" if name else "the whole"
            _check_layer(k, place, _Layer(layer, _plain_state(layer), names, {}), first[name])
        for kind in ("parameters", "buffers"):
            ours, theirs = (
                [(name, _describe(tensor)) for name, tensor in getattr(m, f"named_{kind}")()]
                for m in (member, members[0])
            )
            for (name, here), (other_name, there) in zip(ours, theirs, strict=False):
                if (name, here) != (other_name, there):
                    raise _different(
                        f"{name!r} is {here} in member {k} and {other_name!r} is {there} in member 0. {ADVICE}"
                    )
            if len(ours) != len(theirs):
                raise _different(f"member {k} has {len(ours)} {kind} and member 0 has {len(theirs)}. {ADVICE}")


def _different(how: str) -> ValueError:
    return ValueError(f"Expected members of one architecture, but {how}.")


class _Layer(NamedTuple):
    """A layer of a member with its unregistered attributes and their fingerprints, computed when needed."""

    module: nn.Module
    state: dict[str, Any]
    names: dict[int, str]
    found: dict[str, bytes]

    def fingerprint(self, attribute: str) -> bytes:
        if attribute not in self.found:
            value = type(self.module) if attribute == "__class__" else self.state[attribute]
            self.found[attribute] = fingerprint(value, self.names)
        return self.found[attribute]


def _check_layer(k: int, place: str, layer: _Layer, first: _Layer) -> None:
    """Refuse a layer of member `k` whose class, settings or hooks differ from those in member 0."""
    attribute = "__class__"
    settings = [one.module.extra_repr() for one in (layer, first)]
    try:
        same = type(layer.module) is type(first.module) or layer.fingerprint(attribute) == first.fingerprint(attribute)
        if not same or settings[0] != settings[1]:
            ours, theirs = (f"{type(o.module).__name__}({s})" for o, s in zip((layer, first), settings, strict=True))
            raise _different(f"{place} is {ours} in member {k} and {theirs} in member 0. {ADVICE}")
        for attribute in dict.fromkeys([*layer.state, *first.state]):
            values = [one.state[attribute] for one in (layer, first) if attribute in one.state]
            if len(values) < 2 or layer.fingerprint(attribute) != first.fingerprint(attribute):
                ours, theirs = (_quote(one.state, attribute) for one in (layer, first))
                buffer = f", or register the numbers that differ as a buffer: register_buffer({attribute!r}, tensor)"
                advice = ADVICE + (buffer if any(map(_is_numeric, values)) else "")
                raise _different(f"{attribute!r} of {place} is {ours} in member {k} and {theirs} in member 0. {advice}")
    except FingerprintError as error:
        raise _different(
            f"{attribute!r} of {place} in member {k} holds {error}. Use Ensemble(members), which does not copy members"
        ) from error


def _plain_state(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's unregistered attributes; hooks in order, without their numbers."""
    flags = {flag for names in HOOKS.values() for flag in names}
    excluded = {*REGISTERED, *flags, *recomputed_names(layer)}
    if isinstance(layer, nn.RNNBase):
        excluded |= {"_flat_weights", "_flat_weight_refs"}  # duplicates of its parameters
    state = {name: value for name, value in vars(layer).items() if name not in excluded}
    for name, flag_names in HOOKS.items():
        flagged = [vars(layer).get(flag, {}) for flag in flag_names]
        state[name] = [
            (hook, *(number in numbers for numbers in flagged))
            for number, hook in state.get(name, {}).items()
            if not recomputed_names(layer, [hook])  # depends on parameters and buffers alone
        ]
    return state


def _is_numeric(value: Any) -> bool:
    """Whether a value could be a buffer: numbers in a tensor, array, list or dictionary."""
    if isinstance(value, dict):
        return any(map(_is_numeric, value.values()))
    if isinstance(value, (list, tuple, range, set)):
        return all(isinstance(item, (int, float)) or _is_numeric(item) for item in value)
    return isinstance(value, (Tensor, np.ndarray))


def _quote(state: dict[str, Any], attribute: str) -> str:
    text = " ".join(repr(state[attribute]).split()) if attribute in state else "missing"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _describe(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{', frozen' if frozen else ''}"
