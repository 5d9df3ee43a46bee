"""Searches with Optuna: proposals, scores, storage, errors; processes that die during a trial."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from tests.lab.tuning.search_data import make_split
from torchace.lab.data import Split
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.members import MemberPlan, TrainedGroup, train_members
from torchace.lab.tuning import optuna_search
from torchace.lab.tuning.optuna_search import OptunaSearch, SearchSpace, StudyResult, apply_values
from torchace.lab.tuning.search import SearchCallback, SearchProblem

PLAN = MemberPlan("classification", num_members=2, hidden=(6,), epochs=6, batch_size=16, learning_rate=0.02)
SPACE: SearchSpace = {
    **optuna_search.SPACE,
    "width": (2, 8),
    "num_layers": (1, 2),
    "num_members": (1, 4),
    "batch_size": (8, 32),
    "learning_rate": (1e-3, 0.1),
}


TRAIN, VALIDATION = make_split(48), make_split(40, 1)


class Recorder(SearchCallback):
    """Calls a function after every trial."""

    def __init__(self, on_trial: Callable[..., object]) -> None:
        self.on_trial = on_trial  # type: ignore[method-assign, assignment]


def found(
    trials: int,
    storage: str | Path | None = None,
    *,
    space: SearchSpace = SPACE,
    plan: MemberPlan = PLAN,
    train: Split = TRAIN,
    seed: int = 0,
    watch: Callable[..., object] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> StudyResult:
    problem = SearchProblem(plan, train, VALIDATION, 2, seed)
    search = OptunaSearch(problem, trials, space, storage, **{"num_seeds": 2, **options})
    return search.run(None if watch is None else Recorder(watch), stop)


def ended(result: StudyResult) -> list[tuple[str, Any, float | None]]:
    """The trials that count."""
    return [(t.state, t.params, t.value) for t in result.trials if t.state in ("complete", "pruned")]


def states(result: StudyResult) -> list[str]:
    return [trial.state for trial in result.trials]


def value_alone(params: Any, seeds: tuple[int, ...] = (0, 1), plan: MemberPlan = PLAN) -> float:
    """The mean score of trainings one by one."""
    chosen, diversity = apply_values(plan, params)
    scores = [
        train_members(chosen, TRAIN, 2, diversities=[diversity], seeds=[seed], validation=VALIDATION).scores(VALIDATION)
        for seed in seeds
    ]
    return math.fsum(score[0] for score in scores) / len(seeds)


# -- search space -----------------------------------------------------------------------------------------------------


def test_suggestions_stay_within_bounds() -> None:
    bounds = {
        "diversity": (0.1, 0.3),
        "width": (4, 4),
        "num_layers": (1, 2),
        "num_members": (2, 2),
        "batch_size": (8, 9),
    }
    result = found(12, space={**SPACE, **bounds}, num_seeds=1, plan=replace(PLAN, epochs=1))
    assert len(result.trials) == 12
    for trial in result.trials:
        assert tuple(trial.params) == tuple(SPACE)
        assert all(low <= trial.params[name] <= high for name, (low, high) in bounds.items())
    assert len({trial.params["diversity"] for trial in result.trials}) == 12


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"diversity": (0.5, 1.5)}, r"Expected `diversity` in \[0, 1\], but got 1.5"),
        ({"diversity": (0.5, 0.2)}, "`low` value must be smaller|low"),
        ({"weight_decay": (0.0, 0.1)}, "low"),
    ],
)
def test_bad_bounds(bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(2, space={**SPACE, **bounds})


@pytest.mark.parametrize("patience", [None, 2])
def test_values_equal_those_of_plans_trained_alone(patience: int | None) -> None:
    plan = replace(PLAN, patience=patience)
    result = found(4, plan=plan, pruning=False)
    assert states(result) == ["complete"] * 4
    for trial in result.trials:
        # a run group equals its runs trained alone to rounding
        assert trial.value == pytest.approx(value_alone(trial.params, plan=plan), rel=1e-9)
    values = [trial.value for trial in result.trials if trial.value is not None]
    assert result.best is not None
    assert result.best.value == min(values)
    assert (result.plan, result.diversity) == apply_values(plan, result.best.params)


def test_regression_is_scored_by_squared_error() -> None:
    train, validation = make_split(40, task="regression"), make_split(40, 1, "regression")
    plan = replace(PLAN, task="regression")
    result = OptunaSearch(SearchProblem(plan, train, validation, 1), 2, SPACE, num_seeds=1).run()
    assert result.plan is not None
    assert result.diversity is not None
    alone = train_members(result.plan, train, 1, diversities=[result.diversity], seeds=[0])
    prediction = alone.ensemble(0)(validation.x).detach().mean(0)
    assert result.best is not None
    assert result.best.value == pytest.approx(float((prediction - validation.y).square().mean()), rel=1e-9)
    assert result.to_dict()["metric"] == "mse"


def test_first_trial_is_the_plan_at_diversity_0() -> None:
    params = found(1).trials[0].params
    assert params == {
        "diversity": 0.0, "width": 6, "num_layers": 1, "learning_rate": 0.02, "weight_decay": 0.01, "num_members": 2,
        "batch_size": 16,
    }  # fmt: skip
    bounds = {"diversity": (0.2, 0.4), "width": (10, 12), "num_members": (5, 5), "learning_rate": (1e-3, 2e-3)}
    narrow = {**optuna_search.SPACE, **bounds}
    params = found(1, space=narrow).trials[0].params
    assert [params[name] for name in ("diversity", "width", "num_members", "learning_rate")] == [0.2, 10, 5, 2e-3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": -1}, "Expected `trials` to be at least 0"),
        ({"trials": 1, "num_seeds": 0}, "Expected `num_seeds` to be at least 1"),
        ({"trials": 1, "plan": replace(PLAN, batches="separate")}, "batches='separate'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        found(storage=tmp_path / "study.db", **options)
    assert not list(tmp_path.iterdir())


def test_separate_batches_are_accepted_at_diversity_0() -> None:
    plan = replace(PLAN, batches="separate")
    assert states(found(1, plan=plan, space={**SPACE, "diversity": (0.0, 0.0)})) == ["complete"]


def test_seed_determines_suggestions() -> None:
    short = replace(PLAN, epochs=1)
    ours, theirs = (found(14, plan=short, num_seeds=1) for _ in range(2))  # past TPE's random start
    assert [t.params for t in ours.trials] == [t.params for t in theirs.trials]
    assert [t.value for t in ours.trials] == [t.value for t in theirs.trials]
    other = found(3, plan=short, num_seeds=1, seed=1)
    assert [t.params for t in other.trials[1:3]] != [t.params for t in ours.trials[1:3]]
    assert len({json.dumps(dict(trial.params)) for trial in ours.trials}) == 14


# -- studies ----------------------------------------------------------------------------------------------------------


def test_second_run_resumes_the_study(tmp_path: Path) -> None:
    file = tmp_path / "below" / "study.db"
    first = found(3, file)
    again = found(3, file)
    assert again == first
    more = found(5, str(file))  # a path as text
    assert more.trials[:3] == first.trials
    assert len(more.trials) == 5
    assert found(5, f"sqlite:///{file}") == more
    assert found(5, pruning=False, num_seeds=2).trials[:3] == first.trials  # kept or not, the same
    other = found(1, file, study_name="other", plan=replace(PLAN, epochs=2))
    assert len(other.trials) == 1


def test_callback_receives_every_trial() -> None:
    seen: list[tuple[int, float | None, float | None]] = []
    result = found(4, watch=lambda *args: seen.append(args))
    best: float | None = None
    for trial, (number, value, so_far) in zip(result.trials, seen, strict=True):
        best = trial.value if best is None or (trial.value or math.inf) < best else best
        assert (number, value, so_far) == (trial.number, trial.value, best)


def test_result_is_json(tmp_path: Path) -> None:
    result = found(2, tmp_path / "study.db")
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert result.best is not None
    assert content["best"]["value"] == result.best.value
    assert content["best"]["diversity"] == result.diversity
    assert MemberPlan(**{**content["best"]["plan"], "hidden": tuple(content["best"]["plan"]["hidden"])}) == result.plan
    assert [trial["number"] for trial in content["trials"]] == [0, 1]
    assert content["metric"] == "cross_entropy"


def test_study_without_trials() -> None:
    result = found(0)
    assert (result.trials, result.best, result.plan, result.to_dict()["best"]) == ((), None, None, None)


def test_optuna_is_silenced_and_restored(capsys: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    found(1, space={**SPACE, "learning_rate": (1e300, 1e300)})
    assert optuna.logging.get_verbosity() == before
    assert capsys.readouterr() == ("", "")


def test_bad_trials_are_pruned(tmp_path: Path) -> None:
    good = {**SPACE, "learning_rate": (0.01, 0.05), "num_members": (2, 2)}
    bad = {**SPACE, "learning_rate": (1e-12, 2e-12), "num_members": (2, 2)}
    plan = replace(PLAN, epochs=20)
    before = found(5, tmp_path / "study.db", space=good, plan=plan)
    assert states(before) == ["complete"] * 5
    unpruned = found(6, tmp_path / "study.db", space=bad, plan=plan, pruning=False)
    assert states(unpruned)[5:] == ["complete"]
    pruned = found(8, tmp_path / "study.db", space=bad, plan=plan)
    assert states(pruned)[6:] == ["pruned"] * 2
    assert [trial.value for trial in pruned.trials[6:]] == [None, None]
    assert pruned.best == before.best
    assert found(8, tmp_path / "study.db", space=bad, plan=plan) == pruned  # they count


def test_a_pruned_trial_stops_early_and_reports_validation_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, epochs=20)  # a report every second epoch
    result = found(1, tmp_path / "study.db", plan=plan)
    (trial,) = optuna.load_study(study_name="torchace", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert list(trial.intermediate_values) == list(range(2, 20, 2))
    # the same training without its end, whose learning rate is another step's: constant with a patience
    patient = replace(plan, patience=100)
    found(1, tmp_path / "patient.db", plan=patient)
    (trial,) = optuna.load_study(study_name="torchace", storage=f"sqlite:///{tmp_path}/patient.db").trials
    alone = value_alone(result.trials[0].params, plan=replace(patient, epochs=2))
    # its best epoch may be the first of the two; the report has the second alone
    assert trial.intermediate_values[2] >= alone - 1e-9
    reports = list(trial.intermediate_values.values())
    assert reports == sorted(reports, reverse=True)  # the best so far


# -- failures ---------------------------------------------------------------------------------------------------------


def test_failed_training_fails_the_trial(tmp_path: Path) -> None:
    wild = {**SPACE, "learning_rate": (1e300, 1e301)}
    result = found(3, tmp_path / "study.db", space=wild)
    assert states(result) == ["failed"] * 3
    assert all(trial.value is None and trial.failure for trial in result.trials)
    assert (result.best, result.plan) == (None, None)
    stored = optuna.load_study(study_name="torchace", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert [trial.state for trial in stored] == [TrialState.FAIL] * 3
    assert all(trial.values is None for trial in stored)
    assert found(3, tmp_path / "study.db", space=wild) == result  # for good: they are not tried again
    mixed = found(4, tmp_path / "study.db")
    assert states(mixed) == ["failed"] * 3 + ["complete"]
    assert mixed.best == mixed.trials[3]


def test_one_failed_seed_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_corrupted(*args: Any, network: Any, **options: Any) -> TrainedGroup:
        with torch.no_grad():
            next(network.parameters())[-1] = torch.inf  # the last seed's last member
        return train_members(*args, network=network, **options)

    monkeypatch.setattr(optuna_search, "train_members", train_corrupted)
    result = found(1)
    assert states(result) == ["failed"]
    assert result.trials[0].failure == "NaN or Inf in loss or gradient"


def test_out_of_memory_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*args: Any, **options: Any) -> TrainedGroup:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optuna_search, "train_members", greedy)
    assert [(trial.state, trial.failure) for trial in found(2).trials] == [("failed", "out of memory")] * 2


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> TrainedGroup:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(optuna_search, "train_members", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            found(2, tmp_path / "study.db")
    assert states(found(2, tmp_path / "study.db")) == ["failed", "complete", "complete"]


def test_interrupted_trial_is_tried_again(tmp_path: Path) -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 30

    with pytest.raises(Interrupted):
        found(4, tmp_path / "study.db", stop=stop, pruning=False)
    result = found(4, tmp_path / "study.db", pruning=False)
    uninterrupted = found(4, pruning=False)
    (dead,) = (trial for trial in result.trials if trial.state == "failed")
    assert dead.failure is None
    again = result.trials[dead.number + 1]
    assert again.params == uninterrupted.trials[dead.number].params == dead.params
    assert again.value == uninterrupted.trials[dead.number].value
    assert states(result).count("complete") == 4


@pytest.mark.extended
def test_interrupted_study_finds_the_same(tmp_path: Path) -> None:
    """More trials than are drawn at random first: proposals depend on those before them."""
    count, file = 14, tmp_path / "study.db"
    uninterrupted = found(count, num_seeds=1)
    stops = 0
    while True:
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked == 40 + 5 * stops  # noqa: B023  # a trial asks up to 36 times

        try:
            result = found(count, file, num_seeds=1, stop=stop)
        except Interrupted:
            stops += 1
            continue
        break
    assert stops >= 4
    finished = [trial for trial in result.trials if trial.state in ("complete", "pruned")]
    assert [(t.state, t.params, t.value) for t in finished] == [
        (t.state, t.params, t.value) for t in uninterrupted.trials
    ]


def test_interrupted_between_trials(tmp_path: Path) -> None:
    done = 0

    def watch(*args: Any) -> None:
        nonlocal done
        done += 1

    with pytest.raises(Interrupted):
        found(4, tmp_path / "study.db", watch=watch, stop=lambda: done == 2)
    assert states(found(2, tmp_path / "study.db")) == ["complete"] * 2


# -- killed processes -------------------------------------------------------------------------------------------------


def work(file: str, marker: str) -> None:
    """Is at its third trial, and stays there."""
    torch.set_num_threads(1)
    finished = asked = 0  # trials, and how often since then

    def watch(*args: Any) -> None:
        nonlocal finished, asked
        finished, asked = finished + 1, 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if finished == 2 and asked == 5:
            Path(marker).touch()
            signal.pause()
        return False

    found(5, file, watch=watch, stop=stop, pruning=False)


@pytest.mark.extended
def test_killed_process_loses_no_finished_trial(tmp_path: Path) -> None:
    file, marker = tmp_path / "study.db", tmp_path / "marker"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=work, args=(str(file), str(marker)), daemon=True)
    process.start()
    while not marker.exists():
        process.join(0.01)
        assert process.exitcode is None
    # another one beside it, while it lives: its trial is left alone
    beside = found(3, file, pruning=False)
    assert states(beside) == ["complete", "complete", "running", "complete"]
    process.kill()
    process.join()
    with closing(sqlite3.connect(file)) as connection, connection:  # as if it had died long ago
        connection.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
    result = found(5, file, pruning=False)
    assert states(result) == ["complete", "complete", "failed", "complete", "complete", "complete"]
    assert result.trials[:2] == beside.trials[:2]
    assert result.trials[3] == beside.trials[3]
    again = [trial for trial in result.trials if trial.params == result.trials[2].params]
    assert [trial.state for trial in again] == ["failed", "complete"]
    assert again[1].params == found(3, pruning=False).trials[2].params
