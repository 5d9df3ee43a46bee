"""Data, arms, hardware and failures, as facts and tables."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, quantity
from torchace.lab.report.results import Results
from torchace.lab.report.tables import ReportTable, make_table
from torchace.lab.schema.results import ColumnSummary, DataSummary, TableSummary

MOST = 1000  # columns or classes to list

Facts = list[tuple[str, str]]


def facts(results: Results) -> Facts:
    """Data, seeds, hardware, versions and time."""
    experiment = results.experiment
    found = [("Data", _data(results.data, results.task.name))]
    if any(results.arm_data(arm) != results.data for arm in results.arms):
        labels: dict[str, list[str]] = {}
        for arm in results.arms:
            labels.setdefault(_data(results.arm_data(arm), results.task.name), []).append(f"“{arm.label}”")
        found = [(f"Data of {formats.join(arms)}", text) for text, arms in labels.items()]
    seeds = experiment.seeds
    time = formats.duration(experiment.seconds)
    if experiment.started:
        time += f", started {formats.timestamp(experiment.started)}"
    hardware, versions = (
        "; ".join(f"{key} {value}" for key, value in stated.items() if value not in (None, "")) or NONE
        for stated in (experiment.hardware, experiment.versions)
    )
    listed = f"{len(seeds)} ({', '.join(map(str, seeds))})" if seeds else NONE
    return [*found, ("Seeds", listed), ("Hardware", hardware), ("Versions", versions), ("Time", time)]


def _data(data: DataSummary, task: str) -> str:
    text, names = f"{data.name}: {_sizes(data)}", ("label", "labels") if task == "multilabel" else ("class", "classes")
    if data.classes:
        listed = ", ".join(data.classes[:10])
        rest = f", and {len(data.classes) - 10} more" if len(data.classes) > 10 else ""
        text += f"; {formats.count(len(data.classes), *names)} ({listed}{rest})"
    if data.image_shape:
        text += f"; images {' × '.join(str(side) for side in data.image_shape)}"
    elif data.inputs:
        text += f"; inputs {', '.join(data.inputs)}"
    return text + "".join(f". {note.rstrip('.')}" for note in data.notes)


def _sizes(data: DataSummary) -> str:
    validation = [f"{data.validation:,} for validation"] if data.validation else []
    return ", ".join([f"{data.train:,} for training", *validation, f"{data.test:,} for testing"])


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
    return make_table("Arms", ("Arm", "K", "Network", "Parameters", "Batches", "λ"), [("", rows)], kinds="tntntt")


def layer_tables(results: Results) -> list[ReportTable]:
    """Tables of the layers of users' own networks and how they are computed for all members."""
    return [
        make_table(f"Layers: {arm.label}", ("Layer", "Function", "Computed"), [("", arm.layers)], kinds="ttt")
        for arm in results.arms
        if arm.layers
    ]


def failure_table(results: Results) -> ReportTable | None:
    """Table of failed runs and damaged files, if any."""
    labels = {arm.name: arm.label for arm in results.arms}
    rows = []
    for run in results.failed:
        step, member = (run.failure.step, run.failure.member) if run.failure else (None, None)
        places = [] if step is None else [f"step {step:,}"]
        places += [] if member is None else [f"member {member}"]
        message = run.failure.message if run.failure else NONE
        diversity = formats.diversity(run.diversity)
        rows.append([run.run, labels[run.arm], diversity, str(run.seed), ", ".join(places) or NONE, message])
    rows += [[damaged.file, NONE, NONE, NONE, NONE, damaged.reason] for damaged in results.damaged]
    if not rows:
        return None
    columns = ("Run or file", "Arm", "λ", "Seed", "Where", "What happened")
    return make_table("Failed runs and damaged files", columns, [("", rows)], kinds="ttnntt")


# -- the columns of a user's table -------------------------------------------------------------------------------------


def target_facts(results: Results) -> Facts:
    """Target, columns and rows of a table; empty for other data."""
    table = results.data.table
    if table is None:
        return []
    classes = table.target.classes
    kind = "a number" if results.task.name == "regression" else "a class"
    if table.target.num_columns > 1:
        kind = f"{table.target.num_columns} numbers"
    if classes:
        names = ", ".join(formats.shorten(label, 40) for label in classes[:10])
        more = ", …" if len(classes) > 10 else ""
        kind = f"one of {formats.count(len(classes), 'class', 'classes')}: {names}{more}"
    kinds = Counter[str](column.kind for column in table.columns)
    plurals = {"number": "numbers", "category": "categories", "date": "dates"}
    parts = [formats.count(kinds[noun], noun, plural) for noun, plural in plurals.items() if kinds[noun]]
    used = formats.join(parts) if parts else "nothing"
    if kinds["dropped"]:
        used += f"; {formats.count(kinds['dropped'], 'column')} left out"
    target = f"{formats.shorten(table.target.name, 80)}, {kind}"
    return [("Target", target), ("Predicted from", used), ("Rows", _sizes(results.data))]


def all_classes(results: Results) -> str:
    """All classes of a target with more than ten; else empty."""
    classes = results.data.table.target.classes if results.data.table else ()
    if len(classes) <= 10:
        return ""
    rest = f", and {len(classes) - MOST:,} more" if len(classes) > MOST else ""
    return ", ".join(formats.shorten(label, 80) for label in classes[:MOST]) + rest


def column_table(table: TableSummary, rows: int) -> ReportTable | None:
    """Table of how every column was read, in the order of the file; `rows` is the number of training rows."""
    cells = []
    for column in table.columns[:MOST]:
        like = f" like {column.format}" if column.format not in ("", "ISO8601") else ""
        kind = "left out" if column.kind == "dropped" else column.kind + like
        share = f" ({formats.number(100 * column.missing / rows, 1)} %)" if column.missing and rows else ""
        cells.append([formats.shorten(column.name, 80), kind, _values(column), f"{column.missing:,}{share}"])
    if not cells:
        return None
    cells.insert(0, _target_cells(table))
    note = f"{len(table.columns) - MOST:,} more are not listed." if len(table.columns) > MOST else ""
    heads = ("Column", "Read as", "Values, or why it is left out", "Missing")
    return make_table(f"Columns ({len(table.columns):,})", heads, [("", cells)], note, "tttn")


def _target_cells(table: TableSummary) -> list[str]:
    target, classes = table.target, [formats.shorten(label, 40) for label in table.target.classes]
    kind = "classes" if classes else "number" if target.num_columns == 1 else "numbers"
    rest = f", and {len(classes) - 8:,} more" if len(classes) > 8 else ""
    return [formats.shorten(target.name, 80), f"target: {kind}", ", ".join(classes[:8]) + rest or NONE, "0"]


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
        is_time = (column.format or "").startswith(("%H", "%I"))
        return " to ".join(_date(value, is_time) for value in (column.min, column.max))
    mean = "" if column.mean is None or column.std is None else f"{quantity(column.mean)} ± {quantity(column.std)}, "
    return f"{mean}{quantity(column.min)} to {quantity(column.max)}"


def _date(seconds: float, is_time: bool) -> str:
    """Format seconds since 1970 to the minute, or the day at midnight; a time of day without its day."""
    moment = datetime(1970, 1, 1) + timedelta(seconds=seconds)
    if is_time:
        return f"{moment:%H:%M}"
    return f"{moment:%Y-%m-%d}" if seconds % 86_400 == 0 else f"{moment:%Y-%m-%d %H:%M}"
