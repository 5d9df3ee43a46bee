"""The estimators on real tables, compared with common alternatives.

    python benchmarks/tabular.py --tables FOLDER --jobs 16 --out tabular.json --page tabular.md
    python benchmarks/tabular.py --render --out tabular.json --page tabular.md

`FOLDER` has CSV files exported from R packages (`TABLES` names them with their targets); scikit-learn's own tables are
always there. For every seed a table is split at random, stratified by class, into at most `--max-rows` training rows
and the rest, at most 5,000, for the scores. All contenders see the same splits, in their own defaults, one thread each.
Models that cannot read categories or missing values get one-hot encoding, imputation and scaling first. Contenders
whose package is not installed are named and left out.

Fits run seed by seed, small tables first, in `--jobs` processes. The JSON file is written after each of them, so that
an interrupted run keeps its results; `--resume` continues it. After `--minutes` no further fit starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pandas as pd
import tabular_page
import torch
import torch.nn.functional as F
from sklearn import datasets
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from tabular_page import BASE
from threadpoolctl import threadpool_limits

from torchace._files import write_atomic
from torchace.functional import brier_score, calibration_error
from torchace.sklearn import ACEClassifier, NCLRegressor

# name: (target, columns to drop, columns that are categories, transformation of a number to predict)
TABLES: dict[str, tuple[str, list[str], list[str], Callable[..., Any] | None]] = {
    "DNA": ("Class", [], [], None),
    "Ionosphere": ("Class", ["V2"], [], None),
    "LetterRecognition": ("lettr", [], [], None),
    "Vowel": ("Class", [], ["V1"], None),
    "credit_data": ("Status", [], [], None),
    "hpc_data": ("class", [], [], None),
    "mlc_churn": ("churn", [], [], None),
    "spam": ("type", [], [], None),
    "ames": ("Sale_Price", [], [], np.log10),
    "Bikeshare": ("bikers", ["casual", "registered"], ["hr"], np.log1p),
    "concrete": ("compressive_strength", [], [], np.asarray),
}
BUILT_IN = {
    "breast_cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "digits": datasets.load_digits,
    "diabetes": datasets.load_diabetes,
}
MAX_TEST = 5_000
OLD = {"members": "separate", "encoding": "standard", "early_stopping": False, "diversity": 0.5}
SLOW = ["TabM_D", "RealMLP_TD", "torchace, shared members", "bagged MLP"]
PACKAGES = {"LightGBM": "lightgbm", "XGBoost": "xgboost", "TabM_D": "pytabkit", "RealMLP_TD": "pytabkit"}


@cache
def load(name: str, folder: Path | None) -> tuple[pd.DataFrame, Any, bool]:
    """Features, targets, and whether the targets are numbers."""
    if name in BUILT_IN:
        frame, y = BUILT_IN[name](return_X_y=True, as_frame=True)
        return frame, y.to_numpy(), name == "diabetes"
    target, drop, categories, transform = TABLES[name]
    frame = pd.read_csv(Path(folder or ".", f"{name}.csv"))
    y = frame.pop(target)
    frame = frame.drop(columns=drop).astype(dict.fromkeys(categories, "category"))
    text = frame.select_dtypes(exclude=["number", "category"]).columns
    frame = frame.astype(dict.fromkeys(text, "category"))
    return frame, y.to_numpy(str) if transform is None else transform(y.to_numpy(float)), transform is not None


def with_one_hot(model: Any, scale: bool = True) -> Any:
    """A model behind one-hot encoding, imputation and scaling."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler()) if scale else SimpleImputer()
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    others = make_column_selector(dtype_exclude="number")
    return make_pipeline(
        make_column_transformer((numbers, make_column_selector(dtype_include="number")), (one_hot, others)), model
    )


def with_imputation(model: Any) -> Any:
    """A model that reads categories, behind imputation of missing numbers."""
    numbers = (SimpleImputer(), make_column_selector(dtype_include="number"))
    imputation = make_column_transformer(numbers, remainder="passthrough", verbose_feature_names_out=False)
    return make_pipeline(imputation.set_output(transform="pandas"), model)


def contenders(regression: bool, seed: int, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """Models by name, without those whose package is missing."""
    ours: Any = NCLRegressor if regression else ACEClassifier
    other = "separate" if ours().members == "shared" else "shared"
    common = {"random_state": seed, "n_jobs": 1}
    trees: Any = RandomForestRegressor if regression else RandomForestClassifier
    boosting: Any = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    network: Any = MLPRegressor if regression else MLPClassifier
    bagging: Any = BaggingRegressor if regression else BaggingClassifier
    ending = "Regressor" if regression else "Classifier"

    def peer(label: str, name: str, **options: Any) -> Any:
        return getattr(importlib.import_module(PACKAGES[label]), name + ending)(random_state=seed, **options)

    networks = {"n_threads": 1, "device": device}
    models: dict[str, Callable[[], Any]] = {
        BASE: lambda: ours(**common),
        "torchace, old defaults": lambda: ours(**OLD, **common),
        f"torchace, {other} members": lambda: ours(members=other, **common),
        "torchace, λ=0": lambda: ours(diversity=0.0, **common),
        "linear": lambda: with_one_hot(
            RidgeCV(np.logspace(-2, 3, 12)) if regression else LogisticRegression(max_iter=1000)
        ),
        "MLP": lambda: with_one_hot(network(random_state=seed)),
        "bagged MLP": lambda: with_one_hot(bagging(network(), 10, random_state=seed)),
        "random forest": lambda: with_one_hot(trees(random_state=seed, n_jobs=1), scale=False),
        "HistGradientBoosting": lambda: boosting(categorical_features="from_dtype", random_state=seed),
        "LightGBM": lambda: peer("LightGBM", "LGBM", verbose=-1, n_jobs=1),
        "XGBoost": lambda: peer("XGBoost", "XGB", enable_categorical=True, n_jobs=1),
        "TabM_D": lambda: with_imputation(peer("TabM_D", "TabM_D_", **networks)),
        "RealMLP_TD": lambda: with_imputation(peer("RealMLP_TD", "RealMLP_TD_", **networks)),
    }
    return {name: make for name, make in models.items() if PACKAGES.get(name) not in missing_packages()}


@cache
def missing_packages() -> list[str]:
    return [name for name in sorted(set(PACKAGES.values())) if importlib.util.find_spec(name) is None]


@cache
def warm_up() -> None:
    """Import what the first fit of a process imports."""
    X, y = datasets.load_iris(return_X_y=True)
    ACEClassifier(num_members=2, epochs=2, early_stopping="folds").fit(X, y)


def fit_and_score(
    name: str, label: str, seed: int, folder: Path | None, max_rows: int, device: str, deadline: float
) -> dict[str, Any] | None:
    """Fit one contender on one split and score it; None after the deadline."""
    if time.time() > deadline:
        return None
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    warm_up()
    frame, y, regression = load(name, folder)
    size = min(max_rows, int(0.7 * len(frame)))
    stratify = None if regression else y
    train, test, train_y, test_y = train_test_split(frame, y, train_size=size, random_state=seed, stratify=stratify)
    test, test_y = test[:MAX_TEST], test_y[:MAX_TEST]
    if not regression:  # some packages take codes alone
        labels, train_y = np.unique(train_y, return_inverse=True)
        test_y = np.searchsorted(labels, test_y)
    result = {"table": name, "model": label, "seed": seed, "rows": size}
    try:
        model = contenders(regression, seed, device)[label]()
        with threadpool_limits(1):
            start, cpu_start = time.perf_counter(), time.process_time()
            model.fit(train, train_y)
            fitted, cpu_fitted = time.perf_counter(), time.process_time()
            predicted = model.predict(test) if regression else model.predict_proba(test)
            result |= {"fit_seconds": fitted - start, "predict_seconds": time.perf_counter() - fitted}
    except Exception as error:
        return result | {"error": f"{type(error).__name__}: {error}"[:300]}
    result |= {"fit_cpu_seconds": cpu_fitted - cpu_start, "diversity": getattr(model, "diversity_", None)}
    if regression:
        return result | {"r2": r2_score(test_y, np.ravel(predicted))}
    probs = np.clip(np.asarray(predicted, dtype=np.float64), 1e-15, None)
    probs = torch.from_numpy(probs / probs.sum(1, keepdims=True))
    target = torch.from_numpy(test_y)
    return result | {
        "accuracy": float((probs.argmax(1) == target).double().mean()),
        "log_loss": float(F.nll_loss(probs.log(), target)),
        "brier": float(brier_score(probs, target)),
        "calibration_error": float(calibration_error(probs, target)),
    }


def plan(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Table, contender and seed of every fit: seed by seed, small tables and slow contenders first."""
    names = ["wine"] if options.quick else options.only or [*(TABLES if options.tables else ()), *BUILT_IN]
    sizes: dict[str, Any] = {}
    labels = {}
    for name in names:
        frame, _, regression = load(name, options.tables)
        sizes[name] = min(options.max_rows, len(frame)) * frame.shape[1]
        labels[name] = [label for label in contenders(regression, 0) if not options.models or label in options.models]
        labels[name].sort(key=lambda label: SLOW.index(label) if label in SLOW else len(SLOW))
    names = sorted(names, key=sizes.__getitem__)
    seeds = range(1 if options.quick else options.seeds)
    return [(name, label, seed) for seed in seeds for name in names for label in labels[name]]


def main() -> None:
    parser = measure.make_parser(__doc__ or "")
    parser.add_argument("--tables", type=Path, help="folder of the CSV files; without it, scikit-learn's tables alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--max-rows", type=int, default=2_000, help="training rows, at most")
    parser.add_argument("--minutes", type=float, default=np.inf, help="no fit starts after that time")
    parser.add_argument("--peer-device", default="cpu", help="device of pytabkit's networks, such as cuda")
    parser.add_argument("--only", nargs="*", help="names of tables")
    parser.add_argument("--models", nargs="*", help="names of contenders")
    parser.add_argument("--resume", action="store_true", help="keep the results in the --out file")
    parser.add_argument("--page", type=Path, help="write the results here, as Markdown")
    parser.add_argument("--auto", type=Path, help="for --page: later --out files of the defaults and λ=0", nargs="*")
    parser.add_argument("--render", action="store_true", help="fit nothing; write --page from the --out file")
    options = parser.parse_args()
    started = time.perf_counter()
    results: dict[str, Any] = {"runs": []}
    if options.render or (options.resume and options.out.exists()):
        results = json.loads(options.out.read_text())
    if not options.render:
        results |= {"environment": measure.environment(), "max_rows": options.max_rows}
        results |= {"jobs": options.jobs, "peer_device": options.peer_device, "left_out": missing_packages()}
        for package in results["left_out"]:
            print(f"{package} is not installed; its models are left out.")
        done = {(run["table"], run["model"], run["seed"]) for run in results["runs"]}
        settings = (options.tables, options.max_rows, options.peer_device, time.time() + 60 * options.minutes)
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            fits = [pool.submit(fit_and_score, *task, *settings) for task in plan(options) if task not in done]
            for result in filter(None, (fit.result() for fit in as_completed(fits))):
                print(f"{time.perf_counter() - started:.0f} s: {tabular_page.line(result)}", flush=True)
                results["runs"].append(result)
                if options.out is not None:
                    write_atomic(options.out, (json.dumps(results, indent=1) + "\n").encode())
        measure.finish(results, options.out, started)
    page = tabular_page.page(results, [json.loads(file.read_text()) for file in options.auto or ()])
    print(page) if options.page is None else options.page.write_text(page)


if __name__ == "__main__":
    main()
