"""Read a run directory: its runs, and their arrays, checked and summarized over seeds."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchace.lab.report.formats import count, quantity
from torchace.lab.report.metrics import TASKS, Metric, TaskLayout, add_derived, choose_units, with_own_metrics
from torchace.lab.schema.reading import ResultFileError, read_result
from torchace.lab.schema.results import ArmSummary, DataSummary, ExperimentResult, PlanFile, RunResult
from torchace.lab.schema.values import LARGEST, variant_name

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
            arrays = self.arrays(run)
            if SAMPLES.get(metric) in arrays:
                scores = np.asarray(arrays[SAMPLES[metric]], dtype=np.float64)
            elif metric in ("mse", "mae") and (rows := join_predictions([arrays])) is not None:
                scores = np.square(rows.error) if metric == "mse" else np.abs(rows.error)
            else:
                continue
            if run.seed not in means or len(scores) != size or not size:
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
    measured: dict[str, list[float]] = {}  # on the test set, else on another split
    if search := experiment.search:
        measured[search.metric] = [score for by_seed in search.scores.values() for score in by_seed.values()]
    for split in reversed(SPLITS):
        found: dict[str, list[float]] = {}
        for run in ordered:
            for metric, value in scores.get((run.run, split), {}).items():
                found.setdefault(metric, []).append(value)
        measured |= found
    try:
        jobs = read_result(directory / "jobs.json", PlanFile).jobs
        planned = len({run for job in jobs for run in job.runs})
    except ResultFileError:
        planned = sum(len(set(arm.diversities)) for arm in experiment.arms) * len(set(experiment.seeds))
    hardware = _merge_stated(experiment.hardware, [run.model_dump(include=set(experiment.hardware)) for run in ordered])
    versions = _merge_stated(experiment.versions, [run.versions for run in ordered])
    return Results(
        directory=directory,
        experiment=experiment.model_copy(update={"hardware": hardware, "versions": versions}),
        runs=ordered,
        damaged=tuple(damaged),
        metrics=choose_units(with_own_metrics(TASKS[experiment.task], measured).metrics, measured),
        planned=planned,
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


def _merge_stated(stated: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return hardware or versions; if runs differ, all values with counts."""
    found = dict(stated)
    for name in stated:
        values = Counter(str(run[name]) for run in runs if run.get(name) is not None)
        if len(values) > 1:
            found[name] = ", ".join(f"{value} ({count(times, 'run')})" for value, times in values.items())
    return found


Array = NDArray[Any]

ROWS = ("predicted", "observed", "spread")  # of a regression, one entry a test row
SAMPLES = {"cross_entropy": "sample_cross_entropy", "error": "sample_error"}  # of a classification
AXES = {
    "disagreement_matrix": (2,),
    "residual_correlation": (2,),
    "disputed_votes": (2,),
    "disputed_images": (3, 4),
    **dict.fromkeys(("disputed_target", "disputed_index", "disputed_row", *ROWS, *SAMPLES.values()), (1,)),
}


class Reliability(NamedTuple):
    """Confidence, accuracy and share of cases of each non-empty bin."""

    confidence: Array
    accuracy: Array
    share: Array


class ContestedCase(NamedTuple):
    """A test case on which members disagree."""

    position: int  # in the test set
    target: int
    votes: tuple[tuple[int, int], ...]  # (class, number of members)
    image: Array | None = None
    row: int | None = None  # in the user's file, from 1


class Predictions(NamedTuple):
    """Test rows of a regression, `(N,)` each: prediction, observed value, members' spread."""

    predicted: Array
    observed: Array
    spread: Array

    @property
    def error(self) -> Array:
        """Prediction minus observed value."""
        difference: Array = self.predicted - self.observed
        return difference


class ErrorVsSpread(NamedTuple):
    """Root mean squares of spread and error of groups of rows, by ascending spread."""

    spread: Array
    error: Array


def read_arrays(path: Path, sha256: str | None = None) -> dict[str, Array]:
    """Read a run's safetensors file; empty if it is missing and no checksum is given."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    name = f"runs/{path.name}"
    if sha256 is None and not path.exists():
        return {}
    try:
        data = path.read_bytes()
        if sha256 not in (None, hashlib.sha256(data).hexdigest()):
            raise ResultFileError(f"{name} was changed after it was written: its SHA-256 differs.")
        arrays: dict[str, Array] = load(data)
    except OSError as error:
        raise ResultFileError(f"Could not read {name}: {error.strerror}.") from None
    except ResultFileError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        raise ResultFileError(f"Expected arrays in {name}, but the file is damaged or has another format.") from None
    if not _consistent(arrays):
        raise ResultFileError(f"The arrays in {name} have inconsistent shapes or values.")
    return arrays


def _consistent(arrays: Mapping[str, Array]) -> bool:
    bins = [value.shape for key, value in arrays.items() if key.startswith("reliability_")]
    contested = {value.shape[:1] for key, value in arrays.items() if key.startswith("disputed_")}
    matrices = [arrays[key] for key in ("disagreement_matrix", "residual_correlation") if key in arrays]
    rows = [arrays[key].shape for key in ROWS if key in arrays]
    images = arrays.get("disputed_images")
    return (
        all(arrays[key].ndim in allowed for key, allowed in AXES.items() if key in arrays)
        and (not bins or (len(bins) == 3 and len(set(bins)) == 1 and len(bins[0]) == 1))
        and all(matrix.shape[0] == matrix.shape[1] for matrix in matrices)
        and (not rows or (len(rows) == len(ROWS) and len(set(rows)) == 1 and bool((arrays["spread"] >= 0).all())))
        and (len(contested) <= 1)
        and (images is None or (images.dtype == np.uint8 and (images.ndim == 3 or images.shape[-1] == 3)))
        and all(
            # undefined correlations may be NaN
            ((np.abs(value.astype(np.float64)) < LARGEST) | (np.isnan(value) & (key == "residual_correlation"))).all()
            for key, value in arrays.items()
            if value.dtype.kind == "f"
        )
    )


def reliability(runs: Iterable[Mapping[str, Array]]) -> Reliability | None:
    """Return the reliability over the samples of all runs; None if no run recorded it."""
    keys = ("reliability_count", "reliability_confidence", "reliability_correct")
    recorded = [arrays for arrays in runs if keys[0] in arrays]
    recorded = [arrays for arrays in recorded if arrays[keys[0]].shape == recorded[0][keys[0]].shape]
    if not recorded:
        return None
    count, confidence, correct = (np.asarray([a[key] for a in recorded], dtype=np.float64).sum(0) for key in keys)
    filled = count > 0
    if not filled.any():
        return None
    return Reliability(confidence[filled] / count[filled], correct[filled] / count[filled], count[filled] / count.sum())


def contested_cases(arrays: Mapping[str, Array], most: int = 12) -> list[ContestedCase]:
    """Return up to `most` test cases of one run on which the members' votes differ."""
    keys = ("disputed_index", "disputed_target", "disputed_votes")
    if any(key not in arrays for key in keys):
        return []
    found = []
    for i, (position, target, votes) in enumerate(zip(*(arrays[key] for key in keys), strict=True)):
        classes, counts = np.unique(votes, return_counts=True)
        ranked = sorted(zip(classes.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        if len(ranked) < 2:
            continue
        image = arrays["disputed_images"][i] if "disputed_images" in arrays else None
        row = int(arrays["disputed_row"][i]) if "disputed_row" in arrays else None
        found.append(ContestedCase(int(position), int(target), tuple((int(c), int(n)) for c, n in ranked), image, row))
    return found[:most]


def join_predictions(runs: Iterable[Mapping[str, Array]]) -> Predictions | None:
    """Concatenate the test rows of all runs in float64; None if no run recorded them."""
    recorded = [arrays for arrays in runs if ROWS[0] in arrays and arrays[ROWS[0]].size]
    if not recorded:
        return None
    return Predictions(*(np.concatenate([a[key] for a in recorded]).astype(np.float64) for key in ROWS))


def error_vs_spread(rows: Predictions, groups: int = 10) -> ErrorVsSpread | None:
    """Return spread and error in up to `groups` groups of at least ten rows; None for fewer than two groups."""
    groups = min(groups, len(rows.spread) // 10)
    if groups < 2 or not rows.spread.any():
        return None
    parts = np.array_split(np.argsort(rows.spread, kind="stable"), groups)
    spread, error = (
        np.array([np.sqrt(np.mean(np.square(values[part]))) for part in parts]) for values in (rows.spread, rows.error)
    )
    return ErrorVsSpread(spread, error)
