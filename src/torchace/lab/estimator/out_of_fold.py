"""Predictions of samples by the members that did not train on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchace.lab.data import Split
from torchace.lab.training.members import TrainedGroup
from torchace.lab.training.objective import mean_over_samples
from torchace.lab.training.scaling import Scaler, fit_temperature

MAX_TEMPERATURE_VALUES = 2**24  # logits from which a temperature is fitted


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions of samples that a member left out, and what follows from them."""

    predictions: NDArray[np.float64]  # (n, C) probabilities, or (n, M) in the targets' units
    score: float  # cross entropy, or squared error in the targets' units
    temperature: float
    rows: NDArray[np.int64] | None = None  # among the samples used; None: unknown

    def expand(self, used: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Predictions of all samples `(N, ...)`, NaN for those that no member left out."""
        full = np.full((len(used), self.predictions.shape[1]), np.nan)
        full[np.flatnonzero(used)[self.rows]] = self.predictions
        return full


def collect_out_of_fold(
    trained: TrainedGroup, split: Split, left_out: Tensor | None, targets: Scaler | None
) -> OutOfFold:
    """Predict each sample by the members that left it out, `(K, N)`; None: by all."""
    count = trained.plan.num_members if left_out is None else int(left_out.sum(0).max())
    logits = torch.cat(list(_own_logits(trained, split, left_out, count)), 1)  # (m, N, C), NaN where there are fewer
    y, weight = split.y.cpu(), None if split.weight is None else split.weight.cpu().double()
    if targets is not None:
        predictions = targets.inverse_transform(logits.nanmean(0))
        errors = (predictions - targets.inverse_transform(y)).square().mean(1)
        return OutOfFold(predictions.numpy(), float(mean_over_samples(errors, weight)), 1.0)
    step = max(1, logits.numel() // MAX_TEMPERATURE_VALUES)
    temperature = fit_temperature(logits[:, ::step], y[::step], None if weight is None else weight[::step])
    log_q = (logits / temperature).log_softmax(2)
    predicts = ~log_q[..., :1].isnan()
    log_probs = log_q.masked_fill(~predicts, -torch.inf).logsumexp(0) - predicts.sum(0).log()
    losses = -log_probs.gather(1, y[:, None]).squeeze(1)
    return OutOfFold(log_probs.exp().numpy(), float(mean_over_samples(losses, weight)), temperature)


def _own_logits(trained: TrainedGroup, split: Split, left_out: Tensor | None, count: int) -> Iterator[Tensor]:
    """Logits of the members that left a sample out, in chunks `(m, n, C)`."""
    done = 0
    for logits in trained.logits(0, split.x):
        rows = slice(done, done + logits.shape[1])
        done = rows.stop
        if left_out is None:
            yield logits
            continue
        predicts, members = left_out[:, rows].cpu().byte().topk(count, dim=0)  # (m, n)
        own = logits.gather(0, members[..., None].expand(-1, -1, logits.shape[2]))
        yield own.masked_fill(predicts[..., None] == 0, torch.nan)
