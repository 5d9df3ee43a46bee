"""Weights of models trained elsewhere, read as tensors only: code in a file is never run."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchace import _model_files as files
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
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"Expected a list of paths, but got one, {os.fspath(paths)!r}. Write [path].")
    paths = list(paths)
    if not paths:
        raise ValueError("Expected at least one checkpoint, but got none.")
    several = isinstance(make_model, Sequence) and not isinstance(make_model, str)
    makers = list(cast(Sequence[MakeModel], make_model)) if several else [cast(MakeModel, make_model)] * len(paths)
    if len(makers) != len(paths):
        raise ValueError(f"Expected one function for each of {len(paths)} checkpoints, but got {len(makers)}.")
    return [_load_member(make, Path(path), state_key, prefix) for make, path in zip(makers, paths, strict=True)]


def _load_member(make_model: MakeModel, path: Path, state_key: str | None, prefix: str | None) -> nn.Module:
    model: object = make_model
    if callable(make_model) and not isinstance(make_model, nn.Module):
        model = make_model()
    if model is make_model or not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(
            f"Expected `make_model` to be a function that returns a model, but got {got}. Write lambda: ..."
        )
    state = _match_names(_read_state(path, state_key), model, path, prefix)
    try:
        model.load_state_dict(state)
    except Exception as error:  # raised by a model's own loading
        reason = str(error).splitlines()[-1].strip()
        raise ModelFileError(f"{path} does not fit {type(model).__name__}: {reason}") from error
    return model.eval()


def _read_state(path: Path, state_key: str | None) -> State:
    """Return the state dict in a file, or in a directory that `save_model` wrote for one model."""
    if path.is_dir():
        return _read_directory(path)
    if not path.is_file():
        raise ModelFileError(f"There is no checkpoint at {path}; check the path.")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(f"{path} is not a safetensors file that can be read; copy it again.") from error
    return _find_state(_torch_load(path), path, state_key)


def _read_directory(path: Path) -> State:
    if not (path / files.MANIFEST).is_file():
        inside = sorted(file.name for file in path.glob("*.safetensors"))
        hint = f"; give the file in it, {path / inside[0]}" if inside else "; give the file of the weights"
        raise ModelFileError(f"{path} is a directory, but not a model that torchace saved{hint}.")
    manifest = files.read_manifest(path)
    tensors = files.read_weights(path, manifest)
    if manifest["num_members"] != 1 or not all(name.startswith("members.0.") for name in tensors):
        raise ModelFileError(
            f"{path} holds an ensemble of {manifest['num_members']} members, not one model; "
            "read it with load_model or load_weights."
        )
    return {name.removeprefix("members.0."): tensor for name, tensor in tensors.items()}


def _torch_load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on TorchScript archives, refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zipfile or torch
        needs = re.search(r"GLOBAL (\S+)", str(error))
        problem = "is not a file of torch.save that can be read; copy it again"
        if needs:
            problem = (
                f"holds objects other than tensors ({needs[1]}), such as a pickled model, and reading them "
                f"would run code in the file. {WEIGHTS_ALONE}"
            )
        elif "TorchScript" in str(error):
            problem = f"is a TorchScript archive, which holds code. {WEIGHTS_ALONE}"
        raise ModelFileError(f"{path} {problem}.") from error


def _find_state(content: Any, path: Path, key: str | None) -> State:
    """Return the state dict in a file's content: the content itself, or its one entry that is a state dict."""
    if not isinstance(content, Mapping):
        raise ModelFileError(f"{path} holds a {type(content).__name__} and no weights by name. {WEIGHTS_ALONE}.")
    if key is None and _is_state(content):
        return dict(content)
    keys = [name for name, value in content.items() if _is_state(value) and key in (None, name)]
    if len(keys) == 1:
        return dict(content[keys[0]])
    if keys:
        raise ModelFileError(f"{path} has several state dicts, {_quote(keys)}; name one with state_key=....")
    if key is not None:
        raise ModelFileError(f"{path} has no state dict under {key!r}; it has {_quote(content)}.")
    raise ModelFileError(f"{path} has no state dict; it has {_quote(content)}. {WEIGHTS_ALONE}.")


def _is_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not any(isinstance(tensor, Tensor) for tensor in value.values()):
        return False
    return all(
        isinstance(name, str) and (isinstance(tensor, Tensor) or name.endswith("_extra_state"))
        for name, tensor in value.items()
    )


def _quote(names: Iterable[Any]) -> str:
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:6]) + (", ..." if len(quoted) > 6 else "") if quoted else "nothing"


def _match_names(state: State, model: nn.Module, path: Path, prefix: str | None) -> State:
    """Return a file's weights under exactly the model's names; without `prefix`, find it."""
    names = {_without_compile(name): name for name in model.state_dict()}
    own: State = {_without_compile(name): value for name, value in model.state_dict(keep_vars=True).items()}
    state = {_without_compile(name): value for name, value in state.items()}
    if prefix is not None:
        prefix = f"{prefix.removesuffix('.')}." if prefix else ""
        candidates = [_strip(state, prefix)]
        if not candidates[0]:
            raise ModelFileError(f"{path} has nothing under {prefix!r}; it has {_quote(state)}.")
    else:
        candidates = [_strip(state, common) for common in _common_prefixes(state)]
    weights = next((candidate for candidate in candidates if not find_mismatch(candidate, own)), None)
    if weights is None:
        closest = max(candidates, key=lambda candidate: len(candidate.keys() & own.keys()))
        prefixes = sorted({name[: -len(key)] for key in own for name in state if name.endswith(f".{key}")})
        part = next((start for start in prefixes if not find_mismatch(_strip(state, start), own)), None)
        hint = f"; if the rest may be left out, use prefix={part!r}" if part and prefix is None else ""
        raise ModelFileError(f"{path} does not fit {type(model).__name__}: {find_mismatch(closest, own)}{hint}.")
    by_tensor = {id(own[name]): value for name, value in weights.items()}  # a tied weight may be saved under one name
    return {names[name]: weights[name] if name in weights else by_tensor[id(value)] for name, value in own.items()}


def _without_compile(name: str) -> str:
    """Remove `_orig_mod`, which `torch.compile` adds at every compiled module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _strip(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


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
