"""Build networks from a configuration and a seed; all λ of a seed share initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from torchace.lab.data import Dataset
from torchace.lab.schema.axes import AXES
from torchace.lab.schema.experiment import Arm, ModelSection, TrainSection
from torchace.lab.sweeps.components import Components
from torchace.lab.sweeps.factories import Factory
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.memory import check_memory, count_parameters
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.tasks import TASKS
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC

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

    Compiling takes 0.4 s a layer and saves 30 µs a layer and step (eight ResNet-110, H200).
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
    """Return how each call of a network's forward is computed for all members: (layer, function, how)."""
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
