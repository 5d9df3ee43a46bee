"""The problem and the callback of a search, the gain of the chosen λ, and the store of a grid search."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from torchace._files import json_digest, remove_partial, write_atomic
from torchace._statistics import mean_over_seeds, mean_over_seeds_and_samples
from torchace.lab.data import Split
from torchace.lab.schema.results import Gain
from torchace.lab.store import RunStore, RunStoreError, read_record, write_record
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.loop import CheckpointPolicy, Progress
from torchace.lab.training.members import MemberPlan

ALPHA = 0.05  # of the intervals


def measure_gain(
    split: str,
    baseline: Mapping[int, ArrayLike | None],
    chosen: Mapping[int, ArrayLike | None],
    *,
    weight: NDArray[np.float64] | None = None,
    num_choices: int = 1,
) -> Gain | None:
    """Compare the chosen λ with λ=0 by seed; None if no seed finished with both.

    Losses are `(N,)` by seed, or their means for an interval over seeds alone. With `num_choices` λ chosen from on the
    same samples, the interval is corrected (Bonferroni).
    """
    pairs = {seed: (baseline[seed], chosen[seed]) for seed in baseline}
    by_seed = {seed: np.subtract(a, b) for seed, (a, b) in pairs.items() if a is not None and b is not None}
    if not by_seed:
        return None
    differences = np.stack([np.atleast_1d(difference) for difference in by_seed.values()])  # (S, N)
    means = np.average(differences, axis=1, weights=weight)
    estimate = mean_over_seeds_and_samples(differences, weight) or mean_over_seeds(means)
    low, high = (None, None) if estimate is None else estimate.interval(ALPHA / num_choices)
    return Gain.model_construct(
        split=split,
        mean=float(means.mean()),
        low=low,
        high=high,
        seeds=tuple(by_seed),
        beyond_noise=low is not None and high is not None and (low > 0 or high < 0),
        samples=None if estimate is None else estimate.samples,
        choices=num_choices,
    )


def describe_gain(gain: Gain, metric: str, num_fresh: int) -> str:
    """Return a sentence without its subject: `lowers the cross entropy … by …: significant.`."""
    verb, sign = ("lowers", 1) if gain.mean >= 0 else ("raises", -1)
    seeds = count(len(gain.seeds), "fresh seed")
    if len(gain.seeds) < num_fresh:
        seeds += f"; {num_fresh - len(gain.seeds)} more failed"
    where = "validation samples that chose it" if gain.split == "validation" else f"{gain.split} samples"
    if gain.low is None or gain.high is None:
        (amount,) = _format(abs(gain.mean))
        reason = "too few seeds for an interval, so λ=0 is kept."
        return f"{verb} the {metric} on the {where} by {amount} ({seeds}): {reason}"
    amount, low, high = _format(abs(gain.mean), *sorted((sign * gain.low, sign * gain.high)))
    together = "" if gain.choices == 1 else f" for all {gain.choices} λ above 0 together"
    over = "seeds alone," if gain.samples is None else f"{count(gain.samples, 'sample')} and"
    finding = "significant" if gain.beyond_noise else "not significant"
    finding += "" if gain.beyond_noise and gain.mean > 0 else ", so λ=0 is kept"
    return (
        f"{verb} the {metric} on the {where} by {amount} "
        f"(95 % interval {low} to {high}{together}, over {over} {seeds}): {finding}."
    )


def _format(*values: float) -> list[str]:
    """Format numbers with common decimals: three digits for the largest."""
    largest = max(map(abs, values))
    size = math.floor(math.log10(largest)) if largest > 0 else 0
    if not -6 <= size <= 6:
        return [f"{value:.3g}" for value in values]
    return [f"{value:.{max(0, 2 - size)}f}" for value in values]


def count(number: int, noun: str) -> str:
    """Format a count: `1 seed`, `60,000 samples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


MAX_SEEDS = 500  # training seeds of a search, and as many fresh ones


@dataclass(frozen=True)
class SearchProblem:
    """A plan to tune, training samples and validation samples."""

    plan: MemberPlan
    train: Split  # (N, D) in the plan's precision, with class indices (N,) or targets (N, M)
    validation: Split  # also for early stopping
    num_outputs: int  # classes, or targets of a regression
    seed: int = 0  # problems with different seeds share no training seeds

    def check_coupled(self) -> None:
        """Refuse a plan for which λ > 0 is not defined."""
        if self.plan.batches == "separate":
            raise ValueError("Expected batches='shared' or 'exchanged' in a search for λ, but got batches='separate'.")

    def training_seeds(self, count: int, *, fresh: bool = False) -> tuple[int, ...]:
        """Return training seeds; `fresh` ones are not used for choosing."""
        start = 2 * MAX_SEEDS * self.seed + (MAX_SEEDS if fresh else 0)
        return tuple(range(start, start + count))

    def fingerprint(self, **splits: Split | None) -> dict[str, Any]:
        """Return the plan and the SHA-256 of each split, for JSON; equal fingerprints mean the same search."""
        samples: dict[str, str | None] = {}
        for name, split in {"train": self.train, "validation": self.validation, **splits}.items():
            digest = hashlib.sha256()
            for part in () if split is None else (split.x, split.y, split.weight):
                if part is not None:
                    digest.update(f"{part.dtype} {tuple(part.shape)};".encode())
                    digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            samples[name] = None if split is None else digest.hexdigest()
        plan = {**asdict(self.plan), "hidden": list(self.plan.hidden)}
        return {**plan, "num_outputs": self.num_outputs, "samples": samples}


@dataclass(frozen=True)
class SearchStage:
    """A round of candidates of a grid search, or the comparison on fresh seeds."""

    number: int  # from 1
    purpose: str  # "search" or "gain"
    diversities: tuple[float, ...]
    seeds: tuple[int, ...]


class SearchCallback:
    """No-op callback of a search or a fit; override what you need."""

    def on_search(self, stage: SearchStage, fraction: float) -> None:
        """Called while a stage of a grid search trains."""

    def on_estimate(self, seconds: float) -> None:
        """Called when a grid search knows about how long it will take."""

    def on_trial(self, number: int, value: float | None, best: float | None) -> None:
        """Called after a trial; `value` is None unless it is complete."""

    def on_step(self, progress: Progress) -> None:
        """Called while the model of a fit trains."""


def fingerprint_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe how a stored search differs from this one; None if it does not."""
    for key in sorted({*before, *now} - {"samples"}):
        if before.get(key) != now.get(key):
            return f"with {key} = {before.get(key)!r}, but now it is {now.get(key)!r}"
    for name, samples in now["samples"].items():
        if before.get("samples", {}).get(name) != samples:
            return f"on other data: its {name} samples differ"
    return None


REMEDY = "the directory to search again"


class SearchCache:
    """The directory of one grid search; the current group is saved every so many seconds."""

    def __init__(self, directory: Path, every_seconds: float = 30.0) -> None:
        self.directory, self.every_seconds = directory, every_seconds
        self._checkpoints = directory / "checkpoints"
        self._search = ""  # SHA-256 of the fingerprint

    @contextmanager
    def open(self, fingerprint: Mapping[str, Any]) -> Iterator[None]:
        """Lock the directory; refuse one of another search."""
        with RunStore(self.directory).lock():
            file = self.directory / "fingerprint.json"
            if not file.exists():
                write_record(file, {"search": fingerprint})
            difference = fingerprint_difference(read_record(file, REMEDY)["search"], fingerprint)
            if difference is not None:
                raise RunStoreError(
                    f"{self.directory} holds a search {difference}. Choose another --out, or remove the directory."
                )
            self._search = json_digest(fingerprint)
            for folder in (self.directory, self.directory / "groups"):
                remove_partial(folder)
            yield
            shutil.rmtree(self._checkpoints, ignore_errors=True)

    def group_file(self, purpose: str, runs: Sequence[tuple[float, int]]) -> Path:
        """Return the file that marks a group as finished; every search has its own."""
        digest = json_digest({"search": self._search, "runs": list(runs)})
        return self.directory / "groups" / f"{purpose}-{digest[:12]}.json"

    def read(self, file: Path) -> Tensor | None:
        """Return the losses `(R, N)` of a finished group; None if it is not finished."""
        if not file.exists():
            return None
        digest, arrays = read_record(file, REMEDY).get("arrays_sha256"), file.with_suffix(".safetensors")
        data = arrays.read_bytes() if arrays.exists() else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise RunStoreError(f"{arrays} is damaged. Choose another --out, or remove {REMEDY}.")
        return load_safetensors(data)["losses"]

    def write(self, file: Path, losses: Tensor) -> None:
        """Store a finished group: the losses, then the JSON file."""
        data = save_safetensors({"losses": losses})
        write_atomic(file.with_suffix(".safetensors"), data)
        write_record(file, {"arrays_sha256": hashlib.sha256(data).hexdigest()})
        shutil.rmtree(self._checkpoints, ignore_errors=True)

    def checkpoint_policy(self, file: Path) -> CheckpointPolicy:
        """Return the policy of a group."""
        return CheckpointPolicy(Checkpoints(self._checkpoints / file.stem), every_seconds=self.every_seconds)
