"""Model directories: `weights.safetensors`, and a manifest with the SHA-256 of the weights and of itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import PARTIAL, StrPath, fsync_directory, is_unchanged, read_json, with_checksum, write_atomic

Json = dict[str, Any]

FORMAT = "torchace model"
FORMAT_VERSION = 2
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
REPAIR = "copy or save the model again"


class ModelFileError(ValueError):
    """A model directory cannot be written or loaded; the message gives the reason and what to do."""


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors; copies, because safetensors refuses tensors that share memory."""
    return save_safetensors(
        {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    )


def write_model(path: StrPath, manifest: Json, weights: bytes) -> None:
    """Write a model directory under a temporary name and rename it; a model or an empty directory is replaced."""
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not _is_replaceable(path):
        raise ModelFileError(f"{path} exists and is not a model, so it is kept; remove it or choose another path.")
    header = {"format": FORMAT, "format_version": FORMAT_VERSION}
    content = with_checksum({**header, **manifest, "weights_sha256": hashlib.sha256(weights).hexdigest()})
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    previous = path.with_name(f".{path.name}.{os.getpid()}.previous")
    for stale in (temporary, previous):  # of a killed process with the same id
        shutil.rmtree(stale, ignore_errors=True)
    try:
        write_atomic(temporary / WEIGHTS, weights)
        write_atomic(temporary / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())
        if path.exists():  # a directory cannot be renamed onto another
            os.rename(path, previous)
        os.rename(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise ModelFileError(
            f"The model could not be saved as {path} ({error.strerror}); fix the cause, or choose another path."
        ) from error
    finally:
        if previous.exists() and not path.exists():  # also after Ctrl-C
            os.rename(previous, path)
        for rest in (temporary, previous):
            shutil.rmtree(rest, ignore_errors=True)


def _is_replaceable(path: Path) -> bool:
    """Whether a directory is empty, or holds a model of any version and nothing else."""
    names = set(os.listdir(path)) if path.is_dir() else None
    if names != {MANIFEST, WEIGHTS}:
        return names == set()
    try:
        manifest = read_json(path / MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def read_manifest(directory: StrPath) -> Json:
    """Read a complete, unaltered manifest of a known format."""
    file = Path(directory) / MANIFEST
    try:
        manifest = read_json(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelFileError(f"There is no model at {directory}; give the directory that holds {MANIFEST}.") from error
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read ({error.strerror}); check its permissions.") from error
    except ValueError as error:
        raise ModelFileError(f"{file} is not valid JSON; {REPAIR}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ModelFileError(f"{file} is not a manifest of torchace; give the directory of a model that it saved.")
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        remedy = "update torchace" if is_newer else "save or train the model again"
        raise ModelFileError(f"{file} has format {version}, but {FORMAT_VERSION} is needed; {remedy}.")
    if not is_unchanged(manifest):
        raise ModelFileError(f"{file} was altered after it was written; {REPAIR}.")
    return manifest


def read_weights(directory: StrPath, manifest: Json) -> dict[str, Tensor]:
    """Read the tensors of a model, bit for bit."""
    file = Path(directory) / WEIGHTS
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read ({error.strerror}); {REPAIR}.") from error
    if hashlib.sha256(data).hexdigest() != manifest["weights_sha256"]:
        raise ModelFileError(f"{file} does not have the SHA-256 in the manifest; {REPAIR}.")
    try:
        return {name: tensor.clone() for name, tensor in load_safetensors(data).items()}
    except SafetensorError as error:
        raise ModelFileError(f"{file} is not a valid safetensors file; {REPAIR}.") from error
