from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.lab.report.artists import drawn, holds
from tests.lab.report.fits import FitSpec, write_fit
from torchace.lab.report import Results, read_results
from torchace.lab.report.search_findings import search_figures, search_table, search_verdict


def _fit(tmp_path: Path, **search: Any) -> Results:
    spec = FitSpec(arms=["search", "model"], arrays=False, search=search)
    spec.chosen = search.get("chosen", 0.3)
    return read_results(write_fit(tmp_path / "fit", spec))


GAIN = {"split": "test", "mean": 120.0, "low": 40.0, "high": 200.0, "seeds": [5, 6, 7], "beyond_noise": True}


def test_the_verdict_is_the_searchs_own(tmp_path: Path) -> None:
    assert search_verdict(_fit(tmp_path, sentence="It pays.", gain=GAIN)) == "It pays."


def test_a_verdict_from_the_numbers(tmp_path: Path) -> None:
    assert search_verdict(_fit(tmp_path, gain=GAIN)) == (
        "On fresh seeds λ=0.3 changes the mean squared error on the test data by −120.0 against λ=0 "
        "(95 % interval −200.0 to −40.0; 3 seeds alone). That is beyond the noise."
    )


def test_a_loss_within_the_noise(tmp_path: Path) -> None:
    gain = {**GAIN, "mean": -3.0, "low": None, "high": None, "seeds": [5], "beyond_noise": False}
    assert search_verdict(_fit(tmp_path, gain=gain)).endswith("by +3.0 against λ=0 (1 seed). That is within the noise.")


def test_verdicts_without_a_gain(tmp_path: Path) -> None:
    assert search_verdict(_fit(tmp_path / "a", gain=None)) == (
        "The validation data picked λ=0.3; its gain was not measured on fresh seeds."
    )
    zero = search_verdict(_fit(tmp_path / "b", gain=None, chosen=0.0))
    assert zero == "The validation data picked λ=0: members that ignore each other."


def test_no_search_has_nothing_to_show(table1_results: Results) -> None:
    assert search_verdict(table1_results) == ""
    assert search_table(table1_results) is None
    assert search_figures(table1_results) == []


def test_a_search_without_a_finished_training(tmp_path: Path) -> None:
    results = _fit(tmp_path, candidates=[{"diversity": 0.0, "scores": {}}])
    assert search_table(results) is None
    assert search_figures(results) == []
    assert search_verdict(results)


def test_the_table_has_every_candidate_and_its_paired_difference(regression_results: Results) -> None:
    table = search_table(regression_results)
    assert table is not None
    rows = {row[0].text: row for row in table.sections[0].rows}
    assert list(rows) == ["0", "0.1", "0.2", "0.3 (chosen)", "0.4", "0.5", "0.7", "0.9"]
    assert [row[1].text for row in rows.values()] == ["1", "1", "2", "1", "2", "1", "1", "1"]
    arm = regression_results.arms[0]
    zero, half = (list(regression_results.values(arm, d, "mse", "validation").values()) for d in (0.0, 0.5))
    assert rows["0.5"][3].text == f"{np.mean(half):,.0f} ± {np.std(half, ddof=1):,.0f}"
    difference = np.subtract(half, zero)
    assert rows["0.5"][4].text == f"{difference.mean():.1f}".replace("-", "−")
    # seven λ share the level: Bonferroni's interval, as scipy has it
    ends = stats.t.interval(1 - 0.05 / 7, 2, loc=difference.mean(), scale=stats.sem(difference))
    assert rows["0.5"][5].text == f"{ends[0]:+.1f} to {ends[1]:+.1f}".replace("-", "−")
    assert [cell.text for cell in rows["0"][4:]] == ["–", "–", "–"]
    assert rows["0.3 (chosen)"][3].strong
    assert not rows["0.5"][3].strong


def test_the_figures_hold_every_seed_the_mean_and_the_choice(regression_results: Results) -> None:
    first, second = search_figures(regression_results)
    arm, search = regression_results.arms[0], regression_results.search
    assert search is not None
    scores = {d: regression_results.values(arm, d, "mse", "validation") for d in sorted(search.scores)}
    figure = drawn(first)
    for seed in (0, 1, 2):
        assert holds(figure, list(scores), [values[seed] for values in scores.values()])
    means = {d: np.mean(list(values.values())) for d, values in scores.items()}
    assert holds(figure, list(means), list(means.values()))
    assert holds(figure, 0.3, means[0.3])  # the ring
    assert holds(figure, [0, 1], [means[0.0]] * 2)  # the level of λ=0, from edge to edge
    assert "Chosen: λ=0.3." in first.alt
    paired = drawn(second)
    difference = [scores[0.7][seed] - scores[0.0][seed] for seed in (0, 1, 2)]
    assert holds(paired, [0.7] * 3, difference)
    assert holds(paired, 0.7, np.mean(difference))
    ends = stats.t.interval(0.95, 2, loc=np.mean(difference), scale=stats.sem(difference))
    assert holds(paired, [0.7] * 2, ends)


def test_without_lambda_zero_there_is_nothing_to_subtract(tmp_path: Path) -> None:
    candidates = [{"diversity": d, "scores": {"0": 5.0 - d, "1": 6.0}} for d in (0.2, 0.3)]
    results = _fit(tmp_path, candidates=candidates)
    [figure] = search_figures(results)
    drawn(figure)
    table = search_table(results)
    assert table is not None
    assert [row[4].text for row in table.sections[0].rows] == ["–", "–"]


@pytest.mark.parametrize("chosen", [0.0, 0.35])
def test_the_choice_may_be_zero_or_untried(tmp_path: Path, chosen: float) -> None:
    for figure in search_figures(_fit(tmp_path, chosen=chosen)):
        drawn(figure)
