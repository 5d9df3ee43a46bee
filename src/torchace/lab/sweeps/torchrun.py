"""A sweep on several processes that torchrun started, which train each group together.

The first rank plans, writes and prints like a sweep in one process. The others receive the next group, train their part
of it, and write nothing.
"""

from __future__ import annotations

import json
import os
import signal
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
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.distributed import (
    RankLost,
    Ranks,
    check_same,
    connect,
    is_launched,
    parse_layout,
    should_report,
)
from torchace.lab.training.loop import Failure


@contextmanager
def process_group(parallel: str | None) -> Iterator[int | None]:
    """Join the processes that torchrun started; gives this process's rank, or None for a single process.

    An error that several ranks have is raised in one of them; the others exit silently.

    Args:
        parallel: Value of `--parallel`.
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
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield dist.get_rank()
    except Exception as error:
        if hasattr(error, "exit_code"):  # not an error: all ranks end here
            dist.destroy_process_group()
        elif not should_report(store, error):
            raise SystemExit(1) from None
        raise
    dist.destroy_process_group()


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM, which torchrun sends to the other ranks when one dies."""
    if not RankLost.happened:  # else this rank ends once it has reported that
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def rank_sweep(experiment: Experiment, directory: Path, device: str, parallel: str | None) -> RankSweep:
    """Create this rank's part of a sweep.

    Args:
        experiment: The same on every rank.
        directory: Run directory, written by the first rank.
        device: `cpu`; `cuda`, a GPU for each process of a machine; or `cuda:N`, one that they share.
        parallel: See `parse_layout`; by default the batch is split.
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
        """Train unfinished runs; return those that failed, on the first rank. See `Sweep.run`."""
        if self.ranks.is_first:
            failures = super().run(callback, stop)
            self.ranks.broadcast(None)  # no more groups
            return failures
        arms = {arm.name: arm for arm in self.experiment.complete_arms()}
        data = self._prepared(arms)
        store = RunStore(self.directory)  # neither read nor written by this rank
        while (plan := self.ranks.broadcast()) is not None:
            group = GroupPlan(plan["id"], tuple(Run(**run) for run in plan["runs"]), plan["compile"])
            arm = arms[group.runs[0].arm]
            self._do(store, group, arm, data[arm.name], Callback(), stop)
        return {}

    def _prepared(self, arms: dict[str, Arm]) -> dict[str, LoadedData]:
        for arm in arms.values():
            _check(arm, self.ranks)
        if not self.ranks.is_first:
            self.ranks.broadcast()  # wait for the download
            return super()._prepared(arms)
        prepared = super()._prepared(arms)
        self.ranks.broadcast()
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
        for group in groups:
            self.ranks.broadcast(asdict(group))
            yield from super()._work(store, [group], arms, data, callback, stop)


def _check(arm: Arm, ranks: Ranks) -> None:
    """Refuse arms that cannot be split over these ranks, before any training."""
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
