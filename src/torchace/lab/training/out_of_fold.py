"""Predictions of samples by the members that did not train on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from torchace.lab.data import Split
from torchace.lab.training.members import TrainedGroup
from torchace.lab.training.run_group import CHUNK_BYTES
from torchace.lab.training.scaling import Scaler, fit_temperature
from torchace.lab.training.tasks import mean_over_samples


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions of samples that a member left out, and what follows from them."""

    predictions: NDArray[np.float64]  # (n, C) probabilities, or (n, M) in the targets' units; none of a hold-out
    score: float  # cross entropy, or squared error in the targets' units
    temperature: float
    variance: NDArray[np.float64]  # (M,): mean square residual of each target of a regression; (1,): the score
    rows: NDArray[np.int64] | None = None  # among the samples used; None: of a hold-out
    folds: NDArray[np.int64] | None = None  # (N,), of all samples used

    def expand(self, used: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Predictions of all samples `(N, ...)`, NaN for those that no member left out."""
        full = np.full((len(used), self.predictions.shape[1]), np.nan)
        full[np.flatnonzero(used)[self.rows]] = self.predictions
        return full


def collect_out_of_fold(
    trained: TrainedGroup, split: Split, left_out: Tensor | None, targets: Scaler | None
) -> OutOfFold:
    """Predict each sample by the members that left it out, `(K, N)`; None: by all."""
    temperature = 1.0 if targets is not None else fit_run_temperature(trained, split, left_out)
    predictions, losses, done = [], [], 0
    for logits in left_out_logits(trained, split.x, left_out):  # (m, n, C), NaN where fewer members left a sample out
        y = split.y[done : done + logits.shape[1]].cpu()
        done += len(y)
        if trained.plan.task == "multilabel":
            predicted = (logits / temperature).sigmoid().nanmean(0)
            losses.append(F.binary_cross_entropy(predicted, y.double(), reduction="none").mean(1, keepdim=True))
        elif targets is None:
            log_q = (logits / temperature).log_softmax(2)
            predicts = ~log_q[..., :1].isnan()
            log_probs = log_q.masked_fill_(~predicts, -torch.inf).logsumexp(0) - predicts.sum(0).double().log()
            losses.append(-log_probs.gather(1, y[:, None]))
            predicted = log_probs.exp_()
        else:
            predicted = targets.inverse_transform(logits.nanmean(0))
            losses.append((predicted - targets.inverse_transform(y)).square())
        if left_out is not None:
            predictions.append(predicted.numpy())
    weight = None if split.weight is None else split.weight.cpu().double()
    variance = mean_over_samples(torch.cat(losses).T, weight).numpy()  # (M,)
    collected = np.concatenate(predictions) if predictions else np.empty((0, 0))
    return OutOfFold(collected, float(variance.mean()), temperature, variance)


def fit_run_temperature(trained: TrainedGroup, split: Split, left_out: Tensor | None = None, run: int = 0) -> float:
    """Temperature of one run, on as many samples as a chunk of memory holds."""
    members = trained.plan.num_members if left_out is None else _num_members(left_out)
    size = 8 * len(split) * members * trained.network.predict(split.x[:1]).shape[-1]
    part = slice(None, None, -(-size // CHUNK_BYTES))
    mask = None if left_out is None else left_out[:, part]
    logits = torch.cat(list(left_out_logits(trained, split.x[part], mask, run)), 1)
    weight = None if split.weight is None else split.weight[part].cpu().double()
    y = split.y[part].cpu()
    if trained.plan.task == "multilabel":  # a label is a choice between the logits 0 and z
        logits = logits.flatten(1)  # (m, n * L)
        logits, y = torch.stack([logits * 0, logits], 2), y.flatten().round().long()
        weight = None if weight is None else weight.repeat_interleave(split.y.shape[1])
    temperature = fit_temperature(logits, y, weight)
    # all members together are less overconfident than those that left a sample out (docs/decisions/tables.md)
    is_part = left_out is not None and members < trained.plan.num_members
    return math.sqrt(temperature) if is_part and temperature > 1 else temperature


def left_out_logits(trained: TrainedGroup, x: Tensor, left_out: Tensor | None, run: int = 0) -> Iterator[Tensor]:
    """Logits of the members that left a sample out, in chunks `(m, n, C)`; NaN where fewer members did."""
    done = 0
    for logits in trained.logits(run, x):
        rows = slice(done, done + logits.shape[1])
        done = rows.stop
        if left_out is None:
            yield logits
            continue
        predicts, members = left_out[:, rows].cpu().byte().topk(_num_members(left_out), dim=0)  # (m, n)
        own = logits.gather(0, members[..., None].expand(-1, -1, logits.shape[2]))
        yield own.masked_fill_(predicts[..., None] == 0, torch.nan)


def _num_members(left_out: Tensor) -> int:
    return int(left_out.sum(0).max())
