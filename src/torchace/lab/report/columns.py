"""The data of a fit: its target, the tables of its columns, and notes on how they were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE
from torchace.lab.report.results import Results
from torchace.lab.report.table_schema import Numbers, SchemaColumn
from torchace.lab.report.tables import Cell, Column, Section, Table

MOST = 1000
"""At most so many columns of a kind are listed: a page is to be read."""


def target_facts(results: Results) -> list[tuple[str, str]]:
    """What is predicted and from what, as pairs of a heading and a text.

    Args:
        results: A run directory.

    Returns:
        The pairs; an empty list where the data has no schema.
    """
    schema = results.data.schema
    if schema is None:
        return []
    target, data = schema.target, results.data
    kind = "a number" if results.task.name == "regression" else "a class"
    if target.classes:
        named = [formats.cut(label, 40) for label in target.classes[:10]]
        kind = f"one of {formats.count(len(target.classes), 'class', 'classes')}: {', '.join(named)}"
        kind += ", …" if len(target.classes) > 10 else ""
    text = f"{formats.cut(target.name, 80)}, {kind}"
    if target.numbers.mean is not None:
        text += f": {_mean(target.numbers)} in the training part, {_range(target.numbers)}"
    parts = [
        formats.count(len(schema.of(kind)), noun, plural)
        for kind, noun, plural in (("number", "number", ""), ("category", "category", "categories"))
        if schema.of(kind)
    ]
    used = formats.listed(parts) if parts else "nothing"
    if left := len(schema.of("dropped")):
        used += f"; {formats.count(left, 'column')} left out"
    rows = [f"{data.train:,} to train", f"{data.validation:,} to validate", f"{data.test:,} to test"]
    return [
        ("Target", text),
        ("Predicted from", used),
        ("Rows", ", ".join(rows if data.validation else rows[::2])),
    ]


def all_classes(results: Results) -> str:
    """All classes of a target that has many, in one line; empty where `target_facts` names them all."""
    classes = results.data.schema.target.classes if results.data.schema else ()
    if len(classes) <= 10:
        return ""
    rest = f", and {len(classes) - MOST:,} more" if len(classes) > MOST else ""
    return ", ".join(formats.cut(label, 80) for label in classes[:MOST]) + rest


def schema_tables(results: Results) -> list[Table]:
    """The columns of the data, a table for each kind.

    Args:
        results: A run directory.

    Returns:
        Tables of numbers, categories and columns that were left out; those that have rows.
    """
    schema = results.data.schema
    if schema is None:
        return []
    rows = results.data.train
    tables = [
        _table("Numbers", ("Mean ± SD", "Range"), schema.of("number"), rows, _number_cells),
        _table("Categories", ("Values", "Most frequent"), schema.of("category"), rows, _category_cells),
        _table("Left out", ("Why",), schema.of("dropped"), rows, _dropped_cells),
    ]
    return [table for table in tables if table.sections[0].rows]


def folded(table: Table, most: int = 12) -> tuple[Table, Table | None]:
    """A table's first rows, and the rest for those who ask; None where it is short."""
    [section] = table.sections
    if len(section.rows) <= most + 3:
        return table, None
    head, rest = (replace(section, rows=rows) for rows in (section.rows[:most], section.rows[most:]))
    return replace(table, sections=(head,), note=""), replace(table, sections=(rest,))


def _table(
    caption: str,
    labels: tuple[str, ...],
    columns: Sequence[SchemaColumn],
    rows: int,
    cells: Callable[[SchemaColumn], tuple[Cell, ...]],
) -> Table:
    listed = tuple(
        (Cell(formats.cut(column.name, 80), kind="text"), *cells(column), _missing(column.missing, rows))
        for column in columns[:MOST]
    )
    note = f"{len(columns) - MOST:,} more are not listed." if len(columns) > MOST else ""
    heads = tuple(Column(label) for label in ("Column", *labels, "Missing"))
    return Table(f"{caption} ({len(columns):,})", heads, (Section("", listed),), note)


def _number_cells(column: SchemaColumn) -> tuple[Cell, ...]:
    return Cell(_mean(column.numbers)), Cell(_range(column.numbers))


def _category_cells(column: SchemaColumn) -> tuple[Cell, ...]:
    shown = [f"{formats.cut(label, 40)} ({count:,})" for label, count in column.categories]
    rest = column.num_categories - len(shown)
    text = ", ".join(shown) + (f", and {rest:,} more" if shown and rest > 0 else "")
    return Cell(f"{column.num_categories:,}"), Cell(text or NONE, kind="text")


def _dropped_cells(column: SchemaColumn) -> tuple[Cell, ...]:
    return (Cell(formats.cut(column.why, 300) if column.why else NONE, kind="text"),)


def _missing(missing: int, rows: int) -> Cell:
    if not missing:
        return Cell("0")
    return Cell(f"{missing:,} ({formats.number(100 * missing / rows, 1)} %)" if rows else f"{missing:,}")


def _mean(numbers: Numbers) -> str:
    if numbers.mean is None:
        return NONE
    mean = formats.quantity(numbers.mean)
    return mean if numbers.std is None else f"{mean} ± {formats.quantity(numbers.std)}"


def _range(numbers: Numbers) -> str:
    if numbers.low is None or numbers.high is None:
        return NONE
    return f"{formats.quantity(numbers.low)} to {formats.quantity(numbers.high)}"
