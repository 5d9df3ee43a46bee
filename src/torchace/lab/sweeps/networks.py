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
    """A user's function with the section that says how to use it."""

    function: Callable[..., Any]
    model: ModelSection
    link: str
    is_checked: bool = True  # whether to compare the architectures of its modules

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return object_name(self.function).partition(":")[2]

    def ensembles(self, seeds: Sequence[int], check: Callable[[int], None] = lambda parameters: None) -> list[Any]:
        """Build one ensemble per seed, all of one architecture; `check` receives their total number of parameters."""
        built: dict[int, tuple[EnsembleModule, nn.Module]] = {}
        for seed in dict.fromkeys(seeds):
            built[seed] = self._ensemble(seed, lambda parameters: check(parameters * len(seeds)))
        self._check_members([module for _, module in built.values()])
        return [built[seed][0] for seed in seeds]

    def _ensemble(self, seed: int, check: Callable[[int], None]) -> tuple[EnsembleModule, nn.Module]:
        """Build the ensemble of a seed; return it with the module of the factory's first call."""
        model, link = self.model, self.link
        if model.kind == "separate":
            members: list[nn.Module] = []
            for k in range(model.num_members):
                with use_seed(hashed_key(seed, "member", k)):
                    members.append(self.module())
                if k == 0:
                    check(count_parameters(members[0]) * model.num_members)
            self._check_members(members)
            self._warn_if_equal(members)
            return Ensemble(members, link=link), members[0]
        with use_seed(hashed_key(seed, "ensemble", 0)):
            first = self.module(ensembles=True)
            check(count_parameters(first))
            return self._share(first), first

    def _warn_if_equal(self, members: list[nn.Module]) -> None:
        """Warn about members that start with the same weights: on shared batches they stay equal."""
        pairs = zip(members[0].parameters(), members[-1].parameters(), strict=True)
        if len(members) > 1 and all(torch.equal(a, b) for a, b in pairs):
            warnings.warn(
                f"All members of {self.name} start with the same weights: without dropout they stay equal on shared "
                "batches. Draw new weights inside the function, or use batches='exchanged'.",
                stacklevel=2,
            )

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
        options["adapter"] = model.adapter_kind
        options |= {} if model.rank is None else {"rank": model.rank}
        return adapt(module, num_members, link=link, **options)

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
            raise ConfigError(
                f"Expected {self.name} to return a module with weights, but it has lazy layers. Give their input "
                "sizes, or call the module with a sample inside the function."
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"Expected a module with parameters to train, but {self.name} returned one without any.")
        return module

    def _check_members(self, members: list[nn.Module]) -> None:
        if not self.is_checked:
            return
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
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


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
    shape = tuple(output.shape[1:]) if isinstance(module, EnsembleModule) else tuple(output.shape)
    if shape == (len(y), num_outputs) or (num_outputs == 1 and shape == (len(y),)):
        return
    if len(shape) != 2 or shape[0] != len(y):
        raise ConfigError(
            f"Expected the module of {factory.name} to return (N, {num_outputs}), here ({len(y)}, {num_outputs}), but "
            f"it returned {shape}."
        )
    remedy = ", number the classes from 0 without gaps, or set num_classes" if factory.link == "softmax" else ""
    raise ConfigError(
        f"Expected {num_outputs} output{'s' * (num_outputs != 1)} of the module of {factory.name}, one for each class "
        f"or target, but it has {shape[1]}. Change its last layer{remedy}."
    )


MIN_COMPILED_STEPS = 20_000
MAX_LAYERS = 1000  # in a report
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
    link = TASKS[arm.data.task].link
    if components is None or components.member is None:
        assert data is not None
        check_memory(_count_run_parameters(arm.model, data) * len(seeds), dtype, device)  # before building any
        factory = Factory(partial(_builtin, arm.model, data), arm.model, link, is_checked=False)
    else:
        factory = Factory(components.member, arm.model, link)
    ensembles = factory.ensembles(seeds, lambda parameters: check_memory(parameters, dtype, device))
    network = RunGroup(ensembles).to(device=device, dtype=dtype)
    if torch.device(device).type == "cuda" and arm.model.factory is None and arm.model.network == "resnet":
        network.to(memory_format=torch.channels_last)
    return network


def make_train_config(
    train: TrainSection, steps_per_epoch: int, task: str = "classification", components: Components | None = None
) -> TrainConfig:
    """Return the training section with epochs converted to steps, and with the optimizer of the components."""
    own = None if components is None else components.optimizer
    settings = train.model_dump(include=_COPIED)
    for name in AXES:  # each run has its own value of a list
        settings[name] = settings[name][0] if isinstance(settings[name], list) else settings[name]
    return TrainConfig(
        task=task,
        optimizer=train.optimizer if own is None else own,
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
    if model.kind == "smoc" and model.num_members > 1:
        name += f", {model.num_members} heads" + ("" if model.rank is None else f" of rank {model.rank}")
    if model.kind == "branch":
        name += f", branched at {model.at}"
    if model.kind == "adapters":
        name += f", {model.adapter_kind.replace('_', '-')} adapters" + (f" of rank {model.rank}" if model.rank else "")
    if model.head_scale != 1:
        name += f", initial head weights times {model.head_scale:.3g}"
    return name


def explain_network(network: RunGroup, x: Any) -> tuple[tuple[str, str, str], ...]:
    """Return, for each call in a network's forward, how it is computed for all members: (layer, function, how)."""
    network.eval().predict(x)
    network.train()
    stacks = {"trunk": network.trunk, "": network.members}
    rows: list[tuple[str, str, str]] = []
    for name, stack in stacks.items():
        if stack is not None:
            decision = stack.explain()
            rows += [(f"{name}.{layer}".strip("."), function, how) for layer, function, how in decision]
            if not decision.call_by_call:
                rows.append((name, "whole network", f"vmap: {decision.reason}"))
    return tuple(rows[:MAX_LAYERS])


def _network(model: ModelSection, data: Dataset, num_classes: int | None) -> nn.Module:
    if model.network == "mlp":
        return mlp(data.train.x[0].numel(), model.hidden, num_classes, dropout=model.dropout)
    assert data.image_shape is not None
    return cifar_resnet(model.depth, num_classes, width=model.width, in_channels=data.image_shape[0])


def _builtin(model: ModelSection, data: Dataset) -> nn.Module:
    """Return a built-in network: one member, or for SMOC the whole ensemble."""
    if model.kind != "smoc":
        network = _network(model, data, data.num_classes)
        _scale(network.get_submodule("fc"), model.head_scale)
        return network
    trunk = _network(model, data, None)
    features: int = trunk.num_features  # type: ignore[assignment]
    smoc = SMOC(trunk, features, data.num_classes, model.num_members, model.rank)
    _scale(smoc.head, model.head_scale)
    return smoc


def _count_run_parameters(model: ModelSection, data: Dataset) -> int:
    """Return a lower bound of one run's parameters without allocating them."""
    with torch.device("meta"):
        network = _builtin(model, data)
    if model.kind == "smoc":
        return count_parameters(network)
    if model.kind == "separate":
        return model.num_members * count_parameters(network)
    own = dict(network.named_modules()).get(model.at)  # at least this layer is separate for each member
    return count_parameters(network) + (0 if own is None else (model.num_members - 1) * count_parameters(own))


@torch.no_grad()
def _scale(head: nn.Module, scale: float) -> None:
    if scale != 1:
        for parameter in head.parameters():
            parameter.mul_(scale)
