"""The page: one HTML file that needs nothing else, its figures beside it as PNG, and the Markdown."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from torchace._files import PathError, refuse_links, remove_abandoned, write_atomic
from torchace.lab.report._fields import ReportError, extra
from torchace.lab.report.array_plots import pictures
from torchace.lab.report.columns import all_classes, folded, schema_tables, target_facts
from torchace.lab.report.contested_cases import disputed_table
from torchace.lab.report.drawing import DARK, DPI, LIGHT, WIDTH, Sketch, render
from torchace.lab.report.findings import findings, headline, remarks
from torchace.lab.report.plots import drawn_arms, plots
from torchace.lab.report.render import markdown
from torchace.lab.report.results import Results, read_results
from torchace.lab.report.search_findings import search_figures, search_table, search_verdict
from torchace.lab.report.setup import arm_table, configuration, facts, failure_table
from torchace.lab.report.tables import arm_title, detail_table, difference_tables, result_table


@dataclass(frozen=True)
class Image:
    """A figure, drawn for light and dark pages."""

    sketch: Sketch
    light: bytes
    dark: bytes

    @property
    def width(self) -> int:
        return round(WIDTH * DPI)

    @property
    def height(self) -> int:
        return round(self.sketch.height * DPI)

    @property
    def light_uri(self) -> str:
        return _uri(self.light)

    @property
    def dark_uri(self) -> str:
        return _uri(self.dark)


def write_report(directory: str | Path, out: str | Path | None = None) -> Path:
    """Draws a run directory's report.

    Each file is written under a temporary name and renamed, the page last: a report that is being drawn again is never
    half there.

    Args:
        directory: What `torchace run` wrote.
        out: The folder to write to; `report` inside the directory unless given.

    Returns:
        The path of the page, `index.html`; beside it lie `results.md` and, for each figure, `NAME.png` and
        `NAME-dark.png`.

    Raises:
        ReportError: The directory holds no readable experiment, or the folder cannot be written.
    """
    results = read_results(directory)
    if out is None:
        try:
            refuse_links(Path(directory), ["report"])
        except PathError as error:
            raise ReportError(str(error)) from None
    images = [Image(sketch, render(sketch, LIGHT), render(sketch, DARK)) for sketch in figures(results)]
    page = page_html(results, images)
    folder = Path(directory) / "report" if out is None else Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for image in images:
            _write(folder / f"{image.sketch.name}.png", image.light)
            _write(folder / f"{image.sketch.name}-dark.png", image.dark)
        _write(folder / "results.md", markdown(results).encode())
        _write(folder / "index.html", page.encode())
    except OSError as error:
        raise ReportError(f"Could not write the report to {folder}: {error.strerror or error}.") from error
    return folder / "index.html"


def figures(results: Results) -> list[Sketch]:
    """All figures of a run directory, in the order to show them."""
    return search_figures(results) + plots(results) + pictures(results)


def page_html(results: Results, images: list[Image]) -> str:
    """The page's text.

    Args:
        results: A run directory.
        images: Its figures.

    Returns:
        One HTML document; every name that comes from a file is escaped.
    """
    with extra("jinja2"):
        from jinja2 import Environment, StrictUndefined

    source = resources.files("torchace.lab.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_unbroken
    )
    groups: dict[str, list[Image]] = {}
    for image in images:
        groups.setdefault(image.sketch.group, []).append(image)
    return environment.from_string(source).render(
        results=results,
        findings=[(arm_title(arm), headline(results, arm), about) for arm, about in findings(results)],
        remarks=remarks(results),
        result_table=result_table(results),
        difference_tables=difference_tables(results),
        detail_table=detail_table(results),
        arm_table=arm_table(results),
        failure_table=failure_table(results),
        facts=facts(results),
        configuration=configuration(results),
        groups=groups,
        search_verdict=search_verdict(results),
        search_table=search_table(results),
        disputed_table=disputed_table(results, drawn_arms(results)),
        target_facts=target_facts(results),
        all_classes=all_classes(results),
        schema_tables=[folded(table) for table in schema_tables(results)],
    )


def _unbroken(value: object) -> object:
    """Keeps a number and its percent sign on one line."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) else value


def _uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _write(path: Path, content: bytes) -> None:
    remove_abandoned(path)
    write_atomic(path, content)
