"""Ensembles as scikit-learn estimators."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchace._extras import missing_extra

try:
    from scipy.sparse import issparse  # type: ignore[import-untyped]
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import type_of_target
    from sklearn.utils.validation import check_is_fitted, column_or_1d

    from torchace.lab.estimator import Estimator
    from torchace.lab.estimator.inputs import check_labels, read_inputs_and_targets
    from torchace.lab.estimator.intervals import cv_plus_interval
    from torchace.lab.schema.hyperparameters import to_python
    from torchace.lab.tables.model import UNCERTAINTIES, log_probs
except ModuleNotFoundError as error:
    raise missing_extra("The estimators need scikit-learn") from error

__all__ = ["ACEClassifier", "NCLRegressor"]


@dataclass(eq=False, repr=False)
class ACEClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """An ensemble of fully connected networks trained jointly with Amended Cross Entropy.

    Inputs are encoded inside, also those of a DataFrame with categories, dates and missing values. Data that fit in one
    batch are trained full-batch; float64 input is trained in float64. Targets of 0 and 1, `(N, L)`, are several labels
    per sample, trained by the binary form of the loss.

    Args:
        num_members: K.
        members: `"separate"`: each has its own weights. `"shared"`: one network with an adapter for each member in
            every layer and own last layers (TabM; see `adapt`). `"shared_mini"`: the same with adapters of the inputs
            alone. With shared weights nothing is out of fold: folds only stop the training, and `temperature_` and
            `oof_score_` come from a hold-out of `validation_fraction`.
        hidden: Width of the hidden layer, or a tuple of widths.
        diversity: λ in [0, 1], or `"auto"`: 0 unless `advise_diversity` advises a search and this finds a significant
            gain on held-out samples (see `tuning_`). No search for fewer than 200 samples, several labels per sample,
            and `partial_fit`. Without this advice, `early_stopping=False` searches, and so do shared members that do
            not overfit.
        encoding: Encoding of numbers. `"standard"`: mean 0, standard deviation 1. `"robust"`: median 0, interquartile
            range 1, outliers bounded smoothly, two-valued columns 0 and 1. `"piecewise"`: the same, plus bins between
            quantiles, or between all levels of a column with few, such as a count. `"auto"`: `"piecewise"`, or
            `"robust"` if all columns have the same few levels, as pixels do. All but `"standard"` learn a scale for
            each input, and columns with more than 16 categories have smaller features.
        epochs: Maximum number of epochs.
        batch_size: Samples in a step.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        schedule: `"cosine"` (to 0) or `"constant"`; None: cosine, or constant with early stopping.
        batches: `"shared"`: all members see the same samples in a step; `"exchanged"` and `"separate"`: each its own,
            with and without coupling.
        early_stopping: `"folds"`: member k leaves out fold k mod 5, and training stops when the ensemble's score on the
            left-out samples stops improving; the best epoch is kept. True: the same on a hold-out. False: train all
            epochs. `"auto"`: False below 200 samples; above, `"folds"` for λ=0, and for λ>0 a hold-out followed by a
            second training on all samples.
        validation_fraction: Fraction of samples in a hold-out, also for a search of λ and with shared weights.
        patience: Epochs without improvement before training stops.
        class_weight: `"balanced"`, or a weight for each class.
        network: Function of the numbers of encoded inputs and outputs that returns a new member, instead of `hidden`.
        callbacks: Functions called after every epoch with its entry of `history_`, also in trainings that another
            follows: with λ=0 before one with the λ found, and with a hold-out before one on all samples.
        verbose: Print the columns left out, and the scores every `verbose` epochs; 0 prints nothing.
        random_state: An int for reproducible results.
        device: Device for training: `"cpu"`, `"cuda"`, or `"auto"`: cuda if available. Predictions use the CPU.
        n_jobs: CPU threads; torch's own number if None.

    Attributes:
        classes_: The labels, sorted.
        ensemble_: The trained ensemble, from raw inputs to logits.
        members_: Its members.
        diversity_: λ.
        tuning_: How λ was chosen, for `diversity="auto"`.
        temperature_: Divides the members' logits; fitted on left-out samples (1 without early stopping).
        oof_predictions_: Probabilities of each sample by the members that left it out, `(N, C)`; NaN if none did.
        oof_score_: Their cross entropy, or that of the hold-out. With folds it is the score of K/5 members, so the
            ensemble's own is lower.
        history_: One entry per epoch, with the ensemble's cross entropy on the training and the left-out samples.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = ACEClassifier(num_members=5, random_state=0).fit(X, y)
        >>> bool(classifier.score(X, y) > 0.9), sorted(classifier.predict_uncertainty(X))
        (True, ['disagreement', 'entropy', 'mutual_information'])
    """

    _task = "classification"

    class_weight: Any = field(default=None, kw_only=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train one epoch on these samples.

        The first call needs all `classes` (by default those of `y`), and its samples determine the scaling.
        """
        if self.class_weight == "balanced":
            raise ValueError(
                "Expected `class_weight` to be a dict or None for partial_fit: 'balanced' needs all samples."
            )
        with self._replace_when_done() as new:
            new._partial_fit(X, y, sample_weight, classes)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probabilities of `classes_`, or of each of several labels, `(N, C)`."""
        return self._predict(X, lambda logits: log_probs(self._task, logits).exp_())[0]

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the logarithm of the ensemble's probabilities, `(N, C)`."""
        return self._predict(X, partial(log_probs, self._task))[0]

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable labels, `(N,)`; for several labels per sample, 0 or 1 for each, `(N, L)`."""
        if self._task == "multilabel":
            return (self.predict_proba(X) > 0.5).astype(np.int64)
        (codes,) = self._predict(X, lambda logits: log_probs(self._task, logits).argmax(1))
        return cast(NDArray[Any], self.classes_[codes])

    def predict_uncertainty(self, X: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Return the uncertainty of each prediction, arrays `(N,)`, or `(N, L)` for several labels per sample.

        Returns:
            `entropy` (total uncertainty), `mutual_information` (epistemic uncertainty: members that differ) and
            `disagreement` (share of pairs of members with different labels).
        """
        measures = UNCERTAINTIES[self._task]
        return dict(zip(measures, self._predict(X, *measures.values()), strict=True))

    def _validate(self, X: ArrayLike, y: ArrayLike, *, reset: bool) -> tuple[Any, NDArray[Any]]:
        samples, labels = read_inputs_and_targets(self, X, y, reset=reset)
        labels = check_labels(cast(Any, labels).toarray() if issparse(labels) else labels)
        is_multilabel = type_of_target(labels) == "multilabel-indicator"
        return samples, labels if is_multilabel else column_or_1d(labels, warn=True)

    def _learn_targets(self, y: NDArray[Any]) -> None:
        self._task = "classification" if y.ndim == 1 else "multilabel"
        self.classes_ = np.unique(y) if y.ndim == 1 else np.arange(y.shape[1])
        self._num_outputs = len(self.classes_)
        if y.ndim == 1 and self._num_outputs < 2:
            raise ValueError(f"Expected at least two classes in `y`, but got one class: {self.classes_.tolist()[0]!r}.")

    def _encode_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        if self._task == "multilabel":
            if y.ndim != 2 or y.shape[1] != self._num_outputs:
                raise ValueError(
                    f"Expected `y` of shape (N, {self._num_outputs}) as in the first call, but got {y.shape}."
                )
            return y.astype(np.float64)
        codes = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        unknown = self.classes_[codes] != y
        if unknown.any():
            raise ValueError(f"Expected labels in {self.classes_}, but got {y[unknown].tolist()[0]!r}.")
        return codes.astype(np.int64)


class NCLRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """An ensemble of fully connected networks trained jointly with Negative Correlation Learning.

    Inputs are encoded and targets scaled inside. Data that fit in one batch are trained full-batch; float64 input is
    trained in float64. The parameters are those of `ACEClassifier` without `class_weight`.

    Attributes:
        ensemble_: The trained ensemble, from raw inputs to predictions in the targets' units.
        members_: Its members.
        diversity_: λ.
        tuning_: How λ was chosen, for `diversity="auto"`.
        oof_predictions_: Predictions of each sample by the members that left it out; NaN if none did.
        oof_score_: Their mean squared error, or that of the hold-out. With folds it is that of K/5 members.
        history_: One entry per epoch, with the ensemble's squared error of scaled training and left-out targets.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = NCLRegressor(num_members=5, epochs=40, random_state=0).fit(X, y)
        >>> bool(regressor.score(X, y) > 0.5), regressor.predict_uncertainty(X)["spread"].shape
        (True, (442,))
    """

    _task = "regression"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train one epoch on these samples; those of the first call determine the scaling."""
        with self._replace_when_done() as new:
            new._partial_fit(X, y, sample_weight)
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the members' mean prediction, `(N,)`, or `(N, M)` for several targets.

        With `return_std`, also return the standard deviation of a new target: the members' spread and the residual
        variance of each target (training must have stopped on folds or a hold-out).
        """
        if not return_std:
            return self._squeeze(self._predict(X, lambda predictions: predictions.mean(0))[0])
        mean, spread = self._predict(X, lambda p: p.mean(0), lambda p: p.std(0, correction=0))
        if self._residual_variance is None:
            raise ValueError(
                "Expected left-out samples for `return_std`, but training used all of them. Train with "
                "early_stopping='folds'."
            )
        return self._squeeze(mean), self._squeeze(np.sqrt(np.square(spread) + self._residual_variance))

    def predict_interval(self, X: ArrayLike, coverage: float = 0.9) -> NDArray[np.float64]:
        """Return limits that contain a fraction `coverage` of new targets, `(N, 2)`, or `(N, M, 2)` for several.

        With folds, the limits are those of CV+: out-of-fold residuals around the predictions of the members that left
        out their fold. With a hold-out, they are its residuals around the mean prediction (split conformal). Training
        must have stopped on one of them, the default from 200 samples on.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> regressor = NCLRegressor(num_members=5, epochs=40, random_state=0).fit(X[:300], y[:300])
            >>> low, high = regressor.predict_interval(X[300:], 0.9).T
            >>> bool(0.8 < ((low <= y[300:]) & (y[300:] <= high)).mean() <= 1)
            True
        """
        check_is_fitted(self)
        coverage = to_python(coverage)
        if not isinstance(coverage, float) or not 0 < coverage < 1:
            raise ValueError(f"Expected `coverage` between 0 and 1, but got {coverage!r}. Use 0.9 for 90 %.")
        if self._residuals is None:
            raise ValueError(
                "Expected left-out samples for an interval, but training used all of them. Train with "
                "early_stopping='folds'."
            )
        num_folds = len(self._residuals)  # 1 for a hold-out
        groups = [range(fold, self.ensemble_.num_members, num_folds) for fold in range(num_folds)]
        functions = [partial(lambda group, p: p[list(group)].mean(0), group) for group in groups if group]
        limits = cv_plus_interval(self._predict(X, *functions), self._residuals[: len(functions)], coverage)
        return limits if self._is_multi_output else limits[:, 0]

    def predict_uncertainty(self, X: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Return the members' standard deviation in the targets' units, as `spread`."""
        return {"spread": self._squeeze(self._predict(X, lambda predictions: predictions.std(0, correction=0))[0])}

    def _validate(self, X: ArrayLike, y: ArrayLike, *, reset: bool) -> tuple[Any, NDArray[Any]]:
        return read_inputs_and_targets(self, X, y, reset=reset, are_numbers=True)

    def _learn_targets(self, y: NDArray[Any]) -> None:
        self._is_multi_output = y.ndim == 2
        self._num_outputs = y.shape[1] if self._is_multi_output else 1

    def _encode_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        if (y.ndim == 2) != self._is_multi_output or y.size != len(y) * self._num_outputs:
            raise ValueError(f"Expected `y` as in the first call, with {self._num_outputs} targets, but got {y.shape}.")
        return y.astype(np.float64).reshape(len(y), self._num_outputs)
