"""`plot_diversity`: the values it draws are those of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import torchace as ace
from tests.lab.sweeps.small_sweeps import run


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ace.SweepResult:
    directory = tmp_path_factory.mktemp("sweep")
    run(directory, sweep={"diversities": [0.0, 0.5, 0.9], "seeds": [0, 1, 2]})
    return ace.SweepResult(directory)


def drawn(ax: plt.Axes, label: str) -> list[np.ndarray]:
    return [np.asarray(line.get_xydata()) for line in ax.get_lines() if line.get_label() == label]


def test_means_seeds_and_the_tables_intervals_are_drawn(result: ace.SweepResult) -> None:
    ax, table, frame = ace.plot_diversity(result), result.table(), result.to_frame()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("diversity λ", "Cross entropy")
    assert np.allclose(drawn(ax, "mean"), np.stack([table.index, table.cross_entropy], 1))
    seeds = drawn(ax, "_seed")
    assert len(seeds) == 3
    assert np.allclose(seeds[1][:, 1], frame[frame.seed == 1].cross_entropy)
    level = table.cross_entropy[0.0]
    assert np.allclose(drawn(ax, "_zero")[0][:, 1], level)
    bars = [bar[:, 1] - level for bar in drawn(ax, "_interval")]
    assert np.allclose(bars, table.loc[[0.5, 0.9], ["low", "high"]])


def test_a_frame_draws_intervals_over_seeds_and_a_line_for_each_setting() -> None:
    seeds = [0, 1, 2]
    frame = pd.DataFrame(
        [
            {"learning_rate": rate, "diversity": d, "seed": s, "status": "finished", "accuracy": rate + d / 10 + s / 99}
            for rate in (0.1, 0.2)
            for d in (0.5, 0.0)
            for s in seeds
        ]
    )
    frame.loc[len(frame)] = [0.1, 0.9, 0, "failed", np.nan]
    _, own = plt.subplots()
    ax = ace.plot_diversity(frame, "accuracy", ax=own)
    assert ax is own
    for rate in (0.1, 0.2):
        [line] = drawn(ax, f"learning rate {rate}")
        assert np.allclose(line[:, 1], [rate + 1 / 99, rate + 0.05 + 1 / 99])
    assert drawn(ax, "_interval") == []  # the same difference in every seed: no interval
    without = frame[(frame.diversity == 0.5) & (frame.learning_rate == 0.1)].drop(columns="status")
    [bar] = drawn(ace.plot_diversity(without, "accuracy"), "_interval")
    margin = 4.302653 / 99 / 3**0.5  # t quantile of 2 degrees of freedom
    assert np.allclose(bar[:, 1], 0.15 + 1 / 99 + np.array([-margin, margin]))


def test_unknown_metrics_are_refused(result: ace.SweepResult) -> None:
    with pytest.raises(ValueError, match=r"`metric` to be one of .*'accuracy'.*but got 'f1'"):
        ace.plot_diversity(result, "f1")
    assert plt.get_fignums() == []


def test_a_run_directory_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"SweepResult or a DataFrame.*but got str"):
        ace.plot_diversity(str(tmp_path))  # type: ignore[arg-type]
