"""`ACEClassifier` against scikit-learn's bagging and TorchEnsemble's voting: ten members on digits. CPU.

    python benchmarks/bench_estimators.py --out docs/results/bench_estimators.json

All train ten networks (64-64-10, ReLU) on the same scaled inputs, with the same epochs, batch size and Adam. Bagging
trains on all samples (`bootstrap=False`), with one job per thread. Target: at least 3 times faster than both at equal
accuracy within noise. CPU time is reported too: on a busy machine it is steadier than wall-clock time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from functools import cache
from statistics import median
from typing import Any

import measure
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset
from torchensemble import VotingClassifier
from torchensemble.utils.logging import set_logger

from torchace.models import mlp
from torchace.sklearn import ACEClassifier

MEMBERS, WIDTH, BATCH, RATE, TARGET = 10, 64, 128, 3e-3, 3.0


class Network(torch.nn.Module):
    """The network as a class, which TorchEnsemble requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(64, WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@cache
def load_data() -> tuple[Any, ...]:
    X, y = load_digits(return_X_y=True)
    parts = train_test_split(X.astype(np.float32), y, test_size=0.25, random_state=0, stratify=y)
    scaler = StandardScaler().fit(parts[0])
    return scaler.transform(parts[0]), scaler.transform(parts[1]), parts[2], parts[3]


def train_model(contender: str, epochs: int, seed: int = 0) -> Any:
    train_x, _, train_y, _ = load_data()
    if contender.startswith("ACEClassifier"):
        diversity = float(contender.split("λ=")[1])
        model = ACEClassifier(
            MEMBERS, hidden=WIDTH, diversity=diversity, epochs=epochs, batch_size=BATCH, learning_rate=RATE,
            weight_decay=0.0, schedule="constant", random_state=seed,
        )  # fmt: skip
        return model.fit(train_x, train_y)
    if contender == "BaggingClassifier":
        member = MLPClassifier(
            (WIDTH,), alpha=0.0, batch_size=BATCH, learning_rate_init=RATE, max_iter=epochs, tol=0.0,
            n_iter_no_change=epochs + 1,
        )  # fmt: skip
        jobs = torch.get_num_threads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            bagging = BaggingClassifier(member, MEMBERS, bootstrap=False, n_jobs=jobs, random_state=seed)
            return bagging.fit(train_x, train_y)
    torch.manual_seed(seed)
    voting = VotingClassifier(estimator=Network, n_estimators=MEMBERS, cuda=False, n_jobs=1)
    voting.set_optimizer("Adam", lr=RATE)
    tensors = TensorDataset(torch.from_numpy(train_x), torch.from_numpy(train_y))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # it reports every epoch
        voting.fit(DataLoader(tensors, BATCH, shuffle=True), epochs=epochs, log_interval=10**9, save_model=False)
    return voting


def accuracy(contender: str, model: Any) -> float:
    _, test_x, _, test_y = load_data()
    if contender == "TorchEnsemble":
        loader = DataLoader(TensorDataset(torch.from_numpy(test_x), torch.from_numpy(test_y)), 512)
        return float(model.evaluate(loader)) / 100
    return float(model.score(test_x, test_y))


def main() -> None:
    options = measure.make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    set_logger("bench", use_tb_logger=False).setLevel(logging.CRITICAL)
    logging.disable(logging.INFO)
    logging.getLogger("bench").handlers.clear()
    epochs, rounds = (2, 2) if options.quick else (20, options.rounds or 7)
    names = ["ACEClassifier λ=0.5", "ACEClassifier λ=0", "BaggingClassifier", "TorchEnsemble"]
    started = time.perf_counter()
    environment = measure.environment()
    reached: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for name in names * (1 if options.quick else 5):
        begun = time.process_time()
        model = train_model(name, epochs, len(cpu[name]))
        cpu[name].append(time.process_time() - begun)
        reached[name].append(accuracy(name, model))
    seconds = measure.timings({name: lambda n=name: train_model(n, epochs) for name in names}, rounds=rounds)
    compared = measure.compare(seconds, names[0])
    rows = [
        [
            name,
            measure.milliseconds(compared[name]["seconds"]),
            measure.factor(compared[name][f"times_{names[0]}"]),
            f"{median(cpu[name]) / median(cpu[names[0]]):.2f}",
            f"{np.mean(reached[name]):.4f}",
        ]
        for name in names
    ]
    print(measure.table(["training 10 members", "ms", "times ACEClassifier", "in CPU time", "test accuracy"], rows))
    results = {
        "environment": environment,
        "epochs": epochs,
        "target": TARGET,
        "contenders": {name: {**compared[name], "cpu_seconds": cpu[name], "accuracy": reached[name]} for name in names},
    }
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
