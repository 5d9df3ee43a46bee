"""Baselines: their scores by hand, differences paired over rows, and a table on which one of them must win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.lab.cli.command_line import houses, pets, write_table
from torchace.lab.schema.values import ModelComparison
from torchace.lab.tables.baselines import compare_with_baselines
from torchace.lab.tables.table import Table, TableSettings, load_table
from torchace.lab.training.members import MemberPlan
from torchace.nn import Ensemble


def _table(frame: pd.DataFrame, target: str, folder: Path, **settings: Any) -> Table:
    return load_table(write_table(frame, folder / "t.csv"), TableSettings((target,), **settings))


class _Constant(nn.Module):
    """A member that always answers the same."""

    def __init__(self, outputs: list[float]) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.tensor(outputs, dtype=torch.float64))

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return self.outputs.expand(len(raw), -1)


class _Column(nn.Module):
    """A member that predicts multiples of one raw column."""

    def __init__(self, column: int, factor: float | torch.Tensor) -> None:
        super().__init__()
        self.column, self.factor = column, nn.Parameter(torch.as_tensor(factor, dtype=torch.float64))

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return raw[:, [self.column]] * self.factor


def _compare(members: list[nn.Module], table: Table, link: str = "softmax") -> ModelComparison:
    plan = MemberPlan(table.task, num_members=3, hidden=(4,), epochs=3)
    return compare_with_baselines(Ensemble(members, link=link), table, plan)


def test_classification_scores_equal_their_definitions(tmp_path: Path) -> None:
    table = _table(pets(120), "pet", tmp_path)
    comparison = _compare([_Constant([0.0, 0.0, 0.0]), _Constant([2.0, 0.0, 0.0])], table)
    assert comparison.split == "test"
    assert [model.name for model in comparison.models] == ["constant", "linear", "network", "boosting", "ensemble"]
    assert not any(model.failure for model in comparison.models)
    y = table.test.y.numpy()
    probs = (np.full(3, 1 / 3) + np.exp([2, 0, 0]) / np.exp([2, 0, 0]).sum()) / 2
    own = -np.log(probs)[y]
    assert comparison.ensemble.scores["cross_entropy"] == pytest.approx(own.mean())
    assert comparison.ensemble.scores["accuracy"] == pytest.approx((y == 0).mean())
    assert comparison.ensemble.scores["auc"] == pytest.approx(0.5)
    counts = np.bincount(table.train.y.numpy(), minlength=3)
    theirs = -np.log(counts / counts.sum())[y]
    constant = comparison.models[0]
    assert constant.scores["cross_entropy"] == pytest.approx(theirs.mean())
    assert constant.difference == pytest.approx((theirs - own).mean())
    assert constant.low < constant.difference < constant.high  # type: ignore[operator]
    assert [entry.train for entry in comparison.classes] == counts.tolist()
    assert np.array_equal(comparison.confusion, np.bincount(y, minlength=3)[:, None] * [1, 0, 0])
    assert [entry.recall for entry in comparison.classes] == [1, 0, 0]
    assert all(entry.mean == 0 for entry in comparison.importances)  # the answer never changes
    assert comparison.best is not None
    assert comparison.best.name in ("linear", "boosting", "network")


def test_regression_scores_equal_their_definitions_and_importances(tmp_path: Path) -> None:
    frame = houses(200)
    table = _table(frame, "price", tmp_path)
    place = [column.name for column in table.encoding.columns].index("area")
    comparison = _compare([_Column(place, 3000.0), _Column(place, 3400.0)], table, "identity")
    rows = frame.iloc[table.rows["test"].numpy()]
    errors = (rows["price"] - 3200 * rows["area"]).to_numpy()
    scores = comparison.ensemble.scores
    assert scores["rmse"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert scores["mae"] == pytest.approx(np.abs(errors).mean())
    assert comparison.targets[0].residuals["0.5"] == pytest.approx(np.median(errors))
    assert comparison.models[0].scores["r2"] == pytest.approx(0, abs=0.2)  # the mean
    best = comparison.best
    assert best is not None
    assert best.name == "linear"  # prices are linear in area and town, with noise
    assert best.high is not None
    assert best.high < 0
    by_name = {entry.name: entry.mean for entry in comparison.importances}
    assert by_name["area"] > 1e8
    assert by_name["town"] == 0
    assert comparison.importances[0].name == "area"


def test_class_weights_and_a_missing_test_part(tmp_path: Path) -> None:
    frame = pets(120)
    table = _table(frame, "pet", tmp_path, class_weight="balanced", test=0.0)
    assert table.train.weight is not None
    totals = torch.zeros(3, dtype=torch.float64).index_add_(0, table.train.y, table.train.weight)
    assert torch.allclose(totals, totals.mean().expand(3))
    comparison = _compare([_Constant([0.0, 0.0, 0.0])], table)
    assert (comparison.split, comparison.rows) == ("validation", len(table.validation))
    weighted = _table(frame, "pet", tmp_path, class_weight={"dog": 5.0})
    assert weighted.train.weight is not None
    dog = weighted.schema.target.class_names.index("dog")
    for part in (weighted.train, weighted.validation, weighted.test):  # early stopping and the search for λ use them
        assert part.weight is not None
        assert part.weight.tolist() == torch.where(part.y == dog, 5.0, 1.0).tolist()


def test_several_targets_are_scored_in_their_units_and_compared_scaled(tmp_path: Path) -> None:
    frame = houses(200)
    frame["rent"] = frame["price"] / 1000 + frame["area"]
    table = load_table(write_table(frame, tmp_path / "t.csv"), TableSettings(("price", "rent")))
    place = [column.name for column in table.encoding.columns].index("area")
    factors = torch.tensor([3000.0, 4.0])
    comparison = _compare([_Column(place, factors.clone()), _Column(place, factors.clone())], table, "identity")
    rows = frame.iloc[table.rows["test"].numpy()]
    errors = np.stack([rows["price"] - 3000 * rows["area"], rows["rent"] - 4 * rows["area"]], 1)
    scaled = errors / frame[["price", "rent"]].iloc[_training_rows(table, frame)].std(ddof=0).to_numpy()
    assert comparison.ensemble.scores["mse"] == pytest.approx((scaled**2).mean())
    variance = rows[["price", "rent"]].var(ddof=0).to_numpy()
    r2 = 1 - (errors**2).mean(0) / variance
    assert comparison.ensemble.scores["r2"] == pytest.approx(r2.mean())
    assert [target.name for target in comparison.targets] == ["price", "rent"]
    assert [target.scores["r2"] for target in comparison.targets] == pytest.approx(r2.tolist())
    assert [target.scores["mae"] for target in comparison.targets] == pytest.approx(np.abs(errors).mean(0).tolist())
    assert comparison.targets[1].residuals["0.5"] == pytest.approx(np.median(errors[:, 1]))
    assert not [model.failure for model in comparison.models if model.failure]


def _training_rows(table: Table, frame: pd.DataFrame) -> NDArray[np.int64]:
    others = torch.cat([table.rows["test"], table.rows["validation"]]).numpy()
    return np.setdiff1d(np.arange(len(frame)), others)
