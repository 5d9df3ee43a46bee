"""The training step: batch → logits → loss → gradients → new weights."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from torchace.engine.faults import faults
from torchace.engine.network import Network
from torchace.engine.recipe import Recipe
from torchace.functional import amended_cross_entropy, ensemble_log_probs, ensemble_probs


class StepResult(NamedTuple):
    losses: Tensor  # (R, K): what each member was trained on; not a score
    cross_entropy: Tensor  # (R,): of the ensemble where its members share a batch, else of its members
    faults: Tensor  # (R,): -1, or the member that became NaN or Inf; K where what they share did


def train_step(
    network: Network,
    optimizer: torch.optim.Optimizer,
    x: Tensor,  # (R, B, ...), or (R, K, B, ...) with batches of the members' own
    y: Tensor,  # (R, B), or (R, K, B)
    diversity: Tensor,  # (R,): λ of each run
    active: Tensor,  # (R,): False for a run that was stopped
    recipe: Recipe,
) -> StepResult:
    """One step of every run. Nothing is read back from the device."""
    own = recipe.batches != "shared"
    mixture = _mixture(network, x, recipe) if recipe.batches == "exchanged" else None
    with _precision(x, recipe):
        logits = network(x, own=own)  # (R, K, B, C)

    losses = _losses(logits, y, diversity, mixture, recipe)  # (R, K, B)
    with torch.no_grad():
        # of the ensemble; of the members where each has a batch of its own
        scored = vmap(_own_cross_entropy if own else _cross_entropy)(logits.detach().float(), y)
    losses = losses.mean(2)
    optimizer.zero_grad(set_to_none=True)
    torch.where(active[:, None], losses, 0.0).sum().backward()  # summed: every member gets its own gradient
    found = faults(network, logits, losses)
    optimizer.step()
    return StepResult(losses.detach(), scored, found)


def _losses(logits: Tensor, y: Tensor, diversity: Tensor, mixture: Tensor | None, recipe: Recipe) -> Tensor:
    """Every member's loss on every sample of its batch, `(R, K, B)`."""
    loss = partial(
        amended_cross_entropy,
        label_smoothing=recipe.label_smoothing,
        detach_others=recipe.detach_others,
        reduction="none",
    )
    if recipe.batches == "shared":
        return vmap(loss)(logits, y, diversity)
    # Own batches: a member's loss needs the others' predictions on its batch and nothing else of them, so the K
    # batches of a run are rows of one member, `(1, K·B, C)`, with the ensemble's probabilities given.
    num_members, size = logits.shape[1:3]
    rows, targets = logits.flatten(1, 2).unsqueeze(1), y.flatten(1, 2)
    if mixture is None:  # separate batches: plain cross entropy
        losses = vmap(lambda z, t: loss(z, t, 0.0))(rows, targets)
    else:
        share = torch.full((1,), 1 / num_members, dtype=mixture.dtype, device=logits.device)
        coupled = vmap(lambda z, t, d, m: loss(z, t, d, mixture=m, member_weights=share))
        losses = coupled(rows, targets, diversity, mixture)
    return losses.squeeze(1).unflatten(1, (num_members, size))


@torch.no_grad()
def _mixture(network: Network, x: Tensor, recipe: Recipe) -> Tensor:
    """What the ensemble predicts on all its members' batches, `(R, K·B, C)`: everybody predicts everything."""
    training = network.training
    network.eval()  # others' samples must not enter a member's batch statistics
    with _precision(x, recipe):
        logits = network(x.flatten(1, 2))
    network.train(training)
    return vmap(ensemble_probs)(logits)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(ensemble_log_probs(logits), y)


def _own_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _precision(x: Tensor, recipe: Recipe) -> torch.autocast:
    return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16")
