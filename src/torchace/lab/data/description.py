"""The columns of a table for people: what kind they are, how much is missing, what is in them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace.lab.data.columns import feature_numbers
from torchace.lab.data.encoding import mean_and_std
from torchace.lab.data.parsing import texts
from torchace.lab.data.table_schema import Schema

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

SHOWN = 8  # categories, the most frequent ones
LARGEST = 1e150  # a number whose square is one too, as a report wants it


def describe_table(schema: Schema, frame: DataFrame) -> dict[str, Any]:
    """The target, every column of a table and the notes of its schema, as JSON can hold them.

    Args:
        schema: What the columns are.
        frame: The rows that are described: the training part.

    Example:
        >>> import pandas as pd
        >>> from torchace.lab.data.table_schema import infer_schema
        >>> frame = pd.DataFrame({"age": [3, 4] * 6, "fur": ["long", ""] * 3 + ["no"] * 6, "pet": ["cat", "dog"] * 6})
        >>> columns = describe_table(infer_schema(frame, "pet"), frame)["columns"]
        >>> columns[0]["mean"], columns[1]["missing"], columns[1]["categories"]
        (3.5, 3, [['no', 6], ['long', 3]])
    """
    kinds = {column.name: column.kind for column in schema.columns}
    target = {"name": schema.target.name, "task": schema.target.task, "classes": schema.target.class_names}
    columns = [_column(frame[name], str(name), kinds.get(str(name))) for name in frame.columns]
    return {
        "target": target,
        "columns": [column for column in columns if column["name"] != schema.target.name],
        "notes": list(schema.notes),
    }


def _column(column: Series, name: str, kind: str | None) -> dict[str, Any]:
    if kind is None:
        return {"name": name, "kind": "dropped", "missing": int(column.isna().sum()), "why": "not used"}
    if kind == "number":
        values = feature_numbers(column)
        there = values[~np.isnan(values)]
        mean, std = mean_and_std(there)
        measures = {"mean": mean, "std": std, "min": there.min(initial=np.inf), "max": there.max(initial=-np.inf)}
        found = {what: float(m) if len(there) and abs(m) < LARGEST else None for what, m in measures.items()}
        return {"name": name, "kind": kind, "missing": len(values) - len(there), **found}
    cells = [cell for cell in texts(column).to_pylist() if cell is not None]
    counts = sorted(Counter(cells).items(), key=lambda item: (-item[1], item[0]))
    return {
        "name": name,
        "kind": kind,
        "missing": len(column) - len(cells),
        "num_categories": len(counts),
        "categories": [list(item) for item in counts[:SHOWN]],
    }
