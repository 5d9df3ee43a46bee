"""MkDocs hook: figures as a part of the page, in its colors; wide result pages; README's table on the front page."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="[^"]*figures/(\w+)\.svg" ?/?>')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give tables of results the room of the table of contents, and fill in README's tables."""
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("hide", ["toc"])
    return re.sub(r"<!-- README: (.+) -->", lambda match: _readme_section(match[1]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace images by their SVG, one layout for wide pages and one for phones."""
    return _IMAGE.sub(lambda match: _figure(match[1], match[2]), content)


def _readme_section(title: str) -> str:
    """Return the text below a heading of the README, with links as the site has them."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"README.md has no section {title!r}"
    return section[1].replace("](docs/", "](")


def _figure(alt: str, name: str) -> str:
    wide, narrow = FIGURES / f"{name}.svg", FIGURES / f"{name}_narrow.svg"
    layouts = {"figure wide": wide, "figure narrow": narrow} if narrow.exists() else {"figure": wide}
    return f'<span class="figures">{"".join(_svg(path, css, alt) for css, path in layouts.items())}</span>'


def _svg(path: Path, css: str, alt: str) -> str:
    text = path.read_text("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<style>.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{path.stem}-", text)  # unique in a page too
    size = re.search(r'width="([\d.]+)pt" height="[\d.]+pt"', text)
    assert size is not None
    label = html.escape(html.unescape(alt))
    return text.replace(size[0], f'class="{css}" role="img" aria-label="{label}" style="max-width: {size[1]}pt"', 1)
