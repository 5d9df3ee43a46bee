"""Raw tables: categories, dates, booleans and missing values, in Python, in files and in ONNX."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.datasets import load_digits, load_iris

from torchace.lab.data.encoding import NumberColumn
from torchace.lab.tables.export import export_onnx
from torchace.lab.tables.model import TableModel
from torchace.sklearn import ACEClassifier, NCLRegressor


def mixed_table(rows: int = 300, seed: int = 0) -> tuple[pd.DataFrame, pd.Series, pd.Series]:
    """A table with every kind of column, a class and a number that depend on all of them."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "price": np.exp(rng.normal(size=rows)),
            "town": rng.choice(["Rome", "Oslo", "Bonn"], rows),
            "size": pd.Categorical(rng.choice(["S", "M", "L"], rows), ["S", "M", "L"], ordered=True),
            "sold": rng.random(rows) < 0.5,
            "day": pd.to_datetime("2024-01-01") + pd.to_timedelta(rng.integers(0, 700, rows), "D"),
            "count": pd.array(rng.integers(0, 50, rows), "Int64"),
        }
    )
    value = np.log(frame["price"]) + (frame["town"] == "Rome") + frame["sold"] + 2 * (frame["day"].dt.month > 6)
    frame.loc[rng.random(rows) < 0.1, "price"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "town"] = None
    frame.loc[rng.random(rows) < 0.1, "count"] = pd.NA
    return frame, pd.Series(np.where(value > 1.5, "high", "low")), pd.Series(value.to_numpy(), name="value")


def small(kind: type, **options: Any) -> Any:
    return kind(
        **{"num_members": 5, "hidden": (16,), "epochs": 40, "learning_rate": 0.01, "random_state": 0, **options}
    )


def outputs(model: Any, X: Any) -> np.ndarray:
    return model.predict_proba(X) if isinstance(model, ACEClassifier) else model.predict(X)


@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
def test_a_table_is_encoded_saved_and_loaded(kind: type, tmp_path: Path) -> None:
    frame, label, value = mixed_table()
    y = label if kind is ACEClassifier else value
    model = small(kind).fit(frame[:200], y[:200])
    assert model.score(frame[200:], y[200:]) > 0.8
    assert model.feature_names_in_.tolist() == list(frame.columns)
    model.save(tmp_path / "model")
    again = kind.load(tmp_path / "model")
    np.testing.assert_array_equal(outputs(again, frame), outputs(model, frame))
    # what the command line computes from a CSV file of the table
    frame.to_csv(tmp_path / "t.csv", index=False)
    loaded = TableModel.load(tmp_path / "model")
    found = loaded.predict(pd.read_csv(tmp_path / "t.csv", dtype=str, keep_default_na=False))
    columns = ["probability_high", "probability_low"] if kind is ACEClassifier else "prediction"
    np.testing.assert_allclose(found[columns].to_numpy(), outputs(model, frame), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="in the order of"):
        model.predict(frame[frame.columns[::-1]])
    with pytest.raises(ValueError, match="town"):
        model.predict(frame.drop(columns="town"))


@pytest.mark.parametrize("other", ["K-{}", "DE", "{},5", "{} %"], ids=["identifier", "constant", "comma", "percent"])
def test_text_beside_numbers_is_read_again_at_prediction(other: str) -> None:
    """No category is left, but the rows are no array of numbers either."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"other": [other.format(row) for row in rng.permutation(300)], "price": rng.normal(size=300)})
    label = frame["price"] > 0
    model = small(ACEClassifier).fit(frame, label)
    assert model.score(frame, label) > 0.95
    found = TableModel(model.ensemble_, model._encoding, 0.0, {}).predict(frame)
    np.testing.assert_array_equal(model.predict_proba(frame)[:, 1], found["probability_True"])
    np.testing.assert_array_equal(model.predict_proba(frame.to_numpy()), model.predict_proba(frame))
    with pytest.raises(ValueError, match=r"Expected 2 columns .* got shape \(300, 1\)"):
        model.predict(frame[["price"]].to_numpy())


def test_unseen_categories_and_missing_values_are_predicted() -> None:
    frame, label, _ = mixed_table()
    model = small(ACEClassifier).fit(frame, label)
    strange = frame[:5].assign(town="Lima", day=pd.NaT, price=np.nan, size=None)
    assert np.isfinite(model.predict_proba(strange)).all()
    np.testing.assert_array_equal(model.predict_proba(strange), model.predict_proba(strange.assign(town="Quito")))
    as_objects = model.predict_proba(frame.astype(object))
    np.testing.assert_array_equal(as_objects, model.predict_proba(frame))


def test_dates_become_parts() -> None:
    frame, label, _ = mixed_table()
    encoding = small(ACEClassifier, epochs=1).fit(frame, label)._encoding
    parts = [column.part for column in encoding.columns if isinstance(column, NumberColumn) and column.name == "day"]
    assert parts == ["elapsed", "year", "month", "weekday"]  # all at midnight: no hour
    raw = encoding.matrix(frame)
    places = [i for i, column in enumerate(encoding.columns) if column.name == "day"]
    day = frame["day"].dt
    expected = [(frame["day"] - pd.Timestamp(0)) / pd.Timedelta("1D"), day.year, day.month, day.day_of_week]
    np.testing.assert_array_equal(raw[:, places].numpy(), np.stack([np.asarray(e, float) for e in expected], 1))


def test_arrays_may_have_missing_values_but_no_infinities() -> None:
    X, y = load_iris(return_X_y=True)
    X[::7, 1] = np.nan
    model = small(ACEClassifier).fit(X, y)
    assert model.score(X, y) > 0.9
    assert "x1 missing" in model._encoding.feature_names
    X[3, 2] = np.inf
    for call in (lambda: model.predict(X), lambda: small(ACEClassifier).fit(X, y)):
        with pytest.raises(ValueError, match="infinity"):
            call()


def test_two_valued_columns_stay_zero_and_one_and_pixels_have_no_bins() -> None:
    rng = np.random.default_rng(0)
    X = np.stack([rng.choice([3.0, 7.0], 100), rng.normal(size=100), np.full(100, 5.0)], 1)
    y = (X[:, 1] > 0).astype(int)
    model = small(ACEClassifier, epochs=1).fit(X, y)
    features = model.ensemble_.trunk(torch.from_numpy(X))
    assert features.shape == (100, 1 + 1 + 8)  # one number, a ramp for the two-valued column, eight bins
    np.testing.assert_array_equal(features[:, 1].numpy(), (X[:, 0] == 7).astype(float))
    pixels, digits = load_digits(return_X_y=True)
    model = small(ACEClassifier, epochs=1, early_stopping=False).fit(pixels, digits)
    assert all(len(column.knots) in (0, 2) for column in model._encoding.columns)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
def test_onnx_has_encoding_folds_and_temperature(kind: type, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    frame, label, value = mixed_table()
    model = small(kind).fit(frame, label if kind is ACEClassifier else value)
    assert model.oof_score_ is not None
    model.save(tmp_path / "model")
    loaded = TableModel.load(tmp_path / "model")
    export_onnx(loaded, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(None, {"raw": loaded.encoding.matrix(frame).numpy()})[0]
    np.testing.assert_allclose(found, outputs(model, frame), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["Int64", "boolean"])
@pytest.mark.parametrize("columns", [["a"], ["a", "c"]])
def test_nullable_labels_keep_their_type(dtype: str, columns: list[str]) -> None:
    frame = pd.DataFrame({"a": np.arange(30.0), "c": ["x", "y"] * 15})
    y = pd.Series([0, 1] * 15).astype(dtype)
    model = ACEClassifier(num_members=1, epochs=1).fit(frame[columns], y)
    assert model.classes_.dtype == (np.int64 if dtype == "Int64" else np.bool_)
    assert model.predict(frame[columns]).dtype == model.classes_.dtype


@pytest.mark.parametrize(
    ("labels", "kind"), [([True, False], "b"), ([0, 1], "i"), ([0.0, 2.0], "f"), (["a", "b"], "O")]
)
def test_labels_that_are_objects(labels: list[Any], kind: str) -> None:
    """Such as the truth values of a column without its missing cells."""
    y = pd.Series([*labels * 15, None], dtype=object).dropna()
    model = ACEClassifier(num_members=1, epochs=1).fit(np.arange(30.0)[:, None], y)
    assert (model.classes_.tolist(), model.classes_.dtype.kind) == (sorted(labels), kind)


def test_truth_values_match_numbers_at_prediction() -> None:
    frame = pd.DataFrame({"a": np.arange(40.0), "c": [True, False] * 20})
    model = ACEClassifier(num_members=1, epochs=30, random_state=0).fit(frame, frame["c"])
    expected = model.predict_proba(frame)
    np.testing.assert_array_equal(model.predict_proba(frame.assign(c=frame["c"].astype(int))), expected)
    np.testing.assert_array_equal(model.predict_proba(frame.assign(c=frame["c"].astype(float))), expected)


def test_truth_values_may_be_missing_at_prediction() -> None:
    """pandas reads a column of truth values as objects if one is missing."""
    frame = pd.DataFrame({"flag": np.arange(60) % 2 == 0, "x": np.arange(60) / 7})
    fitted = ACEClassifier(num_members=2, epochs=2, random_state=0).fit(frame, np.arange(60) % 3)
    later = frame.assign(flag=frame["flag"].astype(object).where(frame["x"] > 1, None))
    expected = fitted.predict_proba(frame.assign(flag=frame["flag"].astype(float).where(frame["x"] > 1)))
    assert np.array_equal(fitted.predict_proba(later), expected)
    row, texts = frame.iloc[3].to_frame().T, frame.astype(str)  # objects of two types, and the cells of a CSV file
    np.testing.assert_array_equal(fitted.predict_proba(row), fitted.predict_proba(frame[3:4]))
    np.testing.assert_array_equal(fitted.predict_proba(texts), fitted.predict_proba(frame))


def test_decimals_may_be_missing() -> None:
    cells = pd.Series([Decimal("1.5"), None, Decimal("2.25")] * 10, dtype=pd.ArrowDtype(pa.decimal128(10, 2)))
    fitted = ACEClassifier(num_members=1, epochs=1, random_state=0).fit(cells.to_frame("price"), [0, 1, 0] * 10)
    plain = pd.DataFrame({"price": [1.5, np.nan, 2.25] * 10})
    np.testing.assert_array_equal(fitted.predict_proba(cells.to_frame("price")), fitted.predict_proba(plain))
