"""Read, split, encode and describe a table for training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchace.lab.data import DataError, Split
from torchace.lab.data.encoding import Encoding, learn_encoding, mean_and_std
from torchace.lab.data.errors import quote_all
from torchace.lab.data.inference import infer_schema, missing_targets
from torchace.lab.data.parsing import CellError, texts
from torchace.lab.data.splits import train_val_test_split
from torchace.lab.data.table_schema import Column, Schema, Target, feature_numbers
from torchace.lab.data.tables import read_table
from torchace.lab.schema.results import TableSummary
from torchace.lab.schema.values import LARGEST
from torchace.lab.training.members import MemberPlan
from torchace.lab.training.scaling import Scaler

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

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON."""
        return {**asdict(self), "target": list(self.target), "drop": list(self.drop)}


@dataclass(frozen=True)
class Table:
    """A table in three parts; the encoding is learned from the training part."""

    name: str  # of the file
    sha256: str
    encoding: Encoding
    train: Split  # features (N, D) in float64, with class indices (N,) or scaled targets (N, M)
    validation: Split
    test: Split
    validation_rows: Tensor  # rows in the file, from 0
    test_rows: Tensor
    description: dict[str, Any]  # for the report
    raw: Mapping[str, Tensor]  # raw matrices (N, F) of the parts, by name

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
        return target_scaler(self.encoding)

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
            return Split(split.x.to(dtype), y, split.weight).to(device)

        return convert(self.train), convert(self.validation), convert(self.test)


def target_scaler(encoding: Encoding) -> Scaler | None:
    """Return the scaler of a regression's targets; None for classes."""
    scales = torch.tensor([[scale.mean, scale.std] for scale in encoding.target_scales], dtype=torch.float64)
    return Scaler(scales[:, 0], scales[:, 1]) if len(scales) else None


def class_weights(target: Target, weights: Mapping[str, float] | str, y: Tensor) -> Tensor:
    """Return the weight of each sample, `(N,)`, from those of its class; `"balanced"` weighs all classes equally."""
    if target.task != "classification":
        raise DataError(f"Class weights need classes, but the target {target.name!r} is a number; leave them out.")
    counts = torch.bincount(y, minlength=len(target.classes)).double()
    if isinstance(weights, str):
        return (len(y) / (len(counts) * counts))[y]
    if unknown := [name for name in weights if name not in target.class_names]:
        raise DataError(
            f"There is no class {unknown[0]!r} of the target {target.name!r} to weigh; choose among "
            f"{quote_all(target.class_names)}."
        )
    return torch.tensor([weights.get(name, 1.0) for name in target.class_names], dtype=torch.float64)[y]


def load_table(path: Path, settings: TableSettings) -> Table:
    """Read, split and encode a table."""
    path = path.expanduser()
    frame, skipped = read_table(path), 0
    file_rows = torch.arange(len(frame))
    if settings.skip_missing_target and set(settings.target) <= set(frame.columns):
        task = settings.task if len(settings.target) == 1 else "regression"
        missing = np.any([missing_targets(frame[name], task) for name in settings.target], 0)
        frame, file_rows, skipped = frame[~missing], file_rows[torch.from_numpy(~missing)], int(missing.sum())
    drop, column = list(settings.drop), None
    if settings.split_column is not None:
        if settings.split_column not in frame.columns:
            names = [repr(str(name)) for name in frame.columns]
            raise DataError(
                f"Expected a split column of {path.name}, but got {settings.split_column!r}. Its columns are "
                f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
            )
        if settings.split_column in settings.target:
            raise DataError(f"The column {settings.split_column!r} cannot be both the target and the split column.")
        column = frame[settings.split_column]
        if settings.split_column not in drop:
            drop.append(settings.split_column)
    schema = infer_schema(frame, settings.target, settings.task, drop, kinds=dict(settings.kinds))
    if skipped:
        note = f"{skipped} of {len(frame) + skipped} rows have no target and are skipped."
        schema = replace(schema, notes=(note, *schema.notes))
    if len(schema.target.names) > 1:
        note = "Scores over all targets are means; errors are those of targets scaled to a standard deviation of 1."
        schema = replace(schema, notes=(*schema.notes, note))
    targets = schema.targets(frame)
    fractions = (1 - settings.validation - settings.test, settings.validation, settings.test)
    rows = train_val_test_split(
        targets, seed=settings.seed, fractions=fractions, column=column, classes=schema.target.classes
    )
    train_frame = frame.iloc[rows.train.numpy()]
    encoding = learn_encoding(schema, train_frame, method=settings.encoding)
    for name, scale in zip(schema.target.names, encoding.target_scales, strict=False):  # no scales for classes
        if not MIN_STD < scale.std < MAX_STD:
            raise DataError(
                f"The variance of the target {name!r} over- or underflows (its standard deviation is {scale.std:.1g}). "
                "Rescale the target."
            )
    raw = encoding.matrix(frame)
    features = encoding.encoder()(raw)
    if (scaler := target_scaler(encoding)) is not None:
        targets = scaler.transform(targets.view(len(targets), -1))
    train, validation, test = (Split(features[part], targets[part]) for part in rows)
    if settings.class_weight is not None:
        train = replace(train, weight=class_weights(schema.target, settings.class_weight, train.y))
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    description = describe_table(schema, train_frame)
    return Table(
        path.name,
        sha256,
        encoding,
        train,
        validation,
        test,
        file_rows[rows.validation],
        file_rows[rows.test],
        description,
        {name: raw[part] for name, part in rows._asdict().items()},
    )


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
