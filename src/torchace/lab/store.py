"""The run directory: one file for each finished run, never computed again; shared by sweeps, searches and fits."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import (
    CHECKSUM,
    is_unchanged,
    read_json,
    refuse_links,
    remove_partial,
    with_checksum,
    write_atomic,
)
from torchace.lab.schema.errors import describe_error
from torchace.lab.schema.results import (
    FORMAT,
    ExperimentResult,
    Failure,
    GroupPlan,
    PlanFile,
    ResultFile,
    RunKey,
    RunResult,
)
from torchace.lab.training.checkpoint import MANIFEST, Checkpoints

# What a sweep writes after experiment.json.
WRITTEN = ("checkpoints", "jobs.json", "log.jsonl", "report", "runs", "tensorboard")
# What sweeps, searches and fits write to: none of it may be a link.
OURS = (*WRITTEN, "groups", "experiment.json", "fingerprint.json", "fit.json", "lock", "model", "search")

File = TypeVar("File", bound=ResultFile)


class RunStoreError(ValueError):
    """A run directory that cannot be used; one sentence with the reason and what to do."""


class RunStore:
    """The files of one experiment.

    Args:
        directory: The run directory, created when it is locked.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other processes; the system releases the lock when this one dies."""
        refuse_links(self.directory, OURS)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = open(self.directory / "lock", "a+", errors="replace")  # noqa: SIM115
        except OSError as error:
            raise RunStoreError(f"Cannot write to {self.directory}: {error.strerror}. Choose another --out.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                owner = file.read().strip() or "another one"
                raise RunStoreError(
                    f"Process {owner} is at work in {self.directory}. Wait for it, or choose another --out."
                ) from error
            except OSError as error:
                raise RunStoreError(f"Cannot lock {self.directory}: {error.strerror}. Choose another --out.") from error
            file.seek(0)
            if not file.read(20).strip().isdigit() and os.fstat(file.fileno()).st_size:
                raise self._foreign("lock")
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def refuse_foreign(self) -> None:
        """Raise where a sweep would overwrite files that no sweep wrote."""
        foreign = [name for name in WRITTEN if os.path.lexists(self.directory / name)]
        if foreign and not (self.directory / "experiment.json").exists():
            raise self._foreign(foreign[0])

    def _foreign(self, name: str) -> RunStoreError:
        return RunStoreError(f"{self.directory} holds something else already ({name!r}). Choose another --out.")

    def experiment(self) -> ExperimentResult | None:
        """Return the experiment that the directory holds; None in a new directory."""
        return _load(self.directory / "experiment.json", ExperimentResult, "the directory")

    def write_experiment(self, result: ExperimentResult) -> None:
        """Write `experiment.json`."""
        write_atomic(self.directory / "experiment.json", result.to_json())

    def groups(self) -> list[GroupPlan]:
        """Return the run groups that were planned so far."""
        file = _load(self.directory / "jobs.json", PlanFile, "the directory")
        return [] if file is None else list(file.jobs)

    def write_groups(self, groups: Sequence[GroupPlan]) -> None:
        """Write `jobs.json`."""
        write_atomic(self.directory / "jobs.json", PlanFile(jobs=tuple(groups)).to_json())

    def checkpoints(self, group: GroupPlan, config_sha256: str | None = None) -> Checkpoints:
        """Return the checkpoints of a run group, valid for its runs with this configuration alone."""
        runs = [[run.arm, run.diversity, run.seed] for run in group.runs]
        owner = {"runs": runs, "config_sha256": config_sha256}
        return Checkpoints(self.directory / "checkpoints" / group.id, owner=owner)

    def checkpoint_seconds(self, groups: Sequence[GroupPlan]) -> dict[str, float]:
        """Return the training time in each unfinished group's checkpoint, by group."""
        found = {}
        for group in groups:
            with suppress(OSError, ValueError, LookupError, TypeError):  # none, or one that its group will refuse
                manifest = json.loads((self.checkpoints(group).directory / MANIFEST).read_bytes())
                found[group.id] = float(manifest["progress"]["seconds"])
        return found

    def is_finished(self, run: RunKey) -> bool:
        """Whether the run's result is written."""
        return self._file(run).exists()

    def result(self, run: RunKey) -> RunResult | None:
        """Return the result of a run; None where it is not finished."""
        return _load(self._file(run), RunResult)

    def failure(self, run: RunKey) -> Failure | None:
        """Return why a finished run failed; None where it did not."""
        result = self.result(run)
        if result is None or result.status == "finished":
            return None
        return result.failure or Failure(message="no reason given")

    def write_result(self, result: RunResult, arrays: Mapping[str, Tensor]) -> None:
        """Write a finished run: the arrays first, then its file with checksums of both."""
        run = RunKey(result.arm, result.diversity, result.seed)
        digest = None
        if arrays:
            data = save_safetensors(dict(arrays))
            write_atomic(self._file(run).with_suffix(".safetensors"), data)
            digest = hashlib.sha256(data).hexdigest()
        write_atomic(self._file(run), result.model_copy(update={"arrays_sha256": digest}).to_json())

    def clean(self, groups: Sequence[GroupPlan]) -> None:
        """Remove what a killed process left: partial files, and checkpoints of finished groups."""
        for folder in (self.directory, self.directory / "runs"):
            remove_partial(folder)
        for group in groups:
            if all(self.is_finished(run) for run in group.runs):
                self.checkpoints(group).remove()

    def _file(self, run: RunKey) -> Path:
        return self.directory / "runs" / f"{run.id}.json"


def finite(value: Any) -> Any:
    """Return JSON content with NaN and Inf replaced by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file as JSON, with its format and a checksum; NaN and Inf become null."""
    whole = with_checksum(finite({"format": FORMAT, **content}))
    write_atomic(file, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def read_record(file: Path, remedy: str = "that file to run it again") -> dict[str, Any]:
    """Return the content of a JSON file, its format and checksum checked.

    Args:
        file: The file.
        remedy: What to remove if it is damaged, for the error.
    """
    try:
        content = read_json(file)
    except OSError as error:
        raise RunStoreError(f"Cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise RunStoreError(f"{file} is damaged. Choose another --out, or remove {remedy}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunStoreError(f"{file} was not written by this version of torchace. Choose another --out.")
    if CHECKSUM in content and not is_unchanged(content):  # earlier versions wrote none
        raise RunStoreError(f"{file} was changed after it was written. Choose another --out, or remove {remedy}.")
    return content


def _load(file: Path, model: type[File], remedy: str = "that file to run it again") -> File | None:
    """Read a result file; None where there is none."""
    if not file.exists():
        return None
    try:
        return model.model_validate(read_record(file, remedy))
    except ValidationError as error:
        reason = describe_error(error, model).rstrip(".")
        raise RunStoreError(f"{file} is damaged ({reason}). Choose another --out, or remove {remedy}.") from error
