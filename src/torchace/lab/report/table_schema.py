"""What a fit understood a table to be: its target and its columns, read from the result files."""

from __future__ import annotations

from dataclasses import dataclass

from torchace.lab.report._fields import Fields, ReportError, as_count, as_text

KINDS = ("number", "category", "dropped")


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, as the training part has it; None where nothing was measured."""

    mean: float | None
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TargetColumn:
    """What is predicted; `classes` is empty for a number."""

    name: str
    classes: tuple[str, ...]
    numbers: Numbers


@dataclass(frozen=True)
class SchemaColumn:
    """One column of the table.

    `missing` counts empty cells of the training part. A category has its most frequent `categories` with their counts,
    of `num_categories` in all; a dropped column says `why`.
    """

    name: str
    kind: str
    missing: int
    numbers: Numbers
    categories: tuple[tuple[str, int], ...]
    num_categories: int
    why: str


@dataclass(frozen=True)
class Schema:
    """A table's target, its columns, and what a reader should know of how they were read."""

    target: TargetColumn
    columns: tuple[SchemaColumn, ...]
    notes: tuple[str, ...]

    def of(self, kind: str) -> tuple[SchemaColumn, ...]:
        """The columns of one kind, in the table's order."""
        return tuple(column for column in self.columns if column.kind == kind)


def read_schema(fields: Fields) -> Schema:
    """Reads the object under `schema`.

    Args:
        fields: The object.

    Returns:
        The schema.

    Raises:
        ReportError: A key is missing or of the wrong kind.
    """
    target = fields.object("target")
    return Schema(
        target=TargetColumn(target.text("name"), target.items("classes", as_text, "a list of names", []), _of(target)),
        columns=fields.items("columns", lambda value: _column(Fields(value, fields.where)), "a list of columns"),
        notes=tuple(note for note in fields.items("notes", as_text, "a list of sentences", []) if note.strip()),
    )


def _column(fields: Fields) -> SchemaColumn:
    if (kind := fields.text("kind")) not in KINDS:
        raise ReportError(f"Expected the kind {', '.join(KINDS)} of a column in {fields.where}, but got {kind!r}.")
    categories = fields.items("categories", _category, "a list of labels with their counts", [])
    return SchemaColumn(
        name=fields.text("name"),
        kind=kind,
        missing=fields.integer("missing", 0),
        numbers=_of(fields),
        categories=categories,
        num_categories=fields.integer("num_categories", len(categories)),
        why=fields.text("why", ""),
    )


def _of(fields: Fields) -> Numbers:
    mean, std, low, high = (fields.optional_number(key) for key in ("mean", "std", "min", "max"))
    return Numbers(mean, std, low, high)


def _category(value: object) -> tuple[str, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise TypeError(value)
    return as_text(value[0]), as_count(value[1])
