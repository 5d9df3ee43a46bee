"""Read experiments from TOML; versions and hardware for result files."""

from __future__ import annotations

import copy
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import torchace
from torchace._files import TOML_BYTES, check_depth, read_bounded
from torchace.lab.schema.experiment import Experiment
from torchace.lab.schema.reading import describe_error, did_you_mean


class ConfigError(ValueError):
    """Invalid configuration; one sentence with the key, the reason and the remedy."""


def builtin_names() -> list[str]:
    """Return the names of the built-in experiments."""
    folder = resources.files("torchace.lab.experiments")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_experiment(
    source: str = "digits", overrides: Sequence[str] = (), *, seeds: Sequence[int] | None = None
) -> Experiment:
    """Load a built-in experiment by name, or a TOML file by path.

    Args:
        source: A name or a path.
        overrides: Strings `section.key=value` with a TOML value: `train.epochs=5`, `sweep.diversities=[0, 0.5]`.
        seeds: Seeds that replace those in the file.
    """
    name, text = _read_source(source)
    try:
        content = _parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid TOML: {str(error).rstrip('.')}.") from error
    content.setdefault("name", name)
    for override in overrides:
        _override(content, override)
    if seeds is not None:
        sweep = content.setdefault("sweep", {})
        if isinstance(sweep, dict):  # else validation fails below
            sweep["seeds"] = list(seeds)
    return parse_experiment(content, source)


def parse_experiment(content: Mapping[str, Any], where: str = "The configuration") -> Experiment:
    """Return an experiment from parsed TOML."""
    try:
        check_depth(content)
    except ValueError as error:
        raise ConfigError(f"{where}: sections are {error}.") from error
    try:
        return Experiment.model_validate(copy.deepcopy(dict(content)))
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_error(error, Experiment)}") from error


def _read_source(source: str) -> tuple[str, str]:
    if source in builtin_names():
        return source, (resources.files("torchace.lab.experiments") / f"{source}.toml").read_text("utf-8")
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        raise ConfigError(
            f"Expected an experiment out of {', '.join(builtin_names())} or the path of a TOML file, "
            f"but got {source!r}.{did_you_mean(source, builtin_names())}"
        )
    try:
        text = read_bounded(path, TOML_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"Cannot read the experiment {path}: {reason}.") from error
    return re.sub(r"[^a-z0-9_]+", "_", path.stem.lower())[:40] or "experiment", text


def _parse_toml(text: str) -> dict[str, Any]:
    # tomllib takes quadratic time in the number of dots of a key
    if sum(line.count(".") ** 2 for line in text.splitlines()) > 10**7:
        raise ValueError("a key has too many parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"Expected --set section.key=value, but got {override!r}.")
    try:
        parsed = _parse_toml(f"value = {value}")
    except ValueError:
        parsed = {"value": value.strip()}  # a bare word: --set model.kind=smoc
    if len(parsed) != 1:
        raise ConfigError(f"Expected one value in --set section.key=value, but got {override!r}.")
    section = content
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"Expected --set section.key=value, but {part!r} in {override!r} is not a section.")
    section[parts[-1]] = parsed["value"]
    if parts in (["train", "epochs"], ["train", "steps"]):  # one length replaces the other
        section.pop("steps" if parts[1] == "epochs" else "epochs", None)


PACKAGES = ("torch", "numpy", "safetensors", "torchmetrics", "scikit-learn")


@cache
def versions() -> dict[str, str]:
    """Return the versions of torchace, Python and `PACKAGES`."""
    installed = {"torchace": torchace.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def hardware(device: str) -> dict[str, Any]:
    """Return the device, the processor and the number of threads."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return {"device": name, "cpu": processor(), "threads": torch.get_num_threads()}


def processor() -> str:
    """Return the processor's name, or its architecture if unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
