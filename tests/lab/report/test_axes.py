"""The report compares along each axis of a sweep."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.lab.sweeps.small_sweeps import run
from torchace.lab.report import read_results
from torchace.lab.report.gains import axis_findings, axis_tables, compare_axes
from torchace.lab.report.page import figures, markdown
from torchace.lab.report.tables import main_arms
from torchace.lab.sweeps.result import SweepResult


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    run(
        folder,
        train={"learning_rate": [0.003, 0.03, 0.1], "weight_decay": [0.0, 0.01]},
        sweep={"seeds": [0, 1, 2, 3]},
        data={"validation": 0.25},
    )
    return folder


def test_frames_have_the_settings(directory: Path) -> None:
    result = SweepResult(directory)
    frame = result.to_frame()
    assert len(frame) == 48
    assert not frame.duplicated(["learning_rate", "weight_decay", "diversity", "seed"]).any()
    assert "arm" not in frame
    table = result.table()
    assert table.index.names == ["learning_rate", "weight_decay", "diversity"]
    own = frame[(frame.learning_rate == 0.03) & (frame.weight_decay == 0.01) & (frame.diversity == 0.5)]
    assert table.loc[(0.03, 0.01, 0.5)].cross_entropy == pytest.approx(own.cross_entropy.mean())
    best = result.best()
    means = frame.groupby(["learning_rate", "weight_decay", "diversity"]).validation_cross_entropy.mean()
    key = (best.learning_rate, best.weight_decay, best.diversity)
    assert best.validation_cross_entropy == pytest.approx(means[key])
    assert best.learning_rate == 0.1  # 12 steps: the largest rate is far ahead
    assert best.cross_entropy == pytest.approx(table.loc[key].cross_entropy)


def test_differences_are_paired_by_seed_diversity_and_other_settings(directory: Path) -> None:
    frame, results = SweepResult(directory).to_frame(), read_results(directory)
    rates, decays = compare_axes(results, "cross_entropy")
    assert (rates.axis, rates.reference, decays.axis) == ("learning_rate", 0.003, "weight_decay")
    wide = frame.pivot(index="seed", columns=["learning_rate", "weight_decay", "diversity"], values="cross_entropy")
    for rate in (0.03, 0.1):
        by_seed = (wide[rate] - wide[0.003]).mean(axis=1)
        found = rates.at(rate)
        assert found is not None
        assert found.mean == pytest.approx(by_seed.mean())
        assert found.tests == 2
        assert found.estimate is not None
        assert found.estimate.error == pytest.approx(by_seed.std() / math.sqrt(4))
        assert found.significant
    text = axis_findings(results)[0].text
    assert text.startswith("0.1 lowers cross entropy by ")
    assert text.endswith(" compared with 0.003, averaged over λ.")
    (table,) = axis_tables(results)
    assert [section.title for section in table.sections] == [
        "Learning rate against 0.003",
        "Weight decay against 0",
    ]
    assert [row[0].text for row in table.sections[0].rows] == ["0.03", "0.1"]


def test_the_page_shows_every_variant(directory: Path) -> None:
    results = read_results(directory, arrays=False)
    assert not results.damaged
    assert len(results.arms) == 6
    text = markdown(results)
    assert "learning rate 0.03, weight decay 0.01" in text
    assert "shared batches, learning" not in text
    assert "Other settings: each value against the first" in text


def test_findings_name_their_settings(directory: Path) -> None:
    result = SweepResult(directory)
    assert repr(result) == "Sweep of 2 λ, 3 learning rates, 2 weight decays and 4 seeds, 48 runs"
    lines = str(result).split("\n      ")[0].splitlines()[1:]
    assert all(re.match(r"(Learning rate|Weight decay)", line) for line in lines)
    settings = [line.split(": ")[0] for line in lines[:-2]]
    assert len("; ".join(settings).split("; ")) == 6  # every setting once
    assert lines[-2].startswith("Learning rate: 0.1 lowers cross entropy by ")


def test_figures_of_single_arms_show_the_best_setting(directory: Path) -> None:
    results = read_results(directory)
    assert [arm.settings["learning_rate"] for arm in main_arms(results)] == [0.1]
    titles = [spec.title for spec in figures(results)]
    (reliability,) = (title for title in titles if title.startswith("Reliability"))
    assert re.fullmatch(r"Reliability: learning rate 0\.1, weight decay (0|0\.01)", reliability)
    legend = SweepResult(directory).plot().subfigs[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [arm.label for arm in results.arms]


def test_sweeps_without_axes_have_no_such_table(tmp_path: Path) -> None:
    run(tmp_path)
    assert axis_tables(read_results(tmp_path)) == []
    assert axis_findings(read_results(tmp_path)) == []
    with pytest.raises(ValueError, match=r"Expected no settings to identify the run"):
        SweepResult(tmp_path).ensemble(0.0, 0, learning_rate=0.1)
