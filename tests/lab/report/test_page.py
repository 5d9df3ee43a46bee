from __future__ import annotations

import ast
import base64
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import torchace.lab.report
from tests.lab.report import synthetic_sweeps
from tests.lab.report.figure_lines import draw
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace._figures import DARK, LIGHT, FigureSpec, render
from torchace.lab.report import ResultFileError, markdown, read_results, write_report
from torchace.lab.report.page import figures, page_html

PACKAGE = Path(torchace.lab.report.__file__).parent


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
    monkeypatch.setattr("torchace.lab.report.page.render_svg", lambda spec: f"<svg>{spec.name}</svg>")


def test_writes_page_figures_and_markdown(written: Path) -> None:
    assert written.name == "index.html"
    names = {path.name for path in written.parent.iterdir()}
    figures = {"error", "cross_entropy", "difference_cross_entropy", "disagreement", "reliability_0", "reliability_1"}
    assert names == {"index.html", "results.md"} | {f"{name}.svg" for name in figures}


def test_the_page_needs_nothing_else(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    page = _Page(text)
    assert page.all("script") == [{}]  # sorts tables
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert len(page.all("figure")) == len([svg for svg in page.all("svg") if svg.get("aria-label")]) == 6
    assert not page.all("image")
    for image in page.all("img"):  # contested cases
        assert image["src"] is not None
        assert Image.open(io.BytesIO(base64.b64decode(image["src"].split(",")[1]))).size == (28, 28)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert not re.search(r"(src|href)=.https?:", text)


def test_a_figure_has_tooltips_and_follows_the_page(written: Path) -> None:
    svg = (written.parent / "cross_entropy.svg").read_text(encoding="utf-8")
    titles = re.findall(r"<title>(.+?)</title>", svg)
    assert "exchanged batches, λ=0.3: 0.0633" in titles
    assert "var(--color0)" in svg
    assert "@media (prefers-color-scheme: dark)" in svg
    assert not re.search(r"#0[12]0[12]\d\d", svg)  # every color is one of the page's
    assert "exchanged batches" in re.sub("<[^>]+>", "", svg)  # text, not outlines
    ids = re.findall(r' id="([^"]+)"', written.read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["table1", "regression_fit", "classification_fit", "hostile_fit"])
def test_the_page_is_accessible(pages: Callable[[str], Path], name: str) -> None:
    page = _Page(pages(name).read_text(encoding="utf-8"))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert len(page.all("caption")) == len(page.all("table")) >= 5
    assert all(attributes.get("scope") in {"col", "colgroup", "row", "rowgroup"} for attributes in page.all("th"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    labels = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert labels <= ids


def test_the_page_states_what_a_reader_needs(failing: Path) -> None:
    text = _Page(page_html(read_results(failing), {})).text.replace("\u00a0", " ")
    for part in ("mnist: 60,000 for training", "MLP 784-128-10", "5 (0, 1, 2, 3, 4)", "NVIDIA H200", "torch 2.13.0"):
        assert part in text
    for part in (
        "The loss of member 3 is NaN.",
        "runs/foreign.json",
        "58 of 65 runs finished",
        "Bonferroni",
        "seeds alone",
    ):
        assert part in text


@pytest.mark.extended
def test_the_same_files_give_the_same_page(pages: Callable[[str], Path], single_seed: Path, tmp_path: Path) -> None:
    assert write_report(single_seed, tmp_path).read_bytes() == pages("single_seed").read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_writes_into_the_run_directory_by_default(tmp_path: Path) -> None:
    directory = synthetic_sweeps.small(tmp_path / "run", seeds=[0])
    assert write_report(str(directory)) == directory / "report" / "index.html"


@pytest.mark.parametrize("name", [pytest.param("hostile", marks=pytest.mark.extended), "hostile_fit"])
def test_hostile_names_stay_text(pages: Callable[[str], Path], name: str) -> None:
    path = pages(name)
    page = _Page(path.read_text(encoding="utf-8"))
    assert page.all("script") == [{}]  # ours
    assert all(image["src"] and image["src"].startswith("data:") for image in page.all("img"))
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert "{{ 7 * 7 }}" in page.text
    assert {path.suffix for path in path.parent.iterdir()} == {".html", ".md", ".svg"}
    assert "<script" not in path.with_name("results.md").read_text(encoding="utf-8").lower()


def test_an_experiment_without_any_run_has_a_page(tmp_path: Path) -> None:
    directory = synthetic_sweeps.small(tmp_path / "run")
    shutil.rmtree(directory / "runs")
    text = _Page(write_report(directory).read_text(encoding="utf-8")).text
    assert "0 of 15 runs finished" in text


def test_a_single_lambda_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchace.lab.report.page.render_svg", _draw_only)
    arm = synthetic_sweeps.ArmSpec("a", "one", 3, [0], lambda d: 0.2, lambda d: 0.1)
    directory = synthetic_sweeps.write(tmp_path / "run", synthetic_sweeps.Spec("x", "x", [arm], image_shape=None))
    page = _Page(write_report(directory).read_text(encoding="utf-8"))
    assert len(page.all("figure")) >= 4


@pytest.mark.usefixtures("no_figures")
def test_a_failed_write_leaves_the_old_page_and_no_litter(
    single_seed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_report(single_seed, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultFileError, match=r"Could not write the report to .*: No space left on device"):
        write_report(single_seed, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert page.exists()


@pytest.mark.usefixtures("no_figures")
def test_an_unwritable_place_is_one_sentence(single_seed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultFileError, match="Could not write the report to"):
        write_report(single_seed, tmp_path / "file" / "report")


def test_figures_differ_by_theme_and_leave_matplotlib_alone(single_seed: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    results = read_results(single_seed)
    specs = figures(results)
    light, dark = render(specs[0], LIGHT), render(specs[0], DARK)
    corners = [Image.open(io.BytesIO(png)).convert("RGB").getpixel((0, 0)) for png in (light, dark)]
    assert corners == [(255, 255, 255), (0x1E, 0x21, 0x29)]
    assert dict(matplotlib.rcParams) == before


def test_no_module_of_the_report_imports_torch() -> None:
    root = PACKAGE.parents[1]
    names = ("_extras", "_files", "_figures", "_statistics")
    shared = [*(root / f"{name}.py" for name in names), *(root / "lab/schema").glob("*.py")]
    shared.append(root / "diagnosis/advice.py")
    ours = tuple(f"torchace.{name}" for name in ("lab.report", "lab.schema", "diagnosis.advice", *names))
    for path in (*PACKAGE.rglob("*.py"), *shared):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] != "torch"
                assert not name.startswith("torchace") or name.startswith(ours), f"{path.name}: {name}"


def test_the_report_works_where_torch_does_not(single_seed: Path, tmp_path: Path) -> None:
    """The parent package imports torch; a stand-in with its path alone lets the report load without."""
    script = """
import sys, types
sys.modules["torch"] = None  # importing it fails from here on
package = types.ModuleType("torchace")
package.__path__ = [sys.argv[1]]
sys.modules["torchace"] = package
from torchace.lab.report import markdown, read_results, rich_table, write_report
results = read_results(sys.argv[2])
assert "Digits" in markdown(results)
rich_table(results)
print(write_report(sys.argv[2], sys.argv[3]))
"""
    command = [sys.executable, "-c", script, str(PACKAGE.parents[1]), str(single_seed), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "index.html"


def test_a_missing_package_is_one_sentence(single_seed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("Drawing figures needs matplotlib: pip install 'torchace[tool]'.")):
        write_report(single_seed)


def _figures(page: Path) -> set[str]:
    return {path.stem for path in page.parent.glob("*.svg")}


def test_the_figures_of_fits(pages: Callable[[str], Path]) -> None:
    assert _figures(pages("regression_fit")) == {"predicted_0"}
    assert _figures(pages("classification_fit")) == {"reliability_0"}


@pytest.mark.parametrize("name", ["regression_fit", "classification_fit"])
def test_the_page_of_a_fit_needs_nothing_else(pages: Callable[[str], Path], name: str) -> None:
    page = _Page(pages(name).read_text(encoding="utf-8"))
    assert page.all("script") == [{}]
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert len(page.all("figure")) == len(_figures(pages(name)))
    assert not page.all("img")
    assert not page.all("a")


def test_lines_do_not_break_before_a_unit_or_within_a_comparison(failing: Path) -> None:
    results = read_results(failing)
    stated = results.experiment.model_copy(update={"description": "λ > 0 lowers it by 4 %."})
    assert "λ\u00a0&gt;\u00a00 lowers it by 4\u00a0%." in page_html(replace(results, experiment=stated), {})


def test_the_page_of_a_fit_states_what_a_reader_needs(pages: Callable[[str], Path]) -> None:
    text = _Page(pages("regression_fit").read_text(encoding="utf-8")).text.replace("\u00a0", " ")
    for heading in ("The search for λ", "Results on the test set", "The data", "Diversity and squared error"):
        assert heading in text
    for part in (
        "R² on 240 test rows",
        "lowers the loss on the test samples.",
        "0.3 (chosen)",
        "sensor_13",
        "and 204 more",
    ):
        assert part in text
    for part in ("target: number", "Every row has another value.", "Categories seen fewer than five times", "R²"):
        assert part in text
    for absent in ("Reliability", "cross entropy", "Accuracy", "Contested cases"):
        assert absent not in text
    text = _Page(pages("classification_fit").read_text(encoding="utf-8")).text
    for part in ("Contested cases", "Row of the file", "Diversity and calibration", "target: classes"):
        assert part in text
    for absent in ("R²", "RMSE", "squared"):
        assert absent not in text


def test_details_are_folded(pages: Callable[[str], Path]) -> None:
    text = pages("regression_fit").read_text(encoding="utf-8")
    folds = re.findall(r"<details( open)?>\s*<summary><h2>(.+?)</h2></summary>", text)
    assert [title for is_open, title in folds if is_open] == ["Results on the test set"]
    assert [title for is_open, title in folds if not is_open] == [
        "The search for λ", "Diversity and squared error", "The data", "Setup",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_figures")
def test_a_table_with_thousands_of_columns_has_a_page(tmp_path: Path) -> None:
    columns = [{"name": f"pixel{i}", "kind": "number", "mean": i, "std": 1} for i in range(20_000)]
    schema = {"target": {"name": "y", "classes": [f"c{i}" for i in range(5000)]}, "columns": columns}
    directory = write_fit(tmp_path / "fit", FitSpec(arrays=False, schema=schema))
    page = write_report(directory)
    assert page.stat().st_size < 1_000_000
    assert "19,000 more are not listed." in page.read_text(encoding="utf-8")
    assert "Columns (20,000)" in (page.parent / "results.md").read_text(encoding="utf-8")


EDGES = {
    "λ=0 chosen": FitSpec(chosen=0.0),
    "one member of a classifier": FitSpec(task="classification", num_members=1, chosen=0.0, search=None),
    "large numbers": FitSpec(scale=1e40, search_seeds=[0]),
    "small numbers": FitSpec(scale=1e-60, search_seeds=[0]),
    "one test row": FitSpec(test=1, search=None),
    "a failed model": FitSpec(failed=[(0.3, 7)], search_seeds=[0]),
    "no schema": FitSpec(search=None, overrides={"data": {"name": "x.npz", "train": 9, "test": 240}}),
    "no test": FitSpec(search=None, overrides={"data": {"name": "x.npz", "train": 9, "test": 0}}),
    "an empty schema": FitSpec(search=None, schema={"target": {"name": ""}, "columns": []}),
    "a regression's sweep": FitSpec(arm="sweep", sweep_seeds=[1, 2]),
}


def _draw_only(spec: FigureSpec) -> str:
    """Draw without rendering, for tests with many pages."""
    draw(spec)
    return ""


@pytest.mark.parametrize("name", EDGES)
def test_fits_of_all_kinds_have_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchace.lab.report.page.render_svg", _draw_only)
    directory = write_fit(tmp_path / "fit", EDGES[name])
    results = read_results(directory)
    assert results.damaged == {}
    page = _Page(write_report(directory).read_text(encoding="utf-8"))
    assert not re.search(r"\b(nan|inf|None)\b", page.text)
    assert ("The data" in page.text) == (results.data.table is not None)
    assert ("The search for λ" in page.text) == (results.experiment.search is not None)


ODD = [None, "x", "", -1, 0, float("nan"), [], {}, 1e300, -1e99, 1e-300, True, 10**400, [None], [[]], 3.7]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in parsed JSON."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*place, key)
        yield from _places(value[key], (*place, key))


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_damage_anywhere_is_a_sentence_or_a_page(task: str, tmp_path: Path) -> None:
    spec = FitSpec(task=task, arrays=False, search_seeds=[0], test=40)
    directory = write_fit(tmp_path / "fit", spec)
    rng = random.Random(task)
    refused = []
    for _ in range(60):
        file = directory / rng.choice(["experiment.json", "experiment.json", "runs/model-l0.3-s7.json"])
        whole = file.read_text()
        content = json.loads(whole)
        *outer, last = rng.choice(list(_places(content)))
        inner = content
        for key in outer:
            inner = inner[key]
        inner[last] = rng.choice(ODD)
        file.write_text(json.dumps(content))
        try:
            results = read_results(directory)
            assert all("\n" not in reason for reason in results.damaged.values())
            assert page_html(results, {spec.name: "" for spec in figures(results)})
            assert markdown(results)
        except ResultFileError as error:
            refused.append(str(error))
        file.write_text(whole)
    assert 0 < len(refused) < 60
    assert all("experiment.json" in sentence and "\n" not in sentence for sentence in refused)
