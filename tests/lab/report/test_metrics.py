from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.lab.report.formats import CLASSIFICATION, REGRESSION, TASKS, add_derived, percentages


def test_each_task_names_numbers_it_has() -> None:
    for task in TASKS.values():
        keys = {task.loss, task.score, task.spread, f"member_{task.loss}", *task.ensemble, *task.member}
        keys |= {*task.differences, *task.diversity}
        keys |= {key for group in task.details.values() for key in group}
        assert keys <= set(task.metrics)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_derived_numbers_of_a_regression(mse: float, ambiguity: float) -> None:
    found = add_derived({"mse": mse, "member_mse": mse + ambiguity})
    assert found["rmse"] ** 2 == pytest.approx(mse)
    assert found["member_rmse"] ** 2 == pytest.approx(mse + ambiguity)


def test_underivable_metrics_are_left_out() -> None:
    assert add_derived({"mse": -1.0, "member_mse": 0.0, "ambiguity": 0.0}) == {
        "mse": -1.0,
        "member_mse": 0.0,
        "ambiguity": 0.0,
        "member_rmse": 0.0,
    }


def test_texts_of_a_metric() -> None:
    error = CLASSIFICATION.metrics["error"]
    assert error.value(0.0643) == "6.43 %"
    assert error.difference(-0.00044) == "−0.044 points"
    rmse = REGRESSION.metrics["rmse"]
    assert (rmse.value(54.2171), rmse.value(54321.7), rmse.difference(-2.951e9)) == ("54.22", "54,322", "−2.951×10⁹")
    assert CLASSIFICATION.metrics["cross_entropy"].interval((-0.0012, 0.0003)) == "−0.00120 to +0.00030"
    assert CLASSIFICATION.metrics["cross_entropy"].interval((-2e-5, -3e-9)) == "−0.00002 to −3×10⁻⁹"
    assert CLASSIFICATION.metrics["error"].interval((0.0, 2e-9)) == "0.000 to +2×10⁻⁷"
    assert percentages([-1e-6, -3e-6, -2e-8], 1.0) == ["−0.000100", "−0.000300", "−0.000002"]
    assert percentages([0.0], 1.0) == ["0.0"]
