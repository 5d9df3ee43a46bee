"""The page in a headless Chromium: nothing on the console, every figure visible, no horizontal scrolling."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("TORCHACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; name it in TORCHACE_CHROMIUM"),
]

# Runs inside the page and reports to the page around it: a headless window cannot be as narrow as a phone, a frame can.
MEASURE = """<script>
addEventListener("error", event => errors.push(String(event.message || event.target.src)), true);
const errors = [];
addEventListener("load", () => {
  const root = document.documentElement;
  for (const part of document.querySelectorAll("details")) part.open = true;
  const boxes = [...document.querySelectorAll("figure > svg")].map(figure => figure.getBoundingClientRect());
  const outside = [...document.querySelectorAll("main *, header *, footer *")].filter(
    element => !element.closest(".scroll *, pre *, svg *")
      && element.getBoundingClientRect().right > root.clientWidth + 1);
  parent.postMessage({
    errors,
    width: innerWidth,
    overflow: Math.max(root.scrollWidth, document.body.scrollWidth) - root.clientWidth,
    outside: outside.map(element => element.tagName + " " + element.getAttribute("class")).slice(0, 5),
    natural: [...document.images].map(image => image.naturalWidth),
    shown: boxes.map(box => Math.min(box.width, box.height)),
    columns: [...document.querySelectorAll(".scroll")].filter(
      box => box.querySelector("th")?.textContent.trim().toLowerCase() === "column").map(
      box => box.scrollWidth - box.clientWidth),
    broken: [...document.querySelectorAll("tbody th.text")].map(head => head.textContent.trim()).filter((text, i) => {
      const range = document.createRange(), words = text.split(/\\s+/);
      range.selectNodeContents(document.querySelectorAll("tbody th.text")[i]);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      return lines.size > words.length && words.every(word => word.length <= 10);
    }),
    background: getComputedStyle(document.body).backgroundColor,
    text: Number.parseFloat(getComputedStyle(document.body).fontSize),
    smallest: Math.min(...[...document.querySelectorAll("p, dd, td, th, figcaption")].map(
      element => Number.parseFloat(getComputedStyle(element).fontSize))),
  }, "*");
});
</script>"""

FRAME = """<!doctype html><title>frame</title><style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<script>addEventListener("message", event => {{
  document.getElementById("measured").textContent = JSON.stringify(event.data);
}});</script>
<pre id="measured"></pre><iframe src="page.html" width="{width}" height="900"></iframe>"""


def _open(page: str, folder: Path, width: int, *, dark: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the measures of a page at a width, and its messages on the console."""
    folder.mkdir()
    (folder / "page.html").write_text(page.replace("<head>", f"<head>{MEASURE}", 1), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--enable-logging=stderr", "--v=0",
        "--virtual-time-budget=20000", "--dump-dom", (folder / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    found = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, f"The page did not report (exit {done.returncode}): {done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1])), console


def _check(measured: dict[str, Any], console: list[str], width: int, figures: int) -> None:
    assert console == []
    assert measured["errors"] == []
    assert measured["width"] == width
    assert measured["overflow"] <= 0
    assert measured["outside"] == []
    assert len(measured["shown"]) == figures
    assert min(measured["shown"]) > 100
    assert all(width > 0 for width in measured["natural"])  # the images of contested cases
    assert measured["text"] >= 16
    assert measured["smallest"] >= 12


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", ["table1", "hostile", "regression_fit", "hostile_fit"])
def test_page_opens_whole(pages: Callable[[str], Path], tmp_path: Path, name: str, width: int) -> None:
    text = pages(name).read_text(encoding="utf-8")
    measured, console = _open(text, tmp_path / "browser", width)
    _check(measured, console, width, text.count("<figure>"))


@pytest.mark.parametrize("name", ["table2", "failing", "single_seed", "classification_fit"])
def test_page_opens_on_a_phone(pages: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    text = pages(name).read_text(encoding="utf-8")
    measured, console = _open(text, tmp_path / "browser", 375)
    _check(measured, console, 375, text.count("<figure>"))


def test_the_columns_of_a_table_do_not_scroll_away_on_a_phone(pages: Callable[[str], Path], tmp_path: Path) -> None:
    measured, _ = _open(pages("regression_fit").read_text(encoding="utf-8"), tmp_path / "browser", 375)
    assert measured["columns"]
    assert max(measured["columns"]) <= 0


def test_short_words_are_not_broken_on_a_phone(pages: Callable[[str], Path], tmp_path: Path) -> None:
    text = pages("classification_fit").read_text(encoding="utf-8")
    measured, _ = _open(text, tmp_path / "browser", 375)
    assert measured["broken"] == []
    narrow = text.replace("</style>", "th.text { display: block; width: 2rem; word-break: break-all }</style>", 1)
    measured, _ = _open(narrow, tmp_path / "narrow", 375)
    assert measured["broken"]  # the measure sees it


def test_page_follows_a_dark_scheme(pages: Callable[[str], Path], tmp_path: Path) -> None:
    text = pages("single_seed").read_text(encoding="utf-8")
    light, _ = _open(text, tmp_path / "light", 375)
    dark, console = _open(text, tmp_path / "dark", 375, dark=True)
    _check(dark, console, 375, text.count("<figure>"))
    assert (light["background"], dark["background"]) == ("rgb(255, 255, 255)", "rgb(30, 33, 41)")


def test_a_broken_page_would_be_noticed(tmp_path: Path) -> None:
    """The measuring itself, on a page with everything wrong."""
    page = (
        "<!doctype html><html><head></head><body><main><div style='width: 900px'>wide</div>"
        "<img src='data:image/png;base64,AAAA'><script>console.error('seen'); missing()</script></main></body></html>"
    )
    measured, console = _open(page, tmp_path / "browser", 375)
    assert measured["overflow"] > 400
    assert measured["outside"] == ["DIV null"]
    assert measured["natural"] == [0]
    assert len(measured["errors"]) >= 2
    assert any("seen" in line for line in console)
