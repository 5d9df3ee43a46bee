"""Hashes of functions, objects and tensors: the fingerprint of a run directory."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchace.nn.architecture import enclosed_values

HASHED_ROWS = 65_536  # of a tensor
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, np.generic, torch.dtype, torch.device)


def object_name(value: Any) -> str:
    """Return `module:qualname` of a function, class or partial, or of the class of an object."""
    while isinstance(value, partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def source_digest(function: Any) -> str:
    """Return a SHA-256 of an object's source and attributes, and of the user's values, functions and classes it uses.

    Without a source file, as in an interpreter, the hash is of the bytecode and its constants.
    """
    digest = hashlib.sha256()
    _update(digest, function, set())
    return digest.hexdigest()


def tensor_digest(tensors: Sequence[Tensor]) -> str:
    """Return a SHA-256 of the shapes, types and contents of tensors; of 65,536 rows at most, evenly spaced."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        step = max(1, -(-len(tensor) // HASHED_ROWS)) if tensor.ndim else 1
        part = tensor[::step] if tensor.ndim else tensor
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _update(digest: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, _PLAIN):
        digest.update(repr(value).encode())
    elif isinstance(value, os.PathLike):
        digest.update(os.fspath(value).encode())
    elif isinstance(value, (set, frozenset)):
        _update(digest, sorted(value, key=repr), seen)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _update(digest, item, seen)
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            _update(digest, (repr(key), value[key]), seen)
    elif id(value) in seen:
        return
    else:
        seen.add(id(value))
        _update_object(digest, value, seen)


def _update_object(digest: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, partial):
        _update(digest, [value.func, value.args, value.keywords], seen)
    elif isinstance(value, types.MethodType):
        _update(digest, [value.__func__, value.__self__], seen)
    elif isinstance(value, types.FunctionType):
        _update_function(digest, value, seen)
    elif isinstance(value, type):
        digest.update(_source(value) or f"{value.__module__}:{value.__qualname__}".encode())
        inner = [item for item in vars(value).values() if isinstance(item, types.FunctionType)]
        own = [base for base in value.__bases__ if _is_own(base, value.__module__)]
        if value.__module__.partition(".")[0] not in ("torch", "torchace", "builtins"):
            _update(digest, [own, inner], seen)
    elif isinstance(value, Tensor | np.ndarray):
        digest.update(_tensor_bytes(value))
    else:  # an object with methods, or a value in a closure
        digest.update(object_name(value).encode())
        if callable(value) or _is_own(type(value), ""):
            _update(digest, [type(value), _attributes(value)], seen)


def _tensor_bytes(value: Tensor | np.ndarray[Any, Any]) -> bytes:
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.dtype}".encode() + value.tobytes()
    is_dense = value.layout is torch.strided and not value.is_meta
    return (tensor_digest([value]) if is_dense else f"{tuple(value.shape)} {value.dtype}").encode()


def _update_function(digest: Any, function: types.FunctionType, seen: set[int]) -> None:
    source, code = _source(function), function.__code__
    digest.update(source)
    if not source or function.__name__ == "<lambda>":  # a line may have several
        _update_code(digest, code)
    _update(digest, [function.__defaults__, function.__kwdefaults__, enclosed_values(function)], seen)
    names = sorted(set(_global_names(code)))
    used = [function.__globals__.get(name) for name in names]
    modules = [item for item in used if isinstance(item, types.ModuleType) and _is_local(item.__name__)]
    used += [getattr(module, name, None) for module in modules for name in names]
    _update(digest, [item for item in used if _is_own(item, function.__module__)], seen)


def _global_names(code: types.CodeType) -> list[str]:
    """Return the global names in a function's code and in functions inside it."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _global_names(const)]
    return [*code.co_names, *inner]


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object; of a module, the public ones and the weights."""
    if not hasattr(value, "__dict__"):
        return {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    if not isinstance(value, nn.Module):
        return vars(value)
    changing = {"training", *getattr(value, "_defaults", ())}  # the latter are the sums of a torchmetrics metric
    public = {name: item for name, item in vars(value).items() if name[0] != "_" and name not in changing}
    return {**public, **value.state_dict()}


def _source(value: Any) -> bytes:
    try:
        return inspect.getsource(value).encode()
    except (OSError, TypeError):
        return b""


def _update_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _update_code(digest, constant)
        else:  # sets have no fixed order
            digest.update(repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant).encode())


def _is_own(value: Any, module: str) -> bool:
    """Whether a value is a number, text or list, or is defined in this module or in the user's other files."""
    if isinstance(value, (*_PLAIN, list, tuple, dict, set, Tensor, np.ndarray)):
        return True
    defined = getattr(value, "__module__", None)
    return isinstance(defined, str) and (defined == module or _is_local(defined))


def _is_local(module: str) -> bool:
    """Whether a module is a file of the user: not of Python, torchace or an installed package."""
    if module == "__main__":
        return True
    if module.partition(".")[0] in {"torchace", *sys.stdlib_module_names}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool(file) and not {"site-packages", "dist-packages"} & set(file.split(os.sep))
