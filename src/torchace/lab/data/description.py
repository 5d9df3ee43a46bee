"""Summary of a table's columns for reports."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace.lab.data.columns import date_part, feature_numbers
from torchace.lab.data.encoding import mean_and_std
from torchace.lab.data.parsing import texts
from torchace.lab.data.table_schema import Schema
from torchace.lab.schema.results import LARGEST, TableSummary

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

MAX_CATEGORIES = 8  # most frequent first


def describe_table(schema: Schema, frame: DataFrame) -> dict[str, Any]:
    """Summarise the target, the columns and the notes of a training table: a `TableSummary` as JSON values.

    Example:
        >>> import pandas as pd
        >>> from torchace.lab.data.table_schema import infer_schema
        >>> frame = pd.DataFrame({"age": [3, 4] * 6, "fur": ["long", ""] * 3 + ["no"] * 6, "pet": ["cat", "dog"] * 6})
        >>> columns = describe_table(infer_schema(frame, "pet"), frame)["columns"]
        >>> columns[0]["mean"], columns[1]["missing"], columns[1]["categories"]
        (3.5, 3, [['no', 6], ['long', 3]])
    """
    kinds = {column.name: column.kind for column in schema.columns}
    features = [str(name) for name in frame.columns if str(name) != schema.target.name]
    columns = [{"name": name, **_describe_column(frame[name], kinds.get(name))} for name in features]
    target = {"name": schema.target.name, "task": schema.target.task, "classes": schema.target.class_names}
    summary = TableSummary.model_validate({"target": target, "columns": columns, "notes": schema.notes})
    return summary.model_dump(mode="json", exclude_unset=True)


def _describe_column(column: Series, kind: str | None) -> dict[str, Any]:
    if kind is None:
        return {"kind": "dropped", "missing": int(column.isna().sum()), "why": "not used"}
    if kind == "number":
        values = feature_numbers(column)
        present = values[~np.isnan(values)]
        mean, std = mean_and_std(present)
        measures = {"mean": mean, "std": std, "min": present.min(initial=np.inf), "max": present.max(initial=-np.inf)}
        statistics = {name: float(m) if len(present) and abs(m) < LARGEST else None for name, m in measures.items()}
        return {"kind": kind, "missing": len(values) - len(present), **statistics}
    if kind == "date":
        return {"kind": kind, "missing": int(np.isnan(date_part(column, "elapsed")).sum())}
    cells = [cell for cell in texts(column).to_pylist() if cell is not None]
    counts = sorted(Counter(cells).items(), key=lambda item: (-item[1], item[0]))
    return {
        "kind": kind,
        "missing": len(column) - len(cells),
        "num_categories": len(counts),
        "categories": [list(item) for item in counts[:MAX_CATEGORIES]],
    }
