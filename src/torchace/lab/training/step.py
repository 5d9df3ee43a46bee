"""Training step: batch → logits → loss → gradients → new weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.lab.data.inputs import Inputs, map_inputs
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.nonfinite import all_finite, first_nonfinite
from torchace.lab.training.objective import compute_objective, ensemble_predictions, member_predictions, partial_mixture
from torchace.lab.training.run_group import RunGroup


class StepResult(NamedTuple):
    """Losses and scores of this rank; ranks add up to the whole step."""

    losses: Tensor  # (R, K): training loss of each member
    score: Tensor  # (R,): of the ensemble if members share a batch, else mean over members
    nonfinite: Tensor | None  # (R,): see `first_nonfinite`; None: all finite


class TrainStep:
    """One step of every run, on this rank's members and samples, without transfers from the device."""

    def __init__(
        self,
        network: RunGroup,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        label_smoothing: Tensor | None = None,  # (R,); None: the configuration's
    ) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self.label_smoothing = label_smoothing
        self.forward = network.ranks.data_parallel(network)
        self.parameters = [p for p in network.parameters() if p.requires_grad]

    def __call__(
        self,
        x: Inputs,  # (R, B, ...), or (R, K, B, ...) with own batches
        y: Tensor,  # (R, B) or (R, K, B); (..., M) for numbers and labels
        weight: Tensor | None,  # first axes of y, or (R, K, B); relative to the training set's mean
        diversity: Tensor,  # (R,)
        active: Tensor,  # (R,): False for stopped runs
    ) -> StepResult:
        """Update the weights on one batch."""
        network, ranks, config = self.network, self.network.ranks, self.config
        own = config.batches != "shared"
        axis = 2 if own else 1
        batch_size = y.shape[axis]
        x, y, weight = ranks.shard_samples(axis, x, y, weight)
        others = self._others_mixture(x, y.shape[1:3]) if config.batches == "exchanged" else None
        if own and ranks.members > 1:
            x = map_inputs(lambda t: t[:, network.local_members], x)
            y, weight, others = (t if t is None else t[:, network.local_members] for t in (y, weight, others))  # type: ignore[assignment]

        with autocast(y.device, config):
            logits = self.forward(x, own=own)  # (R, K, B, C)
        mixture = self._mixture(logits.detach(), others, weight)
        losses, score, gradient = compute_objective(
            logits.detach(),
            y,
            weight,
            diversity,
            active,
            mixture,
            config,
            num_members=network.total_members,
            batch_size=batch_size,
            label_smoothing=self.label_smoothing,
        )
        for parameter in self.parameters:
            parameter.grad = None
        # DistributedDataParallel divides by the number of ranks; the mean over samples is a sum of shares
        logits.backward(gradient if ranks.data == 1 else gradient * ranks.data)
        nonfinite = None
        if not all_finite([logits.detach(), losses, *(p.grad for p in self.parameters)]):
            nonfinite = first_nonfinite(network, logits.detach(), losses)
        self.optimizer.step()
        if not own and ranks.members > 1:
            score = score / ranks.members  # each rank has the whole ensemble's score
        return StepResult(losses, score, nonfinite)

    def _mixture(self, logits: Tensor, others: Tensor | None, weight: Tensor | None) -> Tensor | None:
        """Ensemble's prediction, if the loss cannot compute it from the logits."""
        network, ranks = self.network, self.network.ranks
        if weight is not None and weight.ndim == 3 and self.config.batches == "shared":
            return partial_mixture(logits, weight > 0, self.config)  # of the members that train on the sample
        if others is not None:
            # own share in training mode (dropout, batch statistics), as in the gradient
            return others.add(member_predictions(logits, self.config) / network.total_members).flatten(1, 2)
        if ranks.members == 1 or self.config.batches != "shared":
            return None
        share = network.num_members / network.total_members
        return ranks.sum_over_members(share * ensemble_predictions(logits, self.config))  # (R, B, C)

    @torch.no_grad()
    def _others_mixture(self, x: Inputs, batches: torch.Size) -> Tensor:
        """Other members' share of the prediction on each member's batch, `(R, K, B, C)`: Σ_{j≠k} q^j / K."""
        network = self.network
        network.eval()  # keep others' samples out of batch statistics
        with autocast(self.parameters[0].device, self.config):
            logits = network(map_inputs(lambda t: t.flatten(1, 2), x))
        network.train()
        q = member_predictions(logits, self.config).unflatten(2, batches)  # (R, K of this rank, K, B, C)
        q[:, :, network.local_members].diagonal(dim1=1, dim2=2).zero_()  # excludes the member itself
        return network.ranks.sum_over_members(q.sum(1) / network.total_members)


def autocast(device: torch.device, config: TrainConfig) -> AbstractContextManager[object]:
    """Precision context of the network's computation."""
    if config.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
