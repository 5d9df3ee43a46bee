"""Model directories: atomic writes, and reads of unaltered models only.

The manifest has the size and SHA-256 of the weights, and the SHA-256 of its own content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import (
    JSON_BYTES,
    PARTIAL,
    file_lock,
    fsync_directory,
    parse_json,
    read_bounded,
    remove_abandoned,
)

Json = dict[str, Any]

FORMAT = "torchace model"
FORMAT_VERSION = 1
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
REPAIR = "copy the model again or save it anew"
NONE = type(None)
FIELDS: dict[str, tuple[type, ...]] = {
    "format": (str,),
    "format_version": (int,),
    "torchace_version": (str,),
    "kind": (str, NONE),
    "architecture": (dict, NONE),
    "num_members": (int,),
    "link": (str,),
    "diversity": (float, NONE),
    "member_weights": (dict, NONE),
    "class_names": (list, NONE),
    "extra": (dict, NONE),
    "weights": (dict,),
    "tensors": (dict,),
}


class ModelFileError(ValueError):
    """A model directory cannot be written or loaded; the message gives the reason and what to do."""


def resolve_path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # a loop of links; a null character
        raise ModelFileError(f"{os.fspath(path)!r} is not a path that can be used; choose another.") from error


def to_json(value: Any) -> str:
    """Serialize canonically: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def manifest_digest(manifest: Json) -> str:
    """Return the SHA-256 of a manifest's content, without that digest itself."""
    return hashlib.sha256(to_json({key: manifest[key] for key in manifest if key != "sha256"}).encode()).hexdigest()


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors; copies, because safetensors refuses tensors that share memory."""
    return save_safetensors(
        {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    )


def describe_tensor(tensor: Tensor) -> Json:
    """Return the shape and type of a tensor, as in the manifest."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def write_model(path: Path, manifest: Json, weights: bytes) -> None:
    """Write a model directory atomically; a model at `path` is replaced."""
    manifest = {**manifest, "weights": {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
    manifest["sha256"] = manifest_digest(manifest)
    text = "{\n" + ",\n".join(f"{to_json(key)}: {to_json(value)}" for key, value in manifest.items()) + "\n}\n"
    if len(text) > JSON_BYTES:
        raise ModelFileError(
            f"The model's description has {len(text):,} bytes, more than the {JSON_BYTES:,} that can be loaded; "
            "shorten `extra`, or save the members as separate models."
        )
    _check_replaceable(path)
    remove_abandoned(path, _discard)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(temporary)
            with file_lock(temporary):
                _write(temporary / WEIGHTS, weights)
                _write(temporary / MANIFEST, text.encode())
                fsync_directory(temporary)
                _replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                if temporary.exists():
                    _discard(temporary)
    except OSError as error:
        raise ModelFileError(
            f"The model could not be saved as {path} ({error.strerror or error}); its previous content is unchanged; "
            "fix the cause, or choose another path."
        ) from error


def _check_replaceable(path: Path) -> None:
    """Refuse to replace anything but an intact model without other files."""
    if not os.path.lexists(path):
        return
    try:
        if not path.is_dir() or set(os.listdir(path)) - {MANIFEST, WEIGHTS}:
            raise ModelFileError(f"{path} is not the directory of a model.")
        read_manifest(path)
    except (OSError, ModelFileError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = f" ({cause.strerror})" if isinstance(cause, OSError) else ""
        raise ModelFileError(
            f"{path} exists and is not an intact model{reason}, so it is kept; remove it or choose another path."
        ) from cause


def _write(file: Path, data: bytes) -> None:
    with open(file, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _replace(temporary: Path, path: Path) -> None:
    """Rename a complete directory to `path`.

    A previous model is renamed first, as a non-empty directory cannot be renamed onto; `find_model` reads it if the
    process stops between the two renames.
    """
    previous = _previous(path)
    replacing = path.exists()
    moved = False
    if replacing:
        if previous.exists():
            _discard(previous)  # of a save that stopped after its renames
        os.rename(path, previous)
    try:
        os.rename(temporary, path)
        moved = True
        fsync_directory(path.parent)
    except BaseException:
        if moved:
            os.rename(path, temporary)
        if replacing:
            os.rename(previous, path)
        raise
    with contextlib.suppress(OSError):  # the next save tries again
        if previous.exists():
            _discard(previous)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _discard(directory: Path) -> None:
    """Remove a model directory, the manifest first, so that a partial one never loads."""
    for name in (MANIFEST, WEIGHTS):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


def find_model(path: str | os.PathLike[str]) -> Path:
    """Return the model at `path`, or the previous one if a save stopped between its two renames."""
    path = resolve_path(path)
    try:
        if not os.path.lexists(path):
            if (_previous(path) / MANIFEST).is_file():
                return _previous(path)
            raise ModelFileError(f"There is no model at {path}; check the path.")
        if not path.is_dir():
            raise ModelFileError(f"{path} is not a directory; give the directory that holds {MANIFEST}.")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror or error}); check its permissions.") from error
    return path


def read_manifest(directory: Path) -> Json:
    """Read a complete, unaltered manifest of a known format."""
    file = directory / MANIFEST
    data = _read(file, JSON_BYTES)
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise ModelFileError(f"{file} is not the JSON that was written; {REPAIR}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ModelFileError(f"{file} is not a manifest of torchace; give the directory of a model that it saved.")
    version = manifest.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise ModelFileError(f"{file} has format {version}, newer than {FORMAT_VERSION}; update torchace to load it.")
    try:
        intact = manifest.get("sha256") == manifest_digest(manifest)
    except ValueError:  # NaN, or 1e999, which is read as infinity
        intact = False
    if not intact:
        raise ModelFileError(f"{file} was altered after it was written; {REPAIR}.")
    del manifest["sha256"]
    invalid = [name for name, types in FIELDS.items() if type(manifest.get(name, ...)) not in types]
    if len(manifest) > len(FIELDS):
        invalid.append("set of fields")
    if not invalid and not 0 <= (manifest["diversity"] or 0) <= 1:
        invalid.append("diversity")
    if not invalid and not all(type(name) is str for name in manifest["class_names"] or ()):
        invalid.append("class_names")
    if invalid:
        raise ModelFileError(f"{file} has no valid {', '.join(invalid)}; {REPAIR}.")
    return manifest


def read_weights(directory: Path, manifest: Json) -> dict[str, Tensor]:
    """Read the tensors that the manifest lists, bit for bit."""
    file = directory / WEIGHTS
    expected = manifest["weights"]
    try:  # check the size before reading
        sizes = [math.prod(t["shape"]) * getattr(torch, t["dtype"]).itemsize for t in manifest["tensors"].values()]
        fits = 0 <= expected["bytes"] <= sum(sizes) + JSON_BYTES  # the names and shapes are in the file too
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ModelFileError(f"{file} is listed with a size that does not match its tensors; {REPAIR}.")
    data = _read(file, expected["bytes"])
    if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected.get("sha256"):
        raise ModelFileError(f"{file} does not have the size and SHA-256 in the manifest; {REPAIR}.")
    try:
        tensors = {name: tensor.clone() for name, tensor in load_safetensors(data).items()}
    except Exception as error:  # of safetensors, and of torch for shapes and types
        raise ModelFileError(f"{file} is not a safetensors file that can be read; {REPAIR}.") from error
    if {name: describe_tensor(tensor) for name, tensor in tensors.items()} != manifest["tensors"]:
        raise ModelFileError(f"{file} holds other tensors than the manifest lists; {REPAIR}.")
    return tensors


def _read(file: Path, limit: int) -> bytes:
    try:
        return read_bounded(file, limit)
    except FileNotFoundError as error:
        raise ModelFileError(f"There is no {file}, so the model is not complete; {REPAIR}.") from error
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "too large"
        raise ModelFileError(f"{file} cannot be read ({reason}); check its permissions, or {REPAIR}.") from error
