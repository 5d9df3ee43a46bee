"""Export a `TableModel` as one ONNX graph."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from torchace._extras import import_extra
from torchace._files import error_reason, write_atomic
from torchace.lab.data.encoding import CategoryColumn
from torchace.lab.tables.model import TableModel

TOLERANCE = 1e-6  # between onnxruntime's and torch's outputs, relative to max(1, largest)
BATCH_SIZES = (1, 2, 7, 64)  # of the comparison


class ExportError(ValueError):
    """The model cannot be exported, or the outputs differ."""


class _Graph(nn.Module):
    def __init__(self, model: TableModel) -> None:
        super().__init__()
        self.ensemble, self.outputs, self.is_classifier = model.ensemble, model.outputs, model.is_classifier

    def forward(self, raw: Tensor) -> tuple[Tensor, ...]:
        logits = self.ensemble(raw)  # (K, N, C)
        return tuple(output(logits) for output in self.outputs.values())


def export_onnx(model: TableModel, path: Path) -> float:
    """Compare onnxruntime's outputs with torch's, write the graph, return the largest difference.

    The input `raw` is `Encoding.matrix`, `(N, F)` in float64. The metadata hold columns, codes and classes as JSON.
    """
    names = ("onnx", "onnxscript", "onnxruntime")
    onnx, _, runtime = (import_extra(name, "The ONNX export needs", "onnx") for name in names)
    graph = _Graph(model).eval()
    rows = _random_rows(model, max(BATCH_SIZES))
    with _silence_exporter():
        try:
            program = torch.onnx.export(
                graph,
                (rows[:7],),
                input_names=["raw"],
                output_names=list(graph.outputs),
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
            )
        except Exception as error:  # the exporter's stages raise errors of many types
            raise ExportError(f"The model cannot be exported: {str(error).splitlines()[0].rstrip('.')}.") from error
        assert program is not None
        proto = program.model_proto
    target = model.encoding.schema.target
    columns = [
        {"name": column.name, "part": getattr(column, "part", None), "codes": getattr(column, "codes", None)}
        for column in model.encoding.columns
    ]
    metadata = {"columns": columns, "targets": list(target.names), "classes": target.class_names}
    for key, value in {**metadata, "diversity": model.diversity}.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = f"torchace.{key}", json.dumps(value, ensure_ascii=False)
    data = proto.SerializeToString()
    onnx.checker.check_model(data)
    difference = _compare(runtime, data, graph, rows)
    write_atomic(path, data)
    return difference


def _compare(runtime: ModuleType, data: bytes, graph: _Graph, rows: Tensor) -> float:
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base
        raise ExportError(
            f"onnxruntime cannot run the exported graph ({error_reason(error)}). Use layers that it computes in "
            "float64, such as SiLU instead of GELU."
        ) from error
    largest = 0.0
    for count in BATCH_SIZES:
        outputs = session.run(None, {"raw": rows[:count].numpy()})
        with torch.no_grad():
            expected = [value.numpy() for value in graph(rows[:count])]
        for name, ours, theirs in zip(graph.outputs, outputs, expected, strict=True):
            scale = 1.0 if graph.is_classifier else max(1.0, float(np.abs(theirs).max()))
            difference = float(np.abs(ours - theirs).max()) / scale
            if not difference <= TOLERANCE:  # or NaN
                raise ExportError(
                    f"The exported graph's {name} differs from torch's by {difference:.2g}; nothing was written."
                )
            largest = max(largest, difference)
    return largest


def _random_rows(model: TableModel, count: int) -> Tensor:
    """Return rows like those of training, with missing values and unknown codes."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for column in model.encoding.columns:
        if isinstance(column, CategoryColumn):
            columns.append(torch.randint(-1, max(len(column.codes), 1), (count,), generator=generator).double())
        else:
            values = torch.randn(count, generator=generator, dtype=torch.float64)
            values = column.fill + values * (column.scale or 1.0)
            missing = torch.rand(count, generator=generator) < 0.1
            columns.append(torch.where(missing, torch.nan, values))
    return torch.stack(columns, 1)


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
