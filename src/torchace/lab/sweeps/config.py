"""Read experiments from TOML; the objects they name, versions and hardware.

Objects are the member's factory, data, optimizer, metrics and transform. A TOML file names them
(`package.module:function`) and they are imported; `torchace.sweep` gets them from Python.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import platform
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import torchace
from torchace.lab.report.formats import TASKS
from torchace.lab.schema.experiment import OPTIMIZERS, Arm, Experiment
from torchace.lab.schema.reading import describe_error, did_you_mean
from torchace.lab.sweeps.fingerprint import object_name, source_digest


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
        content = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid TOML: {str(error).rstrip('.')}.") from error
    content.setdefault("name", name)
    for override in overrides:
        _override(content, override)
        _check_arms(content, override)
    if seeds is not None:
        _override(content, f"sweep.seeds={list(seeds)}")
    return parse_experiment(content, source)


def parse_experiment(content: Mapping[str, Any], where: str = "The configuration") -> Experiment:
    """Return an experiment from parsed TOML."""
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
            f"Expected one of the experiments {', '.join(builtin_names())}, or the path of a TOML file, "
            f"but got {source!r}.{did_you_mean(source, builtin_names())}"
        )
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"Cannot read the experiment {path}: {reason}.") from error
    return re.sub(r"[^a-z0-9_]+", "_", path.stem.lower())[:40] or "experiment", text


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    *sections, name = [part.strip() for part in key.split(".")]
    if not equals or not all([*sections, name]):
        raise ConfigError(f"Expected --set section.key=value, but got {override!r}.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        parsed = value.strip()  # a bare word: --set model.kind=smoc
    for known, field in Experiment.model_fields.items():
        if key not in Experiment.model_fields and key in getattr(field.annotation, "model_fields", ()):
            raise ConfigError(f"There is no key {key!r}. Did you mean '{known}.{key}'?")
    section = content
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"Expected --set section.key=value, but {part!r} in {override!r} is not a section.")
    section[name] = parsed
    if sections == ["train"] and name in ("epochs", "steps"):  # one length replaces the other
        section.pop("steps" if name == "epochs" else "epochs", None)


def _check_arms(content: dict[str, Any], override: str) -> None:
    """Refuse an override without effect, because every arm has a value of its own."""
    section, _, key = override.partition("=")[0].replace(" ", "").partition(".")
    arms, name = content.get("arms"), key.partition(".")[0]
    if not key or not isinstance(arms, list) or not arms:
        return
    own = [arm.get(section) for arm in arms if isinstance(arm, dict)]
    if len(own) == len(arms) and all(isinstance(values, dict) and name in values for values in own):
        raise ConfigError(
            f"--set {override} has no effect: every arm sets {section}.{name} itself. Change the arms in a TOML file."
        )


@cache
def versions() -> dict[str, str]:
    """Return the versions of torchace, Python and the main packages."""
    packages = ("torch", "numpy", "safetensors", "torchmetrics", "scikit-learn")
    installed = {"torchace": torchace.__version__, "python": platform.python_version()}
    return installed | {package: metadata.version(package) for package in packages}


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


@dataclass(frozen=True)
class Components:
    """Objects of one arm; None where the built-in network, data set or optimizer is used."""

    member: Callable[..., Any] | None = None  # called with `model.arguments`, returns a module
    data: Any = None  # (train, test) or (train, validation, test), or a function of `data.arguments` that returns them
    optimizer: Callable[..., Any] | None = None  # called with parameters, `lr` and `optimizer_arguments`
    metrics: tuple[Any, ...] = ()  # functions of logits (K, N, C) and target, or torchmetrics metrics
    transform: Callable[..., Any] | None = None  # function of a batch of inputs, on the device

    @classmethod
    def load(cls, arm: Arm) -> Components:
        """Import the objects that an arm names."""
        model, data, train = arm.model, arm.data, arm.train
        found = cls(
            member=None if model.factory is None else import_object(model.factory, "model.factory"),
            data=None if data.factory is None else import_object(data.factory, "data.factory"),
            optimizer=None if train.optimizer in OPTIMIZERS else import_object(train.optimizer, "train.optimizer"),
            metrics=tuple(import_object(name, "train.metrics") for name in train.metrics),
            transform=None if data.transform is None else import_object(data.transform, "data.transform"),
        )
        check_arguments(found.member, model.arguments, "model.arguments")
        check_arguments(found.data, data.arguments, "data.arguments")
        return found

    def modules(self) -> set[str]:
        """Return the names of the modules that define the objects."""
        data = self.data if isinstance(self.data, tuple) else (self.data,)
        objects = [self.member, self.optimizer, self.transform, *self.metrics, *data]
        return {object_name(value).partition(":")[0] for value in objects if value is not None}

    def fingerprint(self) -> dict[str, Any]:
        """Return the name and a hash of the source of every function, for the run directory."""
        functions = {"member": self.member, "optimizer": self.optimizer, "transform": self.transform}
        if callable(self.data):
            functions["data"] = self.data
        functions |= {f"metrics.{metric_name(metric)}": metric for metric in self.metrics}
        return {
            key: {"name": object_name(function), "sha256": source_digest(function)}
            for key, function in functions.items()
            if function is not None
        }


def import_object(name: str, key: str) -> Any:
    """Import `package.module:function` from the current directory or an installed package.

    This runs the module's code. `key` is the setting that names the object, for errors.
    """
    module_name, _, path = name.partition(":")
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the module's own code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{key}: there is no module {missing!r} in the current directory or among the installed packages."
            ) from None
        raise ConfigError(f"{key}: cannot import {module_name}: {type(error).__name__}: {error}.") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: there is no {path!r} in {module_name}.{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}: expected {name} to be a function or a class, but it is {type(found).__name__}.")
    return found


def check_arguments(function: Callable[..., Any] | None, arguments: Mapping[str, Any], key: str) -> None:
    """Refuse arguments that do not fit a function's signature."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # None, or a built-in function without a signature
        return
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"Expected {key} to be a dict, but got {arguments!r}.")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = object_name(function).partition(":")[2]
        raise ConfigError(f"{key}: expected arguments of {name}{signature}, but {error}.") from None


def metric_name(metric: Any) -> str:
    """Return the name of a metric in results: of its function or class, in lower case with underscores."""
    name = object_name(metric).rpartition(":")[2].rpartition(".")[2]
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return re.sub(r"\W", "", separated) or "metric"


def named_metrics(metrics: Sequence[Any], task: str) -> dict[str, Any]:
    """Return a user's metrics by name; refuse classes and the names of built-in metrics."""
    named: dict[str, Any] = {}
    for metric in metrics:
        name = metric_name(metric)
        if isinstance(metric, type):
            raise ConfigError(f"metrics: expected a function or a metric object, but got the class {metric.__name__}.")
        if name in TASKS[task].metrics:
            raise ConfigError(f"metrics: {name!r} is the name of a built-in metric; rename the function.")
        number = 1 + sum(known.partition("#")[0] == name for known in named)
        named[name if number == 1 else f"{name}#{number}"] = metric
    return named
