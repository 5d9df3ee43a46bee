"""Weights of models trained elsewhere, read as tensors only: code in a file is never run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchace._model_files import ModelFileError

State = dict[str, Any]  # tensors by name; a module's `_extra_state` may be any type that torch reads
PathLike = str | os.PathLike[str]
MakeModel = Callable[[], nn.Module]

WEIGHTS_ALONE = "Save its weights alone: torch.save(model.state_dict(), path)"


def load_members(
    make_model: MakeModel | Sequence[MakeModel],
    paths: Iterable[PathLike],
    *,
    state_key: str | None = None,
    prefix: str | None = None,
) -> list[nn.Module]:
    """Return one model for each file, with its weights, in evaluation mode; see `Ensemble.from_checkpoints`."""
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"Expected a list of paths, but got one, {os.fspath(paths)!r}. Write [path].")
    files = [Path(path) for path in paths]
    several = isinstance(make_model, Sequence) and not isinstance(make_model, str)
    makers: list[Any] = list(make_model) if several else [make_model] * len(files)  # type: ignore[arg-type]
    if len(makers) != len(files):
        raise ValueError(f"Expected one function for each of {len(files)} checkpoints, but got {len(makers)}.")
    members = []
    for make, path in zip(makers, files, strict=True):
        model: Any = make() if callable(make) and not isinstance(make, nn.Module) else None
        if not isinstance(model, nn.Module):
            raise TypeError("Expected `make_model` to be a function that returns a model. Write lambda: ...")
        model.load_state_dict(_match_names(_read_state(path, state_key), model, path, prefix))
        members.append(model.eval())
    return members


def _read_state(path: Path, key: str | None) -> State:
    """Return the state dict in a file: its content, or the one entry of the content that is a state dict."""
    if not path.is_file():
        raise ModelFileError(f"There is no checkpoint file at {path}; check the path.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(f"{path} is not a valid safetensors file; copy it again.") from error
    except Exception as error:  # of pickle, zipfile or torch
        problem = "is not a valid file of torch.save; copy it again"
        if "GLOBAL" in str(error) or "TorchScript" in str(error):
            problem = f"holds more than tensors, and reading it would run code in the file. {WEIGHTS_ALONE}"
        raise ModelFileError(f"{path} {problem}.") from error
    if not isinstance(content, Mapping):
        raise ModelFileError(f"{path} contains a {type(content).__name__}, not a state dict. {WEIGHTS_ALONE}.")
    if key is None and _is_state(content):
        return dict(content)
    keys = [name for name, value in content.items() if _is_state(value) and key in (None, name)]
    if len(keys) == 1:
        return dict(content[keys[0]])
    if keys:
        raise ModelFileError(f"{path} has several state dicts, {_quote(keys)}; name one with state_key=....")
    where = "" if key is None else f" under {key!r}"
    raise ModelFileError(f"{path} has no state dict{where}; it has {_quote(content)}.")


def _is_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not any(isinstance(tensor, Tensor) for tensor in value.values()):
        return False
    return all(
        isinstance(name, str) and (isinstance(tensor, Tensor) or name.endswith("_extra_state"))
        for name, tensor in value.items()
    )


def _quote(names: Iterable[Any]) -> str:
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:6]) + (", ..." if len(quoted) > 6 else "")


def _match_names(state: State, model: nn.Module, path: Path, prefix: str | None) -> State:
    """Return a file's weights under exactly the model's names; without `prefix`, remove what all names share."""
    own = model.state_dict(keep_vars=True)
    state = {_without_compile(name): value for name, value in state.items()}
    prefixes = _common_prefixes(state) if prefix is None else [f"{prefix.removesuffix('.')}." if prefix else ""]
    problem = ""
    for start in prefixes:
        weights = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        problem = find_mismatch(weights, own)
        if not problem:
            by_tensor = {id(own[name]): value for name, value in weights.items()}  # tied: saved under one name
            return {name: weights.get(name, by_tensor.get(id(value))) for name, value in own.items()}
    raise ModelFileError(
        f"{path} does not fit {type(model).__name__}: {problem}. It has {_quote(state)}. If it also has other weights, "
        "select the model's by the prefix of their names: prefix=...."
    )


def _without_compile(name: str) -> str:
    """Remove `_orig_mod`, which `torch.compile` adds at every compiled module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _common_prefixes(state: State) -> list[str]:
    """Return the prefixes that all names share, in whole parts; the empty one first."""
    prefixes = [""]
    for parts in zip(*(name.split(".")[:-1] for name in state), strict=False):
        if len(set(parts)) > 1:
            break
        prefixes.append(f"{prefixes[-1]}{parts[0]}.")
    return prefixes


def find_mismatch(state: State, own: State, holder: str = "file") -> str:
    """Return the first mismatch between weights and a model; empty if they match."""
    tied = {id(own[name]) for name in state.keys() & own.keys()}
    for name, value in own.items():
        given = state.get(name)
        if name not in state and id(value) not in tied:
            return f"it has no {name!r}, which the model has"
        if not isinstance(value, Tensor) or not isinstance(given, Tensor) or is_lazy(value):
            continue
        if given.shape != value.shape:
            return f"{name!r} is {tuple(given.shape)} in the {holder} and {tuple(value.shape)} in the model"
        if given.is_floating_point() != value.is_floating_point() or given.is_complex() != value.is_complex():
            return f"{name!r} is {given.dtype} in the {holder} and {value.dtype} in the model"
    more = next((name for name in state if name not in own), None)
    return f"it has {more!r}, which the model does not have" if more else ""
