from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.lab.report.formats import count, duration, join, number, quantity, shorten

SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def _read(text: str) -> float:
    """The number a reader takes a text for."""
    found = re.fullmatch(r"(−?)([\d,.]+)(?: ?×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text)
    assert found, text
    exponent = int(found[3].translate(SUPERSCRIPT)) if found[3] else 0
    return float(f"{'-' if found[1] else ''}{found[2].replace(',', '')}e{exponent}")


@given(st.floats(-1e90, 1e90))
def test_quantities_have_four_significant_digits(value: float) -> None:
    if abs(value) < 1e-290:
        value = 0.0
    assert _read(quantity(value)) == pytest.approx(value, rel=0.6e-3)
    assert len(quantity(value)) <= 14


@given(st.text(max_size=400), st.integers(8, 100))
def test_a_shortened_name_is_short_and_one_line(text: str, most: int) -> None:
    found = shorten(text, most)
    assert 1 <= len(found) <= most
    assert "\n" not in found


def test_numbers() -> None:
    assert (number(0.97981, 4), number(-0.5, 1), number(0.5, 1, signed=True)) == ("0.9798", "−0.5", "+0.5")
    assert (number(-1234567.8, 1), number(0.0, 0), number(-0.4, 0)) == ("−1,234,567.8", "0", "0")
    assert [quantity(x) for x in (38.5912, 0, 1984, -54321.7)] == ["38.59", "0", "1984", "−54,322"]
    assert [quantity(x) for x in (0.00001234, 6.02e23)] == ["1.234×10⁻⁵", "6.02×10²³"]


def test_texts() -> None:
    assert [shorten(text, 9) for text in ("length", "a" * 30 + "z" * 30, " ")] == ["length", "aaaaaa…zz", "(blank)"]
    seconds = (42.4, 90, 150, 7260, 0.345, None)
    assert [duration(value) for value in seconds] == ["42.4 s", "90 s", "2.5 min", "2.02 h", "0.345 s", "–"]
    assert [count(1, "seed"), count(60000, "image"), count(2, "entry", "entries")] == [
        "1 seed", "60,000 images", "2 entries",
    ]  # fmt: skip
    assert [join(["0.1"]), join(["0.1", "0.3"]), join(["0.1", "0.3", "0.5"])] == [
        "0.1",
        "0.1 and 0.3",
        "0.1, 0.3 and 0.5",
    ]
