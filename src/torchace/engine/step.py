"""The training step: batch → logits → loss → gradients → new weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.engine.faults import all_well, faults
from torchace.engine.network import Network
from torchace.engine.objective import mixture_of, objective_of
from torchace.engine.recipe import Recipe


class StepResult(NamedTuple):
    losses: Tensor  # (R, K): what each member was trained on; not a score
    score: Tensor  # (R,): cross entropy or squared error, of the ensemble if its members share a batch, else of them
    faults: Tensor | None  # (R,): -1, or the member that became NaN or Inf; K where what they share did; None: nobody


def train_step(
    network: Network,
    optimizer: torch.optim.Optimizer,
    x: Tensor,  # (R, B, ...), or (R, K, B, ...) with batches of the members' own
    y: Tensor,  # (R, B), or (R, K, B); for regression (..., outputs)
    weight: Tensor | None,  # of the samples, as the first axes of y, relative to the training set's mean
    diversity: Tensor,  # (R,): λ of each run
    active: Tensor,  # (R,): False for a run that was stopped
    recipe: Recipe,
) -> StepResult:
    """One step of every run. Nothing is read back from the device."""
    own = recipe.batches != "shared"
    mixture = common_mixture(network, x, recipe) if recipe.batches == "exchanged" else None
    with precision_of(x, recipe):
        logits = network(x, own=own)  # (R, K, B, C)

    losses, score, gradient = objective_of(logits.detach(), y, weight, diversity, active, mixture, recipe)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = None
    logits.backward(gradient)  # every member its own
    well = all_well([logits.detach(), losses, *(p.grad for p in parameters)])
    found = None if well else faults(network, logits, losses)
    optimizer.step()
    return StepResult(losses, score, found)


@torch.no_grad()
def common_mixture(network: Network, x: Tensor, recipe: Recipe) -> Tensor:
    """What the ensemble predicts on all its members' batches, `(R, K·B, C)`: everybody predicts everything."""
    training = network.training
    network.eval()  # others' samples must not enter a member's batch statistics
    with precision_of(x, recipe):
        logits = network(x.flatten(1, 2))
    network.train(training)
    return mixture_of(logits, recipe)


def precision_of(x: Tensor, recipe: Recipe) -> AbstractContextManager[object]:
    """What the network is computed in."""
    if recipe.precision != "bf16":
        return nullcontext()
    return torch.autocast(x.device.type, dtype=torch.bfloat16)
