"""A model of a table as one ONNX graph: from raw encoded rows to the ensemble's answer and its uncertainty."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchace._files import remove_abandoned, write_atomic
from torchace.functional import disagreement, ensemble_log_probs, mutual_information, predictive_entropy
from torchace.lab.tables.model import TableModel

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
WITHIN = 1e-6  # what the graph's answers may differ by from torch's, for numbers of about 1
ROWS = (1, 2, 7, 64)  # batches that are compared


class ExportError(ValueError):
    """A graph that could not be made, or does not answer as the model does."""


class _Graph(nn.Module):
    """What the graph computes."""

    def __init__(self, model: TableModel) -> None:
        super().__init__()
        self.ensemble = model.ensemble
        self.is_classifier = model.is_classifier

    def forward(self, raw: Tensor) -> tuple[Tensor, ...]:
        logits = self.ensemble(raw)  # (K, N, C)
        if not self.is_classifier:
            return logits.mean(0).squeeze(1), logits.std(0, correction=0).squeeze(1)
        return (
            ensemble_log_probs(logits).exp(),
            predictive_entropy(logits, reduction="none"),
            mutual_information(logits, reduction="none"),
            disagreement(logits, reduction="none"),
        )

    @property
    def outputs(self) -> list[str]:
        if not self.is_classifier:
            return ["prediction", "spread"]
        return ["probabilities", "entropy", "mutual_information", "disagreement"]


def export_onnx(model: TableModel, path: Path, *, seed: int = 0) -> float:
    """Writes the graph, after onnxruntime has given the same answers as torch.

    The input `raw` is the matrix of `Encoding.matrix`, `(N, F)` of float64: numbers as they are, NaN where missing, and
    categories as their codes; the graph's metadata hold the columns, the codes and the classes as JSON.

    Args:
        model: The model.
        path: The file, written whole or not at all.
        seed: Of the rows that are compared.

    Returns:
        The largest difference that was seen.

    Raises:
        ExportError: The graph cannot be made, or answers differently.
    """
    onnx, _, runtime = (_package(name) for name in PACKAGES)
    graph = _Graph(model).eval()
    rows = _rows(model, max(ROWS), seed)
    with _quiet():
        try:
            program = torch.onnx.export(
                graph,
                (rows[:7],),
                input_names=["raw"],
                output_names=graph.outputs,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
            )
        except Exception as error:  # the exporter raises whatever its stages do
            raise ExportError(f"The model cannot be exported: {str(error).splitlines()[0].rstrip('.')}.") from error
        assert program is not None
        proto = program.model_proto
    for key, value in _metadata(model).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value, ensure_ascii=False)
    data = proto.SerializeToString()
    onnx.checker.check_model(data)
    worst = _compare(runtime, data, graph, rows)
    remove_abandoned(path)
    write_atomic(path, data)
    return worst


def _compare(runtime: ModuleType, data: bytes, graph: _Graph, rows: Tensor) -> float:
    """The largest difference between the graph's answers and torch's, over batches of several sizes."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for count in ROWS:
        answers = session.run(None, {"raw": rows[:count].numpy()})
        with torch.no_grad():
            expected = graph(rows[:count])
        for name, ours, theirs in zip(graph.outputs, answers, expected, strict=True):
            exact = theirs.numpy()
            if ours.shape != exact.shape:
                raise ExportError(f"The exported graph gives {name} of shape {ours.shape}, but torch {exact.shape}.")
            scale = 1.0 if graph.is_classifier else max(1.0, float(np.abs(exact).max()))
            gap = float(np.abs(ours - exact).max()) / scale
            if not math.isfinite(gap) or gap > WITHIN:
                raise ExportError(
                    f"The exported graph's {name} differs from torch's by {gap:.2g}; nothing was written."
                )
            worst = max(worst, gap)
    return worst


def _rows(model: TableModel, count: int, seed: int) -> Tensor:
    """Rows such as the model may meet: numbers around those of training, gaps, and every kind of code."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    for column in model.encoding.columns:
        codes = getattr(column, "codes", None)
        if codes is None:
            values = torch.randn(count, generator=generator, dtype=torch.float64)
            values = column.mean + values * (column.std or 1.0)  # type: ignore[union-attr]
            gaps = torch.rand(count, generator=generator) < 0.1
            columns.append(torch.where(gaps, torch.nan, values))
        else:
            columns.append(torch.randint(-1, max(len(codes), 1), (count,), generator=generator).double())
    return torch.stack(columns, 1)


def _metadata(model: TableModel) -> dict[str, Any]:
    schema = model.encoding.schema
    columns = [{"name": column.name, "codes": getattr(column, "codes", None)} for column in model.encoding.columns]
    return {
        "torchace.columns": columns,
        "torchace.target": schema.target.name,
        "torchace.classes": schema.target.class_names,
        "torchace.diversity": model.diversity,
    }


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"An export needs {name}, which is not installed: pip install 'torchace[onnx]'.") from None


@contextlib.contextmanager
def _quiet() -> Any:
    """The exporter talks much, to nobody's profit."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
