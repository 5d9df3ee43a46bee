"""The training step: batch → logits → loss → gradients → new weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.lab.training.config import TrainConfig
from torchace.lab.training.nonfinite import all_finite, first_nonfinite
from torchace.lab.training.objective import member_predictions, objective_of
from torchace.lab.training.run_group import RunGroup


class StepResult(NamedTuple):
    losses: Tensor  # (R, K): what each member was trained on; not a score
    score: Tensor  # (R,): cross entropy or squared error, of the ensemble if its members share a batch, else of them
    nonfinite: (
        Tensor | None
    )  # (R,): -1, or the member that became NaN or Inf; K where what they share did; None: nobody


def train_step(
    network: RunGroup,
    optimizer: torch.optim.Optimizer,
    x: Tensor,  # (R, B, ...), or (R, K, B, ...) with batches of the members' own
    y: Tensor,  # (R, B), or (R, K, B); for regression (..., outputs)
    weight: Tensor | None,  # of the samples, as the first axes of y, relative to the training set's mean
    diversity: Tensor,  # (R,): λ of each run
    active: Tensor,  # (R,): False for a run that was stopped
    config: TrainConfig,
) -> StepResult:
    """One step of every run. Nothing is read back from the device."""
    own = config.batches != "shared"
    others = others_mixture(network, x, config) if config.batches == "exchanged" else None
    with autocast(x, config):
        logits = network(x, own=own)  # (R, K, B, C)
    mixture = None if others is None else own_mixture(others, logits, logits.shape[1], config)

    losses, score, gradient = objective_of(logits.detach(), y, weight, diversity, active, mixture, config)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = None
    logits.backward(gradient)  # every member its own
    well = all_finite([logits.detach(), losses, *(p.grad for p in parameters)])
    found = None if well else first_nonfinite(network, logits, losses)
    optimizer.step()
    return StepResult(losses, score, found)


@torch.no_grad()
def others_mixture(network: RunGroup, x: Tensor, config: TrainConfig, *, first: int = 0) -> Tensor:
    """The other members' share of the ensemble's prediction on each member's batch, `(R, K, B, C)`: Σ_{j≠k} q^j / K.

    Args:
        network: The members, some of them where the rest is on other ranks; every one predicts all batches.
        x: The batches of all members, `(R, K, B, ...)`.
        config: Which loss.
        first: The number of the network's first member in the whole ensemble.
    """
    training = network.training
    network.eval()  # others' samples must not enter a member's batch statistics
    with autocast(x, config):
        logits = network(x.flatten(1, 2))
    network.train(training)
    q = member_predictions(logits, config).unflatten(2, x.shape[1:3])  # (R, K of this network, K, B, C)
    q.narrow(2, first, q.shape[1]).diagonal(dim1=1, dim2=2).zero_()  # on its own batch a member is no other
    return q.sum(1) / x.shape[1]


def own_mixture(others: Tensor, logits: Tensor, num_members: int, config: TrainConfig) -> Tensor:
    """The ensemble's prediction on its members' own batches, `(R, K·B, C)` (mathematics, line 2).

    A member's own share is the prediction that its gradient is of, in training mode: dropout and batch statistics make
    it another than the one that its evaluation mode gives.

    Args:
        others: See `others_mixture`; of some members, where the rest is on other ranks.
        logits: Those of the members on their own batches, in training mode, `(R, K, B, C)`.
        num_members: K of the whole ensemble.
        config: Which loss.
    """
    return others.add(member_predictions(logits.detach(), config) / num_members).flatten(1, 2)


def autocast(x: Tensor, config: TrainConfig) -> AbstractContextManager[object]:
    """What the network is computed in."""
    if config.precision != "bf16":
        return nullcontext()
    return torch.autocast(x.device.type, dtype=torch.bfloat16)
