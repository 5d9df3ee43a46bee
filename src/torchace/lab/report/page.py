"""The report as HTML and Markdown, and the result table for a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._extras import missing_extra
from torchace._figures import STYLE, FigureSpec, render_svg
from torchace._files import write_atomic
from torchace.lab.report import setup, tables
from torchace.lab.report.array_plots import array_figures, contested_table
from torchace.lab.report.findings import Finding, Headline, advice, findings, remarks
from torchace.lab.report.formats import at, capitalize
from torchace.lab.report.gains import (
    axis_findings,
    axis_tables,
    gain_figures,
    gain_table,
    has_many_arms,
    headline,
    sweep_headline,
)
from torchace.lab.report.model_findings import comparison_figures, comparison_tables, model_findings, model_headline
from torchace.lab.report.plots import lambda_figures
from torchace.lab.report.results import Results, read_results
from torchace.lab.schema.reading import ResultFileError

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class PageSection:
    """A heading and its items; their kinds are table, figures, findings, facts, text, list and code."""

    title: str
    items: list[tuple[str, Any]]
    is_open: bool = False


@dataclass(frozen=True)
class Page:
    """The contents of a report; `notes` stand below the headline, `picture` beside it."""

    headline: Headline | None
    notes: list[tuple[str, str]]
    picture: FigureSpec | None
    warnings: list[Finding]
    sections: list[PageSection]


ArmFindings = tuple[str, list[Finding]]  # title, findings


def contents(results: Results) -> Page:
    """Return the contents of the report."""
    many, loss = has_many_arms(results), results.task.loss
    headline_ = model_headline(results) if results.model else sweep_headline(results)
    specs = figures(results)
    first = ("baselines", f"difference_{loss}", "gain_map", loss)
    picture = next((spec for name in first for spec in specs if spec.name == name), specs[0] if specs else None)
    found: list[ArmFindings] = []
    for arm in () if many else results.arms:
        title = capitalize(tables.arm_title(arm))
        if arm.role == "model":
            found.append((title, model_findings(results, arm)))
        elif about := findings(results, arm):
            found.append((title, about))
    found.append(("The whole fit" if results.model else "All arms", [*remarks(results), *axis_findings(results)]))
    warnings = [
        replace(
            finding, topic=f"{finding.topic} ({title})" if len(found) > 2 and title != found[-1][0] else finding.topic
        )
        for title, about in found
        for finding in about
        if finding.warning
    ]
    quiet = [(title, calm) for title, about in found if (calm := [f for f in about if not f.warning])]
    sections = [*_result_sections(results, many), *_detail_sections(results)]
    sections.insert(1, PageSection("Findings", [("findings", quiet)], is_open=len(quiet) < 3))
    groups = {group: [s for s in specs if s.group == group and s != picture] for group in {s.group for s in specs}}
    for index, section in enumerate(sections):
        items = [(kind, groups.get(value, []) if kind == "figures" else value) for kind, value in section.items]
        sections[index] = replace(section, items=[(kind, value) for kind, value in items if value])
    notes = arm_notes(results, shown=headline_)
    return Page(headline_, notes, picture, warnings, [section for section in sections if section.items])


def _result_sections(results: Results, many: bool) -> list[PageSection]:
    """Scores, the search for λ, differences, diversity and members."""
    search, comparison = results.experiment.search, results.experiment.comparison
    by_lambda = tables.result_table(results)
    compared = comparison_tables(comparison) if comparison else []
    main = compared[0] if compared else gain_table(results) if many else by_lambda
    sections = [PageSection(main.caption, [("table", main), ("figures", "predictions")], is_open=True)]
    if search:
        sentence = search.sentence or f"The {search.split} data chose {at(search.chosen)}."
        items = [("text", sentence), ("figures", "search"), ("table", tables.search_table(results))]
        sections.append(PageSection("The search for λ", items))
    differences = [*([by_lambda] if many else []), *tables.difference_tables(results), *axis_tables(results)]
    return [
        *sections,
        PageSection("Scores by λ", [("figures", "scores")]),
        PageSection("Paired differences", [("table", table) for table in differences]),
        PageSection(
            results.task.uncertainty_title,
            [("figures", "diversity"), ("table", tables.detail_table(results)), ("figures", "calibration")],
        ),
        PageSection("The members", [("figures", "members")]),
        PageSection("Contested cases", [("table", contested_table(results))]),
        *(PageSection(table.caption, [("table", table)]) for table in compared[1:]),
    ]


def _detail_sections(results: Results) -> list[PageSection]:
    """Failures, data and setup."""
    data: list[tuple[str, Any]] = [("facts", setup.target_facts(results))]
    if table := results.data.table:
        data.append(("list", [note for note in table.notes if note.strip()]))
        data += [("table", setup.column_table(table, results.data.train)), ("text", setup.all_classes(results))]
    about: list[tuple[str, Any]] = [("table", setup.arm_table(results)), ("facts", setup.facts(results))]
    about += [("table", table) for table in setup.layer_tables(results)]
    if config := results.experiment.config:
        about.append(("code", json.dumps(config, indent=2, ensure_ascii=False, default=str)))
    return [
        PageSection("Failed runs and damaged files", [("table", setup.failure_table(results))], is_open=True),
        PageSection("The data", data),
        PageSection("Setup", about),
    ]


def write_report(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run directory.

    Each file is written atomically, `index.html` last; beside it are `results.md` and the figures.

    Args:
        directory: A run directory of `torchace run` or `torchace fit`.
        out: The output folder; `report` inside the directory by default.

    Returns:
        The path of `index.html`.

    Raises:
        ResultFileError: `experiment.json` cannot be read, or `out` cannot be written.
    """
    results = read_results(directory)
    svgs = {spec.name: render_svg(spec) for spec in figures(results)}
    folder = Path(directory) / "report" if out is None else Path(out)
    files = {f"{name}.svg": svg.replace(">", f"><style>{STYLE}</style>", 1).encode() for name, svg in svgs.items()}
    files |= {"results.md": markdown(results).encode(), "index.html": page_html(results, svgs).encode()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomic(folder / name, content)
    except OSError as error:
        raise ResultFileError(f"Could not write the report to {folder}: {error.strerror or error}.") from error
    return folder / "index.html"


def figures(results: Results) -> list[FigureSpec]:
    """Return all figures, in order."""
    if has_many_arms(results):
        return gain_figures(results)
    comparison = results.experiment.comparison
    return [*(comparison_figures(comparison) if comparison else []), *lambda_figures(results), *array_figures(results)]


def page_html(results: Results, svgs: Mapping[str, str]) -> str:
    """Return the report as one HTML document, with figures by name; text from files is escaped."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise missing_extra("The report needs jinja2") from error

    source = resources.files("torchace.lab.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value.replace(" %", "\u00a0%") if isinstance(value, str) else value,  # no line break
    )
    template = environment.from_string(source)
    return template.render(experiment=results.experiment, page=contents(results), svgs=svgs, style=STYLE)


def markdown(results: Results) -> str:
    """Return the report as GitHub-flavored Markdown."""
    page, experiment = contents(results), results.experiment
    parts = [f"# {_escape(experiment.title or experiment.name)}", _escape(experiment.description)]
    if page.headline:
        parts.append(f"**{_escape(page.headline.sentence)}** {_escape(page.headline.detail)}")
    parts += [" ".join(_escape(text) for text in note if text) for note in page.notes]
    parts.append(_finding_list(page.warnings))
    for section in page.sections:
        texts = [_item_markdown(kind, value, section.title) for kind, value in section.items]
        if any(texts):
            parts += [f"## {_escape(section.title)}", *texts]
    return "\n\n".join(part for part in parts if part) + "\n"


def _item_markdown(kind: str, value: Any, title: str) -> str:
    """Return one item of a section; figures are left out."""
    if kind == "table":
        caption = "" if value.caption == title else f"### {_escape(value.caption)}\n\n"
        return caption + table_markdown(value)
    if kind == "findings":
        return "\n\n".join(f"### {_escape(title)}\n\n{_finding_list(about)}" for title, about in value)
    if kind == "facts":
        return "\n".join(f"- **{_escape(heading)}**: {_escape(text)}" for heading, text in value)
    if kind == "list":
        return "\n".join(f"- {_escape(text)}" for text in value)
    if kind == "code":
        config = value.replace("<", "\\u003c")  # no HTML tags; equal JSON
        fence = "`" * (3 + max((len(ticks) for ticks in re.findall("`{3,}", config)), default=0))
        return f"{fence}json\n{config}\n{fence}"
    return _escape(value) if kind == "text" else ""


def _finding_list(about: list[Finding]) -> str:
    return "\n".join(f"- **{_escape(finding.topic)}.** {_escape(finding.text)}" for finding in about)


def table_markdown(table: tables.ReportTable) -> str:
    """Return a table as Markdown, with section titles as rows and the note below."""
    heads = [f"{column.group}: {column.label}" if column.group else column.label for column in table.columns]
    lines = [[_escape(head) for head in heads], [":--" if kind == "text" else "--:" for kind in table.kinds]]
    for section in table.sections:
        if section.title:
            lines.append([f"**{_escape(section.title)}**"] + [""] * (len(heads) - 1))
        lines += [[f"**{_escape(c.text)}**" if c.strong else _escape(c.text) for c in row] for row in section.rows]
    note = f"\n\n{_escape(table.note)}" if table.note else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + note


def _escape(text: str) -> str:
    text = re.sub(r"([\\`*_\[\]|~])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    return re.sub(r"^(#|>|[+-](?=\s))", r"\\\1", text)


def summary_sentences(results: Results) -> list[str]:
    """Return the main result of each arm, and what the runs at λ=0 let expect, for a terminal."""
    found = []
    for sentence, expected in arm_notes(results):
        found += [sentence, *([f"  {expected.split('. ')[0].rstrip('.')}."] if expected else [])]
    return found


def arm_notes(results: Results, shown: Headline | None = None) -> list[tuple[str, str]]:
    """Return the main result of each arm, empty if shown already, and what its runs at λ=0 let expect."""
    found = []
    for arm in () if has_many_arms(results) or results.model else results.arms:
        if main := headline(results, arm):
            name = f"{capitalize(arm.label)}. " if len(results.arms) > 1 else ""
            expected = advice(results, arm)
            found.append(
                (
                    "" if main == shown else f"{name}{main.sentence}",
                    f"Expected from λ=0 alone: {expected.sentence}" if expected else "",
                )
            )
    return found


def rich_table(results: Results) -> RichTable:
    """Return the result table for a terminal."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError as error:
        raise missing_extra("Tables in a terminal need rich") from error

    table = gain_table(results) if has_many_arms(results) else tables.result_table(results)
    # a terminal is narrow
    omitted = (("One member", "paper"), ("", "95 % interval"))
    indices = [i for i, column in enumerate(table.columns) if (column.group, column.label) not in omitted]
    note = "Mean ± standard deviation over seeds; bold: best of its arm."
    if has_many_arms(results) and (found := sweep_headline(results)):
        note = f"{found.sentence} {found.detail}"
    elif results.experiment.paper:
        note += f" paper: {results.experiment.paper.table} of Shoham and Permuter (2020)."
    title = Text(results.experiment.title or results.experiment.name)
    drawn = RichTable(title=title, caption=Text(note), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    labels = [column.short_label or column.label.replace(", ×", "\n×") for column in table.columns]
    heads = [f"Member\n{labels[i]}" if table.columns[i].group == "One member" else labels[i] for i in indices]
    rows = [row for section in table.sections for row in section.rows]
    texts = [
        [*head.split("\n"), *(_short_text(table.columns[i], row[i]) for row in rows)]
        for i, head in zip(indices, heads, strict=True)
    ]
    # narrow the first column, with the arms' titles, if the table then fits into 80 characters
    room = 78 - sum(2 + max(map(len, column)) for column in texts[1:])
    drawn.add_column(Text(heads[0]), min_width=10, max_width=room if 10 <= room <= 28 else 28, overflow="fold")
    for head in heads[1:]:
        drawn.add_column(Text(head), justify="right")
    for section in table.sections:
        drawn.add_section()
        if section.title:
            drawn.add_row(Text(section.title, style="italic", overflow="fold"))
        for row in section.rows:
            styles = ["bold" if cell.strong else "dim" if cell.kind == "paper" else "" for cell in row]
            cells = [Text(_short_text(table.columns[i], row[i]), style=styles[i]) for i in indices]
            drawn.add_row(Text("  " if section.title else "") + cells[0], *cells[1:])
    return drawn


def _short_text(column: tables.ReportColumn, cell: tables.Cell) -> str:
    """Drop the standard deviation except for the ensemble."""
    return cell.text if column.group in ("", "Ensemble") else cell.text.split(" ±")[0]
