"""The documentation's site: built with warnings as errors, opened, read and searched in a headless Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import pydoc
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import torchace
from tests.support.browser import CHROMIUM, Browser, Page

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[1]
PHONE = 390  # pixels
SEARCH = "input[data-md-component=search-query]"
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; name it in TORCHACE_CHROMIUM")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["from a server", "from a disk"])
def address(request: pytest.FixtureRequest, site: Path) -> str:
    """Both ways to read what `make docs` has built."""
    return str(request.getfixturevalue("served")) if request.param == "from a server" else site.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.page()
    yield page
    page.close()


def pages(site: Path) -> list[str]:
    names = sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    assert len(names) > 20
    return [name for name in names if name != "404.html"]


@needs_browser
def test_every_page_opens_without_an_error_and_fits_a_phone(served: str, site: Path, browser: Browser) -> None:
    page = browser.page(width=PHONE, height=844)
    for name in pages(site):
        page.open(f"{served}/{name}")
        assert page.errors == [], name
        assert page.wait("document.querySelector('h1')?.innerText"), name
        assert page.value("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == [], name
        assert page.value("document.documentElement.scrollWidth") <= PHONE, name
        assert page.value("document.documentElement.lang") == "en", name
        assert page.value("document.querySelectorAll('h1').length") == 1, name
        unnamed = "[...document.querySelectorAll('img, svg.figure')].filter(i => !(i.alt || i.ariaLabel)).length"
        assert page.value(unnamed) == 0, name
    page.close()


@needs_browser
def test_a_wide_table_scrolls_and_shows_it(served: str, browser: Browser) -> None:
    page = browser.page(width=PHONE)
    page.open(f"{served}/comparison.html")
    boxes = page.wait(
        "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
        ".map(b => [b.scrollWidth, b.clientWidth, getComputedStyle(b).backgroundImage.split('linear').length - 1])"
    )
    assert max(inner for inner, *_ in boxes) > PHONE
    assert all(outer <= PHONE and gradients == 4 for _, outer, gradients in boxes)  # two of them are shadows
    # by keyboard too: what scrolls can be focused
    page.wait("document.querySelector('.md-typeset__scrollwrap').tabIndex === 0")
    wide = "[...document.querySelectorAll('article *')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    scrolls = "/auto|scroll/.test(getComputedStyle(e).overflowX)"
    assert page.value(f"{wide}.filter(e => {scrolls} && e.tabIndex < 0).map(e => e.className)") == []
    page.close()


def test_tables_of_runs_have_heads_of_two_levels_and_rows_for_arms(site: Path) -> None:
    table = (site / "results" / "table1.html").read_text("utf-8").partition("100 hidden units")[2]
    assert '<th class="group" colspan="4">Ensemble</th>' in table
    assert '<tr><th class="arm" colspan="11">shared batches (K=5)</th></tr>' in table
    assert "<td>0.9811\u00a0±\u00a00.0009</td>" in re.sub(r"<td [^>]*>", "<td>", table)
    claims = (site / "index.html").read_text("utf-8")
    assert '<td><strong class="verdict yes">Yes</strong>: cross entropy 0.1651' in claims


@needs_browser
def test_the_front_page_answers_on_one_screen(served: str, browser: Browser) -> None:
    page = browser.page(width=1280, height=800)
    page.open(f"{served}/index.html")
    assert page.wait("document.querySelector('.cards').getBoundingClientRect().bottom") <= 800
    page.close()


@needs_browser
def test_copied_commands_have_no_prompt(served: str, page: Page) -> None:
    page.open(f"{served}/guides/data.html")
    code = "document.querySelector('code:has(.gp)')"
    page.value(f"{code}.setAttribute('data-md-copying', '')")  # as the theme does while its button copies innerText
    assert page.value(f"{code}.innerText").strip() == "torchace fit flowers.csv --target species --epochs 20"


@needs_browser
def test_errors_on_a_page_are_detected(served: str, page: Page) -> None:
    page.open(f"{served}/index.html")
    assert page.errors == []
    page.value(
        "(async () => { console.error('seen');"
        " await new Promise(done => setTimeout(() => { setTimeout(done); throw new Error('thrown') }));"
        " await fetch('/missing.json') })()"
    )
    for what in ("seen", "thrown", "404 for"):
        assert any(what in error for error in page.errors), (what, page.errors)


@needs_browser
@pytest.mark.parametrize("name", ["how.html", "api/losses/amended_cross_entropy.html", "comparison.html"])
def test_formulas_are_drawn(served: str, page: Page, name: str) -> None:
    page.open(f"{served}/{name}")
    sizes = page.value("[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect()).map(b => b.width)")
    assert len(sizes) >= {"how.html": 15}.get(name, 1)
    assert all(width > 3 for width in sizes)
    # nothing is left that only TeX would understand
    assert (
        page.value(r"/\\(frac|sum|lambda|bar|alpha)|\$\$|\\\(/.test(document.querySelector('article').innerText)")
        is False
    )


@needs_browser
@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("collusion", "related.html#joint-training"),  # a word of one page
        ("mutual_information", "api/scores/mutual_information.html"),  # a whole name
        ("log_probs", "api/scores/ensemble_log_probs.html"),  # a part of one
        ("λ", "choosing.html"),
    ],
)
def test_search_finds_and_leads_there(address: str, page: Page, words: str, where: str) -> None:
    page.open(f"{address}/guides/data.html")
    page.click(SEARCH)
    page.write(words)
    target = json.dumps(f"{address}/{where}")
    # the address also says which words are to be marked; links for the first letters of the last word soon go away
    same = f"link => link.replace(/[?]h=[^#]*/, '') === {target}"
    whole = f"link => new URL(link).searchParams.get('h')?.endsWith({json.dumps(words.split('_')[-1])})"
    link = page.wait(f"{FOUND}.filter({whole}).find({same})")
    page.click(f'.md-search-result__link[href="{link}"]')
    page.wait(f"({same})(location.href)")
    marked = page.wait("[...document.querySelectorAll('article mark')].map(m => m.innerText.toLowerCase())")
    assert any(part in words.lower() for part in marked)
    assert page.errors == []


@needs_browser
def test_search_without_results_shows_a_message(address: str, page: Page) -> None:
    page.open(f"{address}/index.html")
    page.click(SEARCH)
    page.write("xylophone")
    page.wait("/No matching documents/.test(document.querySelector('.md-search-result__meta').innerText)")
    assert page.value(FOUND) == []
    assert page.errors == []


@needs_browser
@pytest.mark.parametrize(("width", "layout"), [(1280, "wide"), (PHONE, "narrow")])
def test_figures_take_the_pages_colors_and_width(served: str, browser: Browser, width: int, layout: str) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        page = browser.page(scheme=scheme, width=width)
        page.open(f"{served}/how.html")
        page.wait("document.body.dataset.mdColorScheme")
        seen[scheme] = page.value(
            "[getComputedStyle(document.body).backgroundColor,"
            " ...[...document.querySelectorAll('svg.figure')].filter(figure => figure.getBoundingClientRect().width)"
            " .map(figure => [getComputedStyle(figure.querySelector('text')).fill, figure.classList[1],"
            " figure.getBoundingClientRect().right <= innerWidth])]"
        )
        page.close()
    for scheme, (background, *figures) in seen.items():
        black, white = sorted((rgb(background), rgb(figures[0][0])))
        assert (rgb(background) == white) == (scheme == "light")
        assert white > 600 > 200 > black  # of 765
        assert figures == [[figures[0][0], layout, True]] * 4


def rgb(color: str) -> int:
    return sum(map(int, re.findall(r"\d+", color)[:3]))


def test_the_index_of_the_search_holds_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    places = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert set(pages(site)) == places


def test_api_pages_are_named_as_their_objects_are_imported(site: Path) -> None:
    found = [file for file in (site / "api").rglob("*.html") if file.name != "index.html"]
    assert len(found) > 50
    for file in found:
        heading = re.search(r"<h1[^>]*>(.*?)<a ", file.read_text("utf-8"), re.DOTALL)
        assert heading, file.name
        name = re.sub(r"<[^>]*>", " ", heading[1]).split()[0]  # then labels, such as «dataclass»
        assert pydoc.locate(name) is not None, name
        is_public = file.stem in torchace.__all__
        assert (name == f"torchace.{file.stem}") == is_public, name


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    for file in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", file.read_text("utf-8")):
            source = re.search(r'(?:src|href)="([^"]*)"', tag)
            away = source is not None and urlsplit(source.group(1)).netloc
            assert not away or 'rel="canonical"' in tag, f"{file.name}: {tag}"
