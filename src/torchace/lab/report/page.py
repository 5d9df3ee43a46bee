"""The report as HTML and Markdown, and the result table for a terminal."""

from __future__ import annotations

import base64
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchace._extras import missing_extra
from torchace._figures import DARK, DPI, LIGHT, WIDTH, FigureSpec, render
from torchace._files import PathError, refuse_links, remove_abandoned, write_atomic
from torchace.lab.report import formats, setup, tables
from torchace.lab.report.array_plots import array_figures, contested_table
from torchace.lab.report.axes import axis_findings, axis_tables
from torchace.lab.report.comparison import comparison_tables
from torchace.lab.report.findings import Finding, advice, findings, headline, remarks
from torchace.lab.report.formats import at
from torchace.lab.report.gains import gain_figures, gain_finding, gain_table, has_many_arms
from torchace.lab.report.model_findings import model_findings, model_headline
from torchace.lab.report.plots import lambda_figures
from torchace.lab.report.results import Results, read_results
from torchace.lab.schema.reading import ResultFileError

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def contents(results: Results) -> dict[str, Any]:
    """Return findings, facts and tables."""
    found, many = [], has_many_arms(results)
    results_by_lambda = tables.result_table(results)
    for arm in () if many else results.arms:
        if arm.role == "model":
            found.append((tables.arm_title(arm), model_headline(results, arm), model_findings(results, arm)))
        elif about := findings(results, arm):
            found.append((tables.arm_title(arm), headline(results, arm), about))
    search = results.experiment.search
    return {
        "findings_title": "In short" if results.model else "The effect of λ",
        "findings": found,
        "remarks": [*([gain_finding(results)] if many else []), *remarks(results), *axis_findings(results)],
        "search_sentence": (search.sentence or f"The {search.split} data chose {at(search.chosen)}.") if search else "",
        "search_table": tables.search_table(results),
        "comparison_tables": comparison_tables(comparison) if (comparison := results.experiment.comparison) else [],
        "result_table": gain_table(results) if many else results_by_lambda,
        "difference_tables": [
            *([results_by_lambda] if many else []),
            *tables.difference_tables(results),
            *axis_tables(results),
        ],
        "detail_table": tables.detail_table(results),
        "contested_table": contested_table(results),
        "target_facts": setup.target_facts(results),
        "all_classes": setup.all_classes(results),
        "notes": setup.notes(results),
        "column_table": setup.column_table(table, results.data.train) if (table := results.data.table) else None,
        "arm_table": setup.arm_table(results),
        "layer_tables": setup.layer_tables(results),
        "facts": setup.facts(results),
        "configuration": setup.configuration(results),
        "failure_table": setup.failure_table(results),
    }


class Image(NamedTuple):
    """A figure as PNG, light and dark."""

    spec: FigureSpec
    light: bytes
    dark: bytes


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
    if out is None:
        try:
            refuse_links(Path(directory), ["report"])
        except PathError as error:
            raise ResultFileError(str(error)) from None
    images = [Image(spec, render(spec, LIGHT), render(spec, DARK)) for spec in figures(results)]
    folder = Path(directory) / "report" if out is None else Path(out)
    files = {f"{image.spec.name}.png": image.light for image in images}
    files |= {f"{image.spec.name}-dark.png": image.dark for image in images}
    files |= {"results.md": markdown(results).encode(), "index.html": page_html(results, images).encode()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(folder / name, content)
    except OSError as error:
        raise ResultFileError(f"Could not write the report to {folder}: {error.strerror or error}.") from error
    return folder / "index.html"


def figures(results: Results) -> list[FigureSpec]:
    """Return all figures, in order."""
    return gain_figures(results) if has_many_arms(results) else lambda_figures(results) + array_figures(results)


def page_html(results: Results, images: list[Image]) -> str:
    """Return the report as one HTML document; text from files is escaped."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise missing_extra("The report needs jinja2") from error

    source = resources.files("torchace.lab.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_keep_percent
    )
    environment.filters["data_uri"] = lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}"
    groups: dict[str, list[Image]] = {}
    for image in images:
        groups.setdefault(image.spec.group, []).append(image)
    content = contents(results)
    return environment.from_string(source).render(
        experiment=results.experiment,
        uncertainty_title=results.task.uncertainty_title,
        groups=groups,
        width=WIDTH,
        dpi=DPI,
        folded_columns=setup.fold(table) if (table := content["column_table"]) else (None, None),
        **content,
    )


def _keep_percent(value: object) -> object:
    """Use a non-breaking space before percent signs."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) else value


def _write(path: Path, content: bytes) -> None:
    remove_abandoned(path)
    write_atomic(path, content)


def markdown(results: Results) -> str:
    """Return the report as GitHub-flavored Markdown."""
    content, experiment = contents(results), results.experiment
    parts = [f"# {_escape(experiment.title or experiment.name)}", _escape(experiment.description)]
    parts.append(f"## {content['findings_title']}")
    for title, sentence, about in content["findings"]:
        parts += [f"### {_escape(title)}", _escape(sentence), _finding_list(about)]
    parts += [f"### {'The whole fit' if results.model else 'All arms'}", _finding_list(content["remarks"])]
    if content["search_sentence"]:
        parts += ["## The search for λ", _escape(content["search_sentence"])]
        parts.append(table_markdown(content["search_table"]) if content["search_table"] else "")
    for table in content["comparison_tables"]:
        parts.append(f"## {_escape(table.caption)}\n\n{table_markdown(table)}")
    parts += ["## Results", table_markdown(content["result_table"])]
    if content["difference_tables"]:
        parts.append("## Paired differences")
        parts += [f"### {_escape(t.caption)}\n\n{table_markdown(t)}" for t in content["difference_tables"]]
    for table in (content["detail_table"], content["contested_table"]):
        parts.append(f"## {table.caption}\n\n{table_markdown(table)}" if table else "")
    if content["target_facts"]:
        parts += ["## The data", _fact_list(content["target_facts"])]
        if table := content["column_table"]:
            parts.append(f"### {table.caption}\n\n{table_markdown(table)}")
        parts.append("\n".join(f"- {_escape(note)}" for note in content["notes"]))
    parts += ["## Setup", table_markdown(content["arm_table"]), _fact_list(content["facts"])]
    parts += [f"### {_escape(table.caption)}\n\n{table_markdown(table)}" for table in content["layer_tables"]]
    if config := content["configuration"].replace("<", "\\u003c"):  # no HTML tags; equal JSON
        fence = "`" * (3 + max((len(ticks) for ticks in re.findall("`{3,}", config)), default=0))
        parts.append(f"{fence}json\n{config}\n{fence}")
    if failures := content["failure_table"]:
        parts.append(f"## {failures.caption}\n\n{table_markdown(failures)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _finding_list(about: list[Finding]) -> str:
    return "\n".join(f"- **{_escape(finding.topic)}.** {_escape(finding.text)}" for finding in about)


def _fact_list(pairs: list[tuple[str, str]]) -> str:
    return "\n".join(f"- **{_escape(heading)}**: {_escape(text)}" for heading, text in pairs)


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
    for arm in () if has_many_arms(results) or results.model else results.arms:
        expected = advice(results, arm)
        main = headline(results, arm).split(". ")[0].rstrip(".")
        name = f"{formats.capitalize(arm.label)}. " if len(results.arms) > 1 else ""
        found += [f"{name}{main}."] if main else []
        found += [f"  Expected from λ=0 alone: {expected.sentence.split('. ')[0]}."] if expected and main else []
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
    if has_many_arms(results):
        note = gain_finding(results).text
    elif results.experiment.paper:
        note += f" paper: {results.experiment.paper.table} of Shoham and Permuter (2020)."
    title = Text(results.experiment.title or results.experiment.name)
    drawn = RichTable(title=title, caption=Text(note), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    heads = [_short_heading(table.columns[i]) for i in indices]
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
            cells = [Text(_short_text(table.columns[i], row[i]), style=_style(row[i])) for i in indices]
            drawn.add_row(Text("  " if section.title else "") + cells[0], *cells[1:])
    return drawn


def _short_heading(column: tables.ReportColumn) -> str:
    label = column.short_label or column.label.replace(", ×", "\n×")
    return f"Member\n{label}" if column.group == "One member" else label


def _short_text(column: tables.ReportColumn, cell: tables.Cell) -> str:
    """Drop the standard deviation except for the ensemble."""
    return cell.text if column.group in ("", "Ensemble") else cell.text.split(" ±")[0]


def _style(cell: tables.Cell) -> str:
    return "bold" if cell.strong else "dim" if cell.kind == "paper" else ""
