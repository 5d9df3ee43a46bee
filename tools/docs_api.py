"""MkDocs hook: a page for each `::: name` of docs/api/*/index.md, listed in a table there and in the navigation.

Text below a name belongs to its page.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_NAME = re.compile(r"^::: (\S+)\n(.*?)(?=^:::|^#|\Z)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> None:
    """Add the pages to the navigation, below their group's."""
    for section in config["nav"]:
        if "API" in section:
            section["API"] = [_group(entry) if isinstance(entry, dict) else entry for entry in section["API"]]


def on_files(files: Any, config: Any) -> None:
    """Generate the pages."""
    for group in sorted((ROOT / "docs" / "api").glob("*/index.md")):
        for name, rest in _NAME.findall(group.read_text("utf-8")):
            options = rest.removeprefix("    options:\n")
            text = f"::: {name}\n    options:\n      heading_level: 1\n      heading: {_public_name(name)}\n{options}"
            files.append(File.generated(config, f"api/{group.parent.name}/{_short(name)}.md", content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the names on a group's page by a table."""
    if not re.fullmatch(r"api/\w+/index\.md", page.file.src_uri):
        return markdown
    markdown = _NAME.sub(lambda match: _row(match[1]), markdown)
    return re.sub(r"(?m)(?:^\| \[.*\n)+", r"| | |\n| --- | --- |\n\g<0>\n", markdown)


def _group(entry: dict[str, str]) -> dict[str, Any]:
    ((title, path),) = entry.items()
    names = [_short(name) for name, _ in _NAME.findall((ROOT / "docs" / path).read_text("utf-8"))]
    return {title: [path, *({name: path.replace("index", name)} for name in names)]}


def _row(name: str) -> str:
    return f"| [`{_short(name)}`]({_short(name)}.md) | {_summary(name)} |\n"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _public_name(name: str) -> str:
    """Return the shortest name that a reader can import."""
    return f"torchace.{_short(name)}" if _short(name) in _package().exports else name


@functools.cache
def _package() -> Any:
    return griffe.load("torchace", search_paths=[ROOT / "src"], resolve_aliases=True)


def _summary(name: str) -> str:
    docstring = _package()[name.removeprefix("torchace.")].docstring
    return docstring.value.strip().splitlines()[0] if docstring else ""
