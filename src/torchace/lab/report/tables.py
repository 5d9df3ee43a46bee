"""Tables of results, data, arms and failures, for the page, the Markdown and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, Metric, at, quantity
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import (
    Difference,
    Summary,
    best_diversity,
    comparable_means,
    compare,
    paired_differences,
    summarize,
)
from torchace.lab.schema.results import ArmSummary, ColumnSummary, Failure, PaperRow, TableSummary

DIFFERENCE_COLUMNS = ("difference", "95 % interval")
MOST_COLUMNS = 1000  # to list
MOST_CLASSES = 10


@dataclass(frozen=True)
class ReportColumn:
    """Heading of a column and of its group."""

    label: str
    group: str = ""
    short_label: str = ""  # in a terminal


@dataclass(frozen=True)
class Cell:
    """A text; `kind` is "number", "paper" or "text", `image` the data URI of a picture above the text."""

    text: str
    strong: bool = False
    kind: str = "number"
    image: str = ""


@dataclass(frozen=True)
class Section:
    """Rows under one heading."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class ReportTable:
    """A table with a caption and a note."""

    caption: str
    columns: tuple[ReportColumn, ...]
    sections: tuple[Section, ...]
    note: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each column."""
        first = next((row for section in self.sections for row in section.rows), ())
        return tuple(cell.kind for cell in first) or ("number",) * len(self.columns)

    @property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """Group headings with their numbers of columns, if any."""
        spans = [(group, len(list(columns))) for group, columns in groupby(column.group for column in self.columns)]
        return tuple(spans) if any(group for group, _ in spans) else ()


Row = Sequence[str | Cell]


def make_table(
    caption: str,
    columns: Sequence[str | ReportColumn],
    sections: Iterable[tuple[str, Iterable[Row]]],
    note: str = "",
    kinds: str = "",
) -> ReportTable:
    """Build a table from titled sections; `kinds` has one letter per column, `t` for text or `n` for numbers."""
    names = ["text" if letter == "t" else "number" for letter in kinds.ljust(len(columns), "n")]

    def cells(row: Row) -> tuple[Cell, ...]:
        return tuple(Cell(c, kind=kind) if isinstance(c, str) else c for c, kind in zip(row, names, strict=True))

    built = tuple(Section(title, tuple(cells(row) for row in rows)) for title, rows in sections)
    heads = tuple(ReportColumn(column) if isinstance(column, str) else column for column in columns)
    return ReportTable(caption, heads, built, note)


def arm_title(arm: ArmSummary) -> str:
    """Return an arm's label with its number of members."""
    notes = [] if f"K={arm.num_members}" in arm.label else [f"K={arm.num_members}"]
    notes += ["baseline"] if arm.baseline else []
    return f"{arm.label} ({', '.join(notes)})" if notes else arm.label


def main_arms(results: Results) -> list[ArmSummary]:
    """Return the arms with several members, without baselines unless there are no others.

    Of the settings of an arm, such as learning rates, it is the one with the lowest loss.
    """
    several = [arm for arm in results.arms if arm.num_members > 1 and results.diversities(arm)]
    several = [arm for arm in several if not arm.baseline] or several
    groups: dict[str, list[ArmSummary]] = {}
    for arm in several:
        groups.setdefault(arm.variant_of or arm.name, []).append(arm)

    def lowest_loss(arm: ArmSummary) -> float:
        split = "validation" if results.arm_data(arm).validation else "test"
        return min(comparable_means(results, arm, results.task.loss, split).values(), default=math.inf)

    return [min(group, key=lowest_loss) for group in groups.values()]


def summarize_metric(results: Results, arm: ArmSummary, diversity: float, metric: str) -> Summary | None:
    """Summarize a metric of an arm at one λ; None if not measured."""
    if arm.num_members == 1 and metric in results.task.diversity:
        return None
    values = results.values(arm, diversity, metric)
    return summarize(list(values.values())) if values else None


def result_table(results: Results) -> ReportTable:
    """Scores of ensemble and members at every λ, with the paper's numbers."""
    task, paper = results.task, results.experiment.paper
    groups = {"Ensemble": task.ensemble, "One member": task.member}
    if paper and any(row.error is not None for row in paper.rows):
        groups = {group: tuple(key.replace("accuracy", "error") for key in keys) for group, keys in groups.items()}
    of_arm = " of its arm" if len(results.arms) > 1 else ""
    note = (
        f"Mean ± standard deviation over seeds. Bold: the best mean{of_arm} over the seeds that "
        "all λ have, significant or not. “One member”: the mean over members. "
        f"{task.explain([*task.ensemble, task.spread])}"
    )
    if paper:
        note += f" “paper”: {paper.table} of Shoham and Permuter (2020). {paper.note}".rstrip()
    return _score_table(
        results, "Results on the test set", {**groups, "Members": (task.spread,)}, note, paper.rows if paper else ()
    )


def detail_table(results: Results, *, spread: bool = False) -> ReportTable:
    """Calibration or squared error, and diversity, at every λ; `spread`: also what `result_table` has of it."""
    task = results.task
    diversity = tuple(key for key in task.diversity if spread or key != task.spread)
    return _score_table(results, task.details_title, {**task.details, "Diversity": diversity}, task.explain(diversity))


def _score_table(
    results: Results, caption: str, groups: Mapping[str, Sequence[str]], note: str, paper: Sequence[PaperRow] = ()
) -> ReportTable:
    """Means of metrics at every λ, with the numbers of the paper's rows beside them."""

    def paper_values(arm: ArmSummary, diversity: float) -> dict[str, float]:
        return next((row.values for row in paper if row.matches(arm, diversity)), {})

    metrics, cells = results.metrics, [(arm, d) for arm in results.arms for d in results.diversities(arm)]
    pairs = [(group, key) for group, keys in groups.items() for key in keys]
    pairs = [(group, key) for group, key in pairs if any(summarize_metric(results, *cell, key) for cell in cells)]
    shown = {key for cell in cells for key in paper_values(*cell)}
    columns: list[str | ReportColumn] = ["λ", ReportColumn("Seeds", short_label="n")]
    for group, key in pairs:
        columns.append(ReportColumn(metrics[key].label, group, metrics[key].short_label))
        columns += [ReportColumn("paper", group)] * (key in shown)
    sections = []
    for arm in results.arms:
        rows = []
        scored = [key for group, key in pairs if group in ("Ensemble", "One member")]
        best = {key: best_diversity(results, arm, key) for key in scored if len(results.diversities(arm)) > 1}
        for diversity in results.diversities(arm):
            row: list[str | Cell] = [formats.diversity(diversity), str(len(results.finished(arm, diversity)))]
            stated = paper_values(arm, diversity)
            for _, key in pairs:
                text = metrics[key].mean_sd(summarize_metric(results, arm, diversity, key))
                row.append(Cell(text, strong=best.get(key) == diversity))
                if key in shown:
                    row.append(Cell(metrics[key].number(stated[key]) if key in stated else NONE, kind="paper"))
            rows.append(row)
        sections += [(arm_title(arm), rows)] * bool(rows)
    return make_table(caption, columns, sections, note)


def difference_tables(results: Results) -> list[ReportTable]:
    """Paired differences to λ=0 of the arm, and to each baseline."""
    swept = [arm for arm in results.arms if len(results.diversities(arm)) > 1]
    others = [arm for arm in results.arms if not arm.baseline]
    of_arm = " of the same arm" if len(results.arms) > 1 else ""
    tables = [_difference_table(results, f"Each λ against λ=0{of_arm}", swept, None)]
    for baseline in results.arms:
        if baseline.baseline:
            tables.append(_difference_table(results, f"Each λ against {arm_title(baseline)}", others, baseline))
    return [table for table in tables if table.sections]


def _difference_table(
    results: Results, caption: str, arms: Sequence[ArmSummary], reference: ArmSummary | None
) -> ReportTable:
    keys, sections, shown = results.task.differences, [], list[Difference]()
    for arm in arms:
        found = {key: compare(results, arm, key, reference) for key in keys}
        if min(arm.num_members, (reference or arm).num_members) == 1:
            found[results.task.spread] = None
        shown += [d for comparison in found.values() if comparison for d in comparison.differences]
        rows = list[Row]()
        for diversity in results.diversities(arm):
            tested = {key: comparison.at(diversity) if comparison else None for key, comparison in found.items()}
            if first := next((difference for difference in tested.values() if difference), None):
                cells = [cell for key in keys for cell in difference_cells(results.metrics[key], tested[key])]
                rows.append([formats.diversity(diversity), str(first.n), *cells])
        if rows:
            sections.append((arm_title(arm), rows))
    columns: list[str | ReportColumn] = ["λ", "Pairs"]
    columns += [
        ReportColumn(label, results.metrics[key].difference_label) for key in keys for label in DIFFERENCE_COLUMNS
    ]
    return make_table(caption, columns, sections, _difference_note([d for d in shown if d.joint_interval]))


def difference_cells(metric: Metric, difference: Difference | None) -> list[Cell]:
    """Cells of `DIFFERENCE_COLUMNS`."""
    if difference is None:
        return [Cell(NONE), Cell(NONE)]
    interval = Cell(difference.note, kind="text")
    if difference.joint_interval:
        interval = Cell(metric.interval(difference.joint_interval))
    change = metric.change(difference.mean, with_sign=difference.significant)
    return [Cell(change, strong=difference.significant), interval]


def _difference_note(tested: Sequence[Difference]) -> str:
    if not tested:
        return "There are too few seeds, or no variation between them, for an interval."
    return (
        "Differences are paired by seed. Intervals are corrected for the number of λ of an arm (Bonferroni, up to "
        f"{max(d.tests for d in tested)}) and cover {interval_coverage(tested)}. Bold: the interval excludes 0."
    )


def interval_coverage(tested: Sequence[Difference]) -> str:
    """Say what the intervals of tested differences cover."""
    covered = {difference.samples is not None for difference in tested}
    if covered == {False}:
        return "new seeds alone"
    return "new seeds and new test samples" + (" where these were recorded" if False in covered else "")


def search_table(results: Results) -> ReportTable | None:
    """Validation scores of all candidates and their paired differences to λ=0, if there was a search."""
    search = results.experiment.search
    if search is None or not search.scores:
        return None
    others = {diversity: values for diversity, values in search.scores.items() if diversity != 0}
    differences = {d.diversity: d for d in paired_differences(others, search.scores.get(0.0, {}))}
    metric, rows = results.metrics[search.metric], list[Row]()
    for diversity, values in search.scores.items():
        chosen = diversity == search.chosen
        label = Cell(f"{formats.diversity(diversity)}{' (chosen)' if chosen else ''}", strong=chosen)
        score = Cell(metric.mean_sd(summarize(list(values.values()))), strong=chosen)
        rows.append([label, str(len(values)), score, *difference_cells(metric, differences.get(diversity))])
    columns: list[str | ReportColumn] = ["λ", "Seeds", metric.label]
    columns += [ReportColumn(label, "Against λ=0") for label in DIFFERENCE_COLUMNS]
    note = (
        f"Scores on the {search.split} data, mean ± standard deviation over seeds. Differences are paired by seed; "
        "their intervals are joint 95 % intervals over seeds alone. The score of the best λ is biased by the choice; "
        f"the gain of {at(search.chosen if search.best is None else search.best)} is measured with other seeds on the "
        "test data."
    )
    return make_table("Candidates for λ", columns, [("", rows)], note)


# -- arms and failures -------------------------------------------------------------------------------------------------


def list_classes(classes: tuple[str, ...]) -> str:
    """Return the names of the first classes and the number of others."""
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
    cells = [[formats.shorten(target.name, 80), f"target: {kind}", list_classes(target.classes) or NONE, "0"]]
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
