"""Reports of sweeps with further axes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab.sweeps.small_sweeps import run
from torchace.lab.report import read_results
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


def test_the_page_shows_every_variant(directory: Path) -> None:
    results = read_results(directory, arrays=False)
    assert not results.damaged
    assert len(results.arms) == 6
    text = markdown(results)
    assert "learning rate 0.03, weight decay 0.01" in text
    assert "shared batches, learning" not in text


def test_findings_name_their_settings(directory: Path) -> None:
    result = SweepResult(directory)
    assert repr(result) == "Sweep of 2 λ, 3 learning rates, 2 weight decays and 4 seeds, 48 runs"
    lines = str(result).split("\n      ")[0].splitlines()[1:]
    assert all(re.match(r"(Learning rate|Weight decay)", line) for line in lines)
    settings = [line.split(": ")[0] for line in lines]
    assert len("; ".join(settings).split("; ")) == 6  # every setting once


def test_figures_of_single_arms_show_the_best_setting(directory: Path) -> None:
    results = read_results(directory)
    assert [arm.settings["learning_rate"] for arm in main_arms(results)] == [0.1]
    titles = [spec.title for spec in figures(results)]
    (reliability,) = (title for title in titles if title.startswith("Reliability"))
    assert re.fullmatch(r"Reliability: learning rate 0\.1, weight decay (0|0\.01)", reliability)
    legend = SweepResult(directory).plot().subfigs[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [arm.label for arm in results.arms]
