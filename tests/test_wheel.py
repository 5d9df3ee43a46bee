"""The wheel in a separate environment: metadata for PyPI, the bare library, and all code of README and docs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sklearn.datasets import load_iris

from tests.support import wheel as wheels
from tests.test_docs import PAGES

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "support" / "run_pages.py"
# Pages that say that they need more than the extra `tool`.
EXTRAS = {
    "lightning.md": ("lightning",),
    "transformers.md": ("transformers",),
    "timm.md": ("timm",),
    "adapters.md": ("transformers", "peft"),
    "data.md": ("onnx",),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("dist"), TORCHACE_REPOSITORY="https://example.org/owner/torchace")


def environment() -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"}


def test_twine_accepts_both_files(wheel: Path) -> None:
    files = [str(file) for file in wheel.parent.iterdir()]
    assert len(files) == 2
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, capture_output=True)


def test_pypi_gets_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert all(link.startswith(("https://", "#")) for link in links)
    assert re.search(r"\]\(https://example.org/owner/torchace/raw/v[\d.]+/docs/figures/knob.svg\)", text)
    assert "Project-URL: Repository, https://example.org/owner/torchace\n" in text


def test_the_bare_library(wheel: Path, tmp_path: Path) -> None:
    """As in tests/test_import.py, but nothing is hidden: the optional packages are not there."""
    python = wheels.install(wheel, tmp_path / "venv")
    code = (
        "import pydoc, sys, torch, torchace\n"
        "from torchace import *\n"
        "print(hasattr(torchace, 'ACEClassifier'), EnsembleMetrics.__module__)\n"
        "page = pydoc.plain(pydoc.render_doc(torchace))\n"
        "print(all(name in page for name in torchace.__all__))\n"
        "logits = StackedEnsemble(mlp(4, 8, 3) for _ in range(2))(torch.randn(5, 4))\n"
        "print(amended_cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1]), 0.5).isfinite().item())\n"
        "print('sklearn' in sys.modules, 'matplotlib' in sys.modules)\n"
        "try:\n"
        "    ACEClassifier()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=environment())
    assert done.stdout.splitlines() == [
        "True torchace.metrics.ensemble",
        "True",
        "True",
        "False False",
        "The estimators need scikit-learn: pip install 'torchace[tool]'.",
    ], done.stderr
    command = [python.with_name("torchace"), "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stderr) == (1, "The command line needs typer: pip install 'torchace[tool]'.\n")


@pytest.fixture(scope="module")
def run_page(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, Path], str | None]]:
    """A function that runs a page in an environment with the extras that it needs; one process for each environment."""
    processes: dict[tuple[str, ...], subprocess.Popen[str]] = {}

    def run(page: Path, folder: Path) -> str | None:
        extras = EXTRAS.get(page.name, ()) if page.parent.name == "guides" else ()
        if extras not in processes:
            python = wheels.install(wheel, tmp_path_factory.mktemp("environment") / "venv", "tool", *extras)
            processes[extras] = subprocess.Popen(
                [python, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
            )
        process = processes[extras]
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([str(page), str(folder)]), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield run
    for process in processes.values():
        process.communicate()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_runs(page: Path, run_page: Callable[[Path, Path], str | None], tmp_path: Path) -> None:
    if page.name == "README.md":  # guides make the table that they use
        frame = load_iris(as_frame=True).frame.rename(columns={"target": "species"})
        frame.to_csv(tmp_path / "flowers.csv", index=False)
        frame.drop(columns="species").to_csv(tmp_path / "new.csv", index=False)
    assert run_page(page, tmp_path) is None
