"""Ensembles of fully connected networks on vectors: what estimators, searches and `torchace fit` train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from torchace.lab.data import Batches, Split
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.early_stopping import ValidationSet, validation_losses
from torchace.lab.training.loop import CheckpointPolicy, Failure, FitResult, Progress, fit
from torchace.lab.training.memory import check_memory, count_parameters
from torchace.lab.training.objective import LINKS, mean_over_samples
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.seeding import torch_seed
from torchace.models import mlp
from torchace.nn import Ensemble, StackedEnsemble

LOSSES = {"classification": "ace", "regression": "ncl"}


@dataclass(frozen=True)
class MemberPlan:
    """What an ensemble on vectors is made of and how it is trained; λ and the seed are not part of it.

    Inputs are expected with a mean of about 0 and a deviation of about 1, and so are the targets of a regression.
    """

    task: str  # "classification" or "regression"
    num_members: int = 10
    hidden: tuple[int, ...] = (64,)
    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    schedule: str | None = None  # "constant" or "cosine"; None: cosine, or constant where training may stop early
    batches: str = "shared"
    label_smoothing: float = 0.0
    patience: int | None = None  # epochs without improvement on held-out samples; None trains to the end
    precision: str = "float64"

    def train_config(self, num_samples: int) -> TrainConfig:
        """How so many samples are trained on."""
        return TrainConfig(
            steps=self.epochs * self.steps_per_epoch(num_samples),
            loss=LOSSES[self.task],
            batches=self.batches,
            optimizer="adamw",
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            schedule=self.schedule or ("cosine" if self.patience is None else "constant"),
            label_smoothing=self.label_smoothing,
            precision=self.precision,
        )

    def steps_per_epoch(self, num_samples: int) -> int:
        """Samples that fit in one batch are one; otherwise batches of equal size, so that none is left out for long."""
        return math.ceil(num_samples / self.batch_size)


@dataclass(frozen=True)
class Trained:
    """Runs that were trained together, in the order of the λ and seeds they were asked for."""

    plan: MemberPlan
    train_config: TrainConfig
    network: RunGroup
    fitted: FitResult

    def failure(self, run: int) -> Failure | None:
        """Why a run was stopped, if it was."""
        return self.fitted.failures.get(run)

    def scores(self, split: Split) -> list[float]:
        """The ensembles' cross entropies or squared errors on a split; Inf for runs that failed."""
        return self.scores_of(self.losses(split), split)

    def losses(self, split: Split) -> torch.Tensor:
        """The ensembles' cross entropies or squared errors on every sample of a split, `(R, N)`."""
        return validation_losses(self.network, split, self.train_config)

    def scores_of(self, losses: torch.Tensor, split: Split) -> list[float]:
        """`scores` from `losses`."""
        values = mean_over_samples(losses, split.weight).tolist()
        return [v if r not in self.fitted.failures and math.isfinite(v) else math.inf for r, v in enumerate(values)]

    def ensemble(self, run: int) -> StackedEnsemble:
        """One run's ensemble, by itself."""
        ensemble = cast(StackedEnsemble, self.network.ensemble(run))
        ensemble.link = LINKS[self.train_config.loss]
        return ensemble


def train_members(
    plan: MemberPlan,
    train: Split,
    num_outputs: int,
    *,
    diversities: Sequence[float],
    seeds: Sequence[int],
    validation: Split | None = None,
    network: RunGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mean_weight: float | None = None,
    checkpoint_policy: CheckpointPolicy | None = None,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Trains runs that differ in λ and seed alone as one run group.

    Args:
        plan: What is trained, and how.
        train: Vectors `(N, D)` on the device, of the plan's precision, with class indices `(N,)` or targets `(N, M)`.
        num_outputs: Classes, or targets of a regression.
        diversities: λ of each run.
        seeds: The seed of each run: it decides the initial weights and the order of the samples.
        validation: What early stopping looks at; needed where the plan has a patience.
        network: One that was trained before, to go on with.
        optimizer: The one that trained it.
        mean_weight: See `fit`.
        checkpoint_policy: Where and how often the state is saved.
        watch: Is told about progress.
        stop: Is asked before every step.

    Example:
        >>> x = torch.randn(64, 2, dtype=torch.float64)
        >>> plan = MemberPlan("classification", num_members=3, hidden=(8,), epochs=20)
        >>> trained = train_members(plan, Split(x, (x[:, 0] > 0).long()), 2, diversities=[0.0, 0.5], seeds=[1, 1])
        >>> len(trained.scores(Split(x, (x[:, 0] > 0).long()))), trained.ensemble(1)
        (2, StackedEnsemble(
          num_members=3, link='softmax'
          ...
        ))
    """
    if plan.patience is not None and validation is None:
        raise ValueError("Expected held-out samples `validation` for a plan with `patience`, but got none.")
    train_config = plan.train_config(len(train))
    if network is None:
        network = new_run_group(plan, train.x.shape[1], num_outputs, seeds).to(train.x.device)
    held_out = None if plan.patience is None or validation is None else ValidationSet(validation, plan.patience)
    size = len(train) // plan.steps_per_epoch(len(train))
    fitted = fit(
        network,
        Batches(train, size, dtype=train_config.dtype),
        train_config,
        diversities=diversities,
        seeds=seeds,
        validation=held_out,
        optimizer=optimizer,
        mean_weight=mean_weight,
        checkpoint_policy=checkpoint_policy,
        on_progress=watch,
        stop=stop,
    )
    return Trained(plan, train_config, network, fitted)


def new_run_group(plan: MemberPlan, num_features: int, num_outputs: int, seeds: Sequence[int]) -> RunGroup:
    """The runs of these seeds; initial weights depend on the seed and the member alone."""
    dtype = torch.float64 if plan.precision == "float64" else torch.float32
    with torch.device("meta"):
        member = count_parameters(mlp(num_features, plan.hidden, num_outputs))
    check_memory(len(seeds) * plan.num_members * member, dtype)
    runs = []
    for seed in seeds:
        members = []
        for k in range(plan.num_members):
            with torch_seed(seed, "member", k):
                members.append(mlp(num_features, plan.hidden, num_outputs).to(dtype))
        runs.append(Ensemble(members, link=LINKS[LOSSES[plan.task]]))
    return RunGroup(runs)
