"""A sweep: every run of an experiment, in groups, each trained, scored and written down once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._files import json_digest
from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.store import FORMAT, GroupPlan, Run, RunStore, RunStoreError
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.environment import hardware, versions
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.networks import (
    build_network,
    default_group_size,
    describe_network,
    is_compiled,
    make_train_config,
)
from torchace.lab.training.checkpoint import weights_digest
from torchace.lab.training.distributed import SingleProcess
from torchace.lab.training.evaluate import evaluate, predict_logits
from torchace.lab.training.loop import NONFINITE, CheckpointPolicy, Failure, FitResult, fit
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.shard import gather_network, shard_network

WRITE_EVERY = 1.0  # seconds, in which groups that are done share one writing of experiment.json

Scored = tuple[list[Tensor], Tensor]  # each run's logits `(K, N, C)`, and the labels
Predicted = tuple[Scored, Scored | None]  # on test samples, and on those held out


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
    ranks: SingleProcess = field(default_factory=SingleProcess, kw_only=True)  # processes that train a group together

    def run(self, callback: Callback | None = None, stop: Callable[[], bool] = lambda: False) -> dict[Run, Failure]:
        """Trains what is not finished yet and returns the runs that failed.

        Interrupted at any moment, it goes on where it was: finished runs are kept, the group at hand continues from its
        checkpoint, and the results are those of a sweep that was never interrupted.

        A group is trained whole: who is in it was fixed when it was planned, perhaps by a command that asked for more.
        """
        callback = callback or Callback()
        arms = {arm.name: arm for arm in self.experiment.complete_arms()}
        data = self._prepared(arms)
        described = [self._arm_described(arm, data[arm.name]) for arm in arms.values()]
        # Whatever is wrong with the experiment was said by now; from here on there are files.
        store = RunStore(self.directory)
        store.refuse_foreign()
        with store.locked():
            experiment = self._begin(store, described, data[next(iter(arms))])
            groups = self._planned(store, arms, data)
            store.clean(groups)
            wanted = {run for arm in arms.values() for run in self._runs_of(arm)}
            todo = [
                group for group in groups if any(run in wanted and not store.is_finished(run) for run in group.runs)
            ]
            told = wanted.union(*(group.runs for group in todo))
            done = {run for run in told if store.is_finished(run)}
            callback.on_plan(len(done), len(told))
            self._resume_count(experiment, store, todo)
            written = time.monotonic()
            try:
                for group, seconds in self._work(store, todo, arms, data, callback, stop):
                    self._count(experiment, store, todo, group, seconds)
                    if time.monotonic() - written >= WRITE_EVERY:
                        store.write_experiment(experiment)
                        written = time.monotonic()
                    if group is not None:
                        done.update(group.runs)
                        callback.on_group_end(group, len(done))
            except BaseException:
                with suppress(OSError):  # the error at hand is the one to hear of
                    store.write_experiment(experiment)
                raise
            store.write_experiment(experiment)
            failures = {run: store.failure(run) for run in sorted(wanted, key=lambda run: run.id)}
            return {run: failure for run, failure in failures.items() if failure is not None}

    # -- planning -----------------------------------------------------------------------------------------------------

    def _prepared(self, arms: dict[str, Arm]) -> dict[str, LoadedData]:
        """Every arm's data; arms that ask for the same share it."""
        known = {
            section: LoadedData.load(section, self.device)
            for section in dict.fromkeys(arm.data for arm in arms.values())
        }
        for arm in arms.values():
            known[arm.data].check_batch_size(arm)
        return {arm.name: known[arm.data] for arm in arms.values()}

    def _arm_described(self, arm: Arm, data: LoadedData) -> dict[str, Any]:
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

    def _begin(self, store: RunStore, arms: list[dict[str, Any]], data: LoadedData) -> dict[str, Any]:
        """Writes down what the experiment is, or checks that the directory holds this very experiment."""
        config = self.experiment.model_dump(mode="json")
        seeds, started, seconds = set(self.experiment.sweep.seeds), datetime.now(UTC).isoformat(timespec="seconds"), 0.0
        counted: dict[str, float] = {}  # of the seconds, those of unfinished groups, which their checkpoints hold too
        if (before := store.experiment()) is not None:
            try:
                _check_same(before["config"], config, self.directory)
                # earlier seeds and λ are still part of it
                seeds |= set(before["seeds"])
                if not all(type(seed) is int for seed in seeds) or type(before["seconds"]) not in (int, float):
                    raise TypeError("a seed or a time that is no number")
                earlier = {arm["name"]: arm["diversities"] for arm in before["arms"]}
                arms = [{**a, "diversities": sorted({*a["diversities"], *earlier[a["name"]]})} for a in arms]
                started, seconds = before["started"], float(before["seconds"])
                counted = {group: spent + 0.0 for group, spent in before.get("counted", {}).items()}
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise RunStoreError(
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
        store.write_experiment(content)
        return content

    def _hardware(self) -> dict[str, Any]:
        """What the runs are made on."""
        return hardware(self.device)

    def _runs_of(self, arm: Arm) -> list[Run]:
        return [Run(arm.name, d, seed) for d in arm.diversities for seed in self.experiment.sweep.seeds]

    def _planned(self, store: RunStore, arms: Mapping[str, Arm], data: Mapping[str, LoadedData]) -> list[GroupPlan]:
        """The groups of the store, and new ones for runs that are in none of them."""
        before = store.groups()
        groups = list(before)
        known = {run for group in groups for run in group.runs}
        taken = Counter(group.runs[0].arm for group in groups)
        for arm in arms.values():
            new = [run for run in self._runs_of(arm) if run not in known]
            size = self.experiment.sweep.cohort_size or default_group_size(arm.model, self.device)
            steps = make_train_config(arm.train, data[arm.name].batches(arm).steps_per_epoch).steps
            compiled = is_compiled(arm.train, steps, self.device)
            for start in range(0, len(new), size):
                groups.append(GroupPlan(f"{arm.name}-{taken[arm.name]}", tuple(new[start : start + size]), compiled))
                taken[arm.name] += 1
        if groups != before:
            store.write_groups(groups)
        return groups

    # -- counting seconds ---------------------------------------------------------------------------------------------

    def _resume_count(self, experiment: dict[str, Any], store: RunStore, groups: Sequence[GroupPlan]) -> None:
        """Counts what earlier attempts at these groups took, where the groups themselves will not say so."""

    def _count(
        self,
        experiment: dict[str, Any],
        store: RunStore,
        groups: Sequence[GroupPlan],
        group: GroupPlan | None,
        seconds: float,
    ) -> None:
        """Adds the seconds of a group, earlier attempts too, but for those that were counted when they were made."""
        experiment["seconds"] += seconds - (0.0 if group is None else experiment["counted"].pop(group.id, 0.0))

    # -- doing --------------------------------------------------------------------------------------------------------

    def _work(
        self,
        store: RunStore,
        groups: Sequence[GroupPlan],
        arms: Mapping[str, Arm],
        data: Mapping[str, LoadedData],
        callback: Callback,
        stop: Callable[[], bool],
    ) -> Iterator[tuple[GroupPlan | None, float]]:
        """Does groups, here and one after another; each that is written down comes out.

        With it come the seconds that it took, earlier attempts too. Where groups are done at the same time they are
        those since the last one came out: added up, both are how long somebody was at work. None stands for no group.
        """
        for group in groups:
            callback.on_group_start(group)
            arm = arms[group.runs[0].arm]
            yield group, self._do(store, group, arm, data[arm.name], callback, stop)

    def _do(
        self,
        store: RunStore,
        group: GroupPlan,
        arm: Arm,
        data: LoadedData,
        callback: Callback,
        stop: Callable[[], bool],
    ) -> float:
        """Trains a group, scores its runs and writes them down; returns the seconds it took, earlier attempts too."""
        seeds = [run.seed for run in group.runs]
        batches = data.batches(arm)
        train_config = make_train_config(arm.train, batches.steps_per_epoch)
        network = shard_network(build_network(arm, data.dataset, seeds, self.device), self.ranks)
        if group.compile:
            network.compile()
        every = self.experiment.checkpoint
        checkpoints = store.checkpoints(group, config_digest(arm))
        if self.ranks.is_first and checkpoints.remove_foreign():
            callback.on_group_restart(group)
        fitted = fit(
            network,
            batches,
            train_config,
            diversities=[run.diversity for run in group.runs],
            seeds=seeds,
            checkpoint_policy=CheckpointPolicy(checkpoints, every.steps, every.seconds),
            on_progress=lambda progress: callback.on_step(group, progress),
            stop=stop,
        )
        start = time.monotonic()
        predicted = self._predicted(arm, data, network)
        trained = gather_network(network)
        if trained is not None:  # the first rank writes
            self._write_results(store, group, arm, data, trained, fitted, train_config.steps, predicted)
            checkpoints.remove()
        return fitted.seconds + time.monotonic() - start

    def _predicted(self, arm: Arm, data: LoadedData, network: RunGroup) -> Predicted:
        """What the runs predict on test samples, and on those held out."""
        test = predict_logits(network, data.chunks(arm, data.dataset.test))
        return test, None if data.validation is None else predict_logits(network, data.chunks(arm, data.validation))

    def _write_results(
        self,
        store: RunStore,
        group: GroupPlan,
        arm: Arm,
        data: LoadedData,
        network: RunGroup,
        fitted: FitResult,
        steps: int,
        predicted: Predicted,
    ) -> None:
        (logits, target), held_out = predicted
        for r, run in enumerate(group.runs):
            if store.is_finished(run):
                continue
            failure = fitted.failures.get(r) or _unpredictable(logits[r], steps)
            metrics: dict[str, Any] | None = None
            arrays: dict[str, Tensor] = {}
            if failure is None:
                test = evaluate(logits[r], target, data.images)
                validation = None if held_out is None else evaluate(held_out[0][r], held_out[1]).metrics
                metrics, arrays = {"test": test.metrics, "validation": validation, "train": None}, test.arrays
            store.write_result(
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
                    "seconds": fitted.seconds / len(group.runs),
                    "parameters": _parameters_of(network),
                    "job": group.id,
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
            raise RunStoreError(
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
