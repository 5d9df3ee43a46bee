"""Run directory: one file for each finished run; shared by sweeps, searches and fits."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import CHECKSUM, is_unchanged, read_json, remove_partial, with_checksum, write_atomic
from torchace.lab.schema.reading import describe_error
from torchace.lab.schema.results import FORMAT, ExperimentResult, GroupPlan, PlanFile, ResultFile, RunKey, RunResult
from torchace.lab.training.checkpoint import Checkpoints, state_digest

# written by a sweep after experiment.json; the second line is of trackers
SWEEP_FILES = (
    *("checkpoints", "jobs.json", "report", "runs", "weights"),
    *("metrics.csv", "mlflow.db", "tensorboard", "wandb"),
)

File = TypeVar("File", bound=ResultFile)


class RunStoreError(ValueError):
    """Run directory that cannot be used; the message has the reason and the remedy."""


class RunStore:
    """Files of one experiment in its run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the directory and lock it against other processes; the lock ends with the process."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = open(self.directory / "lock", "a+")  # noqa: SIM115
        except OSError as error:
            raise RunStoreError(f"Cannot write to {self.directory}: {error.strerror}. Choose another --out.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunStoreError(
                    f"Process {file.read().strip()} is using {self.directory}. Wait for it, or choose another --out."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def refuse_foreign(self) -> None:
        """Raise an error if a sweep would overwrite foreign files."""
        foreign = [name for name in SWEEP_FILES if (self.directory / name).exists()]
        if foreign and not (self.directory / "experiment.json").exists():
            raise RunStoreError(f"{self.directory} already holds other files ({foreign[0]!r}). Choose another --out.")

    def experiment(self) -> ExperimentResult | None:
        """Experiment of the directory; None if new."""
        return _load(self.directory / "experiment.json", ExperimentResult, "the directory")

    def write_experiment(self, result: ExperimentResult) -> None:
        """Write `experiment.json`."""
        write_atomic(self.directory / "experiment.json", result.to_json())

    def groups(self) -> list[GroupPlan]:
        """Run groups planned so far."""
        file = _load(self.directory / "jobs.json", PlanFile, "the directory")
        return [] if file is None else list(file.jobs)

    def write_groups(self, groups: Sequence[GroupPlan]) -> None:
        """Write `jobs.json`."""
        write_atomic(self.directory / "jobs.json", PlanFile(jobs=tuple(groups)).to_json())

    def checkpoints(self, group: GroupPlan, config_sha256: str | None = None) -> Checkpoints:
        """Checkpoints of a run group, valid only for its runs with this configuration."""
        runs = [[run.arm, run.diversity, run.seed, *run.settings.items()] for run in group.runs]
        owner = {"runs": runs, "config_sha256": config_sha256}
        return Checkpoints(self.directory / "checkpoints" / group.id, owner=owner)

    def is_finished(self, run: RunKey) -> bool:
        """Whether the run's result is written."""
        return self._file(run).exists()

    def result(self, run: RunKey) -> RunResult | None:
        """Result of a run; None if unfinished."""
        return _load(self._file(run), RunResult)

    def write_result(
        self, result: RunResult, arrays: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write a finished run: arrays and weights first, then its file with checksums."""
        run = result.key
        digest = None
        if arrays:
            data = save_safetensors(dict(arrays))
            write_atomic(self._file(run).with_suffix(".safetensors"), data)
            digest = hashlib.sha256(data).hexdigest()
        if weights:
            write_atomic(self._weights_file(run), save_safetensors(dict(weights)))
        write_atomic(self._file(run), result.model_copy(update={"arrays_sha256": digest}).to_json())

    def weights(self, run: RunKey) -> dict[str, Tensor]:
        """Weights of a run."""
        result, file = self.result(run), self._weights_file(run)
        if result is None:
            raise RunStoreError(f"{self.directory} holds no run {run.description}.")
        if not file.exists():
            why = "they were not kept; use keep_weights=True and another `out`" if result.finished else "the run failed"
            raise RunStoreError(f"There are no weights of run {run.description}: {why}.")
        try:
            weights = load_safetensors(file.read_bytes())
        except SafetensorError:
            weights = {}
        if state_digest(weights) != result.weights_sha256:
            raise RunStoreError(f"{file} is damaged. Remove it and {self._file(run).name} to train the run again.")
        return weights

    def clean(self, groups: Sequence[GroupPlan]) -> None:
        """Remove partial files, and checkpoints of finished groups."""
        for folder in (self.directory, self.directory / "runs", self.directory / "weights"):
            remove_partial(folder)
        for group in groups:
            if all(self.is_finished(run) for run in group.runs):
                self.checkpoints(group).remove()

    def _file(self, run: RunKey) -> Path:
        return self.directory / "runs" / f"{run.id}.json"

    def _weights_file(self, run: RunKey) -> Path:
        return self.directory / "weights" / f"{run.id}.safetensors"


def finite(value: Any) -> Any:
    """Copy of JSON content with null for NaN and Inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with its format and a checksum; NaN and Inf become null."""
    whole = with_checksum(finite({"format": FORMAT, **content}))
    write_atomic(file, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def read_record(file: Path, remedy: str = "that file to run it again") -> dict[str, Any]:
    """Read a JSON file and check its format and checksum; `remedy` names what to remove if it is damaged."""
    try:
        content = read_json(file)
    except ValueError as error:
        raise RunStoreError(f"{file} is damaged. Choose another --out, or remove {remedy}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunStoreError(f"{file} was not written by this version of torchace. Choose another --out.")
    if CHECKSUM in content and not is_unchanged(content):  # earlier versions wrote none
        raise RunStoreError(f"{file} was changed after it was written. Choose another --out, or remove {remedy}.")
    return content


def _load(file: Path, model: type[File], remedy: str = "that file to run it again") -> File | None:
    """Read a result file; None if missing."""
    if not file.exists():
        return None
    try:
        return model.model_validate(read_record(file, remedy))
    except ValidationError as error:
        reason = describe_error(error, model).rstrip(".")
        raise RunStoreError(f"{file} is damaged ({reason}). Choose another --out, or remove {remedy}.") from error


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings to `section.name: value`."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= {f"{key}.{k}": v for k, v in flatten(value).items()} if isinstance(value, dict) else {key: value}
    return flat


def describe_differences(before: Any, now: dict[str, Any]) -> str:
    """Return the settings in which two requests differ, in parentheses; nothing if the first cannot be read."""
    if not isinstance(before, dict):
        return ""
    old, new, parts = flatten(before), flatten(now), {}
    for key in new:
        if old.get(key) != new[key]:
            name = key.rpartition(".")[2]  # some settings are in two sections
            parts[name] = f"{name} was {old.get(key)!r} and is now {new[key]!r}"
    if parts.pop("sha256", None) and "name" not in parts:
        parts = {"data": "the data file has changed", **parts}
    shown = list(parts.values())
    return f" ({'; '.join(shown[:4])}{'; ...' if len(shown) > 4 else ''})" if shown else ""
