"""A report as Markdown, and its main table for the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchace.lab.report._fields import extra
from torchace.lab.report.columns import schema_tables, target_facts
from torchace.lab.report.contested_cases import disputed_table
from torchace.lab.report.findings import findings, headline, remarks
from torchace.lab.report.plots import drawn_arms
from torchace.lab.report.results import Results
from torchace.lab.report.search_findings import search_table, search_verdict
from torchace.lab.report.setup import arm_table, configuration, facts, failure_table
from torchace.lab.report.tables import Cell, Column, Table, arm_title, detail_table, difference_tables, result_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text


def markdown(results: Results) -> str:
    """A complete results page: findings, tables, paired differences, the data of a fit, setup, failed runs.

    Args:
        results: A run directory.

    Returns:
        GitHub-flavoured Markdown that ends with a newline.
    """
    parts = [f"# {_escaped(results.title)}"]
    if results.description:
        parts.append(_escaped(results.description))
    parts.append(f"## {'In short' if results.is_fit else 'What the knob did'}")
    for arm, about in findings(results):
        parts.append(f"### {_escaped(arm_title(arm))}")
        if verdict := headline(results, arm):
            parts.append(_escaped(verdict))
        parts.append("\n".join(f"- **{_escaped(finding.topic)}.** {_escaped(finding.text)}" for finding in about))
    parts.append(f"### {'The whole fit' if results.is_fit else 'All arms'}")
    parts.append("\n".join(f"- **{_escaped(f.topic)}.** {_escaped(f.text)}" for f in remarks(results)))
    if verdict := search_verdict(results):
        parts += ["## The search for λ", _escaped(verdict)]
        if searched := search_table(results):
            parts.append(table_markdown(searched))
    parts += ["## Results", table_markdown(result_table(results))]
    if differences := difference_tables(results):
        parts.append("## Paired differences")
        for table in differences:
            parts += [f"### {_escaped(table.caption)}", table_markdown(table)]
    details = detail_table(results)
    parts += [f"## {details.caption}", table_markdown(details)]
    if disputed := disputed_table(results, drawn_arms(results)):
        parts += [f"## {disputed.caption}", table_markdown(disputed)]
    if results.data.schema:
        parts += ["## The data", _listed(target_facts(results))]
        for table in schema_tables(results):
            parts += [f"### {table.caption}", table_markdown(table)]
        if notes := results.data.schema.notes:
            parts.append("\n".join(f"- {_escaped(note)}" for note in notes))
    parts += ["## Setup", table_markdown(arm_table(results))]
    parts.append(_listed(facts(results)))
    if config := configuration(results).replace("<", "\\u003c"):  # the same to JSON, and no tag to any reader
        fence = "`" * (3 + max((len(ticks) for ticks in re.findall("`{3,}", config)), default=0))
        parts.append(f"{fence}json\n{config}\n{fence}")
    if failures := failure_table(results):
        parts += [f"## {failures.caption}", table_markdown(failures)]
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """A table as Markdown, its sections as rows of their own, its note below.

    Args:
        table: A table.

    Returns:
        The lines, without a final newline.
    """
    heads = [f"{column.group}: {column.label}" if column.group else column.label for column in table.columns]
    aligned = [":--" if kind == "text" else "--:" for kind in table.kinds]
    lines = [_line([_escaped(head) for head in heads]), _line(aligned)]
    for section in table.sections:
        if section.title:
            lines.append(_line([f"**{_escaped(section.title)}**"] + [""] * (len(heads) - 1)))
        for row in section.rows:
            lines.append(_line([f"**{_escaped(c.text)}**" if c.strong else _escaped(c.text) for c in row]))
    note = f"\n\n{_escaped(table.note)}" if table.note else ""
    return "\n".join(lines) + note


def rich_table(results: Results) -> RichTable:
    """The result table for a terminal.

    Args:
        results: A run directory.

    Returns:
        A `rich.table.Table`, to print with a `rich.console.Console`.
    """
    with extra("rich"):
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

    table = result_table(results)
    # the paper's numbers for single members stay on the page: a terminal is narrow
    shown = [i for i, column in enumerate(table.columns) if (column.group, column.label) != ("One member", "paper")]
    note = "Mean ± standard deviation over seeds; bold: best of its arm."
    if results.paper:
        note += f" paper: {results.paper.table} of Shoham and Permuter (2020)."
    drawn = RichTable(
        title=Text(results.title), caption=Text(note), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    heads = [_rich_head(table.columns[i]) for i in shown]
    rows = [row for section in table.sections for row in section.rows]
    texts = [
        [*head.split("\n"), *(_rich_text(table, i, row[i]) for row in rows)]
        for i, head in zip(shown, heads, strict=True)
    ]
    # the arms' titles stand in the first column and give way to the numbers where eighty characters hold both
    room = 78 - sum(2 + max(map(len, column)) for column in texts[1:])
    drawn.add_column(Text(heads[0]), min_width=10, max_width=room if 10 <= room <= 28 else 28, overflow="fold")
    for head in heads[1:]:
        drawn.add_column(Text(head), justify="right")
    for section in table.sections:
        drawn.add_section()
        drawn.add_row(Text(section.title, style="italic", overflow="fold"))
        for row in section.rows:
            drawn.add_row(*(_rich_cell(table, i, row[i]) for i in shown))
    return drawn


def _rich_head(column: Column) -> str:
    short = {"Cross entropy": "CE", "Accuracy": "Acc.", "Disagreement, %": "Disagr.\n%", "Seeds": "n"}
    label = short.get(column.label, column.label.replace(", ×", "\n×"))
    return f"Member\n{label}" if column.group == "One member" else label


def _rich_cell(table: Table, index: int, cell: Cell) -> Text:
    from rich.text import Text

    style = "bold" if cell.strong else "dim" if cell.kind == "paper" else ""
    text = _rich_text(table, index, cell)
    return Text(text if index else f"  {text}", style=style)


def _rich_text(table: Table, index: int, cell: Cell) -> str:
    """What a terminal shows of a cell: of the ensemble mean and deviation, of single members the mean."""
    return cell.text if table.columns[index].group in ("", "Ensemble") else cell.text.split(" ±")[0]


def _listed(pairs: list[tuple[str, str]]) -> str:
    return "\n".join(f"- **{heading}**: {_escaped(text)}" for heading, text in pairs)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = re.sub(r"([\\`*_\[\]|~])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    return re.sub(r"^(#|>|[+-](?=\s))", r"\\\1", text)
