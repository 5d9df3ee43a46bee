"""The part of a training that one rank has: some of the members, some of every batch, and the step on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchace.lab.data import hashed_key
from torchace.lab.training.checkpoint import Checkpoints, _laid_out_as, _under
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.distributed import Ranks, detect_lost_rank
from torchace.lab.training.early_stopping import EarlyStopping
from torchace.lab.training.nonfinite import first_nonfinite
from torchace.lab.training.objective import losses_of, mixture_of, mixture_scores, scores_of
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.step import StepResult, autocast, others_mixture, own_mixture
from torchace.nn import Ensemble

State = dict[str, Tensor]


class Shard(RunGroup):
    """R runs of which this rank has some members. `forward` gives the logits of these, `predict` those of all."""

    ranks: Ranks
    all_members: int

    def predict(self, x: Tensor) -> Tensor:
        """Logits `(R, K, B, C)` of all members, on every rank; each predicts its part of the samples."""
        few = len(x) < self.ranks.data
        logits = super().predict(x if few else x[self.ranks.local_samples(len(x))])
        return self.ranks.gather_logits(logits, self.all_members, len(x))

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """The seeds of the runs; ranks with other samples than the first draw other numbers than one process would."""
        index = self.ranks.data_index
        super().set_seeds([hashed_key(seed, "rank", index) for seed in seeds] if index else seeds)

    def shard_state(self, whole: Mapping[str, Tensor]) -> State:
        """This rank's part of the whole network's state; names may have anything before those of the network."""
        if self.ranks.members == 1:
            return dict(whole)
        mine = self.ranks.local_members(self.all_members)
        runs = (self.num_runs, self.all_members)
        return {
            name: value.unflatten(0, runs)[:, mine.start : mine.stop].flatten(0, 1) if value.ndim else value
            for name, value in whole.items()
        }

    def gather_state(self, parts: Sequence[Mapping[str, Tensor]]) -> State:
        """The whole network's state, from those of the ranks that have the members."""
        return {
            name: torch.cat([part[name].unflatten(0, (self.num_runs, -1)) for part in parts], 1).flatten(0, 1)
            if value.ndim
            else value  # a number for all, such as an optimizer's steps
            for name, value in parts[0].items()
        }


def make_shard(network: RunGroup, ranks: Ranks) -> Shard:
    """What this rank has of a network. `fit` trains it as part of the whole.

    Args:
        network: The runs with all members, the same on every rank. What is not here can be thrown away.
        ranks: All ranks, of which this process is one.
    """
    count = network.num_members
    if ranks.members > count:
        raise ValueError(
            f"Expected at most one rank for each of {count} members, but got {ranks.members} ranks. "
            f"Use --parallel {count}xD, the batch over D ranks, or fewer ranks."
        )
    ensembles = [network.ensemble(r) for r in range(network.num_runs)]
    mine = ranks.local_members(count)
    if ranks.members > 1:
        if network.trunk is not None:
            raise ValueError(
                "Expected members without a shared trunk for --parallel members, but they share one. "
                "Use --parallel data, which splits the batch."
            )
        ensembles = [Ensemble([ensemble[k] for k in mine], link=ensemble.link) for ensemble in ensembles]  # type: ignore[index]
    part = Shard(ensembles)
    part.first_member = mine.start
    part.ranks, part.all_members = ranks, count
    return part


class RankStepper:
    """One step of every run on this rank's members and samples; called with whole batches, as `Stepper` is."""

    def __init__(self, network: Shard, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self.forward: torch.nn.Module = network
        if network.ranks.data > 1:  # gradients are averaged over the ranks with the same members
            with detect_lost_rank():
                self.forward = DistributedDataParallel(network, process_group=network.ranks.data_group)

    def __call__(self, x: Tensor, y: Tensor, weight: Tensor | None, diversity: Tensor, active: Tensor) -> StepResult:
        """See `train_step`. Losses and score are this rank's share: those of all ranks add up to the step's."""
        network, ranks, config = self.network, self.network.ranks, self.config
        own, count = config.batches != "shared", network.all_members
        share = network.num_members / count
        axis = 2 if own else 1
        if weight is None:
            weight = torch.ones(x.shape[: axis + 1], dtype=config.dtype, device=x.device)
        size = x.shape[axis]  # of the batch on all ranks
        rows = ranks.local_samples(size)
        x, y, weight = (part.narrow(axis, rows.start, rows.stop - rows.start) for part in (x, y, weight))

        mixture: Tensor | None = None
        mine = ranks.local_members(count)
        others: Tensor | None = None
        if config.batches == "exchanged":  # everybody predicts everybody's batch
            others = ranks.sum_over_members(others_mixture(network, x, config, first=mine.start))  # (R, K, B, C)
            others = others[:, mine.start : mine.stop]
        if own:
            x, y, weight = (part[:, mine.start : mine.stop] for part in (x, y, weight))
        with autocast(x, config):
            logits = self.forward(x, own=own)  # (R, K of this rank, B, C)
        if others is not None:
            mixture = own_mixture(others, logits, count, config)
        elif not own and ranks.members > 1:
            mixture = ranks.sum_over_members(share * mixture_of(logits.detach(), config))  # (R, B, C)

        losses = losses_of(logits, y, diversity, mixture, config, num_members=count)  # (R, K, B)
        losses = (losses * (weight if own else weight[:, None])).sum(-1) / size
        self.optimizer.zero_grad(set_to_none=True)
        with detect_lost_rank():
            # DDP divides by the number of ranks; a mean over all their samples is a sum of shares
            (ranks.data * torch.where(active[:, None], losses, 0.0).sum()).backward()
        found = self._faults(logits, losses)
        self.optimizer.step()
        score = self._score(logits.detach(), y, weight, mixture, own)
        return StepResult(losses.detach(), score / (count * size if own else size), found)

    @torch.no_grad()
    def _score(self, logits: Tensor, y: Tensor, weight: Tensor, mixture: Tensor | None, own: bool) -> Tensor:
        """This rank's share of the runs' weighted sums of scores, `(R,)`."""
        logits = logits.to(self.config.dtype)
        if own:  # every member on its own batch: as many ensembles of one
            logits, y, weight = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2), weight.flatten(1, 2)
        elif mixture is not None:
            if self.network.ranks.member_index > 0:  # all ranks of a column know it; one counts it
                return weight.new_zeros(len(weight))
            return (mixture_scores(mixture, y, self.config) * weight).sum(-1)
        return (scores_of(logits, y, self.config) * weight).sum(-1)

    @torch.no_grad()
    def _faults(self, logits: Tensor, losses: Tensor) -> Tensor:
        """As `first_nonfinite`, with the members' numbers in the whole ensemble; K + 1 more where the logits are sound.

        A NaN reaches the losses of members on other ranks within one step: of all ranks, the smallest number is where
        it came from.
        """
        count = self.network.all_members
        found = first_nonfinite(self.network, logits, losses)  # (R,)
        shared = found == self.network.num_members
        found = torch.where(found < 0, -1, found + self.network.ranks.local_members(count).start)
        found = torch.where(shared, count, found)
        sound = torch.isfinite(logits.detach().sum((2, 3))).all(1)
        return torch.where((found >= 0) & sound, found + count + 1, found)


@dataclass(frozen=True)
class SharedCheckpoints(Checkpoints):
    """The checkpoints of all ranks together: those that one process would write, so that any number can go on."""

    whole: RunGroup | None = None  # on the first rank: a network that has all members

    def save(
        self,
        network: RunGroup,
        optimizer: torch.optim.Optimizer,
        progress: dict[str, Any],
        stopping: EarlyStopping | None = None,
    ) -> None:
        assert isinstance(network, Shard)
        if network.ranks.members == 1:
            if network.ranks.is_first:
                super().save(network, optimizer, progress, stopping)
            return
        parts = network.ranks.gather_tensors(_state_of(network, optimizer, stopping))
        if parts is None:
            return
        assert self.whole is not None
        holder = torch.optim.SGD(_trained(self.whole).values())  # of the state, whatever optimizer it is of
        best = None if stopping is None else EarlyStopping(self.whole, stopping.validation, stopping.config)
        _restore(network.gather_state(parts), self.whole, holder, best, None if stopping is None else stopping.state())
        super().save(self.whole, holder, progress, best)

    def load(
        self, network: RunGroup, optimizer: torch.optim.Optimizer, stopping: EarlyStopping | None = None
    ) -> dict[str, Any] | None:
        assert isinstance(network, Shard)
        progress: dict[str, Any] | None = None
        state: State | None = None
        if network.ranks.is_first:
            whole = network if self.whole is None else self.whole
            holder = torch.optim.SGD(_trained(whole).values())
            best = None if stopping is None else EarlyStopping(whole, stopping.validation, stopping.config)
            progress = super().load(whole, holder, best)
            state = None if progress is None else _state_of(whole, holder, best)
        progress = network.ranks.broadcast(progress)
        if progress is None:
            return None
        mine = network.shard_state(network.ranks.broadcast_tensors(state))
        _restore(mine, network, optimizer, stopping, progress.get("stopping"))
        return progress


def gather_network(network: Shard, whole: RunGroup | None) -> RunGroup | None:
    """On the first rank, a network that has all members, with their weights; None on the others. All must ask."""
    if network.ranks.members == 1:
        return network if network.ranks.is_first else None
    parts = network.ranks.gather_tensors(network.state_dict())
    if parts is None:
        return None
    assert whole is not None
    whole.load_state_dict(network.gather_state(parts))
    return whole


def _trained(network: RunGroup) -> dict[str, torch.nn.Parameter]:
    """What an optimizer has, in its order."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def _state_of(network: RunGroup, optimizer: torch.optim.Optimizer, stopping: EarlyStopping | None) -> State:
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    if stopping is not None:
        state |= {f"best.{name}": value for name, value in stopping.weights.items()}
    names = list(_trained(network))
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{key}.{names[index]}": v for key, v in values.items() if v is not None}
    return state


def _restore(
    state: State,
    network: RunGroup,
    optimizer: torch.optim.Optimizer,
    stopping: EarlyStopping | None,
    best: dict[str, Any] | None,
) -> None:
    network.load_state_dict(_under("network.", state))
    if stopping is not None:
        assert best is not None
        stopping.load(best, _under("best.", state))
    parameters = _trained(network)
    index = {name: i for i, name in enumerate(parameters)}
    moments: dict[int, State] = {}
    for full, value in _under("optimizer.", state).items():
        key, _, name = full.partition(".")
        moments.setdefault(index[name], {})[key] = _laid_out_as(parameters[name], value)
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
