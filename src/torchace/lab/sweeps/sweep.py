"""A sweep: every run of an experiment, in jobs, each trained, scored and written down once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._files import json_digest
from torchace.lab.sweeps.config import Arm, Experiment
from torchace.lab.sweeps.environment import hardware, versions
from torchace.lab.sweeps.loaded_data import Prepared
from torchace.lab.sweeps.networks import (
    build_network,
    default_group_size,
    describe_network,
    is_compiled,
    make_train_config,
)
from torchace.lab.sweeps.run_store import FORMAT, Job, Ledger, LedgerError, Run
from torchace.lab.training.checkpoint import weights_digest
from torchace.lab.training.evaluate import evaluate, predict_logits
from torchace.lab.training.loop import NONFINITE, CheckpointPolicy, Failure, FitResult, Progress, fit
from torchace.lab.training.run_group import RunGroup

WRITE_EVERY = 1.0  # seconds, in which jobs that are done share one writing of experiment.json

Scored = tuple[list[Tensor], Tensor]  # each run's logits `(K, N, C)`, and the labels
Predicted = tuple[Scored, Scored | None]  # on test samples, and on those held out


class Watcher:
    """Is told what a sweep does; this one does not care."""

    def planned(self, done: int, total: int) -> None:
        """So many of all runs are finished already."""

    def started(self, job: Job) -> None:
        """A job begins or goes on."""

    def stepped(self, job: Job, progress: Progress) -> None:
        """Steps of a job were made."""

    def finished(self, job: Job, done: int) -> None:
        """A job's runs are written down; so many of all runs are finished now."""

    def died(self, job: Job, how: str) -> None:
        """The process that did a job died; the job goes on in another one."""

    def restarted(self, job: Job) -> None:
        """A checkpoint of other runs was in a job's place and was removed; the job starts anew."""


class Unfinished(Exception):
    """Runs that could not be finished, each with the reason why; all others are."""

    def __init__(self, reasons: Mapping[Run, str]) -> None:
        super().__init__("; ".join(f"{run.id}: {why}" for run, why in reasons.items()))
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class Sweep:
    """An experiment and the directory it is run in."""

    experiment: Experiment
    directory: Path
    device: str = "cpu"

    def run(self, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False) -> dict[Run, Failure]:
        """Trains what is not finished yet and returns the runs that failed.

        Interrupted at any moment, it goes on where it was: finished runs are kept, the job at hand continues from its
        checkpoint, and the results are those of a sweep that was never interrupted.

        A job is trained whole: who is in it was fixed when it was planned, perhaps by a command that asked for more.
        """
        watcher = watcher or Watcher()
        arms = {arm.name: arm for arm in self.experiment.complete_arms()}
        data = self._prepared(arms)
        described = [self._arm_described(arm, data[arm.name]) for arm in arms.values()]
        # Whatever is wrong with the experiment was said by now; from here on there are files.
        ledger = Ledger(self.directory)
        ledger.refuse_foreign()
        with ledger.locked():
            experiment = self._begin(ledger, described, data[next(iter(arms))])
            jobs = self._planned(ledger, arms, data)
            ledger.clean(jobs)
            wanted = {run for arm in arms.values() for run in self._runs_of(arm)}
            todo = [job for job in jobs if any(run in wanted and not ledger.is_finished(run) for run in job.runs)]
            told = wanted.union(*(job.runs for job in todo))
            done = {run for run in told if ledger.is_finished(run)}
            watcher.planned(len(done), len(told))
            self._resume_count(experiment, ledger, todo)
            written = time.monotonic()
            try:
                for job, seconds in self._work(ledger, todo, arms, data, watcher, stop):
                    self._count(experiment, ledger, todo, job, seconds)
                    if time.monotonic() - written >= WRITE_EVERY:
                        ledger.write_experiment(experiment)
                        written = time.monotonic()
                    if job is not None:
                        done.update(job.runs)
                        watcher.finished(job, len(done))
            except BaseException:
                with suppress(OSError):  # the error at hand is the one to hear of
                    ledger.write_experiment(experiment)
                raise
            ledger.write_experiment(experiment)
            failures = {run: ledger.failure(run) for run in sorted(wanted, key=lambda run: run.id)}
            return {run: failure for run, failure in failures.items() if failure is not None}

    # -- planning -----------------------------------------------------------------------------------------------------

    def _prepared(self, arms: dict[str, Arm]) -> dict[str, Prepared]:
        """Every arm's data; arms that ask for the same share it."""
        known = {
            section: Prepared.of(section, self.device) for section in dict.fromkeys(arm.data for arm in arms.values())
        }
        for arm in arms.values():
            known[arm.data].check_batch_size(arm)
        return {arm.name: known[arm.data] for arm in arms.values()}

    def _arm_described(self, arm: Arm, data: Prepared) -> dict[str, Any]:
        """An arm in a result file. Builds its network once, which finds out whether there is such a network."""
        network = build_network(arm, data.dataset, [0], "cpu")
        return {
            "name": arm.name,
            "label": arm.label,
            "num_members": arm.model.num_members,
            "batches": arm.train.batches,
            "network": describe_network(arm.model, data.dataset),
            "parameters": _parameters_of(network),
            "diversities": list(arm.diversities),
            "baseline": arm.baseline,
            "data": data.described(),
        }

    def _begin(self, ledger: Ledger, arms: list[dict[str, Any]], data: Prepared) -> dict[str, Any]:
        """Writes down what the experiment is, or checks that the directory holds this very experiment."""
        config = self.experiment.model_dump(mode="json")
        seeds, started, seconds = set(self.experiment.sweep.seeds), datetime.now(UTC).isoformat(timespec="seconds"), 0.0
        counted: dict[str, float] = {}  # of the seconds, those of unfinished jobs, which their checkpoints hold too
        if (before := ledger.experiment()) is not None:
            try:
                _check_same(before["config"], config, self.directory)
                # earlier seeds and λ are still part of it
                seeds |= set(before["seeds"])
                if not all(type(seed) is int for seed in seeds) or type(before["seconds"]) not in (int, float):
                    raise TypeError("a seed or a time that is no number")
                earlier = {arm["name"]: arm["diversities"] for arm in before["arms"]}
                arms = [{**a, "diversities": sorted({*a["diversities"], *earlier[a["name"]]})} for a in arms]
                started, seconds = before["started"], float(before["seconds"])
                counted = {job: spent + 0.0 for job, spent in before.get("counted", {}).items()}
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise LedgerError(
                    f"experiment.json in {self.directory} is damaged. Choose another --out, or remove the directory."
                ) from error
        content = {
            "format": FORMAT,
            "name": self.experiment.name,
            "title": self.experiment.title or self.experiment.name,
            "description": self.experiment.description,
            "task": "classification",
            "data": data.described(),
            "arms": arms,
            "seeds": sorted(seeds),
            "paper": config["paper"],
            "hardware": self._hardware(),
            "versions": versions(),
            "config": config,
            "started": started,
            "seconds": seconds,
            "counted": counted,
        }
        ledger.write_experiment(content)
        return content

    def _hardware(self) -> dict[str, Any]:
        """What the runs are made on."""
        return hardware(self.device)

    def _runs_of(self, arm: Arm) -> list[Run]:
        return [Run(arm.name, d, seed) for d in arm.diversities for seed in self.experiment.sweep.seeds]

    def _planned(self, ledger: Ledger, arms: Mapping[str, Arm], data: Mapping[str, Prepared]) -> list[Job]:
        """The jobs of the ledger, and new ones for runs that are in none of them."""
        before = ledger.jobs()
        jobs = list(before)
        known = {run for job in jobs for run in job.runs}
        taken = Counter(job.runs[0].arm for job in jobs)
        for arm in arms.values():
            new = [run for run in self._runs_of(arm) if run not in known]
            size = self.experiment.sweep.cohort_size or default_group_size(arm.model, self.device)
            steps = make_train_config(arm.train, data[arm.name].batches(arm).steps_per_epoch).steps
            compiled = is_compiled(arm.train, steps, self.device)
            for start in range(0, len(new), size):
                jobs.append(Job(f"{arm.name}-{taken[arm.name]}", tuple(new[start : start + size]), compiled))
                taken[arm.name] += 1
        if jobs != before:
            ledger.write_jobs(jobs)
        return jobs

    # -- counting seconds ---------------------------------------------------------------------------------------------

    def _resume_count(self, experiment: dict[str, Any], ledger: Ledger, jobs: Sequence[Job]) -> None:
        """Counts what earlier attempts at these jobs took, where the jobs themselves will not say so."""

    def _count(
        self, experiment: dict[str, Any], ledger: Ledger, jobs: Sequence[Job], job: Job | None, seconds: float
    ) -> None:
        """Adds the seconds of a job, earlier attempts too, but for those that were counted when they were made."""
        experiment["seconds"] += seconds - (0.0 if job is None else experiment["counted"].pop(job.id, 0.0))

    # -- doing --------------------------------------------------------------------------------------------------------

    def _work(
        self,
        ledger: Ledger,
        jobs: Sequence[Job],
        arms: Mapping[str, Arm],
        data: Mapping[str, Prepared],
        watcher: Watcher,
        stop: Callable[[], bool],
    ) -> Iterator[tuple[Job | None, float]]:
        """Does jobs, here and one after another; each that is written down comes out.

        With it come the seconds that it took, earlier attempts too. Where jobs are done at the same time they are
        those since the last one came out: added up, both are how long somebody was at work. None stands for no job.
        """
        for job in jobs:
            watcher.started(job)
            arm = arms[job.runs[0].arm]
            yield job, self._do(ledger, job, arm, data[arm.name], watcher, stop)

    def _do(
        self, ledger: Ledger, job: Job, arm: Arm, data: Prepared, watcher: Watcher, stop: Callable[[], bool]
    ) -> float:
        """Trains a job, scores its runs and writes them down; returns the seconds it took, earlier attempts too."""
        seeds = [run.seed for run in job.runs]
        batches = data.batches(arm)
        train_config = make_train_config(arm.train, batches.steps_per_epoch)
        network = build_network(arm, data.dataset, seeds, self.device, compile=job.compile)
        every = self.experiment.checkpoint
        checkpoints = ledger.checkpoints(job, config_digest(arm))
        if checkpoints.remove_foreign():
            watcher.restarted(job)
        fitted = fit(
            network,
            batches,
            train_config,
            diversities=[run.diversity for run in job.runs],
            seeds=seeds,
            checkpoint_policy=CheckpointPolicy(checkpoints, every.steps, every.seconds),
            watch=lambda progress: watcher.stepped(job, progress),
            stop=stop,
        )
        start = time.monotonic()
        predicted = self._predicted(arm, data, network)
        self._write_results(ledger, job, arm, data, network, fitted, train_config.steps, predicted)
        checkpoints.remove()
        return fitted.seconds + time.monotonic() - start

    def _predicted(self, arm: Arm, data: Prepared, network: RunGroup) -> Predicted:
        """What the runs predict on test samples, and on those held out."""
        test = predict_logits(network, data.chunks(arm, data.dataset.test))
        return test, None if data.validation is None else predict_logits(network, data.chunks(arm, data.validation))

    def _write_results(
        self,
        ledger: Ledger,
        job: Job,
        arm: Arm,
        data: Prepared,
        network: RunGroup,
        fitted: FitResult,
        steps: int,
        predicted: Predicted,
    ) -> None:
        (logits, target), held_out = predicted
        for r, run in enumerate(job.runs):
            if ledger.is_finished(run):
                continue
            failure = fitted.failures.get(r) or _unpredictable(logits[r], steps)
            metrics: dict[str, Any] | None = None
            arrays: dict[str, Tensor] = {}
            if failure is None:
                test = evaluate(logits[r], target, data.images)
                validation = None if held_out is None else evaluate(held_out[0][r], held_out[1]).metrics
                metrics, arrays = {"test": test.metrics, "validation": validation, "train": None}, test.arrays
            ledger.write_result(
                run,
                {
                    "format": FORMAT,
                    "run": run.id,
                    "arm": run.arm,
                    "diversity": run.diversity,
                    "seed": run.seed,
                    "num_members": arm.model.num_members,
                    "batches": arm.train.batches,
                    "status": "finished" if failure is None else "failed",
                    "failure": None if failure is None else vars(failure),
                    "metrics": metrics,
                    "history": [
                        {"epoch": e["epoch"], "step": e["step"], "train_cross_entropy": e["score"][r]}
                        for e in fitted.history
                    ],
                    "steps": steps,
                    "seconds": fitted.seconds / len(job.runs),
                    "parameters": _parameters_of(network),
                    "job": job.id,
                    "weights_sha256": weights_digest(network, r) if failure is None else None,
                    "versions": versions(),
                    **hardware(self.device),
                },
                arrays,
            )


def config_digest(arm: Arm) -> str:
    """A SHA-256 of everything about an arm that its runs depend on."""
    return json_digest(arm.model_dump(mode="json", include={"data", "model", "train"}))


def _parameters_of(network: RunGroup) -> int:
    return sum(p.numel() for p in network.parameters()) // network.num_runs


def _unpredictable(logits: Tensor, steps: int) -> Failure | None:
    """A run whose last step left weights that predict NaN or Inf."""
    bad = (~torch.isfinite(logits)).flatten(1).any(1).nonzero().flatten().tolist()
    return Failure(NONFINITE, bad[0], steps) if bad else None


def _check_same(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Refuse to mix two experiments in one directory; more seeds or λ of the same one are welcome."""
    old, new = _flat(before), _flat(now)
    for key in sorted({*old, *new}):
        if key.endswith("diversities"):
            continue
        if old.get(key) != new.get(key):
            raise LedgerError(
                f"{directory} holds runs with {key} = {old.get(key)!r}, but now it is {new.get(key)!r}. "
                "Choose another --out, or remove the directory."
            )


# What may change without changing a run: which runs there are, how often they are saved, what is said about them.
_FREE = {"sweep", "checkpoint", "title", "description", "paper"}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as `section.key: value`; an arm's keys under its name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key == "arms":
            value = {arm["name"]: {k: v for k, v in arm.items() if k != "label"} for arm in value}
        if key not in _FREE:
            flat |= {f"{key}.{k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value}
    return flat
