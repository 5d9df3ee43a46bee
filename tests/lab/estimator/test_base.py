"""Common behavior of the estimators: sample weights, failed fits, memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_sklearn import ESTIMATORS, data, predictions, small
from torchace.sklearn import ACEClassifier, NCLRegressor

# -- sample weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", ["shared", "exchanged"])
@pytest.mark.parametrize("positives", [0.01, 0.001])
def test_balanced_classes_are_equally_probable_where_nothing_tells_them_apart(positives: float, batches: str) -> None:
    """Most batches of 100 hold no positive sample at 0.1 %; divided by their own weights they would count too much."""
    X = np.random.default_rng(0).normal(size=(20_000, 1))
    y = np.arange(len(X)) < positives * len(X)
    options = {"num_members": 2, "hidden": 2, "epochs": 3, "batch_size": 100, "learning_rate": 3e-3}
    model = small(**options, class_weight="balanced", batches=batches).fit(X, y)
    # 20 positive samples are 20 ± 4.5: their logit has a standard error of 0.22, their probability one of 0.056
    assert model.predict_proba(X)[:, 1].mean() == pytest.approx(0.5, abs=0.06)


def test_partial_fit_weighs_a_sample_by_all_that_came_before() -> None:
    X = np.random.default_rng(0).normal(size=(6_000, 1))
    y = np.arange(len(X)) % 100 == 0
    model = small(num_members=2, class_weight={False: 1, True: 99})
    for part in np.array_split(np.random.default_rng(1).permutation(len(X)), 150):  # 40 samples: most have no positive
        model.partial_fit(X[part], y[part], classes=[False, True])
    assert model.predict_proba(X)[:, 1].mean() == pytest.approx(0.5, abs=0.1)


# -- failed fits ------------------------------------------------------------------------------------------------------

# what a second call may fail at: other samples, options, and what is raised on the way
OTHER_X = np.random.default_rng(5).normal(size=(60, 7))
FAILURES: dict[str, tuple[Any, Any]] = {
    "targets": (lambda m, y: m.fit(OTHER_X, np.full(60, np.nan)), {}),
    "lengths": (lambda m, y: m.fit(OTHER_X, y[:59]), {}),
    "weights": (lambda m, y: m.fit(OTHER_X, y, sample_weight=np.zeros(60)), {}),
    "negative weights": (lambda m, y: m.fit(OTHER_X, y, sample_weight=-np.ones(60)), {}),
    "tuning": (lambda m, y: m.set_params(diversity="auto").fit(OTHER_X, y), {"search_diversity": KeyboardInterrupt}),
    "training": (lambda m, y: m.fit(OTHER_X, y), {"fit_ensemble": KeyboardInterrupt}),
    "the last step": (lambda m, y: m.fit(OTHER_X, y), {"_history_entry": MemoryError}),
    "explosion": (lambda m, y: m.set_params(learning_rate=1e30).fit(OTHER_X, y), {}),
    "columns, partial": (lambda m, y: m.partial_fit(OTHER_X, y), {}),
    "weights, partial": (lambda m, y: m.partial_fit(OTHER_X[:, :4], y, sample_weight=np.zeros(60)), {}),
    "the end, partial": (lambda m, y: m.partial_fit(OTHER_X[:, :4], y), {"_history_entry": KeyboardInterrupt}),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_fit_that_fails_leaves_the_estimator_as_it_was(
    kind: type, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = data(kind)
    X = X[:, :4]
    model = small(kind).fit(X, y).partial_fit(X, y)
    call, broken = FAILURES[failure]
    for name, error in broken.items():

        def fails(*args: Any, error: type[BaseException] = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr(f"torchace.lab.estimator.base.{name}", fails)
    before, params, twin = dict(vars(model)), model.get_params(), pickle.loads(pickle.dumps(model))
    target = np.arange(60) % 4 if kind is ACEClassifier else np.random.default_rng(6).normal(size=(60, 2))
    if "partial" in failure:
        target = target[:, 0] if kind is NCLRegressor else target % 3
    with pytest.raises((ValueError, KeyboardInterrupt, MemoryError)):
        call(model, target)
    monkeypatch.undo()
    model.set_params(**params)
    assert vars(model).keys() == before.keys()
    assert all(value is before[name] for name, value in vars(model).items())
    np.testing.assert_array_equal(predictions(model, X), predictions(twin, X))
    for estimator in (model, twin):  # network and optimizer are as they were, too
        estimator.partial_fit(X, y)
    np.testing.assert_array_equal(predictions(model, X), predictions(twin, X))


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["predict", "predict_proba", "predict_log_proba", "predict_uncertainty", "early stopping"]
)
def test_predictions_of_many_classes_are_made_in_chunks_of_bytes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of 2,000 rows, 10 members and 200 classes in float64 (32 MB) is made: one of 2 MB at most."""
    X, y = np.random.default_rng(0).normal(size=(2000, 2)), np.arange(2000) % 200
    model = small(num_members=10, epochs=1, batch_size=100, early_stopping=True, validation_fraction=0.5)
    monkeypatch.setattr("torchace.lab.training.run_group.CHUNK_BYTES", 1 << 21)
    monkeypatch.setattr("torchace.lab.training.members.CHUNK_BYTES", 1 << 21)  # of the temperature
    with Largest() as seen:
        model.fit(X, y)
    if method != "early stopping":
        monkeypatch.undo()
        whole = getattr(model, method)(X)
        monkeypatch.setattr("torchace.lab.training.run_group.CHUNK_BYTES", 1 << 21)
        with Largest() as seen:
            parts = getattr(model, method)(X)
        for ours, theirs in zip(*([v.values() if isinstance(v, dict) else [v] for v in (parts, whole)]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)  # products of other sizes add up in another order
    result = X.shape[0] * 200 * 8
    assert 0 < seen.bytes <= max(1 << 21, result)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is computed."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else [made]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.nbytes)
        return made
