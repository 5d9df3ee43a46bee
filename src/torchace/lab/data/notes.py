"""Signs that a column is not what it seems: codes, equal labels in several spellings, units, totals, dates, leaks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace.lab.data.errors import arrow, quote, quote_all, row_number
from torchace.lab.data.parsing import MIN_SHARE, dates, is_category, is_numeric, number_text, texts
from torchace.lab.data.table_schema import Column, Target, feature_numbers

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

CODE_DIGITS = 4  # as many digits in every cell, some with a leading 0, are a code such as a postal code
MIN_SUMMANDS = 10  # other than 0, of a row of totals
MAX_UNITS = 3  # a column with more different texts beside its numbers holds codes
TRUTH_WORDS = {"yes": "true", "y": "true", "1": "true", "no": "false", "n": "false", "0": "false"}
_UNIT = r"^([<>≤≥~≈'’$€£]* ?)[+-]?(?:[0-9]+|[0-9]{1,3}(?:[., '][0-9]{3})+)(?:[.,][0-9]+)?([^0-9]{0,12})$"


def find_code(cells: Series) -> str | None:
    """First cell with a leading 0 if all cells have the same number of digits, at least `CODE_DIGITS`."""
    pc = arrow("pyarrow.compute")
    if is_numeric(cells) or is_category(cells):
        return None
    present = texts(cells).drop_null().unique()
    width = len(present[0].as_py()) if len(present) else 0
    if width < CODE_DIGITS or not pc.all(pc.match_substring_regex(present, f"^[0-9]{{{width}}}$")).as_py():
        return None
    return next(iter(present.filter(pc.starts_with(present, "0")).to_pylist()), None)


def find_unit(labels: Any) -> str | None:
    """First label with text beside its number, such as `12 kg` or `<0.5`, if nearly all labels are like that."""
    pc = arrow("pyarrow.compute")
    matched = labels.filter(pc.match_substring_regex(labels, _UNIT))
    units = pc.replace_substring_regex(matched, _UNIT, r"\1\2")
    if len(matched) < MIN_SHARE * len(labels) or len(units.unique()) > MAX_UNITS:
        return None
    return next(iter(matched.filter(pc.not_equal(units, "")).to_pylist()), None)


def note_spellings(what: str, labels: Any, notes: list[str]) -> None:
    """Add a note if some labels are the same but for case, spaces or Unicode form, or are truth values."""
    forms = {label: _common_form(label) for label in sorted(labels.to_pylist())}
    truth = {form: TRUTH_WORDS.get(form, form) for form in forms.values()}
    if set(truth.values()) == {"true", "false"}:
        forms = {label: truth[form] for label, form in forms.items()}
    alike: dict[str, list[str]] = {}
    for label, form in forms.items():
        alike.setdefault(form, []).append(label)
    if several := next((found for found in alike.values() if len(found) > 1), None):
        notes.append(f"{what} has labels that seem to be the same: {quote_all(several)}; they are kept apart.")


def _common_form(label: str) -> str:
    visible = "".join(character for character in label if unicodedata.category(character) != "Cf")
    return " ".join(unicodedata.normalize("NFKC", visible).casefold().split())


def settle_dates(frame: DataFrame, columns: Sequence[Column], notes: list[str]) -> tuple[Column, ...]:
    """Read dates that may have the day or the month first, such as 1/2/2020, as the other columns suggest."""
    swapped: dict[str, Column] = {}
    for column in columns:
        format = re.sub("^%([dm])([/-])%([dm])", r"%\3\2%\1", column.format)
        if column.kind == "date" and format != column.format:
            swapped[column.name] = replace(column, format=format)
    orders, open_columns = set(), []
    for column in columns:
        if column.name in swapped:
            cells = frame[column.name]
            if np.array_equal(dates(cells, column.format)[1], dates(cells, swapped[column.name].format)[1]):
                open_columns.append(column)
            else:
                orders.add(column.format[:2])
    if orders == {"%m"}:
        return tuple(swapped[column.name] if column in open_columns else column for column in columns)
    if orders != {"%d"}:
        notes += [
            f"Column {quote(column.name)} has dates that may have the day or the month first; they are read like "
            f"{column.format}. Write the year first if that is wrong."
            for column in open_columns
        ]
    return tuple(columns)


def note_numbers(frame: DataFrame, columns: Sequence[Column], notes: list[str]) -> None:
    """Add notes about marks of missing values such as -999, and about a last row that is the sum of the others."""
    sums: list[str] = []
    for column in columns:
        if column.kind != "number":
            continue
        values = np.nan_to_num(feature_numbers(frame[column.name], column))
        last, present = values[-1], values[:-1][values[:-1] != 0]
        with np.errstate(over="ignore"):
            is_sum = len(present) >= MIN_SUMMANDS and np.isclose(present.sum(), last, rtol=1e-6)
        if is_sum and last > present.max():
            sums.append(column.name)
        mark = float(values[np.abs(values).argmax()])
        others = values[values != mark]
        is_far = np.abs(others).max(initial=0) < abs(mark) / 3 and 0 < len(others) < len(values) - 1
        if is_far and re.fullmatch("-?999+", number_text(mark)):
            notes.append(
                f"Column {quote(column.name)} is {number_text(mark)} in {len(values) - len(others)} rows, far from its "
                "other values; leave these cells empty if it stands for a missing value."
            )
    if sums:
        row = row_number(frame, len(frame) - 1)
        notes.append(f"Row {row} seems to hold totals: its {quote(sums[0])} is the sum of all others; remove it.")


def note_leaks(frame: DataFrame, columns: Sequence[Column], target: Target, notes: list[str]) -> None:
    """Add a note for each column that is a copy of the target, or has one value for each class."""
    for column in columns:
        if target.classes:
            pairs = (part[[column.name, target.name]].drop_duplicates() for part in (frame[:1000], frame))
            is_copy = all(len(found) == found[column.name].nunique() == found[target.name].nunique() for found in pairs)
        else:
            quantity = Column(target.names[0], "number", target.formats[0])
            values = feature_numbers(frame[quantity.name], quantity)
            is_copy = column.kind == "number" and np.array_equal(feature_numbers(frame[column.name], column), values)
        if is_copy:
            notes.append(
                f"Column {quote(column.name)} determines the target {quote(target.name)}; leave it out if it is not "
                "known before predicting."
            )
