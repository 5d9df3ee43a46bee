"""The state of a training between two steps, on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import is_unchanged, read_bounded, read_json, remove_partial, with_checksum, write_atomic
from torchace.lab.training.early_stopping import EarlyStopping
from torchace.lab.training.run_group import RunGroup

FORMAT = 1
MANIFEST = "manifest.json"

_STATE = re.compile(r"state-[0-9]{1,19}\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one sentence that says why and what to do."""


@dataclass(frozen=True)
class Checkpoints:
    """The newest checkpoint of one training in a directory: a safetensors file and the manifest that names it.

    The manifest is written last. A process killed at any moment leaves the previous checkpoint or the new one.

    Attributes:
        directory: Where it is.
        owner: The runs and the configuration that it belongs to, as JSON holds them; that of others is refused.
    """

    directory: Path
    owner: Mapping[str, Any] | None = field(default=None, kw_only=True)

    def save(
        self,
        network: RunGroup,
        optimizer: torch.optim.Optimizer,
        progress: dict[str, Any],
        stopping: EarlyStopping | None = None,
    ) -> None:
        """Replaces the checkpoint; `progress` is everything else there is to know, as JSON holds it."""
        tensors = {f"network.{name}": value for name, value in network.state_dict().items()}
        if stopping is not None:
            tensors |= {f"best.{name}": value for name, value in stopping.weights.items()}
            progress = {**progress, "stopping": stopping.state()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items() if value is not None}
        data = save_safetensors({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        name = f"state-{progress['step']}.safetensors"
        content = {
            "format": FORMAT,
            "state": {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "owner": self.owner,
            "progress": progress,
        }
        write_atomic(self.directory / name, data)
        write_atomic(self.directory / MANIFEST, json.dumps(with_checksum(content)).encode())
        for old in self._states():
            if old.name != name:
                old.unlink(missing_ok=True)

    def load(
        self, network: RunGroup, optimizer: torch.optim.Optimizer, stopping: EarlyStopping | None = None
    ) -> dict[str, Any] | None:
        """Restores the newest checkpoint and returns its progress; None where there is none yet."""
        remove_partial(self.directory)
        if not (self.directory / MANIFEST).exists():
            return None
        if self._is_foreign():
            raise CheckpointError(
                f"The checkpoint in {self.directory} belongs to other runs or to another configuration. "
                "Remove that folder to start these runs anew."
            )
        try:
            progress, tensors = self._read()
            _check_progress(progress, network.num_runs)
            network.load_state_dict(_under("network.", tensors))
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            states: dict[int, dict[str, Tensor]] = {}
            for name, value in _under("optimizer.", tensors).items():
                index, _, key = name.partition(".")
                states.setdefault(int(index), {})[key] = _laid_out_as(parameters[int(index)], value)
            if len({frozenset(state) for state in states.values()}) > 1:
                raise ValueError("it holds other optimizer states for some parameters than for others")
            if stopping is not None:
                stopping.load(progress["stopping"], _under("best.", tensors))
            optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise self.damaged(_reason(error)) from error
        return progress

    def damaged(self, why: str) -> CheckpointError:
        """The error of a checkpoint that cannot be used."""
        return CheckpointError(
            f"The checkpoint in {self.directory} is damaged ({why}). Remove that folder to start its runs anew."
        )

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        content = self._manifest()
        state = content["state"]
        if not _STATE.fullmatch(state["file"]) or type(state["bytes"]) is not int:  # never a path elsewhere
            raise ValueError(f"{MANIFEST} is not what was written")
        data = read_bounded(self.directory / state["file"], state["bytes"])
        if hashlib.sha256(data).hexdigest() != state["sha256"]:
            raise ValueError(f"{state['file']} is not what was written")
        return content["progress"], load_safetensors(data)

    def _manifest(self) -> dict[str, Any]:
        content = read_json(self.directory / MANIFEST)
        if not isinstance(content, dict) or not is_unchanged(content) or content["format"] != FORMAT:
            raise ValueError(f"{MANIFEST} is not what was written")
        return content

    def _is_foreign(self) -> bool:
        """Whether the checkpoint is sound and belongs to others."""
        try:
            return self._manifest().get("owner") != self.owner
        except (OSError, ValueError, LookupError):  # there is none, or it is damaged: `load` says so
            return False

    def remove(self) -> None:
        """Removes the checkpoint of a training that is finished, and the folder around it once it is empty."""
        (self.directory / MANIFEST).unlink(missing_ok=True)  # first: without it the rest is nothing
        for state in self._states():
            state.unlink(missing_ok=True)
        remove_partial(self.directory)
        for folder in (self.directory, self.directory.parent):  # each by itself: a killed process may have left either
            with contextlib.suppress(OSError):
                folder.rmdir()

    def remove_foreign(self) -> bool:
        """Removes a checkpoint that belongs to other runs or to another configuration; whether there was one."""
        foreign = self._is_foreign()
        if foreign:
            self.remove()
        return foreign

    def _states(self) -> Iterator[Path]:
        """The files of states, also those that no manifest names."""
        return (file for file in self.directory.glob("state-*") if _STATE.fullmatch(file.name) and not file.is_dir())


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """A saved moment in its parameter's memory format: fused optimizers refuse channels-last beside plain."""
    if value.numel() == 1 and value.shape != parameter.shape:  # a count of steps
        return value
    if value.shape != parameter.shape:
        raise ValueError(f"it holds an optimizer state of shape {tuple(value.shape)} for {tuple(parameter.shape)}")
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _check_progress(progress: Any, num_runs: int) -> None:
    """Refuses what no training writes, whatever its checksum."""

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**53

    def is_time(value: Any) -> bool:
        return type(value) in (int, float) and 0 <= value < 2**53

    def of_runs(value: Any, valid: Callable[[Any], bool]) -> bool:
        return isinstance(value, list) and len(value) == num_runs and all(map(valid, value))

    def is_score(value: Any) -> bool:
        return value is None or type(value) in (int, float)

    def is_epoch(value: Any) -> bool:
        return (
            set(value) == {"epoch", "step", "score", "held_out"}
            and is_count(value["epoch"])
            and is_count(value["step"])
            and of_runs(value["score"], is_score)
            and (value["held_out"] is None or of_runs(value["held_out"], is_score))
        )

    def is_failure(run: str, value: Any) -> bool:
        return (
            run.isdecimal()
            and int(run) < num_runs
            and set(value) == {"message", "member", "step"}
            and type(value["message"]) is str
            and (value["member"] is None or is_count(value["member"]))
            and is_count(value["step"])
        )

    valid: dict[str, Callable[[Any], bool]] = {
        "step": is_count,
        "seconds": is_time,
        "stopped": lambda value: of_runs(value, lambda one: type(one) is bool),
        "history": lambda value: type(value) is list and all(map(is_epoch, value)),
        "failures": lambda value: all(is_failure(run, failure) for run, failure in value.items()),
        "tally": lambda value: is_count(value["steps"]) and of_runs(value["sums"], _is_number_text),
        "stopping": lambda value: of_runs(value["best"], _is_number_text) and of_runs(value["best_epoch"], is_count),
    }
    try:
        wrong = [name for name, holds in valid.items() if name in progress and not holds(progress[name])]
        if "step" not in progress:
            wrong.append("step")
    except (LookupError, TypeError, AttributeError, ValueError):
        wrong = ["progress"]
    if wrong:
        raise ValueError(f"{MANIFEST} has no valid {wrong[0]}")


def _is_number_text(value: Any) -> bool:
    return type(value) is str and math.isfinite(float(value) if value not in ("inf", "-inf", "nan") else 0.0)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    if isinstance(error, LookupError | json.JSONDecodeError | UnicodeDecodeError):
        return f"{MANIFEST} is not what was written"
    return str(error).split("\n")[0].rstrip(".:")


def weights_digest(network: RunGroup, run: int) -> str:
    """A SHA-256 of one run's weights and buffers: two runs with the same digest ended bit-identically."""
    digest = hashlib.sha256()
    for name, value in sorted(network.ensemble(run).state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
