"""A sweep on several processes that torchrun started, which train each group together.

The first rank plans, writes and prints like a sweep in one process. The others receive the next group, train their part
of it, and write nothing.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.schema.results import GroupPlan
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import ConfigError
from torchace.lab.sweeps.environment import versions
from torchace.lab.sweeps.executor import Executor, Plan, Stop, train_group
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.training.distributed import (
    RankLostError,
    Ranks,
    check_same,
    connect,
    is_launched,
    parse_layout,
    should_report,
)


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
    if not RankLostError.happened:  # else this rank ends once it has reported that
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class RankExecutor(Executor):
    """Train each run group on all ranks together; the first rank plans and writes, the others only train.

    Args:
        experiment: The experiment, the same on all ranks.
        device: `cpu`; `cuda`, a GPU for each process of a machine; or `cuda:N`, one that they share.
        parallel: What is spread over ranks, see `parse_layout`; the batch by default.
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
                raise ValueError(
                    f"Expected a GPU for each process, but this machine has {count}. "
                    f"Use --nproc-per-node={count}, or --device cpu."
                )
            device = f"cuda:{local}"
        elif device.startswith("cuda"):
            backend = "gloo"  # NCCL refuses processes that share a GPU
        super().__init__(device)
        self.ranks = Ranks(parallel or "data", device=device, backend=backend)
        self.is_first = self.ranks.is_first

    def load_data(self, arms: Mapping[str, Arm]) -> dict[str, LoadedData]:
        for arm in arms.values():
            _check(arm, self.ranks)
        if not self.is_first:
            self.ranks.broadcast()  # until the first rank has downloaded the data
            return super().load_data(arms)
        loaded = super().load_data(arms)
        self.ranks.broadcast("loaded")
        return loaded

    def hardware(self) -> dict[str, Any]:
        return {**super().hardware(), "processes": self.ranks.size}

    def train(
        self, plan: Plan, groups: Sequence[GroupPlan], callback: Callback, stop: Stop
    ) -> Iterator[tuple[GroupPlan | None, float]]:
        if not self.is_first:
            while (content := self.ranks.broadcast()) is not None:
                group = GroupPlan(**content)
                train_group(plan, group, Callback(), stop, self.ranks)
            return
        for group in groups:
            self.ranks.broadcast(asdict(group))
            callback.on_group_start(group)
            yield group, train_group(plan, group, callback, stop, self.ranks)
        self.ranks.broadcast(None)


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
