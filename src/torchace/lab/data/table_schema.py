"""Schema of a table: numbers, categories and the target."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from torchace.lab.data.columns import (
    check_columns,
    check_features,
    check_targets,
    get_column,
    header_hint,
    target_numbers,
    target_texts,
)
from torchace.lab.data.errors import DataError, arrow, pandas
from torchace.lab.data.messages import first_duplicate, quote, quote_all, row_number, suggestion
from torchace.lab.data.parsing import CellError, canonical, number_text, numbers, positions, texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

KINDS = ("number", "category", "date")
TASKS = ("classification", "regression")

MIN_ROWS = 10
# whole numbers are classes if few, with several rows each
MAX_NUMBERED_CLASSES = 20
MIN_ROWS_PER_NUMBERED_CLASS = 3
MAX_DISTINCT = 0.9  # a larger fraction of distinct texts means names or sentences

Finite = Annotated[float, Field(allow_inf_nan=False)]
Label = str | int | Finite | bool
STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class Column:
    """Feature column of kind "number", "category" or "date"."""

    __pydantic_config__ = STRICT
    name: str
    kind: Annotated[str, Field(pattern="^(number|category|date)$")]


@dataclass(frozen=True)
class Target:
    """Column to predict, for "classification" or "regression"."""

    __pydantic_config__ = STRICT
    name: str
    task: Annotated[str, Field(pattern="^(classification|regression)$")]
    classes: tuple[Label, ...] = ()  # typed as in the file; empty for regression

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
    version: Literal[1] = field(default=1, repr=False)

    def targets(self, frame: DataFrame) -> Tensor:
        """Target of every row, `(N,)`: class indices of int64, or numbers of float64."""
        column = get_column(check_columns(frame), self.target.name, "the target")
        if self.target.task == "regression":
            return torch.from_numpy(target_numbers(column))
        cells = target_texts(column)
        codes = positions(cells, [_label_text(label) for label in self.target.classes])
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
        names = [self.target.name, *(column.name for column in self.columns)]
        classes = [_label_text(label) for label in self.target.classes]
        if not self.columns or first_duplicate(names) is not None:
            raise damaged_json("schema", "columns: expected at least one, with unique names")
        if len(classes) < 2 if self.target.task == "classification" else classes:
            raise damaged_json("schema", "target.classes: expected two or more for classification only")
        if first_duplicate(classes) is not None:
            raise damaged_json("schema", "target.classes: expected unique ones")


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


def infer_schema(
    frame: DataFrame,
    target: str,
    task: str | None = None,
    drop: Collection[str] = (),
    *,
    kinds: Mapping[str, str] | None = None,
) -> Schema:
    """Infer the schema of a table from its values; decisions are recorded in `notes`.

    Columns of numbers are "number"; other texts, dates and truth values "category". Empty and constant columns, texts
    that are mostly distinct, and other values are left out. `kinds` overrides the kind by name (or "drop").

    Targets of texts, truth values or a few whole numbers (`MAX_NUMBERED_CLASSES`) mean classification, others
    regression.
    """
    frame = check_columns(frame)
    kinds = {} if kinds is None else {str(name): kind for name, kind in kinds.items()}
    drop = [drop] if isinstance(drop, str) else [str(name) for name in drop]
    _check_request(frame, str(target), task, drop, kinds)
    if len(frame) < MIN_ROWS:
        raise DataError(f"The table has {len(frame)} rows, too few to learn from; give at least {MIN_ROWS}.")
    notes: list[str] = []
    predicted = _infer_target(frame[str(target)], task, notes)
    columns = infer_columns(frame.drop(columns=[predicted.name, *drop]), notes, kinds)
    return Schema(columns, predicted, tuple(notes))


def infer_columns(frame: DataFrame, notes: list[str], kinds: Mapping[str, str] | None = None) -> tuple[Column, ...]:
    """Infer the kinds of feature columns; decisions are added to `notes`."""
    kinds = kinds or {}
    columns = []
    for name in frame.columns:
        kind = None if kinds.get(name) == "drop" else _infer_kind(frame[name], kinds.get(name), notes)
        columns += [] if kind is None else [Column(name, kind)]
    if not columns:
        why = [f" ({note.removesuffix('.')})" for note in notes if note.startswith("Column")]
        raise DataError(
            f"No column is left to predict from{''.join(why[-1:])}; give a table with columns of numbers or of "
            "categories that vary."
        )
    return tuple(columns)


def _check_request(
    frame: DataFrame, target: str, task: str | None, drop: Iterable[str], kinds: Mapping[str, str]
) -> None:
    if target not in frame.columns:
        raise DataError(
            f"There is no column {quote(target)}{suggestion(target, frame.columns)} to predict; choose one of "
            f"{quote_all(frame.columns)}{header_hint(frame.columns)}."
        )
    if task is not None and task not in TASKS:
        raise DataError(f"The task {quote(task)} is not known; choose {' or '.join(TASKS)}, or leave it out.")
    for name in [*drop, *kinds]:
        if name == target:
            raise DataError(f"The column {quote(name)} is the target; choose another target, or keep this column.")
        if name not in frame.columns:
            raise DataError(
                f"There is no column {quote(name)}{suggestion(name, frame.columns)} to leave out or to give a kind; "
                f"choose among {quote_all(frame.columns)}."
            )
    for name, kind in kinds.items():
        if kind not in (*KINDS, "drop"):
            raise DataError(
                f"The kind {quote(kind)} of column {quote(name)} is not known; use number, category, date or drop."
            )


def _infer_kind(column: Series, requested: str | None, notes: list[str]) -> str | None:
    """Kind of a column; None, with a note, if it is left out."""
    dtype = column.dtype
    if requested is None and isinstance(dtype, pandas().CategoricalDtype):
        requested = "category"
    if pandas().api.types.is_datetime64_any_dtype(dtype) and requested != "category" and column.nunique() > 1:
        return "date"
    if requested == "date":
        return requested
    try:
        values, invalid = numbers(column)
        cells = texts(column) if invalid.any() or requested == "category" else None
    except CellError as error:
        if requested is not None:
            raise
        notes.append(f"{error.found} and is left out.")
        return None
    if requested == "number" or (requested is None and cells is None):
        check_features(column, values, invalid)
    if requested is not None:
        return requested
    if cells is None:
        present, distinct = int((~np.isnan(values)).sum()), len(np.unique(values[~np.isnan(values)]))
    else:
        present, distinct = len(cells) - cells.null_count, len(cells.drop_null().unique())
    name, commas = quote(column.name), "" if cells is None else _decimal_commas(cells)
    if present == 0:
        notes.append(f"Column {name} is left out, since it is empty.")
        return None
    if distinct == 1 and present == len(column):
        notes.append(f"Column {name} is left out, since it is {quote(column.iloc[0])} in every row.")
        return None
    if cells is not None and distinct > MAX_DISTINCT * present:
        notes.append(
            f"Column {name} is left out, since {distinct} of its {present} values are different, as in names and "
            f"texts; {commas or 'to use it all the same, call it a category'}."
        )
        return None
    if commas:
        notes.append(f"Column {name} is taken for categories; {commas}.")
    return "number" if cells is None else "category"


def _decimal_commas(cells: Any) -> str:
    """Advice for numbers with decimal commas, or an empty string."""
    pc = arrow("pyarrow.compute")
    present = cells.drop_null()
    commas = np.asarray(pc.match_substring_regex(present, r"^[+-]?[0-9]*,[0-9]+$"))
    whole = np.asarray(pc.match_substring_regex(present, r"^[+-]?[0-9]+$"))
    is_numbers = bool(commas.any()) and bool((commas | whole).all())
    return "if its values are numbers, write them with a decimal point" if is_numbers else ""


def _infer_target(column: Series, task: str | None, notes: list[str]) -> Target:
    name = str(column.name)
    values, invalid = numbers(column)
    is_number = not invalid.any()
    if is_number or task == "regression":
        check_targets(column, values, invalid)
    if task is None:
        task = _infer_task(name, values, notes) if is_number else "classification"
    if task == "classification":
        return Target(name, task, _infer_classes(column, target_texts(column), is_number))
    if len(np.unique(values)) == 1:
        raise DataError(
            f"The target {quote(name)} is {quote(column.iloc[0])} in every row, so there is nothing to predict; choose "
            "another column."
        )
    return Target(name, task)


def _infer_task(name: str, values: NDArray[np.float64], notes: list[str]) -> str:
    """Task of a numeric target, with a note if ambiguous."""
    if (values != np.floor(values)).any():
        return "regression"
    distinct = len(np.unique(values))
    few = distinct <= min(MAX_NUMBERED_CLASSES, len(values) / MIN_ROWS_PER_NUMBERED_CLASS)
    task, other = TASKS if few else TASKS[::-1]
    notes.append(
        f"The target {quote(name)} has {distinct} different whole numbers, which are taken for "
        f"{'classes' if few else 'quantities'}; ask for {other} if they are not."
    )
    return task


def _infer_classes(column: Series, cells: Any, is_number: bool) -> tuple[Label, ...]:
    """Sorted classes, each in its most frequent spelling."""
    counts = {entry["values"]: entry["counts"] for entry in cells.value_counts().to_pylist()}
    forms = {text: canonical(text) for text in counts}
    if not is_number and not set(forms.values()) <= {"true", "false"}:
        forms = {text: text for text in counts}  # 1 and 1.0 differ among words
    rows: dict[str, int] = {}
    spelling: dict[str, str] = {}
    for text, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        rows[forms[text]] = rows.get(forms[text], 0) + count
        spelling.setdefault(forms[text], text)
    _check_classes(column, cells, rows, spelling)
    ordered = sorted(rows, key=(lambda form: (float(form), form)) if is_number else (lambda form: (0.0, form)))
    return tuple(_to_column_type(spelling[form], column) for form in ordered)


def _check_classes(column: Series, cells: Any, rows: Mapping[str, int], spelling: Mapping[str, str]) -> None:
    name, total = quote(column.name), sum(rows.values())
    if len(rows) == 1:
        raise DataError(
            f"The target {name} has only one class, {quote(next(iter(spelling.values())))}, so there is nothing to "
            "predict; choose another column, or add rows of other classes."
        )
    if len(rows) > total / 2:
        raise DataError(
            f"The target {name} has {len(rows)} classes in {total} rows, too many to learn; choose another column, or "
            "ask for regression if it is a quantity."
        )
    for form, count in rows.items():
        if count == 1:
            place = int(np.flatnonzero(positions(cells, list(rows)) == list(rows).index(form))[0])
            raise DataError(
                f"The class {quote(spelling[form])} of the target {name} has only one row, row "
                f"{row_number(column, place)}, too few for training and test parts; remove it, or add rows of it."
            )


def _to_column_type(text: str, column: Series) -> Label:
    """Convert a class to the type of its column."""
    pd = pandas()
    types, dtype = pd.api.types, column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        dtype = dtype.categories.dtype
    if types.is_bool_dtype(dtype):
        return text == "True"
    if types.is_integer_dtype(dtype):
        return int(text)
    return float(text) if types.is_float_dtype(dtype) else text


def _label_text(label: Label) -> str:
    """Text of a class as in `texts`."""
    return number_text(label) if isinstance(label, float) else str(label)
