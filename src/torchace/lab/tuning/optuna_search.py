"""Search of hyperparameters and λ with Optuna, and its search space."""

from __future__ import annotations

import math
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
from torchace.lab.data import hashed_key
from torchace.lab.training.evaluate import validation_scores
from torchace.lab.training.loop import NONFINITE, Interrupted
from torchace.lab.training.members import MemberPlan, new_run_group, train_members
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.tasks import TASKS
from torchace.lab.tuning.search import Search, SearchCallback, SearchProblem
from torchace.lab.tuning.storage import FAILURE, first_attempt, open_study, retry_trial

Bounds = float | tuple[float, float]
LOG_SCALE = {"width", "learning_rate", "weight_decay", "batch_size"}
WHOLE_NUMBERS = {"width", "num_layers", "num_members", "batch_size"}


@dataclass(frozen=True)
class SearchSpace:
    """Bounds of each hyperparameter; a single number fixes it. Those in `LOG_SCALE` are searched on a log scale."""

    diversity: Bounds = (0.0, 0.95)
    width: Bounds = (8, 256)
    num_layers: Bounds = (1, 3)
    learning_rate: Bounds = (3e-4, 3e-2)
    weight_decay: Bounds = (1e-4, 1e-1)
    num_members: Bounds = (3, 20)
    batch_size: Bounds = (32, 256)

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            given, ends = getattr(self, name), self.bounds(name)
            if len(ends) != 2 or not all(_is_valid(name, end) for end in ends) or not ends[0] <= ends[1]:
                raise ValueError(
                    f"Expected `{name}` to be bounds (low, high) or one value, "
                    f"{'whole numbers of at least 1' if name in WHOLE_NUMBERS else 'numbers of at least 0'}"
                    f"{' and at most 1' if name == 'diversity' else ''}, but got {given!r}."
                )
            if name in LOG_SCALE and ends[0] == 0 and (ends[1] > 0 or name == "learning_rate"):
                raise ValueError(
                    f"Expected `{name}` above 0, but got {given!r}. It is searched on a logarithmic scale."
                )

    def bounds(self, name: str) -> tuple[float, ...]:
        """Return the bounds of a hyperparameter; equal if it is fixed."""
        given = getattr(self, name)
        return tuple(given) if isinstance(given, tuple | list) else (given, given)

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the hyperparameters that are not fixed."""
        return tuple(name for name in DIMENSIONS if self.bounds(name)[0] < self.bounds(name)[1])

    def suggest(self, trial: Trial) -> dict[str, float]:
        """Return Optuna's suggestions and the fixed values."""
        values: dict[str, float] = {}
        for name in DIMENSIONS:
            low, high = self.bounds(name)
            if low == high:
                values[name] = low
            elif name in WHOLE_NUMBERS:
                values[name] = trial.suggest_int(name, int(low), int(high), log=name in LOG_SCALE)
            else:
                values[name] = trial.suggest_float(name, low, high, log=name in LOG_SCALE)
        return values

    def clip(self, plan: MemberPlan) -> dict[str, float]:
        """Return a plan's free values at λ=0, clipped to the bounds."""
        hidden = plan.hidden or (1,)
        values = {**asdict(plan), "diversity": 0.0, "width": hidden[0], "num_layers": len(hidden)}
        return {name: min(max(values[name], self.bounds(name)[0]), self.bounds(name)[1]) for name in self.free}


def apply_values(plan: MemberPlan, values: Mapping[str, Any]) -> tuple[MemberPlan, float]:
    """Return the plan with a trial's values, and λ."""
    known = {name: value for name, value in values.items() if name in {one.name for one in fields(plan)}}
    return replace(plan, hidden=(values["width"],) * values["num_layers"], **known), values["diversity"]


def _is_valid(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name in WHOLE_NUMBERS else int | float):
        return False
    least, most = int(name in WHOLE_NUMBERS), 1 if name == "diversity" else math.inf
    return least <= value <= most and math.isfinite(value)


DIMENSIONS = tuple(field.name for field in fields(SearchSpace))


DEFAULT_SPACE = SearchSpace()
NUM_REPORTS = 10  # intermediate scores of a trial, for pruning
STARTUP_TRIALS = 5  # never pruned


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a study."""

    number: int
    state: str  # "complete", "pruned", "failed", "running" or "waiting"
    value: float | None  # mean validation score, if complete
    params: Mapping[str, float]  # fixed values included
    failure: str | None = None  # None if its process died


@dataclass(frozen=True)
class StudyResult:
    """All trials of a study and the best one, None if no trial is complete.

    The best value is biased: it was chosen on the same validation samples.
    """

    study_name: str
    task: str
    trials: tuple[TrialRecord, ...]
    best: TrialRecord | None
    plan: MemberPlan | None
    diversity: float | None

    @classmethod
    def from_study(cls, study: Study, plan: MemberPlan) -> StudyResult:
        """Return the result of a study that tunes `plan`."""
        trials = study.get_trials(deepcopy=False)
        states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        records = tuple(
            TrialRecord(
                trial.number,
                states.get(trial.state, trial.state.name.lower()),
                _value(trial),
                trial.user_attrs.get("values", trial.params),
                trial.user_attrs.get(FAILURE),
            )
            for trial in trials
        )
        if (best := _best_trial(trials)) is None:
            return cls(study.study_name, plan.task, records, None, None, None)
        chosen, diversity = apply_values(plan, best.user_attrs["values"])
        return cls(study.study_name, plan.task, records, records[best.number], chosen, diversity)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a result file."""
        best = None
        if self.best is not None and self.plan is not None:
            plan = {**asdict(self.plan), "hidden": list(self.plan.hidden)}
            best = {**asdict(self.best), "plan": plan, "diversity": self.diversity}
        return {
            "study": self.study_name,
            "metric": TASKS[self.task].score_name,
            "split": "validation",
            "best": best,
            "trials": [asdict(trial) for trial in self.trials],
        }


@dataclass(frozen=True)
class OptunaSearch(Search):
    """Search the plan and λ with the lowest cross entropy (or squared error) on validation samples.

    The value of a trial is the mean score over the seeds. The first trial is the given plan at λ=0. A second run
    resumes the study, and several processes may share it. Suggestions depend on the seed and earlier trials alone.
    """

    problem: SearchProblem
    trials: int  # earlier ones of the study included
    space: SearchSpace = DEFAULT_SPACE
    storage: str | Path | None = None  # an SQLite file or an Optuna storage URL
    study_name: str = "torchace"
    num_seeds: int = 2  # trainings of each trial
    pruning: bool = True  # stop trials that are worse than the median
    heartbeat: int = 30  # seconds; a process without one for three times as long counts as dead

    def __post_init__(self) -> None:
        check_count(self.trials, "trials", least=0)
        check_count(self.num_seeds, "num_seeds")
        check_count(self.heartbeat, "heartbeat")
        if "diversity" in self.space.free:
            self.problem.check_coupled()

    def run(self, callback: SearchCallback | None = None, stop: Callable[[], bool] = lambda: False) -> StudyResult:
        """Run trials until the study has `trials` finished ones."""
        problem = self.problem
        seeds = problem.training_seeds(self.num_seeds)
        searched = {*DIMENSIONS, "hidden"}
        fingerprint = {key: value for key, value in problem.fingerprint().items() if key not in searched}
        pruner = MedianPruner(STARTUP_TRIALS, n_warmup_steps=problem.plan.epochs // 5, n_min_trials=STARTUP_TRIALS)
        with open_study(
            self.storage,
            self.study_name,
            {**fingerprint, "seeds": list(seeds)},
            sampler=_SeededSampler(problem.seed, self.space.clip(problem.plan)),
            pruner=pruner if self.pruning else NopPruner(),
            heartbeat=self.heartbeat,
        ) as opened:
            study = opened.study

            def check_and_stop() -> bool:
                opened.check()
                return stop()

            objective = _Objective(self.space, problem, seeds, check_and_stop)
            opened.recover()
            while _needs_trial(study, self.trials):
                if stop():
                    raise Interrupted
                number = _run_trial(study, objective)
                if callback is not None and number is not None:
                    trials = study.get_trials(deepcopy=False)
                    best = _best_trial(trials)
                    callback.on_trial(number, _value(trials[number]), None if best is None else best.value)
                opened.recover()
            return StudyResult.from_study(study, problem.plan)


def _needs_trial(study: Study, count: int) -> bool:
    trials = study.get_trials(deepcopy=False)
    waiting = any(trial.state == TrialState.WAITING and first_attempt(trial) is not None for trial in trials)
    # without trials whose process died: they are retried
    finished = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED) or FAILURE in t.user_attrs]
    return waiting or len(finished) < count


def _run_trial(study: Study, objective: _Objective) -> int | None:
    """Run one trial and return its number; None if this process was declared dead meanwhile."""
    count = len(objective.started)
    try:
        study.optimize(objective, n_trials=1, catch=(_TrainingError,))
    except (Interrupted, KeyboardInterrupt):
        for number in objective.started[count:]:
            retry_trial(study, number)
        raise
    except (UpdateFinishedTrialError, ValueError) as error:
        if error is objective.error or len(objective.started) == count:
            raise
        return None  # another process retries the trial
    return objective.started[-1]


def _best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(complete, key=lambda trial: (trial.value, trial.number), default=None)


def _value(trial: FrozenTrial) -> float | None:
    return trial.value if trial.state == TrialState.COMPLETE else None


class _TrainingError(Exception):
    """The training of a trial failed: NaN, Inf or out of memory."""


def _fail(trial: Trial, reason: str) -> _TrainingError:
    trial.set_user_attr(FAILURE, reason)
    return _TrainingError(reason)


@dataclass
class _Objective:
    """Mean validation score of a trial's plan over the seeds."""

    space: SearchSpace
    problem: SearchProblem
    seeds: Sequence[int]
    stop: Callable[[], bool]
    started: list[int] = field(default_factory=list)  # numbers of trials
    error: Exception | None = None  # of the last trial

    def __call__(self, trial: Trial) -> float:
        self.started.append(trial.number)
        self.error = None
        try:
            return self._train(trial)
        except Exception as error:
            self.error = error
            raise

    def _train(self, trial: Trial) -> float:
        values, problem = self.space.suggest(trial), self.problem
        trial.set_user_attr("values", values)
        plan, diversity = apply_values(problem.plan, values)
        train, device = problem.train, problem.train.x.device
        diversities = [diversity] * len(self.seeds)
        network = new_run_group(plan, train.x.shape[1], problem.num_outputs, self.seeds, diversities).to(device)
        monitor = _TrialMonitor(plan, problem, network, trial, self.stop)
        try:
            trained = train_members(
                plan,
                train,
                problem.num_outputs,
                diversities=diversities,
                seeds=self.seeds,
                validation=problem.validation,
                network=network,
                stop=monitor,
            )
        except Interrupted:
            raise monitor.error or Interrupted from None
        except (MemoryError, torch.OutOfMemoryError):
            raise _fail(trial, "out of memory") from None
        scores = trained.scores(problem.validation)
        if not all(map(math.isfinite, scores)):
            raise _fail(trial, NONFINITE)
        return sum(scores) / len(scores)


class _TrialMonitor:
    """Called before every step; report the validation score every few epochs, stop pruned trials."""

    def __init__(
        self, plan: MemberPlan, problem: SearchProblem, network: RunGroup, trial: Trial, stop: Callable[[], bool]
    ) -> None:
        self.plan, self.network, self.validation = plan, network, problem.validation
        self.trial, self.stop = trial, stop
        self.train_config = plan.train_config(len(problem.train))
        self.steps_per_epoch = plan.steps_per_epoch(len(problem.train))
        self.interval = math.ceil(plan.epochs / NUM_REPORTS)  # epochs between two reports
        self.step = 0
        self.best = [math.inf] * network.num_runs
        self.error: Exception | None = None  # why the trial stops

    def __call__(self) -> bool:
        if self.stop():
            return True
        if self.step and self.step % (self.interval * self.steps_per_epoch) == 0:
            scores = validation_scores(self.network, self.validation, self.train_config).tolist()
            if not all(map(math.isfinite, scores)):
                self.error = _fail(self.trial, NONFINITE)
                return True
            if self.plan.patience is not None:  # early stopping keeps the best epoch
                self.best = scores = [min(pair) for pair in zip(scores, self.best, strict=True)]
            self.trial.report(sum(scores) / len(scores), self.step // self.steps_per_epoch)
            if self.trial.should_prune():
                self.error = TrialPruned()
        self.step += 1
        return self.error is not None


class _SeededSampler(BaseSampler):
    """Optuna's TPE, seeded by the trial's number among first attempts, so that retries and processes do not matter."""

    def __init__(self, seed: int, first: Mapping[str, float]) -> None:
        self.seed, self.first = seed, first
        self.place = -1

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        original = first_attempt(trial)
        number = trial.number if original is None else original
        earlier = (other for other in study.get_trials(deepcopy=False) if other.number < number)
        self.place = sum(first_attempt(other) is None for other in earlier)

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
        # seeded by name: a retried trial may already have some values
        return self._tpe(param_name).sample_independent(study, trial, param_name, param_distribution)

    def _tpe(self, *key: str) -> TPESampler:
        seed = hashed_key(self.seed, "proposal", self.place, *key) % 2**32
        return TPESampler(multivariate=True, constant_liar=True, seed=seed)
