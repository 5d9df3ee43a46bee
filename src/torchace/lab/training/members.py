"""Training of fully connected ensembles on vectors, and predictions of samples that members left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from torchace.lab.data import Batches, Split, hashed_key
from torchace.lab.data.folds import NUM_FOLDS
from torchace.lab.data.rng import use_seed
from torchace.lab.schema.hyperparameters import Hyperparameters
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.evaluate import ValidationSet, validation_losses
from torchace.lab.training.loop import FitResult, fit
from torchace.lab.training.run_group import CHUNK_BYTES, RunGroup, check_memory, chunk_rows, count_parameters
from torchace.lab.training.scaling import Scaler, fit_temperature, scale_inputs
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
                network = self.member(num_features, num_outputs).to(dtype)
                self._check_outputs(network, num_features, num_outputs)
                return adapt(network, self.num_members, layers=layers, link=link).to(dtype)
        members = []
        for k in range(self.num_members):
            with use_seed(hashed_key(seed, "member", k)):
                members.append(self.member(num_features, num_outputs, diversity).to(dtype))
        self._check_outputs(members[0], num_features, num_outputs)
        return Ensemble(members, link=link)

    def member(self, num_features: int, num_outputs: int, diversity: float = 0.0) -> nn.Module:
        """Return a new network of one member, or of all if they share weights."""
        if self.network is not None:
            is_function = callable(self.network) and not isinstance(self.network, nn.Module)
            own = self.network(num_features, num_outputs) if is_function else self.network
            if not is_function or not isinstance(own, nn.Module):
                raise TypeError(
                    "Expected `network` to be a function of the numbers of inputs and outputs that returns a module, "
                    f"but {'it returned' if is_function else 'got'} {type(own).__name__}."
                )
            return own
        network = mlp(num_features, self.hidden, num_outputs)
        is_plain = self.encoding == "standard" or self.has_shared_weights
        return network if is_plain else scale_inputs(network, diversity)

    def count_parameters(self, num_features: int, num_outputs: int) -> int:
        """Number of parameters of a member."""
        with torch.device("meta"):
            return count_parameters(self.member(num_features, num_outputs))

    @torch.no_grad()
    def _check_outputs(self, network: nn.Module, num_features: int, num_outputs: int) -> None:
        """Refuse an own network whose outputs have another shape."""
        if self.network is None:
            return
        found = network.eval()(torch.zeros(2, num_features, dtype=self.train_config(1).dtype))
        network.train()
        if not isinstance(found, Tensor) or found.shape != (2, num_outputs):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"Expected `network` to return outputs (N, {num_outputs}), but got {got} for N=2.")

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

    @torch.no_grad()
    def logits(self, run: int, x: Tensor) -> Iterator[Tensor]:
        """Members' logits or predictions in chunks, `(K, n, C)`, in float64 on the CPU."""
        ensemble = self.ensemble(run).eval()
        for part in x.split(chunk_rows(ensemble, ensemble.num_members, itemsize=x.itemsize)):
            yield ensemble(part).double().cpu()

    def losses(self, split: Split, temperature: Sequence[float] | None = None) -> Tensor:
        """Each ensemble's cross entropy or squared error on every sample of a split, `(R, N)`."""
        return validation_losses(self.network, split, self.train_config, temperature=temperature)

    def scores(self, split: Split) -> list[float]:
        """Weighted means of `losses` over a split; Inf for failed runs."""
        values = mean_over_samples(self.losses(split), split.weight).tolist()
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


@dataclass(frozen=True)
class FitScores:
    """Mean losses of an ensemble trained with λ=0, in the units of training and before the temperature."""

    train: float  # the ensemble's, on training samples
    validation: float  # the same on samples left out
    member: float  # its members' mean
    num_samples: int  # that trained each member
    seconds: float

    def scaled(self, factor: float) -> FitScores:
        """Losses times a factor, such as the variance of a scaled target."""
        losses = {name: factor * getattr(self, name) for name in ("train", "validation", "member")}
        return replace(self, **losses)


def score_fit(
    trained: TrainedGroup, train: Split, *, validation: Split | None = None, folds: Tensor | None = None
) -> FitScores | None:
    """Score the first run on its training samples, and on `validation` or on the folds `(N,)` that members left out.

    None if no two members share a training sample, as two members that leave out one half each.

    Few members leave out the same fold. The whole ensemble's loss on left-out samples is then estimated as that of its
    members, less what averaging gains on training samples.
    """
    every = torch.ones(trained.plan.num_members, dtype=torch.bool)
    if folds is None or validation is not None:
        assert validation is not None
        loss, member = _mean_scores(trained, [(validation, every)])
        train_loss, num_samples = _mean_scores(trained, [(train, every)])[0], len(train)
    else:
        inside, outside = [], []
        for fold in range(NUM_FOLDS):
            part = train.take((folds == fold).to(train.x.device))
            left_out = torch.arange(len(every)) % NUM_FOLDS == fold
            inside += [(part, ~left_out)] if len(part) and (~left_out).sum() > 1 else []
            outside += [(part, left_out)] if len(part) and left_out.any() else []
        if not inside:
            return None
        train_loss, train_member = _mean_scores(trained, inside)
        member = _mean_scores(trained, outside)[1]
        loss, num_samples = member - (train_member - train_loss), round(len(train) * (1 - 1 / NUM_FOLDS))
    return FitScores(train_loss, loss, member, num_samples, trained.fitted.seconds)


def _mean_scores(trained: TrainedGroup, parts: Sequence[tuple[Split, Tensor]]) -> list[float]:
    """Mean loss of some members' ensemble, and their mean loss, over samples with their members `(K,)`."""
    score, rows, weights = TASKS[trained.plan.task].scores, [], []
    for split, members in parts:
        y = split.y.cpu()
        for logits in trained.logits(0, split.x):
            target, y = y.tensor_split([logits.shape[1]])
            z = logits[members]
            rows.append(torch.stack((score(z[None], target)[0], score(z.unsqueeze(1), target).mean(0))))
        weights.append(torch.ones(len(split)) if split.weight is None else split.weight.cpu())
    return mean_over_samples(torch.cat(rows, 1), torch.cat(weights).double()).tolist()


def new_run_group(
    plan: MemberPlan, num_features: int, num_outputs: int, seeds: Sequence[int], diversities: Sequence[float]
) -> RunGroup:
    """Return untrained runs."""
    parameters = plan.count_parameters(num_features, num_outputs)
    networks = len(seeds) * (1 if plan.has_shared_weights else plan.num_members)
    check_memory(networks * parameters, plan.train_config(1).dtype)
    runs = zip(seeds, diversities, strict=True)
    return RunGroup([plan.ensemble(num_features, num_outputs, seed, diversity) for seed, diversity in runs])


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions of samples that a member left out, and what follows from them."""

    predictions: NDArray[np.float64]  # (n, C) probabilities, or (n, M) in the targets' units; none of a hold-out
    errors: NDArray[np.float64]  # (n, 1): losses, or (n, M): absolute errors of each target of a regression
    weight: NDArray[np.float64] | None  # (n,)
    score: float  # cross entropy, or squared error in the targets' units
    temperature: float
    variance: NDArray[np.float64]  # (M,): mean square residual of each target of a regression; (1,): the score
    rows: NDArray[np.int64] | None = None  # among the samples used; None: of a hold-out
    folds: NDArray[np.int64] | None = None  # (N,), of all samples used

    def expand(self, used: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Predictions of all samples `(N, ...)`, NaN for those that no member left out."""
        full = np.full((len(used), self.predictions.shape[1]), np.nan)
        full[np.flatnonzero(used)[self.rows]] = self.predictions
        return full


def collect_out_of_fold(
    trained: TrainedGroup, split: Split, left_out: Tensor | None, targets: Scaler | None
) -> OutOfFold:
    """Predict each sample by the members that left it out, `(K, N)`; None: by all."""
    temperature = 1.0 if targets is not None else fit_run_temperature(trained, split, left_out)
    predictions, errors, done = [], [], 0
    for logits in left_out_logits(trained, split.x, left_out):  # (m, n, C), NaN where fewer members left a sample out
        y = split.y[done : done + logits.shape[1]].cpu()
        done += len(y)
        if trained.plan.task == "multilabel":
            predicted = (logits / temperature).sigmoid().nanmean(0)
            errors.append(F.binary_cross_entropy(predicted, y.double(), reduction="none").mean(1, keepdim=True))
        elif targets is None:
            log_q = (logits / temperature).log_softmax(2)
            predicts = ~log_q[..., :1].isnan()
            log_probs = log_q.masked_fill_(~predicts, -torch.inf).logsumexp(0) - predicts.sum(0).double().log()
            errors.append(-log_probs.gather(1, y[:, None]))
            predicted = log_probs.exp_()
        else:
            predicted = targets.inverse_transform(logits.nanmean(0))
            errors.append((predicted - targets.inverse_transform(y)).abs())
        if left_out is not None:
            predictions.append(predicted.numpy())
    weight = None if split.weight is None else split.weight.cpu().double()
    collected, found = np.concatenate(predictions) if predictions else np.empty((0, 0)), torch.cat(errors)
    losses = found if targets is None else found.square()
    variance = mean_over_samples(losses.T, weight).numpy()  # (M,)
    weights = None if weight is None else weight.numpy()
    return OutOfFold(collected, found.numpy(), weights, float(variance.mean()), temperature, variance)


def fit_run_temperature(trained: TrainedGroup, split: Split, left_out: Tensor | None = None, run: int = 0) -> float:
    """Temperature of one run, on as many samples as a chunk of memory holds."""
    members = trained.plan.num_members if left_out is None else _num_members(left_out)
    size = 8 * len(split) * members * next(trained.logits(run, split.x[:1])).shape[-1]
    part = slice(None, None, -(-size // CHUNK_BYTES))
    mask = None if left_out is None else left_out[:, part]
    logits = torch.cat(list(left_out_logits(trained, split.x[part], mask, run)), 1)
    weight = None if split.weight is None else split.weight[part].cpu().double()
    y = split.y[part].cpu()
    if trained.plan.task == "multilabel":  # a label is a choice between the logits 0 and z
        logits = logits.flatten(1)  # (m, n * L)
        logits, y = torch.stack([logits * 0, logits], 2), y.flatten().round().long()
        weight = None if weight is None else weight.repeat_interleave(split.y.shape[1])
    temperature = fit_temperature(logits, y, weight)
    # all members together are less overconfident than those that left a sample out (docs/decisions/tables.md)
    is_part = left_out is not None and members < trained.plan.num_members
    return math.sqrt(temperature) if is_part and temperature > 1 else temperature


def left_out_logits(trained: TrainedGroup, x: Tensor, left_out: Tensor | None, run: int = 0) -> Iterator[Tensor]:
    """Logits of the members that left a sample out, in chunks `(m, n, C)`; NaN where fewer members did."""
    done = 0
    for logits in trained.logits(run, x):
        rows = slice(done, done + logits.shape[1])
        done = rows.stop
        if left_out is None:
            yield logits
            continue
        predicts, members = left_out[:, rows].cpu().byte().topk(_num_members(left_out), dim=0)  # (m, n)
        own = logits.gather(0, members[..., None].expand(-1, -1, logits.shape[2]))
        yield own.masked_fill_(predicts[..., None] == 0, torch.nan)


def _num_members(left_out: Tensor) -> int:
    return int(left_out.sum(0).max())
