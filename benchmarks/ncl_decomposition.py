"""Bias, variance and covariance of regression ensembles trained with NCL, with and without a shared trunk.

    python benchmarks/ncl_decomposition.py

scikit-learn's diabetes data with a fixed test set; trainings differ in their seed and their training samples. Both λ of
a training share both, so that differences are paired. Intervals are 95 % bootstrap percentiles over trainings. Writes
docs/results/ncl_decomposition.json and .md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import measure
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from torchace.functional import bias_variance_covariance, negative_correlation
from torchace.nn import SMOC, StackedEnsemble
from torchace.nn.base import EnsembleModule

DIVERSITIES = (0.0, 0.5)
TERMS = ("bias²", "variance", "covariance", "error")
MEMBERS, WIDTH, TEST_SAMPLES, TRAIN_SAMPLES = 8, 8, 142, 200
RATE = 0.01
# When predictions are taken: where the mean error of λ = 0 on the pool's left-out samples was least (seeds 100 to 109,
# which take no further part; of 25, 50, 75, 100, 150, 200, 300, 400 and 600 steps), and long after it.
STEPS = {"separate regressors": (75, 600), "shared trunk": (50, 600)}


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets of the training pool and of the test set, standardized by the pool."""
    values, target = (torch.as_tensor(part, dtype=torch.float64) for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    x, y = values[order].float(), target[order].float()
    pool = slice(TEST_SAMPLES, None)
    x = (x - x[pool].mean(0)) / x[pool].std(0)
    y = ((y - y[pool].mean()) / y[pool].std())[:, None]
    return x[pool], y[pool], x[:TEST_SAMPLES], y[:TEST_SAMPLES]


def make_separate() -> EnsembleModule:
    members = [nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)) for _ in range(MEMBERS)]
    return StackedEnsemble(members, link="identity")


def make_shared() -> EnsembleModule:
    """One trunk with linear regressors, as in D-ConvNet, which shares all but the last layer."""
    width = 2 * WIDTH
    return SMOC(nn.Sequential(nn.Linear(10, width), nn.Tanh()), width, 1, num_members=MEMBERS, link="identity")


KINDS = {"separate regressors": make_separate, "shared trunk": make_shared}


def train(kind: str, diversity: float, seed: int, steps: tuple[int, ...]) -> Tensor:
    """Test predictions `(S, K, N, 1)` of one training, after each number of steps."""
    x, y, test_x, _ = load_data()
    torch.manual_seed(seed)
    own = torch.randperm(len(x))[:TRAIN_SAMPLES]
    ensemble = KINDS[kind]()
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=RATE, fused=True)
    x, y = x[own], y[own]
    predictions = []
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        negative_correlation(ensemble(x), y, diversity).backward()
        optimizer.step()
        if step in steps:
            predictions.append(ensemble(test_x).detach())
    return torch.stack(predictions)


def error_terms(predictions: Tensor, target: Tensor) -> Tensor:
    """Bias², variance, covariance and their sum."""
    parts = bias_variance_covariance(predictions, target)
    return torch.stack([*parts, parts.error])


def interval(values: Tensor) -> list[list[float]]:
    """95 % interval of each column of values `(B, 4)`."""
    return torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype), dim=0).T.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", type=int, default=20)
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap")
    parser.add_argument("--quick", action="store_true", help="few short trainings, nothing written")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/results/ncl_decomposition.json")
    options = parser.parse_args()
    trainings, resamples = (4, 50) if options.quick else (options.trainings, options.resamples)

    torch.set_num_threads(1)  # the networks are tiny
    started = time.perf_counter()
    _, _, _, target = load_data()
    target = target.double()
    g = torch.Generator().manual_seed(0)
    draws = torch.randint(trainings, (resamples, trainings), generator=g)  # the same for all: differences are paired
    settings = {
        "data": "scikit-learn diabetes, target in units of its standard deviation",
        "members": MEMBERS,
        "width": {"separate regressors": WIDTH, "shared trunk": 2 * WIDTH},
        "activation": "tanh",
        "train_samples": f"{TRAIN_SAMPLES} of {442 - TEST_SAMPLES}, drawn anew for each training",
        "test_samples": TEST_SAMPLES,
        "optimizer": f"Adam, learning rate {RATE}, full batches",
        "steps": "the best of λ = 0 on left-out samples of the pool (other seeds), and 600",
        "trainings": trainings,
        "seeds": list(range(trainings)),
        "bootstrap_resamples": resamples,
    }
    results: dict[str, Any] = {"settings": settings, "environment": measure.environment(), "results": []}
    results["environment"]["scikit-learn"] = importlib.metadata.version("scikit-learn")
    rows: list[list[str]] = []
    for kind in KINDS:
        steps = (10, 20) if options.quick else STEPS[kind]
        trained = {
            diversity: torch.stack([train(kind, diversity, seed, steps) for seed in range(trainings)]).double()
            for diversity in DIVERSITIES
        }
        for i, count in enumerate(steps):
            values, resampled = {}, {}
            label = f"{kind}, {count} steps"
            for diversity, predictions in ((diversity, every[:, i]) for diversity, every in trained.items()):
                values[diversity] = error_terms(predictions, target)
                resampled[diversity] = torch.stack([error_terms(predictions[draw], target) for draw in draws])
                add_row(results, rows, label, f"λ = {diversity:g}", values[diversity], resampled[diversity])
                error = (predictions.mean(1) - target).square().mean()
                torch.testing.assert_close(values[diversity][3], error)  # the terms add up
            first, last = DIVERSITIES
            difference = values[last] - values[first], resampled[last] - resampled[first]
            add_row(results, rows, label, f"λ = {last:g} minus λ = {first:g}", *difference)
    text = measure.table(["ensemble", "", *TERMS], rows)
    print(text)
    measure.finish(results, None, started)
    if not options.quick:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        options.out.with_suffix(".md").write_text(make_page(text, results))
        print(f"written to {options.out} and {options.out.with_suffix('.md').name}")


def add_row(
    results: dict[str, Any], rows: list[list[str]], kind: str, what: str, values: Tensor, resampled: Tensor
) -> None:
    intervals = interval(resampled)
    figures = dict(zip(TERMS, values.tolist(), strict=True))
    bounds = dict(zip(TERMS, intervals, strict=True))
    results["results"].append({"ensemble": kind, "what": what, "terms": figures, "interval_95": bounds})
    sign = "+" if "minus" in what else ""
    cells = [
        f"{v:{sign}.4f} ({a:{sign}.4f} to {b:{sign}.4f})" for v, (a, b) in zip(values.tolist(), intervals, strict=True)
    ]
    rows.append([kind, what, *(cell.replace("-", "−") for cell in cells)])


def state_finding(results: dict[str, Any]) -> str:
    """Say for which ensembles the interval of the error's difference excludes zero."""
    bounds = {row["ensemble"]: row["interval_95"]["error"] for row in results["results"] if "minus" in row["what"]}
    lower, higher = [k for k, (_, high) in bounds.items() if high < 0], [k for k, (low, _) in bounds.items() if low > 0]
    text = f"λ={DIVERSITIES[1]:g} does not lower the error significantly"
    if lower:
        text = f"λ={DIVERSITIES[1]:g} lowers the error of {', '.join(lower)}"
    if higher:
        text += f"; it raises that of {' and '.join(name.replace(', ', ' after ') for name in higher)}"
    return f"**{text}.**"


def make_page(text: str, results: dict[str, Any]) -> str:
    settings, where = results["settings"], results["environment"]
    trainings, samples = settings["trainings"], settings["train_samples"]
    versions = f"Python {where['python']}, torch {where['torch']}, scikit-learn {where['scikit-learn']}"
    return f"""# Bias, variance and covariance of NCL ensembles

{state_finding(results)}

{text}

Mean squared error on the test set and its terms, in units of the target's variance. Brackets: 95 % bootstrap intervals
over the {trainings} trainings, paired by initial weights and samples. With T trainings, variance and covariance are
biased by (T-1)/T, and bias² is larger by their sum divided by T. So are bootstrap samples: a value may lie near the
upper end.

- {settings["data"]}; {TEST_SAMPLES} fixed test samples; each training sees {samples}
- {MEMBERS} members with one hidden tanh layer: {WIDTH} units each, or linear heads on one trunk of {2 * WIDTH} units
- {settings["optimizer"]}; steps: {settings["steps"]}; seeds 0 to {trainings - 1}
- {where["cpu"]}, {where["cores"]} cores, {where["threads"]} thread; {versions}; commit {where["commit"]}
- written by `benchmarks/ncl_decomposition.py`
"""


if __name__ == "__main__":
    main()
