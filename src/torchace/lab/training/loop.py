"""The loop around the step: batches, schedules, checkpoints, runs that fail, a process that is told to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchace.lab.data import Batches
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.config import TrainConfig, make_optimizer, set_learning_rate
from torchace.lab.training.cuda_graph import Stepper
from torchace.lab.training.distributed import Ranks, SyncedTimer
from torchace.lab.training.early_stopping import EarlyStopping, ValidationSet
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.shard import RankStepper, Shard, SharedCheckpoints
from torchace.lab.training.step import StepResult
from torchace.lab.training.timer import Timer

NONFINITE = "NaN or Inf in loss or gradient"
PROGRESS = {"step", "history", "failures", "seconds", "stopped", "tally"}  # what a checkpoint says beside the weights


class Interrupted(Exception):
    """The process was told to stop; a checkpoint was written."""


@dataclass
class Failure:
    """Why a run was stopped."""

    message: str
    member: int | None
    step: int


@dataclass
class FitResult:
    """What training left behind beside the weights."""

    # one entry an epoch: epoch, step, score (R,), validation (R,), with None for NaN, Inf and what was not measured
    history: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)  # by run
    best_epochs: list[int] | None = None  # of each run, where there were held-out samples; counted from 1
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where and how often the state is saved."""

    checkpoints: Checkpoints
    every_steps: int | None = None
    every_seconds: float | None = 60.0


@dataclass(frozen=True)
class Progress:
    """What somebody watching sees after a step."""

    step: int
    steps: int
    # of each run, the mean over the epoch so far of its cross entropy or squared error; None for NaN and Inf
    score: list[float | None]


def fit(
    network: RunGroup,
    batches: Batches,
    config: TrainConfig,
    *,
    diversities: Sequence[float],
    seeds: Sequence[int],
    validation: ValidationSet | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mean_weight: float | None = None,
    checkpoint_policy: CheckpointPolicy | None = None,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Trains R runs that differ in λ and seed alone, from the newest checkpoint if there is one.

    Args:
        network: The runs, with their initial weights; or, as one rank of several, its `Shard` of them.
        batches: Where samples come from; every draw is a function of seed, epoch and step.
        config: How to train.
        diversities: λ of each run.
        seeds: The seed of each run.
        validation: Samples that decide when a run stops and which epoch's weights it keeps.
        optimizer: One that has trained this network before, to go on with; a new one unless given.
        mean_weight: The mean weight of a sample, that weights are relative to; that of the samples in `batches` unless
            given, for samples that are a part of those trained on.
        checkpoint_policy: Where and how often to save.
        watch: Is told about progress, at most ten times a second.
        stop: Is asked before every step, or now and then with several ranks; when it says yes, a checkpoint is written
            and `Interrupted` raised.
    """
    device = batches.device
    ranks, num_members = (
        (network.ranks, network.all_members) if isinstance(network, Shard) else (None, network.num_members)
    )
    if ranks is not None and batches.batch_size < ranks.data:
        raise ValueError(
            f"Expected batches of at least {ranks.data} samples, one for each rank, but got {batches.batch_size}."
        )
    if (
        ranks is not None
        and checkpoint_policy is not None
        and not isinstance(checkpoint_policy.checkpoints, SharedCheckpoints)
    ):
        raise TypeError(
            "Expected SharedCheckpoints for one rank's part, but got Checkpoints, which all ranks would write."
        )
    if optimizer is None:
        optimizer = make_optimizer(config, [p for p in network.parameters() if p.requires_grad])
    network.train()
    stopping = None if validation is None else EarlyStopping(network, validation, config)
    fitted, start, stopped = FitResult(), 0, [False] * network.num_runs
    tally = EpochStats(network.num_runs, num_members, device, ranks)
    if (
        checkpoint_policy is not None
        and (saved := checkpoint_policy.checkpoints.load(network, optimizer, stopping)) is not None
    ):
        if missing := PROGRESS - set(saved):
            raise checkpoint_policy.checkpoints.damaged(f"it has no {min(missing)}")
        start, stopped = saved["step"], saved["stopped"]
        failures = {int(r): Failure(**f) for r, f in saved["failures"].items()}
        fitted = FitResult(saved["history"], failures, seconds=saved["seconds"])
        tally.restore(saved["tally"])

    full = torch.tensor(list(diversities), dtype=config.dtype, device=device)
    going = [r not in fitted.failures and not stopped[r] for r in range(network.num_runs)]
    active = torch.tensor(going, device=device)
    stepper = (
        RankStepper(network, optimizer, config) if isinstance(network, Shard) else Stepper(network, optimizer, config)
    )
    timer = (Timer if ranks is None else SyncedTimer)(
        stop, None if checkpoint_policy is None else checkpoint_policy.every_seconds
    )
    before, began = fitted.seconds, time.monotonic()
    feed = BatchFeed(batches, seeds, num_members, config, mean_weight)
    network.set_seeds(seeds)

    def note_failures() -> None:
        tally.share()
        for run, failure in tally.new_failures(active).items():
            fitted.failures[run] = failure
            active[run] = False

    def save(step: int) -> None:
        if checkpoint_policy is None:
            return
        note_failures()  # or a run that resumes would find them later than one that was never interrupted
        fitted.seconds = before + time.monotonic() - began
        failures = {str(r): asdict(f) for r, f in fitted.failures.items()}
        progress = {"step": step, "history": fitted.history, "failures": failures, "seconds": fitted.seconds}
        checkpoint_policy.checkpoints.save(
            network, optimizer, {**progress, "stopped": stopped, "tally": tally.state()}, stopping
        )

    for step in range(start, config.steps if any(going) else start):
        timer.update()
        if timer.should_stop:
            save(step)
            raise Interrupted
        epoch, within = batches.locate(step)
        x, y, weight = feed(epoch, within)
        set_learning_rate(optimizer, config.learning_rate_at(step))
        share = config.diversity_share_at(step)
        network.step.fill_(step)
        result = stepper(x, y, weight, full if share == 1 else full * share, active)
        tally.add(result, step, weight)

        last_of_epoch = within == batches.steps_per_epoch - 1 or step == config.steps - 1
        # On the CPU a failed run is seen at once; on a GPU, and of other ranks, nothing is read but now and then.
        if tally.seen or last_of_epoch or step % 100 == 99:
            note_failures()
            if not bool(active.any()):
                break
        if last_of_epoch:
            entry: dict[str, Any] = {"epoch": epoch + 1, "step": step + 1, "score": tally.mean(), "held_out": None}
            tally.reset()
            if stopping is not None:
                entry["held_out"], stopped = stopping.update(network, epoch + 1, stopped)
                active &= ~torch.tensor(stopped, device=device)
            fitted.history.append(entry)
        if timer.should_report:
            tally.share()
        if watch is not None and (timer.should_report or step == config.steps - 1):
            timer.mark_reported()
            watch(Progress(step + 1, config.steps, tally.mean() if tally.steps else fitted.history[-1]["score"]))
        if checkpoint_policy is not None and step + 1 < config.steps:
            steps_due = checkpoint_policy.every_steps is not None and (step + 1) % checkpoint_policy.every_steps == 0
            if steps_due or timer.should_save:
                save(step + 1)
                timer.mark_saved()
        if last_of_epoch and not bool(active.any()):
            break
    if stopping is not None:
        stopping.restore(network)
        fitted.best_epochs = stopping.best_epoch
    fitted.seconds = before + time.monotonic() - began
    return fitted


class BatchFeed:
    """The batches of the runs: `(R, B, ...)` where members share them, else `(R, K, B, ...)`."""

    def __init__(
        self,
        batches: Batches,
        seeds: Sequence[int],
        num_members: int,
        config: TrainConfig,
        mean_weight: float | None = None,
    ) -> None:
        distinct = sorted(set(seeds))
        self.batches, self.lead = batches, None if config.batches == "shared" else (len(distinct), num_members)
        self.seeds, self.streams = distinct, [0] * len(distinct)
        if self.lead is not None:  # every member a stream of its own
            self.seeds = [seed for seed in distinct for _ in range(num_members)]
            self.streams = [k for _ in distinct for k in range(num_members)]
        # the λ of one seed see the same batch
        places = [distinct.index(seed) for seed in seeds]
        self.runs = None if list(seeds) == distinct else torch.tensor(places, device=batches.device)
        if (weight := batches.split.weight) is not None:
            mean = weight.mean(dtype=torch.float64) if mean_weight is None else weight.new_tensor(mean_weight)
            self.mean_weight = mean.to(weight.dtype).clamp_min(torch.finfo(weight.dtype).tiny)

    def __call__(self, epoch: int, within: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Samples, targets, and weights relative to their mean."""
        x, y = self.batches.batch_many(self.seeds, epoch, within, streams=self.streams)
        weight = self.batches.weights_many(self.seeds, epoch, within, streams=self.streams)
        if weight is not None:
            weight = self._arranged(weight / self.mean_weight)
        return self._arranged(x), self._arranged(y), weight

    def _arranged(self, part: Tensor) -> Tensor:
        part = part if self.lead is None else part.unflatten(0, self.lead)
        return part if self.runs is None else part.index_select(0, self.runs)


class EpochStats:
    """Sums over the steps of an epoch, kept on the device, and the first failure of each run."""

    def __init__(self, num_runs: int, num_members: int, device: torch.device, ranks: Ranks | None = None) -> None:
        self.num_members, self.ranks = num_members, ranks
        self.sums = torch.zeros(num_runs, dtype=torch.float64, device=device)
        self.steps = 0
        self.weights = torch.zeros_like(self.sums)  # of the batches, relative to the training set's mean
        self.seen = False  # whether the last step had a fault, where that can be seen at once
        self.failed_step = torch.full((num_runs,), -1, device=device)
        self.failed_member = torch.full((num_runs,), -1, device=device)  # K: what members share; see `RankStepper`

    def add(self, result: StepResult, step: int, weight: Tensor | None) -> None:
        self.sums += result.score
        self.steps += 1
        self.weights += 1.0 if weight is None else weight.flatten(1).mean(1)
        self.seen = result.nonfinite is not None and result.nonfinite.device.type == "cpu" and self.ranks is None
        if result.nonfinite is None:
            return
        first = (result.nonfinite >= 0) & (self.failed_step < 0)
        self.failed_step = torch.where(first, step, self.failed_step)
        self.failed_member = torch.where(first, result.nonfinite, self.failed_member)

    def share(self) -> None:
        """Adds up what the ranks have; the first one keeps the sums, all keep the first failure of any."""
        if self.ranks is None:
            return
        last = float(2**40)  # later than any step
        steps = torch.where(self.failed_step < 0, last, self.failed_step.double())
        told = self.ranks.all_gather([*self.sums.tolist(), *steps.tolist(), *self.failed_member.tolist()])
        sums, steps, members = (part.to(self.sums.device) for part in told.chunk(3, 1))  # (ranks, R)
        self.sums = sums.sum(0) if self.ranks.is_first else torch.zeros_like(self.sums)
        first = steps.amin(0)
        members = torch.where(steps == first, members, torch.inf).amin(0)
        self.failed_step = torch.where(first == last, -1, first).long()
        self.failed_member = torch.where(first == last, -1, members).long()

    def new_failures(self, active: Tensor) -> dict[int, Failure]:
        failed = (self.failed_step >= 0) & active
        found = {}
        for run in failed.nonzero().flatten().tolist() if bool(failed.any()) else []:
            member, step = int(self.failed_member[run]) % (self.num_members + 1), int(self.failed_step[run])
            found[run] = Failure(NONFINITE, member if member < self.num_members else None, step)
        return found

    def mean(self) -> list[float | None]:
        """The weighted mean of each run's scores; None for NaN and Inf, and where nothing was added."""
        return [value if math.isfinite(value) else None for value in (self.sums / self.weights).tolist()]

    def reset(self) -> None:
        self.sums.zero_()
        self.weights.zero_()
        self.steps = 0

    def state(self) -> dict[str, Any]:
        # as text: JSON has no word for NaN
        sums = [repr(value) for value in self.sums.tolist()]
        return {"sums": sums, "weights": self.weights.tolist(), "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.weights.copy_(torch.tensor(state["weights"], dtype=torch.float64))
        if self.ranks is None or self.ranks.is_first:  # the sums of all ranks
            self.sums.copy_(torch.tensor([float(value) for value in state["sums"]], dtype=torch.float64))
