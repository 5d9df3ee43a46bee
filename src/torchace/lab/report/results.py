"""Read a run directory: the experiment, its runs and their arrays."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchace.lab.report.formats import TASKS, Metric, TaskLayout, add_derived, quantity, with_own_metrics
from torchace.lab.schema.reading import ResultFileError, read_result
from torchace.lab.schema.results import ArmSummary, DataSummary, ExperimentResult, RunResult
from torchace.lab.schema.values import variant_name

Array = NDArray[Any]


@dataclass(frozen=True)
class Results:
    """A run directory; runs are sorted by arm, λ and seed."""

    experiment: ExperimentResult
    runs: tuple[RunResult, ...]
    damaged: dict[str, str]  # reasons by file
    _arrays: dict[str, dict[str, Array]] = field(repr=False)
    _scores: dict[tuple[str, str], dict[str, float]] = field(repr=False)

    @cached_property
    def task(self) -> TaskLayout:
        """Metrics of the task, with a user's own."""
        measured = dict.fromkeys(key for scores in self._scores.values() for key in scores)
        return with_own_metrics(TASKS[self.experiment.task], measured)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics by key."""
        return self.task.metrics

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
    def _finished(self) -> dict[str, dict[float, list[RunResult]]]:
        # by arm and ascending λ
        found: dict[str, dict[float, list[RunResult]]] = {arm.name: {} for arm in self.arms}
        for run in self.runs:
            if run.finished:
                found[run.arm].setdefault(run.diversity, []).append(run)
        return found

    def finished(self, arm: ArmSummary, diversity: float) -> list[RunResult]:
        """Return the finished runs of an arm at one λ."""
        return self._finished[arm.name].get(diversity, [])

    def diversities(self, arm: ArmSummary) -> tuple[float, ...]:
        """Return the λ with finished runs, ascending."""
        return tuple(self._finished[arm.name])

    def scores(self, run: RunResult, split: str = "test") -> dict[str, float]:
        """Return a run's metrics on one split, derived ones included."""
        return self._scores.get((run.run, split), {})

    def values(self, arm: ArmSummary, diversity: float, metric: str, split: str = "test") -> dict[int, float]:
        """Return a metric by seed."""
        by_seed = {run.seed: self.scores(run, split) for run in self.finished(arm, diversity)}
        return {seed: scores[metric] for seed, scores in by_seed.items() if metric in scores}

    def sample_scores(self, arm: ArmSummary, diversity: float, metric: str) -> dict[int, Array]:
        """Return a metric on each test sample, `(N,)`, by seed, of runs that recorded all of them."""
        means, size, found = self.values(arm, diversity, metric), self.arm_data(arm).test, {}
        for run in self.finished(arm, diversity):
            arrays = self.arrays(run)
            if f"sample_{metric}" in arrays:
                scores = arrays[f"sample_{metric}"].astype(np.float64)
            elif metric in ("mse", "mae") and "predicted" in arrays:
                error = arrays["predicted"].astype(np.float64) - arrays["observed"]
                scores = np.square(error) if metric == "mse" else np.abs(error)
            else:
                continue
            is_whole = len(scores) == size > 0 and run.seed in means
            if is_whole and math.isclose(scores.mean(), means[run.seed], rel_tol=1e-4, abs_tol=1e-12):  # float32
                found[run.seed] = scores
        return found

    def arrays(self, run: RunResult) -> dict[str, Array]:
        """Return a run's arrays; empty if missing or damaged."""
        return self._arrays.get(run.run, {})


def read_results(directory: str | Path, *, arrays: bool = True) -> Results:
    """Read a run directory of `torchace run` or `torchace fit`; damaged files are listed in `damaged` and skipped.

    Raises:
        ResultFileError: `experiment.json` cannot be read.
    """
    directory = Path(directory)
    experiment = read_result(directory / "experiment.json", ExperimentResult)
    several = len(experiment.arms) > 1
    variants = tuple(variant for arm in experiment.arms for variant in _variants(arm, arm.label if several else ""))
    experiment = experiment.model_copy(update={"arms": variants})
    order = {arm.name: index for index, arm in enumerate(variants)}
    runs: dict[tuple[int, float, int], RunResult] = {}
    damaged: dict[str, str] = {}
    found_arrays: dict[str, dict[str, Array]] = {}
    for path in sorted((directory / "runs").glob("*.json")):
        name = f"runs/{path.name}"
        try:
            run = read_result(path, RunResult, name)
            run = run.model_copy(update={"arm": variant_name(run.arm, run.settings)})
            if run.arm not in order:
                raise ResultFileError(f"{name} belongs to the arm {run.arm!r}, which experiment.json does not have.")
            key = (order[run.arm], run.diversity, run.seed)
            if key in runs:
                raise ResultFileError(f"{name} repeats the arm, λ and seed of the run {runs[key].run}.")
            runs[key] = run
            name = f"runs/{path.stem}.safetensors"
            if arrays:
                found_arrays[run.run] = read_arrays(path.with_suffix(".safetensors"), run.arrays_sha256)
        except ResultFileError as error:
            damaged[name] = str(error)
    ordered = tuple(runs[key] for key in sorted(runs))
    scores = {(run.run, split): add_derived(values) for run in ordered for split, values in run.scores.items()}
    return Results(experiment, ordered, damaged, found_arrays, scores)


def _variants(arm: ArmSummary, label: str) -> list[ArmSummary]:
    """Return an arm for each combination of values on the axes other than λ and seed; `label` tells arms apart."""
    found: list[ArmSummary] = []
    for values in product(*arm.axes.values()):
        settings = dict(zip(map(str, arm.axes), values, strict=True))
        described = [f"{name.replace('_', ' ')} {quantity(value)}" for name, value in settings.items()]
        update: dict[str, Any] = {
            "name": variant_name(arm.name, settings),
            "label": ", ".join([label, *described] if label else described),
            "variant_of": arm.name,
            "settings": settings,
        }
        found.append(arm.model_copy(update=update))
    return found if arm.axes else [arm]


def read_arrays(path: Path, sha256: str | None = None) -> dict[str, Array]:
    """Read a run's safetensors file; empty if it is missing and no checksum is given."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    name = f"runs/{path.name}"
    if sha256 is None and not path.exists():
        return {}
    try:
        data = path.read_bytes()
        arrays: dict[str, Array] = load(data)
    except OSError as error:
        raise ResultFileError(f"Could not read {name}: {error.strerror}.") from None
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        raise ResultFileError(f"Expected arrays in {name}, but the file is damaged or has another format.") from None
    if sha256 not in (None, hashlib.sha256(data).hexdigest()):
        raise ResultFileError(f"{name} was changed after it was written: its SHA-256 differs.")
    return arrays
