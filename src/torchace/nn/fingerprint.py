"""Fingerprints of a member's unregistered attributes, of which a stacked module has one copy for all members."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount"),
    *("co_kwonlyargcount", "co_flags", "co_consts"),
)
DESCRIPTORS = {property: ("fget", "fset", "fdel"), functools.cached_property: ("func",)}
DESCRIPTORS |= dict.fromkeys((staticmethod, classmethod), ("__func__",))
# attributes of a class that do not change its behaviour
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
