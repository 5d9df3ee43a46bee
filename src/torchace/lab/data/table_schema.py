"""What the columns of a table mean: which are numbers, which are categories, and what is to be predicted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import first_duplicate, quote, quote_all, row_number, suggestion
from torchace.lab.data.packages import arrow, pandas
from torchace.lab.data.parsing import CellError, canonical, number_text, numbers, positions, texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

Label = str | int | float | bool

KINDS = ("number", "category")
TASKS = ("classification", "regression")

MIN_ROWS = 10
# Whole numbers are classes if there are few of them and each comes back: a target of 0 and 1, or of ten digits.
MAX_NUMBERED_CLASSES = 20
MIN_ROWS_PER_NUMBERED_CLASS = 3
# Texts that hardly ever come back are names, identifiers or sentences.
MAX_DISTINCT = 0.9

_VERSION = 1


@dataclass(frozen=True)
class Column:
    """A column that predictions are made from.

    Attributes:
        name: As in the file.
        kind: "number" or "category".
    """

    name: str
    kind: str


@dataclass(frozen=True)
class Target:
    """The column that is predicted.

    Attributes:
        name: As in the file.
        task: "classification" or "regression".
        classes: The classes in order, as they stand in the file: texts, whole numbers, numbers or truth values. None
            for regression.
    """

    name: str
    task: str
    classes: tuple[Label, ...] = ()

    @property
    def class_names(self) -> list[str]:
        """The classes as texts."""
        return [str(label) for label in self.classes]

    def labels(self, codes: Tensor) -> list[Label]:
        """Class indices `(N,)` as they would stand in the file.

        Example:
            >>> Target("pet", "classification", ("cat", "dog")).labels(torch.tensor([1, 0]))
            ['dog', 'cat']
        """
        return [self.classes[code] for code in codes.tolist()]


@dataclass(frozen=True)
class Schema:
    """The columns of a table and its target.

    Attributes:
        columns: What predictions are made from, in the order of the file.
        target: What is predicted.
        notes: What was decided on the way, a sentence each: columns that were left out, how the task was recognised.
    """

    columns: tuple[Column, ...]
    target: Target
    notes: tuple[str, ...] = ()

    def targets(self, frame: DataFrame) -> Tensor:
        """The target of every row, `(N,)`: class indices of int64, or numbers of float64.

        Raises:
            DataError: The column is missing, a row has no target, or one that is no class of this schema, or no number.

        Example:
            >>> import pandas as pd
            >>> schema = Schema((Column("age", "number"),), Target("pet", "classification", ("cat", "dog")))
            >>> schema.targets(pd.DataFrame({"age": [3, 4], "pet": ["dog", "cat"]}))
            tensor([1, 0])
        """
        column = get_column(check_columns(frame), self.target.name, "the target")
        if self.target.task == "regression":
            return torch.from_numpy(target_numbers(column))
        cells = target_texts(column)
        codes = positions(cells, [text_of(label) for label in self.target.classes])
        unknown = np.flatnonzero(codes < 0)
        if len(unknown):
            place = int(unknown[0])
            raise DataError(
                f"Row {row_number(frame, place)} has the class {quote(cells[place])} in the target "
                f"{quote(self.target.name)}, but training saw {quote_all(self.target.classes)} alone; correct or "
                "remove such rows, or train with them."
            )
        return torch.from_numpy(codes)

    def to_json(self) -> dict[str, Any]:
        """This schema as JSON can hold it."""
        return {
            "version": _VERSION,
            "columns": [{"name": column.name, "kind": column.kind} for column in self.columns],
            "target": {"name": self.target.name, "task": self.target.task, "classes": list(self.target.classes)},
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, content: object) -> Schema:
        """The schema that `to_json` gave, and nothing else.

        Raises:
            DataError: The content is no schema.

        Example:
            >>> schema = Schema((Column("age", "number"),), Target("pet", "classification", ("cat", "dog")))
            >>> Schema.from_json(schema.to_json()) == schema
            True
        """
        fields = json_object(content, "schema", version=int, columns=list, target=dict, notes=list)
        if fields["version"] != _VERSION:
            raise damaged_json("schema", f"its version is {fields['version']}, not {_VERSION}")
        columns = tuple(
            Column(**json_object(column, "schema", "a column", name=str, kind=str)) for column in fields["columns"]
        )
        target = json_object(fields["target"], "schema", "the target", name=str, task=str, classes=list)
        classes = tuple(target["classes"])
        wrong = {
            "columns": not columns
            or first_duplicate([target["name"], *(column.name for column in columns)]) is not None,
            "kinds of columns": any(column.kind not in KINDS for column in columns),
            "task": target["task"] not in TASKS,
            "classes": not _are_classes(classes, target["task"]),
            "notes": any(type(note) is not str for note in fields["notes"]),
        }
        for name, holds in wrong.items():
            if holds:
                raise damaged_json("schema", f"it has no valid {name}")
        return cls(columns, Target(target["name"], target["task"], classes), tuple(fields["notes"]))


def infer_schema(
    frame: DataFrame,
    target: str,
    task: str | None = None,
    drop: Collection[str] = (),
    *,
    kinds: Mapping[str, str] | None = None,
) -> Schema:
    """What the columns of a table are, from the values in them.

    A column of numbers, or of texts that are all numbers, is "number"; other texts, dates and truth values are
    "category". Left out, with a note, are columns that hold nothing, one value alone, texts of which more than nine in
    ten are different (names, identifiers, sentences), or what is neither number nor text.

    The target is classification if it holds texts or truth values, or whole numbers of which there are at most 20
    different ones, each in 3 rows on average; otherwise regression.

    Args:
        frame: The table, as `read_table` gives it or any other.
        target: The column to predict.
        task: "classification" or "regression", if it is not to be recognised.
        drop: Columns that are not used.
        kinds: For some columns by name, what they are: "number", "category" or "drop".

    Returns:
        The schema; its notes say what was decided.

    Raises:
        DataError: One sentence on what is wrong with the table, and what to do.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"age": range(12), "fur": ["long", "short"] * 6, "pet": ["cat", "dog", "dog"] * 4})
        >>> schema = infer_schema(frame, "pet")
        >>> schema.columns
        (Column(name='age', kind='number'), Column(name='fur', kind='category'))
        >>> schema.target
        Target(name='pet', task='classification', classes=('cat', 'dog'))
    """
    frame = check_columns(frame)
    kinds = {} if kinds is None else {str(name): kind for name, kind in kinds.items()}
    drop = [drop] if isinstance(drop, str) else [str(name) for name in drop]
    _check_request(frame, str(target), task, drop, kinds)
    if len(frame) < MIN_ROWS:
        raise DataError(f"The table has {len(frame)} rows, too few to learn from; give at least {MIN_ROWS}.")
    notes: list[str] = []
    predicted = _infer_target(frame[str(target)], task, notes)
    columns = []
    for name in frame.columns:
        if name != predicted.name and name not in drop and kinds.get(name) != "drop":
            kind = _infer_kind(frame[name], kinds.get(name), notes)
            columns += [] if kind is None else [Column(name, kind)]
    if not columns:
        why = [f" ({note.removesuffix('.')})" for note in notes if note.startswith("Column")]
        raise DataError(
            f"No column is left to predict {quote(target)} from{''.join(why[-1:])}; give a table with columns of "
            "numbers or of categories that vary."
        )
    return Schema(tuple(columns), predicted, tuple(notes))


# -- deciding ---------------------------------------------------------------------------------------------------------


def _infer_kind(column: Series, asked: str | None, notes: list[str]) -> str | None:
    """What a column is; None, and a note, if it is left out."""
    try:
        values, wrong = numbers(column)
        cells = texts(column) if wrong.any() or asked == "category" else None
    except CellError as error:
        if asked is not None:
            raise
        notes.append(f"{error.found} and is left out.")
        return None
    if asked is not None:
        if asked == "number":
            check_features(column, values, wrong)
        return asked
    if cells is None:
        check_features(column, values, wrong)  # refuses what is infinite
        present, distinct = int((~np.isnan(values)).sum()), len(np.unique(values[~np.isnan(values)]))
    else:
        present, distinct = len(cells) - cells.null_count, len(cells.drop_null().unique())
    name, commas = quote(column.name), "" if cells is None else _decimal_commas(cells)
    if present == 0:
        notes.append(f"Column {name} is left out, since it is empty.")
    elif distinct == 1 and present == len(column):
        notes.append(f"Column {name} is left out, since it is {quote(column.iloc[0])} in every row.")
    elif cells is not None and distinct > MAX_DISTINCT * present:
        notes.append(
            f"Column {name} is left out, since {distinct} of its {present} values are different, as in names and "
            f"texts; {commas or 'to use it all the same, call it a category'}."
        )
    else:
        if commas:
            notes.append(f"Column {name} is taken for categories; {commas}.")
        return "number" if cells is None else "category"
    return None


def _decimal_commas(cells: Any) -> str:
    """What to do about a column of numbers that are written 1,5."""
    said = cells.drop_null()
    commas = arrow("pyarrow.compute").match_substring_regex(said, r"^[+-]?[0-9]*,[0-9]+$")
    plain = arrow("pyarrow.compute").match_substring_regex(said, r"^[+-]?[0-9]+$")
    found = np.asarray(commas)
    all_numbers = len(found) > 0 and bool(found.any()) and bool((found | np.asarray(plain)).all())
    return "if its values are numbers, write them with a decimal point" if all_numbers else ""


def _infer_target(column: Series, task: str | None, notes: list[str]) -> Target:
    name = str(column.name)
    values, wrong = numbers(column)
    is_number = not wrong.any()
    if is_number:
        check_targets(column, values, wrong)  # refuses what is missing or infinite
    if task is None:
        task = _recognised_task(name, values, notes) if is_number else "classification"
    if task == "classification":
        return Target(name, task, _infer_classes(column, target_texts(column), is_number))
    check_targets(column, values, wrong)
    if len(np.unique(values)) == 1:
        raise DataError(
            f"The target {quote(name)} is {quote(column.iloc[0])} in every row, so there is nothing to predict; choose "
            "another column."
        )
    return Target(name, task)


def _recognised_task(name: str, values: NDArray[np.float64], notes: list[str]) -> str:
    """What a target of numbers is for; where that may be otherwise, with a note."""
    if (values != np.floor(values)).any():
        return "regression"
    distinct = len(np.unique(values))
    few = distinct <= min(MAX_NUMBERED_CLASSES, len(values) / MIN_ROWS_PER_NUMBERED_CLASS)
    task, taken, other = TASKS[0 if few else 1], ("classes" if few else "quantities"), TASKS[1 if few else 0]
    notes.append(
        f"The target {quote(name)} has {distinct} different whole numbers, which are taken for {taken}; ask for "
        f"{other} if they are not."
    )
    return task


def _infer_classes(column: Series, cells: Any, is_number: bool) -> tuple[Label, ...]:
    """The classes in order, each as it is written most often."""
    counts = [(entry["values"], entry["counts"]) for entry in cells.value_counts().to_pylist()]
    forms = {text: canonical(text) for text, _ in counts}
    if not is_number and not set(forms.values()) <= {"true", "false"}:
        forms = {text: text for text, _ in counts}  # 1 and 1.0 are one class where all are numbers, not among words
    rows: dict[str, int] = {}
    spelling: dict[str, str] = {}
    for text, count in sorted(counts, key=lambda entry: (-entry[1], entry[0])):
        rows[forms[text]] = rows.get(forms[text], 0) + count
        spelling.setdefault(forms[text], text)
    _check_classes(column, rows, spelling, positions(cells, list(rows)) if min(rows.values()) == 1 else None)
    ordered = sorted(rows, key=(lambda form: (float(form), form)) if is_number else (lambda form: (0.0, form)))
    return tuple(_typed(spelling[form], column) for form in ordered)


def _check_classes(column: Series, rows: Mapping[str, int], spelling: Mapping[str, str], codes: Any) -> None:
    name, total = quote(column.name), sum(rows.values())
    if len(rows) == 1:
        raise DataError(
            f"The target {name} has one class alone, {quote(next(iter(spelling.values())))}, so there is nothing to "
            "predict; choose another column, or add rows of other classes."
        )
    if len(rows) > total / 2:
        raise DataError(
            f"The target {name} has {len(rows)} classes in {total} rows, too many to learn; choose another column, or "
            "ask for regression if it is a quantity."
        )
    for code, (form, count) in enumerate(rows.items()):
        if count == 1:
            place = int(np.flatnonzero(codes == code)[0])
            raise DataError(
                f"The class {quote(spelling[form])} of the target {name} has one row alone, row "
                f"{row_number(column, place)}, and cannot be both learnt and tested; remove it, or add rows of it."
            )


def _typed(text: str, column: Series) -> Label:
    """A class as it stands in the file: of the type that its column has."""
    pd = pandas()
    types, dtype = pd.api.types, column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        dtype = dtype.categories.dtype
    if types.is_bool_dtype(dtype):
        return text == "True"
    if types.is_integer_dtype(dtype):
        return int(text)
    return float(text) if types.is_float_dtype(dtype) else text


# -- requests and JSON ------------------------------------------------------------------------------------------------


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
            raise DataError(f"The column {quote(name)} is the target; choose another target, or leave it as it is.")
        if name not in frame.columns:
            raise DataError(
                f"There is no column {quote(name)}{suggestion(name, frame.columns)} to leave out or to give a kind; "
                f"choose among {quote_all(frame.columns)}."
            )
    for name, kind in kinds.items():
        if kind not in (*KINDS, "drop"):
            raise DataError(
                f"The kind {quote(kind)} of column {quote(name)} is not known; say number, category or drop."
            )


def text_of(label: Label) -> str:
    """The text that `texts` makes of a class."""
    return number_text(label) if isinstance(label, float) else str(label)


def _are_classes(classes: Sequence[object], task: object) -> bool:
    """Whether these are the classes of a target as JSON holds them."""
    if task == "regression":
        return not classes
    finite = all(not isinstance(label, float) or np.isfinite(label) for label in classes)
    typed = finite and len(classes) >= 2 and all(type(label) in (str, int, float, bool) for label in classes)
    return typed and first_duplicate([text_of(label) for label in classes]) is None  # type: ignore[arg-type]


def json_object(content: object, what: str, part: str = "it", /, **types: type | None) -> dict[str, Any]:
    """The fields of a JSON object, no more and no fewer, of these types; None for one that is checked elsewhere."""
    if not isinstance(content, dict) or set(content) != set(types):
        raise damaged_json(what, f"{part} has not the fields {', '.join(types)}")
    for name, expected in types.items():
        if expected is not None and type(content[name]) is not expected:
            raise damaged_json(what, f"{name!r} is not of type {expected.__name__}")
    return content


def damaged_json(what: str, why: str) -> DataError:
    return DataError(f"The {what} of the table is damaged, since {why}; copy the model again or train anew.")
