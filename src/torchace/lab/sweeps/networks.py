"""Build networks from a configuration or a user's factory, and a seed; all λ of a seed share initial weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchace.lab.data import Dataset, hashed_key
from torchace.lab.data.rng import use_seed
from torchace.lab.data.splits import as_arguments, input_tensors
from torchace.lab.schema.experiment import BRANCH_AT, Arm, ModelSection, TrainSection
from torchace.lab.schema.values import AXES
from torchace.lab.sweeps.config import Components, ConfigError
from torchace.lab.sweeps.fingerprint import object_name
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.run_group import RunGroup, check_memory, count_parameters
from torchace.lab.training.tasks import TASKS
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble, adapt, stack_classifiers
from torchace.nn.architecture import check_layers, check_one_architecture
from torchace.nn.base import EnsembleModule, take_logits
from torchace.nn.branching import branch


@dataclass(frozen=True)
class Factory:
    """A function that returns modules, with the section that says how to use it."""

    function: Callable[..., Any]
    model: ModelSection
    link: str

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return object_name(self.function).partition(":")[2]

    def ensembles(self, seeds: Sequence[int], check_size: Callable[[int], None]) -> list[Any]:
        """Build one ensemble per seed, all of one architecture.

        `check_size` receives the number of parameters of all runs after the first module is built.
        """
        built: dict[int, tuple[EnsembleModule, nn.Module]] = {}
        for seed in dict.fromkeys(seeds):
            built[seed] = self._ensemble(seed, lambda parameters: check_size(parameters * len(seeds)))
        self._check_members([module for _, module in built.values()])
        return [built[seed][0] for seed in seeds]

    def _ensemble(self, seed: int, check_size: Callable[[int], None]) -> tuple[EnsembleModule, nn.Module]:
        """Build the ensemble of a seed; return it with the module of the factory's first call."""
        num_members = self.model.num_members
        if self.model.kind != "separate":
            with use_seed(hashed_key(seed, "ensemble", 0)):
                first = self.module(ensembles=True)
                check_size(count_parameters(first))
                return self._share(first), first
        members: list[nn.Module] = []
        for k in range(num_members):
            with use_seed(hashed_key(seed, "member", k)):
                members.append(self.module())
            if k == 0:
                check_size(count_parameters(members[0]) * num_members)
        self._check_members(members)
        pairs = zip(members[0].parameters(), members[-1].parameters(), strict=True)
        if num_members > 1 and all(torch.equal(a, b) for a, b in pairs):
            warnings.warn(
                f"All members of {self.name} start with the same weights: without dropout they stay equal on shared "
                "batches. Draw new weights inside the function, or use batches='exchanged'.",
                stacklevel=2,
            )
        return Ensemble(members, link=self.link), members[0]

    def _share(self, module: nn.Module) -> EnsembleModule:
        """Make an ensemble whose members share parts of a module, unless it is an ensemble."""
        model, link, num_members = self.model, self.link, self.model.num_members
        if isinstance(module, EnsembleModule):
            if module.num_members != num_members:
                raise ConfigError(
                    f"Expected {self.name} to return an ensemble of {num_members} members, but it has "
                    f"{module.num_members}. Set num_members."
                )
            module.link = link
            return module
        if model.kind == "smoc":
            return stack_classifiers(module, num_members, head=model.head, rank=model.rank, link=link)
        if model.kind == "branch":
            if model.at == BRANCH_AT and BRANCH_AT not in dict(module.named_modules()):
                raise ConfigError("kind = 'branch' needs `at`, the name of the first layer that each member has alone.")
            return branch(module, num_members, at=model.at, reinitialize=self.module, link=link)
        options = model.model_dump(include={"layers", "freeze", "head"})
        options |= {} if model.rank is None else {"rank": model.rank}
        return adapt(module, num_members, link=link, adapter=model.adapter_kind, **options)

    def module(self, ensembles: bool = False) -> nn.Module:
        """Call the function; refuse anything but a module."""
        try:
            module = self.function(**self.model.arguments)
        except Exception as error:
            raise ConfigError(f"The function {self.name} failed with {_describe(error)}") from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"Expected {self.name} to return a module (torch.nn.Module), but it returned {type(module).__name__}."
            )
        if isinstance(module, EnsembleModule) and not ensembles:
            raise ConfigError(
                f"Expected {self.name} to return one member, but it returned the ensemble {type(module).__name__}. "
                "Use kind='smoc' or kind='branch' for a function that returns an ensemble."
            )
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise ConfigError(f"The module of {self.name} has lazy layers without weights. Give their input sizes.")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"Expected a module with parameters to train, but {self.name} returned one without any.")
        return module

    def _check_members(self, members: list[nn.Module]) -> None:
        if len({id(member) for member in members}) < len(members):
            raise ConfigError(
                f"Expected {self.name} to return a new module at every call, but it returned the same one twice. "
                "Build the module inside the function."
            )
        members = [getattr(member, "stacked", member) for member in members]  # of a stacked ensemble
        try:
            check_layers(members)
            check_one_architecture(members)
        except ValueError as error:
            reason = str(error).partition(" Use Ensemble(members)")[0].rstrip(".")
            raise ConfigError(f"{reason}. All calls of {self.name} must return the same architecture.") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0] or 'no message'}"


def check_outputs(factory: Factory, x: Any, y: Tensor, num_outputs: int) -> None:
    """Refuse a member whose outputs for some samples are not logits `(N, C)` of the data's classes."""
    with use_seed(hashed_key(0, "member", 0)):
        module = factory.module(ensembles=True)
    module = copy.deepcopy(module).eval()
    dtype = next((t.dtype for t in input_tensors(x) if t.is_floating_point()), torch.float32)
    try:
        with torch.no_grad():
            output = module.to(dtype)(*as_arguments(getattr(module, "host", module), x))
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in input_tensors(x))
        raise ConfigError(f"The module of {factory.name} fails on inputs {shapes}: {_describe(error)}") from error
    try:
        output = take_logits(output, f"The module of {factory.name}")
    except TypeError as error:
        raise ConfigError(str(error)) from None
    shape = tuple(output.shape[1:] if isinstance(module, EnsembleModule) else output.shape)
    expected = (len(y), num_outputs)
    if shape != expected and not (num_outputs == 1 and shape == expected[:1]):
        hint = " Number the classes from 0 without gaps, or set num_classes." if factory.link == "softmax" else ""
        raise ConfigError(
            f"Expected the module of {factory.name} to return (N, {num_outputs}), here {expected}, one output for each "
            f"class or target, but it returned {shape}. Change its last layer.{hint}"
        )


MIN_COMPILED_STEPS = 20_000
# settings that TrainConfig takes unchanged
_COPIED = {field.name for field in fields(TrainConfig)} - {"steps", "optimizer", "milestones"}


def default_group_size(model: ModelSection, parameters: int, device: torch.device | str) -> int:
    """Return the default number of runs in a group; `parameters` are those of one run."""
    on_gpu = torch.device(device).type == "cuda"
    if model.factory is not None:  # weights, gradients and optimizer state: at most 4 GiB, or 16 GiB on a GPU
        return max(1, min(64, (2**30 if on_gpu else 2**28) // max(1, parameters)))
    if model.network == "mlp":
        return 64
    return 8 if on_gpu else 1  # a few convolutional runs fill a GPU, one fills a CPU's cache


def is_compiled(train: TrainSection, steps: int, device: torch.device | str) -> bool:
    """Whether to compile: as configured, or on a GPU where it saves time.

    Compiling takes 0.4 s per layer and saves 30 µs per layer and step (eight ResNet-110, H200).
    """
    if train.compile != "auto":
        return train.compile
    return torch.device(device).type == "cuda" and steps >= MIN_COMPILED_STEPS


def build_network(
    arm: Arm,
    data: Dataset | None,  # for built-in networks
    seeds: Sequence[int],
    device: torch.device | str,
    *,
    components: Components | None = None,
) -> RunGroup:
    """Build a run group; initial weights depend on seed and member alone."""
    dtype = torch.float64 if arm.train.precision == "float64" else torch.float32
    function = None if components is None else components.member
    factory = Factory(function or partial(_builtin, arm.model, data), arm.model, TASKS[arm.data.task].link)
    ensembles = factory.ensembles(seeds, lambda parameters: check_memory(parameters, dtype, device))
    network = RunGroup(ensembles).to(device=device, dtype=dtype)
    if torch.device(device).type == "cuda" and arm.model.factory is None and arm.model.network == "resnet":
        network.to(memory_format=torch.channels_last)
    return network


def make_train_config(
    train: TrainSection, steps_per_epoch: int, task: str = "classification", components: Components | None = None
) -> TrainConfig:
    """Return the training section with epochs converted to steps, and with the optimizer of the components."""
    settings = train.model_dump(include=_COPIED)
    for name in AXES:  # each run has its own value of a list
        settings[name] = settings[name][0] if isinstance(settings[name], list) else settings[name]
    return TrainConfig(
        task=task,
        optimizer=(components and components.optimizer) or train.optimizer,
        steps=train.steps if train.steps is not None else (train.epochs or 0) * steps_per_epoch,
        milestones=tuple(train.milestones),
        diversity_warmup_steps=round(train.diversity_warmup_epochs * steps_per_epoch),
        **settings,
    )


def describe_network(model: ModelSection, data: Dataset) -> str:
    """Return a short description for the report."""
    if model.factory is not None:
        arguments = ", ".join(f"{key}={value!r}" for key, value in model.arguments.items())
        name = f"{model.factory}({arguments})"
    elif model.network == "mlp":
        widths = (data.train.x[0].numel(), *model.hidden, data.num_classes)
        name = "MLP " + "-".join(str(width) for width in widths)
    else:
        name = f"ResNet-{model.depth}" + ("" if model.width == 16 else f" ({model.width} channels)")
    options = model.model_dump(include={"kind", "at", "rank", "adapter", "head_scale"}, exclude_defaults=True)
    return ", ".join([name, *(f"{key} {value}" for key, value in options.items())])


def _builtin(model: ModelSection, data: Dataset | None) -> nn.Module:
    """Return a built-in network: one member, or for SMOC the whole ensemble."""
    assert data is not None
    num_classes = None if model.kind == "smoc" else data.num_classes
    if model.network == "mlp":
        network: nn.Module = mlp(data.train.x[0].numel(), model.hidden, num_classes, dropout=model.dropout)
    else:
        assert data.image_shape is not None
        network = cifar_resnet(model.depth, num_classes, width=model.width, in_channels=data.image_shape[0])
    if model.kind == "smoc":
        features: int = network.num_features  # type: ignore[assignment]
        network = SMOC(network, features, data.num_classes, model.num_members, model.rank)
    _scale(network.get_submodule("head" if model.kind == "smoc" else "fc"), model.head_scale)
    return network


@torch.no_grad()
def _scale(head: nn.Module, scale: float) -> None:
    if scale != 1:
        for parameter in head.parameters():
            parameter.mul_(scale)
