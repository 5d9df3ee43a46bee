"""Executors of a sweep: one process, or all ranks of torchrun, which train each run group together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchace._files import json_digest
from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.schema.results import Failure, GroupPlan, Metrics, RunKey, RunResult
from torchace.lab.store import RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import Components, ConfigError, hardware, named_metrics, versions
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.networks import build_network, make_train_config
from torchace.lab.training.checkpoint import gather_network, run_weights, shard_network, state_digest
from torchace.lab.training.config import resolve_device
from torchace.lab.training.distributed import RankLostError, Ranks, check_same, connect, is_launched, should_report
from torchace.lab.training.evaluate import compute_metrics, evaluate, predict_logits
from torchace.lab.training.loop import NONFINITE, CheckpointPolicy, FitResult, fit
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.tasks import TASKS

Stop = Callable[[], bool]
ALONE = Ranks()
KEPT_BYTES = 2**28  # of the weights of an arm's runs that are kept unless configured


@dataclass(frozen=True)
class Plan:
    """Inputs of a training; arms, their objects and data by the arm's name."""

    experiment: Experiment
    arms: Mapping[str, Arm]
    components: Mapping[str, Components]
    data: Mapping[str, LoadedData]
    store: RunStore
    device: str


class UnfinishedRunsError(Exception):
    """Some runs could not be finished; `reasons` has the reason of each."""

    def __init__(self, reasons: Mapping[RunKey, str]) -> None:
        super().__init__("; ".join(f"{run.id}: {reason}" for run, reason in reasons.items()))
        self.reasons = dict(reasons)


class Executor:
    """Train run groups one after another in this process."""

    is_first = True  # False for the other ranks, which only train

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def load_data(self, arms: Mapping[str, Arm], components: Mapping[str, Components]) -> dict[str, LoadedData]:
        """Load the data of every arm, each data set once."""
        loaded: dict[str, LoadedData] = {}
        for name, arm in arms.items():
            same = next((data for data in loaded.values() if data.section == arm.data), None)
            loaded[name] = same or LoadedData.load(arm.data, self.device, components[name])
        return loaded

    def broadcast(self, content: Any) -> Any:
        """Return the object of the first process, on all of them."""
        return content

    def hardware(self) -> dict[str, Any]:
        """Return the hardware that runs are trained on."""
        return hardware(self.device)

    def train(self, plan: Plan, groups: Sequence[GroupPlan], callback: Callback, stop: Stop) -> Iterator[GroupPlan]:
        """Train and store run groups; yield each finished group."""
        for group in groups:
            callback.on_group_start(group)
            train_group(plan, group, callback, stop)
            yield group


@contextmanager
def make_executor(
    experiment: Experiment, device: str | int | torch.device, *, ray: str | None, parallel: str | None, rank: int | None
) -> Iterator[Executor]:
    """Yield the executor of a sweep: this process, all ranks of torchrun (`rank` of them), or a Ray cluster.

    `parallel` is what the ranks split, see `parse_layout`.
    """
    if ray is not None:
        if rank is not None:
            raise ValueError("Expected torchrun or --ray, but got both: Ray starts its own processes.")
        from torchace.lab.sweeps.ray import connect_ray

        with connect_ray(ray, str(device)) as executor:
            yield executor
    elif rank is None:
        yield Executor(resolve_device(device))
    else:
        yield RankExecutor(experiment, resolve_device(device), parallel)


def train_group(plan: Plan, group: GroupPlan, callback: Callback, stop: Stop, ranks: Ranks = ALONE) -> None:
    """Train a run group from its checkpoint, evaluate and store its runs.

    `stop` is checked between steps; if True, a checkpoint is saved and `Interrupted` is raised.
    """
    arm, data = plan.arms[group.arm], plan.data[group.arm]
    seeds = [run.seed for run in group.runs]
    batches = data.batches(arm)
    config = make_train_config(arm.train, batches.steps_per_epoch, arm.data.task, plan.components[group.arm])
    network = shard_network(
        build_network(arm, data.dataset, seeds, plan.device, components=plan.components[group.arm]), ranks
    )
    if group.compile:
        network.compile()
    checkpoints = plan.store.checkpoints(group, config_digest(arm))
    if ranks.is_first and checkpoints.remove_foreign():
        callback.on_group_restart(group)
    every = plan.experiment.checkpoint
    fitted = fit(
        network,
        batches,
        config,
        diversities=[run.diversity for run in group.runs],
        seeds=seeds,
        settings=[run.settings for run in group.runs],
        validation=data.validation_set(arm),
        checkpoint_policy=CheckpointPolicy(checkpoints, every.steps, every.seconds),
        on_progress=partial(callback.on_group_step, group),
        on_epoch_end=partial(callback.on_group_epoch_end, group),
        stop=stop,
    )
    test = predict_logits(network, data.chunks(arm, data.dataset.test))
    validation = None if data.validation is None else predict_logits(network, data.chunks(arm, data.validation))
    trained = gather_network(network)
    if trained is None:  # only the first rank writes
        return
    extra = named_metrics(plan.components[group.arm].metrics, config.task)
    keeps_weights = _keeps_weights(plan, arm, trained)
    for r, run in enumerate(group.runs):
        if plan.store.is_finished(run):
            continue
        failure, nonfinite = fitted.failures.get(r), (~test[0][r].isfinite()).flatten(1).any(1)  # (K,)
        if failure is None and nonfinite.any():  # after the last step
            failure = Failure(message=NONFINITE, member=int(nonfinite.nonzero()[0]), step=config.steps)
        metrics, arrays = None, dict[str, Tensor]()
        if failure is None:
            scored = evaluate(test[0][r], test[1], data.images, task=config.task)
            found: dict[str, Any] = {"test": scored.metrics | compute_metrics(extra, test[0][r], test[1], config.task)}
            if validation is not None:
                scores = evaluate(validation[0][r], validation[1], task=config.task).metrics
                found["validation"] = scores | compute_metrics(extra, validation[0][r], validation[1], config.task)
            metrics, arrays = Metrics.model_validate(found), scored.arrays
        history = _history(fitted, r, config.task)
        weights = run_weights(trained, r) if failure is None else None
        result = RunResult(
            run=run.id,
            **asdict(run),
            num_members=arm.model.num_members,
            batches=arm.train.batches,
            status="finished" if failure is None else "failed",
            failure=failure,
            metrics=metrics,
            history=history,
            best_epoch=None if fitted.best_epochs is None else fitted.best_epochs[r],
            steps=history[-1]["step"] if history and fitted.best_epochs is not None else config.steps,
            seconds=fitted.seconds / len(group.runs),
            parameters=count_run_parameters(trained),
            job=group.id,
            weights_sha256=None if weights is None else state_digest(weights),
            versions=versions(),
            **hardware(plan.device),
        )
        plan.store.write_result(result, arrays, weights if keeps_weights else None)
    checkpoints.remove()


def _history(fitted: FitResult, run: int, task: str) -> tuple[dict[str, Any], ...]:
    """Return the epochs of a run until it stopped: training loss, and validation loss with early stopping."""
    loss = TASKS[task].score_name
    entries: list[dict[str, Any]] = []
    scored = [i for i, entry in enumerate(fitted.history) if entry["held_out"] and entry["held_out"][run] is not None]
    for entry in fitted.history[: scored[-1] + 1 if scored else None]:
        found = {"epoch": entry["epoch"], "step": entry["step"], f"train_{loss}": entry["score"][run]}
        if entry["held_out"] is not None:
            found[f"validation_{loss}"] = entry["held_out"][run]
        entries.append(found)
    return tuple(entries)


def config_digest(arm: Arm) -> str:
    """Return the SHA-256 of the settings that all runs of an arm have in common."""
    common = arm.model_dump(mode="json", include={"data", "model", "train"})
    common["train"] = {name: value for name, value in common["train"].items() if name not in arm.axes}
    for key in ("stream", "num_workers"):  # the samples are the same
        del common["data"][key]
    return json_digest(common)


def count_run_parameters(network: RunGroup) -> int:
    """Return the number of parameters of one run."""
    return sum(p.numel() for p in network.parameters()) // network.num_runs


def _keeps_weights(plan: Plan, arm: Arm, network: RunGroup) -> bool:
    """Whether to keep the weights: as configured, or if those of all runs are small."""
    sweep = plan.experiment.sweep
    if sweep.keep_weights != "auto":
        return sweep.keep_weights
    size = sum(value.nbytes for value in network.state_dict().values()) // network.num_runs
    return size * len(arm.diversities) * len(sweep.seeds) <= KEPT_BYTES


@contextmanager
def process_group(parallel: str | None) -> Iterator[int | None]:
    """Join torchrun's process group and yield the rank; None for a single process.

    An error that several ranks have is raised on one of them only.
    """
    if parallel is not None and not is_launched():
        command = f"torchrun --nproc-per-node=N -m torchace run ... --parallel {parallel}"
        raise ValueError(f"--parallel needs several processes: {command}.")
    if not is_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield None
        return
    store = connect()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield dist.get_rank()
    except Exception as error:
        if hasattr(error, "exit_code"):  # typer.Exit, on all ranks
            dist.destroy_process_group()
        elif not should_report(store):
            raise SystemExit(1) from None
        raise
    dist.destroy_process_group()


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM, which torchrun sends when another rank dies."""
    if not RankLostError.happened:  # else this rank reports the loss and exits
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class RankExecutor(Executor):
    """Train each run group on all ranks together.

    Device `cuda` is one GPU for each process, `cuda:N` a shared one. For `parallel` see `parse_layout`; the default
    splits the batch.
    """

    def __init__(self, experiment: Experiment, device: str, parallel: str | None) -> None:
        check_same(
            {
                "experiment": json.dumps(experiment.model_dump(mode="json"), sort_keys=True),
                "--parallel": parallel or "data",
                "--device": device,
                "version of torchace, torch and Python": json.dumps(versions(), sort_keys=True),
            }
        )
        backend = None
        if device == "cuda":
            local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= count:
                remedy = f"Use --nproc-per-node={count}, or --device cpu."
                raise ValueError(f"Expected a GPU for each process, but this machine has {count}. {remedy}")
            device = f"cuda:{local}"
        elif device.startswith("cuda"):
            backend = "gloo"  # NCCL refuses processes that share a GPU
        super().__init__(device)
        self.ranks = Ranks(parallel or "data", device=device, backend=backend)
        self.is_first = self.ranks.is_first

    def load_data(self, arms: Mapping[str, Arm], components: Mapping[str, Components]) -> dict[str, LoadedData]:
        """Load the data, on the first rank first: it may download them."""
        for arm in arms.values():
            _check(arm, self.ranks)
        if not self.is_first:
            self.ranks.broadcast()
            return super().load_data(arms, components)
        loaded = super().load_data(arms, components)
        self.ranks.broadcast("loaded")
        return loaded

    def broadcast(self, content: Any) -> Any:
        """Return the object of the first rank."""
        return self.ranks.broadcast(content)

    def hardware(self) -> dict[str, Any]:
        """Return the hardware of this rank and the number of processes."""
        return {**super().hardware(), "processes": self.ranks.size}

    def train(self, plan: Plan, groups: Sequence[GroupPlan], callback: Callback, stop: Stop) -> Iterator[GroupPlan]:
        """Train run groups; ranks other than the first receive them."""
        if not self.is_first:
            while (group := self.ranks.broadcast()) is not None:
                train_group(plan, group, Callback(), stop, self.ranks)
            return
        for group in groups:
            self.ranks.broadcast(group)
            callback.on_group_start(group)
            train_group(plan, group, callback, stop, self.ranks)
            yield group
        self.ranks.broadcast(None)


def _check(arm: Arm, ranks: Ranks) -> None:
    """Refuse an arm that cannot be spread over the ranks."""
    model, train, problem = arm.model, arm.train, ""
    if train.batch_size < ranks.data:
        problem = f"train.batch_size: expected a sample for each of {ranks.data} ranks, but got {train.batch_size}"
    elif ranks.members > 1 and model.kind != "separate":
        problem = f"model.kind: members of {model.kind!r} share a trunk and cannot be spread over ranks"
    elif ranks.members > 1 and model.num_members < ranks.members:
        problem = f"model.num_members: expected a member for each of {ranks.members} ranks, but got {model.num_members}"
    elif ranks.members > 1 and not train.detach_others:
        problem = "train.detach_others: expected true, because members on other ranks receive no gradient"
    if problem:
        raise ConfigError(f"{problem}. Change it, or use fewer ranks or --parallel data.")
