"""What `ACEClassifier` and `NCLRegressor` have in common: everything but the targets."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from joblib import effective_n_jobs
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from torchace import _checks
from torchace.lab.data import Split, hashed_key, permutation, stratified_split
from torchace.lab.data.encoding import Encoding, NumberColumn, TargetScale
from torchace.lab.data.table_schema import Column, Schema, Target
from torchace.lab.store import finite
from torchace.lab.training.chunks import chunk_rows, collect_chunks
from torchace.lab.training.config import make_optimizer
from torchace.lab.training.members import MemberPlan, Trained, new_run_group, train_members
from torchace.lab.training.scaling import Moments, Scaling, finished_ensemble
from torchace.lab.tuning.tuning import TunedDiversity, tune_diversity
from torchace.models.encoder import TableEncoder
from torchace.models.mlp import hidden_widths
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

BATCHES = ("shared", "exchanged", "separate")
SCHEDULES = ("constant", "cosine")


class Estimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What both estimators have in common: everything but the targets."""

    _task: ClassVar[str]
    _link: ClassVar[str]

    def __init__(
        self,
        num_members: int = 10,
        *,
        hidden: int | tuple[int, ...] = (64,),
        diversity: float | str = 0.5,
        epochs: int = 100,
        batch_size: int = 128,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-2,
        schedule: str | None = None,
        batches: str = "shared",
        early_stopping: bool = False,
        validation_fraction: float = 0.2,
        patience: int = 10,
        random_state: Any = None,
        device: str = "cpu",
        n_jobs: int | None = None,
    ) -> None:
        self.num_members = num_members
        self.hidden = hidden
        self.diversity = diversity
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.batches = batches
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    # -- training -----------------------------------------------------------------------------------------------------

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Trains the members anew.

        Args:
            X: Samples `(N, D)`, numbers without gaps. They are scaled inside; float64 is trained in float64.
            y: Targets `(N,)`.
            sample_weight: How much each sample counts, `(N,)`; 0 leaves it out.
        """
        with self._replaced() as new:
            new._fit(X, y, sample_weight)
        return self

    @contextmanager
    def _replaced(self) -> Iterator[Self]:
        """A copy to train. Its attributes become this estimator's at the end, and only if nothing was raised."""
        new = copy.copy(self)
        yield new
        self.__dict__ = new.__dict__

    def _fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> None:
        plan = self._plan()
        X, y = self._validated(X, y, first=True)
        plan = replace(plan, precision="float32" if X.dtype == np.float32 else "float64")
        self._learn_targets(y)
        samples, seed = self._samples(X, y, sample_weight), self._drawn_seed()
        with self._threads():
            self.tuning_ = self._tuned(plan, samples, seed) if self.diversity == "auto" else None
            self.diversity_ = float(self.diversity if self.tuning_ is None else self.tuning_.diversity)
            validation = None
            if self.early_stopping:
                samples, validation = self._held_out(samples, hashed_key(seed, "early stopping"))
            scaling = Scaling.of(samples)
            ready = self._scaled(scaling, samples, plan)
            held_out = None if validation is None else self._scaled(scaling, validation, plan)
            trained = self._train(plan, ready, [seed], validation=held_out)
        self.history_ = _history(trained)
        self._finish(trained, scaling)
        self._progress = _new_progress(seed, plan, scaling)
        self._count_weights(samples)

    def _is_first(self) -> bool:
        """Whether nothing was trained yet; `partial_fit` of an estimator from a file cannot go on."""
        if hasattr(self, "_progress"):
            return False
        if hasattr(self, "ensemble_"):
            raise ValueError("A model that was loaded cannot be trained further, only anew; call fit.")
        return True

    def _go_on(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None, first: bool) -> None:
        """One epoch on samples that may not come again; those of the first call decide the scaling."""
        if first and self.diversity == "auto":
            raise ValueError(
                "Expected `diversity` to be a number for partial_fit, since 'auto' needs all samples at once."
            )
        samples = self._samples(X, y, sample_weight)
        if first:
            plan = replace(self._plan(), precision="float32" if X.dtype == np.float32 else "float64")
            self._progress = _new_progress(self._drawn_seed(), plan, Scaling.of(samples))
            self.tuning_, self.history_, self.diversity_ = None, [], float(self.diversity)
            self._network = new_run_group(plan, X.shape[1], self._num_outputs, [self._progress["seed"]])
        self._count_weights(samples)
        done = self._progress
        mean_weight = done["weight"] / done["samples"]
        if samples.weight is None and mean_weight != 1:  # others had weights
            samples = replace(samples, weight=torch.ones(len(samples), dtype=torch.float64))
        plan = replace(done["plan"], epochs=1, schedule="constant", patience=None)
        ready = self._scaled(done["scaling"], samples, plan)
        network = copy.deepcopy(self._network).to(ready.x.device)
        optimizer = make_optimizer(plan.train_config(len(samples)), list(network.parameters()))
        if done["optimizer"] is not None:
            optimizer.load_state_dict(copy.deepcopy(done["optimizer"]))  # which does not copy the tensors
        seed = hashed_key(done["seed"], "partial fit", done["calls"])
        with self._threads():
            options = {"network": network, "optimizer": optimizer, "mean_weight": mean_weight}
            trained = self._train(plan, ready, [seed], **options)
        self.history_ = [*self.history_, {**_history(trained)[0], "epoch": len(self.history_) + 1}]
        self._progress = {**done, "calls": done["calls"] + 1, "optimizer": optimizer.state_dict()}
        self._finish(trained, done["scaling"])

    def _count_weights(self, samples: Split) -> None:
        """Adds to the weights of all samples so far: the mean that those of `partial_fit` are relative to."""
        done, count = self._progress, len(samples)
        weight = float(count if samples.weight is None else samples.weight.sum())
        self._progress = {**done, "weight": done["weight"] + weight, "samples": done["samples"] + count}

    def _train(self, plan: MemberPlan, train: Split, seeds: list[int], **options: Any) -> Trained:
        trained = train_members(plan, train, self._num_outputs, diversities=[self.diversity_], seeds=seeds, **options)
        if (failure := trained.failure(0)) is not None:
            raise ValueError(
                f"Training ended at step {failure.step} with {failure.message}. "
                "Try a smaller learning_rate, and look for extreme values among the samples."
            )
        return trained

    def _finish(self, trained: Trained, scaling: Scaling) -> None:
        self._network = trained.network.cpu()
        self.ensemble_: Ensemble = finished_ensemble(trained.ensemble(0), _encoder(scaling.inputs), scaling.targets)

    def _tuned(self, plan: MemberPlan, samples: Split, seed: int) -> TunedDiversity:
        """λ chosen on one held-out part, and its gain measured on another."""
        rest, check = self._held_out(samples, hashed_key(seed, "check"))
        train, validation = self._held_out(rest, hashed_key(seed, "validation"))
        scaling = Scaling.of(train)
        train, validation, check = (self._scaled(scaling, part, plan) for part in (train, validation, check))
        scale = 1.0 if scaling.targets is None else float(scaling.targets.std.square().mean())
        return tune_diversity(
            plan,
            train,
            validation,
            self._num_outputs,
            check=check,
            check_name="held-out",
            seed=seed,
            score_scale=scale,
        )

    def _held_out(self, samples: Split, seed: int) -> tuple[Split, Split]:
        """The rest, and the validation fraction: every class in proportion."""
        count = max(1, round(self.validation_fraction * len(samples)))
        if count >= len(samples):
            raise ValueError(
                f"Expected enough samples to hold some out, but got {len(samples)}. Give more, or use "
                "early_stopping=False and a number for `diversity`."
            )
        if self._task == "classification":
            return stratified_split(samples, count, seed=seed)
        order = permutation(seed, "held out", count=len(samples))
        return samples.take(order[count:].sort().values), samples.take(order[:count].sort().values)

    # -- what goes in -------------------------------------------------------------------------------------------------

    def _plan(self) -> MemberPlan:
        """The parameters, checked."""
        for name in ("num_members", "epochs", "batch_size", "patience"):
            _checks.check_count(_plain(getattr(self, name)), name)
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not 0 <= value < np.inf:
                raise ValueError(f"Expected `{name}` to be a number of at least 0, but got {value!r}.")
        if isinstance(self.diversity, str):
            _checks.check_choice(self.diversity, "diversity", ("auto",))
        else:
            _checks.check_diversity(self.diversity)
        if self.schedule is not None:
            _checks.check_choice(self.schedule, "schedule", SCHEDULES)
        _checks.check_choice(self.batches, "batches", BATCHES)
        if self.batches == "separate" and self.diversity != 0:
            raise ValueError(
                "λ > 0 needs members that see each other's predictions: with batches='separate' set diversity=0, or "
                "use batches='exchanged'."
            )
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(f"Cannot use the device {self.device!r}: {reason}.") from error
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"Expected `validation_fraction` between 0 and 1, but got {self.validation_fraction!r}.")
        return MemberPlan(
            self._task,
            num_members=int(self.num_members),
            hidden=tuple(hidden_widths(_plain(self.hidden))),
            epochs=int(self.epochs),
            batch_size=int(self.batch_size),
            learning_rate=float(self.learning_rate),
            weight_decay=float(self.weight_decay),
            schedule=self.schedule,
            batches=self.batches,
            patience=int(self.patience) if self.early_stopping else None,
        )

    def _validated(self, X: ArrayLike, y: ArrayLike, *, first: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        options: dict[str, Any] = {"dtype": [np.float64, np.float32], "order": "C"}
        if self._task == "regression":
            return cast(
                tuple[NDArray[Any], NDArray[Any]],
                validate_data(self, X, y, reset=first, **options, y_numeric=True, multi_output=True),
            )
        samples, labels = validate_data(self, X, y, reset=first, **options)
        check_classification_targets(labels)
        return samples, column_or_1d(labels, warn=True)

    def _samples(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None) -> Split:
        """What is trained on: raw, without the samples that weigh nothing."""
        weight = self._weights(X, y, sample_weight)
        targets = torch.from_numpy(self._encoded_targets(y))
        samples = Split(torch.tensor(X, dtype=torch.float64), targets, None if weight is None else torch.tensor(weight))
        if weight is None:
            return samples
        if not (weight > 0).any():
            raise ValueError("Expected a `sample_weight` above 0 for some sample, but all of them are 0.")
        return samples.take(torch.from_numpy(weight > 0))

    def _weights(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None) -> NDArray[Any] | None:
        if sample_weight is None:
            return None
        return cast(
            NDArray[Any], _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True, copy=True)
        )

    def _scaled(self, scaling: Scaling, samples: Split, plan: MemberPlan) -> Split:
        dtype = torch.float32 if plan.precision == "float32" else torch.float64
        return scaling.scaled(samples, dtype, self.device)

    def _drawn_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """`n_jobs` threads on the CPU; torch's own number where it is None."""
        before = torch.get_num_threads()
        try:
            if self.n_jobs is not None:
                torch.set_num_threads(effective_n_jobs(self.n_jobs))
            yield
        finally:
            torch.set_num_threads(before)

    # -- what comes out -----------------------------------------------------------------------------------------------

    @property
    def members_(self) -> list[nn.Module]:
        """The members: modules that map scaled inputs to logits, or to predictions."""
        check_is_fitted(self)
        return list(self.ensemble_)

    def _predicted(self, X: ArrayLike, *functions: Callable[[Tensor], Tensor]) -> list[NDArray[Any]]:
        """Apply functions to the members' logits or predictions, in chunks `(K, n, C)`."""
        check_is_fitted(self)
        samples: NDArray[Any] = validate_data(self, X, reset=False, dtype=[np.float64, np.float32], order="C")
        rows = chunk_rows(self.ensemble_, self.ensemble_.num_members)
        parts = (torch.tensor(samples[i : i + rows], dtype=torch.float64) for i in range(0, len(samples), rows))
        with self._threads(), torch.no_grad():
            found = collect_chunks(map(self.ensemble_, parts), len(samples), *functions)
        return [values.numpy() for values in found]

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the trained estimator as a model directory (safetensors and JSON, no pickle), for `load`."""
        check_is_fitted(self)
        params = {name: _as_json(value) for name, value in self.get_params(deep=False).items()}
        names = getattr(self, "feature_names_in_", None)
        extra = {
            "estimator": type(self).__name__,
            "params": {name: value for name, value in params.items() if value is not ...},
            "n_features": self.n_features_in_,
            "feature_names": None if names is None else [str(name) for name in names],
            "targets": self._targets_as_json(),
            "history": self.history_,
            "search": None if self.tuning_ is None else finite(self.tuning_.to_json()),
        }
        if self._num_outputs == 1 or self._task == "classification":  # the command line predicts one target
            extra["encoding"] = self._encoding().to_json()
        class_names = [str(label) for label in self.classes_] if self._task == "classification" else None
        save_model(path, self.ensemble_, diversity=self.diversity_, class_names=class_names, extra=extra)

    def _encoding(self) -> Encoding:
        """The samples as a table, so that `torchace predict` and its like take the saved model."""
        encoder = cast(TableEncoder, self.ensemble_.trunk)
        named = getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])
        names = [str(name) for name in named]
        classes = tuple(self.classes_.tolist()) if self._task == "classification" else ()
        target = next(name for name in ("y", *(f"y{i}" for i in range(len(names) + 1))) if name not in names)
        schema = Schema(tuple(Column(name, "number") for name in names), Target(target, self._task, classes))
        statistics = zip(names, encoder.mean.tolist(), encoder.std.tolist(), strict=True)
        columns = tuple(NumberColumn(name, mean, std, False) for name, mean, std in statistics)
        # a regressor's members answer in the targets' own units: there is nothing left to scale
        return Encoding(schema, columns, TargetScale(0.0, 1.0) if self._task == "regression" else None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator that `save` saved. It predicts as before; `partial_fit` would need what only a fit has.

        Raises:
            ModelFileError: The directory is damaged, or holds something else.
        """
        ensemble = load_model(path)
        extra = cast(Mapping[str, Any], ensemble.manifest)["extra"] or {}
        if not isinstance(ensemble, Ensemble) or extra.get("estimator") != cls.__name__:
            raise ModelFileError(f"{path} holds no {cls.__name__}; read it with torchace.load_model.")
        estimator = cls()
        try:
            known = estimator.get_params(deep=False)
            estimator.set_params(**{k: _from_json(v) for k, v in extra["params"].items() if k in known})
            estimator.n_features_in_ = int(extra["n_features"])
            if extra["feature_names"] is not None:
                estimator.feature_names_in_ = np.array(extra["feature_names"], dtype=object)
            estimator._targets_from_json(extra["targets"])
            estimator.history_ = extra["history"]
            estimator.diversity_ = float(cast(Mapping[str, Any], ensemble.manifest)["diversity"])
            tuning = extra.get("search")  # files of older versions have none
            estimator.tuning_ = None if tuning is None else TunedDiversity.from_json(tuning)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{path} describes no {cls.__name__} that this version can read.") from error
        estimator.ensemble_ = ensemble
        return estimator

    # -- what differs -------------------------------------------------------------------------------------------------

    _num_outputs: int
    _progress: dict[str, Any]

    @abstractmethod
    def _learn_targets(self, y: NDArray[Any]) -> None:
        """Finds out what there is to predict."""

    @abstractmethod
    def _encoded_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Class indices `(N,)` or numbers `(N, M)`."""

    @abstractmethod
    def _targets_as_json(self) -> dict[str, Any]:
        """What `_targets_from_json` needs."""

    @abstractmethod
    def _targets_from_json(self, content: Mapping[str, Any]) -> None:
        """Knows again what was learnt."""


def _encoder(moments: Moments) -> TableEncoder:
    """From raw numbers to what the members were trained on."""
    columns = list(range(len(moments.mean)))
    return TableEncoder.from_values(
        num_columns=len(columns),
        mean=moments.mean.tolist(),
        std=moments.std.tolist(),
        number_columns=columns,
        indicator_columns=[],
        code_columns=[],
        codes=[],
    ).double()


def _new_progress(seed: int, plan: MemberPlan, scaling: Scaling) -> dict[str, Any]:
    """The state that `partial_fit` continues from."""
    start = {"calls": 0, "optimizer": None, "weight": 0.0, "samples": 0}
    return {"seed": seed, "plan": plan, "scaling": scaling, **start}


def _history(trained: Trained) -> list[dict[str, Any]]:
    return [
        {
            "epoch": entry["epoch"],
            "train": entry["score"][0],
            "validation": None if entry["held_out"] is None else entry["held_out"][0],
        }
        for entry in trained.fitted.history
    ]


def _plain(value: Any) -> Any:
    """A parameter as Python has it: searches give numbers of numpy's."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _as_json(value: Any) -> Any:
    """A parameter as JSON holds it; an ellipsis for what it cannot hold (a random state, say)."""
    value = _plain(value)
    if isinstance(value, list):
        items = [_as_json(item) for item in value]
        return ... if ... in items else items
    if isinstance(value, dict):
        pairs = [[_as_json(key), _as_json(item)] for key, item in value.items()]
        return ... if any(... in pair for pair in pairs) else {"pairs": pairs}
    return value if value is None or isinstance(value, str | int | float | bool) else ...


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return dict(value["pairs"]) if isinstance(value, dict) else value
