"""Terminal output, exit codes and signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any

import typer
from rich.console import Console

ERROR, USAGE, INTERRUPTED, SOME_FAILED, KEYBOARD = 1, 2, 3, 4, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)

console = Console()

# control characters except tab and newline, bidirectional marks, surrogates
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape terminal control characters.

    Example:
        >>> printable("\x1b[2Jλ = 3")
        '\\x1b[2Jλ = 3'
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_line(text: str, where: Console = console) -> None:
    """Print a line without wrapping and markup."""
    where.print(printable(text), soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_error(text: str) -> None:
    """Print a line to standard error."""
    print_line(text, Console(stderr=True))


def print_table(table: Any) -> None:
    """Print a table; without a terminal, at least 100 characters wide."""
    (console if console.is_terminal else Console(width=max(console.width, 100))).print(table)


def check_report_packages() -> None:
    """Raise before the training if packages of the report are missing."""
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


RESUME = "Interrupted. Everything so far is in {}; repeat the command to resume."


def exit_interrupted(message: str) -> typer.Exit:
    """Print a message and return the exception for an interrupted command."""
    print_error(message)
    return typer.Exit(INTERRUPTED)


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """End the command with a message on SIGINT or SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        raise exit_interrupted(message) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignal:
    """Callable that returns True after SIGINT or SIGTERM; a second signal ends the process."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        """Whether a signal was received."""
        return self.received
