from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from torchace.report import Results, markdown, read_results, rich_table
from torchace.report.formats import METRICS
from torchace.report.render import table_markdown
from torchace.report.setup import arm_table, facts, failure_table
from torchace.report.tables import Table, detail_table, difference_tables, result_table


def _labels(table: Table) -> list[str]:
    return [column.label for column in table.columns]


def test_every_row_is_as_wide_as_its_table(table1: Path, table2: Path, failing: Path, single_seed: Path) -> None:
    for directory in (table1, table2, failing, single_seed):
        results = read_results(directory)
        tables = [result_table(results), detail_table(results), arm_table(results), *difference_tables(results)]
        tables += [table for table in [failure_table(results)] if table]
        for table in tables:
            assert all(len(row) == len(table.columns) for section in table.sections for row in section.rows)
            assert sum(span for _, span in table.groups) in (0, len(table.columns))


def test_result_table_has_our_numbers_beside_the_papers(table1_results: Results) -> None:
    table = result_table(table1_results)
    assert _labels(table) == [
        "λ", "Seeds", "Accuracy", "paper", "Cross entropy", "paper", "Accuracy", "paper", "Cross entropy", "paper",
        "Disagreement, %",
    ]  # fmt: skip
    shared = table.sections[0]
    assert shared.title == "shared batches (K=5)"
    row = [cell.text for cell in shared.rows[4]]
    values = np.array(list(table1_results.values(table1_results.arms[0], 0.5, "cross_entropy").values()))
    assert row[:2] == ["0.5", "5"]
    assert row[4] == f"{values.mean():.4f} ± {values.std(ddof=1):.4f}"
    assert [row[3], row[5], row[7], row[9]] == ["0.9802", "0.0649", "0.9764", "0.0842"]
    assert [cell.text for cell in shared.rows[0]][3] == "–"  # the paper's λ=0 had separate batches
    assert [cell.text for cell in table.sections[2].rows[0]][3] == "0.9790"


def test_the_best_of_an_arm_stands_out_once(table1_results: Results) -> None:
    for section in result_table(table1_results).sections[:2]:
        for column in (2, 4, 6, 8):
            assert sum(row[column].strong for row in section.rows) == 1
    assert not any(cell.strong for row in result_table(table1_results).sections[2].rows for cell in row)


def test_table2_states_errors_and_no_disagreement_of_one_member(table2_results: Results) -> None:
    table = result_table(table2_results)
    assert _labels(table)[2:5] == ["Error, %", "paper", "Cross entropy"]
    single, control, smoc = table.sections
    assert [cell.text for cell in single.rows[0]][3] == "6.43"
    assert single.rows[0][-1].text == "–"
    assert [cell.text for cell in control.rows[0]][3] == "–"
    assert [row[3].text for row in smoc.rows] == ["6.20", "6.14", "6.12", "5.98", "6.09", "6.13", "6.31"]


def test_a_lambda_without_finished_runs_keeps_its_row(failing: Path) -> None:
    exchanged = result_table(read_results(failing)).sections[1]
    assert [cell.text for cell in exchanged.rows[-1]][:3] == ["0.7", "0", "–"]


def test_paper_rows_without_a_run_are_named(hostile: Path) -> None:
    assert "Rows of the paper without a run here: <script>" in result_table(read_results(hostile)).note


def test_differences_against_own_zero_and_each_baseline(table2_results: Results) -> None:
    own, single, control = difference_tables(table2_results)
    assert own.caption == "Each λ against λ=0 of the same arm"
    assert [group for group, _ in own.groups] == ["", "Error, points", "Cross entropy", "Disagreement, points"]
    # K=1 has no disagreement to subtract
    assert [group for group, _ in single.groups] == ["", "Error, points", "Cross entropy"]
    assert [row[0].text for row in own.sections[0].rows] == ["0.001", "0.01", "0.05", "0.1", "0.3", "0.5"]
    assert [row[0].text for row in control.sections[0].rows] == ["0", "0.001", "0.01", "0.05", "0.1", "0.3", "0.5"]
    assert "Bonferroni width for its 6 λ" in own.note
    assert "Bonferroni width for its 7 λ" in single.note


def test_one_seed_says_that_there_is_no_interval(single_seed: Path) -> None:
    [table] = difference_tables(read_results(single_seed))
    assert [cell.text for cell in table.sections[0].rows[0]][3] == "one seed: no interval"
    assert "too few seeds" in table.note


def test_failures_and_damage_are_tabled(failing: Path, table1_results: Results) -> None:
    table = failure_table(read_results(failing))
    assert table is not None
    rows = [[cell.text for cell in row] for row in table.sections[0].rows]
    assert len(rows) == 9
    assert rows[0] == [
        "shared-l0.7-s0",
        "shared batches",
        "0.7",
        "0",
        "step 1,204, member 3",
        "The loss of member 3 is NaN.",
    ]
    assert rows[-1][0] == "runs/shared-l0.3-s0.safetensors"
    assert failure_table(table1_results) is None


def test_facts(table1_results: Results) -> None:
    found = dict(facts(table1_results))
    assert found["Data"].startswith("mnist: 60,000 to train, 10,000 to test; 10 classes (0, 1,")
    assert found["Seeds"] == "5 (0, 1, 2, 3, 4)"
    assert found["Hardware"] == "device NVIDIA H200; cpu two cores; threads 2"
    assert found["Time"] == "9.8 s, started 2026-01-31 12:00 UTC"


def test_metric_texts() -> None:
    error = METRICS["error"]
    assert error.value(0.0643) == "6.43 %"
    assert error.difference(-0.00044) == "−0.044 points"
    assert METRICS["cross_entropy"].interval((-0.0012, 0.0003)) == "−0.00120 to +0.00030"


def _columns(line: str) -> int:
    return len(re.split(r"(?<!\\)\|", line)) - 2


def test_markdown_tables_are_rectangular(table1: Path, failing: Path, hostile: Path) -> None:
    for directory in (table1, failing, hostile):
        text = markdown(read_results(directory))
        blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
        assert len(blocks) >= 5
        for block in blocks:
            lines = block.splitlines()
            assert re.fullmatch(r"\|( :?--:? \|)+", lines[1])
            assert {_columns(line) for line in lines} == {_columns(lines[0])}


def test_markdown_holds_everything(failing: Path) -> None:
    text = markdown(read_results(failing))
    for heading in ("What the knob did", "Results", "Paired differences", "Calibration and diversity", "Setup"):
        assert f"\n## {heading}\n" in text
    assert "## Failed runs and damaged files" in text
    assert "shared-l0.7-s0" in text
    assert "NVIDIA H200" in text
    assert text.endswith("\n")


def test_markdown_cannot_be_broken_out_of(hostile: Path) -> None:
    text = markdown(read_results(hostile))
    outside = re.sub(r"^(`{3,})json\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"<[A-Za-z/!?]", outside)
    assert not re.search(r"(?<!\\)\]\(", outside)
    assert "\x00" not in text


def test_table_markdown_escapes() -> None:
    from torchace.report.tables import Cell, Column, Section

    table = Table("t", (Column("a|b"),), (Section("", ((Cell("*x* <b> p <0.001", strong=True),),)),))
    assert table_markdown(table).splitlines() == ["| a\\|b |", "| --: |", "| **\\*x\\* &lt;b> p <0.001** |"]


@pytest.mark.parametrize("width", [80, 120])
def test_rich_table_prints(table1_results: Results, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(rich_table(table1_results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert ("exchanged batches (K=5)" if width == 120 else "exchanged") in text
    assert all(word in text for word in ("Acc.", "CE", "paper", "Disagr.", "0.0649", "2.42"))


def test_rich_table_takes_markup_for_text(hostile: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(rich_table(read_results(hostile)))
    assert "<script>" in console.file.getvalue()  # type: ignore[attr-defined]
