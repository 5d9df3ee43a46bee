"""Notebooks: `python tools/docs_notebooks.py` executes docs/notebooks/*.ipynb; as MkDocs hook, a page for each of them.

Committed outputs are small and the same in every execution: figures are SVG with text as text, without dates.
"""

from __future__ import annotations

import copy
import html
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from torchace._figures import DARK, LIGHT, _settings

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_SCHEMES = "".join(
    f'[data-md-color-scheme="{scheme}"] {{ {"; ".join(map(": ".join, theme.variables.items()))} }}\n'
    for scheme, theme in (("default", LIGHT), ("slate", DARK))
)


def execute(path: Path) -> Any:
    """Execute a notebook in a new kernel and an empty folder, and return it; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        style = Path(folder) / "matplotlibrc"
        style.write_text("\n".join(f"{key}: {_rc(value)}" for key, value in _style().items()), "utf-8")
        (work := Path(folder) / "work").mkdir()
        environment = {**os.environ, "MATPLOTLIBRC": str(style), "OMP_NUM_THREADS": "1"}
        arguments = ["--InlineBackend.figure_formats=svg", "--InlineBackend.rc={}", "--log-level=ERROR"]
        resources = {"metadata": {"path": str(work)}}
        options = {"timeout": 600, "record_timing": False, "extra_arguments": arguments}
        NotebookClient(notebook, resources=resources, **options).execute(env=environment)
    notebook.metadata = copy.deepcopy(METADATA)
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:  # tqdm asks for ipywidgets
            cell.outputs = [output for output in cell.outputs if "IProgress not found" not in output.get("text", "")]
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
            data = output.get("data", {})
            if "image/svg+xml" in data:
                data["image/svg+xml"] = re.sub(r"\s*<metadata>.*?</metadata>", "", data["image/svg+xml"], flags=re.S)
                data.pop("text/plain", None)  # the size of a figure
    return notebook


def _style() -> dict[str, Any]:
    cycle = ", ".join(repr(color[1:]) for color in LIGHT.palette)
    sizes = {"figure.figsize": "5.2, 3.7", "figure.constrained_layout.use": True}
    return {**_settings(LIGHT, "torchace"), **sizes, "axes.prop_cycle": f"cycler('color', [{cycle}])"}


def _rc(value: Any) -> str:
    return f'"{value}"' if str(value).startswith("#") else str(value)


def on_files(files: Any, config: Any) -> None:
    """Generate the pages."""
    for path in NOTEBOOKS:
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=to_markdown(path)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to a notebook lead to its page, but for its own download."""
    return re.sub(r"\]\(((?:\.\./)*(?:notebooks/)?\w+)\.ipynb\)(?!\{)", r"](\1.md)", markdown)


def to_markdown(path: Path) -> str:
    """Return a notebook as a page: code, then its outputs."""
    parts = []
    for index, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for number, output in enumerate(cell["outputs"]):
            parts.append(f'<div class="output" markdown>\n\n{_output(output, f"n{index}-{number}-")}\n\n</div>')
    download = f"*[Download this notebook]({path.name}){{download}}: it needs the extra `tool` and no network.*"
    return "\n\n".join([f"<style>\n{_SCHEMES}</style>", *parts, download])


def _output(output: dict[str, Any], prefix: str) -> str:
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/svg+xml" in data:
        return f'<div class="figures">{_svg(data["image/svg+xml"], prefix)}</div>'
    if "text/html" in data:
        text = re.sub(r"<style.*?</style>|</?div[^>]*>", "", data["text/html"], flags=re.DOTALL)
        return re.sub(r"<(table|tr)[^>]*>", r"<\1>", text)  # the site's own look
    return f"```text\n{''.join(output.get('text', ())) or data['text/plain']}\n```"


def _svg(text: str, prefix: str) -> str:
    """Return an SVG as a part of the page, in its colors and at most as wide."""
    text = re.sub(r"<style.*?</style>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", text)
    for name, color in LIGHT.variables.items():
        text = text.replace(color, f"var({name})")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px; font-family: var(--md-text-font-family)", text)
    width = re.search(r'width="([\d.]+)pt" height="[\d.]+pt"', text)
    assert width is not None
    words = dict.fromkeys(re.findall(r">([^<>]*[^\W\d_][^<>]*)</text>", text))  # no ticks
    label = html.escape(html.unescape("Figure: " + "; ".join(words)))
    attributes = f'class="figure" role="img" aria-label="{label}" style="max-width: {width[1]}pt; fill: var(--ink)"'
    text = text.replace(width[0], attributes, 1)
    return re.sub(r"\n\s*", " ", text)  # one line: Markdown leaves it alone


if __name__ == "__main__":
    import nbformat

    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)
        print(path.relative_to(ROOT))
