"""Grid search for λ in rounds of candidates, and the gain of the chosen λ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchace._checks import check_count, check_fraction
from torchace._statistics import mean_over_samples as estimate_mean
from torchace.lab.data import Split
from torchace.lab.schema.results import Candidate, DiversitySearch, Gain
from torchace.lab.schema.values import LARGEST
from torchace.lab.training.evaluate import CHUNK
from torchace.lab.training.members import FitScores, MemberPlan, fit_run_temperature, train_members
from torchace.lab.training.tasks import TASKS, mean_over_samples
from torchace.lab.tuning.search import (
    MAX_SEEDS,
    SearchCache,
    SearchCallback,
    SearchProblem,
    SearchStage,
    count,
    describe_gain,
    measure_gain,
)

CANDIDATES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7)
PROBE = 0.3  # tried first; the others only if its gain exceeds its standard error
TOLERANCE = 1e-9  # relative: the last digits of a score depend on the other runs of a group
RESOLUTION = 0.01  # smallest distance between two λ
MAX_RUNS = 64  # in a run group
MEMORY = 2**30  # bytes of a run group, estimated
LOSSES = {"cross_entropy": "cross entropy", "mse": "mean squared error"}

Scores = Mapping[int, float | None]  # by seed; None for a training that failed
Losses = dict[float, dict[int, Tensor | None]]  # (N,) by λ and seed; None for a training that failed


def select_diversity(scores: Mapping[float, Scores]) -> float:
    """Return the λ with the fewest failed trainings, then the lowest mean score, then the smallest λ.

    No one-standard-error rule: a larger λ is neither simpler nor cheaper. The comparison with λ=0 on fresh seeds
    corrects for selection bias.
    """

    def rank(diversity: float) -> tuple[int, float]:
        return list(scores[diversity].values()).count(None), _mean(scores[diversity])

    failed, mean = min(map(rank, scores))
    return min(d for d in scores if rank(d)[0] == failed and rank(d)[1] <= mean + abs(mean) * TOLERANCE)


def refine_candidates(tried: Iterable[float], best: float) -> list[float]:
    """Return the midpoints between the best λ and its neighbors; 0 and 1 count as neighbors."""
    grid = sorted({0.0, 1.0, *tried})
    index = grid.index(best)
    neighbors = grid[max(index - 1, 0) : index] + grid[index + 1 : index + 2]
    midpoints = {round((best + other) / 2, 6) for other in neighbors if abs(other - best) >= 2 * RESOLUTION}
    return sorted(midpoints - set(tried))


class TunedDiversity(DiversitySearch):
    """Result of a grid search: the chosen λ, all candidates, the gain over λ=0."""

    @property
    def diversity(self) -> float:
        """The chosen λ."""
        return self.chosen

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a result file."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TunedDiversity:
        """Return the result from `to_dict`'s output."""
        return cls.model_validate(content)


@dataclass(frozen=True)
class GridSearch:
    """Search λ by the ensemble's cross entropy (or squared error) on validation samples.

    Each round refines around the best λ; λ=0 is always a candidate. A best λ above 0 is compared with λ=0 on fresh
    seeds and on `test`, and chosen if its gain is significant over seeds and samples; otherwise λ=0 is.
    """

    problem: SearchProblem
    test: Split | None = None  # None: measure the gain on the validation samples
    test_name: str = "test"
    num_seeds: int = 1  # trainings of each λ
    num_fresh: int = 8  # fresh seeds of the comparison; 0 skips it
    rounds: int = 1  # at most
    candidates: Sequence[float] = CANDIDATES  # of the first round
    score_scale: float = 1.0  # factor for the scores, such as the variance of a scaled target
    cache: SearchCache | None = None  # an interrupted search resumes from it
    end_early: bool = False  # after `PROBE` or all λ, if the validation samples show no gain
    baseline: FitScores | None = None  # of a model with λ=0

    def __post_init__(self) -> None:
        check_count(self.num_seeds, "num_seeds")
        check_count(self.num_fresh, "num_fresh", least=0)
        check_count(self.rounds, "rounds")
        if max(self.num_seeds, self.num_fresh) > MAX_SEEDS:
            raise ValueError(f"Expected at most {MAX_SEEDS} seeds, but got {max(self.num_seeds, self.num_fresh)}.")
        for diversity in self.candidates:
            check_fraction(diversity, "candidates")
        self.problem.check_coupled()

    def run(self, callback: SearchCallback | None = None, stop: Callable[[], bool] = lambda: False) -> TunedDiversity:
        """Search λ, then measure its gain; if `stop`, called before every step, returns True, raise `Interrupted`."""
        problem, max_loss = self.problem, LARGEST / self.score_scale  # the limit of result files
        train = _GroupTrainer(problem, self.cache, callback or SearchCallback(), stop, max_loss)
        seeds, fresh_seeds = problem.training_seeds(self.num_seeds), problem.training_seeds(self.num_fresh, fresh=True)
        tried = sorted({0.0, *(float(diversity) + 0.0 for diversity in self.candidates)})
        tried = [0.0] if problem.plan.num_members == 1 else tried
        losses: Losses = {}
        rounds: list[tuple[float, ...]] = []
        gain = None
        if self.baseline is not None:
            runs = (len(tried) + 2 * (self.rounds - 1)) * self.num_seeds + 2 * self.num_fresh
            size = len(problem.train) / self.baseline.num_samples
            train.callback.on_estimate(self.baseline.seconds * size * runs)
        with contextlib.nullcontext() if self.cache is None else self.cache.open(problem.fingerprint(test=self.test)):
            if self.end_early and PROBE in tried:
                losses |= train(SearchStage(1, "search", (0.0, PROBE), seeds), problem.validation)
                tried = tried if self._is_promising(losses, PROBE) else [0.0, PROBE]
            while tried and len(rounds) < self.rounds:
                rounds.append(tuple(tried))
                if untried := tuple(diversity for diversity in tried if diversity not in losses):
                    losses |= train(SearchStage(len(rounds), "search", untried, seeds), problem.validation)
                scores = {
                    d: {seed: self._score(row, problem.validation) for seed, row in rows.items()}
                    for d, rows in losses.items()
                }
                best = select_diversity(scores)
                tried = refine_candidates(scores, best) if len(scores) > 1 else []
            is_too_small = self.end_early and best > 0 and not self._is_promising(losses, best)
            if compared := best > 0 and self.num_fresh > 0 and not is_too_small:
                split, name, choices = self.test, self.test_name, 1
                if split is None:
                    split, name, choices = problem.validation, "validation", len(scores) - 1
                fresh = train(SearchStage(len(rounds) + 1, "gain", (0.0, best), fresh_seeds), split)
                baseline_losses, chosen_losses = (
                    {seed: None if row is None else self.score_scale * row.numpy() for seed, row in fresh[d].items()}
                    for d in (0.0, best)
                )
                weight = None if split.weight is None else split.weight.cpu().numpy()
                gain = measure_gain(name, baseline_losses, chosen_losses, weight=weight, num_choices=choices)
        is_gain = gain is not None and gain.beyond_noise and gain.mean > 0
        return TunedDiversity.model_construct(
            chosen=0.0 if is_too_small or (compared and not is_gain) else best,
            best=best,
            task=problem.plan.task,
            metric=TASKS[problem.plan.task].score_name,
            rounds=tuple(rounds),
            candidates=tuple(Candidate.model_construct(diversity=d, scores=scores[d]) for d in sorted(scores)),
            seeds=seeds,
            fresh_seeds=fresh_seeds if compared else (),
            gain=gain,
            train_score=None if self.baseline is None else self.baseline.train,
            validation_score=None if self.baseline is None else self.baseline.validation,
            sentence=_describe(
                problem, scores, best, gain, None if is_too_small else self.num_fresh * compared, self.baseline
            ),
        )

    def _is_promising(self, losses: Losses, diversity: float) -> bool:
        """Whether the gain on the validation samples exceeds its standard error.

        If not, a comparison on other samples would hardly choose λ.
        """
        pairs = [(losses[0.0][seed], row) for seed, row in losses[diversity].items()]
        gains = [a - b for a, b in pairs if a is not None and b is not None]
        if not gains:
            return True
        gain, weight = torch.stack(gains).mean(0), self.problem.validation.weight
        if weight is not None:
            gain = gain * (weight / weight.mean()).cpu().double()
        estimate = estimate_mean(gain.numpy())
        return estimate is None or estimate.mean > estimate.error

    def _score(self, losses: Tensor | None, split: Split) -> float | None:
        weight = None if split.weight is None else split.weight.cpu().double()
        return None if losses is None else self.score_scale * float(mean_over_samples(losses[None], weight))


@dataclass(frozen=True)
class _GroupTrainer:
    """Train the runs of a stage in groups that fit into memory, or read them from the cache."""

    problem: SearchProblem
    cache: SearchCache | None
    callback: SearchCallback
    stop: Callable[[], bool]
    max_loss: float  # above it, a training counts as failed

    def __call__(self, stage: SearchStage, split: Split) -> Losses:
        # all λ of a seed in one group: they share batches
        runs = [(diversity, seed) for seed in stage.seeds for diversity in stage.diversities]
        rows: list[Tensor | None] = []
        for places in np.array_split(np.arange(len(runs)), math.ceil(len(runs) / self._max_runs())):
            group = [runs[place] for place in places]
            losses = self._train(stage, group, split, start=len(rows) / len(runs), share=len(group) / len(runs))
            rows += [row if bool((row.abs() < self.max_loss).all()) else None for row in losses]
        self.callback.on_search(stage, 1.0)
        by_run = dict(zip(runs, rows, strict=True))
        return {d: {seed: by_run[d, seed] for seed in stage.seeds} for d in stage.diversities}

    def _train(
        self,
        stage: SearchStage,
        group: Sequence[tuple[float, int]],
        split: Split,
        start: float,  # of the stage, as a fraction
        share: float,
    ) -> Tensor:
        """Return losses `(R, N)` in float64; NaN for failed runs."""
        problem, cache = self.problem, self.cache
        file = None if cache is None else cache.group_file(stage.purpose, group)
        if cache is not None and file is not None and (finished := cache.read(file)) is not None:
            return finished
        trained = train_members(
            problem.plan,
            problem.train,
            problem.num_outputs,
            diversities=[diversity for diversity, _ in group],
            seeds=[seed for _, seed in group],
            validation=problem.validation,
            checkpoint_policy=None if cache is None or file is None else cache.checkpoint_policy(file),
            on_progress=lambda p: self.callback.on_search(stage, start + share * p.step / p.steps),
            stop=self.stop,
        )
        temperature = None
        if problem.plan.has_temperature:  # as the model will have one
            temperature = [fit_run_temperature(trained, problem.validation, run=run) for run in range(len(group))]
        losses = trained.losses(split, temperature).double().cpu()
        losses[sorted(trained.fitted.failures)] = torch.nan
        if cache is not None and file is not None:
            cache.write(file, losses)
        return losses

    def _max_runs(self) -> int:
        plan = self.problem.plan
        widths = [self.problem.train.x.shape[1], *plan.hidden, self.problem.num_outputs]
        weights = sum((i + 1) * o for i, o in pairwise(widths))
        rows = max(plan.batch_size, min(CHUNK, len(self.problem.validation)))
        # weights, gradients, two moments and the best epoch's weights; activations and their gradients; inputs
        numbers = plan.num_members * (5 * weights + 2 * rows * sum(widths[1:])) + plan.batch_size * widths[0]
        return max(1, min(MAX_RUNS, MEMORY // (plan.train_config(1).dtype.itemsize * numbers)))


def _mean(scores: Scores) -> float:
    found = [score for score in scores.values() if score is not None]
    return fmean(found) if found else math.inf


def _describe(
    problem: SearchProblem,
    scores: Mapping[float, Scores],
    best: float,
    gain: Gain | None,
    num_fresh: int | None,  # None: the gain on the validation samples is below its standard error
    baseline: FitScores | None,
) -> str:
    """Return the reason for the choice, and how far training and validation scores lie apart at λ=0."""
    noun = LOSSES[TASKS[problem.plan.task].score_name]
    if problem.plan.num_members == 1:
        sentence = "One member cannot differ from others: λ=0."
    elif all(score is None for score in scores[best].values()):
        sentence = "Every training failed (NaN or Inf), so λ=0. Lower the learning rate."
    elif best == 0:
        sentence = (
            f"No diversity helped: of {len(scores)} values of λ, 0 has the lowest {noun} on the validation samples "
            f"({count(len(scores[0.0]), 'seed')})."
        )
    elif num_fresh is None:
        sentence = (
            f"λ={best:g} has the lowest {noun} on the validation samples, but its gain over λ=0 is below its "
            "standard error, so λ=0 is kept."
        )
    elif gain is None:
        why = "its gain was not measured on fresh seeds"
        if num_fresh:
            why = "its trainings with fresh seeds failed, so λ=0 is kept"
        sentence = f"λ={best:g} has the lowest {noun} on the validation samples; {why}."
    else:
        sentence = f"λ={best:g} {describe_gain(gain, noun, num_fresh)}"
    return sentence if baseline is None else f"{sentence} {describe_scores(problem.plan, baseline)}"


def describe_scores(plan: MemberPlan, scores: FitScores) -> str:
    """Say how far training and validation losses lie apart at λ=0."""
    both = f"{scores.train:.3g} on the training and {scores.validation:.3g} on the validation samples"
    apart = " before the temperature" if plan.has_temperature else ""
    return f"At λ=0 the {LOSSES[TASKS[plan.task].score_name]} is {both}{apart}."
