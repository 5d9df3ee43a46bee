"""The estimators on real tables, beside what a data scientist would use instead.

    python benchmarks/tabular.py --tables FOLDER --jobs 16 --out docs/results/tabular.json

`FOLDER` has CSV files exported from R packages (`TABLES` names them with their targets); scikit-learn's own tables are
always there. For every seed a table is split at random, stratified by class, into at most `--rows` training rows and
the rest, at most 5,000, for the scores. All contenders see the same splits, in their own defaults, one thread each.
Those that cannot read categories or missing values stand behind one-hot encoding, imputation and scaling. Contenders
whose package is not installed are left out with a sentence.

Intervals are those of the mean over tables of a paired difference, with tables as the unit (t, 95 %).
"""

from __future__ import annotations

import importlib.util
import json
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from scipy.stats import t as student
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
from sklearn.metrics import log_loss, r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler
from threadpoolctl import threadpool_limits

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
BASE = "torchace"
MAX_TEST = 5_000
OLD = {"encoding": "standard", "early_stopping": False, "diversity": 0.5}


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


def prepared(model: Any, scale: bool = True) -> Any:
    """A model behind one-hot encoding, imputation and scaling."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler()) if scale else SimpleImputer()
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    others = make_column_selector(dtype_exclude="number")
    return make_pipeline(
        make_column_transformer((numbers, make_column_selector(dtype_include="number")), (one_hot, others)), model
    )


def with_codes(model: Any) -> Any:
    """A model behind ordinal codes of categories; missing numbers stay."""
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1)
    others = make_column_selector(dtype_exclude="number")
    return make_pipeline(make_column_transformer((codes, others), remainder="passthrough"), model)


def contenders(regression: bool, seed: int) -> dict[str, Callable[[], Any]]:
    """Models by name; the packages of some may be missing."""
    ours: Any = NCLRegressor if regression else ACEClassifier
    common = {"random_state": seed, "n_jobs": 1}
    trees: Any = RandomForestRegressor if regression else RandomForestClassifier
    boosting: Any = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    network: Any = MLPRegressor if regression else MLPClassifier
    bagging: Any = BaggingRegressor if regression else BaggingClassifier
    found: dict[str, Callable[[], Any]] = {
        BASE: lambda: ours(**common),
        "torchace, old defaults": lambda: ours(**OLD, **common),
        "torchace, λ auto": lambda: ours(diversity="auto", **common),
        "linear": lambda: prepared(
            RidgeCV(np.logspace(-2, 3, 12)) if regression else LogisticRegression(max_iter=1000)
        ),
        "MLP": lambda: prepared(network(random_state=seed)),
        "bagged MLP": lambda: prepared(bagging(network(), 10, random_state=seed)),
        "random forest": lambda: prepared(trees(random_state=seed, n_jobs=1), scale=False),
        "HistGradientBoosting": lambda: boosting(categorical_features="from_dtype", random_state=seed),
    }
    if "members" in ours().get_params():
        found["torchace, shared members"] = lambda: ours(members="shared", **common)
    optional: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "LightGBM": ("lightgbm", lambda m: m.LGBMRegressor if regression else m.LGBMClassifier),
        "XGBoost": ("xgboost", lambda m: m.XGBRegressor if regression else m.XGBClassifier),
        "CatBoost": ("catboost", lambda m: m.CatBoostRegressor if regression else m.CatBoostClassifier),
        "TabM_D": ("pytabkit", lambda m: m.TabM_D_Regressor if regression else m.TabM_D_Classifier),
        "RealMLP_TD": ("pytabkit", lambda m: m.RealMLP_TD_Regressor if regression else m.RealMLP_TD_Classifier),
    }
    options: dict[str, dict[str, Any]] = {
        "LightGBM": {"verbose": -1, "n_jobs": 1, "random_state": seed},
        "XGBoost": {"n_jobs": 1, "random_state": seed},
        "CatBoost": {"verbose": False, "thread_count": 1, "random_state": seed, "allow_writing_files": False},
        "TabM_D": {"random_state": seed, "n_threads": 1, "device": "cpu"},
        "RealMLP_TD": {"random_state": seed, "n_threads": 1, "device": "cpu"},
    }
    for label, (package, choose) in optional.items():
        if importlib.util.find_spec(package) is not None:

            def make(package: str = package, choose: Any = choose, label: str = label) -> Any:
                return with_codes(choose(importlib.import_module(package))(**options[label]))

            found[label] = make
    return found


def missing_packages() -> list[str]:
    return [name for name in ("lightgbm", "xgboost", "catboost", "pytabkit") if importlib.util.find_spec(name) is None]


def calibration_error(probs: Any, hits: Any, bins: int = 15) -> float:
    """Mean over bins of |confidence - accuracy| of the top label, weighted by samples."""
    place = np.minimum((probs * bins).astype(int), bins - 1)
    return float(sum(abs(probs[place == b].mean() - hits[place == b].mean()) * (place == b).mean() for b in set(place)))


@cache
def warm_up() -> None:
    """Import what the first fit of a process imports."""
    X, y = datasets.load_iris(return_X_y=True)
    ACEClassifier(num_members=2, epochs=2, early_stopping="folds").fit(X, y)


def run(name: str, label: str, seed: int, folder: Path | None, rows: int) -> dict[str, Any]:
    """Fit one contender on one split and score it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warm_up()
    frame, y, regression = load(name, folder)
    size = min(rows, int(0.7 * len(frame)))
    stratify = None if regression else y
    train, test, train_y, test_y = train_test_split(frame, y, train_size=size, random_state=seed, stratify=stratify)
    test, test_y = test[:MAX_TEST], test_y[:MAX_TEST]
    codes = None if regression else {label: code for code, label in enumerate(np.unique(train_y))}
    if codes is not None:  # some packages take codes alone
        train_y, test_y = (np.array([codes[label] for label in part]) for part in (train_y, test_y))
    result = {"table": name, "model": label, "seed": seed, "rows": size}
    try:
        model = contenders(regression, seed)[label]()
        with threadpool_limits(1):
            start = time.perf_counter()
            model.fit(train, train_y)
            fitted = time.perf_counter()
            predicted = model.predict(test) if regression else model.predict_proba(test)
            result |= {"fit_seconds": fitted - start, "predict_seconds": time.perf_counter() - fitted}
    except Exception as error:
        return result | {"error": f"{type(error).__name__}: {error}"[:300]}
    if regression:
        return result | {"r2": r2_score(test_y, np.ravel(predicted))}
    probs = np.clip(predicted, 1e-15, None)
    probs = probs / probs.sum(1, keepdims=True)
    hits = probs.argmax(1) == test_y
    truth = np.eye(probs.shape[1])[test_y]
    return result | {
        "accuracy": float(hits.mean()),
        "log_loss": log_loss(test_y, probs, labels=np.arange(probs.shape[1])),
        "brier": float(np.square(probs - truth).sum(1).mean()),
        "calibration_error": calibration_error(probs.max(1), hits),
        "diversity": getattr(model, "diversity_", None),
    }


def interval(differences: Any) -> str:
    """Mean and 95 % interval over tables."""
    d = np.asarray(differences)
    half = float(student.ppf(0.975, len(d) - 1)) * d.std(ddof=1) / np.sqrt(len(d)) if len(d) > 1 else np.nan
    return f"{d.mean():+.4f} ({d.mean() - half:+.4f} to {d.mean() + half:+.4f})"


def summary(runs: pd.DataFrame, metric: str, higher: bool) -> str:
    """Means over tables of the contenders that finished every run, with ranks and differences to the new defaults."""
    runs = runs.dropna(subset=[metric])
    table = runs.pivot_table(index="table", columns="model", values=metric)
    count = runs.groupby("model").size()
    complete = [name for name in table.columns if count[name] == count.max()]
    table = table[complete]
    ranks = table.rank(axis=1, ascending=not higher).mean()
    columns = ["fit_seconds", "predict_seconds"]
    columns += [] if higher else ["accuracy", "brier", "calibration_error"]
    others = runs.groupby(["model", "table"])[columns].mean().groupby("model").mean()
    names = table.mean().sort_values(ascending=not higher).index
    rows = [
        [
            name,
            f"{table[name].mean():.4f}",
            f"{ranks[name]:.1f}",
            "" if name == BASE else interval(table[name] - table[BASE]),
            *(f"{others.loc[name, column]:.3f}" for column in columns),
        ]
        for name in names
    ]
    heads = [f"{table.shape[0]} tables", metric, "rank", f"minus {BASE} (95 % interval)", *columns]
    by_table = [[index, *(f"{row[name]:.4f}" for name in names)] for index, row in table.iterrows()]
    return f"{measure.table(heads, rows)}\n\n{measure.table([metric, *names], by_table)}"


def main() -> None:
    parser = measure.make_parser(__doc__ or "")
    parser.add_argument("--tables", type=Path, help="folder of the CSV files; without it, scikit-learn's tables alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=int, default=2_000, help="training rows, at most")
    parser.add_argument("--only", nargs="*", help="names of tables")
    parser.add_argument("--models", nargs="*", help="names of contenders")
    options = parser.parse_args()
    started = time.perf_counter()
    names = [*(TABLES if options.tables else ()), *BUILT_IN]
    names = ["wine"] if options.quick else options.only or names
    seeds = range(1 if options.quick else options.seeds)
    for package in missing_packages():
        print(f"{package} is not installed; its models are left out.")
    tasks = []
    for name in names:
        regression = name == "diabetes" or TABLES.get(name, (None,) * 4)[3] is not None
        labels = [label for label in contenders(regression, 0) if not options.models or label in options.models]
        tasks += [(name, label, seed, options.tables, options.rows) for seed in seeds for label in labels]
    tasks.sort(key=lambda task: task[1] not in ("TabM_D", "RealMLP_TD", "torchace, λ auto", "bagged MLP"))  # slow first
    runs = Parallel(n_jobs=options.jobs, verbose=1)(delayed(run)(*task) for task in tasks)
    frame = pd.DataFrame(runs)
    if "error" in frame:
        for _, row in frame.dropna(subset="error").iterrows():
            print(f"{row['model']} failed on {row['table']}, seed {row['seed']}: {row['error']}")
    for metric, higher in (("log_loss", False), ("r2", True)):
        if metric in frame:
            print(f"\n{summary(frame, metric, higher)}", flush=True)
    results = {
        "environment": measure.environment(),
        "rows": options.rows,
        "runs": json.loads(frame.to_json(orient="records")),
    }
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
