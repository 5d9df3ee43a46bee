"""Training loop: batches, schedules, checkpoints, failed runs, interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchace.lab.data import Batches
from torchace.lab.data.splits import Inputs, map_inputs
from torchace.lab.schema.results import Failure
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.config import (
    TrainConfig,
    connect_gradients,
    label_smoothing,
    make_optimizer,
    set_learning_rates,
    split_parameters,
)
from torchace.lab.training.distributed import Timer, all_gather, detect_lost_rank
from torchace.lab.training.evaluate import EarlyStopping, ValidationSet
from torchace.lab.training.run_group import RunGroup, nonfinite_member
from torchace.lab.training.step import StepResult, TrainStep, graph_on_gpu
from torchace.lab.training.tasks import TASKS

NONFINITE = "NaN or Inf in loss or gradient"
CHECK_EVERY = 100  # steps between failure checks on a GPU or across ranks
NEVER = 2**53  # later than any failure; exact in float64


class Interrupted(Exception):  # noqa: N818, control flow
    """Training stopped on request after a checkpoint."""


@dataclass
class FitResult:
    """Results of a training beside the weights."""

    # per epoch: epoch, step, score (R,), held_out (R,); None for nonfinite or missing values
    history: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)  # by run
    best_epochs: list[int] | None = None  # with a validation set; from 1
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckpointPolicy:
    """Place and frequency of checkpoints."""

    checkpoints: Checkpoints
    every_steps: int | None = None
    every_seconds: float | None = 60.0
    at_end: bool = False  # so that a finished training is not repeated


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run: epoch (from 1), step of all steps, and metrics by name."""

    step: int
    steps: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Progress:
    """Progress of a training after a step, within an epoch or at its end."""

    step: int
    steps: int
    score: list[float | None]  # of each run: mean over the epoch so far; None for nonfinite values
    epoch: int = 1
    held_out: list[float | None] | None = None  # validation scores at the end of an epoch
    metric: str = "cross_entropy"

    def by_run(self) -> list[RunProgress]:
        """Progress of each run."""
        found = []
        for train, validation in zip(self.score, self.held_out or [None] * len(self.score), strict=True):
            scores = {f"train_{self.metric}": train, f"validation_{self.metric}": validation}
            metrics = {name: value for name, value in scores.items() if value is not None}
            found.append(RunProgress(self.step, self.steps, self.epoch, metrics))
        return found


@detect_lost_rank()
def fit(
    network: RunGroup,  # this rank's shard
    batches: Batches,
    config: TrainConfig,
    *,
    diversities: Sequence[float],
    seeds: Sequence[int],
    settings: Sequence[Mapping[str, Any]] | None = None,
    validation: ValidationSet | None = None,
    optimizer: torch.optim.Optimizer | None = None,  # to continue a training
    mean_weight: float | None = None,
    checkpoint_policy: CheckpointPolicy | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_epoch_end: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Train R runs that differ in λ, seed and `settings`, from the newest checkpoint if there is one.

    `settings` replace values of the configuration for each run: learning rate, weight decay or label smoothing.
    Weights are relative to `mean_weight`, by default that of `batches`. `on_progress` is called at most ten times a
    second. If `stop` returns True before a step, a checkpoint is written and `Interrupted` raised.
    """
    if batches.batch_size < network.ranks.data:
        raise ValueError(
            f"Expected batches of at least {network.ranks.data} samples, one for each rank, but got "
            f"{batches.batch_size}. Use larger batches or fewer ranks."
        )
    configs = [replace(config, **own) for own in settings or [{}] * network.num_runs]
    if optimizer is None:
        optimizer = make_optimizer(config, split_parameters(network, configs))
        connect_gradients(optimizer, network)
    network.train()
    network.set_seeds(seeds)
    training = _Training(network, optimizer, config, validation, checkpoint_policy, batches.device)
    start = training.load()
    train_step = graph_on_gpu(TrainStep(network, optimizer, config, label_smoothing(configs, batches.device)))
    every_steps = None if checkpoint_policy is None else checkpoint_policy.every_steps
    timer = Timer(stop, None if checkpoint_policy is None else checkpoint_policy.every_seconds, network.ranks.size)
    progress = partial(Progress, steps=config.steps, metric=TASKS[config.task].score_name)
    feed = BatchFeed(batches, seeds, network.total_members, config, mean_weight)
    diversity = torch.tensor(list(diversities), dtype=config.dtype, device=batches.device)

    done = start
    for step in range(start, config.steps if training.active.any() else start):
        timer.update()
        if timer.should_stop:
            training.save(step)
            raise Interrupted
        epoch, within = batches.locate(step)
        x, y, weight = feed(epoch, within)
        set_learning_rates(optimizer, configs, step)
        share = config.diversity_share_at(step)
        network.step.fill_(step)
        result = train_step(x, y, weight, diversity if share == 1 else diversity * share, training.active)
        training.stats.add(result, step, weight)
        done = step + 1

        is_last_step = step == config.steps - 1
        ends_epoch = is_last_step or within == batches.steps_per_epoch - 1
        if ends_epoch or training.stats.has_failure or step % CHECK_EVERY == CHECK_EVERY - 1:
            training.record_failures()
            if not training.active.any():
                break
        if ends_epoch:
            training.end_epoch(epoch + 1, step + 1)
            if on_epoch_end is not None:
                on_epoch_end(progress(**training.result.history[-1]))
        if timer.should_report:
            training.stats.share()
        if on_progress is not None and (timer.should_report or is_last_step):
            score = training.result.history[-1]["score"] if ends_epoch else training.stats.mean()
            on_progress(progress(step=step + 1, epoch=epoch + 1, score=score))
        is_due = every_steps is not None and (step + 1) % every_steps == 0
        if (timer.should_save or is_due) and not is_last_step:
            training.save(step + 1)
            timer.mark_saved()
        if ends_epoch and not training.active.any():
            break
    if checkpoint_policy is not None and checkpoint_policy.at_end and done > start:
        training.save(done)
    return training.finish()


class _Training:
    """State of a training: results, active runs, early stopping; saved in checkpoints."""

    def __init__(
        self,
        network: RunGroup,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        validation: ValidationSet | None,
        policy: CheckpointPolicy | None,
        device: torch.device,
    ) -> None:
        self.network, self.optimizer, self.policy = network, optimizer, policy
        self.early_stopping = None if validation is None else EarlyStopping(network, validation, config)
        self.result = FitResult()
        self.stopped = [False] * network.num_runs
        self.active = torch.ones(network.num_runs, dtype=torch.bool, device=device)
        self.stats = EpochStats(network, device)
        self.start_time = time.monotonic()  # minus the seconds before a resume

    def load(self) -> int:
        """Load the newest checkpoint; return the step to start with."""
        if self.policy is None:
            return 0
        saved = self.policy.checkpoints.load(self.network, self.optimizer, self.early_stopping)
        if saved is None:
            return 0
        failures = {int(run): Failure(**failure) for run, failure in saved["failures"].items()}
        self.result = FitResult(saved["history"], failures)
        self.start_time -= saved["seconds"]
        self.stopped = saved["stopped"]
        self.stats.weights.copy_(torch.tensor(saved["weights"], dtype=torch.float64))
        if self.network.ranks.is_first:  # has the sums of all ranks
            self.stats.sums.copy_(torch.tensor([float(value) for value in saved["sums"]], dtype=torch.float64))
        for run, stopped in enumerate(self.stopped):
            self.active[run] = not stopped and run not in failures
        return int(saved["step"])

    def save(self, step: int) -> None:
        """Write a checkpoint before a step."""
        if self.policy is None:
            return
        self.record_failures()  # at the same step as without a resume
        progress = {
            "step": step,
            "history": self.result.history,
            "failures": {str(run): failure.model_dump() for run, failure in self.result.failures.items()},
            "seconds": time.monotonic() - self.start_time,
            "stopped": self.stopped,
            "sums": [repr(value) for value in self.stats.sums.tolist()],  # text: JSON has no NaN
            "weights": self.stats.weights.tolist(),
        }
        self.policy.checkpoints.save(self.network, self.optimizer, progress, self.early_stopping)

    def record_failures(self) -> None:
        """Record new failures of any rank and stop those runs."""
        stats = self.stats
        stats.share()
        for run in ((stats.failed < NEVER) & self.active).nonzero().flatten().tolist():
            step, code = divmod(int(stats.failed[run]), stats.num_codes)
            member = nonfinite_member(code, self.network.total_members)
            self.result.failures[run] = Failure(message=NONFINITE, member=member, step=step)
            self.active[run] = False

    def end_epoch(self, epoch: int, step: int) -> None:
        """Add an epoch to the history and stop runs that do not improve."""
        entry: dict[str, Any] = {"epoch": epoch, "step": step, "score": self.stats.mean(), "held_out": None}
        self.stats.sums.zero_()
        self.stats.weights.zero_()
        if self.early_stopping is not None:
            entry["held_out"], self.stopped = self.early_stopping.update(self.network, epoch, self.stopped)
            self.active &= ~torch.tensor(self.stopped, device=self.active.device)
        self.result.history.append(entry)

    def finish(self) -> FitResult:
        """Restore the best weights and return the results."""
        if self.early_stopping is not None:
            self.early_stopping.restore(self.network)
            self.result.best_epochs = self.early_stopping.best_epoch
        self.result.seconds = time.monotonic() - self.start_time
        return self.result


class BatchFeed:
    """Batches of the runs: `(R, B, ...)` if members share them, else `(R, K, B, ...)`."""

    def __init__(
        self,
        batches: Batches,
        seeds: Sequence[int],
        num_members: int,
        config: TrainConfig,
        mean_weight: float | None = None,
    ) -> None:
        distinct = sorted(set(seeds))
        self.batches, self.shape = batches, None if config.batches == "shared" else (len(distinct), num_members)
        self.seeds, self.streams = distinct, [0] * len(distinct)
        if self.shape is not None:  # one stream per member
            self.seeds = [seed for seed in distinct for _ in range(num_members)]
            self.streams = [k for _ in distinct for k in range(num_members)]
        # all λ of one seed see the same batch
        places = [distinct.index(seed) for seed in seeds]
        self.runs = None if list(seeds) == distinct else torch.tensor(places, device=batches.device)
        if (weight := batches.split.weight) is not None:
            mean = weight.mean(dtype=torch.float64) if mean_weight is None else weight.new_tensor(mean_weight)
            self.mean_weight = mean.to(weight.dtype).clamp_min(torch.finfo(weight.dtype).tiny)

    def __call__(self, epoch: int, within: int) -> tuple[Inputs, Tensor, Tensor | None]:
        """Samples, targets, and weights relative to their mean."""
        x, y = self.batches.batch_many(self.seeds, epoch, within, streams=self.streams)
        weight = self.batches.weights_many(self.seeds, epoch, within, streams=self.streams)
        if weight is not None:
            weight = self._arrange(weight / self.mean_weight)
            if weight.ndim == 4:  # (R, K, K, B): each stream is of one member
                weight = weight.diagonal(dim1=1, dim2=2).movedim(-1, 1)
        return map_inputs(self._arrange, x), self._arrange(y), weight

    def _arrange(self, values: Tensor) -> Tensor:
        values = values if self.shape is None else values.unflatten(0, self.shape)
        return values if self.runs is None else values.index_select(0, self.runs)


class EpochStats:
    """Sums over the steps of an epoch, on the device, and the first failure of each run."""

    def __init__(self, network: RunGroup, device: torch.device) -> None:
        self.ranks = network.ranks
        self.sums = torch.zeros(network.num_runs, dtype=torch.float64, device=device)
        self.weights = torch.zeros_like(self.sums)  # relative to the training set's mean
        self.has_failure = False  # of the last step, if known without a transfer
        self.num_codes = 3 * (network.total_members + 1)  # of `first_nonfinite`
        # step and code of the first failure as one number, smallest for the earliest
        self.failed = torch.full((network.num_runs,), NEVER, device=device)

    def add(self, result: StepResult, step: int, weight: Tensor | None) -> None:
        """Add one step."""
        self.sums += result.score
        self.weights += 1.0 if weight is None else weight.flatten(1).mean(1)
        codes = result.nonfinite
        self.has_failure = codes is not None and codes.device.type == "cpu" and self.ranks.size == 1
        if codes is not None:
            self.failed = self.failed.minimum(torch.where(codes >= 0, step * self.num_codes + codes, NEVER))

    def share(self) -> None:
        """Sum over ranks on the first rank; keep the earliest failure on all ranks."""
        if self.ranks.size > 1:
            gathered = all_gather([*self.sums.tolist(), *self.failed.tolist()])
            sums, failed = (part.to(self.sums.device) for part in gathered.chunk(2, 1))  # (ranks, R)
            self.sums = sums.sum(0) if self.ranks.is_first else torch.zeros_like(self.sums)
            self.failed = failed.amin(0).long()

    def mean(self) -> list[float | None]:
        """Weighted mean score of each run; None if nonfinite or empty."""
        return [value if math.isfinite(value) else None for value in (self.sums / self.weights).tolist()]
