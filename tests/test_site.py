"""The documentation's site: built with warnings as errors, opened in a headless Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("TORCHACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
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
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def opened(url: str, folder: Path) -> tuple[str, list[str]]:
    """The page as it is after its scripts have run, and what it wrote to the console."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=15000", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@needs_browser
@pytest.mark.parametrize("page", ["index.html", "how.html", "choosing.html", "guides/data.html", "api/functional.html"])
def test_pages_open_without_an_error(address: str, page: str, tmp_path: Path) -> None:
    content, console = opened(f"{address}/{page}", tmp_path)
    assert console == []
    assert "<h1" in content
    if page in ("how.html", "api/functional.html"):
        assert content.count("<math") >= 5
        assert "arithmatex" not in content  # every formula was converted


def test_the_index_of_the_search_knows_what_is_written(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"] if "disagreement" in entry["text"].lower()}
    assert {"api/functional.html", "choosing.html"} <= found
    assert 'data-md-component="search"' in (site / "index.html").read_text("utf-8")


def test_the_index_of_the_search_holds_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    places = {entry["location"].split("#")[0] for entry in index["docs"]}
    for page in site.rglob("*.html"):
        name = str(page.relative_to(site))
        assert name in places or name == "404.html" or (name == "index.html" and "index.html" in places | {""})


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text("utf-8")):
            source = re.search(r'(?:src|href)="(https?:)?//', tag)
            assert source is None or 'rel="canonical"' in tag, f"{page.name}: {tag}"
