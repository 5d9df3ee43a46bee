"""Writes the claims of docs/results/claims.toml into the tables of README.md and docs/results/index.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
HEADS = "| question | answer | evidence |\n| --- | --- | --- |\n"
TABLE = re.compile(re.escape(HEADS) + r"(?:\|.*\n)*")


def load_claims() -> list[dict[str, str]]:
    """Return the claims in order."""
    claims: list[dict[str, str]] = tomllib.loads((RESULTS / "claims.toml").read_text("utf-8"))["claims"]
    return claims


def make_table(claims: list[dict[str, str]], folder: str) -> str:
    """Return claims as a Markdown table; `folder` is the path to the results from the page."""
    rows = (f"| {c['question']} | {c['answer']} | [{c['evidence']}]({folder}{c['page']}) |\n" for c in claims)
    return HEADS + "".join(rows)


def render_pages() -> dict[Path, str]:
    """Return the pages with their table of claims, by path."""
    claims = load_claims()
    tables = {
        RESULTS / "index.md": make_table(claims, ""),
        ROOT / "README.md": make_table([claim for claim in claims if claim.get("readme")], "docs/results/"),
    }
    pages = {}
    for path, table in tables.items():
        text = path.read_text("utf-8")
        if len(TABLE.findall(text)) != 1:
            raise ValueError(f"Expected one table of claims in {path}.")
        pages[path] = TABLE.sub(lambda _, table=table: table, text)
    return pages


if __name__ == "__main__":
    for path, text in render_pages().items():
        path.write_text(text, "utf-8")
        print(path)
