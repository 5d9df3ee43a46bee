"""λ found on held-out samples: rounds of candidates, each trained as one cohort, and what the best is worth."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchace._checks import check_count, check_fraction
from torchace.lab.data import Split
from torchace.lab.training.early_stopping import CHUNK
from torchace.lab.training.loop import Progress
from torchace.lab.training.members import MemberPlan, Trained, train_members
from torchace.lab.tuning.gain import Gain
from torchace.lab.tuning.search_cache import Trials, cohort_id, fingerprint

METRICS = {"classification": "cross_entropy", "regression": "mse"}
NOUNS = {"cross_entropy": "cross entropy", "mse": "mean squared error"}
CANDIDATES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
ROUNDING = 1e-9  # means closer than this, relatively, are equal: who else is in a cohort changes the last digits
RESOLUTION = 0.01  # λ closer than this are not told apart
COHORT = 64  # runs that are trained together, at most
MEMORY = 2**30  # bytes they may take, about
SEEDS = 500  # of a search; as many fresh ones follow

T = TypeVar("T")
Array = NDArray[np.float64]
V = TypeVar("V", float, Array)
Watch = Callable[[Progress], None]
Scores = Mapping[int, float | None]  # by seed; None for a training that failed


# -- choosing: pure functions of scores -------------------------------------------------------------------------------


def best_diversity(scores: Mapping[float, Scores]) -> float:
    """The λ with the fewest failed trainings, then the lowest mean over the seeds; the smaller of equals.

    Plainly the best mean, not the smallest λ within a standard error of it. That rule buys simplicity with accuracy,
    and a larger λ is no less simple and costs no more; all λ have the same seeds and samples, so the best mean has the
    lowest expected error. (Tried on four data sets of scikit-learn's, with wide and narrow members, it lost 0.0003 to
    the other rule at most and won up to 0.0046, on samples of their own.) That the best of several is flattered by
    having been chosen is put right afterwards, by a comparison with λ=0 on fresh seeds.

    Example:
        >>> best_diversity({0.0: {1: 0.5, 2: 0.7}, 0.3: {1: 0.5, 2: 0.6}, 0.5: {1: 0.1, 2: None}})
        0.3
    """

    def rank(diversity: float) -> tuple[int, float]:
        finished = [score for score in scores[diversity].values() if score is not None]
        return len(scores[diversity]) - len(finished), fmean(finished) if finished else math.inf

    failed, mean = min(map(rank, scores))
    return min(d for d in scores if rank(d)[0] == failed and rank(d)[1] <= mean + abs(mean) * ROUNDING)


def refined(tried: Iterable[float], best: float) -> list[float]:
    """The λ to try next: halfway from the best to its neighbours on either side, or to the end of [0, 1].

    Example:
        >>> refined([0.0, 0.1, 0.3, 0.5], 0.3), refined([0.0, 0.5, 0.9], 0.9), refined([0.0, 0.01], 0.0)
        ([0.2, 0.4], [0.7, 0.95], [])
    """
    known = {0.0, 1.0, *tried}
    below, above = [v for v in known if v < best], [v for v in known if v > best]
    neighbours = ([max(below)] if below else []) + ([min(above)] if above else [])
    halfway = [round((best + neighbour) / 2, 6) for neighbour in neighbours if abs(neighbour - best) >= 2 * RESOLUTION]
    return sorted(set(halfway) - set(tried))


# -- what is found ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A λ that was tried, and its held-out score by seed: None where the training failed."""

    diversity: float
    scores: Scores

    @property
    def failed(self) -> tuple[int, ...]:
        """The seeds whose training failed."""
        return tuple(seed for seed, score in self.scores.items() if score is None)


@dataclass(frozen=True)
class TunedDiversity:
    """The λ that was found, all that were tried, and what it is worth."""

    diversity: float
    task: str
    rounds: tuple[tuple[float, ...], ...]  # the λ of each, in ascending order
    candidates: tuple[Candidate, ...]  # in ascending λ
    seeds: tuple[int, ...]
    fresh_seeds: tuple[int, ...]  # none where there was nothing to compare
    gain: Gain | None
    sentence: str

    @property
    def metric(self) -> str:
        """What λ was chosen by; lower is better."""
        return METRICS[self.task]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON holds it: what a report reads."""
        gain = None if self.gain is None else {**vars(self.gain), "seeds": list(self.gain.seeds)}
        return {
            "chosen": self.diversity,
            "task": self.task,
            "metric": self.metric,
            "split": "validation",
            "rounds": [list(tried) for tried in self.rounds],
            "candidates": [
                {"diversity": c.diversity, "scores": {str(seed): score for seed, score in c.scores.items()}}
                for c in self.candidates
            ],
            "seeds": list(self.seeds),
            "fresh_seeds": list(self.fresh_seeds),
            "gain": gain,
            "sentence": self.sentence,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TunedDiversity:
        """What `to_json` gave."""
        gain = content["gain"]
        return cls(
            diversity=content["chosen"],
            task=content["task"],
            rounds=tuple(tuple(tried) for tried in content["rounds"]),
            candidates=tuple(
                Candidate(c["diversity"], {int(seed): score for seed, score in c["scores"].items()})
                for c in content["candidates"]
            ),
            seeds=tuple(content["seeds"]),
            fresh_seeds=tuple(content["fresh_seeds"]),
            gain=None if gain is None else Gain(**{**gain, "seeds": tuple(gain["seeds"])}),
            sentence=content["sentence"],
        )


@dataclass(frozen=True)
class Stage:
    """What is being trained: a round of candidates, or the comparison on fresh seeds at the end."""

    number: int  # counted from 1
    total: int  # at most
    purpose: str  # "search" or "gain"
    diversities: tuple[float, ...]
    seeds: tuple[int, ...]


# -- finding it -------------------------------------------------------------------------------------------------------


def tune_diversity(
    plan: MemberPlan,
    train: Split,
    validation: Split,
    num_outputs: int,
    *,
    check: Split | None = None,
    check_name: str = "test",
    seed: int = 0,
    num_seeds: int = 3,
    num_fresh: int = 5,
    rounds: int = 2,
    candidates: Sequence[float] = CANDIDATES,
    score_scale: float = 1.0,
    store: Trials | None = None,
    watch: Callable[[Stage, float], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TunedDiversity:
    """Finds λ by the ensemble's cross entropy (or squared error) on held-out samples, and says what it is worth.

    Every round trains all its λ with all seeds as one cohort; the next one refines around the best. λ=0 always takes
    part. A λ above 0 that was chosen is trained once more beside λ=0, with fresh seeds, and compared seed by seed on
    samples that took no part in choosing. Whatever was chosen stays chosen: were the comparison allowed to change it,
    it would be part of the choosing.

    A plan with `patience` stops early by the validation samples too, so they are used twice; `check` is not.

    Args:
        plan: What is trained, and how.
        train: Vectors `(N, D)` of the plan's precision, with class indices `(N,)` or targets `(N, M)`.
        validation: What λ is chosen on.
        num_outputs: Classes, or targets of a regression.
        check: What the gain is measured on; without it the validation samples, and the answer says so.
        check_name: What `check` is called in the answer.
        seed: Decides all seeds of the search: other seeds share none with it.
        num_seeds: Trainings of each λ.
        num_fresh: Trainings of the chosen λ and of λ=0 for the comparison; 0 leaves it out.
        rounds: How many rounds of candidates, the first included.
        candidates: The λ of the first round.
        score_scale: What scores are multiplied by: the squared deviation by which a regression's targets were divided.
        store: Where finished cohorts are kept. A search that was killed goes on from there, to the same answer.
        watch: Is told what share of a stage is done.
        stop: Is asked before every step; when it says yes, the state is saved and `Interrupted` raised.

    Example:
        >>> x = torch.randn(96, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> split = Split(x, (x.prod(1) > 0).long())
        >>> plan = MemberPlan("classification", num_members=3, hidden=(4,), epochs=10)
        >>> held_out = split.take(torch.arange(64, 96))
        >>> tuned = tune_diversity(plan, split.take(torch.arange(64)), held_out, 2, num_seeds=2, num_fresh=2)
        >>> 0 <= tuned.diversity <= 1, tuned.rounds[0]
        (True, (0.0, 0.1, 0.3, 0.5, 0.7, 0.9))
    """
    tried = _checked(plan, candidates, num_seeds, num_fresh, rounds)
    for name, split in (("train", train), ("validation", validation), ("check", check)):
        check_split(plan, split, name)
    search = _Search(plan, train, validation, num_outputs, store, watch, stop, rounds + (num_fresh > 0))
    seeds = seeds_of(seed, num_seeds)
    fresh_seeds = seeds_of(seed, num_fresh, start=SEEDS)
    known = {} if store is None else fingerprint(plan, num_outputs, train=train, validation=validation, check=check)
    with contextlib.nullcontext() if store is None else store.opened(known):
        scores: dict[float, Scores] = {}
        done: list[tuple[float, ...]] = []
        while tried and len(done) < rounds:
            scores |= search.scores("search", len(done) + 1, tried, seeds, validation)
            done.append(tuple(tried))
            best = best_diversity(scores)
            tried = refined(scores, best) if plan.num_members > 1 else []
        gain, compared = None, best > 0 and num_fresh > 0
        if compared:
            where, split = ("validation", validation) if check is None else (check_name, check)
            pair = search.losses("gain", len(done) + 1, [0.0, best], fresh_seeds, split)
            weight = None if split.weight is None else split.weight.cpu().numpy()
            choices = len(scores) - 1 if check is None else 1  # λ=0 is what the others are compared with
            losses = (_scaled(pair[diversity], score_scale) for diversity in (0.0, best))
            gain = Gain.of(where, *losses, weight=weight, choices=choices)
    found = [Candidate(diversity, _scaled(scores[diversity], score_scale)) for diversity in sorted(scores)]
    fresh = fresh_seeds if compared else ()
    said = _sentence(plan, best, found, gain, len(fresh))
    return TunedDiversity(best, plan.task, tuple(done), tuple(found), seeds, fresh, gain, said)


@dataclass(frozen=True)
class _Search:
    """Trains what is asked for, or finds it in the store."""

    plan: MemberPlan
    train: Split
    validation: Split
    num_outputs: int
    store: Trials | None
    watch: Callable[[Stage, float], None] | None
    stop: Callable[[], bool]
    stages: int

    def scores(
        self, purpose: str, number: int, diversities: Sequence[float], seeds: Sequence[int], split: Split
    ) -> dict[float, Scores]:
        """The scores of every λ by seed, on a split."""
        return self._by_run(self._score, purpose, number, diversities, seeds, split)

    def losses(
        self, purpose: str, number: int, diversities: Sequence[float], seeds: Sequence[int], split: Split
    ) -> dict[float, Mapping[int, Array | None]]:
        """The losses on every sample of a split, `(N,)`, of every λ by seed."""
        return self._by_run(self._losses, purpose, number, diversities, seeds, split)

    def _by_run(
        self,
        cohort_values: Callable[[str, Sequence[tuple[float, int]], Split, Watch | None], Sequence[T]],
        purpose: str,
        number: int,
        diversities: Sequence[float],
        seeds: Sequence[int],
        split: Split,
    ) -> dict[float, Mapping[int, T]]:
        stage = Stage(number, self.stages, purpose, tuple(diversities), tuple(seeds))
        runs = [(diversity, seed) for seed in seeds for diversity in diversities]  # the λ of one seed share batches
        found: list[T] = []
        for cohort in split_evenly(runs, self._limit()):
            share = len(cohort) / len(runs)
            watch = self._watcher(stage, len(found) / len(runs), share)
            found += cohort_values(cohort_id(purpose, cohort), cohort, split, watch)
        if self.watch is not None:
            self.watch(stage, 1.0)
        by_run = dict(zip(runs, found, strict=True))
        return {diversity: {seed: by_run[diversity, seed] for seed in seeds} for diversity in diversities}

    def _score(
        self, key: str, runs: Sequence[tuple[float, int]], split: Split, watch: Watch | None
    ) -> list[float | None]:
        if self.store is not None and (before := self.store.finished(key, len(runs))) is not None:
            return before
        trained = self._train(key, runs, watch)
        scores = [score if math.isfinite(score) else None for score in trained.scores(split)]
        if self.store is not None:
            self.store.finish(key, scores)
        return scores

    def _losses(
        self, key: str, runs: Sequence[tuple[float, int]], split: Split, watch: Watch | None
    ) -> list[Array | None]:
        losses = None if self.store is None else self.store.losses(key, (len(runs), len(split)))
        scores = None if self.store is None or losses is None else self.store.finished(key, len(runs))
        if losses is None or scores is None:
            trained = self._train(key, runs, watch)
            losses = trained.losses(split).double().cpu()
            scores = [score if math.isfinite(score) else None for score in trained.scores_of(losses, split)]
            if self.store is not None:
                self.store.finish_losses(key, losses)
                self.store.finish(key, scores)
        return [None if score is None else row for score, row in zip(scores, losses.numpy(), strict=True)]

    def _train(self, key: str, runs: Sequence[tuple[float, int]], watch: Watch | None) -> Trained:
        return train_members(
            self.plan,
            self.train,
            self.num_outputs,
            diversities=[diversity for diversity, _ in runs],
            seeds=[seed for _, seed in runs],
            validation=self.validation,
            checkpoint_policy=None if self.store is None else self.store.checkpoint_policy(key),
            watch=watch,
            stop=self.stop,
        )

    def _watcher(self, stage: Stage, before: float, share: float) -> Watch | None:
        if (watch := self.watch) is None:
            return None
        return lambda progress: watch(stage, before + share * progress.step / progress.steps)

    def _limit(self) -> int:
        """How many runs are trained together: as many as fit in the memory, about."""
        plan, size = self.plan, 4 if self.plan.precision == "float32" else 8
        widths = [self.train.x.shape[1], *plan.hidden, self.num_outputs]
        weights = sum((i + 1) * o for i, o in pairwise(widths))
        rows = max(plan.batch_size, min(CHUNK, len(self.validation)))
        # weights, gradients, two moments and the best epoch's; what layers give, and its gradient
        numbers = plan.num_members * (5 * weights + 2 * rows * sum(widths[1:])) + plan.batch_size * widths[0]
        return max(1, min(COHORT, MEMORY // (size * numbers)))


def split_evenly(runs: Sequence[tuple[float, int]], limit: int) -> list[Sequence[tuple[float, int]]]:
    """The runs in as few parts as the limit allows, of sizes that differ by one at most.

    Example:
        >>> [len(part) for part in split_evenly([(0.0, seed) for seed in range(10)], 4)]
        [4, 3, 3]
    """
    count = math.ceil(len(runs) / limit)
    size, larger = divmod(len(runs), count)
    ends = [i * size + min(i, larger) for i in range(count + 1)]
    return [runs[start:end] for start, end in pairwise(ends)]


def seeds_of(seed: int, count: int, *, start: int = 0) -> tuple[int, ...]:
    """The seeds of trainings that one seed stands for: no two seeds have one in common.

    Example:
        >>> seeds_of(3, 2), seeds_of(3, 2, start=500)
        ((3000, 3001), (3500, 3501))
    """
    if operator.index(seed) < 0:
        raise ValueError(f"Expected `seed` to be at least 0, but got {seed}.")
    return tuple(2 * SEEDS * operator.index(seed) + start + i for i in range(count))


def check_split(plan: MemberPlan, split: Split | None, name: str) -> None:
    """Samples as a plan takes them: at least one, vectors, of its precision."""
    if split is None:
        return
    dtype = plan.train_config(1).dtype
    if len(split) == 0 or split.x.ndim != 2 or split.x.dtype != dtype:
        raise ValueError(
            f"Expected `{name}` with at least one vector, `(N, D)`, of {dtype}, "
            f"but got {tuple(split.x.shape)} of {split.x.dtype}."
        )


def _checked(plan: MemberPlan, candidates: Sequence[float], num_seeds: int, num_fresh: int, rounds: int) -> list[float]:
    """The λ of the first round, in ascending order: λ=0 is one of them."""
    check_count(num_seeds, "num_seeds")
    check_count(num_fresh, "num_fresh", least=0)
    check_count(rounds, "rounds")
    if max(num_seeds, num_fresh) > SEEDS:
        raise ValueError(f"Expected at most {SEEDS} seeds, but got {max(num_seeds, num_fresh)}.")
    for diversity in candidates:
        check_fraction(diversity, "candidates")
    if plan.batches == "separate":
        raise ValueError(
            "Expected a plan whose members see each other to search λ for, but got batches='separate'. "
            "Use 'shared' or 'exchanged'."
        )
    if plan.num_members == 1:
        return [0.0]  # nobody to differ from
    return sorted({0.0, *(float(diversity) + 0.0 for diversity in candidates)})


def _scaled(scores: Mapping[int, V | None], scale: float) -> dict[int, V | None]:
    return {seed: None if score is None else score * scale for seed, score in scores.items()}


# -- saying it --------------------------------------------------------------------------------------------------------


def _sentence(plan: MemberPlan, best: float, found: Sequence[Candidate], gain: Gain | None, num_fresh: int) -> str:
    noun = NOUNS[METRICS[plan.task]]
    if plan.num_members == 1:
        return "One member has nobody to differ from: λ=0."
    chosen = next(candidate for candidate in found if candidate.diversity == best)
    if len(chosen.failed) == len(chosen.scores):
        return "Every training failed (NaN or Inf): λ=0 was kept. Lower the learning rate."
    if best == 0:
        return (
            f"No diversity helped: of {len(found)} values of λ, 0 has the lowest {noun} on the validation samples "
            f"({_count(len(chosen.scores), 'seed')})."
        )
    if gain is None:
        why = "its trainings with fresh seeds failed" if num_fresh else "its gain was not measured on fresh seeds"
        return f"λ={best:g} has the lowest {noun} on the validation samples; {why}."
    verb, sign = ("lowers", 1) if gain.mean >= 0 else ("raises", -1)
    amount, seeds = abs(gain.mean), _count(len(gain.seeds), "fresh seed")
    over = "seeds alone," if gain.samples is None else f"{_count(gain.samples, 'sample')} and"
    failed = f"; {num_fresh - len(gain.seeds)} more failed" if len(gain.seeds) < num_fresh else ""
    where = "validation samples that chose it" if gain.split == "validation" else f"{gain.split} samples"
    if gain.low is None or gain.high is None:
        (amount_,) = _written(amount)
        return (
            f"λ={best:g} {verb} the {noun} on the {where} by {amount_} ({seeds}{failed}): too few to tell from noise."
        )
    among = "" if gain.choices == 1 else f" for all {gain.choices} λ above 0 together"
    low, high = sorted((sign * gain.low, sign * gain.high))
    amount_, low_, high_ = _written(amount, low, high)
    verdict = "within the noise, λ=0 would do as well"
    if gain.beyond_noise:
        verdict = "beyond the noise" if gain.mean > 0 else "beyond the noise, λ=0 does better"
    return (
        f"λ={best:g} {verb} the {noun} on the {where} by {amount_} "
        f"(95 % interval {low_} to {high_}{among}, over {over} {seeds}{failed}): {verdict}."
    )


def _written(*values: float) -> list[str]:
    """Numbers with as many decimals as give the largest of them three digits."""
    largest = max(map(abs, values))
    size = math.floor(math.log10(largest)) if largest > 0 else 0
    if not -6 <= size <= 6:
        return [f"{value:.3g}" for value in values]
    return [f"{value:.{max(0, 2 - size)}f}" for value in values]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
