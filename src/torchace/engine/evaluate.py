"""What trained runs predict on samples they were not trained on: scores and the arrays a report draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.engine.network import Network
from torchace.functional import disagreement, ensemble_log_probs, ensemble_probs, mutual_information
from torchace.functional.calibration import calibration_bins

DISPUTED = 24  # samples on which the members differ most, kept for the report
DRAWN = 5000  # samples of a regression, kept for the report


@dataclass(frozen=True)
class Evaluation:
    """One run's scores as plain numbers, and small arrays on the CPU."""

    metrics: dict[str, float | list[float]]
    arrays: dict[str, Tensor]


@torch.no_grad()
def logits_of(network: Network, chunks: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """Each run's logits `(K, N, C)` on a split, and its labels `(N,)`."""
    training = network.training
    network.eval()
    logits: list[list[Tensor]] = [[] for _ in range(network.num_runs)]
    targets = []
    for x, y in chunks:
        for parts, predicted in zip(logits, network.predict(x), strict=True):
            parts.append(predicted)
        targets.append(y)
    network.train(training)
    return [torch.cat(parts, 1) for parts in logits], torch.cat(targets)


@torch.no_grad()
def evaluate(logits: Tensor, target: Tensor, images: Tensor | None = None) -> Evaluation:
    """Scores one run.

    Args:
        logits: `(K, N, C)`.
        target: `(N,)`.
        images: The samples as uint8 `(N, C, H, W)`, for the disputed ones; None where there is nothing to see.
    """
    from torchace.metrics import EnsembleMetrics  # here: torchmetrics takes seconds to import

    num_members, _, num_classes = logits.shape
    # no sync: every sample is here, and other ranks may have nothing to score
    metrics = EnsembleMetrics(num_members, num_classes, sync_on_compute=False).to(logits.device)
    metrics.update(logits, target)
    scores: dict[str, float | list[float]] = {name: value.tolist() for name, value in metrics.compute().items()}

    probs = ensemble_probs(logits)
    bins = calibration_bins(probs, target)
    votes = logits.argmax(2)  # (K, N)
    # disagreement first, mutual information between equals; stable, so that equal cases keep their order
    heat = disagreement(logits, reduction="none") + 1e-3 * mutual_information(logits, reduction="none")
    disputed = heat.argsort(descending=True, stable=True)[:DISPUTED]
    disputed = disputed[heat[disputed] > 0]
    arrays = {
        "reliability_count": bins.samples,
        "reliability_confidence": bins.confidence,
        "reliability_correct": bins.correct,
        "disagreement_matrix": (votes[:, None] != votes[None]).double().mean(2),
        # float32: what an interval over samples needs, in half the space
        "sample_cross_entropy": F.nll_loss(ensemble_log_probs(logits), target, reduction="none").float(),
        "sample_error": (probs.argmax(1) != target).to(torch.uint8),
        "disputed_index": disputed,
        "disputed_target": target[disputed],
        "disputed_votes": votes[:, disputed].T,
        "disputed_probs": probs[disputed],
    }
    if images is not None:
        pixels = images[disputed]
        arrays["disputed_images"] = pixels[:, 0] if pixels.shape[1] == 1 else pixels.permute(0, 2, 3, 1)
    return Evaluation(scores, {name: value.cpu().contiguous() for name, value in arrays.items()})


@torch.no_grad()
def evaluate_regression(predictions: Tensor, target: Tensor) -> Evaluation:
    """Scores one run of a regression with one target.

    Args:
        predictions: `(K, N)`, in the target's units.
        target: `(N,)`.
    """
    predictions, target = predictions.double(), target.double()
    mean, spread = predictions.mean(0), predictions.std(0, correction=0)
    errors = predictions - target  # (K, N)
    mse, member_mse = (mean - target).square().mean(), errors.square().mean(1)
    variance = (target - target.mean()).square().mean()
    scores: dict[str, float | list[float]] = {
        "mse": mse.item(),
        "rmse": mse.sqrt().item(),
        "mae": (mean - target).abs().mean().item(),
        "r2": (1 - mse / variance).item() if variance > 0 else math.nan,
        "member_mse": member_mse.mean().item(),
        "spread": spread.mean().item(),
        "ambiguity": spread.square().mean().item(),  # what the ensemble gains: member_mse - mse
        "members": member_mse.tolist(),
    }
    centred = errors - errors.mean(1, keepdim=True)
    size = centred.square().sum(1).sqrt()
    correlation = centred @ centred.T / (size[:, None] * size).clamp_min(torch.finfo(torch.float64).tiny)
    arrays = {
        "predicted": mean[:DRAWN],
        "observed": target[:DRAWN],
        "spread": spread[:DRAWN],
        "residual_correlation": correlation,
    }
    return Evaluation(scores, {name: value.cpu().contiguous() for name, value in arrays.items()})
