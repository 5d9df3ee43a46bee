from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.lab.report.formats import METRICS, REGRESSION, cut, fitted, number, quantity

SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def _read(text: str) -> float:
    """The number a reader takes a text for."""
    found = re.fullmatch(r"(−?)([\d,.]+)(?: ?×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text)
    assert found, text
    exponent = int(found[3].translate(SUPERSCRIPT)) if found[3] else 0
    return float(f"{'-' if found[1] else ''}{found[2].replace(',', '')}e{exponent}")


sizes = st.floats(-80, 80).map(lambda power: 10.0**power)


@given(sizes)
def test_an_error_of_any_size_is_written_to_four_digits(size: float) -> None:
    metrics = fitted(REGRESSION, {"rmse": [size], "mse": [size * size] if size < 1e40 else [1.0]})
    text = metrics["rmse"].value(size)
    assert _read(text) == pytest.approx(size, rel=0.6e-3)  # half of the fourth digit, at worst of 1.000
    assert len(text) <= 14


@given(st.floats(-1e90, 1e90))
def test_a_quantity_is_read_as_what_it_is(value: float) -> None:
    if abs(value) < 1e-290:
        value = 0.0
    assert _read(quantity(value)) == pytest.approx(value, rel=0.6e-3)
    assert len(quantity(value)) <= 14


def test_numbers_of_one_unit_share_their_power_of_ten() -> None:
    metrics = fitted(REGRESSION, {"rmse": [2.5e8], "spread": [3.1e4], "mse": [6.25e16], "mae": []})
    assert [metrics[key].label for key in ("rmse", "mae", "spread")] == ["RMSE, ×10⁶", "MAE, ×10⁶", "Spread, ×10⁶"]
    assert metrics["spread"].number(3.1e4) == "0.03100"
    assert metrics["mse"].label == "MSE, ×10¹⁵"
    assert metrics["r2"] == REGRESSION["r2"]


def test_usual_sizes_have_no_power_of_ten() -> None:
    metrics = fitted(REGRESSION, {"rmse": [54321.7, 51234.1], "spread": [0.0123]})
    assert metrics["rmse"].value(54321.7) == "54,322"
    assert metrics["spread"].value(0.0123) == "0.01230"


@pytest.mark.parametrize("values", [{}, {"rmse": []}, {"rmse": [0.0, 0.0]}, {"rmse": [1e-310]}])
def test_nothing_measured_or_no_error_at_all(values: dict[str, list[float]]) -> None:
    assert fitted(REGRESSION, values)["rmse"].value(0.0) == "0.000"


def test_classifiers_are_written_as_before() -> None:
    assert fitted(METRICS, {"cross_entropy": [1e9]}) == METRICS


@given(st.text(max_size=400), st.integers(8, 100))
def test_a_cut_name_is_short_and_one_line(text: str, most: int) -> None:
    found = cut(text, most)
    assert 1 <= len(found) <= most
    assert "\n" not in found


def test_numbers_with_many_digits_have_commas() -> None:
    assert (number(-1234567.8, 1), number(0.0, 0), number(-0.4, 0)) == ("−1,234,567.8", "0", "0")
