"""The estimators: scikit-learn's checks, and behavior beyond them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import torchace as ace
from torchace.lab.tables.model import TableModel
from torchace.lab.tuning.grid_search import GridSearch
from torchace.saving import ModelFileError
from torchace.sklearn import ACEClassifier, NCLRegressor

IRIS_X, IRIS_Y = load_iris(return_X_y=True)
SUGAR_X, SUGAR_Y = load_diabetes(return_X_y=True)
ESTIMATORS = [ACEClassifier, NCLRegressor]


def small(kind: type = ACEClassifier, **options: Any) -> Any:
    return kind(**{"num_members": 3, "hidden": (8,), "epochs": 15, "learning_rate": 0.02, "random_state": 0, **options})


def data(kind: type) -> tuple[NDArray[Any], NDArray[Any]]:
    return (IRIS_X, IRIS_Y) if kind is ACEClassifier else (SUGAR_X, SUGAR_Y)


def predictions(estimator: Any, X: Any) -> NDArray[Any]:
    return estimator.predict_proba(X) if isinstance(estimator, ACEClassifier) else estimator.predict(X)


@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks([small(kind, epochs=40, random_state=None) for kind in ESTIMATORS])
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks([ACEClassifier(), NCLRegressor()])
def test_scikit_learn_checks_with_default_parameters(estimator: Any, check: Any) -> None:
    check(estimator)


# -- labels and containers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["setosa", "versi color", "virgínica"]),
        np.array([7, -2, 30]),
        np.array([0.5, 1.0, 2.0]),
        np.array(["a", "b", "c"], dtype=object),
        np.array([10, 20, 30], dtype=np.uint8),
    ],
    ids=["text", "integers", "numbers", "objects", "bytes"],
)
def test_labels_come_back_as_they_went_in(labels: NDArray[Any], tmp_path: Path) -> None:
    kept = IRIS_Y if labels.dtype.kind != "f" else None
    if kept is None:  # scikit-learn takes fractions for a regression
        with pytest.raises(ValueError, match="Unknown label type"):
            small().fit(IRIS_X, labels[IRIS_Y])
        return
    y = labels[IRIS_Y]
    model = small(epochs=60).fit(IRIS_X, y)
    assert model.classes_.tolist() == sorted(labels.tolist())
    assert (model.predict(IRIS_X) == y).mean() > 0.9
    assert model.predict(IRIS_X).dtype == y.dtype
    model.save(tmp_path / "model")
    again = ACEClassifier.load(tmp_path / "model")
    assert again.classes_.dtype == model.classes_.dtype
    assert again.predict(IRIS_X).tolist() == model.predict(IRIS_X).tolist()


def test_two_classes_as_booleans() -> None:
    y = IRIS_Y > 0
    assert small(epochs=60).fit(IRIS_X, y).score(IRIS_X, y) > 0.95


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_frames_keep_their_column_names(kind: type, tmp_path: Path) -> None:
    X, y = data(kind)
    frame = pd.DataFrame(X, columns=[f"column {i}" for i in range(X.shape[1])])
    model = small(kind).fit(frame, pd.Series(y))
    assert model.feature_names_in_.tolist() == list(frame.columns)
    np.testing.assert_array_equal(predictions(model, frame), predictions(small(kind).fit(X, y), X))
    model.save(tmp_path / "model")
    again = kind.load(tmp_path / "model")
    np.testing.assert_array_equal(predictions(again, frame), predictions(model, frame))
    with pytest.raises(ValueError, match="these are absent: 'column 0'"):
        again.predict(frame.rename(columns={"column 0": "other"}))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_pipelines_and_grid_searches(kind: type) -> None:
    X, y = data(kind)
    pipeline = make_pipeline(StandardScaler(), small(kind))
    assert len(cross_val_score(pipeline, X, y, cv=3)) == 3
    name = kind.__name__.lower()
    search = GridSearchCV(pipeline, {f"{name}__diversity": [0.0, 0.5], f"{name}__hidden": [4, (8, 4)]}, cv=2)
    search.fit(X, y)
    assert search.best_params_[f"{name}__diversity"] in (0.0, 0.5)
    fresh = clone(search.best_estimator_[-1])
    assert fresh.get_params() == search.best_estimator_[-1].get_params()
    with pytest.raises(NotFittedError):
        fresh.predict(X)


# -- reproducibility --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_random_state_decides(kind: type) -> None:
    X, y = data(kind)
    torch.manual_seed(1)
    one = predictions(small(kind).fit(X, y), X)
    state = torch.get_rng_state()
    two = predictions(small(kind).fit(X, y), X)
    assert torch.equal(torch.get_rng_state(), state)  # torch's own generator is left alone
    np.testing.assert_array_equal(one, two)
    assert not np.allclose(one, predictions(small(kind, random_state=1).fit(X, y), X))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_pickling_keeps_every_bit_and_training_goes_on(kind: type) -> None:
    X, y = data(kind)
    options = {"classes": np.unique(y)} if kind is ACEClassifier else {}
    model = small(kind).partial_fit(X[:100], y[:100], **options).partial_fit(X[50:], y[50:])
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(predictions(copy, X), predictions(model, X))
    model.partial_fit(X, y)
    copy.partial_fit(X, y)
    np.testing.assert_array_equal(predictions(copy, X), predictions(model, X))
    assert [entry["epoch"] for entry in model.history_] == [1, 2, 3]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_saved_models_predict_the_same_bits(kind: type, tmp_path: Path) -> None:
    X, y = data(kind)
    model = small(kind, hidden=(8, 4), diversity=0.25).fit(X, y)
    model.save(tmp_path / "model")
    again = kind.load(tmp_path / "model")
    np.testing.assert_array_equal(predictions(again, X), predictions(model, X))
    for name, values in model.predict_uncertainty(X).items():
        np.testing.assert_array_equal(again.predict_uncertainty(X)[name], values)
    assert again.get_params() == model.get_params()
    assert (again.diversity_, again.history_) == (0.25, model.history_)
    assert not list((tmp_path / "model").glob("*.pkl"))
    # and the plain ensemble is in there, from raw inputs
    ensemble = ace.load_model(tmp_path / "model")
    raw = torch.from_numpy(X)
    expected = ensemble.predict_proba(raw) if kind is ACEClassifier else ensemble.predict(raw).squeeze(1)
    np.testing.assert_allclose(expected.numpy(), predictions(model, X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("hidden", [np.int64(8), np.array([8, 4]), (np.int32(8), 4)])
def test_whole_numbers_of_numpy(hidden: Any, tmp_path: Path) -> None:
    tried = {"num_members": np.arange(2, 4), "epochs": np.array([2]), "batch_size": np.array([32])}
    best = (
        GridSearchCV(small(hidden=hidden, device=torch.device("cpu")), tried, cv=2).fit(IRIS_X, IRIS_Y).best_estimator_
    )
    assert best.ensemble_.num_members in (2, 3)
    best.save(tmp_path / "model")
    again = ACEClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(IRIS_X), best.predict(IRIS_X))
    assert clone(again).fit(IRIS_X, IRIS_Y).predict(IRIS_X).shape == (150,)


@pytest.mark.parametrize("size", [1e-165, 1e154, 1e200])
def test_targets_of_any_size(size: float) -> None:
    plain, sized = (small(NCLRegressor).fit(SUGAR_X, SUGAR_Y * factor).predict(SUGAR_X) for factor in (1.0, size))
    np.testing.assert_allclose(sized / size, plain, rtol=1e-5)


def test_a_feature_may_be_named_like_the_target(tmp_path: Path) -> None:
    frame = pd.DataFrame(IRIS_X, columns=["y", "y0", "a", "b"])
    small().fit(frame, IRIS_Y).save(tmp_path / "model")
    loaded = TableModel.load(tmp_path / "model")
    assert loaded.encoding.schema.target.name not in frame.columns
    assert len(loaded.predict(frame)) == 150


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    small(NCLRegressor).fit(SUGAR_X, SUGAR_Y).save(tmp_path / "regressor")
    with pytest.raises(ModelFileError, match="Expected a saved ACEClassifier"):
        ACEClassifier.load(tmp_path / "regressor")
    ace.save_model(tmp_path / "plain", ace.Ensemble([ace.mlp(4, 8, 3)]))
    with pytest.raises(ModelFileError, match="Expected a model of a table"):
        ACEClassifier.load(tmp_path / "plain")
    with pytest.raises(ModelFileError):
        ACEClassifier.load(tmp_path / "nothing")
    with pytest.raises(NotFittedError):
        small().save(tmp_path / "unfitted")
    model = small().fit(IRIS_X, IRIS_Y)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot be trained further"):
        ACEClassifier.load(tmp_path / "model").partial_fit(IRIS_X, IRIS_Y)


# -- computation ------------------------------------------------------------------------------------------------------


def test_members_are_independent_without_diversity() -> None:
    alone = small(num_members=1, encoding="standard").fit(IRIS_X, IRIS_Y)
    company = small(num_members=4, encoding="standard").fit(IRIS_X, IRIS_Y)
    coupled = small(num_members=4, diversity=0.9, encoding="standard").fit(IRIS_X, IRIS_Y)
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(company.members_[0](x), alone.members_[0](x), rtol=0, atol=1e-9)
    assert not torch.allclose(coupled.members_[0](x), alone.members_[0](x), atol=1e-3)


def test_uncertainties_are_what_their_names_say() -> None:
    model = small().fit(IRIS_X, IRIS_Y)
    with torch.no_grad():
        q = model.ensemble_(torch.from_numpy(IRIS_X)).softmax(2).numpy()  # (K, N, C)
    mean = q.mean(0)
    np.testing.assert_allclose(model.predict_proba(IRIS_X), mean, rtol=0, atol=1e-12)
    entropy = -(mean * np.log(mean)).sum(1)
    own = -(q * np.log(q)).sum(2).mean(0)
    votes = q.argmax(2)
    differs = np.mean([votes[i] != votes[j] for i in range(3) for j in range(i)], axis=0)
    found = model.predict_uncertainty(IRIS_X)
    np.testing.assert_allclose(found["entropy"], entropy, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["mutual_information"], entropy - own, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["disagreement"], differs, rtol=0, atol=1e-12)


def test_no_probability_is_above_one() -> None:
    """scikit-learn's log_loss refuses 1 + 4e-16."""
    X, y = load_breast_cancer(return_X_y=True)
    model = small(num_members=7, epochs=60, learning_rate=0.05).fit(X, y)
    probs = model.predict_proba(X)
    assert probs.max() > 1 - 1e-9  # sure enough for rounding to matter
    assert probs.max() <= 1
    assert log_loss(y, probs) < 0.1
    raw = model.ensemble_.predict_proba(torch.from_numpy(X))
    assert float(raw.max()) <= 1


def test_a_regressor_predicts_in_the_targets_units() -> None:
    y = 1e6 + 1e3 * SUGAR_Y
    model = small(NCLRegressor, epochs=60).fit(SUGAR_X, y)
    reference = small(NCLRegressor, epochs=60).fit(SUGAR_X, SUGAR_Y)
    assert model.score(SUGAR_X, y) > 0.5
    # the same network in other units, to the rounding of targets of 1e6
    np.testing.assert_allclose((model.predict(SUGAR_X) - 1e6) / 1e3, reference.predict(SUGAR_X), rtol=0, atol=1e-5)
    with torch.no_grad():
        each = model.ensemble_(torch.from_numpy(SUGAR_X)).squeeze(2).numpy()
    np.testing.assert_allclose(model.predict(SUGAR_X), each.mean(0), rtol=1e-12)
    np.testing.assert_allclose(model.predict_uncertainty(SUGAR_X)["spread"], each.std(0), rtol=1e-6)


def test_several_targets_at_once(tmp_path: Path) -> None:
    y = np.stack([SUGAR_Y, -3 * SUGAR_Y + 5], 1)
    model = small(NCLRegressor, epochs=60).fit(SUGAR_X, y)
    assert model.predict(SUGAR_X).shape == y.shape
    assert model.score(SUGAR_X, y) > 0.4
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(NCLRegressor.load(tmp_path / "model").predict(SUGAR_X), model.predict(SUGAR_X))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_early_stopping_keeps_the_best_epoch(kind: type) -> None:
    X, y = data(kind)
    model = small(kind, hidden=64, epochs=200, learning_rate=0.03, early_stopping=True, patience=5).fit(X, y)
    held_out = [entry["validation"] for entry in model.history_]
    best = int(np.argmin(held_out))
    assert len(held_out) == best + 1 + 5 < 200  # stopped five epochs after the best
    shorter = small(kind, hidden=64, epochs=best + 1, learning_rate=0.03, early_stopping=True, patience=5).fit(X, y)
    np.testing.assert_allclose(predictions(shorter, X), predictions(model, X), rtol=1e-9)


def test_class_weights_are_sample_weights() -> None:
    X, y = make_classification(400, weights=[0.9], flip_y=0.05, random_state=0)
    plain = small(epochs=30).fit(X, y)
    balanced = small(epochs=30, class_weight="balanced").fit(X, y)
    weight = np.where(y == 0, 1 / (y == 0).sum(), 1 / (y == 1).sum()) * len(y) / 2
    by_hand = small(epochs=30).fit(X, y, sample_weight=weight)
    named = small(epochs=30, class_weight={0: weight[y == 0][0], 1: weight[y == 1][0]}).fit(X, y)
    np.testing.assert_allclose(balanced.predict_proba(X), by_hand.predict_proba(X), rtol=0, atol=1e-9)
    np.testing.assert_allclose(named.predict_proba(X), by_hand.predict_proba(X), rtol=0, atol=1e-9)
    assert balanced.predict_proba(X)[:, 1].mean() > plain.predict_proba(X)[:, 1].mean() + 0.05


def test_balanced_classes_may_be_left_out_by_weights() -> None:
    weight = (IRIS_Y > 0).astype(float)
    left_out = small(class_weight="balanced").fit(IRIS_X, IRIS_Y, sample_weight=weight)
    unweighted = small().fit(IRIS_X, IRIS_Y, sample_weight=weight)
    np.testing.assert_allclose(left_out.predict_proba(IRIS_X), unweighted.predict_proba(IRIS_X), rtol=0, atol=1e-9)


def test_class_weights_with_keys_of_numpy_are_saved(tmp_path: Path) -> None:
    weights = {label: 1.0 + label for label in np.unique(IRIS_Y)}
    small(epochs=1, class_weight=weights).fit(IRIS_X, IRIS_Y).save(tmp_path / "model")
    assert ACEClassifier.load(tmp_path / "model").class_weight == {0: 1.0, 1: 2.0, 2: 3.0}


def test_float32_is_trained_in_float32() -> None:
    double, single = small().fit(IRIS_X, IRIS_Y), small().fit(IRIS_X.astype(np.float32), IRIS_Y)
    difference = np.abs(double.predict_proba(IRIS_X) - single.predict_proba(IRIS_X)).max()
    assert 1e-12 < difference < 1e-3


@pytest.mark.parametrize("batches", ["shared", "exchanged"])
def test_kinds_of_batches(batches: str) -> None:
    model = small(batches=batches, epochs=60).fit(IRIS_X, IRIS_Y)
    assert model.score(IRIS_X, IRIS_Y) > 0.9


def test_partial_fit_learns() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    model = small(hidden=16)
    for i in range(40):
        part = slice((i % 4) * 140, (i % 4 + 1) * 140)
        model.partial_fit(X[part], y[part], classes=[0, 1])
    assert model.score(X, y) > 0.95
    before = predictions(model, X)
    model.partial_fit(X[:50], y[:50])
    assert not np.array_equal(before, predictions(model, X))


def test_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    small(n_jobs=1 if before > 1 else 2).fit(IRIS_X, IRIS_Y).predict(IRIS_X)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("chosen", [0.0, 0.3])
def test_diversity_is_found_on_held_out_samples(
    kind: type, chosen: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = load_breast_cancer(return_X_y=True) if kind is ACEClassifier else data(kind)
    search = GridSearch.run

    def with_diversity(self: GridSearch, *arguments: Any) -> Any:
        return search(self, *arguments).model_copy(update={"chosen": chosen})

    monkeypatch.setattr("torchace.lab.tuning.auto.ZeroDiversity.reason", lambda self: "")
    monkeypatch.setattr("torchace.lab.tuning.grid_search.GridSearch.run", with_diversity)
    model = small(kind, epochs=5).fit(X, y)
    assert model.tuning_.candidates[0].diversity == 0.0
    assert model.diversity_ == chosen
    assert set(model.tuning_.seeds).isdisjoint(model.tuning_.fresh_seeds)
    # the model itself is trained on everything, as if that number had been given
    given = small(kind, diversity=chosen, epochs=5).fit(X, y)
    np.testing.assert_allclose(predictions(model, X), predictions(given, X), rtol=1e-9)
    # how it was found is kept with it
    model.save(tmp_path / "model")
    assert kind.load(tmp_path / "model").tuning_ == model.tuning_
    assert TableModel.load(tmp_path / "model").record["search"]["sentence"] == model.tuning_.sentence


@pytest.mark.parametrize(("schedule", "stops", "last"), [
    (None, False, 0.0), (None, True, 1.0), ("cosine", True, 0.0), ("constant", False, 1.0),
])  # fmt: skip
def test_the_schedule_is_the_one_asked_for(schedule: str | None, stops: bool, last: float) -> None:
    """Which share of the learning rate the last of 100 steps has; a cosine leaves 2.5e-4 of it."""
    plan = small(schedule=schedule, early_stopping=stops, epochs=100, batch_size=150)._plan()
    train_config = plan.train_config(150)
    assert train_config.learning_rate_at(99) / train_config.learning_rate == pytest.approx(last, abs=1e-3)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members"),
        ({"num_members": 2.5}, "num_members"),
        ({"hidden": (0,)}, r"Expected `hidden\[0\]` to be at least 1"),
        ({"hidden": 8.0}, "`hidden`: expected a whole number or a list of them, but got 8.0"),
        ({"diversity": 1.4}, "diversity"),
        ({"diversity": "much"}, "diversity"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": -5}, "batch_size"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"schedule": "linear"}, "schedule"),
        ({"batches": "mixed"}, "batches"),
        ({"batches": "separate", "diversity": 0.5}, "separate"),
        ({"encoding": "quantiles"}, "encoding"),
        ({"early_stopping": "fold"}, "early_stopping"),
        ({"validation_fraction": 0.0}, "validation_fraction"),
        ({"patience": 0}, "patience"),
        ({"class_weight": "heavy"}, "class_weight"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as error:
        small(**options).fit(IRIS_X, IRIS_Y)
    assert "\n" not in str(error.value)


def test_bad_targets() -> None:
    with pytest.raises(ValueError, match="one class"):
        small().fit(IRIS_X, np.zeros(150))
    model = small().partial_fit(IRIS_X, IRIS_Y)
    with pytest.raises(ValueError, match=r"Expected labels in .*, but got [0-9]"):
        model.partial_fit(IRIS_X, IRIS_Y + 1)
    with pytest.raises(ValueError, match="first call"):
        model.partial_fit(IRIS_X, IRIS_Y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"above 0|at least one non-zero"):
        small().fit(IRIS_X, IRIS_Y, sample_weight=np.zeros(150))


def test_exploding_training_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="smaller learning rate"):
        small(NCLRegressor, learning_rate=1e200, epochs=50).fit(SUGAR_X, SUGAR_Y)
