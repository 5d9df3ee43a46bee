"""A sweep under torchrun: all ranks train each group together; only the first plans, writes and prints."""

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
from torchace.lab.sweeps.config import Components, ConfigError, versions
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
    """Join torchrun's process group and yield the rank; None for a single process.

    An error that several ranks have is raised on one of them only.
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
        if hasattr(error, "exit_code"):  # typer.Exit, on all ranks
            dist.destroy_process_group()
        elif not should_report(store, error):
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
        """Return the JSON content of the first rank."""
        return self.ranks.broadcast(content)

    def hardware(self) -> dict[str, Any]:
        """Return the hardware of this rank and the number of processes."""
        return {**super().hardware(), "processes": self.ranks.size}

    def train(
        self, plan: Plan, groups: Sequence[GroupPlan], callback: Callback, stop: Stop
    ) -> Iterator[tuple[GroupPlan | None, float]]:
        """Train run groups; ranks other than the first receive them."""
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
    if arm.train.batch_size < ranks.data:
        raise ConfigError(
            f"train.batch_size: expected at least {ranks.data}, one sample for each rank, but got "
            f"{arm.train.batch_size}."
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
            f"model.num_members: expected at least {ranks.members}, one member for each rank, but got "
            f"{arm.model.num_members}. Use fewer ranks, or --parallel {arm.model.num_members}xD to split the batch too."
        )
    if not arm.train.detach_others:
        raise ConfigError(
            "train.detach_others: expected true, because members on other ranks receive no gradient, but got false. "
            "Set detach_others = true, or use --parallel data."
        )
