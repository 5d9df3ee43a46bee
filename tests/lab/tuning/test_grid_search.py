"""λ found on held-out samples: the choosing, the comparison on fresh seeds, and a search that may be killed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from torchace._files import PARTIAL, PathError
from torchace.lab.data import Split
from torchace.lab.store import RunStoreError
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.members import MemberPlan, TrainedGroup, new_run_group, train_members
from torchace.lab.tuning import grid_search
from torchace.lab.tuning.gain import Gain
from torchace.lab.tuning.grid_search import (
    GridSearch,
    TunedDiversity,
    best_diversity,
    refine_candidates,
    split_evenly,
)
from torchace.lab.tuning.search import SearchCallback, SearchProblem
from torchace.lab.tuning.search_cache import SearchCache

PLAN = MemberPlan("classification", num_members=3, hidden=(5,), epochs=6, batch_size=16, learning_rate=0.03)
SMALL: dict[str, Any] = {"num_seeds": 2, "num_fresh": 3, "candidates": (0.5, 0.9)}


def samples(count: int, start: int = 0, task: str = "classification", weighted: bool = False) -> Split:
    """Noisy samples on which λ makes a difference; other starts, other samples."""
    generator = torch.Generator().manual_seed(100 + start)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    signal = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    weight = torch.rand(count, generator=generator, dtype=torch.float64) if weighted else None
    return Split(x, (signal > 0).long() if task == "classification" else signal[:, None], weight)


TRAIN, VALIDATION, TEST = samples(48), samples(40, 1), samples(40, 2)


def run_search(
    plan: MemberPlan = PLAN,
    train: Split = TRAIN,
    test: Split | None = TEST,
    *,
    seed: int = 0,
    callback: SearchCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> TunedDiversity:
    problem = SearchProblem(plan, train, VALIDATION, 2, seed)
    return GridSearch(problem, test=test, **{**SMALL, **options}).run(callback, stop)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[float, int]]]:
    """λ and seed of the runs of every cohort that is trained from now on."""
    seen: list[list[tuple[float, int]]] = []

    def counted(*args: Any, diversities: list[float], seeds: list[int], **options: Any) -> TrainedGroup:
        seen.append(list(zip(diversities, seeds, strict=True)))
        return train_members(*args, diversities=diversities, seeds=seeds, **options)

    monkeypatch.setattr(grid_search, "train_members", counted)
    return seen


# -- choosing ---------------------------------------------------------------------------------------------------------

LAMBDAS = st.integers(0, 100).map(lambda i: i / 100)
SCORES = st.one_of(st.none(), st.integers(-40, 40).map(lambda i: i / 8))  # eighths: their sums are exact


@st.composite
def tables(draw: st.DrawFn) -> dict[float, dict[int, float | None]]:
    seeds = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    tried = draw(st.lists(LAMBDAS, min_size=1, max_size=6, unique=True))
    return {diversity: {seed: draw(SCORES) for seed in seeds} for diversity in tried}


@given(tables())
def test_the_best_has_fewest_failures_then_the_lowest_mean_then_the_smallest_lambda(
    scores: dict[float, dict[int, float | None]],
) -> None:
    def better(a: float, b: float) -> bool:
        """Whether a is to be chosen rather than b."""
        failures = [sum(value is None for value in scores[d].values()) for d in (a, b)]
        if failures[0] != failures[1]:
            return failures[0] < failures[1]
        sums = [sum(value for value in scores[d].values() if value is not None) for d in (a, b)]
        return sums[0] < sums[1] if sums[0] != sums[1] else a < b  # as many finished: sums order as means do

    best = best_diversity(scores)
    assert not any(better(other, best) for other in scores if other != best)


def test_rounding_does_not_choose() -> None:
    assert best_diversity({0.5: {0: 1.0}, 0.1: {0: 1.0 + 1e-13}, 0.0: {0: 1.0 + 1e-6}}) == 0.1


@given(st.lists(LAMBDAS, min_size=1, max_size=8, unique=True), st.data())
def test_refining_halves_the_gaps_around_the_best(tried: list[float], data: st.DataObject) -> None:
    best = data.draw(st.sampled_from(tried))
    new = refine_candidates(tried, best)
    grid = sorted({0.0, 1.0, *tried})
    place = grid.index(best)
    assert set(new).isdisjoint(grid)
    for neighbour in grid[max(place - 1, 0) : place] + grid[place + 1 : place + 2]:
        between = [v for v in new if min(best, neighbour) < v < max(best, neighbour)]
        # 1e-6: λ are rounded to six digits
        wide = abs(neighbour - best) >= 0.02
        assert between == pytest.approx([(best + neighbour) / 2] if wide else [], abs=1e-6)
    assert len(new) <= 2
    assert all(0 < v < 1 for v in new)


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.sampled_from(["both", "both", "both", "first", "second"])),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100)
def test_the_gain_is_a_paired_t_interval(rows: list[tuple[float, float, str]]) -> None:
    baseline = {seed: None if failed == "first" else a for seed, (a, _, failed) in enumerate(rows)}
    chosen = {seed: None if failed == "second" else b for seed, (_, b, failed) in enumerate(rows)}
    gain = Gain.measure("test", baseline, chosen)
    pairs = [(seed, a, b) for seed, (a, b, failed) in enumerate(rows) if failed == "both"]
    if not pairs:
        assert gain is None
        return
    assert gain is not None
    assert gain.seeds == tuple(seed for seed, _, _ in pairs)
    a, b = np.array([p[1] for p in pairs]), np.array([p[2] for p in pairs])
    # 1e-12: rounding of numbers up to 10
    assert gain.mean == pytest.approx(float(np.mean(a - b)), abs=1e-12)
    if len(pairs) == 1:
        assert (gain.low, gain.high, gain.beyond_noise) == (None, None, False)
    elif np.ptp(a - b) > 1e-6:  # scipy warns of differences that are all the same
        interval = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
        assert (gain.low, gain.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
        if min(abs(interval.low), abs(interval.high)) > 1e-9:
            assert gain.beyond_noise == (not interval.low <= 0 <= interval.high)


@given(st.integers(1, 200), st.integers(1, 64))
def test_cohorts_are_even_and_within_the_limit(count: int, limit: int) -> None:
    runs = [(0.0, seed) for seed in range(count)]
    parts = split_evenly(runs, limit)
    assert [run for part in parts for run in part] == runs
    assert len(parts) == math.ceil(count / limit)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# -- searching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("options", [{}, {"patience": 2}, {"batches": "exchanged"}])
def test_scores_are_those_of_every_run_trained_alone(task: str, options: dict[str, Any]) -> None:
    plan = replace(PLAN, task=task, **options)
    train, validation, check = (samples(40, start, task, weighted=True) for start in range(3, 6))
    outputs = 2 if task == "classification" else 1
    found = GridSearch(SearchProblem(plan, train, validation, outputs), test=check, **SMALL).run()

    def alone(diversity: float, seed: int, split: Split) -> float:
        one = train_members(plan, train, outputs, diversities=[diversity], seeds=[seed], validation=validation)
        return one.scores(split)[0]

    for candidate in found.candidates:
        for seed, score in candidate.scores.items():
            # a cohort equals its runs trained alone to rounding
            assert score == pytest.approx(alone(candidate.diversity, seed, validation), rel=1e-9)
    assert found.diversity > 0, "nothing to compare: choose other samples"
    assert found.gain is not None
    differences = [alone(0.0, s, check) - alone(found.diversity, s, check) for s in found.fresh_seeds]
    assert found.gain.mean == pytest.approx(np.mean(differences), rel=1e-6, abs=1e-10)  # digits cancel
    assert found.gain.split == "test"


def test_a_round_is_one_cohort(trainings: list[list[tuple[float, int]]]) -> None:
    found = run_search(rounds=3)
    search, gain = trainings[:-1], trainings[-1]
    assert [sorted({d for d, _ in cohort}) for cohort in search] == [list(tried) for tried in found.rounds]
    for cohort, tried in zip(search, found.rounds, strict=True):
        assert sorted(cohort) == sorted((d, seed) for d in tried for seed in found.seeds)
    assert sorted(gain) == sorted((d, seed) for d in (0.0, found.diversity) for seed in found.fresh_seeds)
    assert found.rounds[0] == (0.0, 0.5, 0.9)  # λ=0 was not asked for
    scores: dict[float, Mapping[int, float | None]] = {}
    for tried, following in zip(found.rounds, found.rounds[1:], strict=False):
        scores |= {c.diversity: c.scores for c in found.candidates if c.diversity in tried}
        assert list(following) == refine_candidates(scores, best_diversity(scores))
    assert found.diversity == best_diversity({c.diversity: c.scores for c in found.candidates})


def test_seeds_of_the_comparison_and_of_other_searches_are_fresh() -> None:
    found = [run_search(seed=seed, num_seeds=3, num_fresh=4) for seed in (0, 1)]
    used = [seed for one in found for seed in (*one.seeds, *one.fresh_seeds)]
    assert len(used) == len(set(used)) == 14


def test_the_same_seed_gives_the_same_answer() -> None:
    state = torch.get_rng_state()
    assert run_search() == run_search()
    assert run_search(seed=1) != run_search()
    assert torch.get_rng_state().equal(state)


def test_cohorts_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, trainings: list[list[tuple[float, int]]]
) -> None:
    whole = run_search()
    count = len(trainings)
    monkeypatch.setattr(grid_search, "MAX_RUNS", 2)
    parts = run_search()
    assert [len(cohort) for cohort in trainings[count:]] == [2] * (sum(map(len, trainings[:count])) // 2)
    assert (parts.diversity, parts.rounds) == (whole.diversity, whole.rounds)
    for ours, theirs in zip(parts.candidates, whole.candidates, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, rel=1e-9)


def test_runs_that_take_much_memory_are_trained_apart(
    monkeypatch: pytest.MonkeyPatch, trainings: list[list[tuple[float, int]]]
) -> None:
    monkeypatch.setattr(grid_search, "MEMORY", 1)
    run_search(rounds=1, num_fresh=0)
    assert [len(cohort) for cohort in trainings] == [1] * 6


def test_samples_of_the_comparison_take_no_part_in_choosing() -> None:
    ours, theirs = run_search(), run_search(test=samples(30, 7))
    assert (ours.diversity, ours.candidates) == (theirs.diversity, theirs.candidates)
    assert ours.gain != theirs.gain


def test_without_samples_of_its_own_the_comparison_says_so() -> None:
    found = run_search(test=None)
    assert found.gain is not None
    assert found.gain.split == "validation"
    assert "on the validation samples that chose it" in found.sentence
    assert set(found.gain.seeds).isdisjoint(found.seeds)


def test_scores_can_be_told_in_other_units() -> None:
    ours, theirs = run_search(score_scale=100.0), run_search()
    assert ours.diversity == theirs.diversity
    for a, b in zip(ours.candidates, theirs.candidates, strict=True):
        assert a.scores == pytest.approx({seed: 100 * (score or 0) for seed, score in b.scores.items()})
    assert ours.gain is not None
    assert theirs.gain is not None
    assert (ours.gain.mean, ours.gain.low) == pytest.approx((100 * theirs.gain.mean, 100 * (theirs.gain.low or 0)))


def test_one_member_has_no_diversity() -> None:
    found = run_search(replace(PLAN, num_members=1))
    assert (found.diversity, found.rounds, found.gain, found.fresh_seeds) == (0.0, ((0.0,),), None, ())
    assert found.sentence == "One member cannot differ from others: λ=0."


def test_what_is_watched_adds_up() -> None:
    seen: list[tuple[Stage, float]] = []
    found = run_search(watch=lambda stage, share: seen.append((stage, share)))
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert [stage.number for stage in stages] == [1, 2, 3]
    assert [stage.purpose for stage in stages] == ["search", "search", "gain"]
    assert [stage.diversities for stage in stages] == [*found.rounds, (0.0, found.diversity)]
    for stage in stages:
        shares = [share for one, share in seen if one == stage]
        assert shares == sorted(shares)
        assert 0 < shares[0] <= shares[-1] == 1


# -- trainings that fail ----------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, fails: Callable[[float, int], bool]) -> None:
    """From now on these runs start with Inf."""

    def spoilt(plan: MemberPlan, train: Split, num_outputs: int, **options: Any) -> TrainedGroup:
        network = new_run_group(plan, train.x.shape[1], num_outputs, options["seeds"])
        with torch.no_grad():
            for run, pair in enumerate(zip(options["diversities"], options["seeds"], strict=True)):
                if fails(*pair):
                    next(network.parameters())[run * plan.num_members] = torch.inf
        return train_members(plan, train, num_outputs, network=network, **options)

    monkeypatch.setattr(grid_search, "train_members", spoilt)


def test_a_candidate_with_a_failed_training_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_search(rounds=1)
    spoil(monkeypatch, lambda diversity, seed: (diversity, seed) == (before.diversity, 1))
    after = run_search(rounds=1)
    assert after.diversity != before.diversity
    by_diversity = {candidate.diversity: candidate for candidate in after.candidates}
    assert by_diversity[before.diversity].failed == (1,)
    for candidate in before.candidates:  # the others are what they were
        ours = by_diversity[candidate.diversity].scores
        assert all(
            ours[s] == v for s, v in candidate.scores.items() if (candidate.diversity, s) != (before.diversity, 1)
        )


def test_lambda_0_may_lose_by_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda diversity, seed: diversity == 0)
    found = run_search()
    assert found.diversity > 0
    assert found.gain is None
    assert found.sentence.endswith("its trainings with fresh seeds failed.")


def test_failed_fresh_seeds_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda diversity, seed: seed == 501)
    found = run_search()
    assert found.gain is not None
    assert found.fresh_seeds == (500, 501, 502)
    assert found.gain.seeds == (500, 502)
    assert "2 fresh seeds; 1 more failed" in found.sentence


def test_when_everything_fails_lambda_0_is_kept() -> None:
    found = run_search(replace(PLAN, learning_rate=1e300))
    assert found.diversity == 0
    assert all(len(candidate.failed) == 2 for candidate in found.candidates)
    assert found.sentence == "Every training failed (NaN or Inf), so λ=0. Lower the learning rate."
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["candidates"][0]["scores"] == {"0": None, "1": None}


# -- saying it --------------------------------------------------------------------------------------------------------


def inject(monkeypatch: pytest.MonkeyPatch, differences: list[Any]) -> None:
    """Largest λ best; on fresh seeds the losses of λ=0 exceed its own by these differences, one or several a seed."""

    def scores(self: Any, purpose: str, number: int, diversities: Any, seeds: Any, *where: Any) -> Any:
        return {d: dict.fromkeys(seeds, -d) for d in diversities}

    def losses(self: Any, purpose: str, number: int, diversities: Any, seeds: Any, *where: Any) -> Any:
        # 0: the differences are then what was asked for, to the last digit
        return {
            0.0: dict(zip(seeds, map(np.asarray, differences), strict=True)),
            0.9: dict.fromkeys(seeds, np.zeros(())),
        }

    monkeypatch.setattr(tune._Search, "scores", scores)
    monkeypatch.setattr(tune._Search, "losses", losses)


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ([0.01, 0.02], r"lowers the cross entropy on the test samples by 0.0150 \(95 % interval -0.0485 to 0.0785, "
         r"over seeds alone, 2 fresh seeds\): within the noise, λ=0 would do as well\."),
        ([0.01, 0.012, 0.014], r"lowers .* by 0.0120 \(95 % interval 0.0070 to 0.0170, .*\): beyond the noise\."),
        ([-0.01, -0.012, -0.014], r"raises .* by 0.0120 \(95 % interval 0.0070 to 0.0170, .*\): beyond the noise, "
         r"λ=0 does better\."),
        ([0.01], r"lowers the cross entropy on the test samples by 0.0100 \(1 fresh seed\): too few to tell from "
         r"noise\."),
        ([2e7, 3e7], r"lowers .* by 2.5e\+07 \(95 % interval -3.85e\+07 to 8.85e\+07, .*"),
    ],
)  # fmt: skip
def test_the_sentence_says_what_it_is_worth(
    monkeypatch: pytest.MonkeyPatch, differences: list[float], sentence: str
) -> None:
    inject(monkeypatch, differences)
    found = run_search(rounds=1, num_fresh=len(differences))
    assert found.diversity == 0.9
    assert re.fullmatch(f"λ=0.9 {sentence}", found.sentence), found.sentence


def test_the_interval_of_the_gain_is_for_new_samples_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # equal gains of all seeds, on samples that differ widely: nothing to be sure of
    rng = np.random.default_rng(0)
    losses = list(0.2 + rng.normal(size=40) + 1e-3 * rng.normal(size=(5, 40)))
    inject(monkeypatch, losses)
    found = run_search(rounds=1, num_fresh=5)
    assert found.gain is not None
    assert found.gain.samples == 40
    assert not found.gain.beyond_noise
    # the seeds' part is next to nothing: the t interval of the samples' means
    means = np.mean(losses, 0)
    interval = scipy.stats.ttest_1samp(means, 0).confidence_interval(0.95)
    wider = (found.gain.high - found.gain.low) / (interval.high - interval.low)
    assert 1 <= wider < 1.1  # one end moves with the skewness of the samples
    assert "over 40 samples and 5 fresh seeds" in found.sentence
    assert TunedDiversity.from_json(json.loads(json.dumps(found.to_json()))) == found
    # chosen by these very samples: the interval holds for both λ above 0
    alone = run_search(rounds=1, num_fresh=5, test=None)
    assert alone.gain is not None
    assert alone.gain.choices == 2
    assert alone.gain.high - alone.gain.low > 1.1 * (found.gain.high - found.gain.low)
    assert "for all 2 λ above 0 together" in alone.sentence


def test_gains_of_earlier_versions_are_read() -> None:
    content = run_search().to_json()
    del content["gain"]["samples"], content["gain"]["choices"]
    gain = TunedDiversity.from_json(content).gain
    assert gain is not None
    assert (gain.samples, gain.choices) == (None, 1)


def test_samples_of_no_weight_do_not_count() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4, 20))
    weight = np.repeat([1.0, 0.0], 10)
    found = Gain.measure("test", dict(enumerate(a)), dict(enumerate(b)), weight=weight)
    few = Gain.measure("test", dict(enumerate(a[:, :10])), dict(enumerate(b[:, :10])))
    assert found is not None
    assert few is not None
    assert found.samples == few.samples == 10
    # rounding of sums of ten numbers of size 1
    assert (found.mean, found.low, found.high) == pytest.approx((few.mean, few.low, few.high), abs=1e-12)


def test_no_diversity_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tune._Search,
        "scores",
        lambda self, purpose, number, lambdas, seeds, *_: {d: dict.fromkeys(seeds, d) for d in lambdas},
    )
    found = run_search()
    assert (found.diversity, found.gain, found.fresh_seeds) == (0.0, None, ())
    assert found.rounds == ((0.0, 0.5, 0.9), (0.25,))
    assert found.sentence == (
        "No diversity helped: of 4 values of λ, 0 has the lowest cross entropy on the validation samples (2 seeds)."
    )


@pytest.mark.parametrize("options", [{}, {"num_fresh": 0}, {"num_fresh": 1}, {"check": None}])
def test_the_answer_survives_json(options: dict[str, Any]) -> None:
    found = run_search(**options)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert TunedDiversity.from_json(json.loads(text)) == found
    assert {"chosen", "metric", "split", "rounds", "candidates", "gain", "sentence"} <= set(found.to_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": (0.5, 1.5)}, r"Expected `candidates` in \[0, 1\], but got 1.5"),
        ({"candidates": (math.nan,)}, r"Expected `candidates` in \[0, 1\], but got nan"),
        ({"num_seeds": 0}, "Expected `num_seeds` to be at least 1"),
        ({"num_fresh": -1}, "Expected `num_fresh` to be at least 0"),
        ({"num_seeds": 501}, "Expected at most 500 seeds"),
        ({"seed": -1}, "Expected `seed` to be at least 0"),
        ({"rounds": 0}, "Expected `rounds` to be at least 1"),
        ({"plan": replace(PLAN, batches="separate")}, "but got batches='separate'"),
        ({"train": Split(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0).long())}, "Expected `train` with at"),
        ({"check": Split(TEST.x.float(), TEST.y)}, r"Expected `check` .* of torch.float64, but got .*float32"),
    ],
)
def test_bad_arguments_are_one_sentence(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run_search(**options, cache=SearchCache(tmp_path / "store"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


# -- what is kept -----------------------------------------------------------------------------------------------------


def files(directory: Path) -> dict[str, tuple[int, int]]:
    """The finished cohorts: written once, they stay the same file."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in (directory / "groups").glob("*.json")}


def leftovers(directory: Path) -> list[Path]:
    return [*directory.glob("checkpoints*"), *directory.rglob(f"*{PARTIAL}")]


def test_what_is_finished_is_not_trained_again(tmp_path: Path, trainings: list[list[tuple[float, int]]]) -> None:
    first = run_search(cache=SearchCache(tmp_path))
    assert first == run_search()
    count = len(trainings)
    assert run_search(cache=SearchCache(tmp_path)) == first
    assert len(trainings) == count
    assert leftovers(tmp_path) == []
    # one round more: those before it are kept
    kept = files(tmp_path)
    run_search(cache=SearchCache(tmp_path), rounds=3, num_fresh=0)
    assert len(trainings) == count + 1
    assert kept.items() <= files(tmp_path).items()


@pytest.mark.parametrize("patience", [None, 2])
def test_stopped_again_and_again_it_ends_where_it_would_have(tmp_path: Path, patience: int | None) -> None:
    plan = replace(PLAN, patience=patience)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked % 7 == 0

    for _ in range(100):
        kept = files(tmp_path)
        try:
            found = run_search(plan, cache=SearchCache(tmp_path), stop=stop)
            break
        except Interrupted:
            assert kept.items() <= files(tmp_path).items()
    assert asked > 14, "it was never stopped"
    assert found == run_search(plan)
    assert leftovers(tmp_path) == []


def test_checkpoints_of_a_search_that_was_changed_are_removed(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run_search(cache=SearchCache(tmp_path, every_steps=1), stop=iter([False] * 5 + [True]).__next__)
    (before,) = (tmp_path / "checkpoints").iterdir()
    with pytest.raises(Interrupted):
        run_search(
            cache=SearchCache(tmp_path, every_steps=1), candidates=(0.2,), stop=iter([False] * 5 + [True]).__next__
        )
    (after,) = (tmp_path / "checkpoints").iterdir()
    assert before != after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": replace(PLAN, epochs=7)}, "holds a search with epochs = 6, but now it is 7"),
        ({"plan": replace(PLAN, hidden=(5, 5))}, r"holds a search with hidden = \[5\], but now it is \[5, 5\]"),
        ({"plan": replace(PLAN, patience=3)}, "holds a search with patience = None, but now it is 3"),
        ({"train": samples(48, 9)}, "holds a search on other data: its train samples are not these"),
        ({"train": Split(TRAIN.x, 1 - TRAIN.y)}, "its train samples are not these"),
        ({"train": Split(TRAIN.x, TRAIN.y, torch.ones(48))}, "its train samples are not these"),
        ({"check": None}, "its check samples are not these"),
    ],
)
def test_another_search_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)
    with pytest.raises(RunStoreError, match=message) as caught:
        run_search(**options, cache=SearchCache(tmp_path))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_a_process_left_that_was_killed_while_it_cleaned_up_is_removed(tmp_path: Path) -> None:
    run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)
    (cohort,) = (tmp_path / "groups").iterdir()
    for left in (f"checkpoints/{cohort.stem}/state-3.safetensors", f"checkpoints/{cohort.stem}/", "checkpoints/"):
        place = tmp_path / left
        (place if left.endswith("/") else place.parent).mkdir(parents=True)
        if not left.endswith("/"):
            place.write_text("half")
        run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)
        assert leftovers(tmp_path) == []


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    def second(stage: Stage, share: float) -> None:
        with pytest.raises(RunStoreError, match=f"Process {os.getpid()} is at work in"):
            run_search(cache=SearchCache(tmp_path))

    run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0, watch=second)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "scores": [1.0]}', '{"format": 1, "scores": 3}',
     '{"format": 1, "scores": [1.0, 1.0, 1.0, 1.0, 1.0, "x"]}', "\x00\xff"],
)  # fmt: skip
@pytest.mark.parametrize("which", ["cohort", "fingerprint"])
def test_damaged_files_are_one_sentence(tmp_path: Path, text: str, which: str) -> None:
    run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)
    (cohort,) = (tmp_path / "groups").iterdir()
    file = cohort if which == "cohort" else tmp_path / "fingerprint.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunStoreError, match=r"(is damaged|was not written by this version)") as caught:
        run_search(cache=SearchCache(tmp_path))
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", save({"losses": torch.zeros(2, 3)}), save({})])
def test_damaged_losses_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    run_search(cache=SearchCache(tmp_path))
    (file,) = (tmp_path / "groups").glob("*.safetensors")
    file.write_bytes(content)
    with pytest.raises(RunStoreError, match=r"safetensors is damaged\. .* remove that file"):
        run_search(cache=SearchCache(tmp_path))


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("manifest.json", "state-1.safetensors"):
        (outside / name).write_text("mine")
    (tmp_path / "store" / "checkpoints").mkdir(parents=True)
    (tmp_path / "store" / "checkpoints" / "x").symlink_to(outside)
    with pytest.raises(PathError, match="checkpoints/x is a symbolic link"):
        run_search(cache=SearchCache(tmp_path / "store"))
    assert sorted(os.listdir(outside)) == ["manifest.json", "state-1.safetensors"]


def test_scores_that_were_changed_are_refused(tmp_path: Path) -> None:
    run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)
    (file,) = (tmp_path / "groups").glob("*.json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "scores": [score / 2 for score in content["scores"]]}))
    with pytest.raises(RunStoreError, match=f"{file.name} is damaged"):
        run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)
    # an earlier version wrote no checksum
    file.write_text(json.dumps({"format": 1, "scores": content["scores"]}))
    run_search(cache=SearchCache(tmp_path), rounds=1, num_fresh=0)


@pytest.mark.parametrize("finished", [True, False])
def test_nothing_of_another_search_is_taken(tmp_path: Path, finished: bool) -> None:
    """Though its fingerprint was lost: λ and seeds are the same."""
    options: dict[str, Any] = {"rounds": 1, "num_fresh": 0, "store": SearchCache(tmp_path, every_steps=1)}
    if finished:
        run_search(**options)
    else:
        with pytest.raises(Interrupted):
            run_search(**options, stop=iter([False] * 5 + [True]).__next__)
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(
        ValueError, match=r"belongs to (another search|other runs or to another configuration)\."
    ) as caught:
        run_search(replace(PLAN, epochs=7), **options)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoreError, match=r"Cannot write to .*"):
        run_search(cache=SearchCache(tmp_path / "file" / "store"))


# -- killed -----------------------------------------------------------------------------------------------------------

KILLS = int(os.environ.get("TORCHACE_KILLS", "6"))
PATIENCE = 120.0  # seconds until a process that does not do what it should is given up
# early stopping in the middle; a state that takes about as long to write as a step
KILLED = MemberPlan("classification", num_members=4, hidden=(64, 64), epochs=8, batch_size=16, patience=3)


def work(directory: str) -> None:
    """What a process does that may be killed."""
    torch.set_num_threads(1)
    found = run_search(KILLED, cache=SearchCache(Path(directory) / "store", every_steps=2))
    answer = Path(directory) / "answer.json"
    answer.write_text(json.dumps(found.to_json()))


def start(directory: Path) -> BaseProcess:
    """A process of its own; the server that it comes from has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=work, args=(str(directory),), daemon=True)
    process.start()
    return process


def wait_until(process: BaseProcess, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the process ended; looked at again and again."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "the process does not get there"
        process.join(0.0005)
        if process.exitcode is not None:
            return False
    return True


def saving(store: Path) -> list[str]:
    """The files of checkpoints, half-written ones too."""
    return [f"{folder.name}/{name}" for folder in (store / "checkpoints").glob("*") for name in _listed(folder)]


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # removed since it was seen
        return []


def is_writing(store: Path) -> bool:
    return any(name.endswith(PARTIAL) for name in saving(store))


def moments(store: Path, kind: str, draw: random.Random) -> Iterator[bool]:
    """False until the moment to kill has come."""
    wanted, seen, cohorts = draw.randint(1, 8), set(saving(store)), len(files(store))
    begun: float | None = None
    while True:
        new = set(saving(store)) - seen
        if kind == "writing":  # a checkpoint, some from now
            seen |= new
            wanted -= len(new)
            yield wanted <= 0 and is_writing(store)
        elif kind == "finishing":  # a cohort
            yield len(files(store)) > cohorts
        else:  # any time after work has begun
            begun = begun or (time.monotonic() if new else None)
            yield begun is not None and time.monotonic() > begun + wanted / 24


def test_killed_at_any_moment_it_ends_where_it_would_have(tmp_path: Path) -> None:
    undisturbed = run_search(KILLED).to_json()
    draw, kills, torn, searches = random.Random(KILLS), 0, 0, 0
    for attempt in range(6 * KILLS + 6):
        enough = kills >= KILLS and torn >= KILLS // 4
        directory = tmp_path / f"search{searches}"
        if enough and not directory.exists():
            break
        directory.mkdir(exist_ok=True)
        store = directory / "store"
        kept = files(store)
        moment = moments(store, ("writing", "anywhere", "writing", "finishing")[attempt % 4], draw)
        process = start(directory)
        if wait_until(process, lambda m=moment, e=enough: not e and next(m)):
            process.kill()
        process.join()
        assert kept.items() <= files(store).items(), "a cohort was trained again"
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            torn += is_writing(store)
            continue
        assert process.exitcode == 0
        assert json.loads((directory / "answer.json").read_text()) == undisturbed
        assert leftovers(store) == []
        searches += 1
    assert enough, f"{kills} killed, {torn} of them while a checkpoint was being written"
    assert searches > 0
