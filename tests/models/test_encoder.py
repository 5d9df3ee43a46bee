"""The encoder of tables: values, precision, files, and equal results in other runtimes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.saved_models import state
from torchace.models import TableEncoder, build, mlp
from torchace.nn import SMOC, Ensemble
from torchace.saving import ModelFileError, load_model, load_weights, save_model

NAN = float("nan")

VALUES: dict[str, Any] = {
    "fill": [1.7e9, 0.0, -2.0, 0.0],
    "center": [1.7e9, -2.0],
    "scale": [10.0, 0.5],
    "inverse_limit": [0.0, 0.0],
    "number_columns": [0, 2],
    "low": [-3.0, -2.0],
    "width": [1.0, 2.0],
    "ramp_columns": [2, 2],
    "indicator_columns": [2],
    "code_columns": [1, 1, 1, 3, 3],
    "codes": [0, 1, 2, 0, 1],
}
RAW = torch.tensor(
    [[1.7e9, 0.0, -2.0, 1.0], [1.7e9 + 1, 2.0, NAN, -1.0], [NAN, -1.0, -1.5, 0.0], [1e300, 7.0, -1e300, NAN]],
    dtype=torch.float64,
)
FEATURES = torch.tensor(
    [
        [0.0, 0.0, 1, 0, 0, 1, 0, 0, 0, 1],
        [0.1, 0.0, 1, 0, 1, 0, 0, 1, 0, 0],
        [0.0, 1.0, 1, 0.25, 0, 0, 0, 0, 1, 0],
        [1e4, -1e4, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    dtype=torch.float64,
)


def encoder(**changed: Any) -> TableEncoder:
    return TableEncoder.from_values(**{**VALUES, **changed})


def test_features():
    assert torch.equal(encoder().double()(RAW), FEATURES)
    assert encoder().num_features == FEATURES.shape[1]


@pytest.mark.parametrize("rows", [0, 100])
def test_any_number_of_rows(rows):
    assert encoder()(RAW[:1].repeat(rows, 1)).shape == (rows, 10)


def test_outliers_are_bounded_smoothly():
    """z / √(1 + (z/3)²): nearly z near 0, below 3 everywhere."""
    module = TableEncoder.from_values(
        fill=[0.0], number_columns=[0], center=[1.0], scale=[2.0], inverse_limit=[1 / 3]
    ).double()
    z = torch.tensor([0.0, 0.01, 1.0, 3.0, -40.0, 1e300], dtype=torch.float64)
    expected = torch.tensor([0.0, 0.01, 1 / (1 + 1 / 9) ** 0.5, 3 / 2**0.5, -3.0, 3.0], dtype=torch.float64)
    features = module((1 + 2 * z)[:, None]).squeeze(1)
    torch.testing.assert_close(features, expected, rtol=0, atol=0.01)
    torch.testing.assert_close(features[:4], expected[:4], rtol=0, atol=1e-7)


NO_NUMBERS: dict[str, list[Any]] = {"center": [], "scale": [], "inverse_limit": [], "number_columns": []}
NO_RAMPS: dict[str, list[Any]] = {"low": [], "width": [], "ramp_columns": []}
NO_CODES: dict[str, list[Any]] = {"code_columns": [], "codes": []}
NO_INDICATORS: dict[str, list[Any]] = {"indicator_columns": []}
PARTS: dict[str, dict[str, list[Any]]] = {
    "numbers": NO_RAMPS | NO_INDICATORS | NO_CODES,
    "ramps": NO_NUMBERS | NO_INDICATORS | NO_CODES,
    "indicators": NO_NUMBERS | NO_RAMPS | NO_CODES,
    "codes": NO_NUMBERS | NO_RAMPS | NO_INDICATORS,
}


@pytest.mark.parametrize(
    ("part", "columns"),
    [("numbers", slice(0, 2)), ("ramps", slice(2, 4)), ("indicators", slice(4, 5)), ("codes", slice(5, 10))],
)
def test_parts(part, columns):
    assert torch.equal(encoder(**PARTS[part]).double()(RAW), FEATURES[:, columns])


# -- precision ---------------------------------------------------------------------------------------------------------


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "at first": (lambda module: module, torch.float32),
    "double": (lambda module: module.double(), torch.float64),
    "float": (lambda module: module.float(), torch.float32),
    "half": (lambda module: module.half(), torch.float16),
    "bfloat16": (lambda module: module.to(torch.bfloat16), torch.bfloat16),
    "half and back": (lambda module: module.half().double(), torch.float64),
    "copied": (lambda module: copy.deepcopy(module.double()), torch.float64),
    "type": (lambda module: module.type(torch.float64), torch.float64),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_statistics_keep_their_precision(name):
    """Seconds of today's date: float32 has steps of 128 there."""
    convert, dtype = CONVERSIONS[name]
    converted = convert(encoder())
    assert converted.center.dtype == converted.scale.dtype == converted.codes.dtype == torch.float64
    assert converted.number_columns.dtype == torch.int64
    assert converted.center.tolist() == VALUES["center"]
    features = converted(RAW)
    assert features.dtype == dtype
    assert torch.equal(features, FEATURES.to(dtype))


def test_a_new_encoder_has_the_default_type():
    torch.set_default_dtype(torch.float64)
    try:
        made = encoder()
    finally:
        torch.set_default_dtype(torch.float32)
    assert made(RAW).dtype == torch.float64


def test_no_parameters_and_no_gradient():
    assert list(encoder().parameters()) == []
    assert not encoder()(RAW).requires_grad


def test_the_input_is_left_as_it_was():
    raw = RAW.clone()
    encoder()(raw)
    assert torch.equal(raw.view(torch.int64), RAW.view(torch.int64))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 5), (2, 4, 1), ()])
def test_shapes_are_checked(shape):
    with pytest.raises(ValueError, match=r"\(N, 4\)"):
        encoder()(torch.zeros(shape, dtype=torch.float64))


# -- construction ------------------------------------------------------------------------------------------------------


def test_description():
    made = encoder()
    assert made.architecture == {
        "name": "table_encoder",
        "num_columns": 4,
        "num_numbers": 2,
        "num_ramps": 2,
        "num_indicators": 1,
        "num_codes": 5,
    }
    again = build(made.architecture)
    assert isinstance(again, TableEncoder)
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape for name, tensor in made.state_dict().items()
    }
    assert again(RAW).shape == (4, 10)  # of statistics that are yet to come
    assert repr(made) == "TableEncoder(num_columns=4, num_numbers=2, num_ramps=2, num_indicators=1, num_codes=5)"


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="at least one feature"):
        TableEncoder(1)
    with pytest.raises(RuntimeError, match="center"):
        encoder(center=[1.0, 2.0, 3.0])


# -- in an ensemble ----------------------------------------------------------------------------------------------------


def ensemble(dtype: torch.dtype = torch.float64, **changed: Any) -> Ensemble:
    torch.manual_seed(0)
    trunk = encoder(**changed)
    members = [mlp(trunk.num_features, 8, 3), mlp(trunk.num_features, (4, 5), 3)]
    return Ensemble(members, trunk=trunk).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", [None, *PARTS])
def test_saved_with_an_ensemble(tmp_path, dtype, part):
    made = ensemble(dtype, **({} if part is None else PARTS[part]))
    save_model(tmp_path / "model", made, extra={"schema": {}})
    again = load_model(tmp_path / "model")
    assert again.manifest["kind"] == "ensemble"
    assert again.manifest["architecture"]["trunk"] == made.trunk.architecture
    assert state(again) == state(made)
    assert again.trunk.center.dtype == torch.float64
    assert torch.equal(again.predict_proba(RAW), made.predict_proba(RAW))
    assert again(RAW).dtype == dtype
    fresh = ensemble(dtype, **({} if part is None else PARTS[part]))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    load_weights(fresh, tmp_path / "model")
    assert torch.equal(fresh.predict_proba(RAW), made.predict_proba(RAW))


def test_as_the_trunk_of_smoc(tmp_path):
    made = SMOC(encoder(), 10, 3, num_members=4).double()
    save_model(tmp_path / "model", made)
    assert torch.equal(load_model(tmp_path / "model").predict_proba(RAW), made.predict_proba(RAW))


def test_training_does_not_change_the_encoder():
    made = ensemble()
    before = state(made.trunk)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        made(RAW).square().sum().backward()
        optimizer.step()
    assert state(made.trunk) == before


def test_batches_of_each_member():
    made = ensemble()
    own = made(torch.stack([RAW, RAW.flip(0)]), batches="separate")
    assert torch.equal(own[0], made(RAW)[0])
    assert torch.equal(own[1], made(RAW.flip(0))[1])


def test_an_encoder_that_was_modified_is_not_described(tmp_path):
    made = ensemble()
    made.trunk.relu = nn.ReLU()
    save_model(tmp_path / "model", made)
    with pytest.raises(ModelFileError, match="load_weights"):
        load_model(tmp_path / "model")


# -- compile and ONNX -------------------------------------------------------------------------------------------------


def test_compiled():
    compiled = torch.compile(encoder().double(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(RAW), FEATURES)


class Alone(nn.Module):
    """An ensemble with one input by name, where its own `forward` takes any."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(self, raw: Tensor) -> Tensor:
        return self.ensemble(raw)


def run_onnx(module: nn.Module, path: Path) -> Callable[[Tensor], np.ndarray]:
    """A module as onnxruntime computes it."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        module.eval(), (RAW,), dynamo=True, dynamic_shapes=({0: batch},), input_names=["raw"], verbose=False
    )
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda raw: session.run(None, {"raw": raw.numpy()})[0]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_onnx(tmp_path, dtype):
    module = encoder().to(dtype)
    run = run_onnx(module, tmp_path / "encoder.onnx")
    for rows in (1, 4, 40):
        raw = RAW.repeat(10, 1)[:rows]
        expected = module(raw)
        found = torch.from_numpy(run(raw))
        assert found.dtype == dtype
        assert torch.equal(found, expected)  # the same few operations in float64: the same bits


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
def test_onnx_of_an_ensemble(tmp_path):
    """One graph from the raw matrix to the members' logits."""
    module = ensemble(torch.float32)
    run = run_onnx(Alone(module), tmp_path / "ensemble.onnx")
    raw = RAW.repeat(5, 1)[:17]
    with torch.no_grad():
        expected = module(raw)
    # products of 10 numbers of up to 1e4 in float32: a few units in the last place
    assert np.allclose(run(raw), expected.numpy(), rtol=1e-5, atol=1e-3)
