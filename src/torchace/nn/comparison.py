"""Comparison of two members' unregistered attributes, of which a stacked module has one copy for all members."""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount"),
    *("co_kwonlyargcount", "co_flags"),
)
# attributes of a class that do not change its behaviour
CLASS_NAMES = {"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__slotnames__", "_abc_impl"}


class NotComparableError(Exception):
    """A value that cannot be compared; the message describes it."""


class NotStackableError(Exception):
    """A value that a stacked module cannot hold for each member; the message gives the reason."""


class StateComparison:
    """Compare values of two members: registered ones by name, functions by code, others by content or `__eq__`."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self._names = tuple(
            {id(v): n for n, v in [*m.named_modules(), *m.named_parameters(), *m.named_buffers()]} for m in (one, other)
        )
        # pairs that are equal or being compared (a cycle), with the values, because ids of freed objects are reused
        self._pairs: dict[tuple[int, int, bool], tuple[Any, Any]] = {}

    def equal(self, a: Any, b: Any, *, copied: bool = True) -> bool:
        """Whether two values are equal; `copied`: whether a deep copy of a member copies them (not in functions)."""
        if type(a) in ATOMS:
            return type(a) is type(b) and bool(a == b or (a != a and b != b))  # NaN equals itself here
        if isinstance(a, (Tensor, nn.Module)) and isinstance(b, (Tensor, nn.Module)):
            name, other_name = self._names[0].get(id(a)), self._names[1].get(id(b))
            if name is not None or other_name is not None:
                if not copied:
                    raise NotStackableError(
                        "a function that holds a layer of the member itself, which a copy does not replace"
                    )
                return name == other_name
        key = (id(a), id(b), copied)
        if key in self._pairs:
            return True
        count = len(self._pairs)
        self._pairs[key] = a, b
        try:
            same = self._equal_values(a, b, copied)
        except RecursionError:
            raise NotComparableError(f"a {type(a).__name__} that is nested too deeply to be compared") from None
        while not same and len(self._pairs) > count:  # derived under the assumption of equality
            self._pairs.popitem()
        return same

    def same_type(self, a: type, b: type) -> bool:
        """Whether two classes behave the same: each parametrized or traced module has its own class."""
        if a is b:
            return True
        if (a.__module__, a.__qualname__) != (b.__module__, b.__qualname__):
            return False
        own, other = ({name: v for name, v in vars(c).items() if name not in CLASS_NAMES} for c in (a, b))
        return self.equal(a.__bases__, b.__bases__, copied=False) and self.equal(own, other, copied=False)

    def _equal_values(self, a: Any, b: Any, copied: bool) -> bool:
        if isinstance(a, type):
            return isinstance(b, type) and self.same_type(a, b)
        if not self.equal(type(a), type(b)):
            return False
        if isinstance(a, Tensor):
            return _equal_tensors(a, b)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.shape != b.shape:
                return False
            return self._equal_items(a.ravel(), b.ravel(), copied) if a.dtype.hasobject else a.tobytes() == b.tobytes()
        if type(a) is dict:
            return self._equal_items(a, b, copied) and self._equal_items(a.values(), b.values(), copied)
        if type(a) in (list, tuple):
            return self._equal_items(a, b, copied)
        if type(a) in (set, frozenset):
            return len(a) == len(b) and all(any(self._equal_or_unknown(x, y, copied) for y in b) for x in a)
        if isinstance(a, types.FunctionType):
            return self._equal_functions(a, b)
        if isinstance(a, (types.MethodType, types.BuiltinMethodType)) and a is not b:
            same = a.__name__ == b.__name__ and self.equal(a.__self__, b.__self__, copied=copied)
            return same and self.equal(getattr(a, "__func__", None), getattr(b, "__func__", None))
        if isinstance(a, types.CodeType):
            return all(getattr(a, name) == getattr(b, name) for name in CODE) and self.equal(a.co_consts, b.co_consts)
        if isinstance(a, (property, staticmethod, classmethod, functools.cached_property)):
            parts = ("fget", "fset", "fdel", "__func__", "func")
            return all(self.equal(getattr(a, p, None), getattr(b, p, None), copied=False) for p in parts)
        if isinstance(a, weakref.ref):
            return self.equal(a(), b(), copied=False)
        if isinstance(a, fx.Graph):  # of a traced module
            nodes = [[(node.name, node.op, node.target) for node in graph.nodes] for graph in (a, b)]
            return str(a) == str(b) and self.equal(*nodes)
        if isinstance(a, Iterator):
            raise NotComparableError(f"a {type(a).__name__}, whose position cannot be compared")
        return self._equal_objects(a, b, copied)

    def _equal_items(self, a: Any, b: Any, copied: bool) -> bool:
        return len(a) == len(b) and all(self.equal(x, y, copied=copied) for x, y in zip(a, b, strict=True))

    def _equal_or_unknown(self, a: Any, b: Any, copied: bool) -> bool:
        try:
            return self.equal(a, b, copied=copied)
        except NotComparableError:
            return False

    def _equal_functions(self, a: types.FunctionType, b: types.FunctionType) -> bool:
        """Compare code, defaults, enclosed values and, across modules, globals."""
        if not self.equal(a.__code__, b.__code__):
            return False
        names = [] if a.__globals__ is b.__globals__ else _global_names(a.__code__)
        held = [
            (f.__defaults__, f.__kwdefaults__, vars(f), _enclosed_values(f), [f.__globals__.get(n) for n in names])
            for f in (a, b)
        ]
        return self.equal(*held, copied=False)

    def _equal_objects(self, a: Any, b: Any, copied: bool) -> bool:
        """Compare the `pickle` state, or use the type's `__eq__`."""
        try:
            if self.equal(_object_state(a), _object_state(b), copied=copied):
                return True
            comparable = True
        except NotComparableError:
            comparable = False
        if (a is b and (comparable or hasattr(a, "__deepcopy__"))) or _equal_by_type(a, b):
            return True
        if not comparable:
            raise NotComparableError(f"a {type(a).__name__}, which cannot be compared")
        return False


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    for tensor in (a, b):
        if tensor.requires_grad:
            if not tensor.is_leaf:
                raise NotStackableError(
                    "a tensor with gradients from an earlier forward (set it to None, or detach it)"
                )
            raise NotStackableError("a trained tensor that is not a registered parameter (register it)")
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    try:
        return a.is_meta or torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    except (RuntimeError, NotImplementedError):
        raise NotComparableError(
            f"a tensor of layout {a.layout} and type {a.dtype}, which cannot be compared"
        ) from None


def _enclosed_values(function: types.FunctionType) -> list[Any]:
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


def _global_names(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _global_names(const)]
    return [*code.co_names, *inner]


def _object_state(value: Any) -> list[Any]:
    """Return the parts of `__reduce_ex__`, or the name of a global object."""
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        state = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(state, str):  # the name of a global object
            return [state]
        return [list(part) if isinstance(part, Iterator) else part for part in state]
    except Exception as error:  # an object may refuse to be copied with any error
        raise NotComparableError(str(error)) from error


def _equal_by_type(a: Any, b: Any) -> bool:
    try:
        return any("__eq__" in vars(kind) for kind in type(a).__mro__[:-1]) and (a == b) is True
    except Exception:  # an `__eq__` may fail with any error
        return False
