"""Search of hyperparameters and λ with Optuna."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from optuna.distributions import BaseDistribution
from optuna.exceptions import TrialPruned
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from torchace._checks import check_count, check_fraction
from torchace.lab.data import hashed_key
from torchace.lab.training.evaluate import validation_scores
from torchace.lab.training.loop import NONFINITE, Interrupted, Progress
from torchace.lab.training.members import MemberPlan, new_run_group, train_members
from torchace.lab.training.tasks import TASKS
from torchace.lab.tuning.search import SearchCallback, SearchProblem
from torchace.lab.tuning.storage import open_study

SearchSpace = Mapping[str, tuple[float, float]]

SPACE: SearchSpace = {  # bounds, both included; equal ones fix a value
    "diversity": (0.0, 0.95),
    "width": (8, 256),
    "num_layers": (1, 3),
    "learning_rate": (3e-4, 3e-2),
    "weight_decay": (1e-4, 1e-1),
    "num_members": (3, 20),
    "batch_size": (32, 256),
}
LOG_SCALE = {"width", "learning_rate", "weight_decay", "batch_size"}
WHOLE_NUMBERS = {"width", "num_layers", "num_members", "batch_size"}

NUM_REPORTS = 10  # intermediate scores of a trial, for pruning
STARTUP_TRIALS = 5  # never pruned
FAILURE = "failure"  # attribute of a trial: the reason; such a trial is not retried


def suggest_values(trial: Trial, space: SearchSpace) -> dict[str, float]:
    """Return Optuna's suggestions."""
    return {
        name: trial.suggest_int(name, int(low), int(high), log=name in LOG_SCALE)
        if name in WHOLE_NUMBERS
        else trial.suggest_float(name, low, high, log=name in LOG_SCALE)
        for name, (low, high) in space.items()
    }


def apply_values(plan: MemberPlan, values: Mapping[str, Any]) -> tuple[MemberPlan, float]:
    """Return the plan with a trial's values, and λ."""
    known = {name: value for name, value in values.items() if name in {one.name for one in fields(plan)}}
    return replace(plan, hidden=(values["width"],) * values["num_layers"], **known), values["diversity"]


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a study."""

    number: int
    state: str  # "complete", "pruned", "failed", "running" or "waiting"
    value: float | None  # mean validation score, if complete
    params: Mapping[str, float]
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
        records = tuple(
            TrialRecord(
                trial.number,
                "failed" if trial.state == TrialState.FAIL else trial.state.name.lower(),
                trial.value if trial.state == TrialState.COMPLETE else None,  # a pruned one has its last report
                {name: trial.params[name] for name in SPACE if name in trial.params},
                trial.user_attrs.get(FAILURE),
            )
            for trial in study.get_trials(deepcopy=False)
        )
        complete = [record for record in records if record.value is not None]
        best = min(complete, key=lambda record: record.value or 0.0, default=None)
        chosen, diversity = (None, None) if best is None else apply_values(plan, best.params)
        return cls(study.study_name, plan.task, records, best, chosen, diversity)

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
class OptunaSearch:
    """Search the plan and λ with the lowest cross entropy (or squared error) on validation samples.

    The value of a trial is the mean score over the seeds. The first trial is the given plan at λ=0. A second run
    resumes the study, and several processes may share it. Suggestions depend on the seed and earlier trials alone.
    """

    problem: SearchProblem
    trials: int  # earlier ones of the study included
    space: SearchSpace = field(default_factory=lambda: SPACE)
    storage: str | Path | None = None  # an SQLite file or an Optuna storage URL
    study_name: str = "torchace"
    num_seeds: int = 2  # trainings of each trial
    pruning: bool = True  # stop trials that are worse than the median
    heartbeat: int = 30  # seconds; a process without one for three times as long counts as dead

    def __post_init__(self) -> None:
        check_count(self.trials, "trials", least=0)
        check_count(self.num_seeds, "num_seeds")
        for diversity in self.space["diversity"]:
            check_fraction(diversity, "diversity")
        if self.space["diversity"][1] > 0:
            self.problem.check_coupled()

    def run(self, callback: SearchCallback | None = None, stop: Callable[[], bool] = lambda: False) -> StudyResult:
        """Run trials until the study has `trials` finished ones.

        If `stop`, called before every step, returns True, raise `Interrupted`; the trial is retried when the study is
        resumed.
        """
        problem, callback = self.problem, callback or SearchCallback()
        seeds = problem.training_seeds(self.num_seeds)
        fingerprint = {key: value for key, value in problem.fingerprint().items() if key not in {*SPACE, "hidden"}}
        pruner = MedianPruner(STARTUP_TRIALS, n_warmup_steps=problem.plan.epochs // 5, n_min_trials=STARTUP_TRIALS)

        def on_trial(study: Study, trial: FrozenTrial) -> None:
            result = StudyResult.from_study(study, problem.plan)
            best = None if result.best is None else result.best.value
            callback.on_trial(trial.number, result.trials[trial.number].value, best)

        with open_study(
            self.storage,
            self.study_name,
            {**fingerprint, "seeds": list(seeds)},
            self.heartbeat,
            sampler=_SeededSampler(problem.seed, self._first_values()),
            pruner=pruner if self.pruning else NopPruner(),
        ) as study:
            objective = _Objective(self.space, problem, seeds, stop)
            while _count_finished(study) < self.trials:
                if stop():
                    raise Interrupted
                study.optimize(objective, n_trials=1, catch=(_TrainingError,), callbacks=[on_trial])
            return StudyResult.from_study(study, problem.plan)

    def _first_values(self) -> dict[str, float]:
        """Return the plan's values at λ=0, clipped to the bounds."""
        hidden = self.problem.plan.hidden or (1,)
        values = {**asdict(self.problem.plan), "diversity": 0.0, "width": hidden[0], "num_layers": len(hidden)}
        return {name: min(max(values[name], low), high) for name, (low, high) in self.space.items()}


def _count_finished(study: Study) -> int:
    """Number of trials without those whose process died or was interrupted: they are retried."""
    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    return sum(t.state in ended or FAILURE in t.user_attrs for t in study.get_trials(deepcopy=False))


class _TrainingError(Exception):
    """The training of a trial failed: NaN, Inf or out of memory."""


@dataclass(frozen=True)
class _Objective:
    """Mean validation score of a trial's plan over the seeds."""

    space: SearchSpace
    problem: SearchProblem
    seeds: Sequence[int]
    stop: Callable[[], bool]

    def __call__(self, trial: Trial) -> float:
        try:
            return self._train(trial)
        except _TrainingError as error:
            trial.set_user_attr(FAILURE, str(error))
            raise
        except (Interrupted, KeyboardInterrupt):
            RetryHeartbeatStaleTrialCallback()(trial.study, trial.study.trials[trial.number])
            raise

    def _train(self, trial: Trial) -> float:
        problem, train = self.problem, self.problem.train
        plan, diversity = apply_values(problem.plan, suggest_values(trial, self.space))
        diversities = [diversity] * len(self.seeds)
        network = new_run_group(plan, train.x.shape[1], problem.num_outputs, self.seeds, diversities)
        network = network.to(train.x.device)
        config, interval = plan.train_config(len(train)), math.ceil(plan.epochs / NUM_REPORTS)
        best = [math.inf] * len(self.seeds)

        def report(progress: Progress) -> None:
            nonlocal best
            if progress.epoch % interval or progress.epoch == plan.epochs:
                return
            scores = validation_scores(network, problem.validation, config).tolist()
            if plan.patience is not None:  # early stopping keeps the best epoch
                best = scores = [min(pair) for pair in zip(scores, best, strict=True)]
            trial.report(_mean(scores), progress.epoch)
            if trial.should_prune():
                raise TrialPruned

        try:
            trained = train_members(
                plan,
                train,
                problem.num_outputs,
                diversities=diversities,
                seeds=self.seeds,
                validation=problem.validation,
                network=network,
                on_epoch_end=report,
                stop=self.stop,
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise _TrainingError("out of memory") from None
        return _mean(trained.scores(problem.validation))


def _mean(scores: Sequence[float]) -> float:
    if not all(map(math.isfinite, scores)):
        raise _TrainingError(NONFINITE)
    return sum(scores) / len(scores)


class _SeededSampler(BaseSampler):
    """Optuna's TPE, seeded by the trial's number among first attempts, so that retries and processes do not matter."""

    def __init__(self, seed: int, first: Mapping[str, float]) -> None:
        self.seed, self.first = seed, first
        self.place = -1

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        number = _first_attempt(trial)
        self.place = sum(_first_attempt(t) == t.number for t in study.get_trials(deepcopy=False) if t.number < number)

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
        return self._tpe(param_name).sample_independent(study, trial, param_name, param_distribution)

    def _tpe(self, *key: str) -> TPESampler:
        seed = hashed_key(self.seed, "proposal", self.place, *key) % 2**32
        return TPESampler(multivariate=True, constant_liar=True, seed=seed)


def _first_attempt(trial: FrozenTrial) -> int:
    return int(trial.system_attrs.get("failed_trial", trial.number))
