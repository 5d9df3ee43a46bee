"""Encoding of a table, cell by cell and in exact fractions: slow and simple."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

WORDS_FOR_MISSING = {"", "na", "n/a", "nan", "null", "none", "<na>", "#n/a"}


def is_missing(cell: str) -> bool:
    return cell.strip().lower() in WORDS_FOR_MISSING


def number_features(train: Sequence[str], rows: Sequence[str]) -> list[list[float]]:
    """Features of a column of numbers, one list for each: scaled, and missing if the training part had missing ones."""
    known = [Fraction(float(cell)) for cell in train if not is_missing(cell)]
    some_missing = 0 < len(known) < len(train)
    features = []
    if len(set(known)) > 1:
        mean = sum(known) / len(known)
        std = exact_root(sum((value - mean) ** 2 for value in known) / len(known))
        features.append(
            [0.0 if is_missing(cell) else float((Fraction(float(cell)) - mean) / Fraction(std)) for cell in rows]
        )
    if some_missing:
        features.append([float(is_missing(cell)) for cell in rows])
    return features


def category_features(train: Sequence[str], rows: Sequence[str], limit: int) -> list[list[float]]:
    """Features of a column of categories, one list for each: the known ones, all others, missing."""
    counts = Counter(cell.strip() for cell in train if not is_missing(cell))
    known = sorted(sorted(counts, key=lambda cell: (-counts[cell], cell))[:limit])
    some_other, some_missing = len(counts) > limit, any(map(is_missing, train))
    if len(known) + some_other + some_missing < 2:
        return []
    features = [[float(not is_missing(cell) and cell.strip() == category) for cell in rows] for category in known]

    def is_other(cell: str) -> bool:
        return not some_missing if is_missing(cell) else cell.strip() not in known

    if some_other:
        features.append([float(is_other(cell)) for cell in rows])
    if some_missing:
        features.append([float(is_missing(cell)) for cell in rows])
    return features


def exact_root(value: Fraction) -> float:
    """A square root to the last bit or so, of fractions beyond float64 too."""
    shift = 2 * ((value.denominator.bit_length() - value.numerator.bit_length()) // 2 + 64)
    scaled = value * Fraction(2) ** shift
    return float(Fraction(math.isqrt(scaled.numerator // scaled.denominator)) / Fraction(2) ** (shift // 2))
