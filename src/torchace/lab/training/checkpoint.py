"""Checkpoints: the state of a training between two steps, of a whole run group or of the shard of a rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import is_unchanged, read_json, remove_partial, with_checksum, write_atomic
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
            f"Use fewer ranks, or --parallel {network.num_members}xD to split the batch over D ranks."
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
    ranks, whole = network.ranks, dict(state)
    for name, value in sorted(state.items()) if ranks.members > 1 else ():  # in one order on all ranks
        if value.ndim:  # else one number for all members, such as a step count
            parts = value.detach().unflatten(0, (-1, network.num_members))
            parts = ranks.gather_members(parts, network.total_members).flatten(0, 1)
            whole[name] = parts.cpu() if ranks.is_first else value
    return whole if ranks.is_first else None


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


FORMAT = 2
MANIFEST = "manifest.json"
NUMBER = ":number"  # end of the name of an optimizer's state that is a Python number


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
            for name, value in values.items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{index}.{name}"] = value
                elif isinstance(value, int | float):
                    dtype = torch.float64 if isinstance(value, float) else None
                    state[f"optimizer.{index}.{name}{NUMBER}"] = torch.tensor(value, dtype=dtype)
        tensors = gather_state(network, state)
        if tensors is None:
            return
        data = save_safetensors({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        file = self.directory / f"state-{progress['step']}.safetensors"
        content = {
            "format": FORMAT,
            "state": {"file": file.name, "sha256": hashlib.sha256(data).hexdigest()},
            "owner": self.owner,
            "progress": progress,
        }
        write_atomic(file, data)
        write_atomic(self.directory / MANIFEST, json.dumps(with_checksum(content)).encode())
        for old in self.directory.glob("state-*.safetensors"):
            if old != file:
                old.unlink()

    def load(
        self, network: RunGroup, optimizer: torch.optim.Optimizer, stopping: EarlyStopping | None = None
    ) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress, or None. Called by all ranks."""
        ranks = network.ranks
        progress, data = ranks.broadcast(self._read() if ranks.is_first else None)
        if progress is None:
            return None
        state = shard_state(network, load_safetensors(data))
        try:
            network.load_state_dict(_select("network.", state))
            _load_optimizer(optimizer, _select("optimizer.", state))
        except (ValueError, LookupError, RuntimeError) as error:
            raise self._damaged("it belongs to another network or optimizer") from error
        if stopping is not None:
            stopping.load(progress["stopping"], _select("best.", state))
        return progress

    def _read(self) -> tuple[dict[str, Any] | None, bytes | None]:
        """Progress and safetensors of the newest checkpoint, or `(None, None)`."""
        remove_partial(self.directory)
        content = self._manifest()
        if content is None:
            return None, None
        if content["owner"] != self.owner:
            raise CheckpointError(
                f"The checkpoint in {self.directory} belongs to other runs or to another configuration. "
                "Remove that folder to restart these runs."
            )
        file = self.directory / Path(content["state"]["file"]).name
        data = file.read_bytes() if file.exists() else b""
        if hashlib.sha256(data).hexdigest() != content["state"]["sha256"]:
            raise self._damaged(f"{file.name} was changed or truncated")
        return content["progress"], data

    def _manifest(self) -> dict[str, Any] | None:
        file = self.directory / MANIFEST
        if not file.exists():
            return None
        content = None
        with contextlib.suppress(ValueError):
            content = read_json(file)
        if not isinstance(content, dict) or not is_unchanged(content):
            raise self._damaged(f"{MANIFEST} was changed or truncated")
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"The checkpoint in {self.directory} was written by another version of torchace. "
                "Remove that folder to restart its runs."
            )
        return content

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint in {self.directory} is damaged ({reason}). Remove that folder to restart its runs."
        )

    def remove(self) -> None:
        """Remove the checkpoint of a finished training, and its folders if empty."""
        remove_partial(self.directory)
        for file in (self.directory / MANIFEST, *self.directory.glob("state-*.safetensors")):  # the manifest first
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()

    def remove_foreign(self) -> bool:
        """Remove a checkpoint with another owner; return whether there was one. A damaged one is left to `load`."""
        with contextlib.suppress(CheckpointError):
            content = self._manifest()
            if content is not None and content["owner"] != self.owner:
                self.remove()
                return True
        return False


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
        else:  # a step count
            state[key] = value
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
