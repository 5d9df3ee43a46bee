"""Store of the finished run groups of a grid search and of the current checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import ARRAYS_BYTES, is_name, json_digest, read_bounded, remove_partial, write_atomic
from torchace.lab.store import RunStore, RunStoreError, read_record, write_record
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.loop import CheckpointPolicy
from torchace.lab.tuning.search import fingerprint_difference

FINGERPRINT = "fingerprint.json"
REMEDY = "the directory to search again"


class SearchCache:
    """The directory of one grid search; the current group is saved every so many seconds or steps."""

    def __init__(self, directory: Path, every_seconds: float | None = 30.0, every_steps: int | None = None) -> None:
        self.directory, self.every_seconds, self.every_steps = directory, every_seconds, every_steps
        self._search = ""  # SHA-256 of the fingerprint

    @contextmanager
    def open(self, fingerprint: Mapping[str, Any]) -> Iterator[None]:
        """Lock the directory; refuse one of another search."""
        with RunStore(self.directory).lock():
            file = self.directory / FINGERPRINT
            if not file.exists():
                write_record(file, {"search": fingerprint})
            try:
                difference = fingerprint_difference(read_record(file, REMEDY)["search"], fingerprint)
            except (LookupError, AttributeError, TypeError) as error:
                raise _damaged(file) from error
            if difference is not None:
                raise RunStoreError(
                    f"{self.directory} holds a search {difference}. Choose another --out, or remove the directory."
                )
            self._search = json_digest(fingerprint)
            for folder in (self.directory, self.directory / "groups"):
                remove_partial(folder)
            yield

    def read(self, group: str, shape: tuple[int, int]) -> Tensor | None:
        """Return the losses `(R, N)` of a finished group; None if it is not finished."""
        file = self._file(group)
        if not file.exists():
            return None
        content, arrays = read_record(file, REMEDY), file.with_suffix(".safetensors")
        if content.get("search_sha256") != self._search:
            raise RunStoreError(f"{file} belongs to another search. Choose another --out, or remove the directory.")
        try:
            data = read_bounded(arrays, 4 * ARRAYS_BYTES)
            losses = load_safetensors(data)["losses"]
        except OSError as error:
            raise RunStoreError(f"Cannot read {arrays}: {error.strerror}. Remove {file} to train it again.") from error
        except (SafetensorError, KeyError, ValueError) as error:
            raise _damaged(arrays) from error
        if losses.shape != shape or hashlib.sha256(data).hexdigest() != content.get("arrays_sha256"):
            raise _damaged(arrays)
        self._remove_checkpoint(group)  # of a process killed before it could
        return losses

    def write(self, group: str, losses: Tensor) -> None:
        """Store a finished group: the losses, then the JSON file that marks it as finished."""
        data, file = save_safetensors({"losses": losses}), self._file(group)
        write_atomic(file.with_suffix(".safetensors"), data)
        write_record(file, {"search_sha256": self._search, "arrays_sha256": hashlib.sha256(data).hexdigest()})
        self._remove_checkpoint(group)

    def checkpoint_policy(self, group: str) -> CheckpointPolicy:
        """Return the policy for a group and remove the checkpoints of others."""
        for folder in (self.directory / "checkpoints").glob("*"):
            if folder.name != group and is_name(folder.name) and folder.is_dir():
                Checkpoints(folder).remove()
        return CheckpointPolicy(self._checkpoints(group), self.every_steps, self.every_seconds)

    def _remove_checkpoint(self, group: str) -> None:
        self._checkpoints(group).remove()
        with suppress(OSError):
            (self.directory / "checkpoints").rmdir()

    def _checkpoints(self, group: str) -> Checkpoints:
        owner = {"group": group, "search_sha256": self._search}
        return Checkpoints(self.directory / "checkpoints" / group, owner=owner)

    def _file(self, group: str) -> Path:
        return self.directory / "groups" / f"{group}.json"


def _damaged(file: Path) -> RunStoreError:
    return RunStoreError(f"{file} is damaged. Choose another --out, or remove {REMEDY}.")
