"""The documentation's code runs as it stands there, page by page, from top to bottom; its figures are drawn again."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchace as ace
from torchace.lab.cli.app import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if not {"results", "api"} & set(page.relative_to(DOCS).parts)]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands that install, need a cluster or another machine, or are run elsewhere in the tests for minutes.
NOT_HERE = re.compile(r"^(pip |make |torchrun |ray |sbatch |kubectl |torchace run (?!my\.toml))|--ray|postgresql|cuda")
TODAY = {"DESIGN.md"}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text("utf-8"))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in TODAY], ids=lambda p: str(p.relative_to(DOCS))
)
def test_every_code_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "docs"}
    for language, code in blocks(page):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, f"{page.name}", "exec"), names)
        elif language == "console":
            for line in code.splitlines():
                if line.startswith("$ "):
                    run_command(line[2:].split("  #")[0].strip(), names, monkeypatch)
        elif language == "toml":
            Path("my.toml").write_text(code, "utf-8")  # what the page calls it
        elif language in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        else:
            assert language in ("dockerfile", "yaml", "text"), (
                f"{page.name} has a block of {language}, which nothing checks"
            )


def run_command(command: str, names: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    if NOT_HERE.search(command):
        return
    words = shlex.split(command)
    assert words[0] == "torchace", f"nothing checks {command!r}"
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code in (0, None), command


def test_every_public_name_has_its_place() -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "api").rglob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    public = {name for name in ace.__all__ if not isinstance(getattr(ace, name), ModuleType)}
    assert {name for name in public if not name.startswith("_")} - shown == set()


@pytest.mark.extended
def test_the_figures_are_drawn_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "tools" / "docs_figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    monkeypatch.setattr(figures, "STEPS", 5)
    drawn = {path.name for path in figures.main(tmp_path)}
    assert drawn == {path.name for path in tmp_path.iterdir()}
    assert all("<svg" in (tmp_path / name).read_text("utf-8") for name in drawn)
    # what is there is what the script draws and what pages show, each for wide pages and for phones
    assert {path.name for path in (DOCS / "figures").iterdir()} == drawn
    pages = "".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))
    assert {
        f"{name}{layout}.svg" for name in re.findall(r"figures/(\w+)\.svg\)", pages) for layout in ("", "_narrow")
    } == drawn


def test_links_to_files_are_not_broken() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
