from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.lab.report.fits import FitSpec, write_fit
from torchace._statistics import MeanEstimate, mean_over_seeds_and_samples
from torchace.lab.report import Results, markdown, read_results, rich_table
from torchace.lab.report.columns import schema_tables
from torchace.lab.report.contested_cases import disputed_table
from torchace.lab.report.formats import METRICS
from torchace.lab.report.plots import drawn_arms
from torchace.lab.report.render import table_markdown
from torchace.lab.report.results import Arm
from torchace.lab.report.search_findings import search_table
from torchace.lab.report.setup import arm_table, facts, failure_table
from torchace.lab.report.tables import Table, detail_table, difference_tables, result_table


def _labels(table: Table) -> list[str]:
    return [column.label for column in table.columns]


@pytest.mark.parametrize(
    "name",
    ["table1", "table2", "failing", "single_seed", "regression_fit", "classification_fit", "hostile_fit"],
)
def test_every_row_is_as_wide_as_its_table(name: str, request: pytest.FixtureRequest) -> None:
    results = read_results(request.getfixturevalue(name))
    tables = [result_table(results), detail_table(results), arm_table(results), *difference_tables(results)]
    tables += [*schema_tables(results), *filter(None, (failure_table(results), search_table(results)))]
    tables += filter(None, [disputed_table(results, drawn_arms(results))])
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
    assert "(Bonferroni, 6 λ)" in own.note
    assert "(Bonferroni, 7 λ)" in single.note


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


@pytest.mark.parametrize("name", ["table1", "failing", "hostile", "regression_fit", "hostile_fit"])
def test_markdown_tables_are_rectangular(name: str, request: pytest.FixtureRequest) -> None:
    text = markdown(read_results(request.getfixturevalue(name)))
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


@pytest.mark.parametrize("name", ["hostile", "hostile_fit"])
def test_markdown_cannot_be_broken_out_of(name: str, request: pytest.FixtureRequest) -> None:
    text = markdown(read_results(request.getfixturevalue(name)))
    outside = re.sub(r"^(`{3,})json\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"<[A-Za-z/!?]", outside)
    assert not re.search(r"(?<!\\)\]\(", outside)
    assert "\x00" not in text


def test_table_markdown_escapes() -> None:
    from torchace.lab.report.tables import Cell, Column, Section

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


def test_the_table_of_a_regression(regression_fit: Path, regression_results: Results) -> None:
    table = result_table(regression_results)
    assert _labels(table) == ["λ", "Seeds", "R²", "RMSE", "MAE", "RMSE", "Spread"]
    assert [group for group, _ in table.groups] == ["", "Ensemble", "One member", "Members"]
    model, check = table.sections  # the search was not on the test set
    assert (model.title, check.title) == ("the model that was kept (K=5)", "fresh seeds (K=5)")
    tests = [
        json.loads((regression_fit / "runs" / f"check-l0.3-s{seed}.json").read_text())["metrics"]["test"]
        for seed in range(100, 105)
    ]
    row = [cell.text for cell in check.rows[1]]

    def told(values: list[float], digits: int) -> str:
        return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"

    assert row[:2] == ["0.3", "5"]
    assert row[2] == told([test["r2"] for test in tests], 4)
    assert row[3] == told([np.sqrt(test["mse"]) for test in tests], 2)
    assert row[4] == told([test["mae"] for test in tests], 2)
    assert row[5] == told([np.sqrt(test["member_mse"]) for test in tests], 2)
    assert row[6] == told([test["spread"] for test in tests], 2)
    # high R² is good, low errors are
    assert [cell.strong for cell in check.rows[1]] == [False, False, True, True, True, False, False]
    assert not any(cell.strong for cell in model.rows[0])
    assert "The model that was kept is one training" in table.note


def _squared_error_difference(results: Results, arm: Arm, diversity: float) -> MeanEstimate:
    """Against λ=0 of the same seed, on every test row."""
    chosen, zero = (
        np.stack([np.square(a["predicted"] - a["observed"]) for a in map(results.arrays, results.finished(arm, d))])
        for d in (diversity, 0.0)
    )
    estimate = mean_over_seeds_and_samples(chosen.astype(np.float64) - zero)
    assert estimate is not None
    return estimate


def test_the_differences_of_a_regression_are_of_squared_errors(regression_results: Results) -> None:
    [table] = difference_tables(regression_results)
    assert [group for group, _ in table.groups] == ["", "MSE", "MAE", "Spread"]
    estimate = _squared_error_difference(regression_results, regression_results.arms[1], 0.3)
    low, high = estimate.interval(0.05)
    row = [cell.text for cell in table.sections[0].rows[0]]
    assert row[:2] == ["0.3", "5"]
    assert row[2] == f"{estimate.mean:.1f}".replace("-", "−")
    assert row[3] == f"{low:.1f} to {high:.1f}".replace("-", "−")
    assert "Intervals of mse and mae are for new seeds and new test samples" in table.note


def test_a_regressions_sweep_is_corrected_for_its_lambda(tmp_path: Path) -> None:
    results = read_results(write_fit(tmp_path / "run", FitSpec(arms=["sweep"])))
    [table] = difference_tables(results)
    assert [row[0].text for row in table.sections[0].rows] == ["0.3", "0.9"]
    assert "(Bonferroni, 2 λ)" in table.note
    p = [_squared_error_difference(results, results.arms[0], diversity).p for diversity in (0.3, 0.9)]
    largest = min(1, 2 * max(p))
    expected = "<0.001" if largest < 0.001 else f"{largest:.3f}"
    assert table.sections[0].rows[int(np.argmax(p))][4].text == expected


def test_details_of_a_regression(regression_results: Results) -> None:
    table = detail_table(regression_results)
    assert table.caption == "Squared error and diversity"
    assert _labels(table) == ["λ", "MSE", "MSE", "Spread", "Ambiguity", "Averaged away, %"]
    run = next(run for run in regression_results.runs if run.arm == "model").metrics["test"]
    row = [cell.text for cell in table.sections[0].rows[0]]
    assert row[4] == f"{run['member_mse'] - run['mse']:.1f}"
    assert row[5] == f"{100 * (1 - run['mse'] / run['member_mse']):.2f}"


def test_seeds_of_every_arm_are_stated(regression_results: Results) -> None:
    assert dict(facts(regression_results))["Seeds"] == (
        "search for λ: 3 (0, 1, 2); fresh seeds: 5 (100, 101, 102, 103, 104); the model that was kept: 1 (7)"
    )
    assert [row[-1].text for row in arm_table(regression_results).sections[0].rows] == [
        "0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9",
        "0, 0.3",
        "0.3",
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("scale", [50.0, 3e9])
def test_rich_table_of_a_regression_prints(tmp_path: Path, scale: float, width: int) -> None:
    spec = FitSpec(arms=["check", "model"], arrays=False, scale=scale)
    results = read_results(write_fit(tmp_path / "fit", spec))
    console = Console(file=io.StringIO(), width=width)
    console.print(rich_table(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text for word in ("R²", "RMSE", "MAE", "Spread", "Member", "fresh seeds"))
    assert ("×10⁹" in text) == (scale > 1e6)
    for row in result_table(results).sections[1].rows:  # no number is broken at eighty characters
        assert all(cell.text in text for cell in row[2:5])


def test_markdown_of_a_fit_holds_everything(regression_fit: Path, classification_fit: Path) -> None:
    text = markdown(read_results(regression_fit))
    for heading in ("In short", "The search for λ", "Results", "Squared error and diversity", "The data", "Setup"):
        assert f"\n## {heading}\n" in text
    for part in ("0.3 (chosen)", "sensor\\_13", "and 204 more", "Every row has another value.", "- **Target**: price"):
        assert part in text
    assert "- Categories seen fewer than five times were put together." in text
    assert "## The test rows the members dispute most" in markdown(read_results(classification_fit))
