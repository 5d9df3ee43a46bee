"""What every command shares: the terminal, exit codes, the device, signals."""

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

console = Console()

# control characters but tab and newline, characters that turn the direction of writing, halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text as a terminal may show it: what would command the terminal is written out.

    Example:
        >>> printable("\\x1b[2Jλ = 3")
        '\\\\x1b[2Jλ = 3'
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """Prints a line."""
    _print(console, text)


def complain(text: str) -> None:
    """Prints a line where errors go."""
    _print(Console(stderr=True), text)


def _print(where: Console, text: str) -> None:
    # soft_wrap: a line stays a line, however narrow the terminal; [brackets] and :colons: are a user's own
    where.print(printable(text), soft_wrap=True, highlight=False, markup=False, emoji=False)


def wide() -> Console:
    """Where a table goes: in a file or a pipe nothing has to fit a screen."""
    return console if console.is_terminal else Console(width=max(console.width, 100))


def check_report() -> None:
    """The packages that draw a report: better missed now than after the training."""
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """For work that a signal may break off at any point: SIGINT or SIGTERM ends the command with a message."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        complain(message)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopper:
    """Says yes after SIGINT or SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.asked
