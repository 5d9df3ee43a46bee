"""Result files of fits on a user's table, as `torchace fit` writes them; scores follow from made-up predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from torchace.lab.store import finite
from torchace.lab.training.evaluate import Evaluation, evaluate, evaluate_regression

GRID = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
REFINED = (0.2, 0.4)
CLASSES = ("setosa", "versicolor", "virginica")


@dataclass
class FitSpec:
    """A fit to write, or a sweep on the same data. `scale` is the target's unit; `gain` the share of the error that the
    chosen λ removes; `search` has changes to the search's result, None for no search."""

    task: str = "regression"
    name: str = "houses.csv"
    title: str = "houses.csv: price"
    num_members: int = 5
    chosen: float = 0.3
    search_seeds: Sequence[int] = (0, 1, 2)
    sweep_seeds: Sequence[int] = (100, 101, 102, 103, 104)
    arm: str = "model"  # or "sweep"
    test: int = 240
    scale: float = 50.0
    gain: float = 0.06
    arrays: bool = True
    failed: Sequence[tuple[float, int]] = ()
    schema: dict[str, Any] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] | None = field(default_factory=dict)


def write_fit(directory: Path, spec: FitSpec) -> Path:
    """Write the result files of a fit and return their directory."""
    (directory / "runs").mkdir(parents=True)
    is_model = spec.arm == "model"
    diversities = [spec.chosen] if is_model else [0.0, 0.3, 0.9]
    seeds = [7] if is_model else list(spec.sweep_seeds)
    for diversity in diversities:
        for seed in seeds:
            _write_run(directory / "runs", spec, diversity, seed)
    experiment = {
        "format": 1,
        "name": "fit",
        "title": spec.title,
        "description": "",
        "task": spec.task,
        "data": {
            "name": spec.name,
            "train": 960,
            "validation": 240,
            "test": spec.test,
            "classes": list(CLASSES) if spec.task == "classification" else [],
            "image_shape": None,
            "schema": SCHEMAS[spec.task] if spec.schema is None else spec.schema,
        },
        "arms": [
            {
                "name": spec.arm,
                "label": "the model" if is_model else "shared",
                "num_members": spec.num_members,
                "batches": "shared",
                "network": "MLP 14-64-64-1",
                "parameters": 5185 * spec.num_members,
                "diversities": diversities,
                "baseline": False,
                **({"role": "model", "seeds": seeds} if is_model else {}),
            }
        ],
        "seeds": seeds,
        "search": _search(spec) if is_model and spec.search is not None else None,
        "hardware": {"device": "cpu", "cpu": "two cores", "threads": 2},
        "versions": {"torchace": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "config": {"target": "price", "members": spec.num_members, "hidden": [64, 64]},
        "started": "2026-01-31T12:00:00+00:00",
        "seconds": 48.3,
        **spec.overrides,
    }
    (directory / "experiment.json").write_text(json.dumps(experiment))
    return directory


def _search(spec: FitSpec) -> dict[str, Any]:
    loss = "mse" if spec.task == "regression" else "cross_entropy"
    candidates = [
        {"diversity": d, "scores": {str(seed): validation_loss(spec, d, seed) for seed in spec.search_seeds}}
        for d in [*GRID, *REFINED]
    ]
    gain = {"split": "test", "mean": 120.0, "low": 40.0, "high": 200.0, "seeds": [5, 6, 7], "beyond_noise": True}
    return {
        "chosen": spec.chosen,
        "metric": loss,
        "split": "validation",
        "rounds": [list(GRID), list(REFINED)],
        "candidates": candidates,
        "gain": gain if spec.chosen else None,
        "sentence": f"λ={spec.chosen:g} lowers the loss on the test samples.",
        **(spec.search or {}),
    }


def validation_loss(spec: FitSpec, diversity: float, seed: int) -> float:
    """The validation score of one λ and seed of the search."""
    score, loss = (regression, "mse") if spec.task == "regression" else (classification, "cross_entropy")
    return float(score(spec, diversity, seed, 240)[0][loss])


def _write_run(folder: Path, spec: FitSpec, diversity: float, seed: int) -> None:
    failed = (diversity, seed) in spec.failed
    score = regression if spec.task == "regression" else classification
    test, arrays = score(spec, diversity, seed, spec.test)
    metrics = {"validation": score(spec, diversity, seed, 240)[0], "test": test, "train": None}
    name = f"{spec.arm}-l{diversity:g}-s{seed}"
    run = {
        "format": 1,
        "run": name,
        "arm": spec.arm,
        "diversity": diversity,
        "seed": seed,
        "status": "failed" if failed else "finished",
        "failure": {"message": "The loss of member 1 is NaN.", "member": 1, "step": 40} if failed else None,
        "metrics": None if failed else metrics,
        "steps": 800,
        "seconds": 0.6,
    }
    (folder / f"{name}.json").write_text(json.dumps(run))
    if spec.arrays and not failed:
        save_file(arrays, folder / f"{name}.safetensors")


def regression(spec: FitSpec, diversity: float, seed: int, rows: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A regressor's scores and arrays: members err together where rows are noisy, and apart the more λ is."""
    data = np.random.default_rng(rows)  # the rows, the same in every run
    own = np.random.default_rng([seed, rows, 5])  # the same at every λ: runs of one seed are paired
    noise = np.exp(0.5 * data.normal(size=rows))
    truth = data.gamma(3, 1, rows) * 2
    observed = truth + 0.5 * noise * data.normal(size=rows)
    common = 0.4 * noise * own.normal(size=rows) * (1 - 3 * spec.gain * _worth(diversity))
    apart = (0.3 + 0.4 * diversity) * noise * own.normal(size=(spec.num_members, rows))
    members = spec.scale * (truth + common + apart - apart.mean(0) * 0.5)  # (K, N)
    return _evaluated(evaluate_regression(torch.from_numpy(members), torch.from_numpy(spec.scale * observed)))


def classification(
    spec: FitSpec, diversity: float, seed: int, rows: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A classifier's scores and arrays, from members' probabilities."""
    data, own = np.random.default_rng(rows), np.random.default_rng([seed, rows, 5])
    K, C = spec.num_members, len(CLASSES)
    target = data.integers(0, C, rows)
    hard = data.random(rows) ** 3
    logits = 4 * np.eye(C)[target] * (1 - 1.2 * hard[:, None]) + data.normal(size=(rows, C))
    logits = logits + 0.7 * own.normal(size=(rows, C)) * (1 - 4 * spec.gain * _worth(diversity))
    logits = logits + (0.4 + 0.8 * diversity) * own.normal(size=(K, rows, C))
    metrics, arrays = _evaluated(evaluate(torch.from_numpy(logits), torch.from_numpy(target)))
    return metrics, {**arrays, "disputed_row": 3 * arrays["disputed_index"] + 1}


def _evaluated(evaluation: Evaluation) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metrics and arrays, without those of each sample."""
    arrays = {name: value.numpy() for name, value in evaluation.arrays.items() if not name.startswith("sample_")}
    return finite(evaluation.metrics), arrays


def _worth(diversity: float) -> float:
    """The gain of λ: largest at 0.3, none at 0 and 0.6."""
    return max(-1.0, 1 - ((diversity - 0.3) / 0.3) ** 2)


def _number(name: str, mean: float, std: float, low: float, high: float, missing: int = 0) -> dict[str, Any]:
    numbers = {"mean": mean, "std": std, "min": low, "max": high}
    return {"name": name, "kind": "number", "missing": missing, **numbers}


def _category(name: str, *categories: tuple[str, int], total: int = 0, missing: int = 0) -> dict[str, Any]:
    listed = [list(pair) for pair in categories]
    counted = {"categories": listed, "num_categories": total or len(listed)}
    return {"name": name, "kind": "category", "missing": missing, **counted}


SCHEMAS: dict[str, dict[str, Any]] = {
    "regression": {
        "target": {"name": "price", "task": "regression", "classes": []},
        "columns": [
            _number("living_area", 142.61, 51.3, 31, 412),
            _number("lot_area", 10516.828, 9981.26, 1300, 215245, missing=12),
            _number("year_built", 1971.27, 30.2, 1872, 2010, missing=3),
            _number("distance_to_station", 0.00042, 0.00031, 0, 0.0031),
            _number("income", 5.1e7, 2.2e7, 8.1e5, 3.9e8),
            *(_number(f"sensor_{i}", 0.1 * i, 1, -3.2, 3.4) for i in range(14)),
            _category("heating", ("gas", 512), ("district", 301), ("oil", 96), ("wood", 51), missing=40),
            _category("street", *((f"{name} Street", 9 - i) for i, name in enumerate("ABCDEFGH")), total=212),
            _category("garage", ("yes", 701), ("no", 259)),
            {"name": "id", "kind": "dropped", "missing": 0, "why": "Every row has another value."},
            {"name": "pool", "kind": "dropped", "missing": 960, "why": "All values are missing."},
        ],
        "notes": [
            "Missing numbers were replaced by the mean, with a column that says so.",
            "Categories seen fewer than five times were put together.",
        ],
    },
    "classification": {
        "target": {"name": "species", "task": "classification", "classes": list(CLASSES)},
        "columns": [
            _number("sepal length (cm)", 5.84, 0.83, 4.3, 7.9),
            _number("sepal width (cm)", 3.05, 0.43, 2.0, 4.4, missing=2),
            _category("soil", ("clay", 421), ("sand", 301), ("loam", 238), missing=7),
        ],
        "notes": [],
    },
}
