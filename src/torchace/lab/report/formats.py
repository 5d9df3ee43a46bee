"""Format numbers, names and lists."""

from __future__ import annotations

import math
from collections.abc import Sequence

NONE = "–"  # not measured


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """Format with fixed decimals and a true minus sign; zero has no sign."""
    text = f"{abs(value):,.{digits}f}"
    if not text.strip("0."):
        return text
    return f"−{text}" if value < 0 else f"+{text}" if signed else text


def percentages(values: Sequence[float], whole: float) -> list[str]:
    """Format values as signed percentages of a whole, with decimals enough that none is rounded to zero."""
    shares = [100 * value / whole if whole else 0.0 for value in values]
    digits = next((n for n in (1, 2, 3) if all(round(share, n) for share in shares)), 4)
    return [number(share, digits, signed=True) for share in shares]


def quantity(value: float, *, signed: bool = False) -> str:
    """Format to four significant digits."""
    exponent = math.floor(math.log10(abs(value))) if abs(value) > 1e-300 else 0  # smaller: the inverse may overflow
    superscript = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    power = "" if -4 <= exponent <= 6 else f"×10{superscript}"
    scaled, digits = (value / 10.0**exponent, 3) if power else (value, max(0, 3 - exponent))
    text = number(scaled, digits, signed=signed)
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return (text if exponent > 3 else text.replace(",", "")) + power  # a year has no comma


def shorten(text: str, width: int) -> str:
    """Shorten to `width` characters, cut in the middle."""
    text = " ".join(text.split()) or "(blank)"
    tail = width // 4
    return text if len(text) <= width else f"{text[: width - tail - 1]}…{text[-tail:]}"


def diversity(value: float) -> str:
    """Format λ to six digits."""
    return f"{value:.6g}"


def at(value: float) -> str:
    """Format λ as `λ=0.3`."""
    return f"λ={diversity(value)}"


def duration(seconds: float | None) -> str:
    """Format in hours, minutes or seconds."""
    if seconds is None:
        return NONE
    size, unit = next((part for part in ((3600, "h"), (60, "min")) if seconds >= 2 * part[0]), (1, "s"))
    return f"{seconds / size:.3g} {unit}"


def count(value: int, noun: str, plural: str = "") -> str:
    """Format a count: `1 seed`, `60,000 images`."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def join(items: Sequence[str]) -> str:
    """Join items: `0.1, 0.3 and 0.5`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capitalize(text: str) -> str:
    """Capitalize the first letter only."""
    return text[:1].upper() + text[1:]
