from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.lab.report.metrics import CLASSIFICATION, REGRESSION, TASKS, add_derived, choose_units


def test_each_task_names_numbers_it_has() -> None:
    for task in TASKS.values():
        keys = {task.loss, task.score, task.spread, f"member_{task.loss}", *task.ensemble, *task.member}
        keys |= {*task.differences, *task.curves, *task.diversity}
        keys |= {key for group in task.details.values() for key in group}
        assert keys <= set(task.metrics)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_derived_numbers_of_a_regression(mse: float, ambiguity: float) -> None:
    found = add_derived({"mse": mse, "member_mse": mse + ambiguity})
    assert found["rmse"] ** 2 == pytest.approx(mse)
    assert found["member_rmse"] ** 2 == pytest.approx(mse + ambiguity)


def test_units_follow_the_size_of_the_errors() -> None:
    assert choose_units(REGRESSION.metrics, {"rmse": [54.2171]})["rmse"].value(54.2171) == "54.22"
    mse = choose_units(REGRESSION.metrics, {"mse": [2.951e9]})["mse"]
    assert (mse.label, mse.number(2.951e9)) == ("MSE, ×10⁹", "2.951")


def test_underivable_metrics_are_left_out() -> None:
    assert add_derived({"mse": -1.0, "member_mse": 0.0, "ambiguity": 0.0}) == {
        "mse": -1.0,
        "member_mse": 0.0,
        "ambiguity": 0.0,
        "member_rmse": 0.0,
    }


def test_numbers_of_one_unit_share_their_power_of_ten() -> None:
    metrics = choose_units(REGRESSION.metrics, {"rmse": [2.5e8], "spread": [3.1e4], "mse": [6.25e16], "mae": []})
    assert [metrics[key].label for key in ("rmse", "mae", "spread")] == ["RMSE, ×10⁶", "MAE, ×10⁶", "Spread, ×10⁶"]
    assert metrics["spread"].number(3.1e4) == "0.03100"
    assert metrics["mse"].label == "MSE, ×10¹⁵"
    assert metrics["r2"] == REGRESSION.metrics["r2"]


def test_usual_sizes_have_no_power_of_ten() -> None:
    metrics = choose_units(REGRESSION.metrics, {"rmse": [54321.7, 51234.1], "spread": [0.0123]})
    assert metrics["rmse"].value(54321.7) == "54,322"
    assert metrics["spread"].value(0.0123) == "0.01230"


@pytest.mark.parametrize("values", [{}, {"rmse": []}, {"rmse": [0.0, 0.0]}, {"rmse": [1e-310]}])
def test_derived_metrics_without_values_or_with_zero_error(values: dict[str, list[float]]) -> None:
    assert choose_units(REGRESSION.metrics, values)["rmse"].value(0.0) == "0.000"


def test_classifiers_are_written_as_before() -> None:
    assert choose_units(CLASSIFICATION.metrics, {"cross_entropy": [1e9]}) == CLASSIFICATION.metrics


def test_texts_of_a_metric() -> None:
    error = CLASSIFICATION.metrics["error"]
    assert error.value(0.0643) == "6.43 %"
    assert error.difference(-0.00044) == "−0.044 points"
    assert CLASSIFICATION.metrics["cross_entropy"].interval((-0.0012, 0.0003)) == "−0.00120 to +0.00030"
