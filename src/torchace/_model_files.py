"""A model directory on the disk: written whole or not at all, and read only as it was written.

It holds `weights.safetensors` and `manifest.json`; the manifest has the size and SHA-256 of the weights, and a SHA-256
of its own content. Nothing here knows what an ensemble is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from torchace._files import JSON_BYTES, PARTIAL, file_lock, parse_json, read_bounded, remove_abandoned

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
    """A model directory that cannot be written or must not be loaded: one sentence on what is wrong and what to do."""


def resolved(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # a loop of links; a null character
        raise ModelFileError(f"{os.fspath(path)!r} is not a path that can be used; choose another.") from error


def dumped(value: Any) -> str:
    """JSON of which there is one for each content: keys in order, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def seal(manifest: Json) -> str:
    """The SHA-256 of a manifest's content, itself left out."""
    return hashlib.sha256(dumped({key: manifest[key] for key in manifest if key != "sha256"}).encode()).hexdigest()


# -- writing ----------------------------------------------------------------------------------------------------------


def write_model(path: Path, manifest: Json, weights: bytes) -> None:
    """Writes a directory beside `path`, flushes it to the disk and renames it; a model at `path` is replaced."""
    manifest = {**manifest, "weights": {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
    manifest["sha256"] = seal(manifest)
    text = "{\n" + ",\n".join(f"{dumped(key)}: {dumped(value)}" for key, value in manifest.items()) + "\n}\n"
    if len(text) > JSON_BYTES:
        raise ModelFileError(
            f"The model's description has {len(text):,} bytes, more than the {JSON_BYTES:,} that can be loaded; keep "
            "less in `extra`, or save its parts as models of their own."
        )
    _refuse_to_replace(path)
    remove_abandoned(path, _discard)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(temporary)
            with file_lock(temporary):
                _write(temporary / WEIGHTS, weights)
                _write(temporary / MANIFEST, text.encode())
                _flush_directory(temporary)
                _put_in_place(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                if temporary.exists():
                    _discard(temporary)
    except OSError as error:
        raise ModelFileError(
            f"The model could not be saved as {path} ({error.strerror or error}) and what was there before is kept; "
            "see to that, or choose another place."
        ) from error


def _refuse_to_replace(path: Path) -> None:
    """Anything at `path` but a model, and a model with other files beside its own."""
    if not os.path.lexists(path):
        return
    cause: Exception | None = None
    try:
        if path.is_dir() and set(os.listdir(path)) <= {MANIFEST, WEIGHTS}:
            read_manifest(path)
            return
    except (OSError, ModelFileError) as error:
        cause = error
        system = error.__cause__ if isinstance(error, ModelFileError) else error
        if isinstance(system, OSError) and not isinstance(system, FileNotFoundError):
            raise ModelFileError(
                f"{path} exists and cannot be read ({system.strerror}), so it is not replaced; see to that, or choose "
                "another path."
            ) from system
    raise ModelFileError(
        f"{path} exists and is not an intact model, which could be replaced; remove it or choose another path."
    ) from cause


def _write(file: Path, data: bytes) -> None:
    with open(file, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_directory(directory: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):  # not on Windows, which cannot open one
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
                raise
        finally:
            os.close(handle)


def _put_in_place(temporary: Path, path: Path) -> None:
    """Renames a complete directory to `path`, where a model may be.

    One directory cannot be renamed onto another that is not empty, so the old one is set aside first; should the
    machine stop right then, `directory_of` finds it there.
    """
    previous = _previous(path)
    replacing = path.exists()
    moved = False
    if replacing:
        if previous.exists():
            _discard(previous)  # left by a save that stopped after it was no longer needed
        os.rename(path, previous)
    try:
        os.rename(temporary, path)
        moved = True
        _flush_directory(path.parent)
    except BaseException:
        if moved:
            os.rename(path, temporary)
        if replacing:
            os.rename(previous, path)
        raise
    with contextlib.suppress(OSError):  # the new model is in place; the next save tries again
        if previous.exists():
            _discard(previous)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _discard(directory: Path) -> None:
    """Removes a model directory, the manifest first so that what is left never loads, and nothing but its two files."""
    for name in (MANIFEST, WEIGHTS):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


# -- reading ----------------------------------------------------------------------------------------------------------


def directory_of(path: Path) -> Path:
    """The model at `path`, or the one it had before a save that stopped between its two renames."""
    try:
        if not os.path.lexists(path):
            if (_previous(path) / MANIFEST).is_file():
                return _previous(path)
            raise ModelFileError(f"There is no model at {path}; check the path.")
        if not path.is_dir():
            raise ModelFileError(f"{path} is not a directory, but a model is one; give the directory of {MANIFEST}.")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror or error}); check its permissions.") from error
    return path


def read_manifest(directory: Path) -> Json:
    """The manifest as it was written: complete, unaltered, of a format known here."""
    file = directory / MANIFEST
    data = _read(file, JSON_BYTES)
    try:
        manifest = parse_json(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except ValueError as error:
        raise ModelFileError(f"{file} is not the JSON that was written; {REPAIR}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ModelFileError(f"{file} is not a manifest of torchace; give the directory of a model that it saved.")
    version = manifest.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise ModelFileError(f"{file} has format {version}, newer than {FORMAT_VERSION}; update torchace to load it.")
    try:
        intact = manifest.get("sha256") == seal(manifest)
    except ValueError:  # 1e999 is read as infinity
        intact = False
    if not intact:
        raise ModelFileError(f"{file} was altered after it was written; {REPAIR}.")
    _check_fields(manifest, file)
    del manifest["sha256"]
    return manifest


def read_weights(directory: Path, manifest: Json) -> dict[str, Tensor]:
    """The tensors that the manifest lists, bit for bit."""
    file = directory / WEIGHTS
    expected = manifest["weights"]
    _check_size(file, manifest)
    data = _read(file, expected["bytes"])
    if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise ModelFileError(f"{file} does not have the size and SHA-256 that the manifest says; {REPAIR}.")
    try:
        tensors = {name: tensor.clone() for name, tensor in load_safetensors(data).items()}
    except Exception as error:  # safetensors' own, and what torch says of shapes and types
        raise ModelFileError(f"{file} is not a safetensors file that can be read; {REPAIR}.") from error
    if {name: listing(tensor) for name, tensor in tensors.items()} != manifest["tensors"]:
        raise ModelFileError(f"{file} holds other tensors than the manifest lists; {REPAIR}.")
    return tensors


def _check_size(file: Path, manifest: Json) -> None:
    """Refuses a file that says it has more bytes than its tensors take, before any of them is read."""
    try:
        sizes = [math.prod(t["shape"]) * getattr(torch, t["dtype"]).itemsize for t in manifest["tensors"].values()]
        fits = manifest["weights"]["bytes"] <= sum(sizes) + JSON_BYTES  # the names and shapes stand in the file too
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ModelFileError(f"{file} is listed with other bytes than its tensors take; {REPAIR}.")


def listing(tensor: Tensor) -> Json:
    """How the manifest lists a tensor."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _read(file: Path, limit: int) -> bytes:
    try:
        return read_bounded(file, limit)
    except FileNotFoundError as error:
        raise ModelFileError(f"There is no {file}, so the model is not complete; {REPAIR}.") from error
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or "too large"
        raise ModelFileError(f"{file} cannot be read ({why}); check its permissions, or {REPAIR}.") from error


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("A key stands twice in one object.")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON.")


def _check_fields(manifest: Json, file: Path) -> None:
    """The types of everything in a manifest, whoever wrote it."""
    wrong = [name for name, types in FIELDS.items() if name not in manifest or type(manifest[name]) not in types]
    if len(manifest) > len(FIELDS) + 1:  # the SHA-256 is the one more
        wrong.append("set of fields")
    if not wrong:
        weights, alpha, names = manifest["weights"], manifest["member_weights"], manifest["class_names"]
        valid = {
            "format_version": manifest["format_version"] >= 1,
            "num_members": manifest["num_members"] >= 1,
            "diversity": manifest["diversity"] is None or 0 <= manifest["diversity"] <= 1,
            "class_names": all(type(name) is str for name in names or ()),
            "weights": {key: type(value) for key, value in weights.items()} == {"bytes": int, "sha256": str},
            "member_weights": alpha is None
            or (
                {key: type(value) for key, value in alpha.items()} == {"dtype": str, "values": list}
                and all(type(value) is float for value in alpha["values"])
            ),
        }
        wrong = [name for name, holds in valid.items() if not holds]
    if wrong:
        raise ModelFileError(f"{file} has no valid {', '.join(wrong)}; {REPAIR}.")
