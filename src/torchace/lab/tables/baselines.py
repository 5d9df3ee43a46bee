"""Baselines for a table, and their scores beside the model's."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchace._files import error_reason
from torchace._statistics import mean_over_samples
from torchace.functional import brier_score, ensemble_log_probs
from torchace.lab.data import permutation
from torchace.lab.data.encoding import CategoryColumn
from torchace.lab.schema.values import ENSEMBLE, ClassScores, Importance, ModelComparison, ModelScores, TargetScores
from torchace.lab.store import finite
from torchace.lab.tables.table import Table
from torchace.lab.training.evaluate import evaluate_regression
from torchace.lab.training.members import MemberPlan, train_members
from torchace.lab.training.run_group import chunk_rows
from torchace.nn import Ensemble, StackedEnsemble

MAX_LINEAR_ROWS = 50_000  # of training
MAX_CONFUSION = 30  # classes
IMPORTANCE_ROWS, IMPORTANCE_REPEATS = 2000, 5
RESIDUAL_QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)


@dataclass(frozen=True)
class _Baselines:
    """Functions that fit a baseline and predict rows of one part: log probabilities `(N, C)`, or numbers `(N, M)`."""

    table: Table
    plan: MemberPlan
    seed: int
    device: str

    @property
    def part(self) -> str:
        """Part of the scores: test, or validation without a test part."""
        return "test" if len(self.table.test) else "validation"

    @property
    def is_classifier(self) -> bool:
        return self.table.task == "classification"

    @property
    def target(self) -> Tensor:
        """Class indices `(N,)`, or scaled numbers `(N, M)`."""
        return getattr(self.table, self.part).y

    def all(self) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
        """Name, label and function of each baseline."""
        yield "constant", "most frequent class" if self.is_classifier else "mean", self.constant
        yield "linear", "logistic regression" if self.is_classifier else "ridge regression", self.linear
        yield "network", "one network", self.network
        yield "boosting", "gradient boosting", self.boosting

    def constant(self) -> Tensor:
        y = self.table.train.y
        if not self.is_classifier:
            return y.mean(0).expand(len(self.target), -1)
        counts = torch.bincount(y, minlength=self.table.num_outputs).double()
        return (counts / counts.sum()).log().expand(len(self.target), -1)

    def linear(self) -> Tensor:
        from sklearn.linear_model import LogisticRegression, RidgeCV

        model = LogisticRegression(max_iter=500) if self.is_classifier else RidgeCV(np.logspace(-3, 4, 15))
        parts = [getattr(self.table, name).x for name in self._training_parts]
        return self._fit(model, parts, getattr(self.table, self.part).x, MAX_LINEAR_ROWS)

    def boosting(self) -> Tensor:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from sklearn.multioutput import MultiOutputRegressor

        kind = HistGradientBoostingClassifier if self.is_classifier else HistGradientBoostingRegressor
        categorical = [isinstance(column, CategoryColumn) for column in self.table.encoding.columns]
        model = kind(random_state=self.seed % 2**32, categorical_features=categorical)
        model = model if self.is_classifier else MultiOutputRegressor(model)
        parts = [self.table.raw[name] for name in self._training_parts]
        return self._fit(model, parts, self.table.raw[self.part])

    def network(self) -> Tensor:
        train, validation, test = self.table.parts(self.plan, self.device)
        plan = replace(self.plan, num_members=1)
        options: dict[str, Any] = {"diversities": [0.0], "seeds": [self.seed], "validation": validation}
        trained = train_members(plan, train, self.table.num_outputs, **options)
        if (failure := trained.failure(0)) is not None:
            raise ValueError(failure.message)
        return _predict(trained.ensemble(0), test.x if self.part == "test" else validation.x, self.is_classifier)

    @property
    def _training_parts(self) -> tuple[str, ...]:
        """Parts to fit on: validation rows too, which the ensemble uses for early stopping."""
        return ("train", "validation") if self.part == "test" else ("train",)

    def _fit(self, model: Any, parts: list[Tensor], rows: Tensor, limit: int | None = None) -> Tensor:
        x = torch.cat(parts)
        y = torch.cat([getattr(self.table, name).y for name in self._training_parts])
        if limit is not None and len(x) > limit:
            chosen = permutation(self.seed, "baseline", count=len(x))[:limit]
            x, y = x[chosen], y[chosen]
        weight = None
        if self.table.train.weight is not None:  # of its class
            by_class = torch.ones(self.table.num_outputs, dtype=torch.float64)
            by_class[self.table.train.y] = self.table.train.weight
            weight = by_class[y].numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no convergence within the iterations
            model.fit(x.numpy(), y.numpy(), sample_weight=weight)
        if not self.is_classifier:
            return torch.from_numpy(np.asarray(model.predict(rows.numpy()), dtype=np.float64)).view(len(rows), -1)
        probs = torch.from_numpy(np.asarray(model.predict_proba(rows.numpy()), dtype=np.float64))
        found = torch.full((len(rows), self.table.num_outputs), 1e-15, dtype=torch.float64)
        found[:, torch.from_numpy(np.asarray(model.classes_, dtype=np.int64))] = probs.clamp(min=1e-15)
        return found.log()


def compare_with_baselines(
    ensemble: Ensemble,
    table: Table,
    plan: MemberPlan,
    *,
    seed: int,
    device: str = "cpu",
    seconds: float | None = None,
) -> ModelComparison:
    """Score an ensemble and its baselines on the test part of a table, or else on the validation part.

    `ensemble` maps the raw matrix to logits, or to predictions in the targets' units. Differences are paired over rows.
    Errors of several targets are those of scaled ones. `seconds` is the time of the ensemble's training.
    """
    baselines = _Baselines(table, plan, seed, device)
    is_classifier, target, raw = baselines.is_classifier, baselines.target, table.raw[baselines.part]
    scaler = table.target_scaler
    unit = math.sqrt(table.target_variance)

    def predict(rows: Tensor) -> Tensor:
        predicted = _predict(ensemble, rows, is_classifier)
        return predicted if scaler is None else scaler.transform(predicted)

    losses = _cross_entropies if is_classifier else lambda found, y: (found - y).square().mean(1)
    predicted = predict(raw)
    own = losses(predicted, target)
    models = []
    for name, label, fit in baselines.all():
        start = time.monotonic()
        try:
            found = fit()
        except Exception as error:  # errors of any type: a failed baseline must not stop the fit
            models.append(ModelScores(name=name, label=label, failure=error_reason(error)))
            continue
        estimate = mean_over_samples((losses(found, target) - own).numpy() * unit**2)
        low, high = (None, None) if estimate is None else estimate.interval(0.05)
        models.append(
            ModelScores(
                name=name,
                label=label,
                scores=_scores(found, target, unit, is_classifier),
                difference=None if estimate is None else estimate.mean,
                low=low,
                high=high,
                seconds=time.monotonic() - start,
            )
        )
    scores = _scores(predicted, target, unit, is_classifier)
    label = f"ensemble of {ensemble.num_members}"
    models.append(ModelScores(name=ENSEMBLE, label=label, scores=scores, seconds=seconds))
    importances = permutation_importances(
        lambda rows, y: float(losses(predict(rows), y).mean()), raw, target, table, seed
    )
    return ModelComparison(
        split="test" if baselines.part == "test" else "validation",
        rows=len(target),
        loss="cross_entropy" if is_classifier else "mse",
        models=tuple(models),
        importances=tuple(Importance(name=n, mean=m * unit**2, std=s * unit**2) for n, m, s in importances),
        **(_class_details(predicted, target, table) if is_classifier else _target_details(predicted, target, table)),
    )


def permutation_importances(
    loss: Callable[[Tensor, Tensor], float], raw: Tensor, target: Tensor, table: Table, seed: int
) -> list[tuple[str, float, float]]:
    """Mean and standard deviation of the loss's increase if a column is permuted, largest first.

    All parts of a date are permuted together. At most `IMPORTANCE_ROWS` rows are used.
    """
    rows = permutation(seed, "importance", count=len(raw))[:IMPORTANCE_ROWS]
    raw, target = raw[rows], target[rows]
    before = loss(raw, target)
    names = [column.name for column in table.encoding.columns]
    found = []
    for place, name in enumerate(dict.fromkeys(names)):
        columns = [index for index, other in enumerate(names) if other == name]
        increases = []
        for repeat in range(IMPORTANCE_REPEATS):
            altered = raw.clone()
            altered[:, columns] = raw[permutation(seed, "importance", place, repeat, count=len(raw))][:, columns]
            increases.append(loss(altered, target) - before)
        if np.isfinite(increases).all():
            found.append((name, float(np.mean(increases)), float(np.std(increases))))
    return sorted(found, key=lambda entry: -entry[1])


@torch.no_grad()
def _predict(ensemble: Ensemble | StackedEnsemble, x: Tensor, is_classifier: bool) -> Tensor:
    """Log probabilities `(N, C)`, or mean predictions `(N, M)`, in float64."""
    parts = []
    for part in x.split(chunk_rows(ensemble, ensemble.num_members)):
        logits = ensemble(part).double().cpu()
        parts.append(ensemble_log_probs(logits) if is_classifier else logits.mean(0))
    return torch.cat(parts)


def _cross_entropies(log_probs: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(log_probs, target, reduction="none")


def _scores(predicted: Tensor, target: Tensor, unit: float, is_classifier: bool) -> dict[str, float | None]:
    if not is_classifier:
        scores = evaluate_regression(predicted[None], target).metrics
        powers = {"rmse": 1, "mae": 1, "r2": 0, "mse": 2}
        return finite({name: cast(float, scores[name]) * unit**power for name, power in powers.items()})
    from sklearn.metrics import roc_auc_score

    probs, auc = predicted.exp(), None
    if len(target.unique()) == probs.shape[1]:  # undefined if a class is absent
        scored = probs[:, 1] if probs.shape[1] == 2 else probs / probs.sum(1, keepdim=True)
        auc = float(roc_auc_score(target.numpy(), scored.numpy(), multi_class="ovr"))
    return {
        "accuracy": float((predicted.argmax(1) == target).double().mean()),
        "cross_entropy": float(_cross_entropies(predicted, target).mean()),
        "brier": float(brier_score(probs, target)),
        "auc": auc,
    }


def _class_details(predicted: Tensor, target: Tensor, table: Table) -> dict[str, Any]:
    names, count = table.schema.target.class_names, table.num_outputs
    confusion = torch.bincount(target * count + predicted.argmax(1), minlength=count**2).view(count, count)
    trained = torch.bincount(table.train.y, minlength=count).tolist()
    hits, rows, answers = confusion.diagonal().tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist()
    classes = tuple(
        ClassScores(
            name=name,
            train=trained[i],
            rows=rows[i],
            recall=hits[i] / rows[i] if rows[i] else None,
            precision=hits[i] / answers[i] if answers[i] else None,
        )
        for i, name in enumerate(names)
    )
    return {
        "classes": classes,
        "confusion": tuple(map(tuple, confusion.tolist())) if count <= MAX_CONFUSION else (),
    }


def _target_details(predicted: Tensor, target: Tensor, table: Table) -> dict[str, Any]:
    """Scores of each target in its units, and quantiles of target minus prediction."""
    assert table.target_scaler is not None
    details = []
    for i, name in enumerate(table.schema.target.names):
        unit = float(table.target_scaler.std[i])
        values = np.quantile((target - predicted)[:, i].numpy() * unit, RESIDUAL_QUANTILES)
        residuals: dict[str, float | None] = dict(
            zip(map("{:g}".format, RESIDUAL_QUANTILES), values.tolist(), strict=True)
        )
        scores = _scores(predicted[:, i : i + 1], target[:, i : i + 1], unit, is_classifier=False)
        details.append(TargetScores(name=name, scores=scores, residuals=residuals))
    return {"targets": tuple(details)}
