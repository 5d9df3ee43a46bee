"""λ searched together with the size of the networks and how they are trained, by Optuna."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from optuna.distributions import BaseDistribution
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from torchace._checks import check_count
from torchace.lab.data import Split, hashed_key
from torchace.lab.training.early_stopping import validation_scores
from torchace.lab.training.loop import NONFINITE, Interrupted
from torchace.lab.training.members import MemberPlan, new_run_group, train_members
from torchace.lab.tuning.search_cache import fingerprint
from torchace.lab.tuning.storage import FAILURE, opened_study, retried, retry
from torchace.lab.tuning.tuning import METRICS, check_split, seeds_of

REPORTS = 10  # scores that a trial reports while it is trained, for pruning
STARTUP = 5  # trials that are never pruned, and that others are compared with

Values = dict[str, float]
Bounds = float | tuple[float, float]


# -- what is searched -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dimension:
    kind: type[int] | type[float]
    log: bool
    least: float
    most: float = math.inf


DIMENSIONS = {
    "diversity": _Dimension(float, False, 0.0, 1.0),
    "width": _Dimension(int, True, 1),
    "num_layers": _Dimension(int, False, 1),
    "learning_rate": _Dimension(float, True, 0.0),
    "weight_decay": _Dimension(float, True, 0.0),
    "num_members": _Dimension(int, False, 1),
    "batch_size": _Dimension(int, True, 1),
}


@dataclass(frozen=True)
class SearchSpace:
    """Between which bounds each number is searched; one number instead of two fixes it.

    Widths, learning rates, weight decays and batch sizes are searched on a logarithmic scale.

    Example:
        >>> SearchSpace(num_members=10, learning_rate=(1e-3, 1e-2)).free
        ('diversity', 'width', 'num_layers', 'learning_rate', 'weight_decay', 'batch_size')
    """

    diversity: Bounds = (0.0, 0.95)
    width: Bounds = (8, 256)
    num_layers: Bounds = (1, 3)
    learning_rate: Bounds = (3e-4, 3e-2)
    weight_decay: Bounds = (1e-4, 1e-1)
    num_members: Bounds = (3, 20)
    batch_size: Bounds = (32, 256)

    def __post_init__(self) -> None:
        for name, dimension in DIMENSIONS.items():
            given = getattr(self, name)
            ends = given if isinstance(given, tuple | list) else (given, given)
            if len(ends) != 2 or not all(_is_number(end, dimension) for end in ends) or not ends[0] <= ends[1]:
                kind = "whole numbers" if dimension.kind is int else "numbers"
                most = "" if dimension.most == math.inf else f" and at most {dimension.most:g}"
                raise ValueError(
                    f"Expected `{name}` to be bounds (low, high) or one value, {kind} of at least {dimension.least:g}"
                    f"{most}, but got {given!r}."
                )
            if dimension.log and ends[0] == 0 and (ends[1] > 0 or name == "learning_rate"):
                raise ValueError(
                    f"Expected `{name}` above 0, but got {given!r}. It is searched on a logarithmic scale."
                )

    @property
    def free(self) -> tuple[str, ...]:
        """The names of what is searched."""
        return tuple(name for name in DIMENSIONS if self._ends(name)[0] < self._ends(name)[1])

    def values(self, trial: Trial) -> Values:
        """A value for everything: Optuna's proposals, and what is fixed."""
        found: Values = {}
        for name, dimension in DIMENSIONS.items():
            low, high = self._ends(name)
            if low == high:
                found[name] = dimension.kind(low)
            elif dimension.kind is int:
                found[name] = trial.suggest_int(name, int(low), int(high), log=dimension.log)
            else:
                found[name] = trial.suggest_float(name, low, high, log=dimension.log)
        return found

    def nearest(self, plan: MemberPlan) -> Values:
        """The plan itself with λ=0, as far as the bounds allow."""
        hidden = plan.hidden or (1,)
        wanted = {**asdict(plan), "diversity": 0.0, "width": hidden[0], "num_layers": len(hidden)}
        return {name: min(max(wanted[name], self._ends(name)[0]), self._ends(name)[1]) for name in self.free}

    def _ends(self, name: str) -> tuple[float, float]:
        given = getattr(self, name)
        return (given[0], given[1]) if isinstance(given, tuple | list) else (given, given)


def plan_of(plan: MemberPlan, values: Mapping[str, Any]) -> tuple[MemberPlan, float]:
    """A plan with these values in it, and λ.

    Example:
        >>> values = {"diversity": 0.5, "width": 8, "num_layers": 2, "learning_rate": 0.01, "weight_decay": 0.1}
        >>> plan, diversity = plan_of(MemberPlan("classification"), {**values, "num_members": 4, "batch_size": 32})
        >>> plan.hidden, plan.num_members, diversity
        ((8, 8), 4, 0.5)
    """
    own = {name: value for name, value in values.items() if name in {one.name for one in fields(plan)}}
    return replace(plan, hidden=(values["width"],) * values["num_layers"], **own), values["diversity"]


def _is_number(value: object, dimension: _Dimension) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if dimension.kind is int else int | float):
        return False
    return dimension.least <= value <= dimension.most and math.isfinite(value)


# -- what is found ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a study."""

    number: int
    state: str  # "complete", "pruned", "failed", "running" or "waiting"
    value: float | None  # the mean held-out score of a complete one
    params: Mapping[str, float]  # with what is fixed
    failure: str | None = None  # why its training failed; None too for one whose process died


@dataclass(frozen=True)
class SearchResult:
    """All trials of a study, and the best: None of it where no trial is complete.

    The best value was chosen for being low on the validation samples, so it flatters.
    """

    study_name: str
    task: str
    trials: tuple[TrialRecord, ...]
    best: TrialRecord | None
    plan: MemberPlan | None
    diversity: float | None

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        best = None
        if self.best is not None and self.plan is not None:
            plan = {**asdict(self.plan), "hidden": list(self.plan.hidden)}
            best = {**_recorded(self.best), "plan": plan, "diversity": self.diversity}
        return {
            "study": self.study_name,
            "metric": METRICS[self.task],
            "split": "validation",
            "best": best,
            "trials": [_recorded(trial) for trial in self.trials],
        }


def _recorded(trial: TrialRecord) -> dict[str, Any]:
    return {**vars(trial), "params": dict(trial.params)}


# -- searching --------------------------------------------------------------------------------------------------------


def search(
    space: SearchSpace,
    plan: MemberPlan,
    train: Split,
    validation: Split,
    num_outputs: int,
    *,
    trials: int,
    storage: str | Path | None = None,
    study_name: str = "torchace",
    seed: int = 0,
    num_seeds: int = 2,
    pruning: bool = True,
    timeout: float | None = None,
    heartbeat: int = 30,
    watch: Callable[[int, float | None, float | None], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Searches for the plan and λ with the lowest cross entropy (or squared error) on held-out samples.

    A trial trains its plan with several seeds, the same ones in every trial, as one cohort; its value is their mean
    score. The first is the given plan at λ=0. A study is finished once it has so many trials that were completed,
    pruned, or failed for good: repeated, this goes on where it was. Any number of processes may work on one study; each
    ends the trial it has begun, so there may be as many more. What is proposed depends on the seed, the trial's place
    and the trials before it, so that no two processes propose the same, and a process that was killed and started again
    finds what it would have found.

    Args:
        space: What is searched.
        plan: Everything else; its own sizes and rates are where the search starts.
        train: Vectors `(N, D)` of the plan's precision, with class indices `(N,)` or targets `(N, M)`.
        validation: What trials are scored on, and what early stopping looks at where the plan has a patience.
        num_outputs: Classes, or targets of a regression.
        trials: How many, those of the study before this call included.
        storage: The path of an SQLite file, a URL as Optuna takes it (PostgreSQL, for many machines), or None.
        study_name: Studies of several names can be in one storage.
        seed: Decides what is proposed, and the seeds of the trainings.
        num_seeds: Trainings of each trial.
        pruning: Whether a trial is given up when it is worse than the median of those before it.
        timeout: Seconds after which no trial is begun.
        heartbeat: Seconds between two signs of life; after three times as long a process is held for dead.
        watch: Is told a trial's number, its value (None unless it was completed) and the best one so far.
        stop: Is asked before every step; when it says yes, `Interrupted` is raised and the trial at hand will be tried
            again.

    Example:
        >>> x = torch.randn(96, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> split = Split(x, (x.prod(1) > 0).long())
        >>> train, held_out = split.take(torch.arange(64)), split.take(torch.arange(64, 96))
        >>> plan = MemberPlan("classification", num_members=3, hidden=(4,), epochs=5)
        >>> found = search(SearchSpace(num_members=3, width=(4, 8)), plan, train, held_out, 2, trials=3)
        >>> [trial.state for trial in found.trials], found.trials[0].params["diversity"], found.plan.num_members
        (['complete', 'complete', 'complete'], 0.0, 3)
    """
    check_count(trials, "trials", least=0)
    check_count(num_seeds, "num_seeds")
    check_count(heartbeat, "heartbeat")
    for name, split in (("train", train), ("validation", validation)):
        check_split(plan, split, name)
    if plan.batches == "separate" and "diversity" in space.free:
        raise ValueError(
            "Expected a plan whose members see each other to search λ for, but got batches='separate'. "
            "Use 'shared' or 'exchanged', or SearchSpace(diversity=0)."
        )
    seeds = list(seeds_of(seed, num_seeds))
    known = fingerprint(plan, num_outputs, train=train, validation=validation)
    known = {key: value for key, value in known.items() if key not in {*DIMENSIONS, "hidden"}} | {"seeds": seeds}
    began = time.monotonic()
    with opened_study(
        storage,
        study_name,
        known,
        sampler=_Sampler(seed, space.nearest(plan)),
        pruner=MedianPruner(STARTUP, n_warmup_steps=plan.epochs // 5, n_min_trials=STARTUP) if pruning else NopPruner(),
        heartbeat=heartbeat,
    ) as opened:
        study = opened.study

        def told_to_stop() -> bool:
            opened.check()
            return stop()

        objective = _Objective(space, plan, train, validation, num_outputs, seeds, told_to_stop)
        while True:
            opened.recover()
            if not _is_needed(study, trials):
                break
            if stop():
                raise Interrupted
            if timeout is not None and time.monotonic() - began >= timeout:
                break
            number = _next(study, objective)
            if watch is not None and number is not None:
                done = study.get_trials(deepcopy=False)
                best = _best(done)
                watch(number, _value(done[number]), None if best is None else _value(best))
        return _result(study, plan)


def _is_needed(study: Study, count: int) -> bool:
    """Whether there is a trial to do: too few are finished, or one that was begun is to be tried again."""
    trials = study.get_trials(deepcopy=False)
    again = any(trial.state == TrialState.WAITING and retried(trial) is not None for trial in trials)
    return again or sum(map(_is_finished, trials)) < count


def _next(study: Study, objective: _Objective) -> int | None:
    """Does one trial; its number, None where this process was held for dead and somebody else tries it again."""
    begun = len(objective.begun)
    try:
        study.optimize(objective, n_trials=1, catch=(_TrainingFailed,))
    except (Interrupted, KeyboardInterrupt):
        for number in objective.begun[begun:]:
            retry(study, number)
        raise
    except (UpdateFinishedTrialError, ValueError) as error:
        if error is objective.error or len(objective.begun) == begun:
            raise
        return None  # not the trial went wrong but the writing down of its end: it has one
    return objective.begun[-1]


class _TrainingFailed(Exception):
    """NaN, Inf or no memory: the trial is failed, not infinitely bad."""


@dataclass
class _Objective:
    """A trial's value: trains the proposed plan and reports on the way."""

    space: SearchSpace
    plan: MemberPlan
    train: Split
    validation: Split
    num_outputs: int
    seeds: Sequence[int]
    stop: Callable[[], bool]
    begun: list[int] = field(default_factory=list)  # the numbers of trials
    error: Exception | None = None  # what the last one ended with

    def __call__(self, trial: Trial) -> float:
        self.begun.append(trial.number)
        self.error = None
        try:
            return self._value(trial)
        except Exception as error:
            self.error = error
            raise

    def _value(self, trial: Trial) -> float:
        values = self.space.values(trial)
        trial.set_user_attr("values", values)
        plan, diversity = plan_of(self.plan, values)
        network = new_run_group(plan, self.train.x.shape[1], self.num_outputs, self.seeds).to(self.train.x.device)
        watching = _Watching(plan, network, self.train, self.validation, trial, self.stop)
        try:
            trained = train_members(
                plan,
                self.train,
                self.num_outputs,
                diversities=[diversity] * len(self.seeds),
                seeds=self.seeds,
                validation=self.validation,
                network=network,
                stop=watching,
            )
        except Interrupted:
            if watching.verdict is None:
                raise
            raise watching.verdict from None
        except (MemoryError, torch.OutOfMemoryError):
            raise _failed(trial, "out of memory") from None
        scores = trained.scores(self.validation)
        if not all(map(math.isfinite, scores)):
            raise _failed(trial, NONFINITE)
        return sum(scores) / len(scores)


class _Watching:
    """Asked before every step whether to stop: now and then it scores the runs, reports, and asks the pruner."""

    def __init__(
        self,
        plan: MemberPlan,
        network: Any,
        train: Split,
        validation: Split,
        trial: Trial,
        stop: Callable[[], bool],
    ) -> None:
        self.plan, self.network, self.validation, self.trial, self.stop = plan, network, validation, trial, stop
        self.train_config, self.steps_per_epoch = plan.train_config(len(train)), plan.steps_per_epoch(len(train))
        self.epochs = math.ceil(plan.epochs / REPORTS)  # between two reports
        self.step = 0
        self.best = [math.inf] * network.num_runs
        self.verdict: Exception | None = None

    def __call__(self) -> bool:
        if self.stop():
            return True
        if self.step and self.step % (self.epochs * self.steps_per_epoch) == 0:
            self._report(self.step // self.steps_per_epoch)
        self.step += 1
        return self.verdict is not None

    def _report(self, epoch: int) -> None:
        scores = validation_scores(self.network, self.validation, self.train_config).tolist()
        if not all(map(math.isfinite, scores)):
            self.verdict = _failed(self.trial, NONFINITE)
            return
        if self.plan.patience is not None:  # what a run keeps is its best epoch
            self.best = scores = [min(pair) for pair in zip(scores, self.best, strict=True)]
        self.trial.report(sum(scores) / len(scores), epoch)
        if self.trial.should_prune():
            self.verdict = TrialPruned()


def _failed(trial: Trial, reason: str) -> _TrainingFailed:
    trial.set_user_attr(FAILURE, reason)
    return _TrainingFailed(reason)


class _Sampler(BaseSampler):
    """Optuna's TPE, seeded anew for each trial by its place, so that nothing depends on which process asks.

    A place is a trial's number among those that are not another's second attempt: what a killed process leaves to be
    tried again moves nothing.
    """

    def __init__(self, seed: int, first: Mapping[str, float]) -> None:
        self.seed, self.first = seed, first
        self.place = -1

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        # a trial that is tried again is the one it was
        original = retried(trial)
        number = trial.number if original is None else original
        earlier = (other for other in study.get_trials(deepcopy=False) if other.number < number)
        self.place = sum(retried(other) is None for other in earlier)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {} if self.place == 0 else self._tpe().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._tpe().sample_relative(study, trial, search_space) if search_space else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if self.place == 0:
            return self.first[param_name]
        # by name: a trial that is tried again may have the first of them already
        return self._tpe(param_name).sample_independent(study, trial, param_name, param_distribution)

    def _tpe(self, *what: str) -> TPESampler:
        seed = hashed_key(self.seed, "proposal", self.place, *what) % 2**32
        return TPESampler(multivariate=True, constant_liar=True, seed=seed)


# -- reading a study --------------------------------------------------------------------------------------------------

STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def _is_finished(trial: FrozenTrial) -> bool:
    """Whether a trial counts. One whose process died does not: it is tried again."""
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or FAILURE in trial.user_attrs


def _value(trial: FrozenTrial) -> float | None:
    return trial.value if trial.state == TrialState.COMPLETE else None


def _best(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The complete trial with the lowest value; the earlier of equals."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(complete, key=lambda trial: (trial.value, trial.number), default=None)


def _result(study: Study, plan: MemberPlan) -> SearchResult:
    trials = study.get_trials(deepcopy=False)
    records = tuple(
        TrialRecord(
            trial.number,
            STATES[trial.state],
            _value(trial),
            trial.user_attrs.get("values", trial.params),
            trial.user_attrs.get(FAILURE),
        )
        for trial in trials
    )
    if (best := _best(trials)) is None:
        return SearchResult(study.study_name, plan.task, records, None, None, None)
    chosen, diversity = plan_of(plan, best.user_attrs["values"])
    return SearchResult(study.study_name, plan.task, records, records[best.number], chosen, diversity)
