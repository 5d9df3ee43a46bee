"""The search space: bounds, fixed values, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.tuning.test_optuna_search import PLAN, found
from torchace.lab.tuning.optuna_search import DIMENSIONS, SearchSpace


def test_suggestions_stay_within_bounds() -> None:
    space = SearchSpace(
        diversity=(0.1, 0.3), width=4, num_layers=(1, 2), num_members=2, weight_decay=0, batch_size=(8, 9)
    )
    result = found(12, space=space, num_seeds=1, plan=replace(PLAN, epochs=1))
    assert len(result.trials) == 12
    for trial in result.trials:
        assert tuple(trial.params) == DIMENSIONS
        assert 0.1 <= trial.params["diversity"] <= 0.3
        assert trial.params["num_layers"] in (1, 2)
        assert trial.params["batch_size"] in (8, 9)
        assert [trial.params[name] for name in ("width", "num_members", "weight_decay")] == [4, 2, 0]
    assert len({trial.params["diversity"] for trial in result.trials}) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diversity": (0.5, 1.5)}, r"Expected `diversity` .* of at least 0 and at most 1, but got \(0.5, 1.5\)"),
        ({"diversity": (0.5, 0.2)}, "Expected `diversity`"),
        ({"diversity": math.nan}, "Expected `diversity`"),
        ({"width": 0}, "Expected `width` .* whole numbers of at least 1"),
        ({"width": (4.0, 8)}, "Expected `width`"),
        ({"num_members": True}, "Expected `num_members`"),
        ({"num_layers": (1, 2, 3)}, "Expected `num_layers`"),
        ({"learning_rate": 0}, "Expected `learning_rate` above 0"),
        ({"weight_decay": (0, 0.1)}, "Expected `weight_decay` above 0"),
        ({"weight_decay": (1e-3, math.inf)}, "Expected `weight_decay`"),
        ({"batch_size": "8"}, "Expected `batch_size`"),
    ],
)
def test_bad_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchSpace(**options)
