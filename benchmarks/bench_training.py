"""Train ten members with `ACEClassifier`, TorchEnsemble, torch-uncertainty, bagging and a plain loop. CPU.

    python benchmarks/bench_training.py --out docs/results/bench_training.json

Ten networks of one hidden ReLU layer on digits and 10,000 images of MNIST, with the same scaled inputs, epochs, batch
size and Adam. Each library is used as documented; the plain loop trains one member after another on slices of shuffled
tensors; scikit-learn's bagging, on digits alone, trains on all samples with one job per thread. Target: at least 3
times faster than the other libraries at equal accuracy within noise. CPU time is reported too: on a busy machine it is
steadier than wall-clock time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import measure
import torch
import torch.nn.functional as F
from sklearn.ensemble import BaggingClassifier
from sklearn.neural_network import MLPClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchensemble import VotingClassifier
from torchensemble.utils.logging import set_logger

from torchace.functional import ensemble_log_probs
from torchace.lab.data import DataError, load
from torchace.models import mlp
from torchace.sklearn import ACEClassifier

MEMBERS, BATCH, TARGET = 10, 128, 3.0
NAMES = ["ACEClassifier λ=0", "ACEClassifier λ=0.5", "plain loop", "TorchEnsemble"]


@dataclass(frozen=True)
class Case:
    """A network and its data."""

    data: str
    inputs: int
    width: int
    epochs: int
    rate: float
    limit: int | None = None

    @property
    def title(self) -> str:
        return f"{self.data}, {self.inputs}-{self.width}-10, {self.epochs} epochs"


CASES = [Case("digits", 64, 64, 20, 3e-3), Case("mnist", 784, 128, 3, 1e-3, limit=10_000)]


@cache
def load_data(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training and test vectors and labels; columns are standardized, as `ACEClassifier` does itself."""
    found = load(case.data)
    train = found.train.take(slice(case.limit))
    x, test_x = (part.x.flatten(1).float() for part in (train, found.test))
    mean, std = x.mean(0), x.std(0, correction=0)
    std[std == 0] = 1.0  # a pixel that is the same in all images
    return (x - mean) / std, train.y, (test_x - mean) / std, found.test.y


class Network(nn.Module):
    """The network as a class, which TorchEnsemble requires."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = mlp(case.inputs, case.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train_torchace(case: Case, diversity: float, seed: int) -> Any:
    x, y, *_ = load_data(case)
    classifier = ACEClassifier(
        MEMBERS, hidden=case.width, diversity=diversity, epochs=case.epochs, batch_size=BATCH, learning_rate=case.rate,
        weight_decay=0.0, schedule="constant", encoding="standard", early_stopping=False, random_state=seed,
    )  # fmt: skip
    return classifier.fit(x.numpy(), y.numpy())


def train_plain_loop(case: Case, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    x, y, *_ = load_data(case)
    members = []
    for _ in range(MEMBERS):
        member = Network(case)
        optimizer = torch.optim.Adam(member.parameters(), lr=case.rate)
        for _ in range(case.epochs):
            for part in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(member(x[part]), y[part]).backward()
                optimizer.step()
        members.append(member)
    return members


def train_bagging(case: Case, seed: int) -> Any:
    x, y, *_ = load_data(case)
    member = MLPClassifier(
        (case.width,), alpha=0.0, batch_size=BATCH, learning_rate_init=case.rate, max_iter=case.epochs, tol=0.0,
        n_iter_no_change=case.epochs + 1,
    )  # fmt: skip
    bagging = BaggingClassifier(member, MEMBERS, bootstrap=False, n_jobs=torch.get_num_threads(), random_state=seed)
    return bagging.fit(x.numpy(), y.numpy())


def train_torchensemble(case: Case, seed: int) -> Any:
    torch.manual_seed(seed)
    voting = VotingClassifier(estimator=Network, estimator_args={"case": case}, n_estimators=MEMBERS, cuda=False)
    voting.set_optimizer("Adam", lr=case.rate)
    voting.fit(_loader(case), epochs=case.epochs, log_interval=10**9, save_model=False)
    return voting


def train_torch_uncertainty(case: Case, seed: int) -> nn.Module:
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.methods import deep_ensembles
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    torch.manual_seed(seed)
    ensemble = deep_ensembles([Network(case) for _ in range(MEMBERS)])
    routine = ClassificationRoutine(
        ensemble,
        num_classes=10,
        loss=nn.CrossEntropyLoss(),  # a mean over members too: Adam is invariant to the factor of ten
        is_ensemble=True,
        format_batch_fn=RepeatTarget(MEMBERS),
        optim_recipe=torch.optim.Adam(ensemble.parameters(), lr=case.rate),
    )
    trainer = TUTrainer(
        accelerator="cpu", max_epochs=case.epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(routine, train_dataloaders=_loader(case))
    return ensemble


def _loader(case: Case) -> DataLoader[Any]:
    x, y, *_ = load_data(case)
    return DataLoader(TensorDataset(x, y), BATCH, shuffle=True)


def train_model(case: Case, name: str, seed: int = 0) -> Any:
    with _silence():
        if name.startswith("ACEClassifier"):
            return train_torchace(case, float(name.split("λ=")[1]), seed)
        how = {"plain loop": train_plain_loop, "TorchEnsemble": train_torchensemble, "bagging": train_bagging}
        return how.get(name, train_torch_uncertainty)(case, seed)


@torch.no_grad()
def accuracy(case: Case, name: str, model: Any) -> float:
    """Test accuracy of the members' mean probabilities."""
    _, _, x, y = load_data(case)
    if name.startswith("ACEClassifier") or name == "bagging":
        return float(model.score(x.numpy(), y.numpy()))
    if name == "torch-uncertainty":
        logits = model.eval()(x).unflatten(0, (MEMBERS, -1))
    else:
        members = model if name == "plain loop" else list(model.estimators_)
        logits = torch.stack([member.eval()(x) for member in members])
    return float((ensemble_log_probs(logits).argmax(1) == y).float().mean())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silence the output and warnings of other libraries."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_error() -> str | None:
    """Return the error of importing torch-uncertainty, or None."""
    try:
        import torch_uncertainty.routines  # noqa: F401
    except Exception as error:  # it imports a dozen packages, each of which may fail in its own way
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    options = measure.make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    with _silence():
        set_logger("bench", use_tb_logger=False)
        failure = import_error()
    cases = CASES[:1] if options.quick else CASES
    rounds, seeds = (2, 1) if options.quick else (options.rounds or 5, 3)
    started = time.perf_counter()
    results: dict[str, Any] = {
        "environment": measure.environment(),
        "target": TARGET,
        "torch_uncertainty": failure or "used",
        "cases": {},
    }
    for case in cases:
        try:
            load_data(case)
        except DataError as error:  # MNIST is missing and cannot be downloaded
            print(f"Left out: {case.title}. {error}\n")
            continue
        names = [*NAMES, *["torch-uncertainty"] * (failure is None), *["bagging"] * (case.data == "digits")]
        reached: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for name in names * seeds:
            begun = time.process_time()
            model = train_model(case, name, len(cpu[name]))
            cpu[name].append(time.process_time() - begun)
            reached[name].append(accuracy(case, name, model))
        seconds = measure.timings({name: lambda n=name, c=case: train_model(c, n) for name in names}, rounds=rounds)
        compared = measure.compare(seconds, names[0])
        rows = [
            [
                name,
                measure.milliseconds(compared[name]["seconds"]),
                measure.factor(compared[name][f"times_{names[0]}"]),
                f"{median(cpu[name]) / median(cpu[names[0]]):.2f}",
                f"{sum(reached[name]) / seeds:.4f}",
            ]
            for name in names
        ]
        print(measure.table([case.title, "ms", f"times {names[0]}", "in CPU time", "test accuracy"], rows), "\n")
        results["cases"][case.title] = {
            name: {**compared[name], "cpu_seconds": cpu[name], "accuracy": reached[name]} for name in names
        }
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
