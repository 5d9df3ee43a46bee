"""A user's table as members are trained on it: read, understood, shared out, encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchace.lab.data import DataError, Split
from torchace.lab.data.description import describe_table
from torchace.lab.data.encoding import Encoding, learn_encoding
from torchace.lab.data.splits import SplitIndices, train_val_test_split
from torchace.lab.data.table_schema import Schema, infer_schema
from torchace.lab.data.tables import read_table
from torchace.lab.training.members import MemberPlan
from torchace.lab.training.scaling import Moments
from torchace.models.encoder import TableEncoder

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

LEAST_STD, MOST_STD = 1e-50, 1e50  # of the target of a regression


@dataclass(frozen=True)
class TableSettings:
    """What a user says about a table; what is left out is found out."""

    target: str
    task: str | None = None  # "classification" or "regression"
    drop: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)  # column: "number", "category" or "drop"
    split_column: str | None = None  # names the part of every row
    validation: float = 0.2
    test: float = 0.2
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "drop": list(self.drop), "kinds": dict(self.kinds)}


@dataclass(frozen=True)
class Table:
    """A table in three parts. Scaling and categories come from the training part alone.

    Attributes:
        name: The file's name.
        sha256: Of the file.
        encoding: What was learnt about the columns.
        train: Features `(N, D)` of float64, and class indices `(N,)` or scaled targets `(N, 1)`.
        validation: What λ is chosen and training stopped by.
        test: What nothing is decided by.
        validation_rows: Where in the file they are, counted from 0.
        test_rows: Likewise.
        described: The columns, as a report shows them.
    """

    name: str
    sha256: str
    encoding: Encoding
    train: Split
    validation: Split
    test: Split
    validation_rows: Tensor
    test_rows: Tensor
    described: dict[str, Any]

    @property
    def schema(self) -> Schema:
        return self.encoding.schema

    @property
    def task(self) -> str:
        return self.schema.target.task

    @property
    def num_outputs(self) -> int:
        return len(self.schema.target.classes) if self.task == "classification" else 1

    @property
    def targets(self) -> Moments | None:
        """What the targets of a regression were scaled by."""
        return target_moments(self.encoding)

    def encoder(self) -> TableEncoder:
        """From the raw matrix to the features."""
        return encoder_of(self.encoding)


def encoder_of(encoding: Encoding) -> TableEncoder:
    """The encoder of a table, in float64."""
    return TableEncoder.from_values(**encoding.encoder_arguments()).double()


def target_moments(encoding: Encoding) -> Moments | None:
    if encoding.target is None:
        return None
    return Moments(*(torch.tensor([v], dtype=torch.float64) for v in (encoding.target.mean, encoding.target.std)))


def open_table(path: Path, settings: TableSettings) -> Table:
    """Reads a table and prepares it for training; whatever is wrong with it is a `DataError` of one sentence."""
    path = path.expanduser()
    frame = read_table(path)
    drop = list(settings.drop)
    column = None
    if settings.split_column is not None:
        if settings.split_column not in frame.columns:
            raise DataError(
                f"{path.name} has no column {settings.split_column!r} that names the part of every row; its columns "
                f"are {_listed(list(map(str, frame.columns)))}."
            )
        if settings.split_column == settings.target:
            raise DataError(f"The column {settings.target!r} cannot be both the target and the part of every row.")
        column = frame[settings.split_column]
        if settings.split_column not in drop:
            drop.append(settings.split_column)
    schema = infer_schema(frame, settings.target, settings.task, drop, kinds=dict(settings.kinds))
    targets = schema.targets(frame)
    fractions = (1 - settings.validation - settings.test, settings.validation, settings.test)
    parts = train_val_test_split(
        targets, seed=settings.seed, fractions=fractions, column=column, classes=schema.target.classes
    )
    return _encoded(path, frame, schema, targets, parts)


def _encoded(path: Path, frame: DataFrame, schema: Schema, targets: Tensor, parts: SplitIndices) -> Table:
    train = frame.iloc[parts.train.numpy()]
    encoding = learn_encoding(schema, train)
    _check_size(encoding)
    features = encoder_of(encoding)(encoding.matrix(frame))
    moments = target_moments(encoding)
    if moments is not None:
        targets = moments.scaled(targets[:, None])
    train_part, validation, test = (Split(features[rows], targets[rows]) for rows in parts)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Table(
        name=path.name,
        sha256=sha256,
        encoding=encoding,
        train=train_part,
        validation=validation,
        test=test,
        validation_rows=parts.validation,
        test_rows=parts.test,
        described=describe_table(schema, train),
    )


def _check_size(encoding: Encoding) -> None:
    """A target whose squared errors are numbers."""
    std = None if encoding.target is None else encoding.target.std
    if std is not None and not LEAST_STD < std < MOST_STD:
        raise DataError(
            f"The target {encoding.schema.target.name!r} varies by {std:.1g}, and the square of that is hardly a "
            "number; give it in other units."
        )


def squared_scale(targets: Moments | None) -> float:
    """What a squared error of scaled targets is multiplied by to be in the target's units, squared."""
    return 1.0 if targets is None else float(targets.std) * float(targets.std)


def on_device(split: Split, plan: MemberPlan, device: str) -> Split:
    """A part of a table as a plan's members are trained on it."""
    dtype = plan.train_config(1).dtype
    y = split.y.to(dtype) if split.y.is_floating_point() else split.y
    return Split(split.x.to(dtype), y).to(device)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
