from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.lab.report.tasks import TASKS, with_derived


def test_each_task_names_numbers_it_has() -> None:
    for task in TASKS.values():
        keys = {*task.required, task.loss, task.score, task.spread, task.alone, *task.ensemble, *task.member}
        keys |= {*task.differences, *task.curves, *task.diversity, task.error, f"member_{task.error}"}
        keys |= {key for group in task.details.values() for key in group}
        assert keys <= set(task.metrics)
        assert {*task.curves, *task.diversity} <= set(task.readings)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_derived_numbers_of_a_regression(mse: float, ambiguity: float) -> None:
    found = with_derived({"mse": mse, "member_mse": mse + ambiguity, "ambiguity": ambiguity})
    assert found["rmse"] ** 2 == pytest.approx(mse)
    assert found["member_rmse"] ** 2 == pytest.approx(mse + ambiguity)
    if mse + ambiguity:
        assert found["averaged"] == pytest.approx(1 - mse / (mse + ambiguity), abs=1e-9)


def test_what_cannot_be_derived_is_left_out() -> None:
    assert with_derived({"mse": -1.0, "member_mse": 0.0, "ambiguity": 0.0}) == {
        "mse": -1.0,
        "member_mse": 0.0,
        "ambiguity": 0.0,
        "member_rmse": 0.0,
    }
