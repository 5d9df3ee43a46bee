"""The page: one HTML file that needs nothing else, its figures beside it as PNG, and the Markdown."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from torchace._figures import DARK, DPI, LIGHT, WIDTH, FigureSpec, render
from torchace._files import PathError, refuse_links, remove_abandoned, write_atomic
from torchace.lab.report.array_plots import array_figures
from torchace.lab.report.plots import lambda_figures
from torchace.lab.report.render import contents, markdown
from torchace.lab.report.results import Results, read_results
from torchace.lab.report.setup import fold
from torchace.lab.schema.results import ResultFileError


@dataclass(frozen=True)
class Image:
    """A figure, drawn for light and dark pages."""

    spec: FigureSpec
    light: bytes
    dark: bytes

    @property
    def width(self) -> int:
        """Pixels."""
        return round(WIDTH * DPI)

    @property
    def height(self) -> int:
        """Pixels."""
        return round(self.spec.height * DPI)

    @property
    def light_uri(self) -> str:
        """The figure for light pages as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.light).decode()}"

    @property
    def dark_uri(self) -> str:
        """The figure for dark pages as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.dark).decode()}"


def write_report(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run directory.

    Each file is written under a temporary name and renamed, the page last: an earlier report is never half replaced.

    Args:
        directory: A run directory of `torchace run` or `torchace fit`.
        out: The folder to write to; `report` inside the directory unless given.

    Returns:
        The path of the page, `index.html`; beside it are `results.md` and, for each figure, `NAME.png` and
        `NAME-dark.png`.

    Raises:
        ResultFileError: The directory has no readable experiment, or the folder cannot be written.
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
    """Return all figures of a run directory, in the order of the page."""
    return lambda_figures(results) + array_figures(results)


def page_html(results: Results, images: list[Image]) -> str:
    """Return the page, one HTML document; all text from files is escaped."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("The report needs jinja2: pip install 'torchace[tool]'.") from error

    source = resources.files("torchace.lab.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_keep_percent
    )
    groups: dict[str, list[Image]] = {}
    for image in images:
        groups.setdefault(image.spec.group, []).append(image)
    content = contents(results)
    return environment.from_string(source).render(
        experiment=results.experiment,
        uncertainty_title=results.task.uncertainty_title,
        groups=groups,
        folded_tables=[fold(table) for table in content["column_tables"]],
        **content,
    )


def _keep_percent(value: object) -> object:
    """Keep a number and its percent sign on one line."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) else value


def _write(path: Path, content: bytes) -> None:
    remove_abandoned(path)
    write_atomic(path, content)
