"""Read a run directory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from torchace.lab.report.arrays import Array, read_arrays, sample_scores
from torchace.lab.report.formats import count, quantity
from torchace.lab.report.metrics import TASKS, Metric, TaskLayout, add_derived, choose_units, with_own_metrics
from torchace.lab.schema.reading import ResultFileError, read_result
from torchace.lab.schema.results import ArmSummary, DataSummary, DiversitySearch, ExperimentResult, PlanFile, RunResult
from torchace.lab.schema.values import variant_name

SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class DamagedFile:
    """A result file that could not be read."""

    file: str
    reason: str


@dataclass(frozen=True)
class Results:
    """A run directory; runs are sorted by arm, λ and seed."""

    directory: Path
    experiment: ExperimentResult
    runs: tuple[RunResult, ...]
    damaged: tuple[DamagedFile, ...]
    metrics: Mapping[str, Metric]
    planned: int
    _arrays: dict[str, dict[str, Array]] = field(repr=False, compare=False)
    _scores: dict[tuple[str, str], dict[str, float]] = field(repr=False, compare=False)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def task(self) -> TaskLayout:
        """Metrics of the task, with a user's own."""
        return with_own_metrics(TASKS[self.experiment.task], self.metrics)

    @property
    def data(self) -> DataSummary:
        """Data of the experiment; for an arm, use `arm_data`."""
        return self.experiment.data

    @property
    def arms(self) -> tuple[ArmSummary, ...]:
        """Arms of the experiment."""
        return self.experiment.arms

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """Failed runs."""
        return tuple(run for run in self.runs if not run.finished)

    @property
    def model(self) -> ArmSummary | None:
        """Arm of a fit's model; None for a sweep."""
        return next((arm for arm in self.arms if arm.role == "model"), None)

    @property
    def model_run(self) -> RunResult | None:
        """Finished run of a fit's model, if any."""
        return next((run for run in self.runs if self.model and run.arm == self.model.name and run.finished), None)

    def arm_data(self, arm: ArmSummary) -> DataSummary:
        """Return the data of an arm."""
        return arm.data or self.data

    @cached_property
    def _finished(self) -> dict[str, dict[float, tuple[RunResult, ...]]]:
        # by arm and ascending λ
        found: dict[str, dict[float, tuple[RunResult, ...]]] = {arm.name: {} for arm in self.arms}
        for run in self.runs:
            if run.finished:
                by_diversity = found[run.arm]
                by_diversity[run.diversity] = (*by_diversity.get(run.diversity, ()), run)
        return found

    def finished(self, arm: ArmSummary, diversity: float) -> tuple[RunResult, ...]:
        """Return the finished runs of an arm at one λ."""
        return self._finished[arm.name].get(diversity, ())

    def diversities(self, arm: ArmSummary) -> tuple[float, ...]:
        """Return the λ with finished runs, ascending."""
        return tuple(self._finished[arm.name])

    def grid(self, arm: ArmSummary) -> tuple[float, ...]:
        """Return the planned λ, ascending."""
        return tuple(sorted({*arm.diversities, *self.diversities(arm)}))

    def scores(self, run: RunResult, split: str = "test") -> dict[str, float]:
        """Return a run's metrics on one split, derived ones included."""
        return self._scores.get((run.run, split), {})

    def values(self, arm: ArmSummary, diversity: float, metric: str, split: str = "test") -> dict[int, float]:
        """Return a metric by seed."""
        key = (arm.name, diversity, metric, split)
        if key not in self.cache:
            by_seed = {run.seed: self.scores(run, split) for run in self.finished(arm, diversity)}
            self.cache[key] = {seed: scores[metric] for seed, scores in by_seed.items() if metric in scores}
        found: dict[int, float] = self.cache[key]
        return found

    def sample_scores(self, arm: ArmSummary, diversity: float, metric: str) -> dict[int, Array]:
        """Return a metric on each test sample, `(N,)`, by seed, of runs that recorded all of them."""
        means, size = self.values(arm, diversity, metric), self.arm_data(arm).test
        found = {}
        for run in self.finished(arm, diversity):
            scores = sample_scores(self.arrays(run), metric)
            if scores is None or run.seed not in means or len(scores) != size or not size:
                continue
            if math.isclose(scores.mean(), means[run.seed], rel_tol=1e-4, abs_tol=1e-12):  # float32
                found[run.seed] = scores
        return found

    def arrays(self, run: RunResult) -> dict[str, Array]:
        """Return a run's arrays; empty if missing or damaged."""
        return self._arrays.get(run.run, {})


def read_results(directory: str | Path, *, arrays: bool = True) -> Results:
    """Read a run directory; damaged files are listed in `damaged` and skipped.

    Args:
        directory: A run directory of `torchace run` or `torchace fit`.
        arrays: Whether to read the runs' arrays.

    Returns:
        The experiment and its runs.

    Raises:
        ResultFileError: `experiment.json` cannot be read.
    """
    directory = Path(directory)
    experiment = read_result(directory / "experiment.json", ExperimentResult)
    several = len(experiment.arms) > 1
    variants = tuple(variant for arm in experiment.arms for variant in _variants(arm, arm.label if several else ""))
    experiment = experiment.model_copy(update={"arms": variants})
    arms = {arm.name: (index, arm) for index, arm in enumerate(experiment.arms)}
    runs: dict[tuple[str, float, int], RunResult] = {}
    damaged: list[DamagedFile] = []
    found_arrays: dict[str, dict[str, Array]] = {}
    for path in sorted((directory / "runs").glob("*.json")):
        name = f"runs/{path.name}"
        try:
            run = read_result(path, RunResult, name)
            run = run.model_copy(update={"arm": variant_name(run.arm, run.settings)})
            _check_run(run, name, arms[run.arm][1] if run.arm in arms else None, TASKS[experiment.task])
            key = (run.arm, run.diversity, run.seed)
            if key in runs:
                raise ResultFileError(f"{name} repeats the arm, λ and seed of the run {runs[key].run}.")
            runs[key] = run
            name = f"runs/{path.stem}.safetensors"
            found_arrays[run.run] = read_arrays(path.with_suffix(".safetensors"), run.arrays_sha256) if arrays else {}
        except ResultFileError as error:
            damaged.append(DamagedFile(name, str(error)))
    ordered = tuple(runs[key] for key in sorted(runs, key=lambda key: (arms[key[0]][0], key[1], key[2])))
    scores = {(run.run, split): add_derived(values) for run in ordered for split, values in run.scores.items()}
    measured = _measured_values(scores, experiment.search)
    hardware = _merge_stated(experiment.hardware, [run.model_dump(include=set(experiment.hardware)) for run in ordered])
    versions = _merge_stated(experiment.versions, [run.versions for run in ordered])
    return Results(
        directory=directory,
        experiment=experiment.model_copy(update={"hardware": hardware, "versions": versions}),
        runs=ordered,
        damaged=tuple(damaged),
        metrics=choose_units(with_own_metrics(TASKS[experiment.task], measured).metrics, measured),
        planned=_count_planned(directory, experiment),
        _arrays=found_arrays,
        _scores=scores,
    )


def _variants(arm: ArmSummary, label: str) -> list[ArmSummary]:
    """Return an arm for each combination of values on the axes other than λ and seed; `label` tells arms apart."""
    found: list[ArmSummary] = []
    for values in product(*arm.axes.values()):
        settings = dict(zip(map(str, arm.axes), values, strict=True))
        described = [f"{name.replace('_', ' ')} {quantity(value)}" for name, value in settings.items()]
        update: dict[str, Any] = {
            "name": variant_name(arm.name, settings),
            "label": ", ".join([label, *described] if label else described),
            "base_label": label,
            "variant_of": arm.name,
            "settings": settings,
            "layers": () if found else arm.layers,
        }
        found.append(arm.model_copy(update=update))
    return found if arm.axes else [arm]


def _check_run(run: RunResult, name: str, arm: ArmSummary | None, task: TaskLayout) -> None:
    if arm is None:
        raise ResultFileError(f"{name} belongs to the arm {run.arm!r}, which experiment.json does not have.")
    if not run.finished:
        return
    scored = [split for split in SPLITS[:2] if split in run.scores]
    if not scored or (arm.role == "sweep" and "test" not in scored):
        raise ResultFileError(f"Expected metrics of the test set in {name}, but there are none.")
    for split in scored:
        for key in task.required:
            if run.scores[split].get(key, -1.0) < 0:
                raise ResultFileError(f"Expected a number of 0 or more under metrics.{split}.{key} in {name}.")
    if task.error == "rmse" and any(value < 0 for value in run.members):
        raise ResultFileError(f"Expected numbers of 0 or more under metrics.{scored[0]}.members in {name}.")


def _measured_values(
    scores: Mapping[tuple[str, str], Mapping[str, float]], search: DiversitySearch | None
) -> dict[str, list[float]]:
    """Return the values of each metric on the test set, else on another split."""
    found: dict[str, dict[str, list[float]]] = {split: {} for split in SPLITS}
    for (_, split), values in scores.items():
        for key, value in values.items():
            found[split].setdefault(key, []).append(value)
    searched: dict[str, list[float]] = {}
    if search:
        searched[search.metric] = [score for by_seed in search.scores.values() for score in by_seed.values()]
    return {**searched, **found["train"], **found["validation"], **found["test"]}


def _merge_stated(stated: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return hardware or versions; if runs differ, all values with counts."""
    found = dict(stated)
    for name in stated:
        values = Counter(str(run[name]) for run in runs if run.get(name) is not None)
        if len(values) > 1:
            found[name] = ", ".join(f"{value} ({count(times, 'run')})" for value, times in values.items())
    return found


def _count_planned(directory: Path, experiment: ExperimentResult) -> int:
    """Return the number of runs in jobs.json, else of all λ and seeds."""
    try:
        return len({run for job in read_result(directory / "jobs.json", PlanFile).jobs for run in job.runs})
    except ResultFileError:
        return sum(len(set(arm.diversities)) for arm in experiment.arms) * len(set(experiment.seeds))
