"""Schema of a table: its feature columns and the target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from torchace.lab.data.columns import STRICT, Column, check_columns, get_column, target_numbers, target_texts
from torchace.lab.data.errors import DataError, first_duplicate, quote, quote_all, row_number
from torchace.lab.data.parsing import DATE_FORMATS, NUMBER_FORMATS, number_text, positions

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

TASKS = ("classification", "regression")

Finite = Annotated[float, Field(allow_inf_nan=False)]
Label = str | int | Finite | bool


@dataclass(frozen=True)
class Target:
    """Column to predict, for "classification" or "regression"; "multilabel" is of estimators, `classes` its labels.

    A regression may have several columns.
    """

    __pydantic_config__ = STRICT
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    task: Annotated[str, Field(pattern="^(classification|multilabel|regression)$")]
    classes: tuple[Label, ...] = ()  # typed as in the file; empty for regression
    formats: tuple[str, ...] = ()  # of the numbers of each column, see `Column`

    @property
    def name(self) -> str:
        """Names of the columns, for messages."""
        return ", ".join(self.names)

    @property
    def num_outputs(self) -> int:
        """Number of classes, or of columns."""
        return len(self.classes) or len(self.names)

    @property
    def class_names(self) -> list[str]:
        """Classes as texts."""
        return [str(label) for label in self.classes]

    def labels(self, codes: Tensor) -> list[Label]:
        """Convert class indices `(N,)` to classes."""
        return [self.classes[code] for code in codes.tolist()]


@dataclass(frozen=True)
class Schema:
    """Feature columns of a table, in file order, and its target."""

    __pydantic_config__ = STRICT
    columns: tuple[Column, ...]
    target: Target
    notes: tuple[str, ...] = ()  # decisions of `infer_schema`
    dropped: tuple[tuple[str, str], ...] = ()  # columns left out, with the reasons
    version: Literal[2] = field(default=2, repr=False)

    def targets(self, frame: DataFrame) -> Tensor:
        """Target of every row, `(N,)`: class indices of int64, or numbers of float64, `(N, M)` for several columns."""
        frame = check_columns(frame)
        columns = [get_column(frame, name, "the target") for name in self.target.names]
        if self.target.task == "regression":
            found = [target_numbers(c, format) for c, format in zip(columns, self.target.formats, strict=True)]
            return torch.from_numpy(np.stack(found, 1) if len(found) > 1 else found[0])
        if self.target.task == "multilabel":
            raise DataError(
                "The model predicts several labels of a row, which a file cannot be scored by; score it in Python."
            )
        cells = target_texts(columns[0])
        codes = positions(cells, [label_text(label) for label in self.target.classes])
        unknown = np.flatnonzero(codes < 0)
        if len(unknown):
            place = int(unknown[0])
            raise DataError(
                f"Row {row_number(frame, place)} has the class {quote(cells[place])} in the target "
                f"{quote(self.target.name)}, but training had only {quote_all(self.target.classes)}; correct or "
                "remove such rows, or train with them."
            )
        return torch.from_numpy(codes)

    def to_json(self) -> dict[str, Any]:
        """Convert the schema to JSON values."""
        return adapter_of(Schema).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, content: object) -> Schema:
        """Restore a schema from `to_json`; raise `DataError` for other content."""
        schema: Schema = parse_stored(Schema, content, "schema")
        schema.check()
        return schema

    def check(self) -> None:
        """Raise an error unless names are unique and classes fit the task."""
        names = [*self.target.names, *(column.name for column in self.columns)]
        classes = [label_text(label) for label in self.target.classes]
        if not self.columns or first_duplicate(names) is not None:
            raise damaged_json("schema", "columns: expected at least one, with unique names")
        least = {"classification": 2, "multilabel": 1, "regression": 0}[self.target.task]
        if len(classes) < least or (classes and not least):
            raise damaged_json("schema", "target.classes: expected two or more for classification only")
        if first_duplicate(classes) is not None:
            raise damaged_json("schema", "target.classes: expected unique ones")
        formats = {"number": ("", *NUMBER_FORMATS), "date": DATE_FORMATS, "category": ("",)}
        used = [(column.kind, column.format) for column in self.columns]
        used += [("number", format) for format in self.target.formats]
        if any(format not in formats[kind] for kind, format in used):
            raise damaged_json("schema", "format: expected a known one")
        expected = len(self.target.names) if self.target.task == "regression" else 0
        if len(self.target.formats) != expected or (not expected and len(self.target.names) > 1):
            raise damaged_json("schema", "target.formats: expected one for each column of a regression")


@cache  # takes milliseconds to build
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Pydantic validator and serializer of a dataclass."""
    return TypeAdapter(kind)


def parse_stored(kind: Any, content: object, what: str) -> Any:
    """Validate JSON values as a dataclass; an error is one sentence."""
    adapter = adapter_of(kind)
    try:
        value = adapter.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise damaged_json(what, f"{place}: {message}" if place else message) from None
    if adapter.dump_python(value, mode="json") != content:
        raise damaged_json(what, "fields are missing")
    return value


def damaged_json(what: str, why: str) -> DataError:
    """Error for a damaged schema or encoding."""
    return DataError(f"The {what} of the table is damaged ({why}); copy the model again or train it again.")


def label_text(label: Label) -> str:
    """Text of a class as in `texts`."""
    return number_text(label) if isinstance(label, float) else str(label)
