"""A run directory: what is finished is in it, one file a run, and is never computed again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import (
    CHECKSUM,
    is_name,
    is_unchanged,
    read_json,
    refuse_links,
    remove_partial,
    with_checksum,
    write_atomic,
)
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.loop import Failure

FORMAT = 1
# What a sweep writes beside experiment.json, which is the first of it.
WRITTEN = ("checkpoints", "jobs.json", "log.jsonl", "report", "runs", "tensorboard")
# What sweeps, searches and fits write to: none of it may be a link.
OURS = (*WRITTEN, "groups", "experiment.json", "fingerprint.json", "fit.json", "lock", "model", "search")


class RunStoreError(ValueError):
    """A run directory that cannot be used: one sentence that says why and what to do."""


@dataclass(frozen=True)
class Run:
    """One training: an arm of the experiment, one λ, one seed."""

    arm: str
    diversity: float
    seed: int

    @property
    def id(self) -> str:
        # all digits: two λ that differ in the tenth must not share a file; + 0.0 makes -0.0 a 0.0
        return f"{self.arm}-l{repr(self.diversity + 0.0).removesuffix('.0')}-s{self.seed}"


@dataclass(frozen=True)
class GroupPlan:
    """Runs that are trained together. Who is in it is fixed when it is first written down."""

    id: str
    runs: tuple[Run, ...]
    compile: bool = False  # decided with it, so that a run that resumes is computed as it began

    def __post_init__(self) -> None:
        if not is_name(self.id) or len({run.arm for run in self.runs}) != 1:
            raise ValueError(f"Expected a group with a name and runs of one arm, but got {self.id!r}.")


class RunStore:
    """The files of one experiment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out for as long as this one works; the system lifts the lock when it dies."""
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
                who = file.read().strip() or "another one"
                raise RunStoreError(
                    f"Process {who} is at work in {self.directory}. Wait for it, or choose another --out."
                ) from error
            except OSError as error:
                raise RunStoreError(f"Cannot lock {self.directory}: {error.strerror}. Choose another --out.") from error
            file.seek(0)
            if not file.read(20).strip().isdigit() and os.fstat(file.fileno()).st_size:
                raise RunStoreError(f"{self.directory} holds something else already ('lock'). Choose another --out.")
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def refuse_foreign(self) -> None:
        """Refuses a directory where a sweep would write over what is no sweep's."""
        foreign = [name for name in WRITTEN if os.path.lexists(self.directory / name)]
        if foreign and not (self.directory / "experiment.json").exists():
            raise RunStoreError(
                f"{self.directory} holds something else already ({foreign[0]!r}). Choose another --out."
            )

    # -- the experiment -----------------------------------------------------------------------------------------------

    def experiment(self) -> dict[str, Any] | None:
        """What was written about the experiment; None in a new directory."""
        file = self.directory / "experiment.json"
        if not file.exists():
            return None
        return read_record(file)

    def write_experiment(self, content: Mapping[str, Any]) -> None:
        write_record(self.directory / "experiment.json", content)

    # -- run groups --------------------------------------------------------------------------------------------------

    def groups(self) -> list[GroupPlan]:
        file = self.directory / "jobs.json"
        if not file.exists():
            return []
        content = read_record(file)
        try:
            groups = [
                GroupPlan(group["id"], tuple(map(_run_of, group["runs"])), group.get("compile", False) is True)
                for group in content["jobs"]
            ]
            if len({group.id for group in groups}) < len(groups):
                raise ValueError("two groups of one name")
            if not all(group.runs for group in groups):
                raise ValueError("a group without runs")
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # a seed that is infinite
            raise RunStoreError(f"{file} is damaged. Choose another --out, or remove the directory.") from error
        return groups

    def write_groups(self, groups: list[GroupPlan]) -> None:
        listed = [
            {
                "id": group.id,
                "runs": [{"arm": r.arm, "diversity": r.diversity, "seed": r.seed} for r in group.runs],
                "compile": group.compile,
            }
            for group in groups
        ]
        write_record(self.directory / "jobs.json", {"jobs": listed})

    def checkpoints(self, group: GroupPlan, config_sha256: str | None = None) -> Checkpoints:
        """Where a group's state is saved, for its runs under this configuration alone."""
        runs = [[run.arm, run.diversity, run.seed] for run in group.runs]
        owner = {"runs": runs, "config_sha256": config_sha256}
        return Checkpoints(self.directory / "checkpoints" / group.id, owner=owner)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def is_finished(self, run: Run) -> bool:
        return self._file(run).exists()

    def failure(self, run: Run) -> Failure | None:
        """Why a finished run failed; None where it did not."""
        content = read_record(self._file(run))
        try:
            return Failure(**content["failure"]) if content["status"] == "failed" else None
        except (KeyError, TypeError) as error:
            raise RunStoreError(f"{self._file(run)} is damaged. Remove that file to run it again.") from error

    def write_result(self, run: Run, content: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        """Writes a run down as done: the arrays first, then the file that says so, with checksums of both."""
        data = save_safetensors(dict(arrays)) if arrays else None
        if data is not None:
            write_atomic(self._file(run).with_suffix(".safetensors"), data)
        digest = None if data is None else hashlib.sha256(data).hexdigest()
        write_record(self._file(run), {**content, "arrays_sha256": digest})

    def clean(self, groups: list[GroupPlan]) -> None:
        """Removes what a killed process left: half-written files, and checkpoints of groups that are finished."""
        for folder in (self.directory, self.directory / "runs"):
            remove_partial(folder)
        for group in groups:
            if all(self.is_finished(run) for run in group.runs):
                self.checkpoints(group).remove()

    def _file(self, run: Run) -> Path:
        return self.directory / "runs" / f"{run.id}.json"


def _run_of(content: Mapping[str, Any]) -> Run:
    """A run as it was written, refused where it would be no part of a path."""
    arm, diversity, seed = content["arm"], content["diversity"], content["seed"]
    if not is_name(arm) or type(seed) is not int or not 0 <= seed < 2**31 or not 0 <= diversity <= 1:
        raise ValueError("no such run")
    return Run(arm, float(diversity), seed)


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    """Write a result file as JSON, with its format and a checksum; NaN and Inf become null."""
    whole = with_checksum(finite({"format": FORMAT, **content}))
    write_atomic(file, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def finite(value: Any) -> Any:
    """NaN and Inf as null: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_record(file: Path, remedy: str = "that file to run it again") -> dict[str, Any]:
    """Return the content of a file that `write_record` wrote, its format and checksum checked.

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
