"""The documentation: every public name has a page, figures are drawn by the library, links lead to files."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import torchace as ace
from tests.support.scripts import load_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages whose code runs, in tests/test_wheel.py.
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if page.name != "DESIGN.md" and not {"results", "api"} & set(page.relative_to(DOCS).parts)
]


def test_every_public_name_has_its_place() -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "api").rglob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    public = {name for name in ace.__all__ if not isinstance(getattr(ace, name), ModuleType)}
    assert {name for name in public if not name.startswith("_")} - shown == set()


@pytest.mark.extended
def test_the_figures_are_drawn_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = load_script("tools/docs_figures.py")
    monkeypatch.setattr(figures, "STEPS", 5)
    drawn = {path.name for path in figures.main(tmp_path)}
    assert drawn == {path.name for path in tmp_path.iterdir()}
    assert all("<svg" in (tmp_path / name).read_text("utf-8") for name in drawn)
    # every drawn figure is there and on a page, for wide pages and for phones
    assert drawn <= {path.name for path in (DOCS / "figures").iterdir()}
    pages = "".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))
    shown = re.findall(r"figures/(\w+)\.svg\)", pages)
    assert drawn <= {f"{name}{layout}.svg" for name in shown for layout in ("", "_narrow")}


def test_links_to_files_are_not_broken() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_numbers_have_a_true_minus_sign_and_a_space_before_a_percent_sign() -> None:
    for page in (DOCS / "results").glob("*.md"):
        assert re.findall(r"[ (]-\d[\d.]*", page.read_text("utf-8")) == [], page.name
    for figure in (DOCS / "figures").glob("*.svg"):
        assert re.findall(r">[^<]*\d%[^<]*<|>-\d", figure.read_text("utf-8")) == [], figure.name
