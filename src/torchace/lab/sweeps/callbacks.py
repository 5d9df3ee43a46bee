"""Callbacks of a sweep, and trackers for CSV, TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import csv
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torchace._extras import import_extra
from torchace.lab.schema.experiment import Experiment
from torchace.lab.schema.results import GroupPlan, RunKey, RunResult
from torchace.lab.schema.values import AXES
from torchace.lab.store import flatten
from torchace.lab.training.loop import Progress, RunProgress


class Callback:
    """No-op callback of a sweep; override what you need.

    `on_run_start`, `on_step`, `on_epoch_end` and `on_run_end` are called for each run. The `on_group_...` events are
    called once for all runs that train together; by default they call those of each run. After an interruption, steps
    and epochs since the last checkpoint are reported again.

    Example:
        >>> class PrintEpochs(Callback):
        ...     def on_epoch_end(self, run, progress):
        ...         print(run.diversity, run.seed, progress.epoch, progress.metrics["train_cross_entropy"])
    """

    def on_run_start(self, run: RunKey) -> None:
        """Called when a run starts or resumes."""

    def on_step(self, run: RunKey, progress: RunProgress) -> None:
        """Called a few times a second for each run that trains, with the mean over the epoch so far."""

    def on_epoch_end(self, run: RunKey, progress: RunProgress) -> None:
        """Called after each epoch of a run."""

    def on_run_end(self, run: RunKey, result: RunResult) -> None:
        """Called after the result of a run is written; `result.status` is `finished` or `failed`."""

    def on_plan(self, done: int, total: int) -> None:
        """Called once, with the number of finished runs and of all runs."""

    def on_group_start(self, group: GroupPlan) -> None:
        """Called when a run group starts or resumes."""
        for run in group.runs:
            self.on_run_start(run)

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        """Called a few times a second while a run group trains."""
        for run, own in zip(group.runs, progress.by_run(), strict=True):
            self.on_step(run, own)

    def on_group_epoch_end(self, group: GroupPlan, progress: Progress) -> None:
        """Called after each epoch of a run group."""
        for run, own in zip(group.runs, progress.by_run(), strict=True):
            self.on_epoch_end(run, own)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Called after a run group's results are written; `done` runs of the sweep are finished."""

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        """Called when the worker of a run group died; another one resumes the group."""

    def on_group_restart(self, group: GroupPlan) -> None:
        """Called when a checkpoint of other runs was removed and the run group starts again."""


class CallbackList(Callback):
    """Call several callbacks in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"Expected callbacks of a class derived from torchace.lab.Callback, but got {callback!r}."
                )
        for event in vars(Callback):
            if event.startswith("on_"):
                setattr(self, event, partial(self._call, event))

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)


class Tracker(Callback):
    """Base class: metrics are named `SPLIT/METRIC`, such as `train/cross_entropy`; parameters `SECTION.KEY`."""

    package: ClassVar[str] = ""  # that it needs, and its own name

    def __init__(self, directory: Path, experiment: Experiment) -> None:
        self.directory, self.experiment = directory, experiment
        if self.package:
            self._module = import_extra(self.package, f"The tracker {self.package!r} needs", self.package)
        self._runs: dict[str, Any] = {}  # what the package has opened for each run

    def log(self, run: RunKey, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a run after a step."""
        raise NotImplementedError

    def close(self, run: RunKey, *, failed: bool) -> None:
        """End a run."""

    def on_epoch_end(self, run: RunKey, progress: RunProgress) -> None:
        """Write the scores of an epoch."""
        self.log(run, progress.step, {name.replace("_", "/", 1): value for name, value in progress.metrics.items()})

    def on_run_end(self, run: RunKey, result: RunResult) -> None:
        """Write the final scores."""
        scores = {f"{split}/{name}": v for split, values in result.scores.items() for name, v in values.items()}
        self.log(run, result.steps, scores)
        self.close(run, failed=not result.finished)

    def identify(self, run: RunKey) -> str:
        """Identifier of a run and its directory, the same after a resume."""
        return hashlib.sha256(f"{self.directory.resolve()}:{run.id}".encode()).hexdigest()[:16]

    def parameters(self, run: RunKey) -> dict[str, Any]:
        """Settings of a run: those of its arm, λ and seed."""
        arm = next(arm for arm in self.experiment.complete_arms() if arm.name == run.arm)
        common = flatten(arm.model_dump(mode="json", include={"data", "model", "train"}))
        return {**common, **{key: value for key, value in asdict(run).items() if value is not None}}


class _CSV(Tracker):
    """Append to `metrics.csv` in the run directory, one metric per row; a repeated epoch adds no rows."""

    @cached_property
    def _written(self) -> set[tuple[str, str, str]]:  # run, step, metric
        path = self.directory / "metrics.csv"
        if path.exists():  # remove a partial line of a killed process
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        with open(path, "a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            return {(row["run"], row["step"], row["metric"]) for row in csv.DictReader(file)}

    def log(self, run: RunKey, step: int, metrics: Mapping[str, float]) -> None:
        written = self._written
        with open(self.directory / "metrics.csv", "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                writer.writerow(("run", "arm", "diversity", "seed", *AXES, "step", "metric", "value"))
            for name, value in metrics.items():
                key = (run.id, str(step), name)
                if key not in written:
                    written.add(key)
                    writer.writerow((run.id, *astuple(run), step, name, value))


class _TensorBoard(Tracker):
    """Write scalars to `tensorboard/RUN` in the run directory."""

    package = "tensorboard"

    def on_step(self, run: RunKey, progress: RunProgress) -> None:
        metrics = {name.replace("train_", "train/running_"): value for name, value in progress.metrics.items()}
        self.log(run, progress.step, metrics)

    def log(self, run: RunKey, step: int, metrics: Mapping[str, float]) -> None:
        if run.id not in self._runs:
            from torch.utils.tensorboard import SummaryWriter

            # replaces the events that an interrupted process wrote after this step
            folder = str(self.directory / "tensorboard" / run.id)
            self._runs[run.id] = SummaryWriter(folder, purge_step=step, flush_secs=10)
        for name, value in metrics.items():
            self._runs[run.id].add_scalar(name, value, step)

    def close(self, run: RunKey, *, failed: bool) -> None:
        self._runs.pop(run.id).close()


class _MLflow(Tracker):
    """Write an MLflow run for each run, in an experiment of the sweep's name.

    The store is MLflow's tracking URI if one is set, else `mlflow.db` in the run directory. A resumed run continues
    its MLflow run.
    """

    package = "mlflow"

    @cached_property
    def _client(self) -> Any:
        here = f"sqlite:///{self.directory.resolve() / 'mlflow.db'}"
        return self._module.MlflowClient(None if self._module.is_tracking_uri_set() else here)

    def on_run_start(self, run: RunKey) -> None:
        name, tag = self.experiment.name, self.identify(run)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        if earlier := self._client.search_runs([experiment], f"tags.`torchace.id` = '{tag}'", max_results=1):
            self._runs[run.id] = earlier[0].info.run_id
            self._client.update_run(self._runs[run.id], status="RUNNING")
            return
        tags = {"torchace.id": tag, "torchace.directory": str(self.directory.resolve())}
        self._runs[run.id] = self._client.create_run(experiment, tags=tags, run_name=run.id).info.run_id
        parameters = [self._module.entities.Param(k, str(v)) for k, v in self.parameters(run).items()]
        self._client.log_batch(self._runs[run.id], params=parameters)

    def log(self, run: RunKey, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._module.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._runs[run.id], metrics=entries)

    def close(self, run: RunKey, *, failed: bool) -> None:
        self._client.set_terminated(self._runs.pop(run.id), "FAILED" if failed else "FINISHED")


class _WandB(Tracker):
    """Write a Weights & Biases run for each run, in the project `WANDB_PROJECT` or one of the sweep's name.

    Files are in `wandb` in the run directory; with `WANDB_MODE=offline` nothing is sent.
    """

    package = "wandb"

    def on_run_start(self, run: RunKey) -> None:
        self._runs[run.id] = self._module.init(
            project=os.environ.get("WANDB_PROJECT") or self.experiment.name,
            group=self.directory.name,
            name=run.id,
            id=self.identify(run),
            resume="allow",
            reinit="create_new",  # the runs of a group are open at the same time
            dir=str(self.directory),
            config=self.parameters(run),
            settings=self._module.Settings(silent=True, console="off"),
        )

    def log(self, run: RunKey, step: int, metrics: Mapping[str, float]) -> None:
        self._runs[run.id].log(dict(metrics), step=step)

    def close(self, run: RunKey, *, failed: bool) -> None:
        self._runs.pop(run.id).finish(exit_code=int(failed))


TRACKERS: dict[str, type[Tracker]] = {"csv": _CSV, "tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _WandB}


def make_callbacks(callbacks: Iterable[Any], directory: Path, experiment: Experiment) -> CallbackList:
    """Callbacks of a sweep; names of trackers stand for trackers in the run directory."""
    found = []
    for given in callbacks:
        if isinstance(given, str) and given not in TRACKERS:
            raise ValueError(f"Expected one of the trackers {', '.join(TRACKERS)}, but got {given!r}.")
        found.append(TRACKERS[given](directory, experiment) if isinstance(given, str) else given)
    return CallbackList(found)
