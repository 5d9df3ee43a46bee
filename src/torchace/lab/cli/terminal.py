"""Terminal output, exit codes and signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from torchace._extras import import_extra

ERROR, USAGE, INTERRUPTED, SOME_FAILED = 1, 2, 3, 4

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
    """Print a line without wrapping or markup."""
    where.print(printable(text), soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_error(text: str) -> None:
    """Print a line to standard error."""
    print_line(text, Console(stderr=True))


def print_table(table: Any) -> None:
    """Print a table; without a terminal, at least 100 characters wide."""
    (console if console.is_terminal else Console(width=max(console.width, 100))).print(table)


def check_report_packages() -> None:
    """Raise an error before training if a package for the report is missing."""
    for name in ("jinja2", "matplotlib"):
        import_extra(name, "The report needs")


RESUME = "Interrupted. Everything so far is in {}; repeat the command to resume."


def exit_interrupted(message: str) -> typer.Exit:
    """Print a message and return the exception for an interrupted command."""
    print_error(message)
    return typer.Exit(INTERRUPTED)


@contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after SIGINT or SIGTERM; a second signal ends the process."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
