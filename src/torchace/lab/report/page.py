"""The report as HTML and Markdown, and the result table for a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._extras import import_extra
from torchace._figures import STYLE, FigureSpec, render_svg
from torchace._files import write_atomic
from torchace.lab.report import tables
from torchace.lab.report.findings import (
    Finding,
    Headline,
    expectation,
    findings,
    gain_figures,
    gain_table,
    has_many_arms,
    headline,
    missing_runs,
    other_gains,
    sweep_headline,
)
from torchace.lab.report.formats import NONE, at, capitalize, duration
from torchace.lab.report.model_findings import (
    comparison_figures,
    detail_tables,
    model_findings,
    model_headline,
    model_table,
)
from torchace.lab.report.plots import array_figures, contested_table, lambda_figures
from torchace.lab.report.results import Results, read_results
from torchace.lab.schema.reading import ResultFileError
from torchace.lab.schema.results import DataSummary

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class PageSection:
    """A heading and its items; their kinds are table, figures, facts, text, list and code."""

    title: str
    items: list[tuple[str, Any]]
    is_open: bool = False


@dataclass(frozen=True)
class Page:
    """The contents of a report; `notes` stand below the headline, `picture` beside it."""

    headline: Headline | None
    notes: list[str]
    picture: FigureSpec | None
    findings: list[Finding]
    sections: list[PageSection]


def contents(results: Results) -> Page:
    """Return the contents of the report."""
    many, specs = has_many_arms(results), figures(results)
    main = model_headline(results) if results.model else sweep_headline(results)
    first = ("baselines", f"difference_{results.task.loss}", "gain_map", results.task.loss)
    picture = next((spec for name in first for spec in specs if spec.name == name), specs[0] if specs else None)
    groups: dict[str, list[FigureSpec]] = {}
    for spec in specs:
        if spec != picture:
            groups.setdefault(spec.group, []).append(spec)
    sentences = summary_sentences(results) if main else []
    notes = [sentence.split(main.sentence)[-1].strip() for sentence in sentences if main]  # the headline stands above
    found = missing_runs(results)
    for arm in () if many else results.arms:
        found += model_findings(results, arm) if results.model else findings(results, arm)
    sections = [*_result_sections(results, groups, many), *_setup_sections(results)]
    filled = [replace(section, items=list(filter(_is_filled, section.items))) for section in sections]
    return Page(
        main, [note for note in notes if note], picture, found, [section for section in filled if section.items]
    )


def _is_filled(item: tuple[str, Any]) -> bool:
    return bool(item[1].sections if isinstance(item[1], tables.ReportTable) else item[1])


def _result_sections(results: Results, groups: Mapping[str, list[FigureSpec]], many: bool) -> list[PageSection]:
    """Scores, the search for λ, differences, diversity and contested cases."""
    search, comparison = results.experiment.search, results.experiment.comparison
    by_lambda = tables.result_table(results)
    main = model_table(comparison) if comparison else gain_table(results) if many else by_lambda
    sections = [PageSection(main.caption, [("table", main), ("figures", groups.get("predictions"))], is_open=True)]
    if comparison:
        sections += [PageSection(table.caption, [("table", table)]) for table in detail_tables(comparison)]
    if search:
        sentence = search.sentence or f"The {search.split} data chose {at(search.chosen)}."
        items = [("text", sentence), ("table", tables.search_table(results))]
        sections.append(PageSection("The search for λ", items))
    differences = [*([by_lambda] if many else []), *tables.difference_tables(results)]
    details = tables.detail_table(results, spread=bool(comparison))
    diversity = [*groups.get("diversity", []), *groups.get("calibration", [])]
    return [
        *sections,
        PageSection("Paired differences", [("table", table) for table in differences]),
        PageSection("Scores by λ", [("figures", groups.get("scores"))]),
        PageSection(results.task.details_title, [("figures", diversity), ("table", details)]),
        PageSection("Contested cases", [("table", contested_table(results))]),
    ]


def _setup_sections(results: Results) -> list[PageSection]:
    """Failures, data and tables."""
    data: list[tuple[str, Any]] = []
    if table := results.data.table:
        data.append(("list", [note for note in table.notes if note.strip()]))
        data.append(("table", tables.column_table(table, results.data.train)))
    about: list[tuple[str, Any]] = [("table", tables.arm_table(results)), ("facts", facts(results))]
    if config := results.experiment.config:
        about.append(("code", json.dumps(config, indent=2, ensure_ascii=False, default=str)))
    return [
        PageSection("Failed runs and damaged files", [("table", tables.failure_table(results))], is_open=True),
        PageSection("The data", data),
        PageSection("Setup", about),
    ]


def facts(results: Results) -> list[tuple[str, str]]:
    """Data, seeds, hardware, versions and time."""
    experiment = results.experiment
    found = dict.fromkeys([("Data", _data(results.data))])
    for arm in results.arms:
        if results.arm_data(arm) != results.data:
            found[f"Data of “{arm.label}”", _data(results.arm_data(arm))] = None
    time = duration(experiment.seconds)
    if experiment.started:
        time += f", started {experiment.started[:16].replace('T', ' ')}"
    # runs of one directory may be of several versions and machines
    machines = [experiment.hardware, *(run.model_dump(include={"device", "cpu", "threads"}) for run in results.runs)]
    hardware = dict.fromkeys(
        value if isinstance(value, str) else f"{value} {key.removesuffix('s') if value == 1 else key}"
        for machine in machines
        for key, value in machine.items()
        if value not in (None, "", "CPU")
    )
    versions: dict[str, dict[str, None]] = {}
    for recorded in (experiment.versions, *(run.versions for run in results.runs)):
        for package, version in recorded.items():
            versions.setdefault(package, {})[str(version)] = None
    texts = [f"{package} {', '.join(found)}" for package, found in versions.items()]
    seeds = f"{len(experiment.seeds)} ({', '.join(map(str, experiment.seeds))})"
    return [
        *found,
        ("Seeds", seeds),
        ("Hardware", "; ".join(hardware) or NONE),
        ("Versions", "; ".join(texts) or NONE),
        ("Time", time),
    ]


def _data(data: DataSummary) -> str:
    text = f"{data.name}: {_sizes(data)}"
    if data.classes:
        text += f"; classes: {tables.list_classes(data.classes)}"
    if data.image_shape:
        text += f"; images {' × '.join(str(side) for side in data.image_shape)}"
    elif data.inputs:
        text += f"; inputs {', '.join(data.inputs)}"
    return text + "".join(f". {note.rstrip('.')}" for note in data.notes)


def _sizes(data: DataSummary) -> str:
    validation = [f"{data.validation:,} for validation"] if data.validation else []
    return ", ".join([f"{data.train:,} for training", *validation, f"{data.test:,} for testing"])


def write_report(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run directory and return the path of `index.html`; `results.md` and figures are beside it.

    Each file is written atomically, `index.html` last, by default to the folder `report` in the run directory.

    Raises:
        ResultFileError: `experiment.json` cannot be read, or `out` cannot be written.
    """
    results = read_results(directory)
    folder = Path(directory) / "report" if out is None else Path(out)
    svgs = {spec.name: render_svg(spec) for spec in figures(results)}
    files = {f"{name}.svg": svg.replace(">", f"><style>{STYLE}</style>", 1).encode() for name, svg in svgs.items()}
    files |= {"results.md": markdown(results).encode(), "index.html": page_html(results, svgs).encode()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomic(folder / name, content)
    except OSError as error:
        raise ResultFileError(
            f"Could not write the report to {folder}: {error.strerror or error}. Choose another folder."
        ) from error
    return folder / "index.html"


def figures(results: Results) -> list[FigureSpec]:
    """Return all figures, in order."""
    if has_many_arms(results):
        return gain_figures(results)
    comparison = results.experiment.comparison
    return [*(comparison_figures(comparison) if comparison else []), *lambda_figures(results), *array_figures(results)]


def page_html(results: Results, svgs: Mapping[str, str]) -> str:
    """Return the report as one HTML document, with figures by name; text from files is escaped."""
    jinja2 = import_extra("jinja2", "The report needs")
    source = resources.files("torchace.lab.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (  # no line break
            value.replace(" %", "\u00a0%").replace("λ > ", "λ\u00a0>\u00a0") if isinstance(value, str) else value
        ),
    )
    template = environment.from_string(source)
    text: str = template.render(experiment=results.experiment, page=contents(results), svgs=svgs, style=STYLE)
    return text


def markdown(results: Results) -> str:
    """Return headline, findings and tables as GitHub-flavored Markdown."""
    page, experiment = contents(results), results.experiment
    parts = [f"# {_escape(experiment.title or experiment.name)}", _escape(experiment.description)]
    if page.headline:
        parts.append(f"**{_escape(page.headline.sentence)}** {_escape(page.headline.detail)}")
    parts += [_escape(note) for note in page.notes]
    parts.append("\n".join(f"- **{_escape(found.topic)}.** {_escape(found.text)}" for found in page.findings))
    for table in (value for section in page.sections for kind, value in section.items if kind == "table"):
        parts += [f"## {_escape(table.caption)}", table_markdown(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    """Return the main result of each arm of a sweep; none for a fit or an experiment with many arms."""
    found = []
    for arm in () if has_many_arms(results) or results.model else results.arms:
        if main := headline(results, arm):
            name = f"{capitalize(arm.label)}. " if len(results.arms) > 1 else ""
            found.append(f"{name}{main.sentence}{other_gains(results, arm)}{expectation(results, arm)}")
    return found


def rich_table(results: Results, *, bold: bool = True) -> RichTable:
    """Return the result table for a terminal, or for one that shows no bold type."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    many = has_many_arms(results)
    table = gain_table(results) if many else tables.result_table(results)
    over = "Mean ± standard deviation over seeds" if len(results.experiment.seeds) > 1 else "One seed"
    note = f"{over}{'; bold: the best λ' * bold}."
    if many and (found := sweep_headline(results)):
        note = f"{found.sentence} {found.detail}"
    title = Text(results.experiment.title or results.experiment.name)
    drawn = RichTable(title=title, caption=Text(note), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    # a terminal is narrow
    shown = [i for i, column in enumerate(table.columns) if column.label not in ("paper", "95 % interval")]
    for i in shown:
        column = table.columns[i]
        label = column.short_label or column.label
        head = Text(f"Member\n{label}" if column.group == "One member" else label)
        is_first = i == 0
        drawn.add_column(head, justify="left" if is_first else "right", no_wrap=not is_first, min_width=10 * is_first)
    for section in table.sections:
        drawn.add_section()
        if section.title:
            drawn.add_row(Text(section.title, style="italic", overflow="fold"))
        for row in section.rows:
            cells = []
            for i in shown:
                # the standard deviation of the ensemble alone
                text = row[i].text if table.columns[i].group in ("", "Ensemble") else row[i].text.split(" ±")[0]
                cells.append(Text(text, style="bold" if row[i].strong else ""))
            drawn.add_row(Text("  " if section.title else "", overflow="fold") + cells[0], *cells[1:])
    return drawn
