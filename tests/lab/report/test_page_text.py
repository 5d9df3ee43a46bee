from __future__ import annotations

import io
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace._figures import DARK, LIGHT
from torchace.lab.report import Results, markdown, read_results, rich_table, summary_sentences
from torchace.lab.report.page import contents, table_markdown
from torchace.lab.report.tables import Cell, ReportColumn, ReportTable, Section, result_table


def _print_text(results: Results, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(rich_table(results))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize(
    "name", ["table1", "table2", "failing", "single_seed", "regression_fit", "classification_fit", "hostile_fit"]
)
def test_every_row_is_as_wide_as_its_table(name: str, request: pytest.FixtureRequest) -> None:
    found = contents(read_results(request.getfixturevalue(name)))
    tables = [value for section in found.sections for kind, value in section.items if kind == "table"]
    assert len(tables) >= 3
    assert len(set(tables)) == len({table.caption for table in tables}) == len(tables)  # none appears twice
    for table in tables:
        assert all(len(row) == len(table.columns) for section in table.sections for row in section.rows)
        assert sum(span for _, span in table.groups) in (0, len(table.columns))


def _columns(line: str) -> int:
    return len(re.split(r"(?<!\\)\|", line)) - 2


@pytest.mark.parametrize("name", ["failing", "hostile", "regression_fit", "hostile_fit"])
def test_markdown_tables_are_rectangular(name: str, request: pytest.FixtureRequest) -> None:
    text = markdown(read_results(request.getfixturevalue(name)))
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        lines = block.splitlines()
        assert re.fullmatch(r"\|( :?--:? \|)+", lines[1])
        assert {_columns(line) for line in lines} == {_columns(lines[0])}


def test_markdown_holds_the_tables(failing: Path, regression_fit: Path, classification_fit: Path) -> None:
    text = markdown(read_results(failing))
    for heading in ("Results on the test set", "Each λ against λ=0 of the same arm", "Failed runs and damaged files"):
        assert f"\n## {heading}\n" in text
    assert "shared-l0.7-s0" in text
    assert text.endswith("\n")
    text = markdown(read_results(regression_fit))
    for part in ("0.3 (chosen)", "sensor\\_13", "and 204 more", "Every row has another value.", "| target: number |"):
        assert part in text
    assert "## Test cases on which members disagree most" in markdown(read_results(classification_fit))


@pytest.mark.parametrize("name", ["hostile", "hostile_fit"])
def test_markdown_cannot_be_broken_out_of(name: str, request: pytest.FixtureRequest) -> None:
    text = markdown(read_results(request.getfixturevalue(name)))
    assert not re.search(r"<[A-Za-z/!?]", text)
    assert not re.search(r"(?<!\\)\]\(", text)
    assert "\x00" not in text


def test_markdown_is_escaped() -> None:
    table = ReportTable("t", (ReportColumn("a|b"),), (Section("", ((Cell("*x* <b> p <0.001", strong=True),),)),))
    assert table_markdown(table).splitlines() == ["| a\\|b |", "| --: |", "| **\\*x\\* &lt;b> p <0.001** |"]


def test_the_sentence_of_a_search(tmp_path: Path, table1_results: Results) -> None:
    own = read_results(write_fit(tmp_path / "a", FitSpec(arrays=False, search={"sentence": "It pays."})))
    assert ("text", "It pays.") in _search(own)
    none = read_results(write_fit(tmp_path / "b", FitSpec(arrays=False, search={"sentence": ""})))
    assert ("text", "The validation data chose λ=0.3.") in _search(none)
    assert _search(table1_results) == []


def _search(results: Results) -> list[tuple[str, Any]]:
    return [item for part in contents(results).sections for item in part.items if part.title == "The search for λ"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_in_a_terminal(table1_results: Results, width: int) -> None:
    text = _print_text(table1_results, width)
    assert ("exchanged batches (K=5)" if width == 120 else "exchanged") in text
    assert all(word in text for word in ("Acc.", "CE", "Disagr.", "0.0649", "2.42"))


def test_the_terminal_takes_markup_for_text(hostile: Path) -> None:
    assert "<script>" in _print_text(read_results(hostile), 200)


@pytest.mark.parametrize("scale", [50.0, 3e9])
def test_a_regression_in_a_terminal(tmp_path: Path, scale: float) -> None:
    results = read_results(write_fit(tmp_path / "run", FitSpec(arm="sweep", arrays=False, scale=scale)))
    text = _print_text(results, 80 if scale < 1e6 else 120)
    assert all(word in text for word in ("R²", "RMSE", "MAE", "Spread", "Member", "shared"))
    assert ("×10⁹" in text) == (scale > 1e6)
    for row in result_table(results).sections[0].rows:  # no number is broken at eighty characters
        assert all(cell.text in text for cell in row[2:5])


def test_all_arms_stand_beside_the_headline(table1_results: Results) -> None:
    found = contents(table1_results)
    assert found.headline is not None
    assert found.headline.subject.startswith("shared")
    first, second = summary_sentences(table1_results)
    assert first == f"Shared batches. {found.headline.sentence}"
    assert second.startswith("Exchanged batches. λ=")
    assert found.notes == [second]
    assert markdown(table1_results).index("Exchanged batches. λ=") < markdown(table1_results).index("## Results")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_warnings_have_enough_contrast(dark: bool) -> None:
    source = resources.files("torchace.lab.report").joinpath("template.html").read_text("utf-8")
    accent = np.array([*bytes.fromhex(re.findall(r"--accent: #(\w{6});", source)[dark])])
    tint = re.findall(r"--tint: #(\w{8})", source)[dark]
    share = int(tint[6:], 16) / 255
    paper = np.array([*bytes.fromhex((DARK if dark else LIGHT).paper[1:])])
    behind = share * np.array([*bytes.fromhex(tint[:6])]) + (1 - share) * paper

    def luminance(color: Any) -> float:  # WCAG 2
        channels = np.where(color / 255 <= 0.03928, color / 255 / 12.92, ((color / 255 + 0.055) / 1.055) ** 2.4)
        return float(channels @ [0.2126, 0.7152, 0.0722])

    low, high = sorted([luminance(accent), luminance(behind)])
    assert (high + 0.05) / (low + 0.05) >= 4.5
