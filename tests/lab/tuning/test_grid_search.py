"""Grid search for λ: choosing, the comparison on fresh seeds, trainings that fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.tuning.search_data import make_split
from torchace.lab.data import Split
from torchace.lab.training.members import FitScores, MemberPlan, TrainedGroup, new_run_group, train_members
from torchace.lab.tuning import grid_search
from torchace.lab.tuning.grid_search import GridSearch, TunedDiversity, refine_candidates, select_diversity
from torchace.lab.tuning.search import SearchCache, SearchCallback, SearchProblem, SearchStage

PLAN = MemberPlan("classification", num_members=3, hidden=(5,), epochs=6, batch_size=16, learning_rate=0.03)
SMALL: dict[str, Any] = {"num_seeds": 2, "num_fresh": 3, "rounds": 2, "candidates": (0.5, 0.9)}
TRAIN, VALIDATION, TEST = (make_split(count, start) for start, count in enumerate((48, 40, 40)))


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
    """λ and seed of the runs of every group that is trained from now on."""
    seen: list[list[tuple[float, int]]] = []

    def record(*args: Any, diversities: list[float], seeds: list[int], **options: Any) -> TrainedGroup:
        seen.append(list(zip(diversities, seeds, strict=True)))
        return train_members(*args, diversities=diversities, seeds=seeds, **options)

    monkeypatch.setattr(grid_search, "train_members", record)
    return seen


# -- choosing ---------------------------------------------------------------------------------------------------------

LAMBDAS = st.integers(0, 100).map(lambda i: i / 100)
SCORES = st.one_of(st.none(), st.integers(-40, 40).map(lambda i: i / 8))  # eighths: their sums are exact


@st.composite
def score_tables(draw: st.DrawFn) -> dict[float, dict[int, float | None]]:
    seeds = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    tried = draw(st.lists(LAMBDAS, min_size=1, max_size=6, unique=True))
    return {diversity: {seed: draw(SCORES) for seed in seeds} for diversity in tried}


@given(score_tables())
def test_best_has_fewest_failures_then_lowest_mean_then_smallest_diversity(
    scores: dict[float, dict[int, float | None]],
) -> None:
    def is_better(a: float, b: float) -> bool:
        failures = [sum(value is None for value in scores[d].values()) for d in (a, b)]
        if failures[0] != failures[1]:
            return failures[0] < failures[1]
        sums = [sum(value for value in scores[d].values() if value is not None) for d in (a, b)]
        return sums[0] < sums[1] if sums[0] != sums[1] else a < b  # as many finished: sums order as means do

    best = select_diversity(scores)
    assert not any(is_better(other, best) for other in scores if other != best)


def test_rounding_does_not_choose() -> None:
    assert select_diversity({0.5: {0: 1.0}, 0.1: {0: 1.0 + 1e-13}, 0.0: {0: 1.0 + 1e-6}}) == 0.1


@given(st.lists(LAMBDAS, min_size=1, max_size=8, unique=True), st.data())
def test_refining_halves_the_gaps_around_the_best(tried: list[float], data: st.DataObject) -> None:
    best = data.draw(st.sampled_from(tried))
    new = refine_candidates(tried, best)
    grid = sorted({0.0, 1.0, *tried})
    place = grid.index(best)
    assert set(new).isdisjoint(grid)
    for neighbor in grid[max(place - 1, 0) : place] + grid[place + 1 : place + 2]:
        between = [v for v in new if min(best, neighbor) < v < max(best, neighbor)]
        wide = abs(neighbor - best) >= 0.02
        # 1e-6: λ are rounded to six digits
        assert between == pytest.approx([(best + neighbor) / 2] if wide else [], abs=1e-6)
    assert len(new) <= 2
    assert all(0 < v < 1 for v in new)


# -- searching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "options"),
    [("classification", {}), ("classification", {"batches": "exchanged"}), ("regression", {"patience": 2})],
)
def test_scores_equal_those_of_every_run_trained_alone(task: str, options: dict[str, Any]) -> None:
    plan = replace(PLAN, task=task, **options)
    train, validation, test = (make_split(40, start, task, weighted=True) for start in range(3, 6))
    outputs = 2 if task == "classification" else 1
    result = GridSearch(SearchProblem(plan, train, validation, outputs), test=test, **SMALL).run()

    def alone(diversity: float, seed: int, split: Split) -> float:
        one = train_members(plan, train, outputs, diversities=[diversity], seeds=[seed], validation=validation)
        return one.scores(split)[0]

    for candidate in result.candidates:
        for seed, score in candidate.scores.items():
            # a group equals its runs trained alone to rounding
            assert score == pytest.approx(alone(candidate.diversity, seed, validation), rel=1e-9)
    assert result.best > 0, "nothing to compare: choose other samples"
    assert result.gain is not None
    differences = [alone(0.0, s, test) - alone(result.best, s, test) for s in result.fresh_seeds]
    assert result.gain.mean == pytest.approx(np.mean(differences), rel=1e-6, abs=1e-10)  # digits cancel
    assert result.gain.split == "test"


def test_a_round_is_one_group(trainings: list[list[tuple[float, int]]]) -> None:
    state = torch.get_rng_state()
    result = run_search(rounds=3)
    assert torch.get_rng_state().equal(state)
    search, gain = trainings[:-1], trainings[-1]
    for group, tried in zip(search, result.rounds, strict=True):
        assert sorted(group) == sorted((d, seed) for d in tried for seed in result.seeds)
    assert sorted(gain) == sorted((d, seed) for d in (0.0, result.best) for seed in result.fresh_seeds)
    assert result.rounds[0] == (0.0, 0.5, 0.9)  # λ=0 was not given
    scores: dict[float, Mapping[int, float | None]] = {}
    for tried, following in zip(result.rounds, result.rounds[1:], strict=False):
        scores |= {c.diversity: c.scores for c in result.candidates if c.diversity in tried}
        assert list(following) == refine_candidates(scores, select_diversity(scores))
    assert result.best == select_diversity({c.diversity: c.scores for c in result.candidates})


def test_seeds_are_fresh_and_determine_the_result() -> None:
    first, again, other = (run_search(seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    used = [seed for result in (first, other) for seed in (*result.seeds, *result.fresh_seeds)]
    assert len(used) == len(set(used)) == 10


@pytest.mark.parametrize(("name", "value", "sizes"), [("MAX_RUNS", 2, {2}), ("MEMORY", 1, {1})])
def test_groups_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, trainings: list[list[tuple[float, int]]], name: str, value: int, sizes: set[int]
) -> None:
    whole = run_search()
    trainings.clear()
    monkeypatch.setattr(grid_search, name, value)
    parts = run_search()
    assert {len(group) for group in trainings} == sizes
    assert (parts.best, parts.rounds) == (whole.best, whole.rounds)
    for ours, theirs in zip(parts.candidates, whole.candidates, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, rel=1e-9)


def test_test_samples_take_no_part_in_choosing() -> None:
    ours, theirs, none = run_search(), run_search(test=make_split(30, 7)), run_search(test=None)
    assert (ours.best, ours.candidates) == (theirs.best, theirs.candidates)
    assert ours.gain != theirs.gain
    assert none.gain is not None
    assert (none.gain.split, none.gain.choices) == ("validation", len(none.candidates) - 1)
    assert "on the validation samples that chose it" in none.sentence
    assert f"for all {none.gain.choices} λ above 0 together" in none.sentence


def test_score_scale_changes_units_alone() -> None:
    ours, theirs = run_search(score_scale=100.0), run_search()
    assert ours.best == theirs.best
    for a, b in zip(ours.candidates, theirs.candidates, strict=True):
        assert a.scores == pytest.approx({seed: 100 * (score or 0) for seed, score in b.scores.items()})
    assert ours.gain is not None
    assert theirs.gain is not None
    assert (ours.gain.mean, ours.gain.low) == pytest.approx((100 * theirs.gain.mean, 100 * (theirs.gain.low or 0)))


def test_one_member_has_no_diversity() -> None:
    result = run_search(replace(PLAN, num_members=1))
    assert (result.diversity, result.rounds, result.gain, result.fresh_seeds) == (0.0, ((0.0,),), None, ())
    assert result.sentence == "One member cannot differ from others: λ=0."


def test_callback_receives_all_stages() -> None:
    seen: list[tuple[SearchStage, float]] = []

    class Recorder(SearchCallback):
        def on_search(self, stage: SearchStage, fraction: float) -> None:
            seen.append((stage, fraction))

    result = run_search(callback=Recorder())
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert [(stage.number, stage.purpose) for stage in stages] == [(1, "search"), (2, "search"), (3, "gain")]
    assert [stage.diversities for stage in stages] == [*result.rounds, (0.0, result.best)]
    for stage in stages:
        fractions = [fraction for one, fraction in seen if one == stage]
        assert fractions == sorted(fractions)
        assert 0 < fractions[0] <= fractions[-1] == 1


# -- failed trainings -------------------------------------------------------------------------------------------------


def inject_infinities(monkeypatch: pytest.MonkeyPatch, fails: Callable[[float, int], bool]) -> None:
    """From now on these runs start with Inf."""

    def train_with_infinite_weights(plan: MemberPlan, train: Split, num_outputs: int, **options: Any) -> TrainedGroup:
        network = new_run_group(plan, train.x.shape[1], num_outputs, options["seeds"], options["diversities"])
        with torch.no_grad():
            for run, pair in enumerate(zip(options["diversities"], options["seeds"], strict=True)):
                if fails(*pair):
                    next(network.parameters())[run * plan.num_members] = torch.inf
        return train_members(plan, train, num_outputs, network=network, **options)

    monkeypatch.setattr(grid_search, "train_members", train_with_infinite_weights)


def test_a_candidate_with_a_failed_training_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_search(rounds=1)
    failed = (before.best, 1)
    inject_infinities(monkeypatch, lambda *run: run == failed)
    after = run_search(rounds=1)
    assert after.best != before.best
    scores = {(c.diversity, seed): score for c in after.candidates for seed, score in c.scores.items()}
    assert [run for run, score in scores.items() if score is None] == [failed]
    for candidate in before.candidates:  # the others are unchanged
        runs = {(candidate.diversity, seed): score for seed, score in candidate.scores.items()}
        assert all(scores[run] == score for run, score in runs.items() if run != failed)


def test_failed_fresh_seeds_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    inject_infinities(monkeypatch, lambda diversity, seed: seed == 501)
    result = run_search()
    assert result.gain is not None
    assert (result.fresh_seeds, result.gain.seeds) == ((500, 501, 502), (500, 502))
    assert "2 fresh seeds; 1 more failed" in result.sentence
    inject_infinities(monkeypatch, lambda diversity, seed: diversity == 0)
    result = run_search()
    assert (result.best > 0, result.diversity, result.gain) == (True, 0.0, None)
    assert result.sentence.endswith("its trainings with fresh seeds failed, so λ=0 is kept.")


def test_if_everything_fails_diversity_is_0() -> None:
    result = run_search(replace(PLAN, learning_rate=1e300))
    assert result.diversity == 0
    assert result.sentence == "Every training failed (NaN or Inf), so λ=0. Lower the learning rate."
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert all(candidate["scores"] == {"0": None, "1": None} for candidate in content["candidates"])


def test_no_diversity_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grid_search._GroupTrainer,
        "__call__",
        lambda self, stage, split: {
            d: {seed: torch.full((len(split),), d).double() for seed in stage.seeds} for d in stage.diversities
        },
    )
    result = run_search()
    assert (result.diversity, result.gain, result.fresh_seeds) == (0.0, None, ())
    assert result.rounds == ((0.0, 0.5, 0.9), (0.25,))
    assert result.sentence == (
        "No diversity helped: of 4 values of λ, 0 has the lowest cross entropy on the validation samples (2 seeds)."
    )


@pytest.mark.parametrize(("gain", "kept"), [(0.1, False), (0.001, True), (-0.1, True)])
def test_a_diversity_is_chosen_only_if_significant(monkeypatch: pytest.MonkeyPatch, gain: float, kept: bool) -> None:
    """On fresh seeds and other samples λ=0.5 gains 0.1, 0.001 or -0.1, with noise of 0.2 a sample."""

    def losses(self: Any, stage: SearchStage, split: Split) -> Any:
        noise = torch.randn(len(split), generator=torch.Generator().manual_seed(0)).double()
        gained = {"search": 1.0, "gain": gain}[stage.purpose]
        return {
            d: {seed: 5 - (gained + 0.2 * noise + 0.001 * (seed % 500)) * (d == 0.5) for seed in stage.seeds}
            for d in stage.diversities
        }

    monkeypatch.setattr(grid_search._GroupTrainer, "__call__", losses)
    result = run_search(rounds=1, num_fresh=5)
    assert result.best == 0.5
    assert result.diversity == (0.0 if kept else 0.5)
    assert ("so λ=0 is kept" in result.sentence) == kept


def test_the_model_with_no_diversity_gives_the_time_of_the_search() -> None:
    seen: list[float] = []

    class Recorder(SearchCallback):
        def on_estimate(self, seconds: float) -> None:
            seen.append(seconds)

    baseline = FitScores(train=0.5, validation=0.6, member=0.7, num_samples=96, seconds=3.0)
    searched, whole = run_search(baseline=baseline, callback=Recorder()), run_search(callback=Recorder())
    # 48 of 96 samples: half of 3 s for each of 3 λ and two more in round 2, two seeds, and 2 x 3 fresh ones
    assert seen == [pytest.approx(1.5 * (5 * 2 + 6))]
    assert (searched.train_score, searched.validation_score) == (0.5, 0.6)
    assert searched.sentence == (
        f"{whole.sentence} At λ=0 the cross entropy is 0.5 on the training and 0.6 on the validation samples."
    )
    assert [c.scores for c in searched.candidates] == [pytest.approx(c.scores, rel=1e-9) for c in whole.candidates]


def mean_zero_noise(count: int) -> torch.Tensor:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0)).double()
    return noise - noise.mean()


@pytest.mark.parametrize("gain", [0.02, 0.2])
def test_a_gain_below_its_standard_error_ends_the_search(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    stages = []

    def losses(self: Any, stage: SearchStage, split: Split) -> Any:
        stages.append(stage.purpose)
        noise = mean_zero_noise(len(split))
        rows = {d: 5 + (0.3 * noise - gain) * (d == 0.5) for d in stage.diversities}
        return {d: dict.fromkeys(stage.seeds, row) for d, row in rows.items()}

    monkeypatch.setattr(grid_search._GroupTrainer, "__call__", losses)
    result = run_search(rounds=1, num_fresh=5, num_seeds=1, end_early=True)
    assert result.best == 0.5
    assert (result.diversity, stages.count("gain")) == ((0.0, 0) if gain < 0.1 else (0.5, 1))
    assert (result.gain is None) == ("below its standard error, so λ=0 is kept" in result.sentence) == (gain < 0.1)
    whole = run_search(rounds=1, num_fresh=5, num_seeds=1)
    assert whole.gain is not None
    assert TunedDiversity.from_dict(result.to_dict()) == result


@pytest.mark.parametrize("gain", [0.02, 0.2])
def test_one_diversity_is_tried_before_the_others(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    tried = []

    def losses(self: Any, stage: SearchStage, split: Split) -> Any:
        tried.append(stage.diversities)
        noise = mean_zero_noise(len(split))
        rows = {d: 5 + (0.3 * noise - gain * d / 0.3) * (d > 0) for d in stage.diversities}
        return {d: dict.fromkeys(stage.seeds, row) for d, row in rows.items()}

    monkeypatch.setattr(grid_search._GroupTrainer, "__call__", losses)
    result = run_search(rounds=1, num_seeds=1, candidates=grid_search.CANDIDATES, end_early=True)
    others = [(0.1, 0.2, 0.5, 0.7), (0.0, 0.7)]  # the search, then the comparison
    assert tried == [(0.0, 0.3), *(others if gain > 0.1 else [])]
    assert (result.best, result.diversity) == ((0.7, 0.7) if gain > 0.1 else (0.3, 0.0))


# -- results and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_fresh": 0}, {"num_fresh": 1}, {"test": None}])
def test_result_survives_json(options: dict[str, Any]) -> None:
    result = run_search(**options)
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert TunedDiversity.from_dict(content) == result
    assert {"chosen", "metric", "split", "rounds", "candidates", "gain", "sentence"} <= set(content)
    if content["gain"] is not None:  # earlier versions wrote neither
        del content["gain"]["samples"], content["gain"]["choices"]
        gain = TunedDiversity.from_dict(content).gain
        assert gain is not None
        assert (gain.samples, gain.choices) == (None, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": (0.5, 1.5)}, r"Expected `candidates` in \[0, 1\], but got 1.5"),
        ({"num_seeds": 0}, "Expected `num_seeds` to be at least 1"),
        ({"num_fresh": -1}, "Expected `num_fresh` to be at least 0"),
        ({"num_seeds": 501}, "Expected at most 500 seeds"),
        ({"rounds": 0}, "Expected `rounds` to be at least 1"),
        ({"plan": replace(PLAN, batches="separate")}, "but got batches='separate'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run_search(**options, cache=SearchCache(tmp_path / "search"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "search").exists()
