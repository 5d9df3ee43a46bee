"""The exported graph: the same outputs as torch and the command line, for any rows."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from tests.lab.cli.command_line import houses, pets, write_table
from tests.lab.tables.small_fits import fitted
from torchace.lab.tables import export as exporting
from torchace.lab.tables.export import ExportError, export_onnx
from torchace.lab.tables.model import TableModel, predict_file
from torchace.saving import load_model

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.extended

WITHIN = 1e-6  # what the issue of answers from several places allows


class Case(NamedTuple):
    """A table, what is predicted, and rows that it meets later."""

    frame: pd.DataFrame
    target: str
    options: dict[str, Any]
    later: pd.DataFrame


def wild(frame: pd.DataFrame, number: str, text: str | None) -> pd.DataFrame:
    """Rows unlike those of training: missing values, unknown categories, extreme numbers."""
    frame = frame.astype({number: float}).copy()
    frame.loc[0::5, number] = np.nan
    frame.loc[1::5, number] = 1e300
    frame.loc[2::5, number] = -1e12
    if text is not None:
        frame.loc[1::3, text] = "never seen"
        frame.loc[2::3, text] = None
    return frame


CASES: dict[str, Callable[[], Case]] = {
    "classes with everything": lambda: Case(pets(), "pet", {"epochs": 30}, wild(pets(40, seed=2), "age", "fur")),
    "two classes from categories": lambda: Case(
        pets(pet=np.arange(60) % 2 == 0)[["fur", "chipped", "pet"]],
        "pet",
        {"num_members": 3, "hidden": (5, 4)},
        pets(30, seed=2),
    ),
    "numbers for classes, one member": lambda: Case(
        pets(pet=np.arange(60) % 4)[["age", "born", "pet"]],
        "pet",
        {"num_members": 1, "hidden": (), "epochs": 10, "precision": "float32"},
        wild(pets(30, seed=2), "born", None),
    ),
    "a regression": lambda: Case(houses(), "price", {"epochs": 30}, wild(houses(40, seed=2), "area", "town")),
}


class Exported(NamedTuple):
    case: Case
    model: TableModel
    path: Path
    worst: float


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    case = CASES[request.param]()
    model = fitted(case.frame, case.target, ".parquet", **case.options)
    path = tmp_path_factory.mktemp("onnx") / "new" / "model.onnx"
    return Exported(case, model, path, export_onnx(model, path))


def answers(path: Path, raw: np.ndarray) -> dict[str, np.ndarray]:
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"raw": raw}), strict=True))


def test_all_ways_to_predict_agree(exported: Exported, tmp_path: Path) -> None:
    """Python, the saved ensemble, CSV and Parquet files, ONNX."""
    case, model = exported.case, exported.model
    raw = model.encoding.matrix(case.later)
    found = answers(exported.path, raw.numpy())
    expected = model.predict(case.later)
    model.save(tmp_path / "model")
    data = write_table(case.later, tmp_path / "data.parquet")
    for suffix, read in ((".csv", pd.read_csv), (".parquet", pd.read_parquet)):
        predict_file(TableModel.load(tmp_path / "model"), data, tmp_path / f"out{suffix}", rows=7)
        written = read(tmp_path / f"out{suffix}")
        numbers = expected.columns[1:] if model.is_classifier else expected.columns
        if model.is_classifier:
            assert written["prediction"].tolist() == expected["prediction"].tolist()
        np.testing.assert_allclose(written[numbers], expected[numbers], rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        ensemble = load_model(tmp_path / "model")
        direct = (
            ensemble.predict_proba(raw).numpy() if model.is_classifier else ensemble(raw).mean(0).squeeze(1).numpy()
        )
    if not model.is_classifier:
        assert list(found) == ["prediction", "spread"]
        np.testing.assert_allclose(direct, expected["prediction"], rtol=1e-12)
        for name, values in found.items():
            np.testing.assert_allclose(values, expected[name], rtol=WITHIN)
        return
    assert list(found) == ["probabilities", "entropy", "mutual_information", "disagreement"]
    probs = expected[[name for name in expected if name.startswith("probability_")]].to_numpy()
    np.testing.assert_allclose(direct, probs, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found["probabilities"], probs, rtol=0, atol=WITHIN)
    for name in list(found)[1:]:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=WITHIN)
    classes = model.encoding.schema.target.classes
    sure = np.sort(probs, 1)[:, -1] - np.sort(probs, 1)[:, -2] > 2 * WITHIN
    told = [classes[code] for code in found["probabilities"].argmax(1)]
    assert [a for a, b in zip(told, sure, strict=True) if b] == expected["prediction"][sure].tolist()


@pytest.mark.parametrize("rows", [1, 2, 33, 1000])
def test_batches_of_any_size(exported: Exported, rows: int) -> None:
    raw = exported.model.encoding.matrix(exported.case.later.sample(rows, replace=True, random_state=0))
    with torch.no_grad():
        logits = exported.model.ensemble(raw)
    found = next(iter(answers(exported.path, raw.numpy()).values()))
    exact = logits.softmax(2).mean(0) if exported.model.is_classifier else logits.mean(0).squeeze(1)
    np.testing.assert_allclose(found, exact, rtol=0 if exported.model.is_classifier else WITHIN, atol=WITHIN)


def test_the_graph_describes_its_columns(exported: Exported) -> None:
    graph = onnx.load(str(exported.path))
    (entry,) = graph.graph.input
    assert entry.name == "raw"
    assert entry.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
    told = {prop.key: prop.value for prop in graph.metadata_props}
    schema = exported.model.encoding.schema
    columns = json.loads(told["torchace.columns"])
    assert [column["name"] for column in columns] == [column.name for column in schema.columns]
    assert json.loads(told["torchace.targets"]) == list(schema.target.names)
    assert json.loads(told["torchace.classes"]) == schema.target.class_names
    assert json.loads(told["torchace.diversity"]) == 0.5
    # rows that are coded by the metadata alone, without torchace, are the raw matrix
    later = exported.case.later
    raw = np.full((len(later), len(columns)), -1.0)
    for place, column in enumerate(columns):
        if column["codes"] is None:
            raw[:, place] = later[column["name"]].astype(float)
            continue
        for row, cell in enumerate(later[column["name"]]):
            text = "(missing)" if cell is None or cell != cell else str(cell)
            raw[row, place] = column["codes"].index(text) if text in column["codes"] else -1
    np.testing.assert_array_equal(raw, exported.model.encoding.matrix(later).numpy())


def test_reported_difference_is_measured(exported: Exported) -> None:
    assert 0 <= exported.worst <= WITHIN
    assert os.listdir(exported.path.parent) == ["model.onnx"]  # one file, without weights beside it


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> TableModel:
    return fitted(pets(), "pet")


def test_a_graph_with_different_outputs_is_not_written(
    small: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter is given an ensemble whose last bias is another one."""
    real = torch.onnx.export

    def export_changed_model(graph: Any, *args: Any, **options: Any) -> Any:
        other = copy.deepcopy(graph)
        other.ensemble[0].get_submodule("fc").bias.data[0] += 1e-3
        return real(other, *args, **options)

    monkeypatch.setattr(torch.onnx, "export", export_changed_model)
    with pytest.raises(ExportError, match=r"probabilities differs from torch's by .*; nothing was written\.$"):
        export_onnx(small, tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


def test_an_exporter_that_fails_is_one_sentence(
    small: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("Failed to decompose.\n  File ...\n")

    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(ExportError, match=r"^The model cannot be exported: Failed to decompose\.$"):
        export_onnx(small, tmp_path / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(
    package: str, small: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^The ONNX export needs {package}: pip install 'torchac"):
        export_onnx(small, tmp_path / "model.onnx")


def test_rows_that_are_compared_are_of_every_kind(small: TableModel) -> None:
    rows = exporting._random_rows(small, 64)
    assert rows.dtype == torch.float64
    for place, column in enumerate(small.encoding.columns):
        values = rows[:, place]
        if hasattr(column, "codes"):
            assert set(values.tolist()) == {-1.0, *map(float, range(len(column.codes)))}
        else:
            assert values.isnan().any()
            scale = column.scale or 1.0
            assert abs(values.nanmean() - column.fill) < scale  # of 64 draws: eight standard errors
