from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.lab.report.synthetic_fits import GRID, REFINED, FitSpec, validation_loss, write_fit
from torchace._statistics import MeanEstimate, mean_over_seeds_and_samples
from torchace.lab.report import Results, read_results
from torchace.lab.report.tables import ReportTable, detail_table, difference_tables, result_table, search_table


def _labels(table: ReportTable) -> list[str]:
    return [column.label for column in table.columns]


def _texts(table: ReportTable, section: int = 0) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.sections[section].rows]


def test_results_and_the_papers_numbers(table1_results: Results) -> None:
    table = result_table(table1_results)
    assert _labels(table) == [
        "λ", "Seeds", "Accuracy", "paper", "Cross entropy", "paper", "Accuracy", "paper", "Cross entropy", "paper",
        "Disagreement, %",
    ]  # fmt: skip
    assert table.sections[0].title == "shared batches (K=5)"
    row = _texts(table)[4]
    values = np.array(list(table1_results.values(table1_results.arms[0], 0.5, "cross_entropy").values()))
    assert row[:2] == ["0.5", "5"]
    assert row[4] == f"{values.mean():.4f} ± {values.std(ddof=1):.4f}"
    assert [row[3], row[5], row[7], row[9]] == ["0.9802", "0.0649", "0.9764", "0.0842"]
    assert _texts(table)[0][3] == "–"  # the paper's λ=0 had separate batches
    assert _texts(table, 2)[0][3] == "0.9790"
    for section in table.sections[:2]:  # the best of an arm is highlighted once
        for column in (2, 4, 6, 8):
            assert sum(row[column].strong for row in section.rows) == 1
    assert not any(cell.strong for row in table.sections[2].rows for cell in row)


def test_a_paper_that_states_errors(table2_results: Results) -> None:
    table = result_table(table2_results)
    assert _labels(table)[2:5] == ["Error, %", "paper", "Cross entropy"]
    assert _texts(table, 0)[0][3] == "6.43"
    assert _texts(table, 0)[0][-1] == "–"  # no disagreement of one member
    assert _texts(table, 1)[0][3] == "–"
    assert [row[3] for row in _texts(table, 2)] == ["6.20", "6.14", "6.12", "5.98", "6.09", "6.13", "6.31"]


def test_differences_to_own_zero_and_to_each_baseline(table2_results: Results) -> None:
    own, single, control = difference_tables(table2_results)
    assert own.caption == "Each λ against λ=0 of the same arm"
    assert [group for group, _ in own.groups] == ["", "Cross entropy", "Error, points", "Disagreement, points"]
    assert _texts(single)[0][-2:] == ["–", "–"]  # K=1 has no disagreement to subtract
    assert [row[0] for row in _texts(own)] == ["0.001", "0.01", "0.05", "0.1", "0.3", "0.5"]
    assert [row[0] for row in _texts(control)] == ["0", "0.001", "0.01", "0.05", "0.1", "0.3", "0.5"]
    assert "(Bonferroni, up to 6)" in own.note
    assert "(Bonferroni, up to 7)" in single.note


def test_one_seed_has_no_interval(single_seed: Path) -> None:
    [table] = difference_tables(read_results(single_seed))
    assert _texts(table)[0][3] == "one seed: no interval"
    assert "too few seeds" in table.note


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return read_results(write_fit(tmp_path_factory.mktemp("sweep") / "run", FitSpec(arm="sweep")))


def test_results_of_a_regression(sweep: Results) -> None:
    table = result_table(sweep)
    assert _labels(table) == ["λ", "Seeds", "R²", "RMSE", "MAE", "RMSE", "Spread"]
    assert [group for group, _ in table.groups] == ["", "Ensemble", "One member", "Members"]
    runs = [sweep.scores(run) for run in sweep.finished(sweep.arms[0], 0.3)]

    def mean_sd(key: str, mean: str = ".4g", sd: str = ".2g") -> str:
        values = [run[key] for run in runs]
        return f"{np.mean(values):{mean}} ± {np.std(values, ddof=1):{sd}}"

    rmse = f"{np.mean([np.sqrt(run['mse']) for run in runs]):.4g} ±"
    row = _texts(table)[1]
    assert row[:2] == ["0.3", "5"]
    assert row[2:] == [mean_sd("r2", ".4f", ".4f"), *(mean_sd(key) for key in ("rmse", "mae", "member_rmse", "spread"))]
    assert row[3].startswith(rmse)
    # high R² is good, low errors are
    assert [cell.strong for cell in table.sections[0].rows[1]] == [False, False, True, True, True, False, False]


def test_differences_of_a_regression_are_over_seeds_and_samples(sweep: Results) -> None:
    def estimate(diversity: float) -> MeanEstimate:
        """The squared errors minus those at λ=0 of the same seed, on every test row."""
        chosen, zero = (
            np.stack([np.square(a["predicted"] - a["observed"]) for a in map(sweep.arrays, runs)])
            for runs in (sweep.finished(sweep.arms[0], diversity), sweep.finished(sweep.arms[0], 0.0))
        )
        found = mean_over_seeds_and_samples(chosen.astype(np.float64) - zero)
        assert found is not None
        return found

    [table] = difference_tables(sweep)
    assert [group for group, _ in table.groups] == ["", "MSE", "MAE", "Spread"]
    assert "(Bonferroni, up to 2)" in table.note
    assert "and cover new seeds and new test samples where these were recorded" in table.note
    for diversity, row in zip((0.3, 0.9), _texts(table), strict=True):
        found = estimate(diversity)
        low, high = found.interval(0.025)
        assert row[:2] == [f"{diversity:g}", "5"]
        assert row[2] == f"{found.mean:+.4g}".replace("-", "−")
        assert row[3] == f"{low:+.4g} to {high:+.4g}".replace("-", "−")


def test_details_of_a_regression(sweep: Results) -> None:
    assert _labels(detail_table(sweep)) == ["λ", "Seeds", "MSE", "MSE", "Ambiguity"]  # the table of results has spread
    table = detail_table(sweep, spread=True)
    assert table.caption == "Diversity and squared error"
    assert _labels(table) == ["λ", "Seeds", "MSE", "MSE", "Spread", "Ambiguity"]
    runs = [sweep.scores(run) for run in sweep.finished(sweep.arms[0], 0.0)]
    row = _texts(table)[0]
    assert row[5].startswith(f"{np.mean([run['member_mse'] - run['mse'] for run in runs]):.4g} ±")


def test_the_search_has_every_candidate_and_its_paired_difference(regression_results: Results) -> None:
    table = search_table(regression_results)
    assert table is not None
    rows = {row[0]: row for row in _texts(table)}
    assert list(rows) == ["0", "0.1", "0.2", "0.3 (chosen)", "0.4", "0.5", "0.7", "0.9"]
    zero, half = ([validation_loss(FitSpec(), d, seed) for seed in (0, 1, 2)] for d in (0.0, 0.5))
    assert rows["0.5"][2] == f"{np.mean(half):.4g} ± {float(f'{np.std(half, ddof=1):.2g}'):g}"
    difference = np.subtract(half, zero)
    assert rows["0.5"][3] == f"{difference.mean():+.4g}".replace("-", "−")
    # seven λ share the level: Bonferroni's interval, as scipy has it
    assert len({*GRID, *REFINED}) - 1 == 7
    ends = stats.t.interval(1 - 0.05 / 7, 2, loc=difference.mean(), scale=stats.sem(difference))
    assert rows["0.5"][4] == f"{ends[0]:+.4g} to {ends[1]:+.4g}".replace("-", "−")
    assert rows["0"][3:] == ["–", "–"]
    assert table.sections[0].rows[3][2].strong


def test_a_search_without_zero_or_without_scores(tmp_path: Path, table1_results: Results) -> None:
    candidates = [{"diversity": d, "scores": {"0": 5.0 - d, "1": 6.0}} for d in (0.2, 0.3)]
    table = search_table(read_results(write_fit(tmp_path / "a", FitSpec(search={"candidates": candidates}))))
    assert table is not None
    assert [row[3] for row in _texts(table)] == ["–", "–"]
    failed = FitSpec(search={"candidates": [{"diversity": 0.0, "scores": {"0": None}}]})
    assert search_table(read_results(write_fit(tmp_path / "b", failed))) is None
    assert search_table(table1_results) is None
