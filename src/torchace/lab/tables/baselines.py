"""Baselines for a table, and their scores beside the model's."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
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
from torchace.lab.tables.importances import permutation_increases
from torchace.lab.tables.table import Table
from torchace.lab.training.evaluate import evaluate_regression
from torchace.lab.training.members import MemberPlan, train_members
from torchace.lab.training.run_group import chunk_rows
from torchace.nn import Ensemble, StackedEnsemble

MAX_LINEAR_ROWS = 50_000  # of training
MAX_CONFUSION = 30  # classes
IMPORTANCE_ROWS, IMPORTANCE_REPEATS = 2000, 5
RESIDUAL_QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)
_cross_entropies = partial(F.nll_loss, reduction="none")  # of log probabilities (N, C) and classes (N,)


def compare_with_baselines(
    ensemble: Ensemble, table: Table, plan: MemberPlan, *, device: str = "cpu", seconds: float | None = None
) -> ModelComparison:
    """Score an ensemble and its baselines on the test part of a table, or else on the validation part.

    `ensemble` maps the raw matrix to logits, or to predictions in the targets' units. Differences are paired over rows.
    Errors of several targets are those of scaled ones. `seconds` is the time of the ensemble's training.
    """
    part = "test" if len(table.test) else "validation"
    is_classifier, target, raw = table.task == "classification", getattr(table, part).y, table.raw[part]
    scaler, unit = table.target_scaler, math.sqrt(table.target_variance)

    def predict(rows: Tensor) -> Tensor:
        predicted = _predict(ensemble, rows, is_classifier)
        return predicted if scaler is None else scaler.transform(predicted)

    losses = _cross_entropies if is_classifier else lambda found, y: (found - y).square().mean(1)
    predicted = predict(raw)
    own = losses(predicted, target)
    baselines: tuple[tuple[str, str, Callable[[], Tensor]], ...] = (
        ("constant", "most frequent class" if is_classifier else "mean", lambda: _constant(table, len(target))),
        ("linear", "logistic regression" if is_classifier else "ridge regression", lambda: _linear(table, part)),
        ("network", "one network", lambda: _network(table, plan, part, device)),
        ("boosting", "gradient boosting", lambda: _boosting(table, part)),
    )
    models = []
    for name, label, fit in baselines:
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
    importances = _importances(lambda rows, y: float(losses(predict(rows), y).mean()), raw, target, table)
    return ModelComparison(
        split=cast(Any, part),
        rows=len(target),
        loss="cross_entropy" if is_classifier else "mse",
        models=tuple(models),
        importances=tuple(Importance(name=n, mean=m * unit**2, std=s * unit**2) for n, m, s in importances),
        **(_class_details(predicted, target, table) if is_classifier else _target_details(predicted, target, table)),
    )


# -- baselines: log probabilities (N, C) of one part, or scaled numbers (N, M) ----------------------------------------


def _constant(table: Table, count: int) -> Tensor:
    y = table.train.y
    if table.task == "regression":
        return y.mean(0).expand(count, -1)
    counts = torch.bincount(y, minlength=table.num_outputs).double()
    return (counts / counts.sum()).log().expand(count, -1)


def _linear(table: Table, part: str) -> Tensor:
    from sklearn.linear_model import LogisticRegression, RidgeCV

    is_classifier = table.task == "classification"
    model = LogisticRegression(max_iter=500) if is_classifier else RidgeCV(np.logspace(-3, 4, 15))
    features = {name: getattr(table, name).x for name in table.raw}
    return _fit(model, table, features, part, MAX_LINEAR_ROWS)


def _boosting(table: Table, part: str) -> Tensor:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.multioutput import MultiOutputRegressor

    categorical = [isinstance(column, CategoryColumn) for column in table.encoding.columns]
    options: dict[str, Any] = {"random_state": table.settings.seed % 2**32, "categorical_features": categorical}
    if table.task == "classification":
        return _fit(HistGradientBoostingClassifier(**options), table, table.raw, part)
    return _fit(MultiOutputRegressor(HistGradientBoostingRegressor(**options)), table, table.raw, part)


def _network(table: Table, plan: MemberPlan, part: str, device: str) -> Tensor:
    train, validation, test = table.parts(plan, device)
    options: dict[str, Any] = {"diversities": [0.0], "seeds": [table.settings.seed], "validation": validation}
    trained = train_members(replace(plan, num_members=1), train, table.num_outputs, **options)
    if (failure := trained.fitted.failures.get(0)) is not None:
        raise ValueError(failure.message)
    return _predict(trained.ensemble(0), (test if part == "test" else validation).x, table.task == "classification")


def _fit(model: Any, table: Table, features: Mapping[str, Tensor], part: str, limit: int | None = None) -> Tensor:
    """Fit on the training rows, and on the validation rows unless they are scored; the ensemble stops on these."""
    rows = replace(table.train, x=features["train"])
    if part == "test":
        rows = rows.join(replace(table.validation, x=features["validation"]))
    if limit is not None and len(rows) > limit:
        rows = rows.take(permutation(table.settings.seed, "baseline", count=len(rows))[:limit])
    weight = None if rows.weight is None else rows.weight.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no convergence within the iterations
        model.fit(rows.x.numpy(), rows.y.numpy(), sample_weight=weight)
    x = features[part].numpy()
    if table.task == "regression":
        return torch.from_numpy(np.asarray(model.predict(x), dtype=np.float64)).view(len(x), -1)
    found = torch.full((len(x), table.num_outputs), 1e-15, dtype=torch.float64)
    found[:, torch.from_numpy(model.classes_)] = torch.from_numpy(model.predict_proba(x)).double().clamp(min=1e-15)
    return found.log()


# -- scores -----------------------------------------------------------------------------------------------------------


def _importances(
    loss: Callable[[Tensor, Tensor], float], raw: Tensor, target: Tensor, table: Table
) -> list[tuple[str, float, float]]:
    """Mean and standard deviation of the loss's increase if a column is permuted, largest first.

    At most `IMPORTANCE_ROWS` rows are used.
    """
    seed = table.settings.seed
    rows = permutation(seed, "importance", count=len(raw))[:IMPORTANCE_ROWS]
    raw, target = raw[rows], target[rows]
    names = [column.name for column in table.encoding.columns]

    def order(place: int, repeat: int) -> Tensor:
        return permutation(seed, "importance", place, repeat, count=len(raw))

    increases = permutation_increases(lambda rows: loss(rows, target), raw, names, order, IMPORTANCE_REPEATS)
    found = [(n, float(np.mean(more)), float(np.std(more))) for n, more in increases.items() if np.isfinite(more).all()]
    return sorted(found, key=lambda entry: -entry[1])


@torch.no_grad()
def _predict(ensemble: Ensemble | StackedEnsemble, x: Tensor, is_classifier: bool) -> Tensor:
    """Log probabilities `(N, C)`, or mean predictions `(N, M)`, in float64."""
    parts = []
    for part in x.split(chunk_rows(ensemble, ensemble.num_members)):
        logits = ensemble(part).double().cpu()
        parts.append(ensemble_log_probs(logits) if is_classifier else logits.mean(0))
    return torch.cat(parts)


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
    count = table.num_outputs
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
        for i, name in enumerate(table.schema.target.class_names)
    )
    return {"classes": classes, "confusion": tuple(map(tuple, confusion.tolist())) if count <= MAX_CONFUSION else ()}


def _target_details(predicted: Tensor, target: Tensor, table: Table) -> dict[str, Any]:
    """Scores of each target in its units, and quantiles of target minus prediction."""
    names, details = [f"{share:g}" for share in RESIDUAL_QUANTILES], []
    for i, (name, scale) in enumerate(zip(table.schema.target.names, table.encoding.target_scales, strict=True)):
        residuals = np.quantile((target - predicted)[:, i].numpy() * scale.std, RESIDUAL_QUANTILES).tolist()
        scores = _scores(predicted[:, i : i + 1], target[:, i : i + 1], scale.std, is_classifier=False)
        details.append(TargetScores(name=name, scores=scores, residuals=dict(zip(names, residuals, strict=True))))
    return {"targets": tuple(details)}
