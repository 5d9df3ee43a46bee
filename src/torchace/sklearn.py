"""Ensembles as scikit-learn estimators: `ACEClassifier` and `NCLRegressor`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from torchace import _checks
from torchace.data import Split, hashed_key, permutation, stratified_split
from torchace.data.encoding import Encoding, NumberColumn
from torchace.data.schema import Column, Schema, Target
from torchace.engine.recipe import make_optimizer
from torchace.functional import disagreement, ensemble_log_probs, mutual_information, predictive_entropy
from torchace.models.encoder import TableEncoder
from torchace.models.mlp import checked_widths
from torchace.nn import Ensemble
from torchace.runs.members import MemberPlan, Trained, new_cohort, train_members
from torchace.runs.scaling import Moments, Scaling, finished_ensemble
from torchace.runs.tune import TunedDiversity, tune_diversity
from torchace.saving import ModelFileError, load_model, save_model

try:
    from joblib import effective_n_jobs
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    raise ImportError("The estimators need scikit-learn: pip install 'torchace[tool]'.") from error

__all__ = ["ACEClassifier", "NCLRegressor"]

CHUNK = 8192  # samples that all members predict at once
BATCHES = ("shared", "exchanged", "separate")
SCHEDULES = ("constant", "cosine")


class _Estimator(BaseEstimator):  # type: ignore[misc]
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
        self._progress: dict[str, Any] = {"seed": seed, "calls": 0, "plan": plan, "scaling": scaling, "optimizer": None}
        return self

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
            self._progress = {"seed": self._drawn_seed(), "calls": 0, "plan": plan, "optimizer": None}
            self._progress["scaling"] = Scaling.of(samples)
            self.tuning_, self.history_, self.diversity_ = None, [], float(self.diversity)
            self._network = new_cohort(plan, X.shape[1], self._num_outputs, [self._progress["seed"]])
        done = self._progress
        plan = replace(done["plan"], epochs=1, schedule="constant", patience=None)
        ready = self._scaled(done["scaling"], samples, plan)
        network = self._network.to(ready.x.device)
        optimizer = make_optimizer(plan.recipe(len(samples)), list(network.parameters()))
        if done["optimizer"] is not None:
            optimizer.load_state_dict(done["optimizer"])
        seed = hashed_key(done["seed"], "partial fit", done["calls"])
        with self._threads():
            trained = self._train(plan, ready, [seed], network=network, optimizer=optimizer)
        self.history_ = [*self.history_, {**_history(trained)[0], "epoch": len(self.history_) + 1}]
        self._progress = {**done, "calls": done["calls"] + 1, "optimizer": optimizer.state_dict()}
        self._finish(trained, done["scaling"])

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
            _checks.check_count(getattr(self, name), name)
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
            hidden=tuple(checked_widths(self.hidden)),
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

    def _predictions(self, X: ArrayLike) -> Iterator[Tensor]:
        """The members' logits or predictions, `(K, n, C)`, of a part of the samples after another."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32], order="C")
        with self._threads(), torch.no_grad():
            for part in torch.tensor(X, dtype=torch.float64).split(CHUNK):
                yield self.ensemble_(part)

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
        return Encoding(schema, columns, *((0.0, 1.0) if self._task == "regression" else ()))

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
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{path} describes no {cls.__name__} that this version can read.") from error
        estimator.tuning_, estimator.ensemble_ = None, ensemble
        return estimator

    # -- what differs -------------------------------------------------------------------------------------------------

    _num_outputs: int

    def _learn_targets(self, y: NDArray[Any]) -> None:
        """Finds out what there is to predict."""
        raise NotImplementedError

    def _encoded_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Class indices `(N,)` or numbers `(N, M)`."""
        raise NotImplementedError

    def _targets_as_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def _targets_from_json(self, content: Mapping[str, Any]) -> None:
        raise NotImplementedError


class ACEClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """An ensemble of fully connected networks trained jointly with Amended Cross Entropy.

    Inputs are scaled inside. Data that fit in one batch are trained full-batch; float64 input is trained in float64.

    Args:
        num_members: K.
        hidden: The width of the hidden layer, or of several.
        diversity: λ in [0, 1], or `"auto"`: found on held-out samples (see `tuning_`), then trained on all of them.
        epochs: How often the samples are gone through, at most.
        batch_size: Samples in a step.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        schedule: `"cosine"`, along which the learning rate falls to 0, or `"constant"`; None for the first, or for the
            second where training may stop early.
        batches: `"shared"`: all members see the same samples in a step; `"exchanged"` and `"separate"`: each its own,
            with and without coupling.
        early_stopping: Hold out a part of the samples, stop when the ensemble no longer improves on it, and keep the
            best epoch.
        validation_fraction: How much is held out, for early stopping and for `diversity="auto"`.
        patience: Epochs without improvement.
        class_weight: `"balanced"`, or a weight for each class; None weighs all alike.
        random_state: An int for the same result every time.
        device: `"cpu"` or `"cuda"`; predictions are computed on the CPU.
        n_jobs: CPU threads; torch's own number unless given.

    Attributes:
        classes_: The labels, sorted.
        ensemble_: The trained ensemble, from raw inputs to logits.
        members_: Its members.
        diversity_: λ.
        tuning_: How λ was found, for `diversity="auto"`.
        history_: One entry an epoch, with the ensemble's cross entropy in training and on the held-out part.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = ACEClassifier(num_members=5, random_state=0).fit(X, y)
        >>> bool(classifier.score(X, y) > 0.9), sorted(classifier.predict_uncertainty(X))
        (True, ['disagreement', 'entropy', 'mutual_information'])
    """

    _task, _link = "classification", "softmax"

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
        class_weight: Any = None,
        random_state: Any = None,
        device: str = "cpu",
        n_jobs: int | None = None,
    ) -> None:
        super().__init__(
            num_members,
            hidden=hidden,
            diversity=diversity,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            schedule=schedule,
            batches=batches,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            random_state=random_state,
            device=device,
            n_jobs=n_jobs,
        )
        self.class_weight = class_weight

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """One more epoch, on these samples alone.

        The first call needs to know all `classes`, and its samples decide how inputs are scaled.
        """
        first = self._is_first()
        X, y = self._validated(X, y, first=first)
        if first:
            self._learn_targets(y if classes is None else np.asarray(classes))
        elif classes is not None and not np.array_equal(self.classes_, np.unique(np.asarray(classes))):
            raise ValueError(f"Expected the `classes` of the first call, {self.classes_}, but got {classes!r}.")
        if self.class_weight == "balanced":
            raise ValueError(
                "Expected `class_weight` to be a dict or None for partial_fit: 'balanced' needs all samples."
            )
        self._go_on(X, y, sample_weight, first)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The ensemble's probabilities, `(N, C)`, in the order of `classes_`."""
        return cast(NDArray[np.float64], np.exp(self.predict_log_proba(X)))

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The logarithm of the ensemble's probabilities, `(N, C)`."""
        log_probs = torch.cat([ensemble_log_probs(z) for z in self._predictions(X)])
        return cast(NDArray[np.float64], log_probs.clamp_(max=0).numpy())  # rounding may leave 1 + 4e-16

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable labels, `(N,)`."""
        log_probs = self.predict_log_proba(X)
        return cast(NDArray[Any], self.classes_[log_probs.argmax(1)])

    def predict_uncertainty(self, X: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """How sure the ensemble is of each sample, `(N,)` each.

        Returns:
            `entropy` of the ensemble's probabilities (all there is to doubt), `mutual_information` (the part of it that
            comes from members who differ) and `disagreement` (pairs of members with different answers).
        """
        measures = {
            "entropy": predictive_entropy,
            "mutual_information": mutual_information,
            "disagreement": disagreement,
        }
        logits = list(self._predictions(X))
        return {
            name: torch.cat([measure(z, reduction="none") for z in logits]).numpy()
            for name, measure in measures.items()
        }

    def _learn_targets(self, y: NDArray[Any]) -> None:
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"Expected at least two classes in `y`, but got one class: {self.classes_[0]!r}.")
        self._num_outputs = len(self.classes_)

    def _encoded_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        unknown = self.classes_[places] != y
        if unknown.any():
            raise ValueError(f"Expected labels out of {self.classes_}, but got {y[unknown][0]!r}.")
        return places.astype(np.int64)

    def _weights(self, X: NDArray[Any], y: NDArray[Any], sample_weight: ArrayLike | None) -> NDArray[Any] | None:
        weight = super()._weights(X, y, sample_weight)
        if self.class_weight is None:
            return weight
        seen = np.unique(y)  # a later call of partial_fit need not hold every class
        options = {} if weight is None or self.class_weight != "balanced" else {"sample_weight": weight}
        of_class = dict(zip(seen, compute_class_weight(self.class_weight, classes=seen, y=y, **options), strict=True))
        scale = np.array([of_class[label] for label in y], dtype=np.float64)
        return scale if weight is None else scale * weight

    def _targets_as_json(self) -> dict[str, Any]:
        values = self.classes_.tolist()
        if not all(isinstance(value, str | int | float | bool) for value in values):
            raise ModelFileError(
                "Labels that are not strings, numbers or booleans cannot be saved; convert them first."
            )
        return {"dtype": self.classes_.dtype.str, "values": values}

    def _targets_from_json(self, content: Mapping[str, Any]) -> None:
        self.classes_ = np.array(content["values"], dtype=np.dtype(content["dtype"]))
        self._num_outputs = len(self.classes_)


class NCLRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """An ensemble of fully connected networks trained jointly with Negative Correlation Learning.

    Inputs and targets are scaled inside. Data that fit in one batch are trained full-batch; float64 input is trained in
    float64.

    Args:
        num_members: K.
        hidden: The width of the hidden layer, or of several.
        diversity: λ in [0, 1], or `"auto"`: found on held-out samples (see `tuning_`), then trained on all of them.
        epochs: How often the samples are gone through, at most.
        batch_size: Samples in a step.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        schedule: `"cosine"`, along which the learning rate falls to 0, or `"constant"`; None for the first, or for the
            second where training may stop early.
        batches: `"shared"`: all members see the same samples in a step; `"exchanged"` and `"separate"`: each its own,
            with and without coupling.
        early_stopping: Hold out a part of the samples, stop when the ensemble no longer improves on it, and keep the
            best epoch.
        validation_fraction: How much is held out, for early stopping and for `diversity="auto"`.
        patience: Epochs without improvement.
        random_state: An int for the same result every time.
        device: `"cpu"` or `"cuda"`; predictions are computed on the CPU.
        n_jobs: CPU threads; torch's own number unless given.

    Attributes:
        ensemble_: The trained ensemble, from raw inputs to predictions in the targets' own units.
        members_: Its members.
        diversity_: λ.
        tuning_: How λ was found, for `diversity="auto"`.
        history_: One entry an epoch, with the ensemble's squared error (of scaled targets) in training and on the
            held-out part.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = NCLRegressor(num_members=5, epochs=40, random_state=0).fit(X, y)
        >>> bool(regressor.score(X, y) > 0.5), regressor.predict_uncertainty(X)["spread"].shape
        (True, (442,))
    """

    _task, _link = "regression", "identity"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """One more epoch, on these samples alone; those of the first call decide how inputs and targets are scaled."""
        first = self._is_first()
        X, y = self._validated(X, y, first=first)
        if first:
            self._learn_targets(y)
        self._go_on(X, y, sample_weight, first)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """The members' mean prediction, `(N,)`, or `(N, M)` for several targets."""
        return self._shaped(torch.cat([f.mean(0) for f in self._predictions(X)]))

    def predict_uncertainty(self, X: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """How far the members are from each other, in the targets' units: `spread`, their standard deviation."""
        return {"spread": self._shaped(torch.cat([f.std(0, correction=0) for f in self._predictions(X)]))}

    def _shaped(self, values: Tensor) -> NDArray[np.float64]:
        return cast(NDArray[np.float64], (values if self._several else values.squeeze(1)).numpy())

    def _learn_targets(self, y: NDArray[Any]) -> None:
        self._several = y.ndim == 2
        self._num_outputs = y.shape[1] if self._several else 1

    def _encoded_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        if (y.ndim == 2) != self._several or (self._several and y.shape[1] != self._num_outputs):
            raise ValueError(f"Expected `y` as in the first call, with {self._num_outputs} targets, but got {y.shape}.")
        return y.astype(np.float64).reshape(len(y), self._num_outputs)

    def _targets_as_json(self) -> dict[str, Any]:
        return {"several": self._several, "num_outputs": self._num_outputs}

    def _targets_from_json(self, content: Mapping[str, Any]) -> None:
        self._several, self._num_outputs = bool(content["several"]), int(content["num_outputs"])


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


def _history(trained: Trained) -> list[dict[str, Any]]:
    return [
        {
            "epoch": entry["epoch"],
            "train": entry["score"][0],
            "validation": None if entry["held_out"] is None else entry["held_out"][0],
        }
        for entry in trained.fitted.history
    ]


def _as_json(value: Any) -> Any:
    """A parameter as JSON holds it; an ellipsis for what it cannot hold (a random state, say)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple | list):
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
