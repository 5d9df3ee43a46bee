"""From a configuration and a seed to a network: the same weights for every λ of one seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torchace.lab.data import Dataset, hashed_key
from torchace.lab.schema.experiment import Arm, ModelSection, TrainSection
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.memory import check_memory, count_parameters
from torchace.lab.training.run_group import RunGroup
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch

STEPS_THAT_REPAY_COMPILING = 20_000


def default_group_size(model: ModelSection, device: torch.device | str) -> int:
    """How many runs to train as one network where the experiment does not say.

    Convolutions fill a GPU with a few runs, and the cache of a CPU with one.
    """
    if model.network == "mlp":
        return 64
    return 8 if torch.device(device).type == "cuda" else 1


def is_compiled(train: TrainSection, steps: int, device: torch.device | str) -> bool:
    """Whether a training of so many steps is compiled: as asked for, or on a GPU where it takes less time in all.

    Compiling takes about 0.4 s a layer and saves about 30 µs a layer and step (eight ResNet-110 on an H200).
    """
    if train.compile != "auto":
        return train.compile
    return torch.device(device).type == "cuda" and steps >= STEPS_THAT_REPAY_COMPILING


def build_network(arm: Arm, data: Dataset, seeds: Sequence[int], device: torch.device | str) -> RunGroup:
    """The runs of these seeds, with initial weights that depend on seed and member alone."""
    dtype = torch.float64 if arm.train.precision == "float64" else torch.float32
    check_memory(_parameters(arm.model, data) * len(seeds), dtype, device)
    ensembles = {seed: _ensemble(arm.model, data, seed) for seed in set(seeds)}
    network = RunGroup([ensembles[seed] for seed in seeds]).to(device=device, dtype=dtype)
    if torch.device(device).type == "cuda" and arm.model.network == "resnet":
        network.to(memory_format=torch.channels_last)
    return network


def make_train_config(train: TrainSection, steps_per_epoch: int) -> TrainConfig:
    """The training section with epochs turned into steps."""
    steps = train.steps if train.steps is not None else (train.epochs or 0) * steps_per_epoch
    return TrainConfig(
        steps=steps,
        batches=train.batches,
        optimizer=train.optimizer,
        learning_rate=train.learning_rate,
        momentum=train.momentum,
        nesterov=train.nesterov,
        weight_decay=train.weight_decay,
        schedule=train.schedule,
        milestones=tuple(train.milestones),
        decay=train.decay,
        warmup_steps=train.warmup_steps,
        warmup_learning_rate=train.warmup_learning_rate,
        diversity_warmup_steps=round(train.diversity_warmup_epochs * steps_per_epoch),
        label_smoothing=train.label_smoothing,
        detach_others=train.detach_others,
        precision=train.precision,
    )


def describe_network(model: ModelSection, data: Dataset) -> str:
    """The network in a few words, for the report."""
    inputs = data.train.x[0].numel()
    if model.network == "mlp":
        name = "MLP " + "-".join(str(width) for width in (inputs, *model.hidden, data.num_classes))
    else:
        name = f"ResNet-{model.depth}" + ("" if model.width == 16 else f" ({model.width} channels)")
    if model.kind == "smoc" and model.num_members > 1:
        heads = f"{model.num_members} heads" + ("" if model.rank is None else f" of rank {model.rank}")
        name += f", {heads}"
    if model.kind == "branch":
        name += f", branched at {model.at}"
    if model.head_scale != 1:
        name += f", head started at {model.head_scale:.3g} of its size"
    return name


def _network(model: ModelSection, data: Dataset, num_classes: int | None) -> nn.Module:
    if model.network == "mlp":
        return mlp(data.train.x[0].numel(), model.hidden, num_classes, dropout=model.dropout)
    return cifar_resnet(model.depth, num_classes, width=model.width, in_channels=data.image_shape[0])


def _members(model: ModelSection, data: Dataset, seed: int) -> list[nn.Module]:
    members = []
    for k in range(model.num_members):
        with _seeded(seed, "member", k):
            members.append(_scaled(_network(model, data, data.num_classes), model.head_scale))
    return members


def _ensemble(model: ModelSection, data: Dataset, seed: int) -> EnsembleModule:
    if model.kind == "separate":
        return Ensemble(_members(model, data, seed))
    with _seeded(seed, "ensemble", 0):
        if model.kind == "smoc":
            trunk = _network(model, data, None)
            features = int(trunk.num_features)  # type: ignore[arg-type]
            smoc = SMOC(trunk, features, data.num_classes, model.num_members, model.rank)
            _scaled(smoc, model.head_scale)
            return smoc

        def fresh() -> nn.Module:
            return _network(model, data, data.num_classes)

        return branch(fresh(), model.num_members, at=model.at, reinitialize=fresh)


def _parameters(model: ModelSection, data: Dataset) -> int:
    """How many parameters one run has at least, from networks that take no memory."""
    with torch.device("meta"):
        if model.kind == "smoc":
            trunk = _network(model, data, None)
            features = int(trunk.num_features)  # type: ignore[arg-type]
            return count_parameters(SMOC(trunk, features, data.num_classes, model.num_members, model.rank))
        network = _network(model, data, data.num_classes)
    if model.kind == "separate":
        return model.num_members * count_parameters(network)
    after = dict(network.named_modules()).get(model.at)  # branched there: this layer, if no other, is each member's own
    return count_parameters(network) + (0 if after is None else (model.num_members - 1) * count_parameters(after))


def _scaled(module: nn.Module, scale: float) -> nn.Module:
    """Multiplies the classifier's initial weights."""
    if scale != 1:
        head = module.head if isinstance(module, SMOC) else module.get_submodule("fc")
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(scale)
    return module


@contextmanager
def _seeded(seed: int, purpose: str, index: int) -> Iterator[None]:
    """Draws inside depend on these alone, and leave torch's own random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hashed_key(seed, purpose, index))
        yield
