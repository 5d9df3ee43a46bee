"""Sweeps on CIFAR-10 within a time limit, for `equal_budgets.py` and `heads.py`.

A sweep stops at SIGTERM with a checkpoint, keeps its finished runs, and resumes when the command is repeated. With
`--seconds`, a few steps are timed first and the number of epochs is chosen to fit.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import measure_gpu
import torch
from adapters_training import load_data

from torchace.lab.schema.experiment import Experiment
from torchace.lab.schema.results import GroupPlan
from torchace.lab.store import RunStore
from torchace.lab.sweeps import loaded_data
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.executor import Executor
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import Interrupted, Progress

IMAGES, BATCH_SIZE, VALIDATION = 50_000, 128, 0.1
TIMED_STEPS = 100
LEAST_EPOCHS = 3
DATA = {"name": "cifar10", "normalize": "standard", "augment": True, "validation": VALIDATION}
TRAIN = {
    "batch_size": BATCH_SIZE,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "compile": False,
}
QUICK_IMAGES = 1200  # training images of `load_data` in a rehearsal


def arguments(description: str, epochs: int) -> argparse.ArgumentParser:
    """Options of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="results of all finished runs, as JSON")
    parser.add_argument("--runs", type=Path, required=True, help="run directories, for resuming")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=epochs, help="at most")
    parser.add_argument("--seconds", type=float, help="choose fewer epochs if training would take longer")
    parser.add_argument("--quick", action="store_true", help="few images and steps: a rehearsal")
    return parser


class Sweeps:
    """Run directories in one folder, and the JSON file with their results."""

    def __init__(self, options: argparse.Namespace, describe: Callable[[], dict[str, Any]]) -> None:
        self.options, self.describe = options, describe
        self.stopped, self.start = False, time.monotonic()
        self.on_gpu = options.device.startswith("cuda")
        options.runs.mkdir(parents=True, exist_ok=True)
        if options.out.exists():  # the seconds of interrupted commands count
            self.start -= json.loads(options.out.read_text())["environment"]["seconds_in_all"]
        if options.quick:
            loaded_data.load = lambda name: load_data(name, quick=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    @property
    def steps_per_epoch(self) -> int:
        images = QUICK_IMAGES if self.options.quick else IMAGES
        return round(images * (1 - VALIDATION)) // BATCH_SIZE

    def experiment(self, name: str, *, steps: int, model: dict[str, Any], arms: list[Any], **sweep: Any) -> Experiment:
        """Return an experiment with the common settings."""
        precision = "bf16" if self.on_gpu else "float32"
        train = TRAIN | {"steps": steps, "precision": precision, "warmup_steps": min(400, steps // 10)}
        content = {"name": name, "data": DATA, "model": model, "train": train}
        return Experiment.model_validate(content | {"arms": arms, "sweep": {"keep_weights": True, **sweep}})

    def run(self, experiment: Experiment, callback: Callback | None = None) -> Path:
        """Train what is not finished; exit with the results so far after a signal."""
        directory = self.options.runs / experiment.name
        try:
            sweep = Sweep(experiment, directory, Executor(self.options.device))
            sweep.run(callback or _Report(self), lambda: self.stopped)
        except Interrupted:
            self.write()
            raise SystemExit("Stopped; repeat the command to resume.") from None
        return directory

    def seconds_per_step(self, experiment: Experiment) -> float:
        """Time the steps of an experiment of one run group."""
        timer = _Timer()
        with tempfile.TemporaryDirectory() as folder:
            Sweep(experiment, Path(folder), Executor(self.options.device)).run(timer, lambda: self.stopped)
        (first, start), (last, end) = timer.records[0], timer.records[-1]
        return (end - start) / max(1, last - first)

    def choose_epochs(self, seconds_per_step: Callable[[], float], setup: float) -> int:
        """Return the number of epochs, the same when resumed; `setup` are the seconds beside the steps."""
        file = self.options.runs / "epochs.json"
        if not file.exists():
            epochs = self.options.epochs
            if self.options.seconds is not None:
                step = seconds_per_step()
                fit = int((self.options.seconds - setup) / (step * self.steps_per_epoch))
                epochs = min(epochs, max(LEAST_EPOCHS, fit))
                print(f"{step * 1e3:.1f} ms for a step of all runs: {epochs} epochs ({fit} would fit)", flush=True)
            file.write_text(json.dumps(epochs))
        return int(json.loads(file.read_text()))

    def write(self) -> None:
        """Write the results of all finished runs."""
        place = measure_gpu.environment() if self.on_gpu else measure.environment()
        place["seconds_in_all"] = round(time.monotonic() - self.start, 1)
        content = {"environment": place, "settings": TRAIN, **self.describe()}
        temporary = self.options.out.with_suffix(".partial")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.options.out)


class _Report(Callback):
    """Write the results after each run group."""

    def __init__(self, sweeps: Sweeps) -> None:
        self.sweeps = sweeps

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        print(f"{time.monotonic() - self.sweeps.start:6.1f} s  {group.id}: {done} runs finished", flush=True)
        self.sweeps.write()


class _Timer(Callback):
    """Record steps and times; reading the score waits for the device."""

    def __init__(self) -> None:
        self.records: list[tuple[int, float]] = []

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        if progress.step > progress.steps // 10:  # without the steps before the CUDA graph
            self.records.append((progress.step, time.monotonic()))


def read_runs(directory: Path) -> list[dict[str, Any]]:
    """Return the finished runs of a run directory as rows of scalars."""
    store, rows = RunStore(directory), []
    for group in store.groups() if (directory / "experiment.json").exists() else []:
        for key in group.runs:
            if (run := store.result(key)) is None or run.metrics is None:
                continue
            row = {"arm": key.arm, "diversity": key.diversity, "seed": key.seed, "parameters": run.parameters}
            row |= {"ms_per_step": run.seconds * 1e3 / run.steps, "group_size": len(group.runs), "steps": run.steps}
            row["train_cross_entropy"] = run.history[-1]["train_cross_entropy"]
            for split, scores in run.scores.items():
                row[split] = {name: value for name, value in scores.items() if isinstance(value, float)}
            rows.append(row)
    return rows


def count_operations(network: torch.nn.Module) -> float:
    """Return the multiplications of one forward pass of one image."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        network.eval()(torch.zeros(1, 3, 32, 32))
    return counter.get_total_flops() / 2
