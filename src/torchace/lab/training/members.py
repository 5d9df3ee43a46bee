"""Training of fully connected ensembles on vectors, for estimators, searches and `torchace fit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchace.lab.data import Batches, Split, hashed_key
from torchace.lab.data.rng import use_seed
from torchace.lab.schema.hyperparameters import Hyperparameters
from torchace.lab.schema.results import Failure
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.evaluate import ValidationSet, validation_losses
from torchace.lab.training.loop import FitResult, fit
from torchace.lab.training.run_group import RunGroup, check_memory, chunk_rows, count_parameters
from torchace.lab.training.scaling import scale_inputs
from torchace.lab.training.tasks import TASKS, mean_over_samples
from torchace.models import mlp
from torchace.nn import Ensemble, StackedEnsemble, adapt
from torchace.nn.base import EnsembleModule


@dataclass(frozen=True)
class MemberPlan:
    """Architecture and training of an ensemble on encoded vectors, without λ and seed."""

    task: str  # "classification" or "regression"
    num_members: int = 10
    members: str = "separate"  # or "shared", "shared_mini": one network with adapters for each member
    hidden: tuple[int, ...] = (64,)
    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    schedule: str | None = None  # None: cosine, or constant with early stopping
    batches: str = "shared"
    label_smoothing: float = 0.0
    patience: int | None = None  # epochs; None: no early stopping
    precision: str = "float64"
    encoding: str = "standard"  # otherwise, every input has a learned scale
    network: Callable[[int, int], nn.Module] | None = None  # a member from its numbers of inputs and outputs

    @property
    def has_shared_weights(self) -> bool:
        """Whether members share weights, so that every sample trains all of them."""
        return self.members != "separate"

    @property
    def has_temperature(self) -> bool:
        """Whether the model has a temperature, fitted on the samples that stop its training."""
        return self.patience is not None and self.task != "regression"

    def ensemble(self, num_features: int, num_outputs: int, seed: int, diversity: float = 0.0) -> EnsembleModule:
        """Return a new ensemble; initial weights depend only on the seed and the member's index."""
        dtype, link = self.train_config(1).dtype, TASKS[self.task].link
        if self.has_shared_weights:
            layers = "first" if self.members == "shared_mini" else None
            with use_seed(hashed_key(seed, "member", 0)):
                network = (self._mlp if self.network is None else self.member)(num_features, num_outputs)
                return adapt(network, self.num_members, layers=layers, link=link).to(dtype)
        members = []
        for k in range(self.num_members):
            with use_seed(hashed_key(seed, "member", k)):
                members.append(self.member(num_features, num_outputs, diversity).to(dtype))
        return Ensemble(members, link=link)

    def member(self, num_features: int, num_outputs: int, diversity: float = 0.0) -> nn.Module:
        """Return a new member with its own weights."""
        if self.network is not None:
            network = self.network(num_features, num_outputs)
            if not isinstance(network, nn.Module):
                raise TypeError(f"Expected `network` to return a module, but got {type(network).__name__}.")
            return network
        network = self._mlp(num_features, num_outputs)
        return network if self.encoding == "standard" else scale_inputs(network, diversity)

    def _mlp(self, num_features: int, num_outputs: int) -> nn.Sequential:
        return mlp(num_features, self.hidden, num_outputs)

    @classmethod
    def from_hyperparameters(cls, task: str, values: Hyperparameters) -> MemberPlan:
        """Plan of checked hyperparameters."""
        names = [field.name for field in fields(cls) if field.name in Hyperparameters.model_fields]
        return cls(task, **{name: getattr(values, name) for name in names})

    def train_config(self, num_samples: int) -> TrainConfig:
        """Training configuration for `num_samples` samples."""
        return TrainConfig(
            steps=self.epochs * self.steps_per_epoch(num_samples),
            task=self.task,
            batches=self.batches,
            optimizer="adamw",
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            schedule=self.schedule or ("cosine" if self.patience is None else "constant"),
            label_smoothing=self.label_smoothing,
            precision=self.precision,
        )

    def steps_per_epoch(self, num_samples: int) -> int:
        """Number of batches of equal size, at most `batch_size`, that cover the samples."""
        return math.ceil(num_samples / self.batch_size)


@dataclass(frozen=True)
class TrainedGroup:
    """Runs that were trained together, in the order of their λ and seeds."""

    plan: MemberPlan
    train_config: TrainConfig
    network: RunGroup
    fitted: FitResult

    def failure(self, run: int) -> Failure | None:
        """Failure of a run, or None."""
        return self.fitted.failures.get(run)

    @torch.no_grad()
    def logits(self, run: int, x: Tensor) -> Iterator[Tensor]:
        """Members' logits or predictions in chunks, `(K, n, C)`, in float64 on the CPU."""
        ensemble = self.ensemble(run).eval()
        for part in x.split(chunk_rows(ensemble, ensemble.num_members, itemsize=x.itemsize)):
            yield ensemble(part).double().cpu()

    def losses(self, split: Split, temperature: Sequence[float] | None = None) -> Tensor:
        """Each ensemble's cross entropy or squared error on every sample of a split, `(R, N)`."""
        return validation_losses(self.network, split, self.train_config, temperature=temperature)

    def scores(self, split: Split, losses: Tensor | None = None) -> list[float]:
        """Weighted means of `losses` over a split; Inf for failed runs."""
        losses = self.losses(split) if losses is None else losses
        values = mean_over_samples(losses, split.weight).tolist()
        return [v if r not in self.fitted.failures and math.isfinite(v) else math.inf for r, v in enumerate(values)]

    def ensemble(self, run: int) -> StackedEnsemble:
        """Ensemble of one run, separated from the group."""
        ensemble = cast(StackedEnsemble, self.network.ensemble(run))
        ensemble.link = TASKS[self.plan.task].link
        return ensemble


def train_members(
    plan: MemberPlan,
    train: Split,
    num_outputs: int,  # C or M
    *,
    diversities: Sequence[float],
    seeds: Sequence[int],
    validation: Split | None = None,
    left_out: Tensor | None = None,  # (K, N): members that predict each validation sample; None: all
    network: RunGroup | None = None,  # to train further
    **options: Any,
) -> TrainedGroup:
    """Train runs that differ only in λ and seed as one run group.

    `train` has vectors `(N, D)` on the device, in the plan's precision, and class indices `(N,)` or targets `(N, M)`.
    The seed determines initial weights and sample order. `options` are passed to `fit`.
    """
    if plan.patience is not None and validation is None:
        raise ValueError("Expected `validation` samples for a plan with `patience`, but got None.")
    train_config = plan.train_config(len(train))
    if network is None:
        network = new_run_group(plan, train.x.shape[1], num_outputs, seeds, diversities).to(train.x.device)
    validation_set = None
    if plan.patience is not None and validation is not None:
        validation_set = ValidationSet(validation, plan.patience, left_out)
    batches = Batches(train, len(train) // plan.steps_per_epoch(len(train)), dtype=train_config.dtype)
    fitted = fit(
        network, batches, train_config, diversities=diversities, seeds=seeds, validation=validation_set, **options
    )
    return TrainedGroup(plan, train_config, network, fitted)


def new_run_group(
    plan: MemberPlan, num_features: int, num_outputs: int, seeds: Sequence[int], diversities: Sequence[float]
) -> RunGroup:
    """Return untrained runs."""
    with torch.device("meta"):
        parameters = count_parameters(plan.member(num_features, num_outputs))
    networks = len(seeds) * (1 if plan.has_shared_weights else plan.num_members)
    check_memory(networks * parameters, plan.train_config(1).dtype)
    runs = zip(seeds, diversities, strict=True)
    return RunGroup([plan.ensemble(num_features, num_outputs, seed, diversity) for seed, diversity in runs])
