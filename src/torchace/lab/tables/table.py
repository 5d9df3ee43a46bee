"""Read, split, encode and describe a table for training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from torchace.lab.data import DataError, Split
from torchace.lab.data.encoding import Encoding, learn_encoding, mean_and_std
from torchace.lab.data.errors import quote_all
from torchace.lab.data.inference import infer_schema, skip_missing_targets
from torchace.lab.data.parsing import CellError, texts
from torchace.lab.data.splits import train_val_test_split
from torchace.lab.data.table_schema import Column, Schema, Target, feature_numbers, get_column
from torchace.lab.data.tables import read_table
from torchace.lab.schema.results import TableSummary
from torchace.lab.schema.values import LARGEST
from torchace.lab.training.members import MemberPlan
from torchace.lab.training.scaling import Scaler
from torchace.lab.tuning.grid_search import GridSearch
from torchace.lab.tuning.search import SearchProblem

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

MAX_CATEGORIES = 8  # most frequent first
MIN_STD, MAX_STD = 1e-45, 1e45  # of the target: beyond, squares over- or underflow


@dataclass(frozen=True)
class TableSettings:
    """The user's settings of a table."""

    target: tuple[str, ...]
    task: str | None = None  # "classification" or "regression"
    drop: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)  # column: "number", "category" or "drop"
    split_column: str | None = None  # has train, validation or test for each row
    validation: float = 0.2
    test: float = 0.2
    seed: int = 0
    class_weight: Mapping[str, float] | str | None = None  # weight of each class, or "balanced"
    skip_missing_target: bool = False
    encoding: str = "auto"  # of the numbers; see `learn_number`


@dataclass(frozen=True)
class Table:
    """A table in three parts; the encoding is learned from the training part."""

    name: str  # of the file
    sha256: str
    settings: TableSettings
    encoding: Encoding
    train: Split  # features (N, D) in float64, with class indices (N,) or scaled targets (N, M)
    validation: Split
    test: Split
    rows: Mapping[str, Tensor]  # rows of the parts in the file, from 0, by name
    raw: Mapping[str, Tensor]  # raw matrices (N, F) of the parts, by name
    description: TableSummary  # of the training part, for the report

    @property
    def schema(self) -> Schema:
        """Columns and target."""
        return self.encoding.schema

    @property
    def task(self) -> str:
        """Classification or regression."""
        return self.schema.target.task

    @property
    def num_outputs(self) -> int:
        """Number of classes, or of targets."""
        return self.schema.target.num_outputs

    @property
    def target_scaler(self) -> Scaler | None:
        """Scaler of a regression's targets."""
        return _target_scaler(self.encoding)

    @property
    def target_variance(self) -> float:
        """Variance that the scaled target was divided by; 1 for classes, and for several targets, which stay scaled."""
        scaler = self.target_scaler
        return 1.0 if scaler is None or len(scaler.std) > 1 else float(scaler.std) ** 2

    def parts(self, plan: MemberPlan, device: str) -> tuple[Split, Split, Split]:
        """Return the three parts on a device, in the plan's precision."""
        dtype = plan.train_config(1).dtype

        def convert(split: Split) -> Split:
            y = split.y.to(dtype) if split.y.is_floating_point() else split.y
            return Split(split.x.to(dtype), y, None if split.weight is None else split.weight.to(dtype)).to(device)

        return convert(self.train), convert(self.validation), convert(self.test)

    def search_problem(self, plan: MemberPlan, device: str, seed: int) -> SearchProblem:
        """Return the training and validation parts as a problem for a search."""
        train, validation, _ = self.parts(plan, device)
        return SearchProblem(plan, train, validation, self.num_outputs, seed)

    def grid_search(self, plan: MemberPlan, device: str, seed: int, **options: Any) -> GridSearch:
        """Return a search for λ, which measures its gain on the test part if there is one."""
        test = self.parts(plan, device)[2] if len(self.test) else None
        problem = self.search_problem(plan, device, seed)
        return GridSearch(problem, test=test, score_scale=self.target_variance, **options)


def _target_scaler(encoding: Encoding) -> Scaler | None:
    scales = torch.tensor([[scale.mean, scale.std] for scale in encoding.target_scales], dtype=torch.float64)
    return Scaler(scales[:, 0], scales[:, 1]) if len(scales) else None


def load_table(path: Path, settings: TableSettings) -> Table:
    """Read, split and encode a table."""
    path = path.expanduser()
    frame = read_table(path)
    if settings.skip_missing_target:
        task = settings.task if len(settings.target) == 1 else "regression"
        frame = skip_missing_targets(frame, settings.target, task)
    file_rows = torch.tensor(frame.index)
    drop, column = list(settings.drop), None
    if settings.split_column is not None:
        if settings.split_column in settings.target:
            raise DataError(f"The column {settings.split_column!r} cannot be both the target and the split column.")
        column = get_column(frame, settings.split_column, "the split column")
        drop = list(dict.fromkeys([*drop, settings.split_column]))
    schema = infer_schema(frame, settings.target, settings.task, drop, kinds=dict(settings.kinds))
    notes = list(schema.notes)
    if len(schema.target.names) > 1:
        notes.append(
            "Scores over all targets are means; errors are those of targets scaled to a standard deviation of 1."
        )
    schema = replace(schema, notes=tuple(notes))
    targets = schema.targets(frame)
    fractions = (1 - settings.validation - settings.test, settings.validation, settings.test)
    rows = train_val_test_split(
        targets, seed=settings.seed, fractions=fractions, column=column, classes=schema.target.classes
    )._asdict()
    train_frame = frame.iloc[rows["train"].numpy()]
    encoding = learn_encoding(schema, train_frame, method=settings.encoding)
    for name, scale in zip(schema.target.names, encoding.target_scales, strict=False):  # no scales for classes
        if not MIN_STD < scale.std < MAX_STD:
            raise DataError(
                f"The variance of the target {name!r} over- or underflows (its standard deviation is {scale.std:.1g}). "
                "Rescale the target."
            )
    raw = encoding.matrix(frame)
    features = encoding.encoder()(raw)
    if (scaler := _target_scaler(encoding)) is not None:
        targets = scaler.transform(targets.view(len(targets), -1))
    parts = {name: Split(features[part], targets[part]) for name, part in rows.items()}
    if settings.class_weight is not None:  # in all parts: a weighted training stops on a weighted score
        by_class = _class_weights(schema.target, settings.class_weight, parts["train"].y)
        parts = {name: replace(part, weight=by_class[part.y]) for name, part in parts.items()}
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Table(
        path.name,
        sha256,
        settings,
        encoding,
        **parts,
        rows={name: file_rows[part] for name, part in rows.items()},
        raw={name: raw[part] for name, part in rows.items()},
        description=_describe_table(schema, train_frame),
    )


def _class_weights(target: Target, weights: Mapping[str, float] | str, y: Tensor) -> Tensor:
    """Weight of each class, `(C,)`; "balanced" for the classes of training samples `(N,)`."""
    if target.task != "classification":
        raise DataError(f"Class weights need classes, but the target {target.name!r} is a number; leave them out.")
    names = target.class_names
    if unknown := [name for name in weights if name not in names and weights != "balanced"]:
        raise DataError(f"The target {target.name!r} has no class {unknown[0]!r}; choose among {quote_all(names)}.")
    by_code = weights if isinstance(weights, str) else {names.index(name): weights[name] for name in weights}
    return torch.from_numpy(compute_class_weight(by_code, classes=np.arange(len(names)), y=y.numpy()))


def _describe_table(schema: Schema, frame: DataFrame) -> TableSummary:
    used, dropped = {column.name: column for column in schema.columns}, dict(schema.dropped)
    columns: list[dict[str, Any]] = []
    for name in map(str, frame.columns):
        if name in used:
            columns.append({"name": name, **_describe_column(frame[name], used[name])})
        elif name in dropped:
            columns.append({"name": name, "kind": "dropped", "missing": _missing(frame[name]), "why": dropped[name]})
    target = {"name": schema.target.name, "task": schema.target.task, "num_columns": len(schema.target.names)}
    target["classes"] = schema.target.class_names
    if schema.target.classes:
        counts = np.bincount(schema.targets(frame).numpy(), minlength=len(schema.target.classes)).tolist()
        ordered = sorted(zip(schema.target.class_names, counts, strict=True), key=lambda item: -item[1])
        classes = {"num_categories": len(counts), "categories": ordered[:MAX_CATEGORIES]}
        target["columns"] = [{"name": schema.target.name, "kind": "category", **classes}]
    else:
        target["columns"] = [
            {"name": name, **_describe_column(frame[name], Column(name, "number", format))}
            for name, format in zip(schema.target.names, schema.target.formats, strict=True)
        ]
    return TableSummary.model_validate({"target": target, "columns": columns, "notes": schema.notes})


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
