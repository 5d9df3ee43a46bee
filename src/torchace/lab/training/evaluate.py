"""Scores on validation and test data: early stopping, test scores by task, a user's own metrics, arrays for reports."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.functional import disagreement, ensemble_log_probs, ensemble_probs, mutual_information
from torchace.functional.sums import ScoreSums, score_sums, scores_from_sums
from torchace.lab.data.rng import preserve_generators
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.run_group import CHUNK_BYTES, RunGroup, chunk_rows
from torchace.lab.training.tasks import TASKS, mean_over_samples, partial_mixture

CHUNK = 4096  # samples predicted at once, at most


@dataclass(frozen=True)
class ValidationSet:
    """Validation samples, and epochs without improvement until a run stops."""

    split: Any  # Split, or an object with `weight` and `chunks(size)`
    patience: int  # epochs
    members: Tensor | None = None  # (K, N): those that predict each sample; None: all


class EarlyStopping:
    """Best epoch of each run by the ensemble's validation score; `restore` loads its weights."""

    def __init__(self, network: RunGroup, validation: ValidationSet, config: TrainConfig) -> None:
        self.validation, self.config = validation, config
        self.best: list[float] = [math.inf] * network.num_runs
        self.best_epoch = [0] * network.num_runs  # 0: none
        self.weights = {name: value.detach().clone() for name, value in network.state_dict().items()}

    def update(self, network: RunGroup, epoch: int, stopped: Sequence[bool]) -> tuple[list[float | None], list[bool]]:
        """Score the runs after an epoch (from 1): scores, None for nonfinite or stopped ones, and stopped runs."""
        scores = validation_scores(network, self.validation.split, self.config, self.validation.members).tolist()
        # a stopped run must not improve later
        scores = [math.nan if done else score for score, done in zip(scores, stopped, strict=True)]
        improved = [score < best for score, best in zip(scores, self.best, strict=True)]
        for run, better in enumerate(improved):
            if better:
                self.best[run], self.best_epoch[run] = scores[run], epoch
        if any(improved):
            runs = torch.tensor(improved, device=network.step.device)
            for name, value in network.state_dict().items():
                mask = runs.repeat_interleave(network.entries_per_run(name)).view(-1, *[1] * (value.ndim - 1))
                self.weights[name] = torch.where(mask, value.detach(), self.weights[name])
        patience = self.validation.patience
        now = [done or epoch - best >= patience for done, best in zip(stopped, self.best_epoch, strict=True)]
        return [score if math.isfinite(score) else None for score in scores], now

    def restore(self, network: RunGroup) -> None:
        """Load the weights of every run's best epoch."""
        network.load_state_dict(self.weights)

    def state(self) -> dict[str, Any]:
        """Scores and epochs as JSON values."""
        return {"best": [repr(value) for value in self.best], "best_epoch": self.best_epoch}  # text: JSON has no Inf

    def load(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore `state` and the best weights."""
        self.best, self.best_epoch = [float(value) for value in state["best"]], list(state["best_epoch"])
        for name, value in self.weights.items():
            value.copy_(weights[name])


def validation_scores(network: RunGroup, split: Any, config: TrainConfig, members: Tensor | None = None) -> Tensor:
    """Each run's weighted mean cross entropy or squared error on a split, `(R,)`; see `validation_losses`."""
    return mean_over_samples(validation_losses(network, split, config, members), split.weight)


@torch.no_grad()
def validation_losses(
    network: RunGroup,
    split: Any,
    config: TrainConfig,
    members: Tensor | None = None,
    temperature: Sequence[float] | None = None,
) -> Tensor:
    """Each run's cross entropy or squared error on every sample of a split, `(R, N)`.

    `members` is as in `ValidationSet`; `temperature` divides the logits of each run.
    """
    training = network.training
    network.eval()
    count = network.num_runs * network.num_members
    rows = chunk_rows(network, count, itemsize=config.dtype.itemsize, max_rows=CHUNK)
    task, losses, done = TASKS[config.task], [], 0
    for x, y in split.chunks(rows):
        logits = network.predict(x).to(config.dtype)
        if temperature is not None:
            logits = logits / logits.new_tensor(temperature).view(-1, 1, 1, 1)
        if members is None:
            losses.append(task.scores(logits, y))
        else:
            mixture = partial_mixture(logits, members[:, done : done + len(y)], config)
            losses.append(task.mixture_scores(mixture, y.expand(len(logits), *y.shape)))
        done += len(y)
    network.train(training)
    return torch.cat(losses, 1)


MAX_CONTESTED = 24  # samples in a report
MAX_POINTS = 5000  # samples in a regression plot


@dataclass(frozen=True)
class Evaluation:
    """Scores of one run, and small arrays on the CPU."""

    metrics: dict[str, float | list[float]]
    arrays: dict[str, Tensor]


@torch.no_grad()
def predict_logits(network: RunGroup, chunks: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """Each run's logits `(K, N, C)` on a split, and its labels `(N,)`."""
    training = network.training
    network.eval()
    predicted, targets = zip(*((network.predict(x), y) for x, y in chunks), strict=True)  # (R, K, n, C) each
    network.train(training)
    return [torch.cat(parts, 1) for parts in zip(*predicted, strict=True)], torch.cat(targets)


@torch.no_grad()
def evaluate(
    logits: Tensor | Iterable[Tensor], target: Tensor, images: Tensor | None = None, *, task: str = "classification"
) -> Evaluation:
    """Score one run with logits `(K, N, C)`, or chunks of them, and target `(N,)` or `(N, C)`.

    Labels of a multi-label task count as two classes each, split at 0.5. `images` are the samples as uint8
    `(N, C, H, W)`, for the contested cases.
    """
    if isinstance(logits, Tensor):
        logits = logits.split(max(1, CHUNK_BYTES // max(1, logits[:, :1].nbytes)), 1)
    if task == "regression":
        predictions = torch.cat(list(logits), 1)
        return evaluate_regression(
            predictions.squeeze(2) if target.ndim < predictions.ndim - 1 else predictions, target
        )
    sums: ScoreSums | None = None
    label_counts: Any = 0  # (3, L): true positives, predicted and actual positives
    losses: list[Tensor] = []  # of each sample, float32: enough for an interval over samples
    errors: list[Tensor] = []
    contested: list[list[Tensor]] = []
    done = 0
    for z in logits:  # in chunks: memory never holds the predictions of all samples
        count = z.shape[1]
        y = target[done : done + count]
        index = torch.arange(done, done + count, device=y.device)
        done += count
        if task == "multilabel":
            predicted, actual = ensemble_probs(z, link="sigmoid") > 0.5, y > 0.5
            label_counts = label_counts + torch.stack([predicted & actual, predicted, actual]).sum(1)
            z = torch.stack([torch.zeros_like(z), z], -1).flatten(1, 2)  # softmax over (0, z) is sigmoid(z)
            y = actual.long().flatten()
        batch = score_sums(z, y)
        sums = batch if sums is None else ScoreSums(*map(torch.add, sums, batch))
        probs, votes = ensemble_probs(z), z.argmax(2)
        # labels of one sample are not independent: their mean counts
        losses.append(F.nll_loss(ensemble_log_probs(z), y, reduction="none").view(count, -1).mean(1).float())
        errors.append((probs.argmax(1) != y).view(count, -1).float().mean(1))
        if task == "classification":  # mutual information breaks ties
            degree = disagreement(z, reduction="none") + 1e-3 * mutual_information(z, reduction="none")
            contested.append(_most_contested([degree, index, y, votes.T, probs]))
    if sums is None:
        raise ValueError("Expected at least one sample to score, but got none.")
    scores: dict[str, float | list[float]] = {name: value.tolist() for name, value in scores_from_sums(sums).items()}
    sample_error = torch.cat(errors)
    arrays = dict(
        zip(("reliability_count", "reliability_confidence", "reliability_correct"), sums.bins[0], strict=True)
    )
    arrays["sample_cross_entropy"] = torch.cat(losses)
    if task == "multilabel":
        arrays["sample_error"] = sample_error
        both, predicted, actual = label_counts
        found = predicted + actual > 0  # F1 of a label that never occurs is undefined
        scores["exact_match"] = (sample_error == 0).double().mean().item()
        scores["macro_f1"] = (2 * both[found] / (predicted + actual)[found]).mean().item()
    else:
        arrays["sample_error"] = sample_error.to(torch.uint8)
        parts = _most_contested([torch.cat(part) for part in zip(*contested, strict=True)])
        names = ("disputed_index", "disputed_target", "disputed_votes", "disputed_probs")
        arrays |= {name: part[parts[0] > 0] for name, part in zip(names, parts[1:], strict=True)}
        if images is not None:
            pixels = images[arrays["disputed_index"]]
            arrays["disputed_images"] = pixels[:, 0] if pixels.shape[1] == 1 else pixels.permute(0, 2, 3, 1)
    return Evaluation(scores, {name: value.cpu().contiguous() for name, value in arrays.items()})


def _most_contested(parts: list[Tensor]) -> list[Tensor]:
    """Samples with the largest first part; stable for equal ones."""
    first = parts[0].argsort(descending=True, stable=True)[:MAX_CONTESTED]
    return [part[first] for part in parts]


@torch.no_grad()
def evaluate_regression(predictions: Tensor, target: Tensor) -> Evaluation:
    """Score one regression run with predictions `(K, N)` and target `(N,)`, or `(K, N, M)` and `(N, M)`.

    Scores of several targets are means over the targets.
    """
    predictions, target = predictions.double(), target.double()
    total = (target - target.mean(0)).square().mean(0)  # (M,)
    left = (predictions.mean(0) - target).square().mean(0)
    r2 = torch.where(total > 0, 1 - left / total, math.nan).mean()
    predictions, target = predictions.flatten(1), target.flatten()
    mean, spread = predictions.mean(0), predictions.std(0, correction=0)
    errors = predictions - target  # (K, N)
    mse, member_mse = (mean - target).square().mean(), errors.square().mean(1)
    scores: dict[str, float | list[float]] = {
        "mse": mse.item(),
        "rmse": mse.sqrt().item(),
        "mae": (mean - target).abs().mean().item(),
        "r2": r2.item(),
        "member_mse": member_mse.mean().item(),
        "spread": spread.mean().item(),
        "ambiguity": spread.square().mean().item(),  # member_mse - mse
        "members": member_mse.tolist(),
    }
    arrays = {"predicted": mean[:MAX_POINTS], "observed": target[:MAX_POINTS], "spread": spread[:MAX_POINTS]}
    return Evaluation(scores, {name: value.cpu().contiguous() for name, value in arrays.items()})


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
        return float(result)
    except Exception as error:  # the user's code may raise anything
        reason = (str(error).strip().split("\n")[0] or "no message").removesuffix(".")
        raise MetricError(
            f"The metric {name!r} failed with {type(error).__name__}: {reason}. Expected a torchmetrics metric or a "
            "function of logits (K, N, C) and target that returns a number."
        ) from error


def compute_metrics(metrics: Mapping[str, Any], logits: Tensor, target: Tensor, task: str) -> dict[str, float]:
    """Return all metrics of one run by name; one that fails is NaN, with a warning: the run itself is kept."""
    values = {}
    for name, metric in metrics.items():
        try:
            values[name] = compute_metric(name, metric, logits, target, task)
            if not math.isfinite(values[name]):
                raise MetricError(f"The metric {name!r} is {values[name]}; results do not include it.")
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
