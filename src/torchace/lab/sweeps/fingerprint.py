"""Hashes of functions, objects and tensors: the fingerprint of a run directory."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchace.nn.architecture import enclosed_values

HASHED_ROWS, HASHED_BYTES = 65_536, 2**28  # rows of a tensor that has more bytes
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, np.generic, torch.dtype, torch.device, PurePath)


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
    return hashlib.sha256(repr(_describe(function, set())).encode()).hexdigest()


def tensor_digest(tensors: Sequence[Tensor]) -> str:
    """Return a SHA-256 of the shapes, types and contents of tensors; above 256 MiB, of 65,536 rows, evenly spaced."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        part = tensor[:: -(-len(tensor) // HASHED_ROWS)] if tensor.nbytes > HASHED_BYTES else tensor
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _describe(value: Any, seen: set[int]) -> Any:
    """Return nested lists and text that identify a value."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, set | frozenset):  # sets have no fixed order
        return sorted((_describe(item, set(seen)) for item in value), key=repr)
    if isinstance(value, dict):
        return [(key, _describe(value[key], seen)) for key in sorted(value, key=repr)]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_describe(item, seen) for item in value)]
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, _describe(value.co_consts, seen)]
    if isinstance(value, Tensor) and not value.is_meta:
        return tensor_digest([value.to_dense()])
    if isinstance(value, np.ndarray):
        return [value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()]
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    if isinstance(value, partial):
        return _describe([value.func, value.args, value.keywords], seen)
    if isinstance(value, types.MethodType):
        return _describe([value.__func__, value.__self__], seen)
    if isinstance(value, types.FunctionType):
        return _describe_function(value, seen)
    if isinstance(value, type):
        if value.__module__.partition(".")[0] in {"torch", "torchace", *sys.stdlib_module_names}:
            return object_name(value)
        methods = [item for item in vars(value).values() if isinstance(item, types.FunctionType)]
        bases = [base for base in value.__bases__ if _is_own(base, value.__module__)]
        return [_source(value), _describe([*bases, *methods], seen)]
    if callable(value) or _is_own(type(value)):
        return [object_name(value), _describe([type(value), _attributes(value)], seen)]
    settings = _settings(value)
    return [object_name(value), _describe(settings, seen)] if settings else object_name(value)


def _describe_function(function: types.FunctionType, seen: set[int]) -> list[Any]:
    """Return the source, default values, and the user's objects that a function uses."""
    code = function.__code__
    source = _source(function)
    if not source or function.__name__ == "<lambda>":  # a line may have several
        source = [source, _describe(code, seen)]
    values = [function.__defaults__, function.__kwdefaults__, enclosed_values(function)]
    names = sorted(set(_global_names(code)))
    used = [function.__globals__.get(name) for name in names]
    modules = [item for item in used if isinstance(item, types.ModuleType) and _is_local(item.__name__)]
    used += [getattr(module, name, None) for module in modules for name in names]
    used = [item for item in used if _is_own(item, function.__module__)]
    return [source, _describe([*values, *used], seen)]


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


def _settings(value: Any) -> dict[str, Any]:
    """Return the public values of parsed arguments or of an installed package's object, such as a configuration."""
    is_library = type(value).__module__.partition(".")[0] in sys.stdlib_module_names  # such as a logger
    if callable(value) or (is_library and not isinstance(value, argparse.Namespace | types.SimpleNamespace)):
        return {}
    attributes = getattr(value, "__dict__", {})
    return {name: item for name, item in attributes.items() if name[0] != "_" and not callable(item)}


def _source(value: Any) -> Any:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return ""


def _is_own(value: Any, module: str = "") -> bool:
    """Whether a value is a number, text, list, tensor, network or configuration, or defined in a file of the user."""
    if isinstance(value, (*_PLAIN, list, tuple, dict, set, partial, nn.Module, Tensor, np.ndarray)) or _settings(value):
        return True
    defined = getattr(value, "__module__", None) or ""
    return (bool(module) and defined == module) or _is_local(defined)


def _is_local(module: str) -> bool:
    """Whether a module is a file of the user: not of Python, torchace or an installed package."""
    if module == "__main__":
        return True
    if module.partition(".")[0] in {"torchace", *sys.stdlib_module_names}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool(file) and not {"site-packages", "dist-packages"} & set(file.split(os.sep))
