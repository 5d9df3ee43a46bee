"""Several labels per sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.metrics import log_loss

from torchace.lab.tables.model import TableModel
from torchace.sklearn import ACEClassifier


def _data(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(rows, 4))
    noise = 0.5 * draw.normal(size=(rows, 3))
    return X, (X[:, :3] + noise > [0, 0.5, -0.5]).astype(int)


TINY: dict[str, Any] = {"num_members": 5, "hidden": (8,), "epochs": 30, "random_state": 0}


@pytest.fixture(scope="module")
def classifier() -> ACEClassifier:
    return ACEClassifier(**TINY, diversity=0.3, early_stopping="folds").fit(*_data(300, 0))


def test_probabilities_are_means_of_sigmoids(classifier: ACEClassifier) -> None:
    X, y = _data(500, 1)
    logits = classifier.ensemble_(torch.from_numpy(X))  # (K, N, L)
    probs = classifier.predict_proba(X)
    assert np.allclose(probs, logits.sigmoid().mean(0).numpy())
    assert np.array_equal(classifier.predict(X), probs > 0.5)
    assert np.allclose(classifier.predict_log_proba(X), np.log(probs))
    assert classifier.classes_.tolist() == [0, 1, 2]
    constant = log_loss(y[:, 0], np.full(500, y[:, 0].mean()))
    assert all(log_loss(y[:, label], probs[:, label]) < 0.8 * constant for label in range(3))


def test_uncertainty_is_that_of_each_label(classifier: ACEClassifier) -> None:
    X, _ = _data(50, 1)
    found = classifier.predict_uncertainty(X)
    probs = classifier.predict_proba(X)
    entropy = -(probs * np.log(probs) + (1 - probs) * np.log(1 - probs))
    assert np.allclose(found["entropy"], entropy)
    votes = (classifier.ensemble_(torch.from_numpy(X)) > 0).numpy()  # (K, N, L)
    pairs = [votes[i] != votes[j] for i in range(5) for j in range(i)]
    assert np.allclose(found["disagreement"], np.mean(pairs, axis=0))


def test_out_of_fold_predictions_and_temperature(classifier: ACEClassifier) -> None:
    _, y = _data(300, 0)
    oof = classifier.oof_predictions_
    assert oof is not None
    assert oof.shape == (300, 3)
    loss = -np.mean(np.log(np.where(y == 1, oof, 1 - oof)))
    assert classifier.oof_score_ == pytest.approx(loss)
    assert classifier.temperature_ != 1


def test_importances(classifier: ACEClassifier) -> None:
    found = classifier.feature_importances(*_data(300, 1), random_state=0)
    assert list(found)[-1] == "x3"  # decides nothing
    X, y = _data(20, 1)
    assert len(classifier.feature_importances(X, np.zeros_like(y), n_repeats=1)) == 4  # no label holds


def test_saved_and_read_by_the_command_line(classifier: ACEClassifier, tmp_path: Any) -> None:
    X, _ = _data(20, 1)
    classifier.save(tmp_path / "m")
    assert np.array_equal(ACEClassifier.load(tmp_path / "m").predict_proba(X), classifier.predict_proba(X))
    import pandas as pd

    frame = TableModel.load(tmp_path / "m").predict(pd.DataFrame(X, columns=[f"x{i}" for i in range(4)]))
    assert list(frame.columns) == ["probability_0", "probability_1", "probability_2"]
    assert np.allclose(frame.to_numpy(), classifier.predict_proba(X))


def test_sparse_targets_single_columns_and_refits() -> None:
    X, y = _data(60, 0)
    fitted = ACEClassifier(**TINY).fit(X, y)
    sparse = ACEClassifier(**TINY).fit(X, csr_matrix(y))
    assert np.array_equal(fitted.predict_proba(X), sparse.predict_proba(X))
    frame = pd.DataFrame(X).assign(town=np.where(X[:, 0] > 0, "Ulm", "Rome"))
    models = [ACEClassifier(**TINY).fit(frame, targets) for targets in (y, csr_matrix(y))]
    assert np.array_equal(models[0].predict_proba(frame), models[1].predict_proba(frame))
    assert fitted.fit(X, y[:, 0]).predict(X).shape == (60,)  # one label per sample again
    assert fitted.fit(X, y).predict(X).shape == (60, 3)


def test_unsupported_options_with_several_labels() -> None:
    X, y = _data(60, 0)
    with pytest.raises(ValueError, match="class_weight"):
        ACEClassifier(**TINY, class_weight="balanced").fit(X, y)
    automatic = ACEClassifier(**TINY).fit(X, y)
    assert (automatic.diversity_, automatic.tuning_.sentence.split(".")[0]) == (
        0,
        "Several labels per sample have no search",
    )
    first = ACEClassifier(**TINY).partial_fit(X, y)
    assert first.predict(X).shape == (60, 3)
    with pytest.raises(ValueError, match=r"\(N, 3\)"):
        first.partial_fit(X, y[:, :2])
