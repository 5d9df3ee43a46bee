"""Summary of a table's columns for reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchace.lab.data.encoding import mean_and_std
from torchace.lab.data.parsing import CellError, texts
from torchace.lab.data.table_schema import Column, Schema, feature_numbers
from torchace.lab.schema.results import TableSummary
from torchace.lab.schema.values import LARGEST

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

MAX_CATEGORIES = 8  # most frequent first


def describe_table(schema: Schema, frame: DataFrame) -> dict[str, Any]:
    """Summarize the target, the columns and the notes of a training table: a `TableSummary` as JSON values."""
    used, dropped = {column.name: column for column in schema.columns}, dict(schema.dropped)
    columns: list[dict[str, Any]] = []
    for name in map(str, frame.columns):
        if name in used:
            columns.append({"name": name, **_describe_column(frame[name], used[name])})
        elif name in dropped:
            columns.append({"name": name, "kind": "dropped", "missing": _missing(frame[name]), "why": dropped[name]})
    target: dict[str, Any] = {"name": schema.target.name, "task": schema.target.task}
    target |= {"num_columns": len(schema.target.names), "classes": schema.target.class_names}
    summary = TableSummary.model_validate({"target": target, "columns": columns, "notes": schema.notes})
    return summary.model_dump(mode="json", exclude_unset=True)


def _describe_column(cells: Series, column: Column) -> dict[str, Any]:
    if column.kind != "category":
        values = feature_numbers(cells, column)
        present = values[~np.isnan(values)]
        mean, std = mean_and_std(present)
        measures = {"mean": mean, "std": std, "min": present.min(initial=np.inf), "max": present.max(initial=-np.inf)}
        statistics = {name: float(m) if len(present) and abs(m) < LARGEST else None for name, m in measures.items()}
        return {"kind": column.kind, "format": column.format, "missing": len(values) - len(present), **statistics}
    present = texts(cells).drop_null()
    counts = {entry["values"]: entry["counts"] for entry in present.value_counts().to_pylist()}
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {
        "kind": column.kind,
        "missing": len(cells) - len(present),
        "num_categories": len(ordered),
        "categories": [list(item) for item in ordered[:MAX_CATEGORIES]],
    }


def _missing(cells: Series) -> int:
    try:
        return int(texts(cells).null_count)
    except CellError:  # such as lists
        return int(cells.isna().sum())
