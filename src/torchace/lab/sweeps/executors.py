"""Choice of the executor: this process, the ranks of torchrun, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchace.lab.schema.experiment import Experiment
from torchace.lab.sweeps.executor import Executor, Stop
from torchace.lab.training.members import resolve_device


@contextmanager
def make_executor(
    experiment: Experiment,
    directory: Path,
    device: str = "auto",
    *,
    ray: str | None = None,
    parallel: str | None = None,
    rank: int | None = None,
    stop: Stop = lambda: False,
) -> Iterator[Executor]:
    """Yield the executor of a sweep.

    Args:
        experiment: The experiment.
        directory: The run directory, for messages.
        device: `"cpu"`, `"cuda"`, `"cuda:N"` or `"auto"`.
        ray: Address of a Ray cluster.
        parallel: What the ranks of torchrun split, see `parse_layout`.
        rank: Rank of this process from `process_group`; None without torchrun.
        stop: Ends the wait for a Ray worker.
    """
    if ray is not None:
        if rank is not None:
            raise ValueError("Expected torchrun or --ray, but got both: Ray starts its own processes.")
        from torchace.lab.sweeps.ray import connect_ray

        with connect_ray(ray, device, directory, stop) as executor:
            yield executor
    elif rank is None:
        yield Executor(resolve_device(device))
    else:
        from torchace.lab.sweeps.torchrun import RankExecutor

        yield RankExecutor(experiment, resolve_device(device), parallel)
