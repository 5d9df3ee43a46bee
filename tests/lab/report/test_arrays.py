from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from torchace.lab.report import ResultFileError, Results
from torchace.lab.report.results import (
    Predictions,
    contested_cases,
    error_vs_spread,
    join_predictions,
    read_arrays,
    reliability,
)


@pytest.mark.parametrize(
    "arrays",
    [
        {"reliability_count": np.zeros(15)},
        {"disagreement_matrix": np.zeros((3, 2))},
        {"disagreement_matrix": np.full((2, 2), np.nan)},
        {"disputed_votes": np.zeros((4, 3)), "disputed_target": np.zeros(5)},
        {"disputed_images": np.zeros((4, 8, 8))},
        {"disputed_images": np.zeros((4, 8, 8, 2), dtype=np.uint8)},
        {"predicted": np.zeros(5)},
        {"predicted": np.zeros((5, 1)), "observed": np.zeros((5, 1)), "spread": np.zeros((5, 1))},
        {"predicted": np.full(5, 1e200), "observed": np.zeros(5), "spread": np.zeros(5)},
        {"predicted": np.zeros(5), "observed": np.zeros(5), "spread": np.full(5, -1.0)},
        {"residual_correlation": np.full((2, 2), np.inf)},
    ],
)
def test_inconsistent_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays, tmp_path / "run.safetensors")
    with pytest.raises(ResultFileError, match=r"runs/run\.safetensors have inconsistent"):
        read_arrays(tmp_path / "run.safetensors")


def test_every_truncation_of_an_array_file_is_refused(table1: Path, tmp_path: Path) -> None:
    whole = (table1 / "runs" / "shared-l0-s0.safetensors").read_bytes()
    path = tmp_path / "run.safetensors"
    for length in [0, 1, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ResultFileError, match=r"runs/run\.safetensors"):
            read_arrays(path)


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_arrays_of_every_precision_are_read(tmp_path: Path, dtype: type) -> None:
    arrays = {key: np.arange(1, 4).astype(dtype) for key in ("predicted", "observed", "spread")}
    save_file({**arrays, "residual_correlation": np.ones((2, 2), dtype=dtype)}, tmp_path / "run.safetensors")
    assert read_arrays(tmp_path / "run.safetensors")["observed"].tolist() == [1, 2, 3]


def test_reliability_adds_the_samples_of_all_runs(table1_results: Results) -> None:
    runs = table1_results.finished(table1_results.arms[0], 0)
    arrays = [table1_results.arrays(run) for run in runs]
    found = reliability(arrays)
    assert found is not None
    count = sum(a["reliability_count"] for a in arrays)
    filled = count > 0
    assert len(found.share) == filled.sum() == 13
    assert found.share.sum() == pytest.approx(1)
    expected = (sum(a["reliability_correct"] for a in arrays) / np.where(filled, count, 1))[filled]
    np.testing.assert_allclose(found.accuracy, expected)
    assert reliability([]) is None
    assert reliability([{}]) is None


def test_votes_of_contested_cases_are_ranked() -> None:
    arrays = {
        "disputed_index": np.array([41]),
        "disputed_target": np.array([2]),
        "disputed_votes": np.array([[3, 1, 3, 2, 1, 3]]),
    }
    [case] = contested_cases(arrays)
    assert (case.position, case.target, case.votes) == (41, 2, ((3, 3), (1, 2), (2, 1)))
    assert contested_cases({}) == []


def test_groups_have_ten_rows_or_there_are_none() -> None:
    def rows(n: int) -> Predictions:
        return Predictions(np.arange(n) * 1.0, np.zeros(n), 1.0 + np.arange(n))

    assert error_vs_spread(rows(19)) is None
    found = error_vs_spread(rows(35))
    assert found is not None
    assert len(found.spread) == 3
    assert (np.diff(found.spread) > 0).all()
    many = error_vs_spread(rows(1000))
    assert many is not None
    assert len(many.error) == 10


def test_rows_of_several_runs_are_joined() -> None:
    run = {key: np.array([1.0, 2.0], dtype=np.float32) for key in ("predicted", "observed", "spread")}
    found = join_predictions([run, {}, run])
    assert found is not None
    assert found.observed.tolist() == [1, 2, 1, 2]
    assert found.observed.dtype == np.float64
    assert join_predictions([{}, {key: np.zeros(0) for key in run}]) is None
