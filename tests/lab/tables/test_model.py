"""A model of a table: the same predictions in memory, from its directory, and from the ensemble on the raw matrix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.lab.cli.command_line import houses, pets, write_table
from tests.lab.tables.small_fits import fitted
from torchace._files import with_checksum
from torchace.functional import ensemble_probs
from torchace.lab.data import DataError
from torchace.lab.data.tables import read_table
from torchace.lab.tables.model import TableModel
from torchace.lab.training.run_group import chunk_rows
from torchace.models import mlp
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

PLACES = np.arange(60)
# What a target may look like in a file, and what its classes are then.
LABELS: dict[str, tuple[Any, str, list[Any]]] = {
    "texts": (np.array(["no", "yes"])[PLACES % 2], ".csv", ["no", "yes"]),
    "whole numbers in a CSV file": (PLACES % 3, ".csv", ["0", "1", "2"]),
    "whole numbers": (PLACES % 3, ".parquet", [0, 1, 2]),
    "numbers": (PLACES % 2 + 0.5, ".parquet", [0.5, 1.5]),
    "truth values in a CSV file": (PLACES % 2 == 0, ".csv", ["False", "True"]),
    "truth values": (PLACES % 2 == 0, ".parquet", [False, True]),
    "with leading zeros": (np.array(["007", "1.0"])[PLACES % 2], ".csv", ["1.0", "007"]),
    "in lower case": (np.array(["true", "false"])[PLACES % 2], ".csv", ["false", "true"]),
    "with commas and quotes": (np.array(['a, "b"', "c\nd"])[PLACES % 2], ".csv", ['a, "b"', "c\nd"]),
    "in other scripts": (np.array(["ä", "λ"])[PLACES % 2], ".parquet", ["ä", "λ"]),
    "in an NPZ file": (PLACES % 2 == 0, ".npz", [False, True]),
}


@pytest.fixture(scope="module")
def classifier() -> TableModel:
    return fitted(pets(), "pet", epochs=20)


@pytest.fixture(scope="module")
def regressor() -> TableModel:
    return fitted(houses(), "price", epochs=20)


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LABELS)
def test_classes_are_spelled_as_in_the_training_file(name: str, tmp_path: Path) -> None:
    labels, suffix, classes = LABELS[name]
    frame = pets(pet=labels)
    model = fitted(frame, "pet", suffix, task="classification")
    assert list(model.encoding.schema.target.classes) == classes
    assert [type(label) for label in model.encoding.schema.target.classes] == [type(label) for label in classes]
    path = tmp_path / "model"
    model.save(path)
    loaded = TableModel.load(path)
    data = read_table(write_table(frame, tmp_path / f"again{suffix}"))
    predicted = loaded.predict(data)
    assert set(predicted["prediction"]) <= set(classes)
    assert {type(label) for label in predicted["prediction"].tolist()} == {type(classes[0])}
    assert list(predicted.columns[1:-3]) == [f"probability_{label}" for label in classes]
    loaded.evaluate(data)


def test_a_classifier_is_the_ensemble_on_the_raw_matrix(classifier: TableModel, tmp_path: Path) -> None:
    classifier.save(tmp_path / "model")
    ensemble, frame = load_model(tmp_path / "model"), pets(50, seed=3)
    raw = classifier.encoding.matrix(frame)
    predicted = classifier.predict(frame)
    with torch.no_grad():
        expected = ensemble.predict_proba(raw)
        logits = ensemble(raw)
    names = [f"probability_{name}" for name in ("cat", "cow", "dog")]
    # float64 throughout: the same sums in another order
    np.testing.assert_allclose(predicted[names].to_numpy(), expected.numpy(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(expected, ensemble_probs(logits), rtol=0, atol=1e-14)
    entropy = -(expected * expected.log()).sum(1)
    np.testing.assert_allclose(predicted["entropy"], entropy, rtol=0, atol=1e-13)
    probs = logits.softmax(2)
    own = -(probs * probs.log()).sum(2).mean(0)
    np.testing.assert_allclose(predicted["mutual_information"], entropy - own, rtol=0, atol=1e-13)
    votes = logits.argmax(2)
    np.testing.assert_array_equal(predicted["disagreement"], (votes[0] != votes[1]).double())
    assert predicted["prediction"].tolist() == [("cat", "cow", "dog")[i] for i in expected.argmax(1)]


def test_a_regressor_is_the_ensemble_on_the_raw_matrix(regressor: TableModel, tmp_path: Path) -> None:
    regressor.save(tmp_path / "model")
    ensemble, frame = load_model(tmp_path / "model"), houses(50, seed=3)
    with torch.no_grad():
        members = ensemble(regressor.encoding.matrix(frame)).squeeze(2).numpy()  # (K, N)
    predicted = regressor.predict(frame)
    assert list(predicted) == ["prediction", "spread"]
    np.testing.assert_allclose(predicted["prediction"], members.mean(0), rtol=1e-14)
    np.testing.assert_allclose(predicted["spread"], members.std(0), rtol=1e-9)


def test_numbers_near_1e9_that_differ_by_one_are_distinguished() -> None:
    born = 1_700_000_000 + np.arange(200) % 7
    late = np.where(born > 1_700_000_003, "late", "early")
    frame = pd.DataFrame({"born": born, "when": late})
    model = fitted(frame, "when", epochs=60, hidden=(16,), learning_rate=0.03)
    assert model.evaluate(frame).metrics["accuracy"] == 1.0


def test_rows_do_not_depend_on_each_other(classifier: TableModel) -> None:
    frame = pets(40, seed=5)
    whole = classifier.predict(frame)
    for rows in ([0], [17], [3, 2], list(range(20, 40))):
        part = classifier.predict(frame.iloc[rows])
        assert part.index.tolist() == rows
        expected = whole.iloc[rows]
        assert part["prediction"].tolist() == expected["prediction"].tolist()
        # matrices of other sizes are multiplied in another order
        np.testing.assert_allclose(part.iloc[:, 1:].to_numpy(), expected.iloc[:, 1:].to_numpy(), rtol=0, atol=1e-13)


def test_results_do_not_depend_on_chunks(classifier: TableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pets(30)
    whole, table = classifier.logits(frame), classifier.predict(frame)
    monkeypatch.setattr("torchace.lab.training.run_group.CHUNK_BYTES", 2000)
    assert chunk_rows(classifier.ensemble, classifier.ensemble.num_members) < 30
    torch.testing.assert_close(classifier.logits(frame), whole, rtol=0, atol=1e-13)
    pd.testing.assert_frame_equal(classifier.predict(frame), table, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "changes",
    [
        {"age": np.nan},
        {"age": 1e300},
        {"age": "-1e300"},
        {"fur": "a kind of fur that was never seen"},
        {"fur": None, "age": None},
        {"chipped": "perhaps"},
        {"extra": "ignored", "pet": "ignored too"},
    ],
    ids=str,
)
def test_rows_with_unseen_values(changes: dict[str, Any], classifier: TableModel) -> None:
    predicted = classifier.predict(pets(10).assign(**changes))
    assert np.isfinite(predicted.iloc[:, 1:].to_numpy()).all()


def test_columns_in_another_order(classifier: TableModel) -> None:
    frame = pets(20)
    assert classifier.predict(frame[frame.columns[::-1]]).equals(classifier.predict(frame))


def test_the_callers_table_is_not_changed(classifier: TableModel) -> None:
    frame = pets(20)
    classifier.predict(frame)
    classifier.evaluate(frame)
    pd.testing.assert_frame_equal(frame, pets(20))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.drop(columns="fur"), "no column 'fur'"),
        (lambda frame: frame.assign(age="young"), "'age' holds numbers, but row 1 has 'young'"),
        (lambda frame: frame[:0], "at least one row"),
        (lambda frame: pd.concat([frame, frame[["age"]]], axis=1), "two columns named 'age'"),
    ],
)
def test_invalid_rows(change: Callable[[pd.DataFrame], pd.DataFrame], words: str, classifier: TableModel) -> None:
    with pytest.raises(DataError, match=words):
        classifier.predict(change(pets(12)))


def test_a_class_never_seen_is_named(classifier: TableModel) -> None:
    frame = pets(12)
    frame.loc[4, "pet"] = "axolotl"
    with pytest.raises(DataError, match=r"Row 5 has the class 'axolotl' .* training had only 'cat', 'cow', 'dog'"):
        classifier.evaluate(frame)


# -- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_keeps_everything(classifier: TableModel, tmp_path: Path) -> None:
    classifier.save(tmp_path / "model")
    loaded = TableModel.load(tmp_path / "model")
    assert loaded.encoding == classifier.encoding
    assert loaded.diversity == classifier.diversity
    assert loaded.record == classifier.record
    assert loaded.predict(pets()).equals(classifier.predict(pets()))
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["class_names"] == ["cat", "cow", "dog"]


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter a manifest and renew its checksum."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps(with_checksum(manifest)))


def _encoding(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["extra"]["encoding"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest["extra"].pop("encoding"), "Expected a model of a table"),
        (lambda manifest: manifest.update(extra=None), "Expected a model of a table"),
        (lambda manifest: manifest.update(diversity=None), "Expected a model of a table"),
        (lambda manifest: manifest["extra"].update(encoding=3), "description of the table in .* cannot be read"),
        (lambda manifest: _encoding(manifest).update(version=99), "description of the table in .* cannot be read"),
    ],
)
def test_manifests_that_were_altered(
    change: Callable[[dict[str, Any]], None], words: str, classifier: TableModel, tmp_path: Path
) -> None:
    classifier.save(tmp_path / "model")
    reseal(tmp_path / "model", change)
    with pytest.raises(ModelFileError, match=words):
        TableModel.load(tmp_path / "model")


def test_a_model_of_something_else(tmp_path: Path) -> None:
    save_model(tmp_path / "model", Ensemble([mlp(3, 4, 2)]), diversity=0.5)
    with pytest.raises(ModelFileError, match=r"a model of a table .* got another\. Use torchace\.load_model\.$"):
        TableModel.load(tmp_path / "model")
