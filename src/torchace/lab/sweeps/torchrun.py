"""A sweep on several processes that torchrun started: each group is trained by all of them together.

The first rank plans, writes and prints as a sweep in one process does. The others receive the next group, train
their part of it, and write nothing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.store import GroupPlan, Run, RunStore
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import ConfigError
from torchace.lab.sweeps.environment import hardware, versions
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.networks import build_network, make_train_config
from torchace.lab.sweeps.sweep import Sweep, config_digest
from torchace.lab.training.distributed import (
    RankLost,
    Ranks,
    check_same,
    connect,
    is_launched,
    parse_layout,
    should_report,
)
from torchace.lab.training.loop import CheckpointPolicy, Failure, fit
from torchace.lab.training.shard import SharedCheckpoints, gather_network, make_shard


@contextmanager
def process_group(parallel: str | None) -> Iterator[int | None]:
    """This process's rank among those that torchrun started; None for a process by itself.

    An error that several ranks run into is raised in one of them; the others end in silence.

    Args:
        parallel: What `--parallel` says.
    """
    if not is_launched():
        if parallel is not None:
            raise ValueError(
                "--parallel needs several processes: torchrun --nproc-per-node=N -m torchace run ... "
                f"--parallel {parallel}."
            )
        yield None
        return
    if int(os.environ["WORLD_SIZE"]) == 1:
        parse_layout(parallel or "data", 1)
        yield None
        return
    store = connect()
    signal.signal(signal.SIGTERM, _end)
    try:
        yield dist.get_rank()
    except Exception as error:
        if hasattr(error, "exit_code"):  # not an error: all ranks end here
            dist.destroy_process_group()
        elif not should_report(store, error):
            raise SystemExit(1) from None
        raise
    dist.destroy_process_group()


def _end(number: int, frame: FrameType | None) -> None:
    """What SIGTERM does where nobody waits for it; torchrun sends it to those that are left when a rank dies."""
    if not RankLost.happened:  # else: not before this one has said so
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def rank_sweep(experiment: Experiment, directory: Path, device: str, parallel: str | None) -> RankSweep:
    """This process's share of a sweep.

    Args:
        experiment: What is run.
        directory: Where the results are written, by the first rank.
        device: `cpu`; `cuda`, a GPU for each process of a machine; or `cuda:N`, one that they share.
        parallel: What is spread over ranks, see `parse_layout`; the batch unless given.
    """
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
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"Expected a GPU for each process, but this machine has {torch.cuda.device_count()}. "
                f"Use --nproc-per-node={torch.cuda.device_count()}, or --device cpu."
            )
        device = f"cuda:{local}"
    elif device.startswith("cuda"):
        backend = "gloo"  # NCCL refuses processes that share a GPU
    return RankSweep(experiment, directory, device, ranks=Ranks(parallel or "data", device=device, backend=backend))


@dataclass(frozen=True)
class RankSweep(Sweep):
    """A sweep whose groups are trained by all ranks together."""

    ranks: Ranks = field(kw_only=True)

    def run(self, callback: Callback | None = None, stop: Callable[[], bool] = lambda: False) -> dict[Run, Failure]:
        """Trains what is not finished yet; the first rank returns the runs that failed. See `Sweep.run`."""
        if self.ranks.is_first:
            failures = super().run(callback, stop)
            self.ranks.broadcast(None)  # nothing comes any more
            return failures
        arms = {arm.name: arm for arm in self.experiment.complete_arms()}
        data = self._prepared(arms)
        store = RunStore(self.directory)  # of which this rank reads nothing and writes nothing
        while (told := self.ranks.broadcast()) is not None:
            group = GroupPlan(told["id"], tuple(Run(**run) for run in told["runs"]), told["compile"])
            arm = arms[group.runs[0].arm]
            self._do(store, group, arm, data[arm.name], Callback(), stop)
        return {}

    def _prepared(self, arms: dict[str, Arm]) -> dict[str, LoadedData]:
        for arm in arms.values():
            _check(arm, self.ranks)
        if not self.ranks.is_first:
            self.ranks.broadcast()
            return super()._prepared(arms)
        prepared = super()._prepared(arms)
        self.ranks.broadcast("data are there")  # one process downloads them
        return prepared

    def _hardware(self) -> dict[str, Any]:
        return {**hardware(self.device), "processes": self.ranks.size}

    def _work(
        self,
        store: RunStore,
        groups: Sequence[GroupPlan],
        arms: Mapping[str, Arm],
        data: Mapping[str, LoadedData],
        callback: Callback,
        stop: Callable[[], bool],
    ) -> Iterator[tuple[GroupPlan | None, float]]:
        def announced() -> Iterator[GroupPlan]:
            for group in groups:
                self.ranks.broadcast(asdict(group))
                yield group

        return super()._work(store, announced(), arms, data, callback, stop)  # type: ignore[arg-type]

    def _do(
        self,
        store: RunStore,
        group: GroupPlan,
        arm: Arm,
        data: LoadedData,
        callback: Callback,
        stop: Callable[[], bool],
    ) -> float:
        seeds = [run.seed for run in group.runs]
        batches = data.batches(arm)
        train_config = make_train_config(arm.train, batches.steps_per_epoch)
        whole = build_network(arm, data.dataset, seeds, self.device)
        network = make_shard(whole, self.ranks)
        if group.compile:
            network.compile()
        kept = whole if self.ranks.is_first and self.ranks.members > 1 else None
        del whole  # a rank needs its own members; the first one all of them, for what it writes
        every = self.experiment.checkpoint
        whose = store.checkpoints(group, config_digest(arm))
        if self.ranks.is_first and whose.remove_foreign():
            callback.on_group_restart(group)
        checkpoints = SharedCheckpoints(whose.directory, kept, owner=whose.owner)
        fitted = fit(
            network,
            batches,
            train_config,
            diversities=[run.diversity for run in group.runs],
            seeds=seeds,
            checkpoint_policy=CheckpointPolicy(checkpoints, every.steps, every.seconds),
            watch=(lambda progress: callback.on_step(group, progress)) if self.ranks.is_first else None,
            stop=stop,
        )
        start = time.monotonic()
        predicted = self._predicted(arm, data, network)
        trained = gather_network(network, kept)
        if trained is not None:
            self._write_results(store, group, arm, data, trained, fitted, train_config.steps, predicted)
            checkpoints.remove()
        return fitted.seconds + time.monotonic() - start


def _check(arm: Arm, ranks: Ranks) -> None:
    """Refuse what cannot be spread like that, before anything is computed."""
    if arm.train.batch_size < ranks.data:
        raise ConfigError(
            f"train.batch_size: expected at least {ranks.data}, a sample for each rank, but got {arm.train.batch_size}."
        )
    if ranks.members == 1:
        return
    if arm.model.kind != "separate":
        raise ConfigError(
            f"model.kind: the members of {arm.model.kind!r} share a trunk and cannot be spread over ranks; "
            "use --parallel data."
        )
    if arm.model.num_members < ranks.members:
        raise ConfigError(
            f"model.num_members: {ranks.members} ranks are more than {arm.model.num_members} members; use fewer, or "
            f"--parallel {arm.model.num_members}xD, the batch over D ranks."
        )
    if not arm.train.detach_others:
        raise ConfigError(
            "train.detach_others: members on other ranks are constants; set detach_others = true, or use "
            "--parallel data."
        )
