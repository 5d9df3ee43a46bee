"""The search interface: a problem, a callback, a result. `GridSearch` and `OptunaSearch` implement it."""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from torchace.lab.data import Split
from torchace.lab.training.members import MemberPlan

METRICS = {"classification": "cross_entropy", "regression": "mse"}
MAX_SEEDS = 500  # training seeds of a search; as many fresh ones follow


@dataclass(frozen=True)
class SearchProblem:
    """A plan to tune, samples to train it on and samples to score it on.

    Attributes:
        plan: Architecture and training. Where it has a patience, the validation samples also stop training.
        train: Vectors `(N, D)` of the plan's precision with class indices `(N,)` or targets `(N, M)`.
        validation: Samples that candidates are scored on.
        num_outputs: Classes, or targets of a regression.
        seed: Determines the training seeds; problems with different seeds have none in common.
    """

    plan: MemberPlan
    train: Split
    validation: Split
    num_outputs: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_split(self.train, "train")
        self.check_split(self.validation, "validation")
        if operator.index(self.seed) < 0:
            raise ValueError(f"Expected `seed` to be at least 0, but got {self.seed}.")

    def check_split(self, split: Split, name: str) -> None:
        """Refuse an empty split, samples that are not vectors, or another precision than the plan's."""
        dtype = self.plan.train_config(1).dtype
        if len(split) == 0 or split.x.ndim != 2 or split.x.dtype != dtype:
            raise ValueError(
                f"Expected `{name}` with at least one vector, `(N, D)`, of {dtype}, "
                f"but got {tuple(split.x.shape)} of {split.x.dtype}."
            )

    def check_coupled(self) -> None:
        """Refuse a plan for which λ > 0 is not defined."""
        if self.plan.batches == "separate":
            raise ValueError(
                "Expected a plan with batches='shared' or 'exchanged' to search λ for, but got batches='separate'."
            )

    def training_seeds(self, count: int, *, fresh: bool = False) -> tuple[int, ...]:
        """The seeds of `count` trainings; `fresh` ones take no part in choosing."""
        start = 2 * MAX_SEEDS * operator.index(self.seed) + (MAX_SEEDS if fresh else 0)
        return tuple(range(start, start + count))

    def fingerprint(self, **splits: Split | None) -> dict[str, Any]:
        """The plan and a SHA-256 of each split, as JSON holds them: two searches with one fingerprint are the same."""
        splits = {"train": self.train, "validation": self.validation, **splits}
        samples = {name: None if split is None else _sha256(split) for name, split in splits.items()}
        plan = {**asdict(self.plan), "hidden": list(self.plan.hidden)}
        return {**plan, "num_outputs": self.num_outputs, "samples": samples}


@dataclass(frozen=True)
class SearchStage:
    """A group of trainings of a grid search: a round of candidates, or the comparison on fresh seeds."""

    number: int  # counted from 1
    purpose: str  # "search" or "gain"
    diversities: tuple[float, ...]
    seeds: tuple[int, ...]


class SearchCallback:
    """No-op callback; override what you need."""

    def on_search(self, stage: SearchStage, fraction: float) -> None:
        """Called while a grid search trains, with the finished fraction of the stage."""

    def on_trial(self, number: int, value: float | None, best: float | None) -> None:
        """Called after a trial of a study; `value` is None unless it was completed."""


class SearchResult(Protocol):
    """The result of any search."""

    @property
    def diversity(self) -> float | None: ...

    def to_json(self) -> dict[str, Any]: ...


class Search(ABC):
    """A search for λ, alone or with other hyperparameters."""

    @abstractmethod
    def run(self, callback: SearchCallback | None = None, stop: Callable[[], bool] = lambda: False) -> SearchResult:
        """Search, or resume a search that was interrupted.

        Args:
            callback: Receives the progress.
            stop: Called before every step; if it returns True, the state is saved and `Interrupted` is raised.
        """


def fingerprint_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe how a stored search differs from this one; None if they are the same.

    Example:
        >>> fingerprint_difference({"epochs": 5, "samples": {}}, {"epochs": 6, "samples": {}})
        'with epochs = 5, but now it is 6'
    """
    for key in sorted({*before, *now} - {"samples"}):
        if before.get(key) != now.get(key):
            return f"with {key} = {before.get(key)!r}, but now it is {now.get(key)!r}"
    for name, samples in now["samples"].items():
        if before.get("samples", {}).get(name) != samples:
            return f"on other data: its {name} samples are not these"
    return None


def _sha256(split: Split) -> str:
    """A SHA-256 of a split's samples, labels and weights."""
    digest = hashlib.sha256()
    for part in (split.x, split.y, split.weight):
        if part is not None:
            digest.update(f"{part.dtype} {tuple(part.shape)};".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
