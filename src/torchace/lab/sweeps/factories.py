"""Ensembles from a user's factory: a function that returns one member, or a whole ensemble."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchace.lab.data import hashed_key
from torchace.lab.data.inputs import as_arguments, input_tensors
from torchace.lab.data.rng import use_seed
from torchace.lab.schema.experiment import BRANCH_AT, ModelSection
from torchace.lab.sweeps.components import object_name
from torchace.lab.sweeps.config import ConfigError
from torchace.lab.training.memory import count_parameters
from torchace.nn import Ensemble, adapt, stack_classifiers
from torchace.nn.architecture import check_layers, check_one_architecture
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.members import take_logits


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
        """Build one ensemble a seed, all of one architecture; `check` gets the number of parameters of all of them."""
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
    raise ConfigError(
        f"Expected {num_outputs} outputs of the module of {factory.name}, one for each class or target, but it has "
        f"{shape[1]}. Change its last layer, number the classes from 0 without gaps, or set num_classes."
    )
