"""CV+ against its definition, and the coverage of the regressor's intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchace.lab.estimator import intervals
from torchace.lab.estimator.intervals import cv_plus_interval, residuals_by_fold
from torchace.sklearn import NCLRegressor


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("values", [10, 1 << 22])  # in several chunks, and in one
def test_the_definition(coverage: float, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "CHUNK_VALUES", values)
    draw = np.random.default_rng(0)
    predictions = [draw.normal(size=(7, 2)) for _ in range(3)]
    residuals = [np.abs(draw.normal(size=(n, 2))) for n in (20, 0, 31)]
    limits = cv_plus_interval(predictions, residuals, coverage)
    rank = int(np.floor((1 - coverage) * 52))
    for row in range(7):
        for target in range(2):
            low = sorted(
                p[row, target] - r for p, rs in zip(predictions, residuals, strict=True) for r in rs[:, target]
            )
            high = sorted(
                p[row, target] + r for p, rs in zip(predictions, residuals, strict=True) for r in rs[:, target]
            )
            expected = (low[rank - 1], high[51 - rank]) if rank else (-np.inf, np.inf)
            assert limits[row, target].tolist() == sorted(expected)


def test_residuals_are_sorted_by_fold_and_thinned() -> None:
    draw = np.random.default_rng(0)
    residuals, folds = np.abs(draw.normal(size=(5000, 1))), np.arange(5000) % 2
    even, odd, *empty = residuals_by_fold(residuals, folds)
    assert list(map(len, [even, odd, *empty])) == [1000, 1000, 0, 0, 0]
    whole = np.sort(residuals[::2], axis=0)
    assert (even[0], even[-1]) == (whole[0], whole[-1])
    assert np.allclose(np.quantile(even, [0.25, 0.5, 0.9]), np.quantile(whole, [0.25, 0.5, 0.9]), atol=0.01)


def test_weights_count_as_repeated_residuals() -> None:
    draw = np.random.default_rng(0)
    residuals, folds, weight = np.abs(draw.normal(size=(60, 2))), np.arange(60) % 5, draw.integers(1, 4, 60)
    again = np.repeat(np.arange(60), weight)
    repeated = residuals_by_fold(residuals[again], folds[again])
    found = residuals_by_fold(residuals, folds, weight * 0.1)  # on any scale
    assert sum(map(len, found)) == pytest.approx(60, abs=1)
    for few, many in zip(found, repeated, strict=True):
        places = np.ceil(len(many) * np.linspace(1 / len(few), 1, len(few)) - 1e-6).astype(int) - 1
        np.testing.assert_array_equal(few, many[places])


def _noisy(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(rows, 3))
    return X, 50 + 20 * X[:, 0] + 10 * np.sin(3 * X[:, 1]) + 5 * draw.normal(size=rows)


@pytest.fixture(scope="module")
def regressor() -> NCLRegressor:
    return NCLRegressor(num_members=5, hidden=(16,), epochs=40, random_state=0).fit(*_noisy(400, 0))


def test_a_hold_out_gives_one_set_of_residuals() -> None:
    residuals = np.abs(np.random.default_rng(0).normal(size=(40, 2)))
    (found,) = residuals_by_fold(residuals, None)
    np.testing.assert_array_equal(found, np.sort(residuals, axis=0))
    limits = cv_plus_interval([np.zeros((1, 2))], [found], 0.9)  # the 37th of 41: split conformal
    np.testing.assert_allclose(limits[0], np.stack([-found[36], found[36]], 1))


@pytest.mark.parametrize("coverage", [0.5, 0.9])
@pytest.mark.parametrize("options", [{}, {"diversity": 0.3}, {"early_stopping": True}, {"members": "shared"}], ids=str)
def test_coverage_of_new_targets(options: dict[str, Any], coverage: float) -> None:
    """4,000 new targets: a share has a standard deviation of 0.008, and one of 400 residuals another 0.025.

    A hold-out has 80 residuals: 0.056.
    """
    regressor = NCLRegressor(num_members=5, hidden=(16,), epochs=40, random_state=0, **options).fit(*_noisy(400, 0))
    X, y = _noisy(4000, 1)
    low, high = regressor.predict_interval(X, coverage).T
    inside = ((low <= y) & (y <= high)).mean()
    slack = 0.17 if options else 0.075  # three standard deviations
    assert coverage - slack < inside < coverage + slack + 0.025  # CV+ tends to be wide
    assert (high > low).all()


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**600])
@pytest.mark.parametrize("early_stopping", ["folds", True])
def test_intervals_in_other_units(scale: float, early_stopping: Any) -> None:
    """The squares of these errors under- and overflow."""
    X, y = _noisy(300, 0)
    model = NCLRegressor(num_members=3, hidden=(4,), epochs=5, early_stopping=early_stopping, random_state=0)
    limits = model.fit(X, y).predict_interval(X, 0.8)
    np.testing.assert_allclose(model.fit(X, scale * y).predict_interval(X, 0.8), scale * limits, rtol=1e-9)


def test_the_standard_deviation_includes_the_noise(regressor: NCLRegressor) -> None:
    X, y = _noisy(4000, 1)
    mean, std = regressor.predict(X, return_std=True)
    assert np.array_equal(mean, regressor.predict(X))
    error = np.sqrt(np.mean(np.square(y - mean)))
    assert 0.8 * error < np.sqrt(np.mean(np.square(std))) < 1.5 * error
    spread = regressor.predict_uncertainty(X)["spread"]
    assert np.allclose(np.square(std) - np.square(spread), (np.square(std) - np.square(spread))[0])


def test_saved_models_have_the_same_intervals(regressor: NCLRegressor, tmp_path: Any) -> None:
    X, _ = _noisy(20, 2)
    regressor.save(tmp_path / "m")
    loaded = NCLRegressor.load(tmp_path / "m")
    assert np.array_equal(loaded.predict_interval(X), regressor.predict_interval(X))
    assert np.array_equal(loaded.predict(X, return_std=True)[1], regressor.predict(X, return_std=True)[1])


def test_several_targets() -> None:
    X, y = _noisy(300, 0)
    targets = np.stack([y, 1e3 * y], 1)
    fitted = NCLRegressor(num_members=5, hidden=(8,), epochs=10, random_state=0).fit(X, targets)
    limits = fitted.predict_interval(X, 0.8)
    assert limits.shape == (300, 2, 2)
    inside = ((limits[..., 0] <= targets) & (targets <= limits[..., 1])).mean(0)
    assert (inside > 0.7).all()
    held_out = NCLRegressor(num_members=5, hidden=(8,), epochs=10, early_stopping=True, random_state=0).fit(X, targets)
    for model in (fitted, held_out):
        std = model.predict(X, return_std=True)[1]
        assert std.shape == (300, 2)
        error = np.sqrt(np.square(model.predict(X) - targets).mean(0))
        assert ((0.7 * error < std.mean(0)) & (std.mean(0) < 2 * error)).all()  # each in its units


def test_missing_packages_are_named(regressor: NCLRegressor) -> None:
    X, y = _noisy(40, 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        regressor.predict_interval(X, 90)
    with pytest.raises(ValueError, match=r"between 0 and 1, but got '0\.9'"):
        regressor.predict_interval(X, "0.9")  # type: ignore[arg-type]
    tensor: Any = torch.tensor(0.9, dtype=torch.float64)
    np.testing.assert_array_equal(regressor.predict_interval(X, tensor), regressor.predict_interval(X, 0.9))
    all_used = NCLRegressor(num_members=2, hidden=(4,), epochs=2, early_stopping=False, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match="early_stopping='folds'"):
        all_used.predict_interval(X)
    with pytest.raises(ValueError, match="early_stopping='folds'"):
        all_used.predict(X, return_std=True)
