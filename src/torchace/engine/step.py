"""The training step: batch → logits → loss → gradients → new weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchace.engine.faults import faults
from torchace.engine.network import Network
from torchace.engine.objective import losses_of, mean_over_samples, mixture_of, scores_of
from torchace.engine.recipe import Recipe


class StepResult(NamedTuple):
    losses: Tensor  # (R, K): what each member was trained on; not a score
    score: Tensor  # (R,): cross entropy or squared error, of the ensemble if its members share a batch, else of them
    faults: Tensor  # (R,): -1, or the member that became NaN or Inf; K where what they share did


def train_step(
    network: Network,
    optimizer: torch.optim.Optimizer,
    x: Tensor,  # (R, B, ...), or (R, K, B, ...) with batches of the members' own
    y: Tensor,  # (R, B), or (R, K, B); for regression (..., outputs)
    weight: Tensor | None,  # of the samples, as the first axes of y
    diversity: Tensor,  # (R,): λ of each run
    active: Tensor,  # (R,): False for a run that was stopped
    recipe: Recipe,
) -> StepResult:
    """One step of every run. Nothing is read back from the device."""
    own = recipe.batches != "shared"
    mixture = common_mixture(network, x, recipe) if recipe.batches == "exchanged" else None
    with precision_of(x, recipe):
        logits = network(x, own=own)  # (R, K, B, C)

    losses = losses_of(logits, y, diversity, mixture, recipe)  # (R, K, B)
    losses = mean_over_samples(losses, weight if own or weight is None else weight[:, None])
    optimizer.zero_grad(set_to_none=True)
    torch.where(active[:, None], losses, 0.0).sum().backward()  # summed: every member gets its own gradient
    found = faults(network, logits, losses)
    optimizer.step()
    return StepResult(losses.detach(), _score(logits, y, weight, own, recipe), found)


@torch.no_grad()
def common_mixture(network: Network, x: Tensor, recipe: Recipe) -> Tensor:
    """What the ensemble predicts on all its members' batches, `(R, K·B, C)`: everybody predicts everything."""
    training = network.training
    network.eval()  # others' samples must not enter a member's batch statistics
    with precision_of(x, recipe):
        logits = network(x.flatten(1, 2))
    network.train(training)
    return mixture_of(logits, recipe)


@torch.no_grad()
def _score(logits: Tensor, y: Tensor, weight: Tensor | None, own: bool, recipe: Recipe) -> Tensor:
    logits = logits.detach().to(recipe.dtype)
    if own:  # every member on its own batch: as many ensembles of one
        logits, y = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2)
        weight = None if weight is None else weight.flatten(1, 2)
    return mean_over_samples(scores_of(logits, y, recipe), weight)


def precision_of(x: Tensor, recipe: Recipe) -> torch.autocast:
    """What the network is computed in."""
    return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16")
