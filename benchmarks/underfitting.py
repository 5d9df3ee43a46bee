"""Where λ pays: collect the runs of `torchace run underfitting` in one small file.

    python benchmarks/underfitting.py RUN_DIRECTORY ... FILE.json

The file has, for every cell of the grid, the losses by λ and seed, and the gain of the λ chosen on validation data;
with several run directories, such contents by data set.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import measure

from torchace.lab.report import read_results
from torchace.lab.report.findings import arm_gains
from torchace.lab.report.results import Results

METRICS = {
    "test": ("test", "{loss}"),
    "accuracy": ("test", "accuracy"),
    "validation": ("validation", "{loss}"),
    "member_validation": ("validation", "member_{loss}"),
    "disagreement": ("validation", "disagreement"),
}


def collect_runs(results: Results) -> dict[str, Any]:
    """Return the losses of every cell by λ and seed, and its gain."""
    experiment = results.experiment
    diversities, seeds = sorted({run.diversity for run in results.runs}), list(experiment.seeds)
    cells, loss = [], results.task.loss
    for gain in arm_gains(results):
        runs = {(run.diversity, run.seed): run for d in diversities for run in results.finished(gain.arm, d)}
        cell: dict[str, Any] = {
            **gain.arm.cell,
            "parameters": gain.arm.parameters,
            "n": results.arm_data(gain.arm).train,
        }
        for name, (split, metric) in METRICS.items():
            if loss == "cross_entropy" or "{loss}" in metric:
                scores = {key: run.scores[split][metric.format(loss=loss)] for key, run in runs.items()}
                cell[name] = [[_round(scores[d, s]) for s in seeds] for d in diversities]
        cell["train"] = [[_round(_train_loss(runs[d, s], loss)) for s in seeds] for d in diversities]
        if any(run.best_epoch for run in runs.values()):
            cell["best_epoch"] = [[runs[d, s].best_epoch for s in seeds] for d in diversities]
        d = gain.difference
        low, high = (d and d.joint_interval) or (None, None)
        cell |= {"chosen": gain.diversity, "gain": [d and _round(d.mean), _round(low), _round(high)]}
        cells.append(cell | {"relative": _round(gain.relative), "verdict": gain.verdict})
    kept = {key: getattr(experiment, key) for key in ("name", "hardware", "versions", "started", "seconds", "config")}
    if file := (data := kept["config"]["data"]).get("file"):  # its name alone
        kept["config"] = {**kept["config"], "data": {**data, "file": Path(file).name}}
    kept["commit"] = measure.commit()
    return {"data": experiment.data.name, **kept, "diversities": diversities, "seeds": seeds, "cells": cells}


def _train_loss(run: Any, loss: str) -> float:
    """Training loss in the epoch of the weights."""
    return run.history[(run.best_epoch or len(run.history)) - 1][f"train_{loss}"]


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    contents = [collect_runs(read_results(directory)) for directory in given.directories]
    named = {content["data"].removesuffix(".csv"): content for content in contents}
    given.file.write_text(json.dumps(named if len(named) > 1 else contents[0], separators=(",", ":")) + "\n")
    print(f"{given.file}: {sum(len(content['cells']) for content in contents)} cells")


if __name__ == "__main__":
    main()
