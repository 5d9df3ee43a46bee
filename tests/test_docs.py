"""The documentation's code runs as it stands there, page by page and from top to bottom; the site builds and opens."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from torchace.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name not in ("results", "api")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands that install, need a cluster or another machine, or are run elsewhere in the tests for minutes.
NOT_HERE = re.compile(r"^(pip |make |torchrun |ray |sbatch |kubectl |torchace run )|--ray|postgresql|cuda")
TODAY = {"DESIGN.md", "LOG.md"}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text("utf-8"))


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
        elif language in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        else:
            assert language in ("dockerfile", "toml", "yaml", "text"), (
                f"{page.name} has a block of {language}, which nothing checks"
            )


def run_command(command: str, names: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    if NOT_HERE.search(command):
        return
    words = shlex.split(command)
    assert words[0] == "torchace", f"nothing checks {command!r}"
    if "flowers.csv" in words and not Path("flowers.csv").exists():  # the front page shows what a guide runs
        return
    if words[1] == "predict" and not Path(words[2]).exists():
        return
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code in (0, None), command


def test_links_to_files_are_not_broken() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
