"""A run directory, read into plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchace._files import CHECKSUM, JSON_BYTES, is_unchanged, parse_json, read_bounded, read_json
from torchace.lab.report._fields import (
    Fields,
    ReportError,
    as_amount,
    as_count,
    as_number,
    as_text,
    is_number,
    may_be_unprintable,
    printable,
)
from torchace.lab.report.arrays import Array, check_arrays, read_arrays, sample_scores
from torchace.lab.report.formats import Metric, count, fitted
from torchace.lab.report.search import Search, read_search
from torchace.lab.report.table_schema import Schema, read_schema
from torchace.lab.report.tasks import TASKS, Task, with_derived

FORMAT = 1
"""The version of the result files this package reads."""

ROLES = ("sweep", "search", "check", "model")
"""What an arm is for: an experiment's sweep; a fit's search for λ, its check on fresh seeds, the model it kept."""


@dataclass(frozen=True)
class Arm:
    """One way of training, swept over λ; `baseline` marks what the others are compared with.

    `seeds` and `data` are None where the arm has those of the whole experiment.
    """

    name: str
    label: str
    num_members: int
    batches: str
    network: str
    parameters: int | None
    diversities: tuple[float, ...]
    baseline: bool
    role: str
    seeds: tuple[int, ...] | None
    data: Data | None = None


@dataclass(frozen=True)
class Data:
    """What was trained and tested on."""

    name: str
    train: int
    validation: int
    test: int
    classes: tuple[str, ...]
    image_shape: tuple[int, ...] | None
    schema: Schema | None

    def is_tested_as(self, other: Data) -> bool:
        """Whether scores on both are scores on the same samples, as far as it is written down."""
        return (self.name, self.test, self.classes) == (other.name, other.test, other.classes)


@dataclass(frozen=True)
class Failure:
    """Why a run stopped."""

    message: str
    member: int | None
    step: int | None


@dataclass(frozen=True)
class Run:
    """One training: an arm, one λ, one seed. `metrics` maps a split ("test") to its numbers.

    `members` has each member's accuracy, or in a regression its mean squared error.
    """

    name: str
    arm: str
    diversity: float
    seed: int
    failure: Failure | None
    metrics: Mapping[str, Mapping[str, float]]
    members: tuple[float, ...]
    steps: int
    seconds: float | None
    arrays_path: Path | None

    @property
    def finished(self) -> bool:
        return self.failure is None


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's table; `arms` names the arms it stands beside, None: all with its K and λ.

    `diversity` is None where the paper states no λ (a single classifier). All numbers are shares, errors too.
    """

    label: str
    num_members: int
    diversity: float | None
    arms: tuple[str, ...] | None
    numbers: Mapping[str, float]
    states_error: bool

    def matches(self, arm: Arm, diversity: float) -> bool:
        """Whether this row stands beside that arm at that λ."""
        if self.arms is not None and arm.name not in self.arms:
            return False
        same_diversity = self.diversity is None or abs(self.diversity - diversity) < 1e-9
        return self.num_members == arm.num_members and same_diversity


@dataclass(frozen=True)
class Paper:
    """A table of the paper."""

    table: str
    rows: tuple[PaperRow, ...]
    note: str

    @property
    def states_error(self) -> bool:
        """Whether the table gives errors in percent instead of accuracies."""
        return any(row.states_error for row in self.rows)


@dataclass(frozen=True)
class Damaged:
    """A result file that could not be read, and why."""

    file: str
    reason: str


@dataclass(frozen=True)
class Results:
    """A run directory. Runs are in the order of the arms, λ and seeds."""

    directory: Path
    name: str
    title: str
    description: str
    task: Task
    metrics: Mapping[str, Metric]
    data: Data
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    damaged: tuple[Damaged, ...]
    search: Search | None
    paper: Paper | None
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    config: Mapping[str, Any]
    started: str
    seconds: float | None
    listed: int | None = None
    comparisons: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what `compare` found
    _cache: dict[str, dict[str, Array]] = field(default_factory=dict, repr=False, compare=False)
    _values: dict[Any, dict[int, float]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def failed(self) -> tuple[Run, ...]:
        """The runs that stopped."""
        return tuple(run for run in self.runs if not run.finished)

    @property
    def planned(self) -> int:
        """How many runs the experiment consists of: those that were listed, else every λ with every seed."""
        if self.listed is not None:
            return self.listed
        return sum(len(set(arm.diversities)) * len(set(self.seeds_of(arm))) for arm in self.arms)

    @property
    def tested(self) -> tuple[Arm, ...]:
        """The arms whose place is the test set, the kept model first; not those that served to choose λ."""
        arms = [arm for arm in self.arms if arm.role != "search"]
        return tuple(sorted(arms, key=lambda arm: arm.role != "model"))

    @property
    def swept(self) -> tuple[Arm, ...]:
        """The arms that compare several λ on the test set."""
        return tuple(arm for arm in self.tested if arm.role != "model")

    @property
    def is_fit(self) -> bool:
        """Whether this is a fit of one model to a user's data, not an experiment."""
        return any(arm.role != "sweep" for arm in self.arms)

    @property
    def model(self) -> Arm | None:
        """The arm of the model that was kept, None in an experiment."""
        return next((arm for arm in self.arms if arm.role == "model"), None)

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        """The seeds an arm was to be trained with."""
        return self.seeds if arm.seeds is None else arm.seeds

    def data_of(self, arm: Arm) -> Data:
        """What an arm was trained and tested on."""
        return self.data if arm.data is None else arm.data

    @cached_property
    def _finished(self) -> dict[str, dict[float, tuple[Run, ...]]]:
        """The finished runs by arm and, ascending, by λ."""
        found: dict[str, dict[float, list[Run]]] = {arm.name: {} for arm in self.arms}
        for run in self.runs:  # in the order of λ and seeds
            if run.finished:
                found[run.arm].setdefault(run.diversity, []).append(run)
        return {arm: {diversity: tuple(runs) for diversity, runs in by.items()} for arm, by in found.items()}

    def finished(self, arm: Arm, diversity: float) -> tuple[Run, ...]:
        """The finished runs of an arm at one λ, by seed."""
        return self._finished[arm.name].get(diversity, ())

    def diversities(self, arm: Arm) -> tuple[float, ...]:
        """The values of λ at which an arm has finished runs, ascending."""
        return tuple(sorted(self._finished[arm.name]))

    def grid(self, arm: Arm) -> tuple[float, ...]:
        """The values of λ that an arm was to be trained at, finished or not, ascending."""
        return tuple(sorted({*arm.diversities, *self.diversities(arm)}))

    def values(self, arm: Arm, diversity: float, metric: str, split: str = "test") -> dict[int, float]:
        """A metric of each seed, for an arm at one λ; seeds that lack it are left out."""
        key = (arm.name, diversity, metric, split)
        if key not in self._values:
            runs = self.finished(arm, diversity)
            found = {run.seed: run.metrics[split][metric] for run in runs if metric in run.metrics.get(split, {})}
            self._values[key] = found
        return self._values[key]

    def sample_scores(self, arm: Arm, diversity: float, metric: str) -> dict[int, Array]:
        """A metric on every test sample, `(N,)`, of each seed that recorded it, for an arm at one λ.

        Only where they are all test samples and the metric is their mean.
        """
        means, count = self.values(arm, diversity, metric), self.data_of(arm).test
        found = {}
        for run in self.finished(arm, diversity):
            scores = sample_scores(self.arrays(run), metric)
            if scores is None or run.seed not in means or len(scores) != count or not count:
                continue
            if math.isclose(scores.mean(), means[run.seed], rel_tol=1e-4, abs_tol=1e-12):  # they are float32
                found[run.seed] = scores
        return found

    def arrays(self, run: Run) -> dict[str, Array]:
        """A run's arrays, empty where there are none or their file is damaged (then `read_results` lists it)."""
        return self._cache.get(run.name, {})


def read_results(directory: str | Path, *, arrays: bool = True) -> Results:
    """Reads a run directory.

    A damaged run or array file is listed under `damaged` and the rest is read.

    Args:
        directory: Holds `experiment.json` and `runs/`.
        arrays: Whether to read the runs' arrays too; tables of scores need none.

    Returns:
        The experiment and its runs.

    Raises:
        ReportError: There is no readable `experiment.json`.
    """
    directory = Path(directory)
    fields = _load(directory / "experiment.json", directory)
    if (name := fields.text("task", "classification")) not in TASKS:
        raise ReportError(f"Expected the task {' or '.join(TASKS)} in {fields.where}, but got {name!r}.")
    task = TASKS[name]
    arms = fields.items("arms", lambda value: _arm(Fields(value, fields.where)), "a list of arms")
    seeds = fields.items("seeds", as_count, "a list of integers")
    runs: dict[tuple[str, float, int], Run] = {}
    damaged: list[Damaged] = []
    cache: dict[str, dict[str, Array]] = {}
    search = None if fields.value.get("search") is None else read_search(fields.object("search"), task.metrics)
    order = {arm.name: index for index, arm in enumerate(arms)}
    roles = {arm.name: arm.role for arm in arms}
    told: list[Mapping[str, Any]] = []
    for path in sorted((directory / "runs").glob("*.json")):
        try:
            content = _load(path, directory)
            run = _run(content, path, roles, task)
            key = (run.arm, run.diversity, run.seed)
            if key in runs:
                raise ReportError(f"runs/{path.name} repeats the arm, λ and seed of the run {runs[key].name}.")
            runs[key] = run
            told.append(content.value)
        except ReportError as error:
            damaged.append(Damaged(f"runs/{path.name}", str(error)))
            continue
        try:
            if arrays:
                check_arrays(content, path.with_suffix(".safetensors"))
            cache[run.name] = {} if run.arrays_path is None or not arrays else read_arrays(run.arrays_path)
        except ReportError as error:
            damaged.append(Damaged(f"runs/{path.stem}.safetensors", str(error)))
    return Results(
        directory=directory,
        name=fields.text("name"),
        title=fields.text("title", fields.text("name")),
        description=fields.text("description", ""),
        task=task,
        metrics=fitted(task.metrics, _measured(runs.values(), search)),
        data=_data(fields.object("data")),
        arms=arms,
        seeds=seeds,
        runs=tuple(runs[key] for key in sorted(runs, key=lambda key: (order[key[0]], key[1], key[2]))),
        damaged=tuple(damaged),
        search=search,
        paper=None if fields.value.get("paper") is None else _paper(fields.object("paper")),
        hardware=_mixed(fields.plain("hardware"), told),
        versions=_mixed(fields.plain("versions"), [run.get("versions") for run in told]),
        config=fields.plain("config"),
        started=fields.text("started", ""),
        seconds=fields.optional_number("seconds"),
        listed=_listed(directory),
        _cache=cache,
    )


def _load(path: Path, directory: Path) -> Fields:
    where = path.relative_to(directory).as_posix()
    try:
        data = read_bounded(path, JSON_BYTES)
        parsed = parse_json(data)
        value = printable(parsed) if may_be_unprintable(data.decode()) else parsed
    except FileNotFoundError:
        wrote = "`torchace run` or `torchace fit` wrote"
        raise ReportError(f"Found no {where} in {directory}; give the directory that {wrote}.") from None
    except OSError as error:
        raise ReportError(f"Could not read {where} in {directory}: {error.strerror}.") from None
    except ValueError:
        raise ReportError(f"Expected JSON in {where}, but the file is damaged or something else.") from None
    fields = Fields(value, where)
    if CHECKSUM in fields.value and not is_unchanged(parsed):  # earlier versions wrote none
        raise ReportError(f"{where} was changed after it was written: its SHA-256 is another one.")
    if (version := fields.integer("format")) != FORMAT:
        raise ReportError(f"Expected format {FORMAT} in {where}, but got {version}; another torchace wrote it.")
    return fields


def _mixed(stated: Mapping[str, Any], told: Sequence[object]) -> dict[str, Any]:
    """What is stated of all runs, by name; where the runs themselves say several things, all of them."""
    found = dict(stated)
    for name in stated:
        said = Counter(str(run[name]) for run in told if isinstance(run, Mapping) and run.get(name) is not None)
        if len(said) > 1:
            found[name] = ", ".join(f"{value} ({count(times, 'run')})" for value, times in said.items())
    return found


def _listed(directory: Path) -> int | None:
    """How many runs were planned, by whoever was asked for some of them; None where no list of them can be read."""
    try:
        jobs = read_json(directory / "jobs.json")["jobs"]
        return len({(run["arm"], float(run["diversity"]), run["seed"]) for job in jobs for run in job["runs"]})
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _arm(fields: Fields) -> Arm:
    name = fields.text("name")
    if (role := fields.text("role", ROLES[0])) not in ROLES:
        raise ReportError(f"Expected the role {', '.join(ROLES)} of an arm in {fields.where}, but got {role!r}.")
    return Arm(
        name=name,
        label=fields.text("label", name),
        num_members=fields.integer("num_members"),
        batches=fields.text("batches", "shared"),
        network=fields.text("network", ""),
        parameters=fields.optional_integer("parameters"),
        diversities=fields.items("diversities", as_number, "a list of numbers"),
        baseline=fields.flag("baseline", False),
        role=role,
        seeds=fields.items("seeds", as_count, "a list of integers") if fields.value.get("seeds") is not None else None,
        data=_data(fields.object("data")) if fields.value.get("data") is not None else None,
    )


def _data(fields: Fields) -> Data:
    shape = fields.items("image_shape", as_count, "a list of integers", [])
    return Data(
        name=fields.text("name"),
        train=fields.integer("train"),
        validation=fields.integer("validation", 0),
        test=fields.integer("test"),
        classes=fields.items("classes", as_text, "a list of names", []),
        image_shape=shape or None,
        schema=None if fields.value.get("schema") is None else read_schema(fields.object("schema")),
    )


def _paper(fields: Fields) -> Paper:
    rows = fields.items("rows", lambda value: _paper_row(Fields(value, fields.where)), "a list of rows")
    return Paper(fields.text("table"), rows, fields.text("note", ""))


def _paper_row(fields: Fields) -> PaperRow:
    metrics = ("accuracy", "error", "cross_entropy", "member_accuracy", "member_cross_entropy")
    num_members, diversity = fields.integer("num_members"), fields.optional_number("diversity")
    default = f"K={num_members}" if diversity is None else f"K={num_members}, λ={diversity:g}"
    arms = fields.items("arms", as_text, "a list of names") if fields.value.get("arms") is not None else None
    numbers = {metric: fields.number(metric) for metric in metrics if fields.value.get(metric) is not None}
    states_error = "error" in numbers
    if states_error:
        numbers["accuracy"] = 1 - numbers["error"] / 100  # the paper's errors are in percent
    label = fields.text("label", default)
    return PaperRow(label, num_members, diversity, arms, with_derived(numbers), states_error)


def _run(fields: Fields, path: Path, roles: Mapping[str, str], task: Task) -> Run:
    if (arm := fields.text("arm")) not in roles:
        raise ReportError(f"The run in {fields.where} belongs to the arm {arm!r}, which experiment.json does not name.")
    if (status := fields.text("status")) not in ("finished", "failed"):
        raise ReportError(f"Expected the status finished or failed in {fields.where}, but got {status!r}.")
    metrics: dict[str, dict[str, float]] = {}
    members: tuple[float, ...] = ()
    failure = None
    if status == "failed":
        cause = fields.object("failure", {})
        failure = Failure(
            cause.text("message", "No reason given."), cause.optional_integer("member"), cause.optional_integer("step")
        )
    else:
        splits = fields.object("metrics")
        scored = [split for split in ("test", "validation") if splits.value.get(split) is not None]
        if roles[arm] == "sweep" or not scored:
            scored = ["test"]
        for split in scored:
            _check_scores(splits.object(split), task)
        for split in ("test", "validation", "train"):
            numbers = splits.object(split, {}).value
            # a number that is null or not finite (the disagreement of one member) counts as not measured
            metrics[split] = with_derived({key: float(v) for key, v in numbers.items() if is_number(v)})
        convert = as_number if task.error == "error" else as_amount
        members = splits.object(scored[0]).items("members", convert, "a list of numbers", [])
    arrays = path.with_suffix(".safetensors")
    return Run(
        name=fields.text("run", path.stem),
        arm=arm,
        diversity=fields.number("diversity"),
        seed=fields.integer("seed"),
        failure=failure,
        metrics=metrics,
        members=members,
        steps=fields.integer("steps", 0),
        seconds=fields.optional_number("seconds"),
        arrays_path=arrays if arrays.is_file() else None,
    )


def _check_scores(fields: Fields, task: Task) -> None:
    for key in task.required:
        if fields.number(key) < 0:
            raise ReportError(f"Expected a number of 0 or more under `{key}` in {fields.where}.")


def _measured(runs: Collection[Run], search: Search | None) -> dict[str, list[float]]:
    """What was measured, by metric: on the test set, elsewhere where there is nothing of it."""
    found: dict[str, list[float]] = {}
    for split in ("test", "validation"):
        here: dict[str, list[float]] = {}
        for run in runs:
            for key, value in run.metrics.get(split, {}).items():
                here.setdefault(key, []).append(value)
        found = {**here, **found}
    if search:
        found.setdefault(search.metric, [score for scores in search.scores.values() for score in scores.values()])
    return found
