"""Data, arms, hardware and failures, as facts and tables."""

from __future__ import annotations

from datetime import datetime, timedelta

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, quantity
from torchace.lab.report.results import Results
from torchace.lab.report.tables import ReportTable, make_table
from torchace.lab.schema.results import ColumnSummary, DataSummary, Failure, TableSummary

MOST_COLUMNS = 1000  # to list
MOST_CLASSES = 10

Facts = list[tuple[str, str]]


def facts(results: Results) -> Facts:
    """Data, seeds, hardware, versions and time."""
    experiment = results.experiment
    found = dict.fromkeys([("Data", _data(results.data))])
    for arm in results.arms:
        if results.arm_data(arm) != results.data:
            found[f"Data of “{arm.label}”", _data(results.arm_data(arm))] = None
    time = formats.duration(experiment.seconds)
    if experiment.started:
        time += f", started {experiment.started[:16].replace('T', ' ')}"
    hardware = [
        value if isinstance(value, str) else f"{value} {key.removesuffix('s') if value == 1 else key}"
        for key, value in experiment.hardware.items()
        if value not in (None, "", "CPU")
    ]
    versions = "; ".join(f"{key} {value}" for key, value in experiment.versions.items()) or NONE
    seeds = f"{len(experiment.seeds)} ({', '.join(map(str, experiment.seeds))})"
    return [*found, ("Seeds", seeds), ("Hardware", "; ".join(hardware) or NONE), ("Versions", versions), ("Time", time)]


def _data(data: DataSummary) -> str:
    text = f"{data.name}: {_sizes(data)}"
    if data.classes:
        text += f"; classes: {_list_classes(data.classes)}"
    if data.image_shape:
        text += f"; images {' × '.join(str(side) for side in data.image_shape)}"
    elif data.inputs:
        text += f"; inputs {', '.join(data.inputs)}"
    return text + "".join(f". {note.rstrip('.')}" for note in data.notes)


def _sizes(data: DataSummary) -> str:
    validation = [f"{data.validation:,} for validation"] if data.validation else []
    return ", ".join([f"{data.train:,} for training", *validation, f"{data.test:,} for testing"])


def _list_classes(classes: tuple[str, ...]) -> str:
    rest = f", and {len(classes) - MOST_CLASSES:,} more" if len(classes) > MOST_CLASSES else ""
    return ", ".join(formats.shorten(label, 40) for label in classes[:MOST_CLASSES]) + rest


def arm_table(results: Results) -> ReportTable:
    """Table of arms."""
    rows = [
        [
            f"{arm.label}{' (baseline)' if arm.baseline else ''}",
            str(arm.num_members),
            arm.network or NONE,
            NONE if arm.parameters is None else f"{arm.parameters:,}",
            arm.batches,
            ", ".join(formats.diversity(value) for value in sorted(set(arm.diversities))),
        ]
        for arm in results.arms
    ]
    name = "Model" if results.model else "Arm"
    caption = "Arms" if len(results.arms) > 1 else name
    return make_table(caption, (name, "K", "Network", "Parameters", "Batches", "λ"), [("", rows)], kinds="tntntt")


def failure_table(results: Results) -> ReportTable | None:
    """Table of failed runs and damaged files, if any."""
    rows = []
    for run in results.failed:
        failure = run.failure or Failure(message="unknown reason")
        step = "" if failure.step is None else f"Step {failure.step:,}: "
        rows.append([run.run, step + failure.message])
    rows += [[file, reason] for file, reason in results.damaged.items()]
    heads = ("Run or file", "What happened")
    return make_table("Failed runs and damaged files", heads, [("", rows)], kinds="tt") if rows else None


# -- the columns of a user's table -------------------------------------------------------------------------------------


def column_table(table: TableSummary, rows: int) -> ReportTable:
    """Table of the target and how every column was read; `rows` is the number of training rows."""
    target = table.target
    kind = "classes" if target.classes else "number" if target.num_columns == 1 else f"{target.num_columns} numbers"
    cells = [[formats.shorten(target.name, 80), f"target: {kind}", _list_classes(target.classes) or NONE, "0"]]
    if target.columns:
        kinds = [kind if target.classes else _kind(column) for column in target.columns]
        named = zip(target.columns, kinds, strict=True)
        cells = [[formats.shorten(c.name, 80), f"target: {kind}", _values(c), "0"] for c, kind in named]
    for column in table.columns[:MOST_COLUMNS]:
        share = f" ({formats.number(100 * column.missing / rows, 1)} %)" if column.missing and rows else ""
        cells.append([formats.shorten(column.name, 80), _kind(column), _values(column), f"{column.missing:,}{share}"])
    rest = len(table.columns) - MOST_COLUMNS
    note = f"{rest:,} more are not listed." if rest > 0 else ""
    heads = ("Column", "Read as", "Values, or why it is left out", "Missing")
    return make_table(f"Columns ({len(table.columns):,})", heads, [("", cells)], note, "tttn")


def _kind(column: ColumnSummary) -> str:
    like = f" like {column.format}" if column.format not in ("", "ISO8601") else ""
    return "left out" if column.kind == "dropped" else column.kind + like


def _values(column: ColumnSummary) -> str:
    if column.kind == "dropped":
        return formats.shorten(column.why or "no reason recorded", 300)
    if column.kind == "category":
        shown = [f"{formats.shorten(label, 40)} ({count:,})" for label, count in column.categories]
        rest = max(column.num_categories, len(shown)) - len(shown)
        return ", ".join(shown) + (f", and {rest:,} more" if shown and rest else "") or NONE
    if column.min is None or column.max is None:
        return NONE
    if column.kind == "date":
        form = "%H:%M" if column.format.startswith(("%H", "%I")) else "%Y-%m-%d %H:%M"
        ends = [datetime(1970, 1, 1) + timedelta(seconds=value) for value in (column.min, column.max)]
        return " to ".join(f"{end:{form}}".removesuffix(" 00:00") for end in ends)
    mean = "" if column.mean is None or column.std is None else f"{quantity(column.mean)} ± {quantity(column.std)}, "
    return f"{mean}{quantity(column.min)} to {quantity(column.max)}"
