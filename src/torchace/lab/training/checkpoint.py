"""Checkpoints: the state of a training between two steps, of a whole run group or of the shard of a rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import is_unchanged, read_json, remove_partial, with_checksum, write_atomic
from torchace.lab.schema.results import Failure
from torchace.lab.training.distributed import Ranks, State
from torchace.lab.training.evaluate import EarlyStopping
from torchace.lab.training.run_group import RunGroup
from torchace.nn import Ensemble


def shard_network(network: RunGroup, ranks: Ranks) -> RunGroup:
    """Members of a run group that this rank trains; `network` has all members, the same on every rank."""
    if ranks.size == 1:
        return network
    if ranks.members > network.num_members:
        raise ValueError(
            f"Expected at most one rank for each of {network.num_members} members, but got {ranks.members} ranks. "
            f"Use --parallel {network.num_members}xD, the batch over D ranks, or fewer ranks."
        )
    ensembles = [network.ensemble(run) for run in range(network.num_runs)]
    if ranks.members > 1:
        if any(network.is_shared(name) for name in network.state_dict()):
            raise ValueError(
                "Expected members without shared weights for --parallel members, but they share some. "
                "Use --parallel data, which splits the batch."
            )
        local = range(network.num_members)[ranks.local_members(network.num_members)]
        ensembles = [Ensemble([ensemble[k] for k in local], link=ensemble.link) for ensemble in ensembles]  # type: ignore[index]
    return RunGroup(ensembles, ranks=ranks, total_members=network.num_members)


def shard_state(network: RunGroup, whole: Mapping[str, Tensor]) -> State:
    """This rank's shard of tensors of the whole group, or of some of its runs, whose first axis is `(R·K)`."""
    if network.ranks.members == 1:
        return dict(whole)
    return {
        name: value.unflatten(0, (-1, network.total_members))[:, network.local_members].flatten(0, 1)
        if value.ndim
        else value
        for name, value in whole.items()
    }


def gather_state(network: RunGroup, state: State) -> State | None:
    """Tensors of the whole group on the first rank, None on the others. Called by all ranks."""
    parts = network.ranks.gather_tensors(state)
    if parts is None or len(parts) == 1:
        return None if parts is None else parts[0]
    whole = {}
    for name, value in parts[0].items():
        if value.ndim:
            runs = len(value) // network.num_members
            value = torch.cat([part[name].unflatten(0, (runs, -1)) for part in parts], 1).flatten(0, 1)
        whole[name] = value  # without axes: one number for all members, such as a step count
    return whole


def gather_network(network: RunGroup) -> RunGroup | None:
    """Runs with all members on the first rank, None on the others. Called by all ranks."""
    if network.ranks.members == 1:
        return network if network.ranks.is_first else None
    state = gather_state(network, network.state_dict())
    if state is None:
        return None
    members = range(network.total_members)
    whole = RunGroup(
        [Ensemble([network.members[0] for _ in members], link=network.link) for _ in range(network.num_runs)]
    )
    whole.load_state_dict(state)
    return whole.train(network.training)


FORMAT = 1
MANIFEST = "manifest.json"
NUMBER = ":number"  # end of the name of an optimizer's state that is a Python number

_STATE = re.compile(r"state-[0-9]{1,19}\.safetensors")


Count = Annotated[int, Field(ge=0, lt=2**53)]
Scores = list[FiniteFloat | None]
NumberText = Annotated[float, Field(strict=False)]  # as text: JSON has no NaN and no Inf


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Epoch(_Strict):
    epoch: Count
    step: Count
    score: Scores
    held_out: Scores | None


class _EpochStats(_Strict):
    sums: list[NumberText]
    weights: list[FiniteFloat]
    steps: Count


class _EarlyStopping(_Strict):
    best: list[NumberText]
    best_epoch: list[Count]


class _Progress(_Strict):
    """Checkpoint content beside the tensors; lists have one entry per run."""

    step: Count
    seconds: Annotated[float, Field(ge=0, lt=2**53)]
    stopped: list[bool]
    history: list[_Epoch]
    failures: dict[str, Failure]  # by run
    tally: _EpochStats
    stopping: _EarlyStopping | None = None

    def fits(self, num_runs: int) -> bool:
        """Whether all entries match the number of runs."""
        lists: list[Any] = [self.stopped, self.tally.sums, self.tally.weights]
        for epoch in self.history:
            lists += [epoch.score, epoch.held_out or epoch.score]
        if self.stopping is not None:
            lists += [self.stopping.best, self.stopping.best_epoch]
        return all(len(values) == num_runs for values in lists) and all(
            run.isdecimal() and int(run) < num_runs for run in self.failures
        )


class CheckpointError(ValueError):
    """Checkpoint that cannot be used."""


@dataclass(frozen=True)
class Checkpoints:
    """Newest checkpoint of one training: a safetensors file, and the manifest that names it, written last.

    A process killed at any moment leaves the previous or the new checkpoint. Any number of ranks can resume from it.
    """

    directory: Path
    owner: Mapping[str, Any] | None = field(default=None, kw_only=True)  # runs and configuration as JSON

    def save(
        self,
        network: RunGroup,
        optimizer: torch.optim.Optimizer,
        progress: dict[str, Any],
        stopping: EarlyStopping | None = None,
    ) -> None:
        """Replace the checkpoint. Called by all ranks."""
        state = {f"network.{name}": value for name, value in network.state_dict().items()}
        if stopping is not None:
            state |= {f"best.{name}": value for name, value in stopping.weights.items()}
            progress = {**progress, "stopping": stopping.state()}
        for index, values in optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
            for name, value in values.items():
                if isinstance(value, int | float):
                    dtype = torch.float64 if isinstance(value, float) else None
                    state[f"optimizer.{index}.{name}{NUMBER}"] = torch.tensor(value, dtype=dtype)
        tensors = gather_state(network, state)
        if tensors is None:
            return
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
        """Restore the newest checkpoint and return its progress, or None. Called by all ranks."""
        ranks = network.ranks
        progress, tensors = self._read(network.num_runs) if ranks.is_first else (None, None)
        progress = ranks.broadcast(progress)
        if progress is None:
            return None
        tensors = ranks.broadcast_tensors(tensors)
        try:
            state = shard_state(network, tensors)
            network.load_state_dict(_select("network.", state))
            _load_optimizer(optimizer, _select("optimizer.", state))
            if stopping is not None:
                stopping.load(progress["stopping"], _select("best.", state))
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            raise self._damaged(error) from error
        return progress

    def _read(self, num_runs: int) -> tuple[dict[str, Any] | None, State | None]:
        """Progress and tensors of the newest checkpoint, or `(None, None)`."""
        remove_partial(self.directory)
        if not (self.directory / MANIFEST).exists():
            return None, None
        if self._is_foreign():
            raise CheckpointError(
                f"The checkpoint in {self.directory} belongs to other runs or to another configuration. "
                "Remove that folder to restart these runs."
            )
        try:
            content = self._manifest()
            if not _Progress.model_validate(content["progress"]).fits(num_runs):
                raise ValueError("its number of runs is wrong")
            state = content["state"]
            if not _STATE.fullmatch(state["file"]) or type(state["bytes"]) is not int:  # no path outside the folder
                raise ValueError(f"{MANIFEST} was changed or truncated")
            data = (self.directory / state["file"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != state["sha256"]:
                raise ValueError(f"{state['file']} was changed or truncated")
            return content["progress"], load_safetensors(data)
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> CheckpointError:
        if isinstance(error, OSError):
            reason = f"{Path(error.filename or '').name}: {error.strerror}"
        elif isinstance(error, ValidationError):
            reason = f"{MANIFEST} has no valid {(*error.errors()[0]['loc'], 'progress')[0]}"
        elif isinstance(error, LookupError | json.JSONDecodeError | UnicodeDecodeError):
            reason = f"{MANIFEST} was changed or truncated"
        else:
            reason = str(error).split("\n")[0].rstrip(".:")
        return CheckpointError(
            f"The checkpoint in {self.directory} is damaged ({reason}). Remove that folder to restart its runs."
        )

    def _manifest(self) -> dict[str, Any]:
        content = read_json(self.directory / MANIFEST)
        if not isinstance(content, dict) or not is_unchanged(content) or content["format"] != FORMAT:
            raise ValueError(f"{MANIFEST} was changed or truncated")
        return content

    def _is_foreign(self) -> bool:
        """Whether the checkpoint is intact and has another owner."""
        try:
            return self._manifest().get("owner") != self.owner
        except (OSError, ValueError, LookupError):  # reported by `load`
            return False

    def remove(self) -> None:
        """Remove the checkpoint of a finished training, and its folders if empty."""
        (self.directory / MANIFEST).unlink(missing_ok=True)  # first: without it the other files are ignored
        for state in self._states():
            state.unlink(missing_ok=True)
        remove_partial(self.directory)
        for folder in (self.directory, self.directory.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def remove_foreign(self) -> bool:
        """Remove a checkpoint with another owner; return whether there was one."""
        foreign = self._is_foreign()
        if foreign:
            self.remove()
        return foreign

    def _states(self) -> Iterator[Path]:
        """State files, including those without a manifest."""
        return (file for file in self.directory.glob("state-*") if _STATE.fullmatch(file.name) and not file.is_dir())


def _select(prefix: str, tensors: State) -> State:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: State) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state = states.setdefault(int(index), {})
        parameter = parameters[int(index)]
        if key.endswith(NUMBER):
            state[key.removesuffix(NUMBER)] = value.item()
        elif value.shape == parameter.shape:  # fused optimizers need the parameter's memory format
            state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        elif value.numel() == 1:  # a step count
            state[key] = value
        else:
            raise ValueError(f"it has an optimizer state of shape {tuple(value.shape)} for {tuple(parameter.shape)}")
    if len({frozenset(state) for state in states.values()}) > 1:
        raise ValueError("its optimizer states differ between parameters")
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def run_weights(network: RunGroup, run: int) -> State:
    """Copy of one run's weights and buffers on the CPU, by their names in its ensemble."""
    state = network.ensemble(run).state_dict()
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def state_digest(state: State) -> str:
    """SHA-256 of named tensors."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
