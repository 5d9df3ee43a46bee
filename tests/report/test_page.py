from __future__ import annotations

import ast
import base64
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import torchace.report
from tests.report import synthetic
from torchace.report import ReportError, read_results, write_report
from torchace.report.drawing import DARK, LIGHT, render
from torchace.report.pictures import pictures
from torchace.report.plots import plots

PACKAGE = Path(torchace.report.__file__).parent


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="session")
def written(pages: Callable[[str], Path]) -> Path:
    return pages("table1")


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing, for tests of everything else."""
    monkeypatch.setattr("torchace.report.page.render", lambda sketch, theme: sketch.name.encode())


def test_writes_page_figures_and_markdown(written: Path) -> None:
    assert written.name == "index.html"
    names = {path.name for path in written.parent.iterdir()}
    figures = {"error", "cross_entropy", "difference_error", "difference_cross_entropy", "disagreement", "ambiguity"}
    figures |= {"mutual_information", "members_0", "members_1", "reliability_0", "reliability_1"}
    figures |= {"matrix_0", "matrix_1", "disputed"}
    expected = {f"{name}{end}.png" for name in figures for end in ("", "-dark")}
    assert names == {"index.html", "results.md"} | expected


def test_the_page_needs_nothing_else(written: Path) -> None:
    page = _Page(written.read_text(encoding="utf-8"))
    assert not page.all("script")
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert len(page.all("img")) == len(page.all("source")) == 14
    for image, source in zip(page.all("img"), page.all("source"), strict=True):
        for uri in (image["src"], source["srcset"]):
            assert uri is not None
            assert uri.startswith("data:image/png;base64,")
            picture = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
            assert (str(picture.width), str(picture.height)) == (image["width"], image["height"])
        assert image["alt"]
    assert "url(" not in written.read_text(encoding="utf-8")


def test_the_page_is_accessible(written: Path) -> None:
    page = _Page(written.read_text(encoding="utf-8"))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert len(page.all("caption")) == len(page.all("table")) >= 5
    assert all(attributes.get("scope") in {"col", "colgroup", "row", "rowgroup"} for attributes in page.all("th"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    labels = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert labels <= ids


def test_the_page_states_what_a_reader_needs(pages: Callable[[str], Path]) -> None:
    text = _Page(pages("failing").read_text(encoding="utf-8")).text.replace("\u00a0", " ")
    for part in ("mnist: 60,000 to train", "MLP 784-128-10", "5 (0, 1, 2, 3, 4)", "NVIDIA H200", "torch 2.13.0"):
        assert part in text
    for part in ("The loss of member 3 is NaN.", "runs/foreign.json", "58 of 65 runs finished", "Bonferroni", "Holm"):
        assert part in text


def test_the_same_files_give_the_same_page(pages: Callable[[str], Path], single_seed: Path, tmp_path: Path) -> None:
    assert write_report(single_seed, tmp_path).read_bytes() == pages("single_seed").read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_writes_into_the_run_directory_by_default(tmp_path: Path) -> None:
    directory = synthetic.small(tmp_path / "run", seeds=[0])
    assert write_report(str(directory)) == directory / "report" / "index.html"


def test_hostile_names_stay_text(pages: Callable[[str], Path]) -> None:
    path = pages("hostile")
    page = _Page(path.read_text(encoding="utf-8"))
    assert not page.all("script")
    assert len(page.all("img")) == len(page.all("figure"))
    assert all(image["src"] and image["src"].startswith("data:") for image in page.all("img"))
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert "{{ 7 * 7 }}" in page.text
    assert {path.suffix for path in path.parent.iterdir()} == {".html", ".md", ".png"}


def test_an_experiment_without_any_run_has_a_page(tmp_path: Path) -> None:
    directory = synthetic.small(tmp_path / "run")
    shutil.rmtree(directory / "runs")
    text = _Page(write_report(directory).read_text(encoding="utf-8")).text
    assert "0 of 15 runs finished" in text


def test_a_single_lambda_has_a_page(tmp_path: Path) -> None:
    arm = synthetic.ArmSpec("a", "one", 3, [0], lambda d: 0.2, lambda d: 0.1)
    directory = synthetic.write(tmp_path / "run", synthetic.Spec("x", "x", [arm], image_shape=None))
    page = _Page(write_report(directory).read_text(encoding="utf-8"))
    assert len(page.all("img")) >= 6


@pytest.mark.usefixtures("no_figures")
def test_a_failed_write_leaves_the_old_page_and_no_litter(
    single_seed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_report(single_seed, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match=r"Could not write the report to .*: No space left on device"):
        write_report(single_seed, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert page.exists()


@pytest.mark.usefixtures("no_figures")
def test_an_unwritable_place_is_one_sentence(single_seed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="Could not write the report to"):
        write_report(single_seed, tmp_path / "file" / "report")


def test_figures_differ_by_theme_and_leave_matplotlib_alone(single_seed: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    results = read_results(single_seed)
    sketches = plots(results) + pictures(results)
    assert "disputed" not in [sketch.name for sketch in sketches]  # no images
    light, dark = render(sketches[0], LIGHT), render(sketches[0], DARK)
    corners = [Image.open(io.BytesIO(png)).convert("RGB").getpixel((0, 0)) for png in (light, dark)]
    assert corners == [(255, 255, 255), (0x16, 0x19, 0x1D)]
    assert dict(matplotlib.rcParams) == before


def test_no_module_of_the_report_imports_torch() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] != "torch"
                assert not name.startswith("torchace") or name.startswith("torchace.report"), f"{path.name}: {name}"


def test_the_report_works_where_torch_does_not(single_seed: Path, tmp_path: Path) -> None:
    """The parent package imports torch; a stand-in with its path alone lets the report load without."""
    script = """
import sys, types
sys.modules["torch"] = None  # importing it fails from here on
package = types.ModuleType("torchace")
package.__path__ = [sys.argv[1]]
sys.modules["torchace"] = package
from torchace.report import markdown, read_results, rich_table, write_report
results = read_results(sys.argv[2])
assert "Digits" in markdown(results)
rich_table(results)
print(write_report(sys.argv[2], sys.argv[3]))
"""
    command = [sys.executable, "-c", script, str(PACKAGE.parent), str(single_seed), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "index.html"


def test_a_missing_package_is_one_sentence(single_seed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("The report needs matplotlib: pip install 'torchace[tool]'.")):
        write_report(single_seed)
