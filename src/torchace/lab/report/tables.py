"""The tables of a report, as plain rows that the page, the Markdown and the terminal draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE, Metric
from torchace.lab.report.results import Arm, PaperRow, Results
from torchace.lab.report.statistics import Comparison, Difference, Summary, compare, lowest, summary, unequal_seeds

JUDGED_BY = {"accuracy": "error", "member_accuracy": "member_error", "r2": "mse"}
"""Where high is good: what is low where it is high."""


@dataclass(frozen=True)
class Column:
    """A column's heading, and the heading it stands under with its neighbours."""

    label: str
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """A text; `strong` where it stands out, `kind` "number", "paper" or "text"."""

    text: str
    strong: bool = False
    kind: str = "number"


@dataclass(frozen=True)
class Section:
    """Rows under one heading; the first cell of a row names it."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Table:
    """A caption, columns, sections, and a note on how to read them."""

    caption: str
    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    note: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each column's cells, as the first row has them."""
        first = next((row for section in self.sections for row in section.rows), ())
        return tuple(cell.kind for cell in first) or ("number",) * len(self.columns)

    @property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """Group headings with the number of columns each spans, empty where no column has one."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return tuple(spans) if any(group for group, _ in spans) else ()


def arm_title(arm: Arm) -> str:
    """An arm's label, with its number of members where the label does not give it."""
    notes = [] if f"K={arm.num_members}" in arm.label else [f"K={arm.num_members}"]
    notes += ["baseline"] if arm.baseline else []
    return f"{arm.label} ({', '.join(notes)})" if notes else arm.label


def summarize(results: Results, arm: Arm, diversity: float, metric: str, split: str = "test") -> Summary | None:
    """A metric over the seeds of an arm at one λ, None where nothing was measured."""
    values = results.values(arm, diversity, metric, split)
    return summary(list(values.values())) if values else None


def paper_row(results: Results, arm: Arm, diversity: float) -> PaperRow | None:
    """The row of the paper that stands beside an arm at one λ."""
    rows = results.paper.rows if results.paper else ()
    return next((row for row in rows if row.matches(arm, diversity)), None)


def result_table(results: Results) -> Table:
    """Ensemble and members at every λ, the paper's numbers beside ours where it has them.

    Args:
        results: A run directory.

    Returns:
        One section an arm; each arm's best scores stand out.
    """
    metrics = results.metrics
    groups = {"Ensemble": results.task.ensemble, "One member": results.task.member}
    if results.paper and results.paper.states_error:
        groups = {group: tuple(key.replace("accuracy", "error") for key in keys) for group, keys in groups.items()}
    shown = _paper_metrics(results)
    columns = [Column("λ"), Column("Seeds")]
    for group, keys in groups.items():
        for key in keys:
            columns.append(Column(metrics[key].label, group))
            if key in shown:
                columns.append(Column("paper", group))
    columns.append(Column(metrics[results.task.spread].label, "Members"))
    sections = []
    for arm in results.tested:
        rows = []
        best = {key: _best(results, arm, key) for keys in groups.values() for key in keys}
        for diversity in results.grid(arm):
            row = [Cell(formats.diversity(diversity)), Cell(str(len(results.finished(arm, diversity))))]
            paper = paper_row(results, arm, diversity)
            for key, best_diversity in best.items():
                text = metrics[key].mean_sd(summarize(results, arm, diversity, key))
                row.append(Cell(text, strong=best_diversity == diversity))
                if key in shown:
                    row.append(_paper_cell(paper, metrics[key]))
            row.append(_measured(results, arm, diversity, results.task.spread))
            rows.append(tuple(row))
        sections.append(Section(arm_title(arm), tuple(rows)))
    return Table("Results on the test set", tuple(columns), tuple(sections), _result_note(results))


def _paper_metrics(results: Results) -> set[str]:
    found = {(arm, diversity) for arm in results.arms for diversity in results.diversities(arm)}
    rows = [paper_row(results, arm, diversity) for arm, diversity in found]
    return {metric for row in rows if row for metric in row.numbers}


def _best(results: Results, arm: Arm, metric: str) -> float | None:
    """The λ that stands out: of the lowest mean, for accuracies of the lowest error; none where there is one λ."""
    if len(results.diversities(arm)) < 2:
        return None
    return lowest(results, arm, JUDGED_BY.get(metric, metric))


def _paper_cell(row: PaperRow | None, metric: Metric) -> Cell:
    if row is None or metric.key not in row.numbers:
        return Cell(NONE, kind="paper")
    return Cell(metric.number(row.numbers[metric.key]), kind="paper")


def _measured(results: Results, arm: Arm, diversity: float, metric: str) -> Cell:
    if arm.num_members == 1 and metric in results.task.diversity:
        return Cell(NONE)
    return Cell(results.metrics[metric].mean_sd(summarize(results, arm, diversity, metric)))


def _result_note(results: Results) -> str:
    unequal = any(unequal_seeds(results, arm) for arm in results.tested)
    shared = " over the seeds that all its λ have" if unequal else ""
    note = (
        f"Mean ± standard deviation over seeds. Bold: the best mean of its arm{shared}, beyond the noise or not. "
        f"“One member”: the mean over members. {results.task.spread_note}"
    )
    if results.model and len(results.tested) > 1:
        note += " The model that was kept is one training; the others say how much of its score is chance."
    if results.paper:
        note += f" “paper”: {results.paper.table} of Shoham and Permuter (2020). {results.paper.note}".rstrip()
        found = [(arm, diversity) for arm in results.arms for diversity in results.diversities(arm)]
        missing = [row.label for row in results.paper.rows if not any(row.matches(*pair) for pair in found)]
        if missing:
            note += f" Rows of the paper without a run here: {', '.join(missing)}."
    return note


def detail_table(results: Results) -> Table:
    """Calibration (of a regression, squared error) and diversity at every λ.

    Args:
        results: A run directory.

    Returns:
        One section an arm.
    """
    measured = {key for run in results.runs if run.finished for key in run.metrics.get("test", {})}
    pairs = [(group, metric) for group, keys in results.task.details.items() for metric in keys if metric in measured]
    sections = [
        Section(
            arm_title(arm),
            tuple(
                (
                    Cell(formats.diversity(diversity)),
                    *(_measured(results, arm, diversity, metric) for _, metric in pairs),
                )
                for diversity in results.diversities(arm)
            ),
        )
        for arm in results.tested
    ]
    columns = (Column("λ"), *(Column(results.metrics[metric].label, group) for group, metric in pairs))
    return Table(results.task.details_title, columns, tuple(sections), results.task.details_note)


def difference_tables(results: Results) -> list[Table]:
    """Paired differences: each λ against λ=0 of its arm, then against each baseline arm.

    Args:
        results: A run directory.

    Returns:
        The tables that have rows.
    """
    swept = [arm for arm in results.tested if len(results.diversities(arm)) > 1]
    tables = [_difference_table(results, "Each λ against λ=0 of the same arm", swept, None)]
    for baseline in results.swept:
        if baseline.baseline:
            others = [arm for arm in results.swept if not arm.baseline]
            tables.append(_difference_table(results, f"Each λ against {arm_title(baseline)}", others, baseline))
    return [table for table in tables if table.sections]


def _difference_table(results: Results, caption: str, arms: Sequence[Arm], reference: Arm | None) -> Table:
    compared: dict[Arm, dict[str, Comparison]] = {}
    for arm in arms:
        plural = min(arm.num_members, (reference or arm).num_members) > 1
        metrics = [metric for metric in results.task.differences if metric != results.task.spread or plural]
        found = {metric: compare(results, arm, metric, reference) for metric in metrics}
        kept = {metric: comparison for metric, comparison in found.items() if comparison}
        if kept:
            compared[arm] = kept
    metrics = [key for key in results.task.differences if any(key in kept for kept in compared.values())]
    columns = [Column("λ"), Column("Pairs")]
    for metric in metrics:
        label = results.metrics[metric].label.replace(", %", ", points")
        columns += [Column("difference", label), Column("95 % interval", label), Column("p, corrected", label)]
    sections = tuple(
        Section(arm_title(arm), _difference_rows(results, kept, metrics)) for arm, kept in compared.items()
    )
    return Table(caption, tuple(columns), sections, _difference_note(compared, reference))


def _difference_rows(
    results: Results, kept: dict[str, Comparison], metrics: Sequence[str]
) -> tuple[tuple[Cell, ...], ...]:
    rows = []
    for first in next(iter(kept.values())).differences:
        row = [Cell(formats.diversity(first.diversity)), Cell(str(first.n))]
        for metric in metrics:
            difference = kept[metric].at(first.diversity) if metric in kept else None
            row += difference_cells(results.metrics[metric], difference)
        rows.append(tuple(row))
    return tuple(rows)


def difference_cells(metric: Metric, difference: Difference | None) -> list[Cell]:
    """A difference, its interval and its corrected p value."""
    if difference is None:
        return [Cell(NONE), Cell(NONE), Cell(NONE)]
    interval = metric.interval(difference.together) if difference.together else difference.note
    return [
        Cell(metric.change(difference.mean), strong=difference.significant),
        Cell(interval, kind="number" if difference.together else "text"),
        Cell(formats.p_value(difference.corrected), strong=difference.significant),
    ]


def _difference_note(compared: dict[Arm, dict[str, Comparison]], reference: Arm | None) -> str:
    tests = sorted({comparison.tests for kept in compared.values() for comparison in kept.values()})
    note = "Differences are paired: the same seed, and so the same initial weights, on both sides. "
    if reference is not None:
        note = "Differences are paired by seed. "
    if not tests or tests[-1] == 0:
        return note + "There are too few seeds, or no differences between them, for an interval."
    if tests[-1] == 1:
        return note + f"{_covered(compared)} Bold: p below 0.05."
    number = " or ".join(str(m) for m in tests if m)
    return note + (
        f"The intervals of one arm and column hold together with 95 %, and its p values are corrected alike "
        f"(Bonferroni, {number} λ). {_covered(compared)} Bold: p below 0.05, where the interval leaves out 0."
    )


def _covered(compared: dict[Arm, dict[str, Comparison]]) -> str:
    """What the intervals of each metric cover."""
    by_metric: dict[str, set[bool]] = {}
    for kept in compared.values():
        for metric, comparison in kept.items():
            tested = {difference.samples is not None for difference in comparison.differences if difference.together}
            by_metric.setdefault(metric, set()).update(tested)
    whole = [metric.replace("_", " ") for metric, found in by_metric.items() if found == {True}]
    if not whole:
        return "They cover the noise between seeds alone, not that of the test samples."
    rest = "" if len(whole) == len(by_metric) else "; all others cover seeds alone"
    return (
        f"Intervals of {formats.listed(whole)} are for new seeds and new test samples (crossed random effects){rest}."
    )
