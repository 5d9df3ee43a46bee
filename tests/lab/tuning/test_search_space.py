"""The search space: bounds, fixed values, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.tuning.test_optuna_search import PLAN, SPACE, found


def test_suggestions_stay_within_bounds() -> None:
    space = {
        **SPACE,
        "diversity": (0.1, 0.3),
        "width": (4, 4),
        "num_layers": (1, 2),
        "num_members": (2, 2),
        "batch_size": (8, 9),
    }
    result = found(12, space=space, num_seeds=1, plan=replace(PLAN, epochs=1))
    assert len(result.trials) == 12
    for trial in result.trials:
        assert tuple(trial.params) == tuple(SPACE)
        assert 0.1 <= trial.params["diversity"] <= 0.3
        assert trial.params["num_layers"] in (1, 2)
        assert trial.params["batch_size"] in (8, 9)
        assert [trial.params[name] for name in ("width", "num_members")] == [4, 2]
    assert len({trial.params["diversity"] for trial in result.trials}) == 12


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"diversity": (0.5, 1.5)}, r"Expected `diversity` in \[0, 1\], but got 1.5"),
        ({"diversity": (0.5, 0.2)}, "`low` value must be smaller|low"),
        ({"weight_decay": (0.0, 0.1)}, "low"),
    ],
)
def test_bad_bounds(bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(2, space={**SPACE, **bounds})
