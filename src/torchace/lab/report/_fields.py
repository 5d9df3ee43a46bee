"""Reading values out of parsed JSON, with errors that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 1e100
"""Numbers beyond this are damage: nothing measured is so large, and their squares would overflow."""


class ReportError(ValueError):
    """A result file that is missing, damaged or not one of ours; one sentence that names the file."""


@contextmanager
def extra(package: str) -> Iterator[None]:
    """Turns a failed import of an optional package into one sentence that says what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"The report needs {package}: pip install 'torchace[tool]'.") from error


class Fields:
    """A JSON object whose values are asked for by key and kind.

    Args:
        value: What was parsed; anything but an object is refused.
        where: The name of the file, for the errors.

    Example:
        >>> fields = Fields({"seed": 3, "title": "digits"}, "runs/a.json")
        >>> fields.integer("seed"), fields.text("title"), fields.text("description", "none")
        (3, 'digits', 'none')
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise ReportError(f"Expected an object in {where}, but got {_kind(value)}.")
        self.value: Mapping[str, Any] = value
        self.where = where

    def _take(self, key: str, expected: str, accept: Callable[[Any], bool], default: Any) -> Any:
        value = self.value.get(key)
        if value is None:
            if default is not ...:
                return default
            raise ReportError(f"Expected {expected} under `{key}` in {self.where}, but found nothing.")
        if not accept(value):
            raise ReportError(f"Expected {expected} under `{key}` in {self.where}, but got {_kind(value)}.")
        return value

    def text(self, key: str, default: Any = ...) -> str:
        """A string; `default` where the key is missing or null (without one, an error)."""
        return str(self._take(key, "a string", lambda value: isinstance(value, str), default))

    def integer(self, key: str, default: Any = ...) -> int:
        """An integer of zero or more."""
        return int(self._take(key, "an integer of 0 or more", _is_count, default))

    def flag(self, key: str, default: Any = ...) -> bool:
        """True or false."""
        return bool(self._take(key, "true or false", lambda value: isinstance(value, bool), default))

    def number(self, key: str) -> float:
        """A finite number."""
        return float(self._take(key, "a finite number", is_number, ...))

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None where the key is missing or null."""
        value = self._take(key, "a finite number", is_number, None)
        return None if value is None else float(value)

    def optional_integer(self, key: str) -> int | None:
        """An integer of zero or more, or None where the key is missing or null."""
        value = self._take(key, "an integer of 0 or more", _is_count, None)
        return None if value is None else int(value)

    def items(self, key: str, convert: Callable[[Any], T], expected: str, default: Any = ...) -> tuple[T, ...]:
        """A list, each item converted; a `TypeError` or `ValueError` of `convert` becomes an error of this file."""
        values = self._take(key, expected, lambda value: isinstance(value, list), default)
        try:
            return tuple(convert(value) for value in values)
        except ReportError:
            raise
        except (TypeError, ValueError) as error:
            raise ReportError(f"Expected {expected} under `{key}` in {self.where}.") from error

    def object(self, key: str, default: Any = ...) -> Fields:
        """A nested object."""
        value = self._take(key, "an object", lambda value: isinstance(value, Mapping), default)
        return Fields(value, self.where)

    def plain(self, key: str) -> dict[str, Any]:
        """A nested object as it is, empty where the key is missing or null."""
        return dict(self.object(key, {}).value)


# control characters, characters that turn the direction of writing, halves of surrogate pairs
_HIDDEN = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # what JSON takes as it is
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(value: Any) -> Any:
    """Parsed JSON with every string, keys too, made fit to print on one line: what is unprintable becomes a space.

    Example:
        >>> printable({"a\\n": ["\\ud800", 3, None]})
        {'a ': [' ', 3, None]}
    """
    if isinstance(value, str):
        return _UNPRINTABLE.sub(" ", value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def may_be_unprintable(text: str) -> bool:
    """Whether a JSON text may hold a string that `printable` would change; without a backslash there is no escape."""
    return "\\" in text or _HIDDEN.search(text) is not None


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number (a boolean is none) whose square is finite too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def as_number(value: object) -> float:
    """A finite number, or a `TypeError`."""
    if not is_number(value):
        raise TypeError(value)
    return float(value)  # type: ignore[arg-type]


def as_amount(value: object) -> float:
    """A finite number of zero or more, or a `TypeError`."""
    if not is_number(value) or value < 0:  # type: ignore[operator]
        raise TypeError(value)
    return float(value)  # type: ignore[arg-type]


def as_count(value: object) -> int:
    """An integer of zero or more, or a `TypeError`."""
    if not _is_count(value):
        raise TypeError(value)
    return int(value)  # type: ignore[call-overload]


def as_text(value: object) -> str:
    """A string, or a `TypeError`."""
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _kind(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
