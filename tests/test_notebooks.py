"""The notebooks: committed with small outputs of an execution without errors; executed again in new kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
ids = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(notebook: Any) -> list[list[str]]:
    """Return the outputs of each cell other than text, by kind."""
    return [[min(output["data"]) for output in cell["outputs"] if "data" in output] for cell in code_cells(notebook)]


def printed(notebook: Any) -> list[str]:
    """Return the text that each cell prints, without numbers, which depend on the processor."""
    texts = ["".join("".join(output.get("text", "")) for output in cell["outputs"]) for cell in code_cells(notebook)]
    return [re.sub(r"[\d.]+", "#", text) for text in texts]


def test_there_are_four_on_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert len(NOTEBOOKS) >= 4
    assert [path.stem for path in NOTEBOOKS if f"notebooks/{path.stem}.md" not in navigation] == []


@ids
def test_committed_outputs_are_complete_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    notebook = json.loads(text)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert len(text) < 150_000
    for word in (r"/home/", r"/root/", r"/tmp/", r"/usr/", r"/work/", r"site-packages", r"C:\\\\"):
        assert word not in text
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])


@ids
def test_links_lead_to_pages(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links  # where to go next
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("tools/docs_notebooks.py")


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client and pyzmq
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@ids
def test_an_execution_shows_the_same(path: Path, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    executed, committed = tool.execute(path), json.loads(path.read_text("utf-8"))
    assert kinds(executed) == kinds(committed)
    assert printed(executed) == printed(committed)
