"""The page docs/results/tabular.md from the results of tabular.py."""

from __future__ import annotations

import math
from typing import Any

import measure
import pandas as pd
from page_text import fold, signed

from torchace._statistics import mean_over_seeds

BASE, OLD, SHARED, ZERO = "torchace", "torchace, old defaults", "torchace, shared members", "torchace, λ=0"
FULL = "torchace, λ auto"  # of an earlier commit: with the full search
METRICS = {"log_loss": "log loss", "r2": "R²"}
COLUMNS = {
    "accuracy": "accuracy",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "fit_seconds": "fit, s",
    "fit_cpu_seconds": "fit, CPU s",
    "predict_seconds": "predict, s",
}


def line(result: dict[str, Any]) -> str:
    """One fit as a line for the terminal."""
    score = result.get("error") or f"{result.get('log_loss', result.get('r2')):.4f}, {result['fit_seconds']:.1f} s"
    return f"{result['table']}, seed {result['seed']}, {result['model']}: {score}"


def common_runs(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Runs of the (table, seed) pairs that all contenders finished, without those that finished less than half."""
    runs = runs.dropna(subset=[metric])
    count = runs.groupby("model").size()
    runs = runs[runs["model"].map(count) >= count.max() / 2]
    finished = runs.groupby(["table", "seed"])["model"].transform("nunique")
    return runs[finished == runs["model"].nunique()]


def interval(differences: pd.Series, tests: int = 1) -> tuple[float, float]:
    """The 95 % interval of the mean, with tables as the unit, joint for a number of tests (Bonferroni)."""
    estimate = mean_over_seeds(differences.to_numpy())
    return (-math.inf, math.inf) if estimate is None else estimate.interval(0.05 / tests)


def difference(differences: pd.Series, tests: int = 1) -> str:
    low, high = interval(differences, tests)
    return f"{signed(differences.mean(), 4)} ({signed(low, 4)} to {signed(high, 4)})"


def section(runs: pd.DataFrame, metric: str) -> list[str]:
    """Means over tables with ranks and paired differences, then every table."""
    means = runs.groupby(["table", "model"]).mean(numeric_only=True)
    scores = means[metric].unstack()
    higher = metric == "r2"
    ranks = scores.rank(axis=1, ascending=not higher).mean()
    columns = [name for name in COLUMNS if name in means and means[name].notna().all()]
    others = means.groupby("model")[columns].mean()
    names = list(scores.mean().sort_values(ascending=not higher).index)
    rows = [
        [
            name,
            f"{scores[name].mean():.4f}",
            f"{ranks[name]:.1f}",
            "" if name == BASE else difference(scores[name] - scores[BASE], len(names) - 1),
            *(f"{others.loc[name, column]:.3f}" for column in columns),
        ]
        for name in names
    ]
    change = f"minus {BASE}'s (joint 95 % interval)"
    header = ["model", METRICS[metric], "mean rank", change, *map(COLUMNS.get, columns)]
    by_table = [[str(table), *(f"{row[name]:.3f}" for name in names)] for table, row in scores.iterrows()]
    title = "Regression" if higher else "Classification"
    seeds = runs.groupby("table")["seed"].nunique()
    count = f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
    return [
        f"## {title}: {len(scores)} tables, {count} seeds",
        "",
        measure.table(header, rows),
        "",
        fold(f"{METRICS[metric]} of each table", measure.table(["table", *names], by_table).replace(" -", " −")),
        "",
    ]


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


def classification_aims(means: pd.DataFrame) -> list[list[str]]:
    scores, fit = means["log_loss"].unstack(), means["fit_cpu_seconds"].unstack().mean()
    rows = []
    if OLD in scores:
        ratio = scores[BASE].mean() / scores[OLD].mean()
        rows.append(["log loss at most 0.85 of the old defaults'", f"{ratio:.3f}", verdict(ratio <= 0.85)])
    better = {name: interval(scores[name] - scores[BASE]) for name in scores if name != BASE}
    losses = [name for name, (_, high) in better.items() if high < 0]
    rows.append(["no contender with a significantly lower log loss", ", ".join(losses) or "none", verdict(not losses)])
    error = means["calibration_error"].unstack()[BASE].mean()
    rows.append(["calibration error at most 0.035", f"{error:.4f}", verdict(error <= 0.035)])
    if OLD in scores:
        rows.append(
            ["no slower to fit than the old defaults", f"{fit[BASE] / fit[OLD]:.2f}", verdict(fit[BASE] <= fit[OLD])]
        )
    if SHARED in scores:
        ratio = fit[SHARED] / fit[BASE]
        rows.append(["shared members at most five times slower to fit", f"{ratio:.2f}", verdict(ratio <= 5)])
    return rows


def regression_aims(means: pd.DataFrame) -> list[list[str]]:
    scores = means["r2"].unstack()
    if "HistGradientBoosting" not in scores:
        return []
    gap = scores[BASE] - scores["HistGradientBoosting"]
    return [["R² no lower than HistGradientBoosting's on average", difference(gap), verdict(gap.mean() >= 0)]]


def headline(scores: pd.DataFrame, metric: str) -> str:
    """The defaults beside the best contender and the old defaults."""
    higher = metric == "r2"
    estimator = "NCLRegressor" if higher else "ACEClassifier"
    peers = scores[[name for name in scores if not name.startswith(BASE)]].mean().sort_values(ascending=not higher)
    text = f"**`{estimator}` with its defaults: mean {METRICS[metric]} {scores[BASE].mean():.3f}**"
    text += f" (old defaults: {scores[OLD].mean():.3f})" if OLD in scores else ""
    if not len(peers):
        return text + "."
    tests = len(scores.columns) - 1
    intervals = {name: interval(scores[name] - scores[BASE], tests) for name in peers.index}
    low, high = intervals[peers.index[0]]
    less, more = ([name for name, ends in intervals.items() if test(ends)] for test in (_is_below, _is_above))
    better, worse = (more, less) if higher else (less, more)
    return (
        f"{text}. The best other model, {peers.index[0]}, has {peers.iloc[0]:.3f} (95 % interval of the difference "
        f"{signed(low, 3)} to {signed(high, 3)}, corrected for {tests} models). Significantly worse: "
        f"{', '.join(worse) or 'none'}; significantly better: {', '.join(better) or 'none'}."
    )


def _is_below(ends: tuple[float, float]) -> bool:
    return ends[1] < 0


def _is_above(ends: tuple[float, float]) -> bool:
    return ends[0] > 0


def notes(results: dict[str, Any], runs: pd.DataFrame, auto: list[dict[str, Any]]) -> list[str]:
    """Describe how the numbers were measured, and missing results."""
    place = results["environment"]
    lines = [
        f"At most {results['max_rows']:,} rows for training, all others (at most 5,000) for the scores; every model "
        "with its defaults, one thread and the same splits. Means over seeds, then over tables; intervals are paired, "
        "with tables as the unit (t, 95 %), and joint for all models (Bonferroni); those of the targets are for one "
        "comparison. The targets compare CPU seconds. "
        f"{results['jobs']} processes ran at a time ({place['cpu']}, torch {place['torch']}, commit "
        f"{place['commit']})."
    ]
    networks = "TabM_D and RealMLP_TD are pytabkit's"
    if results["peer_device"] != "cpu":
        networks += f"; they were timed on a GPU (`{results['peer_device']}`) that all processes shared"
    lines += [f"{networks}. `MLP` and `bagged MLP` (ten of them) are scikit-learn's, which do not scale targets."]
    lines += [f"{package} was not installed; its models are missing." for package in results["left_out"]]
    if "error" in runs:
        for model, failed in runs.dropna(subset=["error"]).groupby("model"):
            lines.append(
                f"{model} failed {len(failed)} times, first on {failed['table'].iloc[0]}: {failed['error'].iloc[0]}"
            )
    if not auto:
        return [*lines, "[Numbers](tabular.json)."]
    place = auto[0]["environment"]
    lines.append(
        "The defaults were λ=0 then; λ auto, the default now, was measured later beside λ=0 "
        f"({auto[0]['jobs']} process, {place['cpu']}, torch {place['torch']}, commit {place['commit']})."
    )
    files = "[λ auto](tabular_auto.json), [λ auto with more rows](tabular_auto_large.json)"
    return [*lines, f"Numbers: [all models](tabular.json), {files}."]


def search_aims(auto: list[dict[str, Any]], earlier: pd.DataFrame) -> tuple[list[list[str]], list[str]]:
    """What λ auto costs and chooses; `earlier` has runs of the full search."""
    texts, ratios = [], []
    for results in auto:
        runs = pd.DataFrame(results["runs"])
        cpu = runs.pivot(index=["table", "seed"], columns="model", values="fit_cpu_seconds")
        ratios.append(cpu[BASE].sum() / cpu[ZERO].sum())
        chosen = runs[runs["model"] == BASE]["diversity"]
        counts = ", ".join(f"λ={value:g} in {count}" for value, count in chosen.value_counts().sort_index().items())
        texts.append(f"{counts} of {len(chosen)} fits, at {ratios[-1]:.2f} times the CPU time of a fit with λ=0")
    full = earlier[earlier["model"] == FULL]["diversity"]
    text = f'`diversity="auto"`, the default, chose {texts[0]}: a rule ends it where no gain is predicted. '
    for results, more in zip(auto[1:], texts[1:], strict=True):
        text += f"With up to {results['max_rows']:,} training rows: {more}. "
    text += f"The full search of commit fe38b40 chose λ=0 in {(full == 0).sum()} of {len(full)} fits."
    aim = ["λ auto costs at most 1.5 fits", f"{ratios[0]:.2f}", verdict(ratios[0] <= 1.5)]
    return [aim], ["## λ auto", "", text]


def page(results: dict[str, Any], auto: list[dict[str, Any]]) -> str:
    """The whole page as Markdown; `auto` has later runs of the defaults beside λ=0, also with more rows."""
    every = pd.DataFrame(results["runs"])
    runs = every[every["model"] != FULL]
    findings, aims, sections = [], [], []
    for metric, rows in (("log_loss", classification_aims), ("r2", regression_aims)):
        if metric not in runs or (part := common_runs(runs, metric)).empty or BASE not in set(part["model"]):
            continue
        means = part.groupby(["table", "model"]).mean(numeric_only=True)
        findings.append(headline(means[metric].unstack(), metric))
        aims += rows(means)
        sections += section(part, metric)
        dropped = sorted(set(runs.dropna(subset=[metric])["model"]) - set(part["model"]))
        sections += [f"Finished less than half of the fits, and left out: {', '.join(dropped)}.", ""] if dropped else []
    if auto:
        found, sentences = search_aims(auto, every)
        aims, sections = aims + found, [*sections, *sentences, ""]
    return "\n".join(
        ["# The estimators on real tables", "", *(f"- {finding}" for finding in findings), "", *sections]
        + ["## Targets", "", measure.table(["target", "measured", "met"], aims), ""]
        + ["## How it was measured", "", "\n\n".join(notes(results, runs, auto)), ""]
    )
