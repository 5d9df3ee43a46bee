"""Tables of results, for the page, the Markdown and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, at
from torchace.lab.report.metrics import Metric
from torchace.lab.report.results import Results
from torchace.lab.report.statistics import (
    Comparison,
    Difference,
    Summary,
    best_diversity,
    comparable_means,
    compare,
    has_unequal_seeds,
    paired_differences,
    summarize,
)
from torchace.lab.schema.results import ArmSummary, DiversitySearch, PaperRow

DIFFERENCE_COLUMNS = ("difference", "95 % interval", "p, corrected")


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


Rows = Iterable[Sequence[str | Cell]]


def make_table(
    caption: str,
    columns: Sequence[str | ReportColumn],
    sections: Iterable[tuple[str, Rows]],
    note: str = "",
    kinds: str = "",
) -> ReportTable:
    """Build a table from titled sections; `kinds` has one letter per column, `t` for text or `n` for numbers."""
    names = ["text" if letter == "t" else "number" for letter in kinds.ljust(len(columns), "n")]
    built = []
    for title, rows in sections:
        cells = [
            tuple(
                Cell(cell, kind=kind) if isinstance(cell, str) else cell for cell, kind in zip(row, names, strict=True)
            )
            for row in rows
        ]
        built.append(Section(title, tuple(cells)))
    heads = tuple(ReportColumn(column) if isinstance(column, str) else column for column in columns)
    return ReportTable(caption, heads, tuple(built), note)


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
    metrics, paper = results.metrics, results.experiment.paper
    groups = {"Ensemble": results.task.ensemble, "One member": results.task.member}
    if paper and any(row.error is not None for row in paper.rows):
        groups = {group: tuple(key.replace("accuracy", "error") for key in keys) for group, keys in groups.items()}
    pairs = [(arm, diversity) for arm in results.arms for diversity in results.diversities(arm)]
    matched = [row for row in (_paper_row(results, *pair) for pair in pairs) if row]
    shown = {key for row in matched for key in row.values}
    columns: list[str | ReportColumn] = ["λ", ReportColumn("Seeds", short_label="n")]
    for group, keys in groups.items():
        for key in keys:
            columns.append(ReportColumn(metrics[key].label, group, metrics[key].short_label))
            columns += [ReportColumn("paper", group)] * (key in shown)
    spread_metric = metrics[results.task.spread]
    columns.append(ReportColumn(spread_metric.label, "Members", spread_metric.short_label))
    sections = []
    for arm in results.arms:
        rows = []
        several = len(results.diversities(arm)) > 1
        best = {key: best_diversity(results, arm, key) if several else None for keys in groups.values() for key in keys}
        for diversity in results.grid(arm):
            row: list[str | Cell] = [formats.diversity(diversity), str(len(results.finished(arm, diversity)))]
            stated = _paper_row(results, arm, diversity)
            for key, best_of_metric in best.items():
                text = metrics[key].mean_sd(summarize_metric(results, arm, diversity, key))
                row.append(Cell(text, strong=best_of_metric == diversity))
                if key in shown:
                    value = stated.values.get(key) if stated else None
                    row.append(Cell(NONE if value is None else metrics[key].number(value), kind="paper"))
            spread = summarize_metric(results, arm, diversity, results.task.spread)
            rows.append([*row, spread_metric.mean_sd(spread)])
        sections.append((arm_title(arm), rows))
    return make_table("Results on the test set", columns, sections, _result_note(results))


def _paper_row(results: Results, arm: ArmSummary, diversity: float) -> PaperRow | None:
    rows = results.experiment.paper.rows if results.experiment.paper else ()
    return next((row for row in rows if row.matches(arm, diversity)), None)


def _result_note(results: Results) -> str:
    unequal = any(has_unequal_seeds(results, arm) for arm in results.arms)
    shared = " over the seeds that all its λ have" if unequal else ""
    note = (
        f"Mean ± standard deviation over seeds. Bold: the best mean of its arm{shared}, significant or not. "
        f"“One member”: the mean over members. {results.task.explain([*results.task.ensemble, results.task.spread])}"
    )
    if paper := results.experiment.paper:
        note += f" “paper”: {paper.table} of Shoham and Permuter (2020). {paper.note}".rstrip()
        pairs = [(arm, diversity) for arm in results.arms for diversity in results.diversities(arm)]
        missing = [row.title for row in paper.rows if not any(row.matches(*pair) for pair in pairs)]
        if missing:
            note += f" Rows of the paper without a run here: {', '.join(missing)}."
    return note


def detail_table(results: Results) -> ReportTable:
    """Calibration or squared error, and diversity, at every λ."""
    measured = {key for run in results.runs for key in results.scores(run)}
    pairs = [(group, key) for group, keys in results.task.details.items() for key in keys if key in measured]
    sections = []
    for arm in results.arms:
        rows = []
        for diversity in results.diversities(arm):
            found = [results.metrics[key].mean_sd(summarize_metric(results, arm, diversity, key)) for _, key in pairs]
            rows.append([formats.diversity(diversity), *found])
        sections.append((arm_title(arm), rows))
    columns = [ReportColumn("λ"), *(ReportColumn(results.metrics[key].label, group) for group, key in pairs)]
    return make_table(results.task.details_title, columns, sections, results.task.explain(results.task.diversity[1:]))


def difference_tables(results: Results) -> list[ReportTable]:
    """Paired differences to λ=0 of the arm, and to each baseline."""
    swept = [arm for arm in results.arms if len(results.diversities(arm)) > 1]
    others = [arm for arm in results.arms if not arm.baseline]
    tables = [_difference_table(results, "Each λ against λ=0 of the same arm", swept, None)]
    for baseline in results.arms:
        if baseline.baseline:
            tables.append(_difference_table(results, f"Each λ against {arm_title(baseline)}", others, baseline))
    return [table for table in tables if table.sections]


def _difference_table(
    results: Results, caption: str, arms: Sequence[ArmSummary], reference: ArmSummary | None
) -> ReportTable:
    compared: list[dict[str, Comparison]] = []
    for arm in arms:
        several = min(arm.num_members, (reference or arm).num_members) > 1
        keys = [key for key in results.task.differences if key != results.task.spread or several]
        found = {key: compare(results, arm, key, reference) for key in keys}
        compared.append({key: comparison for key, comparison in found.items() if comparison})
    metrics = [key for key in results.task.differences if any(key in tested for tested in compared)]
    columns: list[str | ReportColumn] = ["λ", "Pairs"]
    for key in metrics:
        columns += [ReportColumn(label, results.metrics[key].difference_label) for label in DIFFERENCE_COLUMNS]
    sections = []
    for arm, tested in zip(arms, compared, strict=True):
        rows = []
        for first in next(iter(tested.values())).differences if tested else ():
            row: list[str | Cell] = [formats.diversity(first.diversity), str(first.n)]
            for key in metrics:
                difference = tested[key].at(first.diversity) if key in tested else None
                row += difference_cells(results.metrics[key], difference)
            rows.append(row)
        if rows:
            sections.append((arm_title(arm), rows))
    families = [comparison for tested in compared for comparison in tested.values()]
    return make_table(caption, columns, sections, _difference_note(results, families, reference))


def difference_cells(metric: Metric, difference: Difference | None) -> list[Cell]:
    """Cells of `DIFFERENCE_COLUMNS`."""
    if difference is None:
        return [Cell(NONE)] * 3
    interval = Cell(difference.note, kind="text")
    if difference.joint_interval:
        interval = Cell(metric.interval(difference.joint_interval))
    return [
        Cell(metric.change(difference.mean), strong=difference.significant),
        interval,
        Cell(formats.p_value(difference.p), strong=difference.significant),
    ]


def _difference_note(results: Results, families: Sequence[Comparison], reference: ArmSummary | None) -> str:
    tests = sorted({comparison.tests for comparison in families} - {0})
    note = "Differences are paired by seed. "
    if reference is None:
        note = "Differences are paired: both sides have the same seed, and so the same initial weights. "
    if not tests:
        return note + "There are too few seeds, or no variation between them, for an interval."
    if tests[-1] > 1:
        number = formats.join([str(m) for m in tests]).replace(" and ", " or ")
        note += (
            "The intervals of one arm and column are joint 95 % intervals; p values are corrected likewise "
            f"(Bonferroni, {number} λ). "
        )
    covered = {
        key: {d.samples is not None for c in families if c.metric == key for d in c.differences if d.joint_interval}
        for key in results.task.differences
    }
    whole = [results.metrics[key].noun for key, found in covered.items() if found == {True}]
    if whole:
        rest = "; all others cover seeds alone" if any(False in found for found in covered.values()) else ""
        note += f"Intervals of {formats.join(whole)} cover new seeds and new test samples (crossed random effects)"
        note += f"{rest}. "
    else:
        note += "Intervals cover new seeds alone, not new test samples. "
    return note + "Bold: p below 0.05; the interval excludes 0."


def search_differences(search: DiversitySearch) -> tuple[Difference, ...]:
    """Return the paired differences of all candidates to λ=0."""
    others = {diversity: values for diversity, values in search.scores.items() if diversity != 0}
    return paired_differences(others, search.scores.get(0.0, {}))


def search_table(results: Results) -> ReportTable | None:
    """Validation scores of all candidates and their paired differences to λ=0, if there was a search."""
    search = results.experiment.search
    if search is None or not search.scores:
        return None
    metric, differences = results.metrics[search.metric], {d.diversity: d for d in search_differences(search)}
    rows: list[list[str | Cell]] = []
    for diversity, values in search.scores.items():
        chosen = diversity == search.chosen
        tried = next((str(i) for i, diversities in enumerate(search.rounds, 1) if diversity in diversities), NONE)
        rows.append(
            [
                Cell(f"{formats.diversity(diversity)}{' (chosen)' if chosen else ''}", strong=chosen),
                tried,
                str(len(values)),
                Cell(metric.mean_sd(summarize(list(values.values()))), strong=chosen),
                *difference_cells(metric, differences.get(diversity)),
            ]
        )
    columns: list[str | ReportColumn] = ["λ", "Round", "Seeds", metric.label]
    columns += [ReportColumn(label, "Against λ=0") for label in DIFFERENCE_COLUMNS]
    note = (
        f"Scores on the {search.split} data, mean ± standard deviation over seeds. Differences are paired by seed; "
        "their intervals are joint 95 % intervals over seeds alone. The score of the best λ is "
        f"biased by the choice; the gain of {at(search.chosen if search.best is None else search.best)} is measured "
        "with other seeds on the test data."
    )
    return make_table("Candidates for λ", columns, [("", rows)], note)
