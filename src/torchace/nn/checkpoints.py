"""Weights of a model that was trained somewhere else, read from a file as tensors and nothing more.

Safetensors, and what `torch.load(weights_only=True)` reads: no code of a file is ever run. The names may start with
what a wrapper adds: Lightning's attribute (`model.`), data parallelism's `module.`, `torch.compile`'s `_orig_mod.`.
"""

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

State = dict[str, Any]  # tensors by name; a module's own `_extra_state` may be anything that torch reads
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
    """One model for each file, with its weights, in evaluation mode; see `Ensemble.from_checkpoints`."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"Expected a list of paths, but got one, {os.fspath(paths)!r}. Write [path].")
    paths = list(paths)
    if not paths:
        raise ValueError("Expected at least one checkpoint, but got none.")
    several = isinstance(make_model, Sequence) and not isinstance(make_model, str)
    makers = list(cast(Sequence[MakeModel], make_model)) if several else [cast(MakeModel, make_model)] * len(paths)
    if len(makers) != len(paths):
        raise ValueError(f"Expected one function for each of {len(paths)} checkpoints, but got {len(makers)}.")
    return [_loaded(make, Path(path), state_key, prefix) for make, path in zip(makers, paths, strict=True)]


def _loaded(make_model: MakeModel, path: Path, state_key: str | None, prefix: str | None) -> nn.Module:
    model: object = make_model
    if callable(make_model) and not isinstance(make_model, nn.Module):
        model = make_model()
    if model is make_model or not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(f"Expected `make_model` to be a function that makes a model, but got {got}. Write lambda: ...")
    state = fitted(read_state(path, state_key), model, path, prefix)
    try:
        model.load_state_dict(state)
    except Exception as error:  # what a model's own loading says
        reason = str(error).splitlines()[-1].strip()
        raise ModelFileError(f"{path} does not fit {type(model).__name__}: {reason}") from error
    return model.eval()


# -- reading ----------------------------------------------------------------------------------------------------------


def read_state(path: Path, state_key: str | None = None) -> State:
    """The state dict in a file, or in a directory that `save_model` wrote for a single model.

    Args:
        path: A `.safetensors` file, a file of `torch.save` (`.pt`, `.pth`, `.ckpt`, `.bin`, ...), or such a directory.
        state_key: Under which key of the file the state dict is, where it has several.
    """
    if path.is_dir():
        return _read_directory(path)
    if not path.is_file():
        raise ModelFileError(f"There is no checkpoint at {path}; check the path.")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(f"{path} is not a safetensors file that can be read; copy it again.") from error
    return _state_in(_torch_load(path), path, state_key)


def _read_directory(path: Path) -> State:
    if not (path / files.MANIFEST).is_file():
        inside = sorted(file.name for file in path.glob("*.safetensors"))
        hint = f"; give the file in it, {path / inside[0]}" if inside else "; give the file of the weights"
        raise ModelFileError(f"{path} is a directory and no model that torchace saved{hint}.")
    manifest = files.read_manifest(path)
    tensors = files.read_weights(path, manifest)
    if manifest["num_members"] != 1 or not all(name.startswith("members.0.") for name in tensors):
        raise ModelFileError(
            f"{path} holds an ensemble of {manifest['num_members']} members with all it shares, not one model; "
            "read it with load_model or load_weights."
        )
    return {name.removeprefix("members.0."): tensor for name, tensor in tensors.items()}


def _torch_load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript archives, which are refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what it meets: pickle's, zip's, its own
        needs = re.search(r"GLOBAL (\S+)", str(error))
        if needs:
            raise ModelFileError(
                f"{path} holds objects beside tensors ({needs[1]}), such as a whole pickled model, and reading them "
                f"would run code of the file. {WEIGHTS_ALONE}."
            ) from error
        if "TorchScript" in str(error):
            raise ModelFileError(f"{path} is a TorchScript archive, which holds code. {WEIGHTS_ALONE}.") from error
        raise ModelFileError(f"{path} is not a file of torch.save that can be read; copy it again.") from error


def _state_in(content: Any, path: Path, key: str | None) -> State:
    """The state dict in what a file held: all of it, or the one part that is one."""
    if not isinstance(content, Mapping):
        raise ModelFileError(f"{path} holds a {type(content).__name__} and no weights by name. {WEIGHTS_ALONE}.")
    if key is not None:
        if not _is_state(content.get(key)):
            raise ModelFileError(f"{path} has no state dict under {key!r}; it has {_listed(content)}.")
        return dict(content[key])
    if _is_state(content):
        return dict(content)
    found = [name for name, value in content.items() if _is_state(value)]
    if len(found) == 1:
        return dict(content[found[0]])
    if found:
        raise ModelFileError(f"{path} has several state dicts, {_listed(found)}; name one with state_key=....")
    raise ModelFileError(f"{path} has no state dict; it has {_listed(content)}. {WEIGHTS_ALONE}.")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and any(isinstance(tensor, Tensor) for tensor in value.values())
        and all(
            isinstance(name, str) and (isinstance(tensor, Tensor) or name.endswith("_extra_state"))
            for name, tensor in value.items()
        )
    )


def _listed(names: Iterable[Any]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "") if shown else "nothing"


# -- fitting ----------------------------------------------------------------------------------------------------------


def fitted(state: State, model: nn.Module, path: Path, prefix: str | None = None) -> State:
    """A file's weights under the model's names: all that the model has and no more, or an error.

    Args:
        state: What the file has.
        model: What it must fit.
        path: The file, for the errors.
        prefix: What stands before the model's names, where the file has weights beside them; found out if not given.
    """
    names = {_uncompiled(name): name for name in model.state_dict()}
    own: State = {_uncompiled(name): value for name, value in model.state_dict(keep_vars=True).items()}
    state = {_uncompiled(name): value for name, value in state.items()}
    if prefix is not None:
        prefix = f"{prefix.removesuffix('.')}." if prefix else ""
        candidates = [_under(state, prefix)]
        if not candidates[0]:
            raise ModelFileError(f"{path} has nothing under {prefix!r}; it has {_listed(state)}.")
    else:
        candidates = [_under(state, start) for start in _starts(state)]
    found = next((candidate for candidate in candidates if not _problem(candidate, own)), None)
    if found is None:
        closest = max(candidates, key=lambda candidate: len(candidate.keys() & own.keys()))
        problem = _problem(closest, own)
        part = next((start for start in _parts(state, own) if not _problem(_under(state, start), own)), None)
        hint = f"; if the rest may be left out, say prefix={part!r}" if part and prefix is None else ""
        raise ModelFileError(f"{path} does not fit {type(model).__name__}: {problem}{hint}.")
    by_tensor = {id(own[name]): value for name, value in found.items()}  # a tied weight is saved under one name
    return {names[name]: found[name] if name in found else by_tensor[id(value)] for name, value in own.items()}


def _uncompiled(name: str) -> str:
    """A name without `_orig_mod`, which stands wherever a module was compiled."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _under(state: State, start: str) -> State:
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}


def _starts(state: State) -> list[str]:
    """What all names start with, in whole parts: nothing first, then more and more."""
    starts = [""]
    for parts in zip(*(name.split(".")[:-1] for name in state), strict=False):
        if len(set(parts)) > 1:
            break
        starts.append(f"{starts[-1]}{parts[0]}.")
    return starts


def _parts(state: State, own: State) -> list[str]:
    """What some names of the file have before a name of the model's."""
    return sorted({name[: -len(key)] for key in own for name in state if name.endswith(f".{key}")})


def _problem(found: State, own: State) -> str:
    """Why weights do not fit a model, naming the first that does not; empty where they do."""
    held = {id(own[name]) for name in found.keys() & own.keys()}
    for name, value in own.items():
        if name not in found:
            if id(value) not in held:
                return f"it has no {name!r}, which the model has"
            continue
        given = found[name]
        if not isinstance(value, Tensor) or not isinstance(given, Tensor) or is_lazy(value):
            continue
        if given.shape != value.shape:
            return f"{name!r} is {tuple(given.shape)} in the file and {tuple(value.shape)} in the model"
        if given.is_floating_point() != value.is_floating_point() or given.is_complex() != value.is_complex():
            return f"{name!r} is {given.dtype} in the file and {value.dtype} in the model"
    more = next((name for name in found if name not in own), None)
    return f"it has {more!r}, which the model has not" if more else ""
