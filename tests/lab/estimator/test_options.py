"""Own networks, callbacks, progress, importances and ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import torchace as ace
from torchace.lab.tables.model import TableModel
from torchace.sklearn import ACEClassifier, NCLRegressor


def _frame(rows: int = 120) -> tuple[pd.DataFrame, np.ndarray]:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": draw.normal(40, 10, rows),
            "town": draw.choice(["Ulm", "Köln"], rows),
            "noise": draw.normal(size=rows),
            "when": pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 500, rows), "D"),
        }
    )
    return frame, np.where(frame["age"] + 15 * (frame["town"] == "Ulm") > 47, "yes", "no")


TINY: dict[str, Any] = {"num_members": 2, "hidden": (8,), "epochs": 3, "random_state": 0}


def test_an_own_network_is_trained() -> None:
    frame, y = _frame()
    made = []

    def network(inputs: int, outputs: int) -> nn.Module:
        made.append((inputs, outputs))
        return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))

    classifier = ACEClassifier(**{**TINY, "epochs": 30}, network=network).fit(frame, y)
    assert len(set(made)) == 1
    assert made[0][1] == 2
    assert any(isinstance(module, nn.Tanh) for module in classifier.members_[0].modules())
    assert classifier.score(frame, y) > 0.7


@pytest.mark.parametrize("early_stopping", ["folds", True, False])
def test_an_own_network_may_have_batch_norm(early_stopping: Any) -> None:
    """Its statistics are those of the training: two batches in each of three epochs."""
    frame, y = _frame(250)

    def network(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))

    classifier = ACEClassifier(**TINY, network=network, early_stopping=early_stopping).fit(frame, y)
    counts = [buffer for name, buffer in classifier.ensemble_.named_buffers() if "num_batches" in name]
    assert counts
    assert all((count == 6).all() for count in counts)


def _gelu(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 4), nn.GELU(), nn.Linear(4, outputs))


def test_an_own_network_that_cannot_be_loaded_is_not_saved(tmp_path: Any) -> None:
    frame, y = _frame()
    with pytest.raises(ValueError, match="own `network` cannot be saved"):
        ACEClassifier(**TINY, network=_gelu).fit(frame, y).save(tmp_path / "m")
    assert not list(tmp_path.iterdir())
    mlp = ACEClassifier(**TINY, network=lambda i, o: ace.mlp(i, 4, o)).fit(frame, y)
    mlp.save(tmp_path / "m")
    np.testing.assert_array_equal(ACEClassifier.load(tmp_path / "m").predict_proba(frame), mlp.predict_proba(frame))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
def test_layers_that_onnxruntime_lacks_are_named(tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    own = ACEClassifier(**TINY, network=_gelu).fit(*_frame())
    with pytest.raises(ValueError, match=r"onnxruntime cannot run .* SiLU instead of GELU"):
        own.export_onnx(tmp_path / "m.onnx")


def test_callbacks_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    frame, y = _frame(250)
    entries: list[dict[str, Any]] = []
    classifier = ACEClassifier(**{**TINY, "epochs": 5}, callbacks=[entries.append], verbose=2).fit(frame, y)
    assert entries == classifier.history_
    assert entries[0]["validation"] is not None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split(" 0.")[0] for line in lines] == [
        "Epoch 2",
        "Epoch 4",
        "Epoch 5",
        "At λ=0 the cross entropy is",
    ]
    assert f"{entries[1]['train']:.5g}" in lines[0]
    frame = frame.assign(town="Ulm", noise=[f"{row} %" if row else "few" for row in range(len(frame))])
    ACEClassifier(**TINY, verbose=3).fit(frame, y)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "Column 'town' is left out: it is 'Ulm' in every row.",
        "Column 'noise' holds numbers; 1 of 250 values, such as 'few', are not and count as missing.",
    ]
    ACEClassifier(**TINY).fit(frame, y)
    assert capsys.readouterr().out == ""


def _loss(fitted: Any, frame: pd.DataFrame, y: Any) -> float:
    if isinstance(fitted, NCLRegressor):
        return float(np.mean((fitted.predict(frame) - y) ** 2))
    return -float(np.mean(fitted.predict_log_proba(frame)[np.arange(len(y)), (y == "yes").astype(int)]))


@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
def test_importances_name_the_columns_that_matter(kind: type) -> None:
    frame, y = _frame(200)
    target = y if kind is ACEClassifier else frame["age"] + 15 * (frame["town"] == "Ulm")
    fitted = kind(**{**TINY, "epochs": 60}).fit(frame, target)
    found = fitted.feature_importances(frame, target, random_state=0)
    assert set(found) == {"age", "town", "noise", "when"}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(list(found)[:2]) == {"age", "town"}
    random, before = np.random.RandomState(0), _loss(fitted, frame, target)
    for name in ("age", "town", "noise", "when"):
        orders = [random.permutation(200) for _ in range(5)]
        altered = [frame.assign(**{name: frame[name].to_numpy()[order]}) for order in orders]
        increase = np.mean([_loss(fitted, table, target) for table in altered]) - before
        assert found[name] == pytest.approx(increase, rel=1e-6, abs=1e-9)  # members compute in float64
    assert fitted.feature_importances(frame.assign(town="Ulm"), target, random_state=0)["town"] == 0
    one_class = frame[y == "yes"]  # rows of a test may lack a class
    assert fitted.feature_importances(one_class, target[y == "yes"], random_state=0).keys() == found.keys()
    with pytest.raises(ValueError, match="`n_repeats` to be at least 1, but got 0"):
        fitted.feature_importances(frame, target, n_repeats=0)
    X = np.random.default_rng(0).normal(size=(30, 2))
    assert set(kind(**TINY).fit(X, target[:30]).feature_importances(X, target[:30])) == {"x0", "x1"}


@pytest.mark.extended
@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
@pytest.mark.parametrize(
    ("several", "options"),
    [(False, {}), (True, {}), (False, {"diversity": 0.3}), (False, {"members": "shared_mini", "hidden": (8, 8)})],
)
def test_onnx_and_the_command_line_give_the_same_predictions(
    kind: type, several: bool, options: dict[str, Any], tmp_path: Any
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    frame, y = _frame(250)
    frame.loc[::9, "age"] = np.nan
    target: Any = y if kind is ACEClassifier else frame["noise"].to_numpy()
    if several:
        if kind is ACEClassifier:
            return
        target = np.stack([target, 100 * target], 1)
    fitted = kind(**TINY | options).fit(frame, target)  # with folds or a hold-out, and a temperature
    assert fitted.export_onnx(tmp_path / "m.onnx") < 1e-6
    raw = fitted._encoding.matrix(frame).numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    name = "probabilities" if kind is ACEClassifier else "prediction"
    found = session.run([name], {"raw": raw})[0]
    expected = fitted.predict_proba(frame) if kind is ACEClassifier else fitted.predict(frame)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5
    fitted.save(tmp_path / "m")
    logits = TableModel.load(tmp_path / "m").logits(frame)  # as the command line computes them
    assert torch.equal(logits, fitted.ensemble_(torch.from_numpy(raw)))
