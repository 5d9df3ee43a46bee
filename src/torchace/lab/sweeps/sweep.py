"""A sweep: the runs of an experiment, planned in run groups, trained by an executor, stored in a directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.schema.results import ArmSummary, ExperimentResult, Failure, GroupPlan, RunKey
from torchace.lab.schema.values import AXES
from torchace.lab.store import RunStore, RunStoreError, flatten
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import Components, ConfigError, named_metrics, versions
from torchace.lab.sweeps.executor import Executor, Plan, Stop, count_run_parameters
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.networks import (
    Factory,
    build_network,
    check_outputs,
    default_group_size,
    describe_network,
    is_compiled,
    make_train_config,
)
from torchace.lab.training.config import make_optimizer
from torchace.lab.training.evaluate import MetricError, try_metrics
from torchace.lab.training.tasks import TASKS
from torchace.nn.optimizers import check_elementwise

COMPONENTS = "components"  # key of the objects' fingerprints in `config`


@dataclass(frozen=True)
class Sweep:
    """An experiment, its run directory and its executor; `components` replace the objects that it names."""

    experiment: Experiment
    directory: Path
    executor: Executor = field(default_factory=Executor)
    components: Components | None = None

    def run(self, callback: Callback | None = None, stop: Stop = lambda: False) -> dict[RunKey, Failure]:
        """Train all unfinished runs and return those that failed.

        An interrupted sweep resumes from finished runs and checkpoints, with the same results. Groups planned earlier
        are trained as a whole. If `stop`, checked between steps, returns True, a checkpoint is saved and `Interrupted`
        raised. `UnfinishedRunsError`: some runs could not be finished; all others are.
        """
        callback = callback or Callback()
        arms = {arm.name: arm for arm in self.experiment.complete_arms()}
        components = {name: self.components or Components.load(arm) for name, arm in arms.items()}
        data = self.executor.load_data(arms, components)
        store = RunStore(self.directory)
        plan = Plan(self.experiment, arms, components, data, store, self.executor.device)
        if not self.executor.is_first:
            list(self.executor.train(plan, [], callback, stop))
            return {}
        summaries = [_summarize(arm, data[arm.name], components[arm.name]) for arm in arms.values()]
        # configuration errors are raised above, before any file is written
        store.refuse_foreign()
        with store.lock():
            fingerprints = {name: _fingerprint(components[name], data[name]) for name in arms}
            record = self._begin(store, summaries, fingerprints)
            groups = self._plan_groups(plan, {arm.name: arm.parameters or 0 for arm in summaries})
            store.clean(groups)
            wanted = {run for arm in arms.values() for run in arm.runs(self.experiment.sweep.seeds)}
            todo = [g for g in groups if any(run in wanted and not store.is_finished(run) for run in g.runs)]
            planned = wanted.union(*(group.runs for group in todo))
            done = {run for run in planned if store.is_finished(run)}
            callback.on_plan(len(done), len(planned))
            seconds = record.seconds or 0.0
            for group in self.executor.train(plan, todo, callback, stop):
                done.update(group.runs)
                for run in group.runs:
                    if (result := store.result(run)) is not None:
                        seconds += result.seconds or 0.0
                        callback.on_run_end(run, result)
                store.write_experiment(record.model_copy(update={"seconds": seconds}))
                callback.on_group_end(group, len(done))
            results = {run: store.result(run) for run in sorted(wanted, key=lambda run: run.id)}
            return {run: result.failure for run, result in results.items() if result and result.failure}

    def _begin(self, store: RunStore, arms: list[ArmSummary], fingerprints: dict[str, Any]) -> ExperimentResult:
        """Write experiment.json, or check that the directory holds the same experiment."""
        config = self.experiment.model_dump(mode="json")
        if any(fingerprints.values()):
            config[COMPONENTS] = fingerprints
        seeds = set(self.experiment.sweep.seeds)
        started, seconds = datetime.now(UTC).isoformat(timespec="seconds"), 0.0
        if (before := store.experiment()) is not None:
            _check_same(before.config, config, self.directory)
            seeds |= set(before.seeds)
            earlier = {arm.name: arm for arm in before.arms}
            arms = [_merge(arm, earlier.get(arm.name, arm)) for arm in arms]
            started, seconds = before.started, before.seconds or 0.0
        data = arms[0].data
        assert data is not None
        record = ExperimentResult(
            name=self.experiment.name,
            title=self.experiment.title or self.experiment.name,
            description=self.experiment.description,
            task=self.experiment.data.task,
            data=data,
            arms=tuple(arms),
            seeds=tuple(sorted(seeds)),
            paper=self.experiment.paper,
            hardware=self.executor.hardware(),
            versions=versions(),
            config=config,
            started=started,
            seconds=seconds,
        )
        store.write_experiment(record)
        return record

    def _plan_groups(self, plan: Plan, parameters: Mapping[str, int]) -> list[GroupPlan]:
        """Return the existing groups, and new ones for runs that are in none."""
        before = plan.store.groups()
        groups = list(before)
        known = {run for group in groups for run in group.runs}
        count = Counter(group.arm for group in groups)
        for arm in plan.arms.values():
            new = [run for run in arm.runs(self.experiment.sweep.seeds) if run not in known]
            size = self.experiment.sweep.group_size or default_group_size(arm.model, parameters[arm.name], plan.device)
            steps = make_train_config(arm.train, plan.data[arm.name].batches(arm).steps_per_epoch).steps
            compiled = is_compiled(arm.train, steps, plan.device)
            for start in range(0, len(new), size):
                groups.append(GroupPlan(f"{arm.name}-{count[arm.name]}", tuple(new[start : start + size]), compiled))
                count[arm.name] += 1
        if groups != before:
            plan.store.write_groups(groups)
        return groups


def _summarize(arm: Arm, data: LoadedData, components: Components) -> ArmSummary:
    """Describe an arm for the result file; building its network also validates the configuration."""
    if components.member is None:
        network = build_network(arm, data.dataset, [0], "cpu")
    else:
        x, y = data.example(arm)
        factory = Factory(components.member, arm.model, TASKS[arm.data.task].link)
        check_outputs(factory, x, y, data.dataset.num_classes)
        network = build_network(arm, None, [0], "cpu", components=components)
        if network.whole and arm.train.batches != "shared":
            raise ConfigError(
                f"train.batches: expected 'shared' for members of a user's network that share layers, but got "
                f"{arm.train.batches!r}."
            )
    if arm.train.patience is not None and data.validation is None:
        raise ConfigError("`patience` needs validation data: set `validation`, such as 0.2.")
    try:
        config = make_train_config(arm.train, 1, arm.data.task, components)
        check_elementwise(make_optimizer(config, [p for p in network.parameters() if p.requires_grad]))
    except (TypeError, ValueError) as error:
        reason = str(error).replace(", or Ensemble(members) with this optimizer", "").removesuffix(".")
        raise ConfigError(f"optimizer: {reason}.") from error
    metrics = named_metrics(components.metrics, arm.data.task)
    try:
        try_metrics(metrics, arm.model.num_members, data.dataset.num_classes, data.test_targets(), arm.data.task)
    except MetricError as error:
        raise ConfigError(f"metrics: {error}") from error
    return ArmSummary(
        name=arm.name,
        label=arm.label,
        num_members=arm.model.num_members,
        batches=arm.train.batches,
        network=describe_network(arm.model, data.dataset),
        parameters=count_run_parameters(network),
        diversities=tuple(arm.diversities),
        axes={name: tuple(values) for name, values in arm.axes.items()},
        cell=arm.cell,
        baseline=arm.baseline,
        data=data.summary(),
    )


def _merge(arm: ArmSummary, before: ArmSummary) -> ArmSummary:
    """Keep earlier λ and values of other axes."""
    diversities = tuple(sorted({*arm.diversities, *before.diversities}))
    axes = {name: tuple(dict.fromkeys([*before.axes.get(name, ()), *values])) for name, values in arm.axes.items()}
    return arm.model_copy(update={"diversities": diversities, "axes": axes})


def _fingerprint(components: Components, data: LoadedData) -> dict[str, Any]:
    """Return what identifies the objects of an arm: names and hashes of functions and data."""
    found = components.fingerprint()
    if components.data is not None or data.section.file is not None:
        found["data"] = {**found.get("data", {}), **data.fingerprint()}
    return found


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], directory: Path) -> None:
    """Refuse to mix two experiments in one directory; seeds, λ and values of other axes may differ."""
    old, new = _comparable(before), _comparable(now)
    for key in sorted({*old, *new}, key=lambda key: (key.startswith(COMPONENTS), key)):  # settings change data too
        both_lists = isinstance(old.get(key), list) and isinstance(new.get(key), list)
        is_axis = key.endswith("diversities") or (both_lists and key.rpartition(".")[2] in AXES)
        if old.get(key) == new.get(key) or is_axis or key.endswith(("data.stream", "data.num_workers", ".label")):
            continue
        changed = f"{key} = {old.get(key)!r}, but now it is {new.get(key)!r}"
        if key.startswith(COMPONENTS):
            kind = key.split(".")[2]
            names = {"member": "another factory of members", "data": "another data set", "metrics": "other metrics"}
            changed = f"{names.get(kind, 'another ' + kind)} (its source, arguments or content changed)"
        raise RunStoreError(f"{directory} holds runs with {changed}. Choose another --out, or remove the directory.")


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that change the result of a run, by `section.key`; keys of an arm start with its name."""
    free = {"sweep", "checkpoint", "title", "description", "paper"}
    arms = {arm["name"]: arm for arm in config.get("arms", ())}
    return flatten({**{key: value for key, value in config.items() if key not in free}, "arms": arms})
