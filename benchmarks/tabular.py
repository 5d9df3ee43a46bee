"""The estimators on scikit-learn's tables, beside what a data scientist would use instead.

    python benchmarks/tabular.py --out docs/results/tabular.json

Five-fold cross validation, repeated with other folds and other seeds. Every model stands behind the same
`StandardScaler` and sees the same folds. The comparison that counts is the same ensemble at λ=0: same members, same
initial weights, same order of samples, same budget; its intervals are those of Nadeau and Bengio's corrected resampled
t test (folds share training samples, so a plain t interval would be too short). `auto` searches λ inside each training
fold: it trains some forty ensembles for each fit. Nothing was tuned on these scores but the estimators' defaults, which
were chosen beforehand by a coarse look at three learning rates and numbers of epochs on the same tables.
"""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import measure
import numpy as np
import torch
from scipy.stats import t as student
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from torchace.sklearn import ACEClassifier, NCLRegressor

FOLDS = 5
TABLES = {"breast cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits, "diabetes": load_diabetes}


def models(is_regression: bool, quick: bool) -> dict[str, Any]:
    ours = NCLRegressor if is_regression else ACEClassifier
    options = {"epochs": 5} if quick else {}
    found: dict[str, Any] = {
        "λ=0": ours(diversity=0.0, **options),
        "λ=0.5": ours(diversity=0.5, **options),
        "λ=0.9": ours(diversity=0.9, **options),
        "λ auto": ours(diversity="auto", **options),
    }
    if is_regression:
        return found | {
            "MLPRegressor": MLPRegressor(hidden_layer_sizes=(64,)),
            "RandomForestRegressor": RandomForestRegressor(),
            "HistGradientBoostingRegressor": HistGradientBoostingRegressor(),
            "RidgeCV": RidgeCV(np.logspace(-2, 3, 20)),
        }
    return found | {
        "MLPClassifier": MLPClassifier(hidden_layer_sizes=(64,)),
        "RandomForestClassifier": RandomForestClassifier(),
        "HistGradientBoostingClassifier": HistGradientBoostingClassifier(),
        "LogisticRegression": LogisticRegression(max_iter=1000),
    }


def scores_of(model: Any, X: Any, y: Any, is_regression: bool) -> dict[str, float]:
    if is_regression:
        predicted = model.predict(X)
        return {"r2": r2_score(y, predicted), "mse": mean_squared_error(y, predicted)}
    return {"accuracy": accuracy_score(y, model.predict(X)), "log_loss": log_loss(y, model.predict_proba(X))}


def corrected_interval(differences: list[float], test_share: float) -> dict[str, float]:
    """The mean of paired differences over repeated folds and its 95 % interval (Nadeau and Bengio 2003)."""
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return {"mean": mean, "low": math.nan, "high": math.nan}
    variance = float(np.var(differences, ddof=1)) * (1 / n + test_share / (1 - test_share))
    half = float(student.ppf(0.975, n - 1)) * math.sqrt(variance)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def cross_validated(name: str, repeats: int, quick: bool, *, auto: bool) -> dict[str, Any]:
    X, y = TABLES[name](return_X_y=True)
    is_regression = name == "diabetes"
    kind = KFold if is_regression else StratifiedKFold
    scores: dict[str, list[dict[str, float]]] = {}
    seconds: dict[str, float] = {}
    chosen: list[float] = []
    for repeat in range(repeats):
        for train, test in kind(FOLDS, shuffle=True, random_state=repeat).split(X, y):
            for label, model in models(is_regression, quick).items():
                if label == "λ auto" and not auto:
                    continue
                pipeline = make_pipeline(StandardScaler(), clone(model))
                if "random_state" in model.get_params():
                    pipeline[-1].set_params(random_state=repeat)
                start = time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    pipeline.fit(X[train], y[train])
                seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - start
                scores.setdefault(label, []).append(scores_of(pipeline, X[test], y[test], is_regression))
                if label == "λ auto":
                    chosen.append(pipeline[-1].diversity_)
        print(f"{name}: repeat {repeat + 1} of {repeats}", flush=True)
    metrics = list(scores["λ=0"][0])
    return {
        "rows": len(X),
        "columns": X.shape[1],
        "fits": repeats * FOLDS,
        "scores": {
            label: {m: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1))} for m, v in by_metric.items()}
            for label, values in scores.items()
            for by_metric in [{m: [one[m] for one in values] for m in metrics}]
        },
        "against_0": {
            label: {
                m: corrected_interval(
                    [a[m] - b[m] for a, b in zip(scores[label], scores["λ=0"], strict=False)], 1 / FOLDS
                )
                for m in metrics
            }
            for label in scores
            if label != "λ=0"
        },
        "chosen": chosen,
        "seconds_a_fit": {label: value / len(scores[label]) for label, value in seconds.items()},
    }


def printed(results: dict[str, Any]) -> str:
    lines = []
    for name, table in results.items():
        metrics = list(table["scores"]["λ=0"])
        lines += [
            f"### {name} ({table['rows']} rows, {table['columns']} columns, {table['fits']} fits)",
            "",
            f"| model | {' | '.join(metrics)} | {metrics[1]} minus that of λ=0 (95 % interval) |",
            "| --- |" + " --- |" * (len(metrics) + 1),
        ]
        for label, values in table["scores"].items():
            cells = [f"{values[m]['mean']:.4g} ± {values[m]['std']:.2g}" for m in metrics]
            gap = table["against_0"].get(label, {}).get(metrics[1])
            against = "" if gap is None else f"{gap['mean']:+.4g} ({gap['low']:+.4g} to {gap['high']:+.4g})"
            lines.append(f"| {label} | {' | '.join(cells)} | {against} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = measure.arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--no-auto", action="store_true", help="leave out the search for λ, which takes most of the time"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = ["wine"] if options.quick else list(TABLES)
    started = time.perf_counter()
    results: dict[str, Any] = {"environment": measure.environment(), "folds": FOLDS}
    results["tables"] = {}
    for name in names:
        results["tables"][name] = cross_validated(
            name, 1 if options.quick else options.repeats, options.quick, auto=not options.no_auto
        )
        print(printed({name: results["tables"][name]}), flush=True)
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
