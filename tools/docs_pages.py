"""MkDocs hook: figures in the page's colors, readable tables of results, README's tables on the front page."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="[^"]*figures/(\w+)\.svg" ?/?>')
_OPTION = re.compile(r"--\w[\w-]*")  # browsers would break it after its dashes
_ARM = re.compile(r"<tr>\s*<td[^>]*><strong>([^<]*)</strong></td>(?:\s*<td[^>]*></td>)+\s*</tr>")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give tables of results the room of the table of contents, and fill in README's tables."""
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("hide", ["toc"])
    return re.sub(r"<!-- README: (.+) -->", lambda match: _readme_section(match[1]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace images by their SVG, one layout for wide pages and one for phones; lay out tables."""
    content = _IMAGE.sub(lambda match: _figure(match[1], match[2]), content)
    content = re.sub(r"<table>.*?</table>", lambda match: _table(match[0]), content, flags=re.DOTALL)
    return re.sub(
        r"<code>[^<]*</code>", lambda match: _OPTION.sub(r'<span class="option">\g<0></span>', match[0]), content
    )


def _readme_section(title: str) -> str:
    """Return the text below a heading of the README, with links as the site has them."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"README.md has no section {title!r}"
    return section[1].replace("](docs/", "](")


def _table(text: str) -> str:
    """Lay out a table: heads of two levels, an arm's name over its rows, numbers on one line, colored verdicts."""
    text = re.sub(r"<tr>(\s*<th[^>]*>.*?</th>)+\s*</tr>", lambda row: _two_levels(row[0]), text, flags=re.DOTALL)
    text = _ARM.sub(lambda row: f'<tr><th class="arm" colspan="{row[0].count("<td")}">{row[1]}</th></tr>', text)
    text = re.sub(r"(?<=[\d%]) (±|to) (?=[−+\d])", "\u00a0\\1\u00a0", text)
    if "<th>evidence</th>" not in text:
        return text
    return f'<div class="claims">{re.sub(r"<td><strong>(.+?)</strong>", _verdict, text)}</div>'


def _two_levels(row: str) -> str:
    """Give the columns «group: name» of one group a common head above their names."""
    cells = re.findall(r"<th([^>]*)>(.*?)</th>", row, re.DOTALL)
    if not any(": " in text for _, text in cells):
        return row
    above, below = [], []
    for group, members in itertools.groupby(cells, lambda cell: cell[1].partition(": ")[0] if ": " in cell[1] else ""):
        columns = list(members)
        if group:
            above.append(f'<th class="group" colspan="{len(columns)}">{group}</th>')
            below += [f"<th{style}>{text.partition(': ')[2]}</th>" for style, text in columns]
        else:
            above += [f'<th rowspan="2"{style}>{text}</th>' for style, text in columns]
    return f"<tr>{''.join(above)}</tr><tr>{''.join(below)}</tr>"


def _verdict(cell: re.Match[str]) -> str:
    kind = {"Yes": "yes", "No": "no"}.get(cell[1], "partly")
    return f'<td><strong class="verdict {kind}">{cell[1]}</strong>'


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
