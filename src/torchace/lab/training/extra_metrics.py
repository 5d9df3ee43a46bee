"""Metrics of a user: functions of logits and target, or torchmetrics metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchace.functional import ensemble_probs
from torchace.lab.data.rng import preserve_generators
from torchace.lab.training.tasks import TASKS

MAX_ELEMENTS = 1 << 22  # of the random logits of a trial


class MetricError(ValueError):
    """A metric failed or returned something else than a number."""


def compute_metric(name: str, metric: Any, logits: Tensor, target: Tensor, task: str) -> float:
    """Return a metric of logits `(K, N, C)`, a number.

    A torchmetrics metric gets the ensemble's probabilities `(N, C)` (one column is given as `(N,)`), or predictions of
    a regression, and the target; labels are 0 or 1.
    """
    try:
        if hasattr(metric, "update") and hasattr(metric, "compute"):
            metric = metric.to(logits.device)
            metric.reset()
            values = ensemble_probs(logits, link=TASKS[task].link)
            target = (target > 0.5).long() if task == "multilabel" else target
            if task != "classification" and values.shape[1] == 1:
                values, target = values.squeeze(1), target.squeeze(1)
            metric.update(values, target)
            result = metric.compute()
            metric.reset()
        else:
            result = metric(logits, target)
    except Exception as error:  # the user's code may raise anything
        reason = str(error).strip().split("\n")[0] or "no message"
        raise MetricError(f"The metric {name!r} failed with {type(error).__name__}: {reason}") from error
    try:
        return float(result)
    except (TypeError, ValueError, RuntimeError):
        got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise MetricError(f"Expected the metric {name!r} to return one number, but got {got}.") from None


def compute_metrics(metrics: Mapping[str, Any], logits: Tensor, target: Tensor, task: str) -> dict[str, float]:
    """Return all metrics of one run by name; one that fails is NaN, with a warning: the run itself is kept."""
    values = {}
    for name, metric in metrics.items():
        try:
            values[name] = compute_metric(name, metric, logits, target, task)
        except MetricError as error:
            warnings.warn(str(error), stacklevel=2)
            values[name] = math.nan
    return values


def try_metrics(metrics: Mapping[str, Any], num_members: int, num_outputs: int, target: Tensor, task: str) -> None:
    """Call the metrics with random logits before a training; raise the first failure."""
    target = target[: max(2, MAX_ELEMENTS // (num_members * num_outputs))]
    logits = torch.randn(num_members, len(target), num_outputs, generator=torch.Generator().manual_seed(0))
    with preserve_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, metric in metrics.items():
            compute_metric(name, metric, logits.to(target.device), target, task)
