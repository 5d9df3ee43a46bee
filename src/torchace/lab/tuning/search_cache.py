"""Where a search keeps what it has finished: one file a cohort, and the checkpoint of the cohort at hand."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import (
    ARRAYS_BYTES,
    CHECKSUM,
    is_name,
    is_unchanged,
    json_digest,
    read_bounded,
    read_json,
    remove_partial,
    with_checksum,
    write_atomic,
)
from torchace.lab.data import Split
from torchace.lab.store import RunStore, RunStoreError
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.loop import CheckpointPolicy
from torchace.lab.training.members import MemberPlan

FORMAT = 1
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class Trials:
    """The directory of one search. What is finished in it is never trained again.

    Args:
        directory: Made when it is first needed.
        every_seconds: How often the cohort at hand is saved.
        every_steps: The same, counted in steps.
    """

    directory: Path
    every_seconds: float | None = 30.0
    every_steps: int | None = None

    @contextmanager
    def opened(self, fingerprint: Mapping[str, Any]) -> Iterator[None]:
        """Keeps other processes and other searches out for as long as this one works."""
        with RunStore(self.directory).locked():
            self._claim(fingerprint)
            for folder in (self.directory, self.directory / "cohorts"):
                remove_partial(folder)
            yield

    def _search(self) -> str:
        """A SHA-256 of what makes the search this one."""
        return json_digest(_read(self.directory / FINGERPRINT, "the directory")["search"])

    def _claim(self, fingerprint: Mapping[str, Any]) -> None:
        file = self.directory / FINGERPRINT
        if not file.exists():
            write_atomic(file, _dumped({"search": fingerprint}))
            return
        try:
            other = difference(_read(file, "the directory")["search"], fingerprint)
        except (LookupError, AttributeError, TypeError) as error:
            raise _damaged(file, "the directory") from error
        if other is not None:
            raise RunStoreError(
                f"{self.directory} holds a search {other}. Choose another --out, or remove the directory."
            )

    def finish_losses(self, cohort: str, losses: Tensor) -> None:
        """Writes down a cohort's losses on every sample, `(R, N)`; before `finish`, which says that it is done."""
        write_atomic(self._file(cohort).with_suffix(".safetensors"), save_safetensors({"losses": losses.cpu()}))

    def losses(self, cohort: str, shape: tuple[int, int]) -> Tensor | None:
        """What `finish_losses` wrote; None where there is no such file, as in a search of an earlier version."""
        file = self._file(cohort).with_suffix(".safetensors")
        if not file.exists():
            return None
        try:
            losses = load_safetensors(read_bounded(file, 4 * ARRAYS_BYTES))["losses"]
        except OSError as error:
            raise RunStoreError(f"Cannot read {file}: {error.strerror}.") from error
        except (SafetensorError, KeyError, ValueError) as error:
            raise _damaged(file) from error
        if losses.shape != shape or not losses.is_floating_point():
            raise _damaged(file)
        return losses

    def finished(self, cohort: str, count: int) -> list[float | None] | None:
        """The scores of a cohort's runs, None for those that failed; None where it is not finished yet."""
        file = self._file(cohort)
        if not file.exists():
            return None
        content = _read(file)
        scores = content.get("scores")
        if not isinstance(scores, list) or len(scores) != count or not all(map(_is_score, scores)):
            raise _damaged(file)
        search = self._search()
        if content.get("search_sha256", search) != search:  # earlier versions wrote none
            raise RunStoreError(f"{file} belongs to another search. Choose another --out, or remove the directory.")
        self._forget(cohort)  # what a process left that was killed before it could
        return scores

    def finish(self, cohort: str, scores: Sequence[float | None]) -> None:
        """Writes a cohort down as done."""
        write_atomic(self._file(cohort), _dumped({"scores": list(scores), "search_sha256": self._search()}))
        self._forget(cohort)

    def checkpoint_policy(self, cohort: str) -> CheckpointPolicy:
        """Where the state of a cohort is saved; that of any other, from a search that was changed, is removed."""
        for folder in (self.directory / "checkpoints").glob("*"):
            if folder.name != cohort and is_name(folder.name) and folder.is_dir():
                Checkpoints(folder).remove()
        return CheckpointPolicy(self._checkpoints(cohort), self.every_steps, self.every_seconds)

    def _forget(self, cohort: str) -> None:
        self._checkpoints(cohort).remove()
        with suppress(OSError):  # there, and empty, if a process was killed right before it removed it
            (self.directory / "checkpoints").rmdir()

    def _checkpoints(self, cohort: str) -> Checkpoints:
        # the name of a cohort depends on its runs
        owner = {"cohort": cohort, "search_sha256": self._search()}
        return Checkpoints(self.directory / "checkpoints" / cohort, owner=owner)

    def _file(self, cohort: str) -> Path:
        return self.directory / "cohorts" / f"{cohort}.json"


def fingerprint(plan: MemberPlan, num_outputs: int, **splits: Split | None) -> dict[str, Any]:
    """What makes a search this one: the plan, as JSON holds it, and a SHA-256 of the samples of each split.

    Example:
        >>> split = Split(torch.zeros(2, 1), torch.tensor([0, 1]))
        >>> found = fingerprint(MemberPlan("classification", epochs=3), 2, train=split)
        >>> found["epochs"], found["samples"]["train"][:8]
        (3, 'c56808d4')
    """
    samples = {name: None if split is None else digest(split) for name, split in splits.items()}
    return {**asdict(plan), "hidden": list(plan.hidden), "num_outputs": num_outputs, "samples": samples}


def digest(split: Split) -> str:
    """A SHA-256 of a split's samples, labels and weights."""
    found = hashlib.sha256()
    for part in (split.x, split.y, split.weight):
        if part is None:
            continue
        found.update(f"{part.dtype} {tuple(part.shape)};".encode())
        found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In what another search differs from this one, to follow "holds a search"; None where they are the same.

    Example:
        >>> difference({"epochs": 5, "samples": {}}, {"epochs": 6, "samples": {}})
        'with epochs = 5, but now it is 6'
    """
    for key in sorted({*before, *now} - {"samples"}):
        if before.get(key) != now.get(key):
            return f"with {key} = {before.get(key)!r}, but now it is {now.get(key)!r}"
    for name, samples in now["samples"].items():
        if before.get("samples", {}).get(name) != samples:
            return f"on other data: its {name} samples are not these"
    return None


def cohort_id(purpose: str, runs: Sequence[tuple[float, int]]) -> str:
    """A name that depends on what a cohort is for and on λ and seed of every run.

    Example:
        >>> cohort_id("search", [(0.0, 0), (0.5, 0)])
        'search-0dd37e7058a0'
    """
    content = json.dumps([[diversity + 0.0, seed] for diversity, seed in runs])
    return f"{purpose}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _is_score(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _dumped(content: Mapping[str, Any]) -> bytes:
    whole = with_checksum({"format": FORMAT, **content})
    return (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()


def _read(file: Path, remedy: str = "that file") -> dict[str, Any]:
    try:
        content = read_json(file)
    except OSError as error:
        raise RunStoreError(f"Cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise _damaged(file, remedy) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunStoreError(f"{file} was not written by this version of torchace. Choose another --out.")
    if CHECKSUM in content and not is_unchanged(content):  # earlier versions wrote none
        raise _damaged(file, remedy)
    return content


def _damaged(file: Path, remedy: str = "that file") -> RunStoreError:
    return RunStoreError(f"{file} is damaged. Choose another --out, or remove {remedy} to train it again.")
